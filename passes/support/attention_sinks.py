"""Sinks of an attention that exporters write out: a further column of the scores, whose weights are dropped after the softmax
(gpt-oss: OpenAI, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Miss
from optdnn.passes.support.facts import in_shape, ints, operand, producer, shape_of
from optdnn.types import Array, DType, Shape, normalize_axis


@dataclass(frozen=True)
class Sinks:
    """The scores before the column is added, the column (*lead, rows, 1), and the ops between these and the softmax."""

    scores: Value
    column: Value
    ops: tuple[Op, ...]


def drops_last(graph: Graph, op: Op) -> bool:
    """Whether a Slice drops the last element of the last axis, and nothing else."""
    before, after = shape_of(graph, op.inputs[0]), shape_of(graph, op.value)
    starts, steps = ints(graph, op.input(1)), ints(graph, op.input(4)) if op.input(4) is not None else (1,)
    if before is None or after is None or starts != (0,) or steps != (1,):
        return False
    return before[:-1] == after[:-1] and before[-1] - after[-1] == 1


def find_sinks(graph: Graph, softmax: Op, dtype: DType) -> Sinks | Miss:
    """The column that is dropped after ``softmax``. ``dtype``: the dtype of the attention's values."""
    value, ops = operand(softmax), ()  # type: tuple[Value, tuple[Op, ...]]
    cast = producer(graph, value, {"Cast"})
    if cast is not None and graph.type(operand(cast)).dtype == dtype:
        value, ops = operand(cast), (cast,)
    joined, shape = producer(graph, value, {"Concat"}), shape_of(graph, value)
    if joined is None or shape is None or len(joined.inputs) != 2:
        return Miss("the weights of the last key are dropped, and it is no column of sinks")
    scores, column = operand(joined), operand(joined, 1)
    last = normalize_axis(joined.attrs.axis, len(shape)) == len(shape) - 1
    if not last or shape_of(graph, column) != (*shape[:-1], 1):
        return Miss("the weights of the last key are dropped, and it is no column of sinks")
    if graph.type(column).dtype != dtype:
        return Miss(f"the sinks are {graph.type(column).dtype}, the values {dtype}")
    return Sinks(scores, column, (*ops, joined))


def per_head(graph: Graph, sinks: Sinks, lead: Shape) -> Array | Value | Miss:
    """The sinks as a constant of one number per head, or as a value with as many elements. ``lead``: (batch, heads)."""
    batch, heads = lead
    known = graph.constant_value(sinks.column)
    if known is not None and known.size and isinstance(batch, int) and isinstance(heads, int):
        each = known.reshape(batch, heads, -1)
        if bool((each == each[:1, :, :1]).all()):
            return each[0, :, 0]
    expand = producer(graph, sinks.column, {"Expand"})
    source = sinks.column if expand is None else operand(expand)
    own = shape_of(graph, source) or ()
    if isinstance(heads, int) and (1,) * (4 - len(own)) + tuple(own) == (1, heads, 1, 1):
        return source
    return Miss("the sinks are not one number per head")


def sinks_operand(patch: Patch, found: Array | Value, heads: DimLike, name: str) -> Value:
    """The operand (heads) of an Attention from the result of :func:`per_head`."""
    return in_shape(patch, found, (heads,)) if isinstance(found, Value) else patch.constant(found, name)
