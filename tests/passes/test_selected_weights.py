"""selected_weights: rows that each select their matrix are multiplied with all matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.reduce import ArgAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.selected_weights import MOST, SelectedWeights
from optdnn.types import INT32

ROWS, SIZE, WIDTH = 6, 5, 3


def expert(n: Net, rows: DimLike, many: int, *, keepdims: bool = False) -> Value:
    """The index of each row's matrix."""
    return n.op("ArgMax", n.input(rows, many, name="scores"), attrs=ArgAttrs(axis=1, keepdims=keepdims))


def gathered(n: Net, stack: Value, rows: DimLike, many: int) -> Value:
    return n.op("Gather", stack, expert(n, rows, many), attrs=GatherAttrs(0))


def gathered_nd(n: Net, stack: Value, rows: DimLike, many: int) -> Value:
    return n.op("GatherND", stack, expert(n, rows, many, keepdims=True), attrs=GatherNDAttrs())


Take = Callable[[Net, Value, DimLike, int], Value]


def mixture(
    take: Take = gathered, *, slot: int = 0, rows: DimLike = ROWS, many: int = 4, size: int = SIZE, columns: int = 1
) -> Graph:
    """``W[expert] @ x``, or with ``slot`` 1 ``x @ W[expert]``."""
    n = Net(np.float64)
    if slot == 0:
        own, x = take(n, n.random(many, WIDTH, size), rows, many), n.input(rows, size, columns)
        return n.done(n.op("MatMul", own, x))
    own, x = take(n, n.random(many, size, WIDTH), rows, many), n.input(rows, columns, size)
    return n.done(n.op("MatMul", x, own))


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("take", [gathered, gathered_nd])
def test_rows_take_their_product_of_all(take: Take, slot: int) -> None:
    after, _ = check_pass(SelectedWeights(), mixture(take, slot=slot), changes=1)
    (product,), (pick,) = after.of_kind("MatMul"), after.of_kind("GatherND")
    assert product.outputs[0].type.dims == (ROWS, 4 * WIDTH)
    assert pick.attrs.batch_dims == 1
    assert not list(after.of_kind("Gather"))


def repeated(axis: int = 1, *, slot: int = 0, size: int = SIZE) -> Graph:
    """Each row selects two of four matrices: it is repeated next to itself, or all rows are after all rows."""
    n = Net(np.float64)
    x = n.op("Unsqueeze", n.input(3, size), n.ints(axis))
    x = n.op("Expand", x, n.ints(*((3, 2) if axis == 1 else (2, 3)), size))
    own = gathered(n, n.random(4, *((WIDTH, size) if slot == 0 else (size, WIDTH))), ROWS, 4)
    x = n.op("Reshape", x, n.ints(ROWS, *((size, 1) if slot == 0 else (1, size))))
    return n.done(n.op("MatMul", *((own, x) if slot == 0 else (x, own))))


def test_repeated_rows_are_multiplied_once() -> None:
    after, _ = check_pass(SelectedWeights(), repeated(), changes=1)
    (product,) = after.of_kind("MatMul")
    assert product.outputs[0].type.dims == (3, 4 * WIDTH)
    assert "Expand" not in after.kinds()


def test_all_rows_after_all_rows_are_multiplied_as_they_are() -> None:
    after, _ = check_pass(SelectedWeights(), repeated(axis=0), changes=1)
    (product,) = after.of_kind("MatMul")
    assert product.outputs[0].type.dims == (ROWS, 4 * WIDTH)
    assert "Expand" in after.kinds()


def test_as_many_rows_as_matrices_are_enough() -> None:
    check_pass(SelectedWeights(), mixture(many=5, rows=5), changes=1)


def test_one_row_more_or_less() -> None:
    check_refused(SelectedWeights(), mixture(many=5, rows=4), because="there are more matrices .5. than rows .4.")


def test_an_unknown_number_of_rows_is_refused() -> None:
    check_refused(SelectedWeights(), mixture(rows=symbol("rows")), because="the number of rows is not known")


@pytest.mark.parametrize(("many", "size"), [(SIZE + 1, SIZE), (MOST + 1, MOST + 2)])
def test_too_many_matrices_are_refused(many: int, size: int) -> None:
    graph = mixture(many=many, rows=many, size=size)
    check_refused(SelectedWeights(), graph, because=f"all {many} matrices would take longer")


FP16 = PassContext(target="cuda:sm_90a", precision="fp16")


