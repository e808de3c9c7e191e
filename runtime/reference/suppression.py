"""NumPy kernel of NonMaxSuppression. The part that compares many boxes can be given to another function (:func:`suppressed_by`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import FP32, Array

Suppress = Callable[[Array, Array, float], Array]
"""A function of corners (fp32 [n, 4]), groups (int32 [n]) and a threshold: which boxes are kept
(:class:`optdnn.runtime.cuda.suppression.Suppression`)."""
_suppress: ContextVar[Suppress | None] = ContextVar("suppress", default=None)
MANY = 64
"""Boxes for which the function of :func:`suppressed_by` is used."""
MOST_SCORES = 1 << 30
"""Most scores that one sort can rank."""
PAIRS = 1 << 20
"""Number of pairs of boxes that are compared at a time."""
OVERHEAD = 4000
"""Comparing one box with all others costs as much as comparing this many further pairs."""


def _corners(boxes: Array, center_point_box: int) -> tuple[Array, Array, Array, Array]:
    """The low and high corners of boxes (..., 4): (y1, x1, y2, x2) in any order of corners, or (x, y, width, height)."""
    a, b, c, d = np.moveaxis(boxes, -1, 0)
    if center_point_box:
        half = boxes.dtype.type(2)
        return b - d / half, a - c / half, b + d / half, a + c / half
    return np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)


def non_max_suppression(
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: Array | None = None,
    iou_threshold: Array | None = None,
    score_threshold: Array | None = None,
    *,
    center_point_box: int = 0,
) -> tuple[Array, ...]:
    """NonMaxSuppression (ONNX opset 11): boxes (B, N, 4), scores (B, C, N); result (M, 3): batch, class and box.

    Of equal scores the first box wins. Scores must exceed their threshold; boxes that overlap a chosen one by more than
    ``iou_threshold`` are removed.
    """
    limit = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.reshape(-1)[0])
    threshold = boxes.dtype.type(0 if iou_threshold is None else iou_threshold.reshape(-1)[0])
    least = None if score_threshold is None else score_threshold.reshape(-1)[0]
    suppress = _suppress.get()
    chosen = [np.zeros((0, 3), np.int64)]
    if suppress is not None and boxes.dtype == scores.dtype == FP32 and limit > 0:
        found = np.arange(scores.size) if least is None else np.flatnonzero(scores > least)
        if len(found) >= MANY and scores.size <= MOST_SCORES:
            ranked = _ranked(scores.reshape(-1)[found], found, boxes.shape[1])
            return (_all_at_once(boxes, scores, ranked, threshold, limit, center_point_box, suppress),)
    for b in range(len(boxes)) if limit > 0 else ():
        for c in range(scores.shape[1]):
            own = scores[b, c]
            candidates = np.arange(len(own)) if least is None else np.flatnonzero(own > least)
            candidates = candidates[np.argsort(-own[candidates], kind="stable")]
            kept = candidates[_greedy(_corners(boxes[b, candidates], center_point_box), threshold, limit)]
            chosen.append(np.stack([np.full_like(kept, b), np.full_like(kept, c), kept], axis=1))
    return (np.concatenate(chosen).astype(np.int64, copy=False),)


@contextmanager
def suppressed_by(suppress: Suppress) -> Iterator[None]:
    """Inside, ``suppress`` compares the boxes of each NonMaxSuppression in fp32 that has :data:`MANY` candidates or more."""
    token = _suppress.set(suppress)
    try:
        yield
    finally:
        _suppress.reset(token)


def _ranked(scores: Array, places: Array, boxes: int) -> Array:
    """``places`` of scores (flat, in rows of ``boxes``) in the order of rows, in a row by falling score, then in their own order.

    One sort of integers that hold the row, the score and the box, which is many times as fast as a stable sort by two keys.
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # adding 0 makes -0 equal to 0
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    falling = np.where(np.isnan(scores), np.uint32(0xFFFFFFFF), ~rising).astype(np.uint64)
    row, box = np.divmod(places, boxes)
    width = np.uint64(max(boxes - 1, 1).bit_length())
    keys = (row.astype(np.uint64) << (width + np.uint64(32))) | (falling << width) | box.astype(np.uint64)
    keys.sort()
    row, box = keys >> (width + np.uint64(32)), keys & ((np.uint64(1) << width) - np.uint64(1))
    return (row * np.uint64(boxes) + box).astype(np.int64)


