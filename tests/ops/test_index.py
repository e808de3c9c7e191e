"""Data movement and reading by index against ONNX's evaluator and ONNX Runtime; symbolic sizes and values; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from known import infer, infer_value, shape_of
from onenode import Case, check_case, import_case, normal, onnxruntime_outputs, run

from optdnn.dim import Dim, dim_max, dim_min, evaluate, symbol
from optdnn.errors import RunError, ShapeError
from optdnn.ops import gather, index
from optdnn.ops.base import Attrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs, OneHotAttrs, ScatterElementsAttrs, ScatterNDAttrs
from optdnn.ops.index import BlockAttrs, ConcatAttrs, PadAttrs, SplitAttrs, sliced
from optdnn.ops.indices import all_inside
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP16, FP32, INT64, TensorType, tensor

N, H = symbol("n", 1), symbol("h", 1)
X = normal(2, 3, 4)
IMAGE = normal(2, 8, 4, 6)
MAX = np.iinfo(np.int64).max


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def f32(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)


CASES: list[tuple[str, dict, int, list, int]] = [
    ("Concat", {"axis": 1}, 13, [X, normal(2, 1, 4), normal(2, 2, 4)], 1),
    ("Concat", {"axis": -1}, 11, [X, X], 1),
    ("Concat", {"axis": 0}, 7, [X], 1),
    ("Split", {"axis": 2, "num_outputs": 2}, 18, [X], 2),
    ("Split", {"axis": 2, "num_outputs": 3}, 18, [X], 3),
    ("Split", {"axis": -1}, 18, [X, ints(1, 3)], 2),
    ("Split", {"axis": 1}, 13, [X], 3),
    ("Split", {"axis": 2}, 13, [X, ints(3, 0, 1)], 3),
    ("Split", {"axis": 2, "split": [3, 1]}, 11, [X], 2),
    ("Split", {}, 7, [X], 2),
    ("Slice", {}, 13, [X, ints(0, 1), ints(1, 3)], 1),
    ("Slice", {}, 13, [X, ints(1), ints(MAX), ints(-1)], 1),
    ("Slice", {}, 13, [X, ints(-3), ints(-1), ints(2)], 1),
    ("Slice", {}, 13, [X, ints(-1), ints(-MAX), ints(2), ints(-1)], 1),
    ("Slice", {}, 13, [X, ints(3, 2), ints(0, -9), ints(2, 1), ints(-2, -1)], 1),
    ("Slice", {}, 13, [X, ints(0), ints(4), ints(2), ints(3)], 1),
    ("Slice", {}, 13, [X, ints(9), ints(12), ints(2)], 1),
    ("Slice", {}, 13, [X, ints(3), ints(1), ints(2)], 1),
    ("Slice", {"starts": [1, 0], "ends": [3, -1], "axes": [1, 2]}, 9, [X], 1),
    ("Slice", {"starts": [1], "ends": [2]}, 7, [X], 1),
    ("Pad", {}, 13, [X, ints(0, 1, 2, 0, 3, 0)], 1),
    ("Pad", {}, 13, [X, ints(0, 1, 2, 1, 0, 0), f32(1.5)], 1),
    ("Pad", {"mode": "reflect"}, 13, [X, ints(0, 2, 1, 0, 0, 3)], 1),
    ("Pad", {"mode": "edge"}, 13, [X, ints(1, 0, 1, 0, 0, 3)], 1),
    ("Pad", {"mode": "wrap"}, 19, [X, ints(0, 1, 2, 0, 0, 3)], 1),
    ("Pad", {}, 13, [X, ints(0, -1, 0, 0, 1, -2)], 1),
    ("Pad", {}, 18, [X, ints(1, 2), f32(0), ints(-1)], 1),
    ("Pad", {}, 18, [X, ints(1, 2, 0, 1), None, ints(2, 0)], 1),
    ("Pad", {"pads": [0, 1, 2, 0, 3, 0], "value": 1.5}, 7, [X], 1),
    ("Pad", {"pads": [0, 1, 1, 0, 1, 0], "mode": "reflect"}, 7, [X], 1),
    ("Tile", {}, 13, [X, ints(1, 2, 3)], 1),
    ("Tile", {}, 7, [X, ints(2, 1, 1)], 1),
    ("Gather", {}, 13, [X, ints(1, 0, 1)], 1),
    ("Gather", {"axis": -1}, 13, [X, np.array([[0, -1], [2, 3]], dtype=np.int32)], 1),
    ("Gather", {"axis": 1}, 7, [X, np.array(2)], 1),
    ("GatherElements", {"axis": 2}, 13, [X, np.array([[[0, -1]], [[3, 1]]])], 1),
    ("GatherElements", {}, 11, [X[0], np.array([[2, 0, 1, 0]])], 1),
    ("GatherND", {}, 13, [X, np.array([[0, 2], [1, -1]])], 1),
    ("GatherND", {}, 11, [X, np.array([[[1]], [[0]]])], 1),
    ("GatherND", {"batch_dims": 1}, 13, [X, np.array([[2], [0]])], 1),
    ("GatherND", {"batch_dims": 2}, 12, [X, np.array([[[1], [3], [0]]] * 2)], 1),
    ("GatherND", {}, 13, [X, np.array([1, 2, 0])], 1),  # a scalar
    ("ScatterElements", {"axis": 1}, 13, [X[0], np.array([[1, 3], [0, -1]]), normal(2, 2)], 1),
    ("ScatterElements", {"reduction": "add"}, 18, [X[0], np.array([[1, 1, 2, 0]] * 2), normal(2, 4)], 1),
    ("ScatterElements", {"reduction": "max"}, 18, [X[0], np.array([[1, 1, 2, 0]] * 2), normal(2, 4)], 1),
    ("Scatter", {}, 9, [X[0], np.array([[1, 0, 2, 0]]), normal(1, 4)], 1),
    ("ScatterND", {}, 13, [X, np.array([[0, 2], [1, 0]]), normal(2, 4)], 1),
    ("ScatterND", {"reduction": "mul"}, 16, [X, np.array([[1], [1]]), normal(2, 3, 4)], 1),
    ("ScatterND", {"reduction": "min"}, 18, [X, np.array([[0, 2, 1], [0, 2, 1]]), normal(2)], 1),
    ("ScatterND", {}, 13, [X, np.array([1, 2, 0]), np.array(5.0, np.float32)], 1),  # of a scalar
    ("DepthToSpace", {"blocksize": 2}, 13, [IMAGE], 1),
    ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, 11, [IMAGE], 1),
    ("SpaceToDepth", {"blocksize": 2}, 13, [IMAGE], 1),
    ("CumSum", {}, 14, [X, np.array(1)], 1),
    ("CumSum", {"exclusive": 1, "reverse": 1}, 11, [X, np.array(-1, np.int32)], 1),
    ("CumSum", {"exclusive": 1}, 14, [ints(4, 5, 6), np.array(0)], 1),
    ("CumProd", {"reverse": 1}, 26, [X, np.array(2)], 1),
    ("CumProd", {"exclusive": 1}, 26, [X, np.array(0)], 1),
    ("OneHot", {}, 11, [np.array([[1, -1], [5, 0]]), np.array(4), ints(3, 7)], 1),
    ("OneHot", {"axis": 0}, 9, [np.array([1, 2]), np.array(3), np.array([0, 1], np.float32)], 1),
]


def test_every_kind_has_a_case() -> None:
    assert {c[0] for c in CASES} - {"Scatter"} == {d.kind for d in (*index.DEFS, *gather.DEFS)}


def evaluator_lacks(op: str, attrs: dict, opset: int, operands: list) -> bool:
    """Forms that ONNX's own evaluator does not support: partial GatherElements, negative pads, reductions and Scatter of old
    opsets."""
    return (
        (op == "GatherElements" and operands[0].ndim == 3)
        or (op == "Pad" and len(operands) > 1 and operands[1].min() < 0)
        or (op == "ScatterND" and opset < 18 and "reduction" in attrs)
        or (op in ("Scatter", "Split") and opset < 11)
    )


@pytest.mark.parametrize(("op", "attrs", "opset", "operands", "outputs"), CASES)
def test_against_onnx(op: str, attrs: dict, opset: int, operands: list, outputs: int) -> None:
    fixed = () if op == "Concat" else tuple(i for i, x in enumerate(operands) if i and x is not None)
    case = Case(op, operands, attrs, opset, outputs, fixed)
    symbolic = {0: [a for a, d in enumerate(operands[0].shape) if d > 1]}
    if op == "Split":
        symbolic = {0: [attrs["axis"]]} if "num_outputs" in attrs else {}
    if op in ("Concat", "GatherND", "ScatterND", "OneHot"):  # their other operands determine the sizes
        symbolic = {}
    if not evaluator_lacks(op, attrs, opset, operands):
        check_case(case, "reference", symbolic=symbolic)
    if op != "CumProd" and attrs.get("num_outputs") != 3:  # newer than ONNX Runtime; an uneven Split
        check_case(case, onnxruntime_outputs(case), symbolic=symbolic)


@pytest.mark.parametrize(("op", "attrs", "opset", "operands", "outputs"), CASES)
def test_operands_known_only_at_run_time(op: str, attrs: dict, opset: int, operands: list, outputs: int) -> None:
    """Inferred types have all known dimensions; the kernels find the others."""
    given = tuple(i for i, x in enumerate(operands) if x is not None)
    case, twin = Case(op, operands, attrs, opset, outputs), Case(op, operands, attrs, opset, outputs, given)
    graph = import_case(case)
    for i, (a, b) in enumerate(zip(run(graph, case.fed), run(import_case(twin), {}), strict=True)):
        assert np.array_equal(a, b)
        shape = graph.op(graph.outputs[i]).outputs[0].type.dims
        assert len(shape) == a.ndim
        assert all(isinstance(d, Dim) or d == k for d, k in zip(shape, a.shape, strict=True)), shape


# ---------------------------------------------------------------- Concat and Split


def test_concat_of_symbols() -> None:
    assert shape_of("Concat", tensor(FP32, N, 3), tensor(FP32, H, 3), attrs=ConcatAttrs(0)) == (N + H, 3)
    assert shape_of("Concat", tensor(FP32, N, 3), tensor(FP32, 2, 3), attrs=ConcatAttrs(1)) == (2, 6)
    unknown = tensor(FP32).with_shape(None)
    assert len(shape_of("Concat", unknown, tensor(FP32, 2, 3), attrs=ConcatAttrs(0))) == 2
    assert shape_of("Concat", unknown, attrs=ConcatAttrs(0)) is None
    value = infer_value("Concat", [N, 2], [7], attrs=ConcatAttrs(0))
    assert list(value) == [N, 2, 7]
    assert infer_value("Concat", [3, 2], [7], attrs=ConcatAttrs(0)).dtype == np.int64


def test_split_of_symbols() -> None:
    def shapes(*operands: Any, outputs: int, attrs: SplitAttrs) -> list:
        return [t.shape for t in infer("Split", *operands, outputs=outputs, attrs=attrs).types]

    x = tensor(FP32, N, 4 * H)
    assert shapes(x, outputs=2, attrs=SplitAttrs(1, 2)) == [(N, 2 * H)] * 2
    uneven = shapes(tensor(FP32, N), outputs=3, attrs=SplitAttrs(0, 3))
    for n in (1, 2, 4, 6, 7):
        got = [evaluate(s[0], {"n": n}) for s in uneven]
        assert sum(got) == n
        assert got == [len(p) for p in run_kernel("Split", [np.zeros(n)], {"axis": 0, "num_outputs": 3})]
    assert shapes(x, [H, 3 * H], outputs=2, attrs=SplitAttrs(1)) == [(N, H), (N, 3 * H)]
    free = shapes(tensor(FP32, N, 6), tensor(INT64, 2), outputs=2, attrs=SplitAttrs(1))
    assert all(isinstance(s[1], Dim) for s in free)
    parts = infer("Split", [N, 2, H, 4], outputs=2, attrs=SplitAttrs(0, 2)).values
    assert [list(v) for v in parts] == [[N, 2], [H, 4]]


# ---------------------------------------------------------------- Slice


@pytest.mark.parametrize("step", [1, 2, 3, -1, -2])
@pytest.mark.parametrize("start", [0, 2, 5, 99, -1, -4, -99])
@pytest.mark.parametrize("end", [0, 3, 6, 99, MAX, -1, -3, -99, -MAX])
def test_slice_sizes_are_those_of_python(start: int, end: int, step: int) -> None:
    for dim in range(1, 9):
        wanted = len(range(dim)[start:end:step])
        assert sliced(dim, start, end, step) == wanted
        size = sliced(N, start, end, step)
        assert size is not None
        assert evaluate(size, {"n": dim}) == wanted, f"{size} at n = {dim}"


def test_slice_bounds_that_are_symbols() -> None:
    assert sliced(10, 0, N, 1) == dim_min(N, 10)
    assert sliced(N, 0, N, 1) == N
    assert sliced(2 * N, N, 2 * N, 1) == N
    assert sliced(N, 0, -1, 1) == N - 1
    assert sliced(N, 1, MAX, 1) == N - 1
    assert sliced(N, 0, H, 1) == dim_min(N, H)
    assert sliced(N + 4, H, N, 1) == dim_max(0, N - H)
    assert sliced(N, N - H, N, 1) is None  # the start may count from the end
    assert isinstance(shape_of("Slice", tensor(FP32, N), [N - H], [N])[0], Dim)
    assert len(shape_of("Slice", tensor(FP32, N, 3), tensor(INT64, 1), tensor(INT64, 1), [0])) == 2
    assert shape_of("Slice", tensor(FP32, N, 3), tensor(INT64, 1), tensor(INT64, 1), [0])[1] == 3
    assert list(infer_value("Slice", [N, 2, H, 5], [1], [4], [0], [2])) == [2, 5]
    assert list(infer_value("Slice", [N, 2, H], [-1], [-MAX], [0], [-1])) == [H, 2, N]


# ---------------------------------------------------------------- Pad, Tile, blocks


def test_pad_of_symbols() -> None:
    assert shape_of("Pad", tensor(FP32, N, H), [0, 1, 0, 2], attrs=PadAttrs()) == (N, H + 3)
    assert shape_of("Pad", tensor(FP32, N, 4), [0, N, 0, 0], attrs=PadAttrs()) == (N, N + 4)
    assert shape_of("Pad", tensor(FP32, N, 4), [1, 2], None, [1], attrs=PadAttrs()) == (N, 7)
    some = shape_of("Pad", tensor(FP32, N, 4), tensor(INT64, 2), None, [1], attrs=PadAttrs())
    assert some[0] == N
    assert isinstance(some[1], Dim)
    assert infer_value("Pad", [N, 2], [1, 1], attrs=PadAttrs()).tolist() == [0, N, 2, 0]
    assert infer_value("Pad", [N, 2], [0, 1], 7, attrs=PadAttrs()).tolist() == [N, 2, 7]
    assert infer_value("Pad", [N, 2], [1, 0], attrs=PadAttrs("edge")).tolist() == [N, N, 2]


def test_known_axes_of_pad_are_resolved_on_import() -> None:
    (op,) = import_case(Case("Pad", [X, ints(1, 2), None, ints(-1)], opset=18, constants=(1, 3))).of_kind("Pad")
    assert len(op.inputs) == 2
    (op,) = import_case(Case("Pad", [X, ints(1, 2), None, ints(-1)], opset=18, constants=(1,))).of_kind("Pad")
    assert len(op.inputs) == 4


def test_a_slice_takes_bounds_of_rank_0() -> None:
    """tf2onnx's loops over regions slice from the number of the iteration, as ONNX Runtime allows."""
    graph = import_case(Case("Slice", [X, np.array(1), ints(2), np.array(0)], opset=17, constants=(2,)))
    (op,) = graph.of_kind("Slice")
    assert [graph.type(v).shape for v in op.inputs if v is not None] == [X.shape, (1,), (1,), (1,)]


