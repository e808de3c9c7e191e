"""A selection of a few rows moves in front of the operators that compute each row by itself.

A classifier reads only the class token: after the keys and values of the last attention, the other tokens have no reader. A Slice
moves in front of products of rows with a matrix, norms, softmax, pointwise operators, quantization and the queries of attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.dim import DimLike
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.gathered_products import TABLE
from optdnn.passes.rules.added_parts import part_of_pad
from optdnn.passes.rules.given_attention import given_mask
from optdnn.passes.support.facts import (
    NORMS,
    depends_on_inputs,
    ints,
    operand,
    reshape_target,
    reshaped,
    shape_of,
    sizes_of,
    sliced,
)
from optdnn.passes.support.parts import span
from optdnn.types import Shape, normalize_axis

LEAST_SHARE = 2
"""Rows are taken early if they are at most 1 / ``LEAST_SHARE`` of all rows."""
LEAST_QUANTIZED = 4
"""The same for rows that are quantized or dequantized: the halves of a gated unit's channels are split as integers."""


@dataclass(frozen=True)
class _Taken:
    """Rows ``start`` to ``end`` of ``axis``, out of ``size``."""

    axis: int
    start: int
    end: int
    size: DimLike

    def of(self, patch: Patch, value: Value, axis: int) -> Value:
        """The rows of another value, along its own axis."""
        return sliced(patch, value, self.start, self.end, axis)


@dataclass(frozen=True)
class _Selected:
    """The rows ``indices`` of ``axis``, out of ``size``."""

    axis: int
    indices: Value
    size: DimLike

    def of(self, patch: Patch, value: Value, axis: int) -> Value:
        """The rows of another value, along its own axis."""
        return patch.add("Gather", [value, self.indices], GatherAttrs(axis))


Moved = list[tuple[Value | None, int | None]]
"""The operands of an operator, each with the axis along which its rows are taken (None: the operand stays whole)."""


@rule("take_rows", {"Slice"})
def take_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(x)[rows]`` is ``f(x[rows])``, where f computes each row by itself. A DequantizeLinear may have other readers."""
    taken = _taken(graph, op)
    if taken is None:
        return None
    source = graph.op(operand(op))
    users = graph.users(source.value)
    moved = _operands(graph, source, taken)
    if moved is None:
        return None
    if source.kind == "DequantizeLinear":
        users = [op]  # others may read it, too: each reader dequantizes what it reads
        if all(u.kind == "QuantizeLinear" for u in graph.users(op.value)):
            return None  # MoveIntegers takes the rows of the integers, and removes both conversions
    if any(u.kind != "Slice" or _taken(graph, u) != taken for u in users):
        return Miss(f"{source.name} has readers of other rows")
    shape = op.outputs[0].type.dims
    target = reshape_target((), shape) if source.kind == "Reshape" else ()
    if target is None:
        return Miss("no constant target can express the rows' shape")

    def build(patch: Patch) -> None:
        inputs = [v if v is None or axis is None else taken.of(patch, v, axis) for v, axis in moved]
        if source.kind == "Reshape":
            assert inputs[0] is not None
            y = reshaped(patch, inputs[0], target)
        else:
            y = patch.add(source.kind, inputs, source.attrs)
        for user in users:
            patch.replace(user.value, y)

    return Match((source, *users), build)


@rule("take_rows_by_index", {"Gather"})
def take_rows_by_index(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(x)[indices]`` is ``f(x[indices])`` as well, for indices that are computed: a detector's best queries."""
    shape, indices = sizes_of(graph, operand(op)), sizes_of(graph, operand(op, 1))
    if shape is None or indices is None or len(indices) != 1:
        return None
    axis, source = normalize_axis(op.attrs.axis, len(shape)), graph.op(operand(op))
    if axis == len(shape) - 1 or not 0 < indices[0] * LEAST_SHARE <= shape[axis]:
        return None
    taken = _Selected(axis, operand(op, 1), shape[axis])
    moved = _operands(graph, source, taken)
    if moved is None or source.kind in ("Reshape", "Transpose"):
        return None
    if graph.sole_user(source.value) is None:
        return Miss(f"{source.name} has readers of other rows")
    if source.kind != "DequantizeLinear" and _is_table(graph, source):
        return Miss(f"the rows of {source.name} are known when the network is built")
    if sum(v is not None and at is not None and graph.constant_value(v) is None for v, at in moved) > 1:
        return Miss(f"{source.name} computes its rows from several tensors, which would all be gathered")

    def build(patch: Patch) -> Value:
        inputs = [v if v is None or at is None else taken.of(patch, v, at) for v, at in moved]
        return patch.add(source.kind, inputs, source.attrs)

    return Match((op, source), build)


