"""Targets of Reshape and Expand read symbolic sizes from the network's inputs, if no constant can express the target.

Exporters read sizes from any value: DeBERTa reshapes by the shape of the softmax. Such a read prevents the fusion of an inner
value, although the network's inputs have the same sizes.
"""

from __future__ import annotations

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import ReshapeAttrs, ShapeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, may_be_0, operand, reshape_target, reshaped, shape_of
from optdnn.types import Shape

_READS = 64
"""Most operators of a target's arithmetic that are examined."""


def axis_of(graph: Graph, d: DimLike) -> tuple[Value, int] | None:
    """An input of the network and its axis of this symbolic size; None if no input has one."""
    for i in graph.inputs:
        value = graph.op(i).value
        for axis, size in enumerate(shape_of(graph, value) or ()):
            if size == d:
                return value, axis
    return None


def can_read(graph: Graph, shape: Shape) -> bool:
    """Whether each size is a number or the size of an input's axis."""
    return all(isinstance(d, int) or axis_of(graph, d) is not None for d in shape)


def sizes(patch: Patch, shape: Shape) -> Value:
    """The shape as a value. Symbolic sizes are read from the network's inputs; a size that no input has becomes -1."""
    if all(isinstance(d, int) for d in shape):
        return patch.constant(np.asarray(shape, np.int64), "shape")

    def size(d: DimLike) -> Value:
        found = None if isinstance(d, int) else axis_of(patch.graph, d)
        if found is None:
            return integers(patch, [d if isinstance(d, int) else -1], "size")
        return patch.add("Shape", [found[0]], ShapeAttrs(found[1], found[1] + 1))

    return patch.add("Concat", [size(d) for d in shape], ConcatAttrs(0))


def can_reshape(graph: Graph, before: Shape, after: Shape) -> bool:
    """Whether :func:`reshaped_to` can write a Reshape from ``before`` to ``after``. Beside a -1, no size may be 0."""
    if reshape_target(before, after) is not None:
        return True
    unknown = [d for d in after if not isinstance(d, int) and axis_of(graph, d) is None]
    if not unknown:
        return 0 not in after
    return len(unknown) == 1 and not any(may_be_0(d) for d in after if d != unknown[0])


def reshaped_to(patch: Patch, value: Value, after: Shape) -> Value:
    """Add a Reshape of ``value`` to ``after``, by a constant target if possible, else by sizes of the network's inputs."""
    before = patch.type(value).dims
    if before == after:
        return value
    target = reshape_target(before, after)
    if target is not None:
        return reshaped(patch, value, target)
    whole = can_read(patch.graph, after)  # without a -1, a size of 0 is one, and copies nothing
    attrs = ReshapeAttrs(allowzero=whole and any(map(may_be_0, after)))
    return patch.add("Reshape", [value, sizes(patch, after)], attrs)


@rule("input_target", {"Reshape", "Expand"})
def input_target(graph: Graph, op: Op) -> Match | Miss | None:
    """A Reshape or Expand whose target is computed from the shape of an inner value takes the sizes from the inputs.

    For targets that no constant can express (:data:`~optdnn.passes.rules.shape.constant_target`).
    """
    x, reshape = operand(op), op.kind == "Reshape"
    before, after = shape_of(graph, x), op.outputs[0].type.shape
    if before is None or after is None or not _reads_inner_shape(graph, operand(op, 1)):
        return None
    if reshape and reshape_target(before, after) is not None:
        return None
    if not (can_reshape(graph, before, after) if reshape else can_read(graph, after)):
        return Miss("no input of the network has the sizes of the target")
    if reshape:
        return Match((op,), lambda patch: reshaped_to(patch, x, after))
    return Match((op,), lambda patch: patch.add("Expand", [x, sizes(patch, after)]))


def _reads_inner_shape(graph: Graph, target: Value) -> bool:
    """Whether the arithmetic of ``target`` reads the shape of a value other than the network's inputs."""
    todo = [target]
    seen: set[int] = set()
    while todo and len(seen) < _READS:
        op = graph.op(todo.pop())
        if op.id in seen:
            continue
        seen.add(op.id)
        if op.kind in ("Shape", "Size"):
            if op.inputs[0] is not None and graph.op(op.inputs[0]).kind != "Input":
                return True
        else:
            todo += [v for v in op.inputs if v is not None]
    return False