def test_reflect_pads_stay_inside() -> None:
    x = np.arange(3.0)
    assert run_kernel("Pad", [x, ints(2, 0)], {"mode": "reflect"})[0].tolist() == [2, 1, 0, 1, 2]
    with pytest.raises(RunError, match="reach past the border"):
        run_kernel("Pad", [x, ints(0, 3)], {"mode": "reflect"})


def test_negative_pads_crop_before_reflecting() -> None:
    x = np.arange(5.0)
    (y,) = run_kernel("Pad", [x, ints(-1, 2)], {"mode": "reflect"})
    assert y.tolist() == [1, 2, 3, 4, 3, 2]


def test_tile_and_blocks_of_symbols() -> None:
    assert shape_of("Tile", tensor(FP32, N, 3), [2, H]) == (2 * N, 3 * H)
    assert infer_value("Tile", [N, 2], [2]).tolist() == [N, 2, N, 2]
    assert all(isinstance(d, Dim) for d in shape_of("Tile", tensor(FP32, 2, 3), tensor(INT64, 2)))
    x = tensor(FP32, N, 8, 2 * H, 6)
    assert shape_of("DepthToSpace", x, attrs=BlockAttrs(2)) == (N, 2, 4 * H, 12)
    assert shape_of("SpaceToDepth", x, attrs=BlockAttrs(2)) == (N, 32, H, 3)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth_inverts_depth_to_space(mode: str) -> None:
    attrs = {"blocksize": 2, "mode": mode}
    (y,) = run_kernel("DepthToSpace", [IMAGE], attrs)
    (back,) = run_kernel("SpaceToDepth", [y], attrs)
    assert np.array_equal(back, IMAGE)