def _is_table(graph: Graph, op: Op) -> bool:
    """Whether the result of an operator is a constant of few elements: `gathered_products` multiplies tables of embeddings."""
    dims = op.outputs[0].type.static_shape if op.outputs[0].type.is_static else ()
    return bool(dims) and math.prod(dims) <= TABLE and not depends_on_inputs(graph, op.value)


@rule("row_is_slice", {"Gather"})
def row_is_slice(graph: Graph, op: Op) -> Match | None:
    """A Gather of one row, after an operator that computes each row by itself, becomes a Slice and a Reshape."""
    index, shape = ints(graph, op.input(1)), shape_of(graph, op.input(0))
    if index is None or len(index) != 1 or not shape:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    size = shape[axis]
    after = op.outputs[0].type.shape
    if not isinstance(size, int) or after is None or size < LEAST_SHARE:
        return None
    start = index[0] % size
    taken, source = _Taken(axis, start, start + 1, size), graph.op(operand(op))
    target = reshape_target((*shape[:axis], 1, *shape[axis + 1 :]), after)
    if target is None or graph.sole_user(source.value) is None or _operands(graph, source, taken) is None:
        return None

    def build(patch: Patch) -> Value:
        return reshaped(patch, taken.of(patch, source.value, axis), target)

    return Match((op,), build)


@rule("take_row_of_each", {"GatherND"})
def take_row_of_each(graph: Graph, op: Op) -> Match | None:
    """``f(x)[sample, index]`` is ``f(x[sample, index])``: one row of each sample, as the last token of each sequence."""
    shape, indices, after = shape_of(graph, op.input(0)), shape_of(graph, op.input(1)), op.outputs[0].type.shape
    if op.attrs.batch_dims != 1 or not shape or len(shape) < 3 or not indices or indices[1:] != (1,) or after is None:
        return None
    source, index, single = graph.op(operand(op)), operand(op, 1), (shape[0], 1, *shape[2:])
    last = reshape_target(single, after)
    if last is None:
        return None
    if shape[1] == 1:  # the only row
        return Match((op,), lambda patch: reshaped(patch, operand(op), last))
    if source.kind in ("Reshape", "Transpose", "Attention") or graph.sole_user(source.value) is None:
        return None
    moved = _operands(graph, source, _Taken(1, 0, 1, shape[1]))
    if moved is None:
        return None
    targets = {
        v: _row_target(shape_of(graph, v), axis, shape) for v, axis in moved if v is not None and axis is not None
    }
    if None in targets.values():
        return None

    def build(patch: Patch) -> Value:
        inputs: list[Value | None] = []
        for value, axis in moved:
            target = targets.get(value) if value is not None and axis is not None else None
            row = value if target is None else patch.add("GatherND", [value, index], op.attrs)
            inputs.append(row if target is None or row is None else reshaped(patch, row, target))
        return reshaped(patch, patch.add(source.kind, inputs, source.attrs), last)

    return Match((op, source), build)


def _row_target(shape: Shape | None, axis: int, whole: Shape) -> tuple[int, ...] | None:
    """The Reshape target that restores the axis of rows after one row per sample is taken; None for tensors with other rows."""
    if shape is None or axis != 1 or shape[:2] != whole[:2]:
        return None
    return reshape_target((shape[0], *shape[2:]), (shape[0], 1, *shape[2:]))


def _taken(graph: Graph, op: Op) -> _Taken | None:
    """The rows that a Slice takes, if they are few, along one axis that is not the last; None for other operators."""
    shape = shape_of(graph, op.input(0))
    axes = ints(graph, op.input(3)) if op.kind == "Slice" else None
    if not shape or axes is None or len(axes) != 1:
        return None
    axis = normalize_axis(axes[0], len(shape))
    size = shape[axis]
    if not isinstance(size, int) or axis == len(shape) - 1:
        return None
    found = span(graph, op, size, axis - len(shape))
    if found is None or found[2] != 1 or not 0 < (found[1] - found[0]) * LEAST_SHARE <= size:
        return None
    return _Taken(axis, found[0], found[1], size)


