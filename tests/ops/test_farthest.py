"""FarthestPoints: results, inference and its errors, cost, and export as steps."""

from __future__ import annotations

import numpy as np
import pytest
from support import region_cases
from support.check import check_export
from support.net import Net

from optdnn.errors import ShapeError
from optdnn.ops.base import Call
from optdnn.ops.farthest import FLOPS, FarthestPointsAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import FP32, INT64, TensorType


def test_the_farthest_point_is_next() -> None:
    x = np.array([[[0.0], [1.0], [5.0], [8.0], [8.0]]])
    far = np.full((1, 5), 1e10)
    (y,) = OPDEFS["FarthestPoints"].kernel(x, far, np.array([0]), count=3)
    np.testing.assert_array_equal(y, [[3, 2, 1]])  # the first of two equal points; then 5, at a distance of 3
    (y,) = OPDEFS["FarthestPoints"].kernel(x, np.array([[4.0, 0.0, 9.0, 0.0, 0.0]]), np.array([-1]), count=1)
    np.testing.assert_array_equal(y, [[2]])


def test_export() -> None:
    n = Net()
    near, first = n.const(np.full((2, 9), 1e10)), n.ints(3, 0)
    check_export(n.done(n.op("FarthestPoints", n.input(2, 9, 3), near, first, attrs=FarthestPointsAttrs(4))), rtol=0)


@pytest.mark.parametrize(
    ("points", "near", "first", "count"),
    [((5, 3), (5,), (5,), 2), ((1, 5, 3), (1, 4), (1,), 2), ((2, 5, 3), (2, 5), (1,), 2), ((1, 5, 3), (1, 5), (1,), 0)],
)
def test_contradictions(points: tuple[int, ...], near: tuple[int, ...], first: tuple[int, ...], count: int) -> None:
    arrays = [np.zeros(points, np.float32), np.zeros(near, np.float32), np.zeros(first, np.int64)]
    with pytest.raises(ShapeError, match="FarthestPoints of fp32"):
        region_cases.infer("FarthestPoints", FarthestPointsAttrs(count), arrays)


def test_the_first_points_are_integers() -> None:
    arrays = [np.zeros((1, 5, 3), np.float32), np.zeros((1, 5), np.float32), np.zeros(1, np.float32)]
    with pytest.raises(ShapeError):
        region_cases.infer("FarthestPoints", FarthestPointsAttrs(2), arrays)


def test_cost_counts_each_coordinate_in_each_choice() -> None:
    n = Net()
    near, first = n.const(np.full((2, 9), 1e10)), n.ints(3, 0)
    graph = n.done(n.op("FarthestPoints", n.input(2, 9, 3), near, first, attrs=FarthestPointsAttrs(4)))
    (op,) = graph.of_kind("FarthestPoints")
    types = (TensorType(FP32, (2, 9, 3)), TensorType(FP32, (2, 9)), TensorType(INT64, (2,)))
    call = Call(op.kind, op.attrs, types, (None,) * 3, 1, graph.fresh_symbol)
    assert op.definition.cost is not None
    assert op.definition.cost(call, op.definition.infer(call)).flops == FLOPS * 4 * 54
