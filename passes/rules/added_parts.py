"""Tensors that are put together from their own parts: the parts that are unchanged are not copied.

``x[:, 1:] += r`` is exported as slices of x, an addition and a Concat (MViT: Fan et al., 2021; Li et al., 2022 adds positions of
all tokens but the class token to the scores and to the result of attention). ``x + pad(r)`` is a stage, or a mask of attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import PadAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import VIEWS, integers, operand, producer, slice_limits, zeros_around
from optdnn.passes.support.paths import path_to, repeated
from optdnn.passes.support.regions import Region, backward, boxed, forward, region, viewed
from optdnn.types import normalize_axis

MOST_ZEROS = 1 << 20
"""Most elements of a part of a padding that becomes a constant."""
PRODUCTS = frozenset({"MatMul", "Gemm"})
"""Kinds that add a tensor as a stage of their epilogue, or as the mask of the attention that they are a part of."""


@rule("concat_of_parts", {"Concat"})
def concat_of_parts(graph: Graph, op: Op) -> Match | None:
    """A Concat of consecutive parts of one tensor is a part of this tensor, or all of it."""
    found = _union([region(graph, operand(op, k)) for k in range(len(op.inputs))], _axis(op))
    if found is None or len(op.inputs) < 2:
        return None
    dims = op.outputs[0].type.static_shape
    return Match((op,), lambda patch: forward(patch, boxed(patch, found), found, dims))


@rule("added_part", {"Concat"})
def added_part(graph: Graph, op: Op) -> Match | Miss | None:
    """A Concat of consecutive parts of one tensor, to one of which a tensor is added, is the sum of both; zeros fill the second."""
    axis, values = _axis(op), [operand(op, k) for k in range(len(op.inputs))]
    if len(values) < 2 or not op.outputs[0].type.is_static:
        return None
    regions = [region(graph, v) for v in values]
    for at, value in enumerate(values):
        for added in _additions(graph, value):
            found = None if added.part is None else _union([*regions[:at], added.part, *regions[at + 1 :]], axis)
            if found is None:
                continue
            if graph.op(found.root).kind not in PRODUCTS:
                return Miss("no product computes the tensor, whose stage or mask the addition could be")
            if graph.type(added.other) != graph.type(added.add.value):
                return Miss("the added tensor is repeated along an axis of the part")
            return Match((op, added.add, *added.views), partial(_sum, op, added, found))
    return None


def _sum(op: Op, added: _Addition, found: Region, patch: Patch) -> Value:
    """Add the sum of the box of ``found`` and the added tensor, with zeros around it, in the order of the root's axes."""
    assert added.part is not None
    r = added.other
    r = repeated(patch, r, added.views)
    pairs = list(zip(added.part.ranges, found.ranges, strict=True))
    pads = (*(own[0] - whole[0] for own, whole in pairs), *(whole[1] - own[1] for own, whole in pairs))
    r = patch.add("Pad", [backward(patch, r, added.part), integers(patch, pads, "pads")], PadAttrs())
    total = patch.add("Add", [boxed(patch, found), r], src=added.add.src)
    return forward(patch, total, found, op.outputs[0].type.static_shape)


@dataclass(frozen=True)
class _Addition:
    """An Add of ``other`` to a part of a tensor, and the ``views`` after it, the last one first. ``part``: the part with these
    views, or None."""

    add: Op
    other: Value
    views: tuple[Op, ...]
    part: Region | None


def _additions(graph: Graph, value: Value) -> Iterator[_Addition]:
    """The Add that computes ``value``, perhaps with views after it, for each of its operands. Each must have one reader."""
    views = path_to(graph, value, VIEWS, alone=True)
    op = graph.op(operand(views[-1]) if views else value)
    if op.kind != "Add" or graph.sole_user(op.value) is None:
        return
    for slot in (0, 1):
        whole = graph.type(operand(op, slot)) == graph.type(op.value)
        part = region(graph, operand(op, slot)) if whole else None
        for view in reversed(views):
            part = None if part is None else viewed(graph, view.value, part)
        yield _Addition(op, operand(op, 1 - slot), tuple(views), part)


