"""Row-wise operators, which compute each row of a tensor from the same row of their operands, and copies of them for other rows.

Rows are the entries along an axis whose size depends on data: detections, regions of interest, selected tokens. A row's result does
not depend on the other rows, so a row-wise operator may compute additional rows or other rows.
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
    """The rows of a tensor: each consists of ``per`` neighboring entries along ``axis``."""

    axis: int
    per: int

    def from_end(self, rank: int) -> int:
        """The axis counted from the end, as broadcasting aligns axes: 1 is the last one."""
        return rank - self.axis


class _Mixed(Exception):
    """A shape is not proportional to the number of rows, or has other symbolic sizes."""


def rows_of(t: TensorType, count: DimLike) -> Rows | None:
    """The rows of a tensor with ``count`` rows; None if no size is symbolic. Raises _Mixed if two are, or one does not fit."""
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
    operand_rows: tuple[Rows | None, ...]
    result_rows: tuple[Rows | None, ...]

    def dims(self, slot: int) -> Shape:
        return self.graph.type(operand(self.op, slot)).dims

    @property
    def out(self) -> Rows:
        """The rows of the first result."""
        rows = self.result_rows[0]
        assert rows is not None
        return rows

    @property
    def rank(self) -> int:
        return len(self.op.outputs[0].type.dims)

    def alone(self, *slots: int) -> bool:
        """Whether exactly these operands have rows."""
        return all((rows is not None) == (i in slots) for i, rows in enumerate(self.operand_rows))

    def same(self, *slots: int) -> bool:
        """Whether exactly these operands have rows, and all results have the same rows as they."""
        return self.alone(*slots) and {self.operand_rows[s] for s in slots} | set(self.result_rows) == {self.out}

    def aligned(self, slot: int) -> bool:
        """Whether a broadcast operand has its rows along the same axis as the result, or one element along this axis."""
        if self.op.input(slot) is None:
            return True
        rows, dims, at = self.operand_rows[slot], self.dims(slot), self.out.from_end(self.rank)
        if rows is not None:
            return rows.from_end(len(dims)) == at and rows.per == self.out.per
        return len(dims) < at or dims[-at] == 1


def row_op(graph: Graph, op: Op, count: DimLike) -> RowOp | None:
    """``op`` with its rows, if it computes ``count`` rows, each from the same row of its operands; else None."""
    check = _CHECKS.get(op.kind, _pointwise if op.kind in OPDEFS and OPDEFS[op.kind].traits.pointwise else None)
    if check is None:
        return None
    try:
        result_rows = tuple(rows_of(out.type, count) for out in op.outputs)
        if None in result_rows:
            return None
        operand_rows = tuple(None if v is None else _operand_rows(graph, v, count) for v in op.inputs)
    except _Mixed:
        return None
    found = RowOp(graph, op, operand_rows, result_rows)
    return found if check(found) else None


def _operand_rows(graph: Graph, value: Value, count: DimLike) -> Rows | None:
    """The rows of an operand. An operand without rows may have symbolic sizes of the network's inputs."""
    t = graph.type(value)
    if isinstance(count, Dim) and t.shape is not None:
        own = count.symbols()
        if not any(isinstance(d, Dim) and d.symbols() & own for d in t.shape):
            return None
    return rows_of(t, count)


# ---------------------------------------------------------------- checks: whether an operator is row-wise


def _pointwise(r: RowOp) -> bool:
    return len(set(r.result_rows)) == 1 and all(r.aligned(i) for i in range(len(r.operand_rows)))


def _batch(r: RowOp) -> bool:
    """Operators that compute each image of a batch separately: the rows must be images."""
    return r.same(0) and r.out.axis == 0 and len(r.result_rows) == 1


def _resize(r: RowOp) -> bool:
    scales, a = r.graph.constant_value(r.op.input(2)), r.op.attrs
    if a.coordinate_transformation_mode == "tf_crop_and_resize" or a.axes or a.keep_aspect_ratio_policy != "stretch":
        return False
    return _batch(r) and (r.op.input(3) is not None or (scales is not None and scales.reshape(-1)[0] == 1))


def _roi_align(r: RowOp) -> bool:
    return r.same(1, 2) and r.out == Rows(0, 1)


def _resized_peaks(r: RowOp) -> bool:
    return r.same(0, 1) and r.out == Rows(0, 1)


def _gemm(r: RowOp) -> bool:
    a = r.op.attrs
    rows = r.operand_rows
    return rows[0] == Rows(int(a.transA), r.out.per) and rows[1] is None and r.out.axis == 0 and r.aligned(2)


