"""Chains of reshapes or transposes become one, and computed shapes become constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.transpose import REDUCTIONS
from optdnn.passes.support.facts import (
    NORMS,
    RESHAPES,
    integers,
    ints,
    operand,
    producer,
    reshape_target,
    reshaped,
    scalar,
    shape_of,
    slice_limits,
)
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.types import Array, Shape, broadcast_dims, normalize_axis

X = Var("x")
BROADCASTING = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"),
    }
)
"""Kinds whose result has the shape to which all operands broadcast."""
INT32_MAX = 2**31 - 1
_MOST_BETWEEN = 4
"""Most operators between a reduction and a Reshape that gives its axes back."""
_OF_ROWS = NORMS | {"Softmax", "LogSoftmax"}
"""Kinds that compute rows along one axis; their other operands belong to a row."""
_SYMBOLIC = Miss("more than one symbolic dimension moves, which no constant target can express")


@pattern_rule("reshape_chain", node(RESHAPES, node(RESHAPES, X, name="inner")))
def reshape_chain(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Reshape, Flatten, Squeeze or Unsqueeze of another one becomes a single Reshape."""
    x = found["x"]
    before, after = shape_of(graph, x), root.outputs[0].type.shape
    if before is None or after is None:
        return Miss("a rank is unknown")
    target = reshape_target(before, after)
    if target is None:
        return _SYMBOLIC
    return Match((root, found["inner"]), lambda patch: reshaped(patch, x, target))


@rule("reshapes_around", RESHAPES)
def reshapes_around(graph: Graph, op: Op) -> Match | Miss | None:
    """``reshape(f(reshape(x)))`` is ``f(x)`` if it has x's shape again, and ``f`` is pointwise and reads only numbers besides.

    ``f`` may be several ops. The norm of transposed keys, bounded by an epsilon, is transposed back in this way, as is the
    reciprocal root of the mean square of transposed channels. A softmax or normalization of rows may be among them if the Reshapes
    keep the rows: ONNX defines its LayerNormalization on flat rows."""
    shape, stages, view = op.outputs[0].type.shape, list[tuple[Op, int]](), graph.op(operand(op))
    while view.kind not in RESHAPES:
        slot = _only_tensor(graph, view)
        if slot is None or shape is None or (view.kind in _OF_ROWS and view.outputs[0].type.dims[-1:] != shape[-1:]):
            return None
        stages.append((view, slot))
        view = graph.op(operand(view, slot))
    x = operand(view)
    if not stages or graph.type(x).shape != shape:
        return None
    assert shape is not None
    if any(len(graph.type(v).dims) > len(shape) for stage, slot in stages for v in _others(stage, slot)):
        return None  # a number with more axes than x
    if "Gemm" in {graph.op(x).kind, *(u.kind for u in graph.users(op.value))}:
        return Miss(
            "a product of flat rows is next to it, which takes rows of several axes when its own Reshapes are removed"
        )

    def build(patch: Patch) -> Value:
        y = x
        for stage, slot in reversed(stages):
            attrs = replace(stage.attrs, axis=-1) if stage.kind in _OF_ROWS else stage.attrs
            y = patch.add(stage.kind, [y if i == slot else v for i, v in enumerate(stage.inputs)], attrs)
        return y

    return Match((op, *(stage for stage, _ in stages)), build)


def _only_tensor(graph: Graph, op: Op) -> int | None:
    """The position of the only operand of a pointwise op that is no number, or of the rows of a softmax or normalization, if one op
    reads the result."""
    if len(op.outputs) != 1 or graph.sole_user(op.value) is None:
        return None
    if op.kind in _OF_ROWS:
        rank = op.outputs[0].type.rank
        whole = bool(rank) and normalize_axis(op.attrs.axis, rank or 1) == (rank or 1) - 1
        return 0 if whole and all(len(graph.type(v).dims) < 2 for v in _others(op, 0)) else None
    if not op.pointwise:
        return None
    slots = [i for i, v in enumerate(op.inputs) if v is not None and scalar(graph, v) is None]
    return slots[0] if len(slots) == 1 else None


def _others(op: Op, slot: int) -> list[Value]:
    return [v for i, v in enumerate(op.inputs) if v is not None and i != slot]


