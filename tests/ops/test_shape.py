"""Operators on shapes against ONNX's evaluator; symbolic chains of both torch exporters; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from known import infer, infer_value, shape_of
from onenode import Case, check_case, import_case, normal, onnxruntime_outputs, run

from optdnn.dim import Dim, dim_min, symbol
from optdnn.errors import RunError, ShapeError
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Attrs, Unsupported
from optdnn.ops.binary import CastAttrs
from optdnn.ops.create import ConstantOfShapeAttrs, EyeLikeAttrs
from optdnn.ops.exchange import NodeSpec
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import AxisAttrs, ReshapeAttrs, ShapeAttrs, TransposeAttrs, reshaped
from optdnn.ops.table import IMPORTERS, OPDEFS
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import BOOL, FP32, INT64, DimLike, tensor

N, H, W = symbol("n", 1), symbol("h", 1), symbol("w", 1)
X = normal(2, 3, 4)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


CASES: list[tuple[str, dict, int, list]] = [
    ("Reshape", {}, 13, [X, ints(4, 6)]),
    ("Reshape", {}, 13, [X, ints(0, -1)]),
    ("Reshape", {}, 13, [X, ints(-1)]),
    ("Reshape", {}, 13, [X, ints(0, 0, 2, -1, 1)]),
    ("Reshape", {}, 7, [X, ints(3, 2, 4)]),
    ("Reshape", {"allowzero": 1}, 14, [np.zeros((0, 3), np.float32), ints(3, 0, 4)]),
    ("Reshape", {}, 14, [np.array(3, np.float32), ints(1, 1)]),
    ("Flatten", {}, 13, [X]),
    ("Flatten", {"axis": 0}, 9, [X]),
    ("Flatten", {"axis": 3}, 13, [X]),
    ("Flatten", {"axis": -1}, 11, [X]),
    ("Transpose", {"perm": [2, 0, 1]}, 13, [X]),
    ("Transpose", {}, 7, [X]),
    ("Squeeze", {}, 13, [X[:1, :, None], ints(0, -2)]),
    ("Squeeze", {"axes": [1]}, 11, [X[:, :1]]),
    ("Squeeze", {}, 13, [X[:1, :, None]]),
    ("Unsqueeze", {}, 13, [X, ints(0, -1)]),
    ("Unsqueeze", {"axes": [3, 1]}, 11, [X]),
    ("Unsqueeze", {"axes": [0]}, 7, [X]),
    ("Expand", {}, 13, [X[:, :1], ints(2, 3, 4)]),
    ("Expand", {}, 13, [X[0], ints(2, 1, 4)]),
    ("Expand", {}, 8, [X, ints(1)]),
    ("Shape", {}, 13, [X]),
    ("Shape", {"start": 1}, 15, [X]),
    ("Shape", {"start": -2, "end": -1}, 15, [X]),
    ("Shape", {"start": 2, "end": 1}, 15, [X]),
    ("Size", {}, 13, [X]),
    ("Range", {}, 11, [np.array(3), np.array(11), np.array(3)]),
    ("Range", {}, 11, [np.array(10, np.int32), np.array(4, np.int32), np.array(-2, np.int32)]),
    ("Range", {}, 11, [np.array(5), np.array(5), np.array(1)]),
    ("Range", {}, 11, [np.array(v, np.float32) for v in (0.5, 3.2, 0.7)]),
    ("ConstantOfShape", {}, 9, [ints(2, 3)]),
    ("ConstantOfShape", {"value": np.array([7], dtype=np.int32)}, 9, [ints(2, 3)]),
    ("ConstantOfShape", {"value": np.array([True])}, 9, [ints(4)]),
    ("ConstantOfShape", {"value": np.array([2.5], dtype=np.float16)}, 9, [ints()]),
    ("Identity", {}, 13, [X]),
    ("Dropout", {}, 13, [X]),
    ("Dropout", {"ratio": 0.3}, 7, [X]),
    ("Dropout", {}, 13, [X, np.array(0.3, np.float32), np.array(False)]),
    ("EyeLike", {"k": 1}, 9, [X[0]]),
    ("EyeLike", {"k": -1, "dtype": 7}, 9, [X[0]]),
    ("Trilu", {}, 14, [X]),
    ("Trilu", {"upper": 0}, 14, [X, np.array(-1)]),
    ("Trilu", {"upper": 1}, 14, [X, np.array(2)]),
]


@pytest.mark.parametrize(("op", "attrs", "opset", "operands"), CASES)
def test_against_onnx(op: str, attrs: dict, opset: int, operands: list) -> None:
    from onnx import numpy_helper

    given = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    constants = range(1, len(operands)) if op not in ("Range", "ConstantOfShape") else range(len(operands))
    if op == "Dropout":
        constants = range(1, len(operands))
    case = Case(op, operands, given, opset, constants=tuple(constants))
    first = operands[0]
    axes = [a for a, d in enumerate(first.shape) if d > 1]
    symbolic = {0: axes} if op not in ("Range", "ConstantOfShape") and first.size else None
    if op == "Squeeze" and len(operands) == 1 and opset >= 13:
        symbolic = None  # see test_squeeze_without_axes
    if op == "Expand":
        symbolic = {0: axes[:1]} if first.ndim == 2 else None
    if op == "Reshape" and -1 not in operands[1]:
        symbolic = None
    if attrs.get("axes") != [3, 1]:  # the evaluator requires their order
        check_case(case, "reference", symbolic=symbolic)
    if not (op == "Shape" and attrs.get("start") == 2):  # ONNX Runtime 1.31 refuses an empty slice
        check_case(case, onnxruntime_outputs(case))


RUNTIME_OPERANDS = [
    c for c in CASES if c[0] in ("Reshape", "Expand", "Range", "ConstantOfShape") and "value" not in c[1]
]


@pytest.mark.parametrize(("op", "attrs", "opset", "operands"), RUNTIME_OPERANDS)
def test_operands_known_only_at_run_time(op: str, attrs: dict, opset: int, operands: list) -> None:
    case = Case(op, operands, attrs, opset)
    graph = import_case(case)
    known = import_case(Case(op, operands, attrs, opset, constants=tuple(range(len(operands)))))
    (y,), (expected,) = run(graph, case.fed), run(known, {})
    assert np.array_equal(y, expected)
    shape = graph.op(graph.outputs[0]).outputs[0].type.shape
    assert shape is not None
    assert len(shape) == y.ndim
    assert all(isinstance(d, Dim) or d == k for d, k in zip(shape, y.shape, strict=True))


# ---------------------------------------------------------------- symbolic shapes


@pytest.mark.parametrize(
    ("dims", "target", "expected"),
    [
        ((N, 3, H, W), (N, -1), (N, 3 * H * W)),
        ((N, 3, H, W), (0, 3, -1), (N, 3, H * W)),
        ((N, 768), (N, 12, -1), (N, 12, 64)),
        ((N, H, 768), (-1, 768), (N * H, 768)),
        ((N, H, 768), (N, -1, 12, 64), (N, H, 12, 64)),
        ((2 * N, H), (-1, 2 * H), (N, 2 * H)),
        ((N, H), (-1, 4), ((N * H) // 4, 4)),
        ((N, H // 2, W), (N, -1), (N, (H // 2) * W)),
        ((N + 1, 6), (2 * N + 2, -1), (2 * N + 2, 3)),
        ((N, 0), (0, -1), (N, 0)),
        ((N, 6), (H, 2, 3), (H, 2, 3)),
    ],
)
def test_reshape_with_symbols(dims: tuple, target: tuple, expected: tuple) -> None:
    assert reshaped(dims, target) == expected
    assert shape_of("Reshape", tensor(FP32, *dims), list(target), attrs=ReshapeAttrs()) == expected


def test_shapes_that_nothing_is_known_of() -> None:
    unknown = tensor(FP32).with_shape(None)
    assert shape_of("Reshape", unknown, [2, 3], attrs=ReshapeAttrs()) == (2, 3)
    assert len(shape_of("Reshape", unknown, [-1, 3], attrs=ReshapeAttrs())) == 2
    assert len(shape_of("Reshape", tensor(FP32, 6), tensor(INT64, 2))) == 2
    assert shape_of("Reshape", tensor(FP32, 6), tensor(INT64, N)) is None
    assert shape_of("Squeeze", unknown, [0]) is None
    assert shape_of("Squeeze", tensor(FP32, 1, 2), tensor(INT64, 1)) is None
    assert shape_of("Unsqueeze", tensor(FP32, 2), tensor(INT64, 1)) is None
    assert shape_of("Expand", unknown, [2, 3]) is None
    assert len(shape_of("Flatten", unknown)) == 2
    assert len(shape_of("Transpose", unknown, attrs=TransposeAttrs((1, 0)))) == 2
    assert len(shape_of("Shape", unknown)) == 1
    assert infer_value("Shape", unknown) is None
    assert infer_value("Size", unknown) is None


def test_values_through_shapes() -> None:
    x = tensor(FP32, N, 3, H)
    assert list(infer_value("Shape", x)) == [N, 3, H]
    assert list(infer_value("Shape", x, attrs=ShapeAttrs(-2, 2))) == [3]
    assert infer_value("Size", x).item() == 3 * N * H
    assert infer_value("Reshape", [N, 2], [2, 1]).tolist() == [[N], [2]]
    assert infer_value("Unsqueeze", N, [0]).tolist() == [N]
    assert infer_value("Squeeze", [N], [0]).item() == N
    assert infer_value("Flatten", [[N], [2]], attrs=AxisAttrs(1)).tolist() == [[N], [2]]
    assert infer_value("Transpose", [[N, 2]], attrs=TransposeAttrs((1, 0))).tolist() == [[N], [2]]
    assert infer_value("Expand", N, [2]).tolist() == [N, N]
    assert infer_value("Identity", [N]).tolist() == [N]
    assert infer_value("ConstantOfShape", [2], attrs=ConstantOfShapeAttrs(5, INT64)).tolist() == [5, 5]
    assert infer_value("Range", N, N + 4, 2).tolist() == [N, N + 2]
    assert infer_value("Range", 3, 0, -1).tolist() == [3, 2, 1]
    assert infer_value("Range", 0, N, 1) is None


def test_range_with_symbols() -> None:
    assert shape_of("Range", 0, N, 1) == (N,)
    assert shape_of("Range", 0, N, 2) == (-((-N) // 2),)
    assert shape_of("Range", N, 0, -1) == (N,)
    assert shape_of("Range", N, 0, 1) == (0,)
    assert isinstance(shape_of("Range", 0, 5, N)[0], Dim)


def test_expand_and_constant_of_shape_with_symbols() -> None:
    assert shape_of("Expand", tensor(FP32, 1, 4), [N, 1, 1]) == (N, 1, 4)
    assert shape_of("ConstantOfShape", [N, 2]) == (N, 2)
    assert infer("EyeLike", tensor(FP32, N, 3), attrs=EyeLikeAttrs(INT64)).types[0] == tensor(INT64, N, 3)


# ---------------------------------------------------------------- chains


class Chain:
    """A graph whose ops may take numbers as operands."""

    def __init__(self, *shape: DimLike):
        self.graph = Graph()
        self.x = self.graph.add_input("x", tensor(FP32, *shape))

    def __call__(self, kind: str, *inputs: Any, attrs: Attrs | None = None) -> Value:
        refs = [v if isinstance(v, Value) else self.graph.add_constant(np.asarray(v)) for v in inputs]
        return self.graph.add(kind, refs, attrs or OPDEFS[kind].attrs()).value

    def shape(self, value: Value) -> Any:
        return self.graph.type(value).shape

    def dim(self, axis: int) -> Value:
        return self("Gather", self("Shape", self.x), axis, attrs=GatherAttrs(0))


def test_chain_of_view() -> None:
    """x.view(x.size(0), -1) and x.view(n, t, heads, d // heads) in the form of the older exporter."""
    c = Chain(N, H, 768)
    n, t, d = (c("Unsqueeze", c.dim(i), [0]) for i in range(3))
    assert c.shape(c("Reshape", c.x, c("Concat", n, [-1], attrs=ConcatAttrs(0)))) == (N, 768 * H)
    head = c("Cast", c("Div", d, [12]), attrs=CastAttrs(INT64))
    target = c("Concat", n, t, [12], head, attrs=ConcatAttrs(0))
    assert c.shape(c("Reshape", c.x, target)) == (N, H, 12, 64)


def test_chain_of_slice_by_half_the_channels() -> None:
    """torch.chunk: sizes by (dim + 1) // 2 and a Slice with computed bounds."""
    c = Chain(N, 116, H, W)
    half = c("Div", c("Add", c.dim(1), 1), 2)
    bound = c("Unsqueeze", half, [0])
    assert c.shape(c("Slice", c.x, [0], bound, [1])) == (N, 58, H, W)
    assert c.shape(c("Slice", c.x, bound, c("Mul", bound, [2]), [1])) == (N, 58, H, W)


def test_chain_of_channel_shuffle() -> None:
    c = Chain(N, 116, H, W)
    dims = [c("Unsqueeze", c.dim(i), [0]) for i in range(4)]
    target = c("Concat", dims[0], [2], c("Div", dims[1], [2]), dims[2], dims[3], attrs=ConcatAttrs(0))
    y = c("Transpose", c("Reshape", c.x, target), attrs=TransposeAttrs((0, 2, 1, 3, 4)))
    back = c("Concat", dims[0], [-1], dims[2], dims[3], attrs=ConcatAttrs(0))
    assert c.shape(c("Reshape", y, back)) == (N, 116, H, W)


def test_chain_of_expand() -> None:
    """torch's expand: Where(Equal(shape, -1), ones, shape) -> Expand."""
    c = Chain(N, H)
    target = c("Concat", c("Unsqueeze", c.dim(0), [0]), [-1], [8], attrs=ConcatAttrs(0))
    target = c("Reshape", target, [-1])
    ones = c("ConstantOfShape", c("Shape", target), attrs=ConstantOfShapeAttrs(1, INT64))
    safe = c("Where", c("Equal", target, c("Mul", ones, [-1])), ones, target)
    mask = c("Unsqueeze", c.x, [2])
    assert c.shape(c("Expand", mask, safe)) == (N, H, 8)


def test_chain_of_positions() -> None:
    """arange(t) and position_ids[:, :t] of BERT."""
    c = Chain(N, H)
    t = c.dim(1)
    assert c.shape(c("Range", 0, t, 1)) == (H,)
    table = np.arange(512)[None]
    taken = c("Slice", table, [0], c("Unsqueeze", t, [0]), [1], [1])
    assert c.shape(taken) == (1, dim_min(H, 512))
    assert c.shape(c("Expand", taken, c("Shape", c.x))) == (N, H)


def test_chain_of_flatten_by_size() -> None:
    """reshape(n, prod(rest)) through Slice and Size of a part of the shape."""
    c = Chain(N, 3, H, W)
    shape = c("Shape", c.x)
    rest = c("Slice", shape, [1], [np.iinfo(np.int64).max], [0])
    volume = c("Unsqueeze", c("Mul", c("Mul", c.dim(1), c.dim(2)), c.dim(3)), [0])
    assert list(c.graph.known(rest)) == [3, H, W]
    assert c.shape(c("Reshape", c.x, c("Concat", c("Unsqueeze", c.dim(0), [0]), volume, attrs=ConcatAttrs(0)))) == (
        N,
        3 * H * W,
    )


def test_chain_with_comparisons_on_static_dims() -> None:
    c = Chain(N, 3, 20, 30)
    smaller = c("Where", c("Less", c.dim(2), c.dim(3)), c.dim(2), c.dim(3))
    assert c.graph.known(smaller) == 20
    scale = c("Div", np.float32(10), c("Cast", smaller, attrs=CastAttrs(FP32)))
    assert c.graph.known(scale) == np.float32(0.5)
    assert c.graph.known(c("Cast", c("Floor", scale), attrs=CastAttrs(INT64))) == 0


# ---------------------------------------------------------------- import


def imported(op: str, attrs: dict, operands: tuple = (), outputs: tuple = ("y",), opset: int = 13) -> list:
    from onenode import GraphEmit

    graph = Graph()
    refs = [graph.add_input(f"x{i}", t) if not isinstance(t, np.ndarray) else graph.add_constant(t)
            for i, t in enumerate(operands)]  # fmt: skip
    results = IMPORTERS[op](NodeSpec(op, "", opset, "n", tuple(refs), outputs, attrs), GraphEmit(graph))
    return [graph.op(r) for r in results]


def test_constant_in_every_form() -> None:
    def value(**attrs: Any) -> np.ndarray:
        (op,) = imported("Constant", attrs)
        assert op.kind == "Constant"
        return op.attrs.value

    assert np.array_equal(value(value=X), X)
    assert value(value_float=1.5) == np.float32(1.5)
    assert value(value_float=1.5).dtype == np.float32
    assert value(value_floats=[1.0, 2.0]).tolist() == [1, 2]
    assert value(value_int=3).dtype == np.int64
    assert value(value_int=3).shape == ()
    assert value(value_ints=[3, 4]).tolist() == [3, 4]
    dense = value(sparse_value=(np.array([5.0, 6.0], np.float32), np.array([1, 5]), (2, 3)))
    assert dense.tolist() == [[0, 5, 0], [0, 0, 6]]
    dense = value(sparse_value=(np.array([5.0], np.float32), np.array([[1, 2]]), (2, 3)))
    assert dense.tolist() == [[0, 0, 0], [0, 0, 5]]
    with pytest.raises(Unsupported, match="string constants"):
        value(value_string="a")
    with pytest.raises(Unsupported, match="no value"):
        value()


def test_dropout_mask_and_training() -> None:
    x = tensor(FP32, 2, 3)
    y, mask = imported("Dropout", {}, (x,), ("y", "m"))
    assert (y.kind, mask.kind) == ("Identity", "ConstantOfShape")
    assert mask.attrs.value == 1
    assert mask.outputs[0].type == tensor(BOOL, 2, 3)
    assert imported("Dropout", {}, (x,), ("y", "m"), opset=7)[1].outputs[0].type == tensor(FP32, 2, 3)
    symbolic = imported("Dropout", {}, (tensor(FP32, N, 3),), ("y", "m"))[1]
    assert symbolic.outputs[0].type == tensor(BOOL, N, 3)
    half, yes, no = np.float32(0.5), np.array(True), np.array(False)
    assert imported("Dropout", {}, (x, np.asarray(half), no))[0].kind == "Identity"
    assert imported("Dropout", {}, (x, np.asarray(np.float32(0)), yes))[0].kind == "Identity"
    with pytest.raises(Unsupported, match="training_mode"):
        imported("Dropout", {}, (x, np.asarray(half), yes))
    with pytest.raises(Unsupported, match="training_mode"):
        imported("Dropout", {}, (x, np.asarray(half), tensor(BOOL)))


def test_axes_are_counted_from_the_front() -> None:
    assert imported("Transpose", {}, (tensor(FP32, 2, 3, 4),))[0].attrs.perm == (2, 1, 0)
    assert imported("Transpose", {"perm": [1, 0, -1]}, (tensor(FP32, 2, 3, 4),))[0].attrs.perm == (1, 0, 2)
    assert imported("Flatten", {"axis": -1}, (tensor(FP32, 2, 3),))[0].attrs.axis == 1

    def axes(op: str, *operands: Any, **attrs: Any) -> list[int]:
        (made,) = imported(op, attrs, operands, opset=11 if attrs else 13)
        graph = Graph()  # the constant's value is in the inferred shape; read it from the op that holds it
        del graph
        return list(made.outputs[0].type.shape)

    assert axes("Unsqueeze", tensor(FP32, 2, 3), axes=[-1, 0]) == [1, 2, 3, 1]
    assert axes("Squeeze", tensor(FP32, 1, 3, 1), ints(-1)) == [1, 3]
    assert axes("Squeeze", tensor(FP32, 1, N, 1), axes=[0, -1]) == [N]


def test_squeeze_without_axes() -> None:
    assert shape_of("Squeeze", tensor(FP32, 1, symbol("big", 2), 1)) == (symbol("big", 2),)
    with pytest.raises(ShapeError, match="whether dimension n"):
        imported("Squeeze", {}, (tensor(FP32, 1, N),))


def test_range_in_half_precision_only_with_a_float_accumulator() -> None:
    with pytest.raises(Unsupported, match="stash_type"):
        imported("Range", {"stash_type": 10}, (tensor(FP32),) * 3, opset=27)


# ---------------------------------------------------------------- refusals

REFUSED = [
    ("Reshape", [tensor(FP32, 2, 3), [4, 2]], None, "6 elements against 8"),
    ("Reshape", [tensor(FP32, 2, 3), [4, -1]], None, "6 is not a multiple of 4"),
    ("Reshape", [tensor(FP32, 2, 3), [-1, -1]], None, "more than one -1"),
    ("Reshape", [tensor(FP32, 2), [1, 0]], None, "a 0 copies a dimension that is not there"),
    ("Reshape", [tensor(FP32, 2), [0, -1]], ReshapeAttrs(True), "-1 next to an empty dimension"),
    ("Reshape", [tensor(FP32, N, 4), [N, 3]], None, "elements against"),
    ("Reshape", [tensor(FP32, 2), tensor(FP32, 1)], None, "integers as operand 1"),
    ("Reshape", [tensor(FP32, 2), [[2]]], None, "1-D tensor as operand 1"),
    ("Flatten", [tensor(FP32, 2)], AxisAttrs(2), "axis 2 is out of range"),
    ("Transpose", [tensor(FP32, 2, 3)], TransposeAttrs((0, 0)), "not a permutation"),
    ("Transpose", [tensor(FP32, 2, 3)], TransposeAttrs((0,)), "not a permutation"),
    ("Squeeze", [tensor(FP32, 2, 3), [0]], None, "size is not 1"),
    ("Squeeze", [tensor(FP32, 1, 3), [2]], None, "out of range"),
    ("Squeeze", [tensor(FP32, 1, 3), [0, -2]], None, "name an axis twice"),
    ("Unsqueeze", [tensor(FP32, 3), [0, 0]], None, "name an axis twice"),
    ("Unsqueeze", [tensor(FP32, 3), [2]], None, "out of range"),
    ("Expand", [tensor(FP32, 3), [2]], None, "do not broadcast"),
    ("Range", [0, 4, 0], None, "step of zero"),
    ("Range", [[0, 1], 4, 1], None, "needs scalars"),
    ("ConstantOfShape", [[2, -1]], None, "negative dimension"),
    ("EyeLike", [tensor(FP32, 3)], None, "2-D tensor"),
    ("Trilu", [tensor(FP32, 3)], None, "rank 2 or more"),
]


@pytest.mark.parametrize(("kind", "operands", "attrs", "because"), REFUSED)
def test_refused(kind: str, operands: list, attrs: Attrs | None, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        infer(kind, *operands, attrs=attrs)


def test_an_empty_batch_reshapes_as_any_other() -> None:
    """ONNX does not define this case (0 elements and a -1). The operand's other dimensions determine the result."""
    empty = np.zeros((0, 3, 4), np.float32)
    for target, expected in ((ints(0, -1), (0, 12)), (ints(-1, 12), (0, 12)), (ints(0, 2, -1), (0, 2, 6))):
        assert run_kernel("Reshape", [empty, target], {"allowzero": False})[0].shape == expected
        assert reshaped((0, 3, 4), target.tolist()) == expected


def test_kernels_refuse_at_run_time() -> None:
    with pytest.raises(RunError, match="-1 next to an empty dimension"):
        run_kernel("Reshape", [np.zeros((2, 3), np.float32), ints(0, -1)], {"allowzero": True})
    with pytest.raises(RunError, match="copies a dimension that operand 0 lacks"):
        run_kernel("Reshape", [X, ints(2, 3, 4, 0)], {"allowzero": False})
    with pytest.raises(RunError, match=r"Range of int64\[\], int64\[\], int64\[\]: the step is zero"):
        run_kernel("Range", [np.array(0), np.array(4), np.array(0)], {})