def _matmul(r: RowOp) -> bool:
    at = r.out.from_end(r.rank)
    if min(len(r.dims(0)), len(r.dims(1))) < 2 or at == 1:
        return False
    if at == 2:
        return r.operand_rows[1] is None and r.aligned(0)
    return r.aligned(0) and r.aligned(1)


def _packed_product(r: RowOp) -> bool:
    return r.same(0) and r.rank > 1 and r.out.from_end(r.rank) != 1


def _packed_rows(r: RowOp) -> bool:
    return r.alone(1) and r.out == r.operand_rows[1]


def _other_axis(r: RowOp) -> bool:
    """Operators along one axis that keep all axes: it must not be the axis of rows."""
    axis = r.op.attrs.axis
    return r.same(0) and axis is not None and normalize_axis(axis, len(r.dims(0))) != r.out.axis


def _inner_axes(r: RowOp) -> bool:
    """Operators over ``axis`` and all later axes: the axis of rows must be before them."""
    return r.same(0) and normalize_axis(r.op.attrs.axis, len(r.dims(0))) > r.out.axis


def _reduction(r: RowOp) -> bool:
    if not r.alone(0):
        return False
    rows, rank, axes = r.operand_rows[0], len(r.dims(0)), None
    assert rows is not None
    if r.op.input(1) is not None:
        axes = ints(r.graph, r.op.input(1))
        if axes is None:
            return False
    return rows.axis not in reduced_axes(r.op.attrs, axes, rank)


def _cumulative(r: RowOp) -> bool:
    axis = ints(r.graph, r.op.input(1))
    return r.same(0) and axis is not None and normalize_axis(axis[0], r.rank) != r.out.axis


def _arg(r: RowOp) -> bool:
    rows = r.operand_rows[0]
    return rows is not None and normalize_axis(r.op.attrs.axis, len(r.dims(0))) != rows.axis


def _reshape(r: RowOp) -> bool:
    """A Reshape must keep the order of rows: the axes before them must hold the same number of elements."""
    rows = r.operand_rows[0]
    if rows is None or not r.alone(0):
        return False
    before, after = product(r.dims(0)[: rows.axis]), product(r.op.outputs[0].type.dims[: r.out.axis])
    others = [d for i, d in enumerate(r.op.outputs[0].type.dims) if i != r.out.axis]
    return before == after and 0 not in others


def _transpose(r: RowOp) -> bool:
    return r.alone(0)


def _concat(r: RowOp) -> bool:
    return r.same(*range(len(r.operand_rows))) and normalize_axis(r.op.attrs.axis, r.rank) != r.out.axis


def _slice(r: RowOp) -> bool:
    axes = range(len(r.graph.type(operand(r.op, 1)).dims)) if r.op.input(3) is None else ints(r.graph, r.op.input(3))
    return r.same(0) and axes is not None and r.out.axis not in {normalize_axis(a, r.rank) for a in axes}


def _pad(r: RowOp) -> bool:
    pads = ints(r.graph, r.op.input(1))
    axes = range(r.rank) if r.op.input(3) is None else ints(r.graph, r.op.input(3))
    if not r.same(0) or pads is None or axes is None:
        return False
    padded = {normalize_axis(a, r.rank) for i, a in enumerate(axes) if pads[i] or pads[i + len(axes)]}
    return r.out.axis not in padded


def _gather(r: RowOp) -> bool:
    """A Gather may take the same elements of each row, or gather by indices that have rows."""
    rows, indices = r.operand_rows[0], r.operand_rows[1]
    axis = normalize_axis(r.op.attrs.axis, len(r.dims(0)))
    if indices is None:
        return rows is not None and rows.axis != axis
    if rows is not None and rows.axis != axis:
        return False
    not_empty = rows is not None or bounds(r.dims(0)[axis])[0] >= 1  # additional rows read element 0
    return not_empty and r.out == Rows(axis + indices.axis, indices.per)


def by_number(r: RowOp) -> bool:
    """Whether the operator gathers rows by their index among all rows."""
    return (
        r.op.kind == "Gather"
        and r.operand_rows[0] is not None
        and r.operand_rows[0].axis == normalize_axis(r.op.attrs.axis, len(r.dims(0)))
    )


def _gather_nd(r: RowOp) -> bool:
    """A GatherND must read a tensor without rows that is not empty: additional rows read element 0."""
    rows = r.operand_rows[1]
    if rows is None or r.operand_rows[0] is not None or r.op.attrs.batch_dims or rows.axis == len(r.dims(1)) - 1:
        return False
    return r.out == rows and all(bounds(d)[0] >= 1 for d in r.dims(0))


