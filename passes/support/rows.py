"""Operators that compute each row of a tensor from the same row of their operands, and copies of such operators for other rows.

Rows are the entries along an axis whose size depends on data: detections, regions of interest, chosen tokens. If an operator keeps
rows apart, a row's result does not depend on the other rows. So the operator may compute additional rows, or other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optdnn.dim import Dim, DimLike, bounds, floordiv
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.ops.shape import ReshapeAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.support.facts import RESHAPES, ints, operand
from optdnn.types import Array, Shape, TensorType, normalize_axis, product


class Rows(NamedTuple):
    """The rows of a tensor: along ``axis``, with ``per`` elements of the axis per row."""

    axis: int
    per: int

    def from_end(self, rank: int) -> int:
        """The axis counted from the end, as broadcasting aligns axes: 1 is the last one."""
        return rank - self.axis


class _Mixed(Exception):
    """A shape does not depend linearly on the number of rows, or depends on other data-dependent sizes."""


def rows_of(t: TensorType, count: DimLike) -> Rows | None:
    """The rows of a tensor with ``count`` rows; None if no axis holds rows. Raises _Mixed for two such axes, or unknown ones."""
    if t.shape is None:
        raise _Mixed
    found: Rows | None = None
    for axis, d in enumerate(t.shape):
        if not isinstance(d, Dim):
            continue
        per = floordiv(d, count)
        if found is not None or not isinstance(per, int) or per < 1 or per * count != d:
            raise _Mixed
        found = Rows(axis, per)
    return found


@dataclass(frozen=True)
class RowOp:
    """An operator, and the rows of each operand and result (None: no rows)."""

    graph: Graph
    op: Op
    given: tuple[Rows | None, ...]
    made: tuple[Rows | None, ...]

    def dims(self, slot: int) -> Shape:
        return self.graph.type(operand(self.op, slot)).dims

    @property
    def out(self) -> Rows:
        """The rows of the first result."""
        rows = self.made[0]
        assert rows is not None
        return rows

    @property
    def rank(self) -> int:
        return len(self.op.outputs[0].type.dims)

    def alone(self, *slots: int) -> bool:
        """Whether exactly these operands have rows."""
        return all((rows is not None) == (i in slots) for i, rows in enumerate(self.given))

    def same(self, *slots: int) -> bool:
        """Whether exactly these operands have rows, along the same axis as the results."""
        return self.alone(*slots) and {self.given[s] for s in slots} | set(self.made) == {self.out}

    def aligned(self, slot: int) -> bool:
        """Whether a broadcast operand has its rows along the result's axis of rows, or one element along it."""
        if self.op.input(slot) is None:
            return True
        rows, dims, at = self.given[slot], self.dims(slot), self.out.from_end(self.rank)
        if rows is not None:
            return rows.from_end(len(dims)) == at and rows.per == self.out.per
        return len(dims) < at or dims[-at] == 1


def row_op(graph: Graph, op: Op, count: DimLike) -> RowOp | None:
    """``op``, if it computes ``count`` rows, each from the same row of its operands; else None."""
    check = _CHECKS.get(op.kind, _pointwise if op.kind in OPDEFS and OPDEFS[op.kind].traits.pointwise else None)
    if check is None:
        return None
    try:
        made = tuple(rows_of(out.type, count) for out in op.outputs)
        if None in made:
            return None
        given = tuple(None if v is None else _given(graph, v, count) for v in op.inputs)
    except _Mixed:
        return None
    found = RowOp(graph, op, given, made)
    return found if check(found) else None


def _given(graph: Graph, value: Value, count: DimLike) -> Rows | None:
    """The rows of an operand. An operand without rows may have symbolic sizes of the network's inputs."""
    t = graph.type(value)
    if isinstance(count, Dim) and t.shape is not None:
        own = count.symbols()
        if not any(isinstance(d, Dim) and d.symbols() & own for d in t.shape):
            return None
    return rows_of(t, count)


# ---------------------------------------------------------------- which operators keep rows apart


def _pointwise(r: RowOp) -> bool:
    return len(set(r.made)) == 1 and all(r.aligned(i) for i in range(len(r.given)))


def _batch(r: RowOp) -> bool:
    """Whether it computes each image of a batch separately."""
    return r.same(0) and r.out.axis == 0 and len(r.made) == 1