# ---------------------------------------------------------------- reading and writing by index


def test_gather_of_symbols() -> None:
    assert shape_of("Gather", tensor(FP32, 100, 8), tensor(INT64, N, H)) == (N, H, 8)
    assert infer_value("Gather", [N, 3, H], 2).item() == H
    assert infer_value("Gather", [N, 3, H], [-1, 1]).tolist() == [H, 3]
    assert infer_value("Gather", [N, 3, H], 1).dtype == np.int64
    assert infer_value("Gather", [2, 3, 4], [N]) is None
    assert infer_value("GatherElements", [N, H], [1, 1], attrs=GatherAttrs(0)).tolist() == [H, H]
    assert infer_value("GatherND", [N, H], [[1]], attrs=GatherNDAttrs()).tolist() == [H]
    assert infer_value("ScatterND", [1, 2, 3], [[1]], [N]).tolist() == [1, N, 3]
    assert infer_value("ScatterElements", [1, 2, 3], [2], [N]).tolist() == [1, 2, N]
    assert infer_value("ScatterND", [1, 2, 3], [[1]], [N], attrs=ScatterNDAttrs("add")) is None
    assert infer_value("CumSum", [N, 2, H], 0).tolist() == [N, N + 2, N + H + 2]
    assert shape_of("OneHot", tensor(INT64, N), [5], tensor(FP32, 2), attrs=OneHotAttrs(0)) == (5, N)
    assert isinstance(shape_of("OneHot", tensor(INT64, N), tensor(INT64), tensor(FP32, 2))[1], Dim)
    assert infer("OneHot", tensor(INT64, N), [5], tensor(FP32, 2)).types[0].dtype == FP32


