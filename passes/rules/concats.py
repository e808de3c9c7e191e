"""Concats of all parts of a value become the value, and operators move in front of a Concat of convolutions.

Mixed depthwise convolutions (Tan and Le, 2019) and cross-stage partial networks (Wang et al., 2020) concatenate the results of
several convolutions. Then they normalize and activate all channels together. Before the Concat, the convolutions' weights and
epilogues absorb these operators.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import CONVOLUTIONS, RESHAPES, in_shape, operand, producer, reshape_target
from optdnn.passes.support.parts import is_axis, parts_of_whole, span
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import normalize_axis


def _joined(graph: Graph, op: Op) -> Op | Miss | None:
    """The Concat of convolutions' channels that ``op`` reads, or None. It and each convolution must have one reader."""
    concat = producer(graph, op.inputs[0], {"Concat"}, alone=True)
    if concat is None or normalize_axis(concat.attrs.axis, len(concat.outputs[0].type.dims)) != 1:
        return None
    convolutions = [producer(graph, v, CONVOLUTIONS) for v in concat.inputs]
    if not any(convolutions):
        return None
    if any(c is None or graph.use_count(c.value) > 1 for c in convolutions):
        return Miss("the Concat before it has operands that are not results of convolutions, or are read elsewhere")
    return concat


@rule("empty_parts", {"Concat"})
def empty_parts(graph: Graph, op: Op) -> Match | None:
    """Empty operands of a Concat are left out: in Phi-3, all features of a head are rotated, and the rest is empty."""
    axis, values = (
        normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)),
        [operand(op, k) for k in range(len(op.inputs))],
    )
    held = [v for v in values if graph.type(v).dims[axis] != 0]
    if not held or len(held) == len(values):
        return None
    return Match((op,), lambda patch: held[0] if len(held) == 1 else patch.add("Concat", held, op.attrs))


@rule("concat_of_split", {"Concat"})
def concat_of_split(graph: Graph, op: Op) -> Match | None:
    """``concat(a, b, c)`` is ``concat(x, c)`` if a and b are all parts of x, in order: of a Split, or Slices (C2f of YOLOv8).

    So the operator that computes x can write x directly into the result.
    """
    parts, rank = [operand(op, k) for k in range(len(op.inputs))], len(op.outputs[0].type.dims)
    axis = normalize_axis(op.attrs.axis, rank) - rank
    for at, value in enumerate(parts):
        first = graph.op(value)
        count = parts_of_whole(graph, parts[at:], axis)
        if first.kind == "Split" and is_axis(graph, operand(first), first.attrs.axis, axis):
            # Their sizes may be unknown.
            outputs = first.values
            count = len(outputs) if parts[at : at + len(outputs)] == outputs else 0
        if count:
            parts[at : at + count] = [operand(first)]
            return Match((op,), lambda patch: patch.add("Concat", parts, op.attrs) if len(parts) > 1 else parts[0])
    return None


@rule("stack_of_split", {"Concat"})
def stack_of_split(graph: Graph, op: Op) -> Match | None:
    """All parts of a Split, or views of them, with one shape, in order, and joined where they were cut, are a view of the whole.

    Mixtures of experts stack the results of equal layers (MMoE: Ma et al., 2018), which `fuse_siblings` computes at once."""
    views = [producer(graph, v, RESHAPES) for v in op.inputs]
    parts = [v if view is None else view.inputs[0] for v, view in zip(op.inputs, views, strict=True)]
    first = producer(graph, parts[0], {"Split"})
    if first is None or not op.outputs[0].type.is_static or not graph.type(operand(first)).is_static:
        return None
    if parts != first.values:
        return None
    cut, joined = (t.static_shape for t in (first.outputs[0].type, graph.type(operand(op))))
    if len({o.type.dims for o in first.outputs}) > 1 or any(graph.type(v).dims != joined for v in op.inputs if v):
        return None
    if math.prod(cut[: first.attrs.axis % len(cut)]) != math.prod(joined[: op.attrs.axis % len(joined)]):
        return None  # joined along another axis than they were cut along
    return Match((op,), lambda patch: in_shape(patch, operand(first), op.outputs[0].type.static_shape))