@pytest.fixture
def none_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.selected_weights.SHORT", 0)


@pytest.mark.usefixtures("none_is_short")
@pytest.mark.parametrize("slot", [0, 1])
def test_matrices_that_one_launch_reads_in_place_stay(slot: int) -> None:
    check_refused(SelectedWeights(), mixture(slot=slot, size=8), because="one launch reads the matrices", context=FP16)


@pytest.mark.parametrize(
    ("target", "precision", "size"), [("cpu", "fp16", 8), ("cuda:sm_90a", "fp32", 12), ("cuda:sm_90a", "fp16", 12)]
)
def test_targets_and_rows_without_that_kernel(target: str, precision: str, size: int) -> None:
    check_pass(
        SelectedWeights(), mixture(size=size), changes=1, context=PassContext(target=target, precision=precision)
    )


@pytest.mark.parametrize("more", [0, 1])
def test_short_products_are_with_all_matrices(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.selected_weights.SHORT", ROWS * 4 * WIDTH * 8 - more)
    report = SelectedWeights()(mixture(size=8), FP16)
    assert report.changes == 1 - more


@pytest.mark.usefixtures("none_is_short")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("slot", [0, 1])
def test_rows_of_several_experts_are_read_once(slot: int, precision: str) -> None:
    context = PassContext(target="cuda:sm_90a", precision=precision)
    after, _ = check_pass(SelectedWeights(), repeated(slot=slot, size=8), changes=1, context=context)
    (product,), (pick,) = after.of_kind("MatMul"), after.of_kind("Gather")
    assert product.outputs[0].type.dims == ((3, 2, WIDTH, 1) if slot == 0 else (3, 2, 1, WIDTH))
    assert pick.outputs[0].type.dims[:2] == (3, 2)
    assert "Expand" not in after.kinds()


def test_indices_of_other_types_are_not_read_in_place() -> None:
    n = Net(np.float64)
    index = n.op("Cast", expert(n, ROWS, 4), attrs=CastAttrs(INT32))
    own = n.op("Gather", n.random(4, WIDTH, 8), index, attrs=GatherAttrs(0))
    graph = n.done(n.op("MatMul", own, n.input(ROWS, 8, 1)))
    after, _ = check_pass(SelectedWeights(), graph, changes=1, context=FP16)
    assert after.of_kind("GatherND")


def test_stages_of_matrices_that_are_read_in_place_stay_apart() -> None:
    n = Net(np.float64)
    own = gathered(n, n.random(4, WIDTH, 8), 2, 4)
    graph = n.done(n.op("Relu", n.op("MatMul", own, n.input(2, 8, 1))))
    check_refused(FuseEpilogue(), graph, because="reads a matrix for each row in place has no epilogue", context=FP16)
    check_pass(FuseEpilogue(), graph, changes=1, context=PassContext(target="cpu", precision="fp32"))


def test_several_columns_for_each_matrix_stay() -> None:
    check_untouched(SelectedWeights(), mixture(columns=2))
    check_untouched(SelectedWeights(), mixture(slot=1, columns=2))


def test_matrices_that_are_computed_or_read_elsewhere_stay() -> None:
    n = Net(np.float64)
    own = gathered(n, n.op("Tanh", n.input(4, WIDTH, SIZE, name="w")), ROWS, 4)
    check_untouched(SelectedWeights(), n.done(n.op("MatMul", own, n.input(ROWS, SIZE, 1))))
    n = Net(np.float64)
    own = gathered(n, n.random(4, WIDTH, SIZE), ROWS, 4)
    check_untouched(SelectedWeights(), n.done(n.op("MatMul", own, n.input(ROWS, SIZE, 1)), n.op("Tanh", own)))


def test_rows_of_the_matrices_are_no_matrices() -> None:
    n = Net(np.float64)
    own = n.op("Gather", n.random(ROWS, 4, SIZE), expert(n, 3, 4), attrs=GatherAttrs(1))
    check_untouched(SelectedWeights(), n.done(n.op("MatMul", own, n.input(ROWS, SIZE, 1))))
    n = Net(np.float64)
    pairs = n.const(np.array([[[0], [1]]] * ROWS), np.int64)
    own = n.op("GatherND", n.random(4, WIDTH, SIZE), pairs, attrs=GatherNDAttrs())
    check_untouched(SelectedWeights(), n.done(n.op("MatMul", own, n.input(ROWS, 1, SIZE, 1))))
