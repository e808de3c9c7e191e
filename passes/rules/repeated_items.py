"""Arithmetic on constants that are the same for each item of a batch is computed for one item.

Exporters with a symbolic batch repeat tables of positions for each item (ConViT), and compute with the copies. Folding makes a
constant for the whole batch of that, or leaves the arithmetic to the run once it is larger than its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, rule
from optdnn.passes.rules.shape import BROADCASTING
from optdnn.passes.support.facts import integers, operand, producer, shape_of
from optdnn.types import Array, broadcast_dims, is_float, normalize_axis

LEAST_BYTES = 1 << 16
"""The smallest constant whose items are compared."""
_DEPTH = 8
"""Most operators on constants in front of an Expand."""


@rule("repeated_items", BROADCASTING | {"LogSoftmax", "MatMul", "Softmax", "Transpose"})
def repeated_items(graph: Graph, op: Op) -> Match | None:
    """An operator on constants that repeat along the batch runs for one item, in front of an Expand."""
    if not op.outputs[0].type.is_static or not _by_items(op):
        return None
    whole = [value is not None and _has_batch(graph, value, op) for value in op.inputs]
    operands = [_item(graph, v) if batch else v for v, batch in zip(op.inputs, whole, strict=True)]
    if not any(whole) or any(batch and v is None for v, batch in zip(operands, whole, strict=True)):
        return None
    if not all(_of_constants(graph, v) for v in operands if isinstance(v, Value)):
        return None
    return Match((op,), partial(_expanded, op, operands, op.outputs[0].type.static_shape))


@rule("repeated_operand", BROADCASTING)
def repeated_operand(graph: Graph, op: Op) -> Match | None:
    """A pointwise operator reads one item of a constant that repeats along the batch, if another operand has the batch."""
    for slot, value in enumerate(op.inputs):
        array = graph.constant_value(value)
        if array is None or value is None or not _has_batch(graph, value, op) or not _repeats(array):
            continue
        operands: list[Value | Array | None] = [array[:1] if i == slot else v for i, v in enumerate(op.inputs)]
        shapes = [
            (1, *array.shape[1:]) if i == slot else shape_of(graph, v) for i, v in enumerate(op.inputs) if v is not None
        ]
        known = [s for s in shapes if s is not None]
        if len(known) == len(shapes) and broadcast_dims(*known) == op.outputs[0].type.shape:
            return Match((op,), partial(_reading, op, operands))
    return None


def _by_items(op: Op) -> bool:
    """Whether each item of the result depends on the same items of the operands only."""
    rank = len(op.outputs[0].type.dims)
    if op.kind == "Transpose":
        return bool(op.attrs.perm) and op.attrs.perm[0] == 0
    if op.kind in ("Softmax", "LogSoftmax"):
        return rank > 1 and normalize_axis(op.attrs.axis, rank) != 0
    return rank > (2 if op.kind == "MatMul" else 1) and not getattr(op.attrs, "epilogue", ())


def _has_batch(graph: Graph, value: Value, op: Op) -> bool:
    """Whether an operand has the first axis of the result, and does not broadcast along it."""
    dims, after = shape_of(graph, value), op.outputs[0].type.shape
    return dims is not None and after is not None and len(dims) == len(after) > 1 and dims[0] == after[0] != 1


def _item(graph: Graph, value: Value | None) -> Value | Array | None:
    """One item of a constant that repeats, or the operand of an Expand of the batch; None for any other value."""
    array = graph.constant_value(value)
    if array is not None:
        return array[:1] if _repeats(array) else None
    expand = producer(graph, value, {"Expand"})
    before, after = (None, None) if expand is None else (shape_of(graph, expand.inputs[0]), shape_of(graph, value))
    same = before is not None and after is not None and before[:1] == (1,) and before[1:] == after[1:]
    return operand(expand) if expand is not None and same else None


def _repeats(array: Array) -> bool:
    """Whether a large constant has several items along its first axis, all equal."""
    return (
        array.nbytes >= LEAST_BYTES
        and array.ndim > 1
        and len(array) > 1
        and _equal(array[0], array[-1])  # most constants differ here
        and _equal(array[1:], array[:1])
    )


def _equal(a: Array, b: Array) -> bool:
    """Whether all elements are equal, and zeros have the same sign, which a division shows."""
    return bool((a == b).all()) and (not is_float(a.dtype) or bool((np.signbit(a) == np.signbit(b)).all()))


def _of_constants(graph: Graph, value: Value, depth: int = _DEPTH) -> bool:
    """Whether a value is computed from constants, by few operators."""
    op = graph.op(value)
    if op.kind == "Constant":
        return True
    return depth > 0 and bool(op.inputs) and all(v is None or _of_constants(graph, v, depth - 1) for v in op.inputs)


def _reading(op: Op, operands: Sequence[Value | Array | None], patch: Patch) -> Value:
    values = [v if v is None or isinstance(v, Value) else patch.constant(v, f"{op.name}.item") for v in operands]
    return patch.add(op.kind, values, op.attrs)


def _expanded(op: Op, operands: Sequence[Value | Array | None], shape: Sequence[int], patch: Patch) -> Value:
    return patch.add("Expand", [_reading(op, operands, patch), integers(patch, shape, "shape")])