@rule("turned_parts", {"Concat"})
def turned_parts(graph: Graph, op: Op) -> Match | None:
    """Equal parts of one tensor along an axis that are joined along another one are a view of it: the axis of the parts moves.

    Set Transformer (Lee et al., 2019) joins its heads along the batch, and takes them apart in the same way."""
    split = producer(graph, op.inputs[0], {"Split"})
    parts = [] if split is None else split.values
    if split is None or list(op.inputs) != parts or len(parts) < 2:
        return None
    if not op.outputs[0].type.is_static or not graph.type(operand(split)).is_static:
        return None
    dims = graph.type(operand(split)).static_shape
    along, onto = (normalize_axis(x.attrs.axis, len(dims)) for x in (split, op))
    if along == onto or len({o.type.dims for o in split.outputs}) > 1:
        return None
    if any(u.id != op.id for port in parts for u in graph.users(port)):
        return None
    count = len(parts)
    cut = (*dims[:along], count, dims[along] // count, *dims[along + 1 :])
    order = [k for k in range(len(cut)) if k != along]
    order.insert(onto, along)

    def build(patch: Patch) -> Value:
        x = in_shape(patch, operand(split), cut)
        x = patch.add("Transpose", [x], TransposeAttrs(tuple(order)))
        return in_shape(patch, x, op.outputs[0].type.dims)

    return Match((op, split), build)


@rule("merged_stack", {"Reshape"})
def merged_stack(graph: Graph, op: Op) -> Match | None:
    """``reshape(stack(a, b))`` is ``concat(a, b)`` if it merges the new axis with the next one.

    So KerasHub exchanges the halves of a head in a rotary embedding."""
    stack, after = producer(graph, op.inputs[0], {"Concat"}, alone=True), op.outputs[0].type.shape
    if stack is None or after is None or (stack.outputs[0].type.rank or 0) < 2:
        return None
    dims = stack.outputs[0].type.dims
    axis, parts = normalize_axis(stack.attrs.axis, len(dims)), [operand(stack, k) for k in range(len(stack.inputs))]
    if any(producer(graph, v, RESHAPES) is None or graph.type(v).dims[axis] != 1 for v in parts):
        return None
    shape = (*dims[:axis], *dims[axis + 1 :])
    merged = after == (*dims[:axis], dims[axis] * dims[axis + 1], *dims[axis + 2 :]) if axis + 1 < len(dims) else False
    if not merged or any(reshape_target(graph.type(v).dims, shape) is None for v in parts):
        return None

    def build(patch: Patch) -> Value:
        rows = [in_shape(patch, v, shape, graph.op(v).src) for v in parts]
        return patch.add("Concat", rows, ConcatAttrs(axis), src=op.src | stack.src)

    return Match((op, stack), build)


@rule("part_of_concat", {"Slice"})
def part_of_concat(graph: Graph, op: Op) -> Match | None:
    """``slice(concat(a, b, c))`` is a part, or a Concat of some parts, if it takes exactly these parts.

    A Concat with other readers stays: then the slice is a view of it, and the part is written directly into it. Bark's fine model
    stacks the embeddings of all codebooks, and adds some of them. If all readers are slices of one part each, none needs the
    Concat: CenterNet joins its heads, and its decoder takes them apart."""
    concat = producer(graph, op.inputs[0], {"Concat"})
    parts = [] if concat is None else _parts_of(graph, concat, op)
    if concat is None or not parts:
        return None
    readers = graph.users(concat.value)
    if len(readers) > 1 and any(u.kind != "Slice" or len(_parts_of(graph, concat, u)) != 1 for u in readers):
        return None
    return Match((op,), lambda patch: parts[0] if len(parts) == 1 else patch.add("Concat", parts, concat.attrs))


def _parts_of(graph: Graph, concat: Op, op: Op) -> list[Value]:
    """The parts of a Concat that a Slice takes exactly; none if it takes other elements."""
    dims = concat.outputs[0].type.dims
    axis = normalize_axis(concat.attrs.axis, len(dims))
    widths = [d for v in range(len(concat.inputs)) if isinstance(d := graph.type(operand(concat, v)).dims[axis], int)]
    size = dims[axis]
    if len(widths) < len(concat.inputs) or not isinstance(size, int):
        return []
    taken, bounds = span(graph, op, size, axis - len(dims)), list(accumulate(widths, initial=0))
    if taken is None or taken[2] != 1 or not {*taken[:2]} <= {*bounds} or taken[0] >= taken[1]:
        return []
    return [
        operand(concat, k) for k, (a, b) in enumerate(pairwise(bounds)) if taken[0] <= a and b <= taken[1] and a < b
    ]


@rule("split_of_concat", {"Split"})
def split_of_concat(graph: Graph, op: Op) -> Match | None:
    """``split(concat(a, b, c))`` into the same parts is these parts: exchanged halves (RealNVP: Dinh et al., 2017).

    As with slices, a Concat with other readers stays.
    """
    concat = producer(graph, op.inputs[0], {"Concat"}, alone=True)
    if concat is None or len(concat.inputs) != len(op.outputs):
        return None
    rank = len(concat.outputs[0].type.dims)
    if normalize_axis(concat.attrs.axis, rank) != normalize_axis(op.attrs.axis, rank):
        return None
    parts = [operand(concat, k) for k in range(len(concat.inputs))]
    if any(graph.type(part) != out.type for part, out in zip(parts, op.outputs, strict=True)):
        return None

    def build(patch: Patch) -> None:
        for port, part in enumerate(parts):
            patch.replace(Value(op.id, port), part)

    return Match((op, concat), build)


_LAST_TWO = node(RESHAPES, node("Concat", Var("a"), Var("b"), name="concat"), name="merged")


@pattern_rule("interleaved_parts", node("Transpose", _LAST_TWO, name="back"))
def interleaved_parts(graph: Graph, root: Op, found: dict[str, Any]) -> Match | None:
    """Two transposed values are interleaved along an axis and transposed again: the Transposes move together, and merge.

    Wan writes this as assignments to ``y[..., ::2]`` and ``y[..., 1::2]``. The Transposes before the interleaving move after it."""
    concat, merged = found["concat"], found["merged"]
    stacked = [producer(graph, found[name], RESHAPES) for name in ("a", "b")]
    inner = [None if s is None else producer(graph, s.inputs[0], {"Transpose"}) for s in stacked]
    if len(concat.inputs) != 2 or inner[0] is None or inner[1] is None:
        return None
    perm, outer = inner[0].attrs.perm, root.attrs.perm
    t, whole = graph.type(inner[0].value), graph.type(concat.value).dims
    at = normalize_axis(concat.attrs.axis, len(whole))
    same = perm == inner[1].attrs.perm and t == graph.type(inner[1].value) and t.shape is not None
    if not same or not at or any(graph.type(v).dims != (*t.dims[:at], 1, *t.dims[at:]) for v in concat.inputs if v):
        return None
    size, before = t.dims[at - 1], graph.type(operand(inner[0])).dims
    wide = merged.outputs[0].type.dims
    if not isinstance(size, int) or wide != (*t.dims[: at - 1], 2 * size, *t.dims[at:]):
        return None
    axis = perm[at - 1]
    pairs, result = (*before[: axis + 1], 1, *before[axis + 1 :]), (*before[:axis], 2 * size, *before[axis + 1 :])
    if (
        reshape_target(before, pairs) is None
        or reshape_target((*before[: axis + 1], 2, *before[axis + 1 :]), result) is None
    ):
        return None
    order = tuple(perm[i] for i in outer)

    def build(patch: Patch) -> Value:
        parts = [in_shape(patch, operand(transpose), pairs) for transpose in inner if transpose is not None]
        y = in_shape(patch, patch.add("Concat", parts, ConcatAttrs(axis + 1)), result)
        return patch.add("Transpose", [y], TransposeAttrs(order))

    return Match((root, merged, concat), build)


@rule("bn_of_parts", {"BatchNormalization"})
def bn_of_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """``bn(concat(conv, conv))`` is ``concat(bn(conv), bn(conv))``, each with the statistics of its own channels."""
    concat = _joined(graph, op)
    if concat is None or isinstance(concat, Miss):
        return concat
    dims = [graph.type(operand(concat, i)).dims[1] for i in range(len(concat.inputs))]
    widths = [d for d in dims if isinstance(d, int)]
    statistics = [s for v in op.inputs[1:5] if (s := graph.constant_value(v)) is not None]
    if len(widths) < len(dims) or len(statistics) < 4:
        return Miss("its statistics or the widths of the parts are not constant")
    bounds = list(pairwise(accumulate(widths, initial=0)))

    def build(patch: Patch) -> Value:
        parts = []
        for part, (start, end) in zip(concat.inputs, bounds, strict=True):
            own = [patch.constant(s[start:end].copy(), "statistic") for s in statistics]
            parts.append(patch.add("BatchNormalization", [part, *own], op.attrs))
        return patch.add("Concat", parts, concat.attrs, src=concat.src)

    return Match((op, concat), build)


@rule("activation_of_parts", ACTIVATIONS)
def activation_of_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(concat(conv, conv))`` is ``concat(f(conv), f(conv))`` if f reads only scalar constants besides."""
    concat = _joined(graph, op)
    if concat is None or isinstance(concat, Miss):
        return concat
    numbers = [graph.constant_value(v) for v in op.inputs[1:] if v is not None]
    if any(n is None or n.size > 1 for n in numbers):
        return Miss("it reads more than scalars besides the Concat")

    def build(patch: Patch) -> Value:
        parts = [patch.add(op.kind, [part, *op.inputs[1:]], op.attrs) for part in concat.inputs]
        return patch.add("Concat", parts, concat.attrs, src=concat.src)

    return Match((op, concat), build)
