"""select_is_where: a selection written as arithmetic. known_compress: a selection of known slices."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.sort import CompressAttrs
from optdnn.passes.canonicalize import Canonicalize
from optdnn.types import FP32

CANON = Canonicalize()
LOWER = np.tril(np.ones((4, 4)))


def number(n: Net, condition: Value) -> Value:
    return n.op("Cast", condition, attrs=CastAttrs(FP32))


@pytest.mark.parametrize("negated", [False, True])
def test_a_cast_mask_and_its_complement(negated: bool) -> None:
    n = Net()
    x, condition = n.input(3, 4), n.op("Greater", n.input(3, 1, name="m"), 0.0)
    other = n.op("Not", condition)
    first, second = (other, condition) if negated else (condition, other)
    y = n.op("Add", n.op("Mul", number(n, first), x), n.op("Mul", n.const(-3.0), number(n, second)))
    kinds = {"Greater": 1, "Where": 1} | ({"Not": 1} if negated else {})
    check_pass(CANON, n.done(y), changes=1, kinds=kinds, rules={"select_is_where": 1})


def test_a_constant_mask_that_hides_behind_one_number() -> None:
    n = Net()
    y = n.op("Add", n.op("Mul", n.const(LOWER), n.input(2, 4, 4)), n.const((1 - LOWER) * -3.0))
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Where": 1})
    (where,) = graph.of_kind("Where")
    assert np.array_equal(graph.constant_value(where.inputs[0]), LOWER > 0)
    assert float(graph.constant_value(where.inputs[2])) == np.float32(-3.0)


@pytest.mark.parametrize(
    ("mask", "low"),
    [
        (LOWER * 0.5, (1 - LOWER) * -3.0),  # no mask
        (LOWER, LOWER * 3.0),  # not its complement
        (LOWER, (1 - LOWER) * np.arange(1.0, 5.0)),  # several numbers
    ],
    ids=["weights", "overlap", "numbers"],
)
def test_other_sums_of_products_stay(mask: np.ndarray, low: np.ndarray) -> None:  # type: ignore[type-arg]
    n = Net()
    check_untouched(CANON, n.done(n.op("Add", n.op("Mul", n.input(2, 4, 4), n.const(mask)), n.const(low))))


def test_masks_of_two_conditions_are_no_choice() -> None:
    n = Net()
    a, b = (n.op("Greater", n.input(3, 4, name=name), 0.0) for name in "ab")
    y = n.op(
        "Add", n.op("Mul", number(n, a), n.input(3, 4, name="x")), n.op("Mul", number(n, n.op("Not", b)), n.const(2.0))
    )
    check_untouched(CANON, n.done(y))


def test_a_mask_that_enlarges_is_refused() -> None:
    n = Net()
    y = n.op("Add", n.op("Mul", n.const(LOWER), n.input(1, 4)), n.const((1 - LOWER) * -3.0))
    check_refused(CANON, n.done(y), because="the mask enlarges")


@pytest.mark.parametrize(("axis", "shape"), [(1, (3, 2, 2)), (-1, (3, 4, 2)), (None, (2,))])
def test_slices_that_a_constant_selects_are_gathered(axis: int | None, shape: tuple[int, ...]) -> None:
    n = Net()
    mask = n.const(np.array([False, True, False, True] if axis == 1 else [True, True]), bool)
    y = n.op("Compress", n.input(3, 4, 2), mask, attrs=CompressAttrs(axis))
    kinds = {"Gather": 1, "Reshape": 1} if axis is None else {"Gather": 1}
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds=kinds, rules={"known_compress": 1})
    assert graph.type(graph.of_kind("Gather")[0].value).shape == shape


def test_slices_that_data_selects_stay() -> None:
    n = Net()
    mask = n.op("Greater", n.input(4, name="m"), 0.0)
    check_untouched(CANON, n.done(n.op("Compress", n.input(3, 4), mask, attrs=CompressAttrs(1))))