def _operands(graph: Graph, op: Op, taken: _Taken | _Selected) -> Moved | None:
    """The operands of an operator, with the axes along which their rows are taken; None if rows depend on one another."""
    if op.kind in STRUCTURAL:
        return None
    shapes = [shape_of(graph, v) for v in op.inputs]
    out = op.outputs[0].type.shape
    if out is None or any(v is not None and s is None for v, s in zip(op.inputs, shapes, strict=True)):
        return None
    if any(graph.uses(v) for v in op.values[1:]) or op.outputs[0].known is not None:
        return None
    if getattr(op.attrs, "prologue", ()) or getattr(op.attrs, "epilogue", ()):
        return None
    axes = _axes(op, [s or () for s in shapes], out, taken)
    return None if axes is None else list(zip(op.inputs, axes, strict=True))


def _axes(op: Op, shapes: Sequence[Shape], out: Shape, taken: _Taken | _Selected) -> list[int | None] | None:
    """For each operand, the axis along which its rows are taken, or None; None for operators that are not row-wise."""
    axis, back = taken.axis, taken.axis - len(out)
    first: list[int | None] = [axis, *[None] * (len(shapes) - 1)]
    if op.definition.traits.pointwise and len(op.outputs) == 1:
        return [_broadcast(shape, back, taken.size) for shape in shapes]
    if op.kind in ("QuantizeLinear", "DequantizeLinear"):
        most = taken.end - taken.start if isinstance(taken, _Taken) else 0
        whole = isinstance(taken.size, int) and most * LEAST_QUANTIZED > taken.size
        return None if whole or op.attrs.block_size or shapes[1] not in ((), (1,)) else first
    if op.kind == "Softmax":
        return None if axis == normalize_axis(op.attrs.axis, len(out)) else first
    if op.kind in NORMS:
        return first if axis < normalize_axis(op.attrs.axis, len(out)) else None
    if op.kind == "MatMul":
        return [back + len(shapes[0]), None] if back == -2 and min(map(len, shapes)) >= 2 else None
    if op.kind == "PackedMatMul":
        return first if back < -1 else None
    if op.kind == "Gemm":
        rows = axis == 0 and not op.attrs.transA
        added = [_broadcast(shape, back, taken.size) for shape in shapes[2:]]
        return [0, None, *added] if rows else None
    if op.kind == "Transpose":
        perm = op.attrs.perm or tuple(reversed(range(len(out))))
        return [perm[axis]]
    if op.kind == "Reshape":
        at = _kept(shapes[0], out, axis)
        return None if at is None else [at, None]
    if op.kind == "Attention":
        return _queries(op, shapes, taken)
    return None


def _broadcast(shape: Shape, back: int, size: DimLike) -> int | None:
    """The axis ``back`` from the end of an operand, if it has ``size`` elements there; None if the operand is broadcast."""
    at = len(shape) + back
    return at if at >= 0 and shape[at] == size else None


def _kept(before: Shape, after: Shape, axis: int) -> int | None:
    """The axis before a Reshape that corresponds to ``axis`` of its result, or None."""
    if before[: axis + 1] == after[: axis + 1]:
        return axis
    if not all(isinstance(d, int) for d in (*before, *after)):
        return None
    lead = math.prod(after[:axis])
    same = (i for i, d in enumerate(before) if d == after[axis] and math.prod(before[:i]) == lead)
    return next(same, None)


def _queries(op: Op, shapes: Sequence[Shape], taken: _Taken | _Selected) -> list[int | None] | None:
    """The axes of query rows in the operands of an attention with separate heads: of the queries and of the mask."""
    a = op.attrs
    windows = a.is_causal or a.left_window_size >= 0 or a.right_window_size >= 0
    if taken.axis != 2 or len(shapes[0]) != 4 or windows or any(v is not None for v in op.inputs[4:]):
        return None
    axes: list[int | None] = [2, None, None]
    if len(shapes) > 3:
        axes.append(_broadcast(shapes[3], -2, taken.size))
    return [*axes, *[None] * (len(shapes) - len(axes))]


class TakeRows(RulePass):
    name = "take_rows"
    # rows of masks may be padding alone: then there is no mask
    rules = (take_rows, take_rows_by_index, row_is_slice, take_row_of_each, part_of_pad, given_mask)