def _resize(r: RowOp) -> bool:
    scales, a = r.graph.constant_value(r.op.input(2)), r.op.attrs
    if a.coordinate_transformation_mode == "tf_crop_and_resize" or a.axes or a.keep_aspect_ratio_policy != "stretch":
        return False
    return _batch(r) and (r.op.input(3) is not None or (scales is not None and scales.reshape(-1)[0] == 1))


def _roi_align(r: RowOp) -> bool:
    return r.same(1, 2) and r.out == Rows(0, 1)


def _gemm(r: RowOp) -> bool:
    a = r.op.attrs
    return r.given[0] == Rows(int(a.transA), r.out.per) and r.given[1] is None and r.out.axis == 0 and r.aligned(2)


def _matmul(r: RowOp) -> bool:
    at = r.out.from_end(r.rank)
    if min(len(r.dims(0)), len(r.dims(1))) < 2 or at == 1:
        return False
    if at == 2:
        return r.given[1] is None and r.aligned(0)
    return r.aligned(0) and r.aligned(1)


def _packed_product(r: RowOp) -> bool:
    return r.same(0) and r.rank > 1 and r.out.from_end(r.rank) != 1


def _packed_rows(r: RowOp) -> bool:
    return r.alone(1) and r.out == r.given[1]


def _other_axis(r: RowOp) -> bool:
    """Whether it runs along another axis than the rows, and its results keep all axes."""
    axis = r.op.attrs.axis
    return r.same(0) and axis is not None and normalize_axis(axis, len(r.dims(0))) != r.out.axis


def _inner_axes(r: RowOp) -> bool:
    """Whether it runs over ``axis`` and all later axes, and the rows are before them."""
    return r.same(0) and normalize_axis(r.op.attrs.axis, len(r.dims(0))) > r.out.axis


def _reduction(r: RowOp) -> bool:
    if not r.alone(0):
        return False
    rows, rank, axes = r.given[0], len(r.dims(0)), None
    assert rows is not None
    if r.op.input(1) is not None:
        axes = ints(r.graph, r.op.input(1))
        if axes is None:
            return False
    return rows.axis not in reduced_axes(r.op.attrs, axes, rank)


def _arg(r: RowOp) -> bool:
    rows = r.given[0]
    return rows is not None and normalize_axis(r.op.attrs.axis, len(r.dims(0))) != rows.axis


def _reshape(r: RowOp) -> bool:
    """Whether rows keep their order: the axes before them hold the same number of elements."""
    rows = r.given[0]
    if rows is None or not r.alone(0):
        return False
    before, after = product(r.dims(0)[: rows.axis]), product(r.op.outputs[0].type.dims[: r.out.axis])
    others = [d for i, d in enumerate(r.op.outputs[0].type.dims) if i != r.out.axis]
    return before == after and 0 not in others


def _transpose(r: RowOp) -> bool:
    return r.alone(0)


def _concat(r: RowOp) -> bool:
    return r.same(*range(len(r.given))) and normalize_axis(r.op.attrs.axis, r.rank) != r.out.axis


def _slice(r: RowOp) -> bool:
    axes = range(len(r.graph.type(operand(r.op, 1)).dims)) if r.op.input(3) is None else ints(r.graph, r.op.input(3))
    return r.same(0) and axes is not None and r.out.axis not in {normalize_axis(a, r.rank) for a in axes}


def _pad(r: RowOp) -> bool:
    pads = ints(r.graph, r.op.input(1))
    axes = range(r.rank) if r.op.input(3) is None else ints(r.graph, r.op.input(3))
    if not r.same(0) or pads is None or axes is None:
        return False
    moved = {normalize_axis(a, r.rank) for i, a in enumerate(axes) if pads[i] or pads[i + len(axes)]}
    return r.out.axis not in moved


def _gather(r: RowOp) -> bool:
    """Whether a Gather takes the same elements of each row, or takes rows by index: further rows do not change the result."""
    rows, indices = r.given[0], r.given[1]
    axis = normalize_axis(r.op.attrs.axis, len(r.dims(0)))
    if indices is None:
        return rows is not None and rows.axis != axis
    if rows is not None and rows.axis != axis:
        return False
    some = rows is not None or bounds(r.dims(0)[axis])[0] >= 1  # rows after the last one read element 0
    return some and r.out == Rows(axis + indices.axis, indices.per)


