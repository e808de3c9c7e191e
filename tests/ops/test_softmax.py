"""Softmax, LogSoftmax and Hardmax of both generations against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run
from support.sweep import all_pairs

from optdnn.errors import ShapeError
from optdnn.runtime.reference.softmax import KERNELS

KINDS = ["Softmax", "LogSoftmax", "Hardmax"]


@all_pairs(
    {
        "axis": [None, 0, 1, 2, -1],
        "opset": [7, 11, 13, 22],
        "kind": KINDS,
    }
)
def test_against_onnxruntime(kind: str, opset: int, axis: int | None) -> None:
    if opset == 7 and axis == -1:
        axis = 2  # negative axes came with opset 11
    attrs = {} if axis is None else {"axis": axis}
    check_case(Case(kind, [normal(3, 4, 5)], attrs, opset), symbolic={0: (0, 2)})


@pytest.mark.parametrize(
    ("shape", "axis", "kinds", "plain_axis"),
    [
        ((2, 10), 1, ["Softmax"], 1),
        ((2, 10, 1, 1), 1, ["Softmax"], 1),
        ((2, 1, 7, 1), 1, ["Softmax"], 2),
        ((2, 3, 4), 2, ["Softmax"], 2),
        ((2, 1, 1), 1, ["Softmax"], 1),
        ((2, 3, 4), 1, ["Flatten", "Reshape", "Softmax"], 1),
    ],
)
def test_old_form_is_plain_where_one_axis_is_wide(
    shape: tuple[int, ...], axis: int, kinds: list[str], plain_axis: int
) -> None:
    graph = check_case(Case("Softmax", [normal(*shape)], {"axis": axis}, opset=11))
    assert sorted(graph.kinds()) == kinds
    assert graph.of_kind("Softmax")[0].attrs.axis == plain_axis


@pytest.mark.parametrize("kind", KINDS)
def test_large_values_stay_finite(kind: str) -> None:
    x = np.array([[1e4, 1e4 - 1, -1e4], [-1e30, -1e30, -1e30]], np.float32)
    (y,) = KERNELS[kind](x, axis=1)
    assert np.isfinite(y).all()
    check_case(Case(kind, [x]))


def test_hardmax_takes_the_first_of_equals() -> None:
    x = np.array([[1, 3, 3, 2]], np.float32)
    assert KERNELS["Hardmax"](x, axis=1)[0].tolist() == [[0, 1, 0, 0]]


def test_empty() -> None:
    case = Case("Softmax", [np.zeros((0, 3), np.float32)], {"axis": 0})
    (y,) = run(import_case(case), case.fed)
    assert y.shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "attrs", "opset", "message"),
    [
        (np.zeros((2, 3), np.float32), {"axis": 2}, 13, "axis 2 is out of range"),
        (np.zeros((2, 3), np.float32), {"axis": 3}, 11, "axis 3 is out of range"),
        (np.zeros((2, 3), np.int32), {"axis": 1}, 13, "floating-point"),
    ],
)
def test_contradictions_are_refused(x: Any, attrs: dict[str, Any], opset: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case("Softmax", [x], attrs, opset))


def test_cost() -> None:
    graph = import_case(Case("Softmax", [normal(2, 3)]))
    assert op_flops(graph, graph.of_kind("Softmax")[0]) == 5 * 6


@pytest.mark.parametrize("kind", KINDS)
def test_export(kind: str) -> None:
    check_export(Case(kind, [normal(2, 3, 4)], {"axis": 1}))
    check_export(Case(kind, [normal(2, 3, 4)], {"axis": 1}, opset=11))