@rule("constant_target", {"Reshape", "Expand"})
def constant_target(graph: Graph, op: Op) -> Match | Miss | None:
    """A Reshape or Expand to a computed shape that inference resolves gets a constant target.

    ``Shape -> Gather -> Concat -> Reshape`` over a symbolic batch becomes a Reshape to ``[0, …]`` or ``[-1, …]``.
    """
    x = operand(op)
    before, after = shape_of(graph, x), op.outputs[0].type.shape
    if before is None or after is None or graph.constant_value(op.inputs[1]) is not None:
        return None
    if graph.known(op.inputs[1]) is None:
        return Miss("the target shape depends on data")
    target = reshape_target(before, after) if op.kind == "Reshape" else _expand_target(before, after)
    if target is None:
        return Miss("no constant target can express how symbolic dimensions move")
    if op.kind == "Reshape":
        return Match((op,), lambda patch: reshaped(patch, x, target))
    return Match((op,), lambda patch: patch.add("Expand", [x, integers(patch, target, "shape")]))


def _expand_target(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """A constant target of an Expand, in which 1 keeps a symbolic dimension; None if the Expand enlarges one."""
    lead = len(after) - len(before)
    target = [d if isinstance(d, int) else int(i >= lead and before[i - lead] == d) for i, d in enumerate(after)]
    grows = any(not isinstance(d, int) and not t for d, t in zip(after, target, strict=True))
    return None if grows else tuple(target)


@rule("redundant_expand", BROADCASTING)
def redundant_expand(graph: Graph, op: Op) -> Match | Miss | None:
    """A pointwise operator reads the operand of an Expand and broadcasts it, if its other operands have the expanded sizes.

    For example, PyTorch's ``expand_as`` writes such an Expand in front of a gate's multiplication. An operator on constants runs
    before the Expand of one of them (masks that hide nothing).
    """
    refused = None
    for slot, value in enumerate(op.inputs):
        expand = producer(graph, value, {"Expand"})
        if expand is None:
            continue
        operands = [expand.inputs[0] if i == slot else v for i, v in enumerate(op.inputs)]
        shapes = [shape for v in operands if (shape := shape_of(graph, v)) is not None]
        after = op.outputs[0].type.shape
        if after is None or len(shapes) < len(operands):
            return Miss("a rank is unknown")
        if broadcast_dims(*shapes) == after:
            return Match((op, expand), partial(_reading, op, operands))
        if shape_of(graph, expand.value) == after and all(graph.constant_value(v) is not None for v in operands):
            return Match((op, expand), partial(_before, op, operands, operand(expand, 1)))
        refused = Miss("no other operand has the sizes to which it is expanded")
    return refused


def _reading(op: Op, operands: Sequence[Value | None], patch: Patch) -> Value:
    return patch.add(op.kind, operands, op.attrs)


def _before(op: Op, operands: Sequence[Value | None], target: Value, patch: Patch) -> Value:
    return patch.add("Expand", [_reading(op, operands, patch), target])


@rule("equal_elements", BROADCASTING)
def equal_elements(graph: Graph, op: Op) -> Match | None:
    """An operator on constants, the large ones with equal elements, computes one element, which an Expand repeats.

    Folding leaves large results to the run: transformers write masks of all queries and keys that hide nothing.
    """
    arrays = [graph.constant_value(v) for v in op.inputs]
    given = [a for a in arrays if a is not None]
    if len(given) < len(arrays) or not op.outputs[0].type.is_static:
        return None
    after = op.outputs[0].type.static_shape
    once = [_one(a) for a in given]
    if math.prod(broadcast_dims(*(a.shape for a in once)) or ()) == math.prod(after):
        return None
    return Match((op,), partial(_repeated, op, once, after))


def _one(array: Array) -> Array:
    """One element with as many axes, if all elements are equal; else the array."""
    equal = array.size > 1 and bool((array == array.flat[0]).all())
    return array[(slice(1),) * array.ndim] if equal else array


def _repeated(op: Op, once: Sequence[Array], shape: Sequence[int], patch: Patch) -> Value:
    operands = [patch.constant(a, f"{op.name}.{k}") for k, a in enumerate(once)]
    return patch.add("Expand", [_reading(op, operands, patch), integers(patch, shape, "shape")])


@pattern_rule("transpose_chain", node("Transpose", node("Transpose", X, name="inner")))
def transpose_chain(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A Transpose of a Transpose becomes one Transpose, or nothing if they cancel."""
    x, first, second = found["x"], found["inner"].attrs.perm, root.attrs.perm
    if first is None or second is None:
        return None
    perm = tuple(first[p] for p in second)
    if perm == tuple(range(len(perm))):
        return Match((root, found["inner"]), lambda patch: x)
    return Match((root, found["inner"]), lambda patch: patch.add("Transpose", [x], TransposeAttrs(perm)))


@rule("transpose_is_reshape", {"Transpose"})
def transpose_is_reshape(graph: Graph, op: Op) -> Match | Miss | None:
    """A Transpose that moves only axes of size 1 becomes a Reshape, which is free: the order of elements stays."""
    x, perm = operand(op), op.attrs.perm
    shape = shape_of(graph, x)
    if shape is None or perm is None or perm == tuple(range(len(perm))):
        return None
    moved = [p for p in perm if shape[p] != 1]
    if moved != sorted(moved):
        return None
    target = reshape_target(shape, tuple(shape[p] for p in perm))
    return _SYMBOLIC if target is None else Match((op,), lambda patch: reshaped(patch, x, target))


@rule("kept_axes", {"Reshape", "Unsqueeze"})
def kept_axes(graph: Graph, op: Op) -> Match | Miss | None:
    """A reduction keeps its axes if a Reshape adds them again: ``x.mean(1).unsqueeze(1)``.

    So it can run in the order of its image. Between both may be arithmetic with scalars: PyTorch's exporter writes Bessel's
    correction before the Reshape."""
    between: list[Op] = []
    source = op.inputs[0]
    while (step := producer(graph, source, {"Mul", "Div", "Add", "Sub", "Sqrt"}, alone=True)) is not None:
        read = _with_scalars(graph, step)
        if read is None or len(between) == _MOST_BETWEEN:
            return None
        between.append(step)
        source = read
    total = producer(graph, source, REDUCTIONS)
    shape = None if total is None or total.attrs.keepdims else shape_of(graph, total.input(0))
    axes = None if total is None or total.input(1) is None else ints(graph, total.input(1))
    if total is None or shape is None or not axes:
        return None
    which = reduced_axes(total.attrs, axes, len(shape))
    if op.outputs[0].type.shape != tuple(1 if i in which else d for i, d in enumerate(shape)):
        return None
    if graph.use_count(total.value) > 1:
        return Miss(f"the result of {total.name} is used {graph.use_count(total.value)} times")
    attrs = replace(total.attrs, keepdims=True)

    def build(patch: Patch) -> Value:
        before, y = total.value, patch.add(total.kind, list(total.inputs), attrs)
        for step in reversed(between):
            operands = [y if v == before else v for v in step.inputs]
            before, y = step.value, patch.add(step.kind, operands, step.attrs, src=step.src)
        return y

    return Match((op, *between, total), build)


def _with_scalars(graph: Graph, op: Op) -> Value | None:
    """The operand of an operator whose other operand, if it has one, is a constant scalar; None for other operators."""
    others = [v for v in op.inputs if v is not None and (graph.type(v).dims or scalar(graph, v) is None)]
    return others[0] if len(others) == 1 and graph.type(others[0]).shape == op.outputs[0].type.shape else None


@rule("whole_axes", {"Slice"})
def whole_axes(graph: Graph, op: Op) -> Match | None:
    """A Slice leaves out the axes that it takes as a whole. TensorFlow writes ``x[:, 2:4]`` as a Slice of both axes."""
    limits, shape = slice_limits(graph, op), shape_of(graph, op.inputs[0])
    if limits is None or shape is None:
        return None
    kept = [
        (start, end, axis, step) for axis, start, end, step in limits if not _takes_all(shape, start, end, axis, step)
    ]
    if not kept or len(kept) == len(limits):
        return None
    numbers = list(zip(*kept, strict=True))[: 3 if all(step == 1 for *_, step in kept) else 4]
    names = ("starts", "ends", "axes", "steps")
    return Match(
        (op,),
        lambda patch: patch.add(
            "Slice", [op.inputs[0], *(integers(patch, n, name) for n, name in zip(numbers, names, strict=False))]
        ),
    )


def _takes_all(shape: Shape, start: int, end: int, axis: int, step: int) -> bool:
    """Whether a Slice takes an axis as a whole, in order. The largest int32 as an end stands for the size, as in ONNX."""
    size = shape[axis]
    if isinstance(size, int):
        return slice(start, end, step).indices(size) == (0, size, 1)
    return (start, step) == (0, 1) and end >= INT32_MAX