def test_unknown_ranks_pass_through() -> None:
    unknown = tensor(FP32).with_shape(None)
    for kind, *rest in (
        ("Slice", [0], [1]),
        ("Gather", tensor(INT64, 2)),
        ("GatherND", tensor(INT64, 2)),
        ("ScatterND", tensor(INT64, 1, 1), tensor(FP32, 1)),
        ("ScatterElements", tensor(INT64, 1), tensor(FP32, 1)),
        ("Pad", [1, 1]),
        ("Tile", [2]),
        ("Split", [2, 2]),
    ):
        result = infer(kind, unknown, *rest, outputs=2 if kind == "Split" else 1)
        assert all(t.shape is None for t in result.types), kind
    assert shape_of("GatherElements", unknown, tensor(INT64, 2)) == (2,)
    assert len(shape_of("DepthToSpace", unknown, attrs=BlockAttrs(2))) == 4


# ---------------------------------------------------------------- refusals

T = tensor(FP32, 2, 3)
REFUSED = [
    ("Concat", [], ConcatAttrs(0), "needs an operand"),
    ("Concat", [T, tensor(FP32, 2)], ConcatAttrs(0), "different rank"),
    ("Concat", [T, tensor(FP32, 2, 4)], ConcatAttrs(0), "axis 1 differs"),
    ("Concat", [T, tensor(FP16, 2, 3)], ConcatAttrs(0), "different types"),
    ("Concat", [T], ConcatAttrs(2), "out of range"),
    ("Split", [T, [1, 1]], SplitAttrs(1), "do not add up to 3"),
    ("Split", [T], SplitAttrs(1, 3), "gives 3 parts, and has 1 outputs"),
    ("Split", [T], SplitAttrs(1), "sizes or num_outputs"),
    ("Split", [T], SplitAttrs(4, 1), "out of range"),
    ("Slice", [T, [0], [1], [0], [0]], None, "step of zero"),
    ("Slice", [T, [0], [1, 2]], None, "differ in length"),
    ("Slice", [T, [0], [1], [2]], None, "out of range"),
    ("Slice", [T, [0, 0], [1, 1], [0, -2]], None, "name an axis twice"),
    ("Slice", [T, tensor(FP32, 1), [1]], None, "integers as operand 1"),
    ("Pad", [T, [1, 1]], PadAttrs(), "2 pads for 2 axes"),
    ("Pad", [T, [-2, -2, -2, -2]], PadAttrs(), "leaves nothing of axis 0"),
    ("Pad", [T, [0, 0, 0, 0]], PadAttrs("mirror"), "not 'mirror'"),
    ("Pad", [T, [0, 0, 0, 0], tensor(FP16)], PadAttrs(), "different types"),
    ("Tile", [T, [2]], None, "has 1 repeats"),
    ("DepthToSpace", [tensor(FP32, 1, 6, 2, 2)], BlockAttrs(2), "6 is not a multiple of 4"),
    ("SpaceToDepth", [tensor(FP32, 1, 4, 2, 3)], BlockAttrs(2), "3 is not a multiple of 2"),
    ("SpaceToDepth", [T], BlockAttrs(2), "rank 4"),
    ("DepthToSpace", [tensor(FP32, 1, 4, 2, 2)], BlockAttrs(2, "RCD"), "mode DCR or CRD"),
    ("CumSum", [T, [2]], None, "out of range"),
    ("CumSum", [T, [0, 1]], None, "one element"),
    ("Gather", [T, [3]], GatherAttrs(1), "index 3 is out of range for axis 1"),
    ("Gather", [T, [-4]], GatherAttrs(1), "index -4 is out of range for axis 1"),
    ("Gather", [tensor(FP32), [0]], None, "rank 1 or more"),
    ("Gather", [T, tensor(FP32, 1)], None, "integers as operand 1"),
    ("GatherND", [T, [[0, 0, 0]]], None, "indexes 3 axes"),
    ("GatherND", [T, tensor(INT64, 3, 1)], GatherNDAttrs(1), r"\[2\] must equal \[3\]"),
    ("GatherND", [T, tensor(INT64, 1)], GatherNDAttrs(1), "rank above batch_dims"),
    ("GatherElements", [T, [0]], None, "indices of the operand's rank"),
    ("GatherElements", [T, [[2, 0, 0]]], GatherAttrs(0), "index 2 is out of range"),
    ("ScatterND", [T, [[0, 0, 0]], tensor(FP32, 1)], None, "indexes 3 axes"),
    ("ScatterND", [T, [[0]], tensor(FP32, 1, 4)], None, r"\[1, 4\] must equal \[1, 3\]"),
    ("ScatterND", [T, [[0]], tensor(FP16, 1, 3)], None, "different types"),
    ("ScatterND", [T, [[0]], tensor(FP32, 1, 3)], ScatterNDAttrs("sum"), "not 'sum'"),
    ("ScatterElements", [T, [[0]], tensor(FP32, 1, 2)], None, "must equal"),
    ("ScatterElements", [T, [[9]], tensor(FP32, 1, 1)], ScatterElementsAttrs(1), "index 9 is out of range"),
    ("OneHot", [tensor(INT64, 2), [5], tensor(FP32, 2, 1)], None, "pair of values"),
    ("Gather", [T, np.full(1000, 3)], GatherAttrs(1), "index 3 is out of range for axis 1"),
    ("Gather", [T, [H + 3]], GatherAttrs(1), "is out of range for axis 1"),
    ("GatherND", [tensor(FP32, 1, 4), [[1000000, 2]]], None, "index 1000000 is out of range for axis 0"),
    ("GatherND", [T, [[0, 0], [1, -4]]], None, "index -4 is out of range for axis 1"),
    ("GatherND", [T, [[3], [0]]], GatherNDAttrs(1), "index 3 is out of range for axis 1"),
    ("GatherND", [TensorType(FP32, (N, 4)), [[0, 4]]], None, "index 4 is out of range for axis 1"),
    ("GatherND", [TensorType(FP32, (N, 4)), [[N, 0]]], None, "index n is out of range for axis 0"),
    ("GatherElements", [T, np.zeros((5, 3), int)], GatherAttrs(1), "has 5 indices along axis 0"),
    ("ScatterND", [T, [[2, 0]], tensor(FP32, 1)], None, "index 2 is out of range for axis 0"),
    ("ScatterElements", [T, np.zeros((5, 3), int), tensor(FP32, 5, 3)], ScatterElementsAttrs(1), "has 5 indices along"),
    ("Pad", [T, [0, 4, 0, -5]], PadAttrs(), "takes more than there is of axis 1"),
    ("Tile", [T, [1, -1]], None, "negative repeats"),
]


