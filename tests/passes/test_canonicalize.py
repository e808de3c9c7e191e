"""canonicalize: no-ops and reshapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import DimLike, symbol
from optdnn.ops.base import Attrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, CumulativeAttrs, PadAttrs, SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.canonicalize import Canonicalize
from optdnn.types import FP16, FP32, FP64, INT64

CANON = Canonicalize()


def shape_of(*dims: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(dims, np.int64)


# ---------------------------------------------------------------- no-ops

NO_OPS: dict[str, tuple[str, tuple[Any, ...], Attrs | None]] = {
    "Identity": ("Identity", (), None),
    "Cast to the same type": ("Cast", (), CastAttrs(FP32)),
    "Reshape to the same shape": ("Reshape", (shape_of(0, 4, -1, 6),), None),
    "Expand to the same shape": ("Expand", (shape_of(1, 1, 6, 6),), None),
    "Tile once": ("Tile", (shape_of(1, 1, 1, 1),), None),
    "Transpose by the identity": ("Transpose", (), TransposeAttrs((0, 1, 2, 3))),
    "Pad by nothing": ("Pad", (shape_of(0, 0, 0, 0, 0, 0, 0, 0),), None),
    "Slice of everything": ("Slice", (shape_of(0), shape_of(1 << 40), shape_of(2)), None),
    "Concat of one": ("Concat", (), ConcatAttrs(1)),
    "Sum of one": ("Sum", (), None),
    "Max of one": ("Max", (), None),
    "Split into one": ("Split", (), SplitAttrs(1, 1)),
    "Split into one of a size": ("Split", (shape_of(4),), SplitAttrs(1)),
    "MaxPool over points": ("MaxPool", (), MaxPoolAttrs((1, 1), (1, 1), (0,) * 4, (1, 1))),
    "Resize by one": ("Resize", (None, np.ones(4)), ResizeAttrs(mode="linear")),
    "Mul by one": ("Mul", (1.0,), None),
    "Div by ones": ("Div", (np.ones((4, 1, 1)),), None),
    "Pow of one": ("Pow", (1.0,), None),
    "Add of zero": ("Add", (np.zeros((1, 4, 1, 1)),), None),
    "Sub of zero": ("Sub", (0.0,), None),
    "Clip without bounds": ("Clip", (), None),
    "ReduceSum over nothing": ("ReduceSum", (), ReduceAttrs(noop_with_empty_axes=True)),
}


@pytest.mark.parametrize("case", NO_OPS.values(), ids=NO_OPS.keys())
def test_no_op(case: tuple[str, tuple[Any, ...], Attrs | None]) -> None:
    kind, more, attrs = case
    n = Net()
    x = n.op("Exp", n.input(2, 4, 6, 6))
    graph, _ = check_pass(
        CANON, n.done(n.op(kind, x, *more, attrs=attrs)), changes=1, kinds={"Exp": 1}, rules={"no_op": 1}
    )
    assert graph.of_kind("Exp")[0].src == {"Exp_1", f"{kind}_2"}


OPS: dict[str, tuple[str, tuple[Any, ...], Attrs | None]] = {
    "Cast to another type": ("Cast", (), CastAttrs(FP64)),
    "Reshape": ("Reshape", (shape_of(2, 6, 4, 6),), None),
    "Expand that adds an axis": ("Expand", (shape_of(1, 2, 4, 6, 6),), None),
    "Pad that shifts": ("Pad", (shape_of(0, 0, 1, 0, 0, 0, -1, 0),), None),
    "Slice backwards": ("Slice", (shape_of(-1), shape_of(-(1 << 40)), shape_of(2), shape_of(-1)), None),
    "Slice": ("Slice", (shape_of(1), shape_of(9), shape_of(2)), None),
    "MaxPool with a stride": ("MaxPool", (), MaxPoolAttrs((1, 1), (2, 2), (0,) * 4, (1, 1))),
    "Resize that keeps the size by rounding": (
        "Resize",
        (None, np.asarray([1, 1, 1.1, 1])),
        ResizeAttrs(mode="linear"),
    ),
    "Mul by almost one": ("Mul", (np.asarray([1, 1, 1, 1, 1, 1.5]),), None),
    "Mul by one that adds an axis": ("Mul", (np.ones((1, 1, 1, 1, 1)),), None),
    "Add of something": ("Add", (1e-30,), None),
    "Relu of any sign": ("Relu", (), None),
    "ReduceSum over everything": ("ReduceSum", (), ReduceAttrs()),
}


@pytest.mark.parametrize("case", OPS.values(), ids=OPS.keys())
def test_operators_with_an_effect_stay(case: tuple[str, tuple[Any, ...], Attrs | None]) -> None:
    kind, more, attrs = case
    n = Net()
    check_untouched(CANON, n.done(n.op(kind, n.input(2, 4, 6, 6), *more, attrs=attrs)))


def test_precision_casts_of_the_user_stay() -> None:
    n = Net()
    half = n.op("Cast", n.input(3), attrs=CastAttrs(FP16))
    check_untouched(CANON, n.done(n.op("Cast", half, attrs=CastAttrs(FP32))))


def test_integer_casts_to_the_same_type_go() -> None:
    n = Net(np.int64)
    y = n.op("Neg", n.op("Cast", n.input(3), attrs=CastAttrs(INT64)))
    check_pass(CANON, n.done(y), changes=1, kinds={"Neg": 1})


def test_a_symbolic_reshape_to_the_same_shape() -> None:
    n = Net()
    x = n.input(symbol("n"), 4)
    y = n.op("Neg", n.op("Reshape", x, shape_of(0, 4), attrs=ReshapeAttrs()))
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Neg": 1})
    assert graph.of_kind("Neg")[0].src == {"Reshape_1", "Neg_2"}  # an input has no provenance to add to


@pytest.mark.parametrize("mask", [True, False])
def test_a_selection_by_one_answer_is_an_operand(mask: bool) -> None:
    n = Net()
    x, other = n.op("Exp", n.input(2, 4, 6)), n.op("Neg", n.input(2, 1, 6, name="other"))
    condition = n.const(np.full((4, 1), mask), np.bool_)
    graph = n.done(n.op("Where", condition, *((x, other) if mask else (other, x))))
    check_pass(CANON, graph, changes=1, rules={"known_choice": 1}, kinds={"Exp": 1})


@pytest.mark.parametrize("case", ["mixed", "smaller", "computed"])
def test_other_selections_stay(case: str) -> None:
    """A mask of both answers, an operand that would have to be repeated, and a mask that is no constant."""
    n = Net()
    x, other = n.op("Exp", n.input(2, 4, 6)), n.op("Neg", n.input(2, 1, 6, name="other"))
    mask = n.const(np.array([[True], [case != "mixed"], [True], [True]]), np.bool_)
    condition = n.input(4, 1, name="mask", dtype=np.bool_) if case == "computed" else mask
    check_untouched(CANON, n.done(n.op("Where", condition, *((other, x) if case == "smaller" else (x, other)))))


@pytest.mark.parametrize("kind", ["CumSum", "CumProd"])
def test_running_sums_along_an_axis_of_one(kind: str) -> None:
    """The position of a single token; an exclusive sum of one element is zero, and an axis of two elements has sums."""
    for exclusive, axis in [(False, 1), (False, -2), (True, 1), (False, 0)]:
        n = Net()
        x = n.op("Exp", n.input(2, 1, 6))
        graph = n.done(n.op(kind, x, shape_of(axis), attrs=CumulativeAttrs(exclusive=exclusive)))
        if exclusive or axis == 0:
            check_untouched(CANON, graph)
        else:
            check_pass(CANON, graph, changes=1, kinds={"Exp": 1}, rules={"no_op": 1})


def test_reductions_and_pools_over_single_points() -> None:
    n = Net()
    x = n.op("Exp", n.input(2, 4, 1, 1))
    y = n.op("ReduceMean", n.op("GlobalAveragePool", x), shape_of(2, 3), attrs=ReduceAttrs())
    check_pass(CANON, n.done(y), changes=2, kinds={"Exp": 1})


def test_a_no_op_between_input_and_output() -> None:
    n = Net()
    graph, _ = check_pass(CANON, n.done(n.op("Identity", n.input(3))), changes=1, kinds={}, drops=["Identity_1"])
    assert len(graph.outputs) == 1


@pytest.mark.parametrize("kind", ["Relu", "Sigmoid", "Abs", "Softmax", "Exp"])
def test_relu_of_values_that_cannot_be_negative(kind: str) -> None:
    n = Net()
    x = n.op(kind, n.input(2, 3, 6, 6))
    y = n.op("Relu", n.op("Concat", n.max_pool(x), n.average_pool(x), attrs=ConcatAttrs(1)))
    check_pass(CANON, n.done(y), changes=1, rules={"no_op": 1})


@pytest.mark.parametrize("low", [-0.5, None])
def test_relu_of_values_that_may_be_negative(low: float | None) -> None:
    n = Net()
    check_untouched(CANON, n.done(n.op("Relu", n.op("Clip", n.input(2, 3), low, 6.0))))


def test_non_negative_looks_at_paddings_and_products() -> None:
    n = Net()
    x = n.input(2, 3)
    good = n.op("Relu", n.op("Pad", n.op("Mul", x, x), shape_of(0, 1, 0, 1), 0.5, attrs=PadAttrs()))
    check_pass(CANON, n.done(good), changes=1)
    n = Net()
    bad = n.op("Pad", n.op("Abs", n.input(2, 3)), shape_of(0, 1, 0, 1), -0.5, attrs=PadAttrs())
    check_untouched(CANON, n.done(n.op("Relu", bad)))


def test_unused_indices_of_a_max_pool() -> None:
    n = Net()
    attrs = MaxPoolAttrs((2, 2), (2, 2), (0,) * 4, (1, 1), indices=True)
    y, _ = n.op("MaxPool", n.input(2, 3, 6, 6), attrs=attrs, outputs=2)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"MaxPool": 1}, rules={"unused_indices": 1})
    assert len(graph.of_kind("MaxPool")[0].outputs) == 1
    n = Net()
    check_untouched(CANON, n.done(*n.op("MaxPool", n.input(2, 3, 6, 6), attrs=attrs, outputs=2)))


def normalized(axis: int, *shape: DimLike, bias: bool = True, outputs: int = 1) -> tuple[Net, Any]:
    n = Net()
    x = n.input(*shape)
    size = [d for d in shape[axis:] if isinstance(d, int)]
    given = [x, n.random(*size), *([n.random(*size)] if bias else [])]
    return n, n.op("LayerNormalization", *given, attrs=LayerNormAttrs(axis), outputs=outputs)


@pytest.mark.parametrize("bias", [True, False])
def test_norms_of_single_elements_are_their_bias(bias: bool) -> None:
    n, y = normalized(2, 2, 5, 1, 1, bias=bias)
    before = n.done(n.op("Max", n.op("Neg", n.graph.op(y).inputs[0]), y))
    graph, _ = check_pass(CANON, before, changes=1, rules={"norm_of_one": 1}, drops=["LayerNormalization_1"])
    assert "LayerNormalization" not in graph.kinds()


def test_norms_of_several_elements_stay() -> None:
    n, y = normalized(1, 2, 5, 1)
    check_untouched(CANON, n.done(y))
    n, (y, mean, _) = normalized(2, 2, 5, 1, outputs=3)
    check_untouched(CANON, n.done(y, mean))


def test_norms_of_single_elements_that_are_refused() -> None:
    n, y = normalized(1, symbol("n"), 1)
    check_refused(CANON, n.done(y), because="its bias or its size is not known")
    n = Net()
    y = n.op("LayerNormalization", n.input(5, 1), n.random(1), n.input(1, name="b"), attrs=LayerNormAttrs())
    check_refused(CANON, n.done(y), because="its bias or its size is not known")
