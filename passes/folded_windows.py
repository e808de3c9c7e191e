"""Windows that are folded into images are added row by row, if their channels are innermost.

Col2Im reads windows with their positions innermost. Outlook attention (VOLO: Yuan et al., 2021) multiplies windows whose channels
are innermost, so exporters turn them first. A sum of segments needs no turn: each pixel adds rows of channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.segment_sum import SegmentSumAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import ints, operand, producer, reshaped
from optdnn.types import Array

BATCH, CHANNELS, TAPS, POSITIONS = range(4)
"""What an axis of the windows counts."""
MOST_ROWS = 1 << 22
"""Most rows, of all images, whose places are stored."""


def _counts(turned: Sequence[int], channels: int, taps: int) -> tuple[int, ...] | None:
    """What each axis of the turned windows counts: a batch, channels, taps, positions; None if an axis counts two of them."""
    found, left = [BATCH], [channels, taps]
    for size in turned[1:]:
        while left and left[0] == 1:
            left.pop(0)
        if not left:
            found.append(POSITIONS)
            continue
        if left[0] % size:
            return None
        left[0] //= size
        found.append(CHANNELS if len(left) == 2 else TAPS)
    return tuple(found)


def _windows(graph: Graph, op: Op, channels: int, taps: int) -> tuple[Value, tuple[int, ...]] | None:
    """The windows that a Transpose and a Reshape turn for a Col2Im, and the order of axes that puts channels last;
    None if the channels are not innermost."""
    flat = producer(graph, operand(op), {"Reshape"}, alone=True)
    turn = None if flat is None else producer(graph, operand(flat), {"Transpose"}, alone=True)
    if turn is None or not turn.attrs.perm or not turn.outputs[0].type.is_static:
        return None
    perm, turned = tuple(turn.attrs.perm), turn.outputs[0].type.static_shape
    counts = None if 0 in turned else _counts(turned, channels, taps)
    if counts is None or turned[0] != graph.type(operand(op)).static_shape[0]:
        return None
    order = [perm[k] for kind in (BATCH, POSITIONS, TAPS, CHANNELS) for k, count in enumerate(counts) if count == kind]
    return (operand(turn), tuple(order)) if counts[perm.index(len(perm) - 1)] == CHANNELS else None


def _targets(
    image: Sequence[int], block: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> Array:
    """The pixel that each tap of each position adds to, as [positions, taps]; -1: none."""
    rank = len(image)
    spans = [(k - 1) * d + 1 for k, d in zip(block, dilations, strict=True)]
    counts = [(n + pads[i] + pads[rank + i] - spans[i]) // strides[i] + 1 for i, n in enumerate(image)]
    at = [
        np.arange(block[i])[:, None] * dilations[i] + np.arange(counts[i])[None] * strides[i] - pads[i]
        for i in range(rank)
    ]  # [taps, positions] of each axis
    found = np.zeros((1, 1), np.int64)
    inside = np.ones((1, 1), bool)
    for i, n in enumerate(image):
        taps, positions = found.shape[0] * block[i], found.shape[1] * counts[i]
        own = at[i][None, :, None, :]
        found = (found[:, None, :, None] * n + own).reshape(taps, positions)
        inside = (inside[:, None, :, None] & (own >= 0) & (own < n)).reshape(taps, positions)
    return np.where(inside, found, -1).T


@rule("folded_windows", {"Col2Im"})
def folded_windows(graph: Graph, op: Op) -> Match | Miss | None:
    """A Col2Im of windows that are turned before it becomes a SegmentSum of the windows as they are."""
    image, block = (ints(graph, v) for v in op.inputs[1:3])
    if image is None or block is None or not graph.type(operand(op)).is_static or not op.outputs[0].type.is_static:
        return None
    batch, channels = op.outputs[0].type.static_shape[:2]
    found = _windows(graph, op, channels, math.prod(block))
    if found is None:
        return Miss("its windows are not turned before it, or their channels are not innermost")
    target = _targets(image, block, op.attrs.strides, op.attrs.pads, op.attrs.dilations).reshape(-1)
    pixels = math.prod(image)
    if batch * len(target) > MOST_ROWS:
        return Miss(f"the places of {batch * len(target)} rows would have to be stored")
    every = np.where(target < 0, -1, target + pixels * np.arange(batch)[:, None]).reshape(-1)
    order = np.argsort(every, kind="stable")[np.count_nonzero(every < 0) :]
    begins = np.searchsorted(every[order], np.arange(batch * pixels + 1))
    value, perm = found

    def build(patch: Patch) -> Value:
        rows = reshaped(patch, patch.add("Transpose", [value], TransposeAttrs(perm)), (len(every), channels))
        arrays = [patch.constant(a.astype(np.int32), name) for a, name in ((order, "rows"), (begins, "first"))]
        total = patch.add("SegmentSum", [rows, *arrays], SegmentSumAttrs((), indices=(0,), axes=(0,), views=((1,),)))
        last = reshaped(patch, total, (batch, *image, channels))
        return patch.add("Transpose", [last], TransposeAttrs((0, len(image) + 1, *range(1, len(image) + 1))))

    flat = graph.op(operand(op))
    return Match((op, flat, graph.op(operand(flat))), build)


class FoldedWindows(RulePass):
    name = "folded_windows"
    rules = (folded_windows,)
    gpu_only = True  # libraries for CPUs have a kernel of their own