@pytest.mark.parametrize(("kind", "operands", "attrs", "because"), REFUSED)
def test_refused(kind: str, operands: list, attrs: Attrs | None, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        infer(kind, *operands, attrs=attrs)


def test_indices_that_may_be_inside_are_taken() -> None:
    """An unknown size cannot contradict, and there is no valid index into an empty tensor."""
    infer("GatherND", TensorType(FP32, (N, 4)), [[9, 3]])
    infer("Gather", TensorType(FP32, (N,)), [N - 1])
    infer("Gather", tensor(FP32, 0, 3), np.zeros(0, np.int64))
    infer("GatherND", tensor(FP32, 0, 3), np.zeros((0, 1), np.int64))


@pytest.mark.parametrize(
    ("kind", "attrs", "x", "indices", "value", "proven"),
    [
        ("Gather", GatherAttrs(0), (4,), (2,), ints(0, -4), True),
        ("Gather", GatherAttrs(0), (4,), (2,), ints(0, 4), False),
        ("Gather", GatherAttrs(0), (4,), (2,), None, False),
        ("Gather", GatherAttrs(0), (N,), (1,), ints(0), True),  # n is 1 or more
        ("Gather", GatherAttrs(0), (N,), (1,), ints(1), False),
        ("Gather", GatherAttrs(0), (N + 2,), (1,), np.array([N], object), True),
        ("Gather", GatherAttrs(0), (N,), (1,), np.array([H], object), False),
        ("GatherND", GatherNDAttrs(), (N, 4), (1, 2), ints(0, 3).reshape(1, 2), True),
        ("GatherND", GatherNDAttrs(1), (N, 4), (N, 1), None, False),
        ("GatherND", GatherNDAttrs(1), (N, 4), (H, 1), np.array([[1]]), False),  # batches that may differ
        ("GatherND", GatherNDAttrs(), None, (1, 2), ints(0, 3), False),
        ("GatherND", GatherNDAttrs(), (2, 4), (1, N), ints(0, 3), False),
        ("GatherElements", GatherAttrs(1), (N, 4), (N, 1), ints(3), True),
        ("GatherElements", GatherAttrs(1), (N, 4), (H, 1), ints(3), False),  # rows that may be absent
        ("ScatterElements", ScatterElementsAttrs(0), (4, 4), (1, 3), ints(3, 0, 0).reshape(1, 3), True),
        ("ScatterND", ScatterNDAttrs(), (4, 4), (0, 2), np.zeros((0, 2), np.int64), True),
    ],
)
def test_positions_are_proven_to_be_inside(
    kind: str, attrs: Attrs, x: Any, indices: Any, value: Any, proven: bool
) -> None:
    types = [TensorType(FP32, x), TensorType(INT64, indices)]
    assert all_inside(kind, attrs, types, value) is proven


def test_kernels_refuse_at_run_time() -> None:
    with pytest.raises(RunError, match="index 9 is out of bounds"):
        run_kernel("Gather", [X, ints(9)], {"axis": 0})
    with pytest.raises(RunError, match="do not add up to 3"):
        run_kernel("Split", [X, ints(1, 1)], {"axis": 1, "num_outputs": None})
    with pytest.raises(RunError, match="2 pads for 3 axes"):
        run_kernel("Pad", [X, ints(1, 1)], {"mode": "constant"})
    with pytest.raises(RunError, match="neither sizes nor num_outputs"):
        run_kernel("Split", [X], {"axis": 1, "num_outputs": None})