@rule("pad_of_pad", {"Pad"})
def pad_of_pad(graph: Graph, op: Op) -> Match | None:
    """A Pad with zeros of a Pad with zeros is one Pad."""
    inner = producer(graph, op.inputs[0], {"Pad"})
    if inner is None or not op.outputs[0].type.is_static:
        return None
    pads = [zeros_around(graph, each) for each in (inner, op)]
    if pads[0] is None or pads[1] is None:
        return None
    total = [a + b for a, b in zip(*pads, strict=True)]
    return Match(
        (op, inner), lambda patch: patch.add("Pad", [operand(inner), integers(patch, total, "pads")], PadAttrs())
    )


@rule("part_of_pad", {"Slice"})
def part_of_pad(graph: Graph, op: Op) -> Match | None:
    """A part of a Pad with zeros is a part of its operand, the Pad with fewer zeros, or zeros.

    PyTorch assembles the keys of DeepSeek's heads by writes into an empty tensor: the second write keeps the first part. Several
    parts of a Pad stay: kernels read them in place."""
    pad = producer(graph, op.inputs[0], {"Pad"}, alone=True)
    zeros = None if pad is None else zeros_around(graph, pad)
    if pad is None or zeros is None or not pad.outputs[0].type.is_static:
        return None
    limits = slice_limits(graph, op)
    if limits is None or any(step != 1 for *_, step in limits):
        return None
    whole = pad.outputs[0].type.static_shape
    taken = [(0, n) for n in whole]
    for axis, begin, end, _ in limits:
        taken[axis] = slice(begin, end).indices(whole[axis])[:2]
    sizes = [int(d) for d in graph.type(operand(pad)).static_shape]
    rank = len(sizes)
    own = [(begin - zeros[k], end - zeros[k]) for k, (begin, end) in enumerate(taken)]
    kept = [(max(0, begin), min(n, end)) for (begin, end), n in zip(own, sizes, strict=True)]
    around = [*(max(0, -begin) for begin, _ in own), *(max(0, end - n) for (_, end), n in zip(own, sizes, strict=True))]
    cut = [k for k in range(rank) if kept[k] != (0, sizes[k])]
    shape, name = op.outputs[0].type.static_shape, op.outputs[0].name
    if any(begin >= end for begin, end in kept):
        zero = np.zeros(shape, op.outputs[0].type.dtype) if math.prod(shape) <= MOST_ZEROS else None
        return None if zero is None else Match((op, pad), lambda patch: patch.constant(zero, name))
    if cut and any(around):
        return None

    def build(patch: Patch) -> Value:
        x = operand(pad)
        if cut:
            limits = ([kept[k][0] for k in cut], [kept[k][1] for k in cut], cut)
            x = patch.add("Slice", [x, *(integers(patch, each, "limits") for each in limits)])
        return patch.add("Pad", [x, integers(patch, around, "pads")], PadAttrs()) if any(around) else x

    return Match((op, pad), build)


@rule("part_of_zeros", {"Pad"})
def part_of_zeros(graph: Graph, op: Op) -> Match | None:
    """A part of a tensor at its own place, with zeros around it, is a selection: additions compute it in registers."""
    pads, sizes = zeros_around(graph, op), op.outputs[0].type.shape
    if pads is None or not op.outputs[0].type.is_static or any(u.kind != "Add" for u in graph.users(op.value)):
        return None
    part = region(graph, operand(op))
    if part is None or part.axes != tuple(range(len(sizes or ()))) or graph.type(part.root).shape != sizes:
        return None
    box = [(pads[k], int(n) - pads[len(part.axes) + k]) for k, n in enumerate(op.outputs[0].type.static_shape)]
    if list(part.ranges) != box or not any(pads):
        return None
    limited = [k for k, own in enumerate(box) if own != (0, op.outputs[0].type.static_shape[k])]
    mask = np.ones((), bool)
    for k, (begin, end) in enumerate(box):
        line = np.arange(op.outputs[0].type.static_shape[k]) if k in limited else np.full(1, begin)
        mask = mask[..., None] & (begin <= line) & (line < end)
    zero = np.zeros((), op.outputs[0].type.dtype)
    return Match(
        (op,), lambda patch: patch.add("Where", [patch.constant(mask, "part"), part.root, patch.constant(zero, "zero")])
    )


def _axis(op: Op) -> int:
    return normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims))


def _union(parts: Sequence[Region | None], axis: int) -> Region | None:
    """The region that consists of consecutive parts along ``axis``; None if they are no such parts."""
    found = parts[0]
    for part in parts[1:]:
        found = None if found is None or part is None else found.joined(part, axis)
    return found