def _all_at_once(
    boxes: Array,
    scores: Array,
    places: Array,
    threshold: np.generic,
    limit: int,
    center_point_box: int,
    suppress: Suppress,
) -> Array:
    """The result, given the places of all candidates in order: the classes are groups of one call of ``suppress``."""
    row, box = np.divmod(places, boxes.shape[1])
    image = row // scores.shape[1]
    corners = np.stack(_corners(boxes[image, box], center_point_box), axis=-1)
    kept = np.flatnonzero(suppress(corners, row.astype(np.int32), float(threshold)))
    row, box = row[kept], box[kept]
    before = np.searchsorted(row, row)  # kept boxes of earlier rows
    best = np.arange(len(row)) - before < limit
    row, box = row[best], box[best]
    return np.stack([row // scores.shape[1], row % scores.shape[1], box], axis=1)


def _greedy(corners: tuple[Array, ...], threshold: np.generic, limit: int) -> Array:
    """The kept boxes, given boxes in the order of their scores: each that overlaps no kept box by more than ``threshold``."""
    n = len(corners[0])
    meeting = min((_meeting(corners[k], corners[k + 2]) for k in (0, 1)), key=lambda found: found[0])
    if min(limit, n) * (n + OVERHEAD) < 4 * meeting[0]:
        return _one_by_one(corners, threshold, limit)
    better, worse = _overlapping(corners, threshold, *meeting[1:])
    order = np.argsort(better, kind="stable")
    worse, first = worse[order], np.searchsorted(better[order], np.arange(n + 1)).tolist()
    gone, kept = np.zeros(n, np.bool_), 0
    for i in range(n):
        if gone[i]:
            continue
        kept += 1
        if kept == limit:
            gone[i + 1 :] = True
            break
        if first[i] < first[i + 1]:
            gone[worse[first[i] : first[i + 1]]] = True
    return np.flatnonzero(~gone)


def _one_by_one(corners: tuple[Array, ...], threshold: np.generic, limit: int) -> Array:
    """The same by comparing each kept box with all remaining ones: faster if few of many overlapping boxes are kept."""
    kept: list[int] = []
    left = np.arange(len(corners[0]))
    while len(left) and len(kept) < limit:
        best, rest = left[0], left[1:]
        kept.append(int(best))
        left = rest[~_overlap(corners, best, rest, threshold)]
    return np.array(kept, np.int64)


def _overlap(corners: tuple[Array, ...], i: Array, j: Array, threshold: np.generic) -> Array:
    """Whether the boxes ``i`` (one or more) and ``j`` overlap by more than ``threshold`` of their union."""
    y1, x1, y2, x2 = corners
    height = np.minimum(y2[i], y2[j]) - np.maximum(y1[i], y1[j])
    width = np.minimum(x2[i], x2[j]) - np.maximum(x1[i], x1[j])
    overlap = np.maximum(height, 0) * np.maximum(width, 0)
    a, b = ((y2[k] - y1[k]) * (x2[k] - x1[k]) for k in (i, j))
    union = a + b - overlap
    real = (overlap > 0) & (a > 0) & (b > 0) & (union > 0)
    found: Array = real & (overlap / np.where(real, union, 1) > threshold)
    return found


def _overlapping(corners: tuple[Array, ...], threshold: np.generic, order: Array, count: Array) -> tuple[Array, Array]:
    """The pairs of boxes that overlap by more than ``threshold``, the lower index first, among the pairs that overlap along an
    axis: each box and the next ``count`` ones in ``order``."""
    ends = np.cumsum(count)
    first, pairs = 0, [np.zeros((2, 0), np.int64)]
    while first < len(order):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PAIRS, side="right")))
        own = count[first:last]
        i = np.repeat(np.arange(first, last), own)
        j = np.arange(len(i)) - np.repeat(np.cumsum(own) - own, own) + i + 1
        i, j = order[i], order[j]
        for low, high in ((0, 2), (1, 3)):  # most pairs do not overlap along the other axis
            met = np.minimum(corners[high][i], corners[high][j]) > np.maximum(corners[low][i], corners[low][j])
            i, j = i[met], j[met]
        found = _overlap(corners, i, j, threshold)
        pairs.append(np.stack([np.minimum(i[found], j[found]), np.maximum(i[found], j[found])]))
        first = last
    better, worse = np.concatenate(pairs, axis=1)
    return better, worse


def _meeting(low: Array, high: Array) -> tuple[int, Array, Array]:
    """The number of pairs of boxes that overlap along an axis; the boxes in the order of their low ends along it; and for each
    box the number of later boxes that begin before it ends."""
    order = np.argsort(low, kind="stable")
    behind = np.searchsorted(low[order], high[order]) - np.arange(1, len(low) + 1)
    count = np.maximum(behind, 0)
    return int(count.sum()), order, count


KERNELS: dict[str, Kernel] = {"NonMaxSuppression": non_max_suppression}
