"""Sinkhorn: results, inference and its errors, cost, and export as sums and quotients."""

from __future__ import annotations

import numpy as np
import pytest
from support import region_cases
from support.check import check_export
from support.net import Net

from optdnn.errors import ShapeError
from optdnn.ops.base import Call
from optdnn.ops.sinkhorn import SinkhornAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import FP32, INT64, TensorType


def test_rows_and_columns_are_divided_in_turn() -> None:
    x = np.array([[1.0, 3.0], [2.0, 2.0]])
    (y,) = OPDEFS["Sinkhorn"].kernel(x, axis=-1, count=1)
    np.testing.assert_allclose(y, [[0.25, 0.75], [0.5, 0.5]])
    (y,) = OPDEFS["Sinkhorn"].kernel(x, axis=-1, count=2, epsilon=0.0)
    np.testing.assert_allclose(y, [[1 / 3, 0.6], [2 / 3, 0.4]])
    (y,) = OPDEFS["Sinkhorn"].kernel(x, axis=-2, count=1, epsilon=1.0)
    np.testing.assert_allclose(y, [[0.25, 0.5], [0.5, 1 / 3]])
    (y,) = OPDEFS["Sinkhorn"].kernel(x, axis=-2, count=1, floor=4.0)
    np.testing.assert_allclose(y, [[0.25, 0.6], [0.5, 0.4]])


@pytest.mark.parametrize("attrs", [SinkhornAttrs(-1, 4), SinkhornAttrs(-2, 3, 1e-3), SinkhornAttrs(-1, 3, 0.0, 2.5)])
def test_export(attrs: SinkhornAttrs) -> None:
    n = Net()
    check_export(n.done(n.op("Sinkhorn", n.op("Sigmoid", n.input(2, 3, 5)), attrs=attrs)), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "attrs", "because"),
    [
        ((4,), SinkhornAttrs(-1, 2), "Sinkhorn of fp32"),
        ((2, 3), SinkhornAttrs(1, 2), "along axis 1"),
        ((2, 3), SinkhornAttrs(-1, 0), "0 times"),
        ((2, 3), SinkhornAttrs(-1, 2, -1.0), "an epsilon of -1"),
        ((2, 3), SinkhornAttrs(-1, 2, 0.0, -1.0), "a floor of -1"),
    ],
)
def test_contradictions(shape: tuple[int, ...], attrs: SinkhornAttrs, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        region_cases.infer("Sinkhorn", attrs, [np.zeros(shape, np.float32)])


def test_integers_are_refused() -> None:
    with pytest.raises(ShapeError):
        region_cases.infer("Sinkhorn", SinkhornAttrs(-1, 2), [np.zeros((2, 3), INT64)])


def test_cost_counts_a_sum_and_a_quotient_of_each_element() -> None:
    n = Net()
    graph = n.done(n.op("Sinkhorn", n.input(2, 3, 4), attrs=SinkhornAttrs(-1, 5)))
    (op,) = graph.of_kind("Sinkhorn")
    call = Call(op.kind, op.attrs, (TensorType(FP32, (2, 3, 4)),), (None,), 1, graph.fresh_symbol)
    assert op.definition.cost is not None
    assert op.definition.cost(call, op.definition.infer(call)).flops == 2 * 5 * 24
