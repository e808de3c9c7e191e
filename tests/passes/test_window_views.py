"""Windows of rows: norms write them, and the views that undo them move in front of the product before an addition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.hoist_views import HoistViews

PERM = (0, 1, 3, 2, 4, 5)


def windows(n: Net, x: Value, *shape: int, perm: tuple[int, ...] = PERM) -> Value:
    turned = n.op("Transpose", n.op("Reshape", x, n.ints(*shape)), attrs=TransposeAttrs(perm=perm))
    return n.op("Reshape", turned, n.ints(-1, 4, n.dims(x)[-1]))


def normed(
    kind: str = "LayerNormalization", *, axis: int = -1, scale: tuple[int, ...] = (8,), readers: int = 1, **options: Any
) -> Graph:
    """A norm of [1, 16, 8], and its windows of 2 x 2 rows."""
    n = Net(np.float64)
    y = n.op(kind, n.input(1, 16, 8), n.positive(*scale), attrs=LayerNormAttrs(axis=axis) if axis != -1 else None)
    shape = options.pop("shape", (1, 2, 2, 2, 2, 8))
    found = n.op("Relu", windows(n, y, *shape, **options))
    return n.done(found) if readers == 1 else n.done(found, n.op("Tanh", y))


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_a_norm_writes_windows(kind: str) -> None:
    graph, _ = check_pass(HoistViews(), normed(kind), changes=1, rules={"transpose_before_norm": 1})
    (norm,) = graph.of_kind(kind)
    assert graph.op(norm.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]


def test_a_transpose_right_after_a_norm() -> None:
    n = Net()
    y = n.op("LayerNormalization", n.input(2, 3, 4, 8), n.positive(8))
    turned = n.op("Transpose", y, attrs=TransposeAttrs(perm=(0, 2, 1, 3)))
    check_pass(HoistViews(), n.done(n.op("Relu", turned)), changes=1, rules={"transpose_before_norm": 1})


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"axis": 1, "scale": (16, 8)}, "more than rows"),
        ({"scale": (16, 8)}, "differs between rows"),
    ],
)
def test_norms_that_stay_in_front(options: dict[str, Any], because: str) -> None:
    check_refused(HoistViews(), normed(**options), because=because)


def test_rows_over_too_many_axes_and_of_unknown_sizes() -> None:
    n = Net()
    y = n.op("LayerNormalization", n.input(2, 16, 8), n.positive(8))
    turned = windows(n, y, 2, 2, 2, 2, 2, 8, perm=(4, 3, 2, 1, 0, 5))
    check_refused(HoistViews(), n.done(turned), because="over too many axes")
    n = Net()
    y = n.op("LayerNormalization", n.input(symbol("b"), 3, 4, 8), n.positive(8))
    turned = n.op("Transpose", y, attrs=TransposeAttrs(perm=(0, 2, 1, 3)))
    check_refused(HoistViews(), n.done(n.op("Relu", turned)), because="its sizes are not known")


@pytest.mark.parametrize("product", [False, True])
def test_a_norm_stays_with_the_addition_that_its_launch_makes(product: bool) -> None:
    n = Net()
    x = n.input(1, 16, 8)
    total = n.op("Add", n.matmul(x, 8) if product else n.op("Tanh", x), n.input(1, 16, 8, name="residual"))
    graph = n.done(windows(n, n.op("LayerNormalization", total, n.positive(8)), 1, 2, 2, 2, 2, 8))
    if product:  # which adds by itself
        check_pass(HoistViews(), graph, changes=1, rules={"transpose_before_norm": 1})
    else:
        check_refused(HoistViews(), graph, because="one launch already computes")


def test_other_norms_are_no_candidates() -> None:
    check_untouched(HoistViews(), normed(readers=2))
    check_untouched(HoistViews(), normed(perm=(0, 1, 3, 2, 5, 4)))  # the rows are torn apart
    check_untouched(HoistViews(), normed(shape=(1, 2, 2, 2, 4, 4), perm=PERM))


def attended(added: bool, *, broadcast: bool = False) -> Graph:
    """A product of rows in windows, views to the order of an image, and a residual."""
    n = Net(np.float64)
    x = n.op("Tanh", n.input(4, 3, 4, 8))
    x = n.op("Reshape", n.op("Transpose", x, attrs=TransposeAttrs(perm=(0, 2, 1, 3))), n.ints(4, 4, 24))
    y = n.op("Reshape", n.matmul(x, 10), n.ints(1, 2, 2, 2, 2, 10))
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs(perm=PERM)), n.ints(1, 16, 10))
    residual = n.input(1, 1 if broadcast else 16, 10, name="residual")
    return n.done(n.op("Add", residual, y) if added else n.op("Relu", y))


def test_the_views_back_move_in_front_of_the_product() -> None:
    graph, _ = check_pass(HoistViews(), attended(True), changes=3, rules={"hoist_view": 3})
    (addition,) = graph.of_kind("Add")
    assert graph.op(addition.inputs[1]).kind == "MatMul"  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"added": False}, {"added": True, "broadcast": True}], ids=str)
def test_without_an_addition_of_equal_rows_they_stay(options: dict[str, Any]) -> None:
    n = attended(**options)
    report = HoistViews()(n)
    assert any("does not merge" in r.reason for r in report.refused)


def block(height: int = 8, features: int = 64) -> Graph:
    """A norm, products in windows of 4 x 4, the residual."""
    n = Net()
    rows = height * height
    x = n.op("Tanh", n.input(1, rows, features))
    y = n.op("LayerNormalization", x, n.positive(features))
    side = height // 4
    y = n.op("Reshape", y, n.ints(1, side, 4, side, 4, features))
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs(perm=PERM)), n.ints(side * side, 16, features))
    y = n.op("Reshape", n.matmul(n.op("Relu", n.matmul(y, features)), features), n.ints(1, side, side, 4, 4, features))
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs(perm=PERM)), n.ints(1, rows, features))
    return n.done(n.op("Add", x, y))


def test_a_gpu_copies_windows_once() -> None:
    program = check_simulated(block(), "fp16")
    assert [s.params["tactic"].split()[0] for s in program.steps].count("copy") <= 1