def _gather_elements(r: RowOp) -> bool:
    return r.same(0, 1) and normalize_axis(r.op.attrs.axis, r.rank) != r.out.axis


def _expand(r: RowOp) -> bool:
    return r.aligned(0) and r.graph.known(r.op.input(1)) is not None


def _filled(r: RowOp) -> bool:
    """A ConstantOfShape is always row-wise: all its elements are the same number."""
    return True


def _quantized(r: RowOp) -> bool:
    return r.same(0)


_CHECKS: dict[str, Callable[[RowOp], bool]] = {
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "LRN",
         "BatchNormalization", "InstanceNormalization", "GroupNormalization", "DepthToSpace", "SpaceToDepth"), _batch
    ),
    "Resize": _resize,
    "ResizedPeaks": _resized_peaks,
    "RoiAlign": _roi_align,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "PackedMatMul": _packed_product,
    "PackedGather": _packed_rows,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK", "Split"), _other_axis),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "DeviationNormalization"), _inner_axes),
    **dict.fromkeys((k for k in OPDEFS if k.startswith("Reduce")), _reduction),
    **dict.fromkeys(("CumSum", "CumProd"), _cumulative),
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
"""Kind -> the check whether an operator of this kind is row-wise. Pointwise kinds need no entry."""

SHAPED = {"Expand": 1, "ConstantOfShape": 0, "Resize": 3}
"""Kind -> the slot of the operand that holds the shape of the result."""


def chosen_by(graph: Graph, value: Value) -> Op | None:
    """The NonZero of a one-dimensional mask whose positions ``value`` holds, in order; None if there is none."""
    op = graph.op(value)
    while op.kind in RESHAPES or (op.kind == "Transpose" and 1 in graph.type(operand(op)).dims):
        op = graph.op(operand(op))
    if op.kind != "NonZero" or len(graph.type(operand(op)).dims) != 1:
        return None
    return op


def coordinates_of(graph: Graph, value: Value) -> Op | None:
    """The NonZero of a mask of any rank, whose positions are the rows of ``value``; None if there is none."""
    turned = graph.op(value)
    if turned.kind == "Transpose" and turned.attrs.perm == (1, 0) and graph.op(operand(turned)).kind == "NonZero":
        return graph.op(operand(turned))
    return chosen_by(graph, value) if graph.type(value).dims[1:] == (1,) else None


# ---------------------------------------------------------------- copies


def resized(shape: Sequence[DimLike], rows: Rows, count: DimLike) -> tuple[DimLike, ...]:
    """The shape with ``count`` rows."""
    return tuple(rows.per * count if i == rows.axis else d for i, d in enumerate(shape))


def copy_of(patch: Patch, r: RowOp, operands: Mapping[Value, Value], rows: int | None) -> Op:
    """Add a copy of the operator. ``operands``: old operand -> its replacement with ``rows`` rows (None: an unknown number).

    The number must be known for operators of :data:`SHAPED`.
    """
    op, shape = r.op, r.op.outputs[0].type.dims
    inputs = [None if v is None else operands.get(v, v) for v in op.inputs]
    names = [f"{out.name}.rows" for out in op.outputs]
    if op.kind in RESHAPES:
        target = [*shape]
        target[r.out.axis] = -1 if rows is None else rows * r.out.per
        attrs = ReshapeAttrs(allowzero=rows == 0)
        return patch.add_op("Reshape", [inputs[0], _numbers(patch, target)], attrs, names=names, src=op.src)
    slot = SHAPED.get(op.kind)
    if slot is not None and op.input(slot) is not None:
        assert rows is not None, op.kind
        inputs[slot] = _numbers(patch, resized(shape, r.out, rows))
    return patch.add_op(op.kind, inputs, op.attrs, names=names, outputs=len(op.outputs), src=op.src)


def _numbers(patch: Patch, values: Sequence[DimLike]) -> Value:
    return patch.constant(np.array(values, np.int64), "shape")


def elements_with(op: Op, result_rows: Sequence[Rows | None], rows: int) -> int:
    """The number of elements of the operator's largest result if it has ``rows`` rows."""
    sizes = (
        math.prod(d for d in resized(out.type.dims, r, rows) if isinstance(d, int))
        for out, r in zip(op.outputs, result_rows, strict=True)
        if r is not None
    )
    return max(sizes, default=0)


def zero(patch: Patch, dtype: np.dtype[np.generic]) -> Value:
    """Add the number 0 as a scalar constant."""
    value: Array = np.zeros((), dtype)
    return patch.constant(value, "zero")