def by_number(r: RowOp) -> bool:
    """Whether it gathers rows by their index among all rows."""
    return (
        r.op.kind == "Gather"
        and r.given[0] is not None
        and r.given[0].axis == normalize_axis(r.op.attrs.axis, len(r.dims(0)))
    )


def _gather_nd(r: RowOp) -> bool:
    """Whether it gathers elements of a tensor without rows: rows after the last one read element 0."""
    rows = r.given[1]
    if rows is None or r.given[0] is not None or r.op.attrs.batch_dims or rows.axis == len(r.dims(1)) - 1:
        return False
    return r.out == rows and all(bounds(d)[0] >= 1 for d in r.dims(0))


def _gather_elements(r: RowOp) -> bool:
    return r.same(0, 1) and normalize_axis(r.op.attrs.axis, r.rank) != r.out.axis


def _expand(r: RowOp) -> bool:
    return r.aligned(0) and r.graph.known(r.op.input(1)) is not None


def _filled(r: RowOp) -> bool:
    """ConstantOfShape: all elements are the same number."""
    return True


def _quantized(r: RowOp) -> bool:
    return r.same(0)


_CHECKS: dict[str, Callable[[RowOp], bool]] = {
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "LRN",
         "BatchNormalization", "InstanceNormalization", "GroupNormalization", "DepthToSpace", "SpaceToDepth"), _batch
    ),
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "PackedMatMul": _packed_product,
    "PackedGather": _packed_rows,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK", "Split"), _other_axis),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _inner_axes),
    **dict.fromkeys((k for k in OPDEFS if k.startswith("Reduce")), _reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(RESHAPES, _reshape),
    "Transpose": _transpose,
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantized),
}  # fmt: skip
"""Kind -> check whether an operator of this kind keeps rows apart. Pointwise kinds need no entry."""

SHAPED = {"Expand": 1, "ConstantOfShape": 0, "Resize": 3}
"""Kinds with an operand that holds the shape of the result, and its slot."""


def chosen_by(graph: Graph, value: Value) -> Op | None:
    """The NonZero of a one-dimensional mask, if ``value`` holds its positions in order; else None."""
    op = graph.op(value)
    while op.kind in RESHAPES or (op.kind == "Transpose" and 1 in graph.type(operand(op)).dims):
        op = graph.op(operand(op))
    if op.kind != "NonZero" or len(graph.type(operand(op)).dims) != 1:
        return None
    return op


# ---------------------------------------------------------------- copies


def resized(shape: Sequence[DimLike], rows: Rows, count: DimLike) -> tuple[DimLike, ...]:
    """The shape with ``count`` rows."""
    return tuple(rows.per * count if i == rows.axis else d for i, d in enumerate(shape))


def copy_of(patch: Patch, r: RowOp, operands: Mapping[Value, Value], rows: int | None) -> Op:
    """Add a copy of the operator on other ``operands``, which have ``rows`` rows (None: an unknown number).

    Operators of :data:`SHAPED` are copied only for a known number.
    """
    op, shape = r.op, r.op.outputs[0].type.dims
    given = [None if v is None else operands.get(v, v) for v in op.inputs]
    names = [f"{out.name}.rows" for out in op.outputs]
    if op.kind in RESHAPES:
        target = [-1 if rows is None and i == r.out.axis else d for i, d in enumerate(resized(shape, r.out, rows or 1))]
        return patch.add_op("Reshape", [given[0], _numbers(patch, target)], ReshapeAttrs(), names=names, src=op.src)
    slot = SHAPED.get(op.kind)
    if slot is not None and op.input(slot) is not None:
        assert rows is not None, op.kind
        given[slot] = _numbers(patch, resized(shape, r.out, rows))
    return patch.add_op(op.kind, given, op.attrs, names=names, outputs=len(op.outputs), src=op.src)


def _numbers(patch: Patch, values: Sequence[DimLike]) -> Value:
    return patch.constant(np.array(values, np.int64), "shape")


def elements_with(op: Op, made: Sequence[Rows | None], rows: int) -> int:
    """The number of elements of the largest result with this many rows."""
    sizes = (
        math.prod(d for d in resized(out.type.dims, r, rows) if isinstance(d, int))
        for out, r in zip(op.outputs, made, strict=True)
        if r is not None
    )
    return max(sizes, default=0)


def zero(patch: Patch, dtype: np.dtype[np.generic]) -> Value:
    """The number 0 as a scalar."""
    value: Array = np.zeros((), dtype)
    return patch.constant(value, "zero")
