"""Reductions and ArgMax/ArgMin against ONNX Runtime; known values; inference; every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, reference_outputs, run
from support.sweep import all_pairs

from optdnn.dim import dim_max, symbol
from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph
from optdnn.ops.base import Call, known_array
from optdnn.ops.reduce import DEFS, ArgAttrs, ReduceAttrs, reduced_axes
from optdnn.ops.table import OPDEFS
from optdnn.types import BOOL, INT64, tensor

KINDS = [
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
]
AXES: list[list[int] | None] = [None, [1], [0, 2], [-1], [0, 1, 2]]


def test_every_reduction_has_cases() -> None:
    assert {d.kind for d in DEFS if d.attrs is ReduceAttrs} == set(KINDS)


def _data(dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4, 5))
    return (x * 3 if np.dtype(dtype).kind in "iu" else x).astype(dtype)


@all_pairs(
    {
        "keepdims": [0, 1],
        "axes": AXES,
        "kind": KINDS,
    }
)
def test_axes_as_operand_and_as_attribute(kind: str, axes: list[int] | None, keepdims: int) -> None:
    x, attrs = _data(), {"keepdims": keepdims}
    operands = [x] if axes is None else [x, np.array(axes)]
    new = Case(kind, operands, attrs, opset=18, constants=[1] if axes else [])
    graph = check_case(new, symbolic={0: (0, 1, 2)})
    old = Case(
        kind, [x], attrs if axes is None else {**attrs, "axes": axes}, opset=7 if not axes or axes != [-1] else 11
    )
    check_case(old)
    assert graph.kinds() == {kind: 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noop", [0, 1])
def test_empty_axes(kind: str, noop: int) -> None:
    case = Case(kind, [_data(), np.zeros(0, np.int64)], {"noop_with_empty_axes": noop}, opset=18, constants=[1])
    expected: Any = "onnxruntime"
    if noop:  # without a reduction, the other steps remain: ReduceSumSquare squares
        x = case.inputs[0]
        expected = [{"ReduceSumSquare": np.square, "ReduceLogSum": np.log}.get(kind, lambda v: v)(x)]
    check_case(case, expected)


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers(kind: str, dtype: Any) -> None:
    x = (_data(dtype) - 3).astype(dtype)
    if kind == "ReduceMean":  # truncated toward zero, like integer division
        total = x.sum(axis=1, keepdims=True)
        expected: Any = [(np.sign(total) * (np.abs(total) // 4)).astype(dtype)]
    else:
        expected = "onnxruntime"
    check_case(Case(kind, [x, np.array([1])], opset=18, constants=[1]), expected)


def test_mean_of_unsigned() -> None:
    x = np.array([[1, 2, 4]], np.uint32)
    check_case(Case("ReduceMean", [x, np.array([1])], opset=18, constants=[1]), [np.array([[2]], np.uint32)])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_norm_of_integers_does_not_overflow(dtype: Any) -> None:
    x = np.array([[3 * 10**5, 4 * 10**5], [0, 7]], dtype)
    case = Case("ReduceL2", [x, np.array([1])], {"keepdims": 0}, opset=18, constants=[1])
    check_case(case, [np.array([5 * 10**5, 7], dtype)])


def test_log_sum_exp_of_integers_is_truncated_once() -> None:
    x = np.array([[9, 9, 8, 7]])  # ln(2 e^9 + e^8 + e^7) is 9.92; ONNX Runtime truncates every exponential
    case = Case("ReduceLogSumExp", [x, np.array([1])], {"keepdims": 0}, opset=18, constants=[1])
    check_case(case, [np.array([9])])


@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMin"])
def test_booleans(kind: str) -> None:
    x = np.random.default_rng(0).random((3, 4)) > 0.6
    check_case(Case(kind, [x, np.array([1])], opset=20, constants=[1]), "reference")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ReduceMean"}))
def test_empty_sets(kind: str) -> None:
    case = Case(kind, [np.zeros((2, 0, 3), np.float32), np.array([1])], opset=20, constants=[1])
    check_case(case, "reference")


def test_log_sum_exp_does_not_overflow() -> None:
    x = np.array([[1000.0, 1000.0], [-1000.0, -1000.0], [-np.inf, -np.inf], [np.inf, 0.0]], np.float32)
    case = Case("ReduceLogSumExp", [x, np.array([1])], {"keepdims": 0}, opset=18, constants=[1])
    expected = np.array([1000 + np.log(2), -1000 + np.log(2), -np.inf, np.inf], np.float32)
    check_case(case, [expected])


def test_axes_known_at_run_time_only() -> None:
    x, axes = _data(), np.array([0, 2])
    for keepdims, rank in ((1, 3), (0, 1)):
        case = Case("ReduceSum", [x, axes], {"keepdims": keepdims})
        graph = import_case(case)
        t = graph.of_kind("ReduceSum")[0].outputs[0].type
        assert len(t.dims) == rank
        assert not t.is_static
        (y,) = run(graph, case.fed)
        np.testing.assert_array_equal(y, reference_outputs(case)[0].astype(np.float32))
    g = Graph()
    a, n = g.add_input("a", tensor(np.float32, 2, 3)), g.add_input("n", tensor(INT64, symbol("k")))
    assert g.add("ReduceSum", [a, n], ReduceAttrs(keepdims=False)).outputs[0].type.shape is None


def test_known_values_flow_through() -> None:
    n, m = symbol("n", 1), symbol("m", 1)
    expected = {"ReduceProd": n * m * 6, "ReduceSum": n + m + 5, "ReduceMax": dim_max(dim_max(dim_max(n, 2), m), 3)}
    for kind, value in expected.items():
        call = Call(
            kind,
            ReduceAttrs(keepdims=False),
            (tensor(INT64, 4), None),
            (known_array([n, 2, m, 3]), None),
            1,
            symbol,
        )
        result = OPDEFS[kind].infer(call)
        assert result.values[0].item() == value, kind
    whole = Call(
        "ReduceProd", ReduceAttrs(), (tensor(INT64, 2, 2), tensor(INT64, 1)),
        (np.array([[1, 2], [3, 4]]), np.array([0])), 1, symbol,
    )  # fmt: skip
    (value,) = OPDEFS["ReduceProd"].infer(whole).values
    assert value.tolist() == [[3, 8]]
    assert value.dtype == INT64
    floats = Call("ReduceProd", ReduceAttrs(), (tensor(np.float32, 2),), (np.ones(2, np.float32),), 1, symbol)
    assert OPDEFS["ReduceProd"].infer(floats).values in ((), (None,))


@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_arg(kind: str, axis: int, keepdims: int, last: int) -> None:
    x = np.random.default_rng(0).integers(0, 3, (3, 4, 5)).astype(np.float32)  # many equal values
    attrs = {"axis": axis, "keepdims": keepdims, "select_last_index": last}
    check_case(Case(kind, [x], attrs, opset=13), symbolic={0: (0, 1, 2)})
    check_case(Case(kind, [x.astype(np.int32)], attrs, opset=13))


def test_arg_old_opset() -> None:
    check_case(Case("ArgMax", [normal(3, 4)], {"axis": 1}, opset=7))


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "message"),
    [
        ("ReduceSum", [np.zeros((2, 3), np.float32), np.array([2])], {}, "axis 2 is out of range"),
        ("ReduceSum", [np.zeros((2, 3), np.float32), np.array([1, -1])], {}, "name one axis twice"),
        ("ReduceSum", [np.zeros((2, 3), BOOL), np.array([1])], {}, "booleans have only"),
        ("ArgMax", [np.zeros((2, 3), np.float32)], {"axis": 2}, "axis 2 is out of range"),
        ("ArgMax", [np.zeros((2, 0), np.float32)], {"axis": 1}, "is empty"),
    ],
)
def test_contradictions_are_refused(op: str, inputs: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case(op, inputs, attrs, constants=[1]))


def test_reduced_axes() -> None:
    assert reduced_axes(ReduceAttrs(), None, 3) == (0, 1, 2)
    assert reduced_axes(ReduceAttrs(noop_with_empty_axes=True), (), 3) == ()
    assert reduced_axes(ReduceAttrs(), (-1, 0), 3) == (0, 2)


def test_cost() -> None:
    for kind, flops in (("ReduceSum", 1), ("ReduceSumSquare", 2), ("ArgMax", 1)):
        g = Graph()
        x = g.add_input("x", tensor(np.float32, 3, 4))
        op = g.add(kind, [x], ArgAttrs() if kind == "ArgMax" else ReduceAttrs())
        assert op_flops(g, op) == 12 * flops


@pytest.mark.parametrize("kind", KINDS)
def test_export(kind: str) -> None:
    x = _data()
    model = check_export(Case(kind, [x, np.array([0, -1])], {"keepdims": 0}, constants=[1]))
    (node,) = model.graph.node
    assert len(node.input) == 2
    check_export(Case(kind, [x]))


def test_export_of_booleans_and_of_open_axes() -> None:
    x = np.random.default_rng(0).random((3, 4)) > 0.6
    check_export(Case("ReduceMax", [x, np.array([1])], constants=[1]), by="reference")
    check_export(Case("ReduceMean", [_data(), np.array([1])]))
    no_axes = [_data(), np.zeros(0, np.int64)]
    check_export(Case("ReduceMean", no_axes, {"noop_with_empty_axes": 1}, constants=[1]))
    check_export(Case("ArgMax", [normal(3, 4)], {"axis": 1, "select_last_index": 1, "keepdims": 0}))
