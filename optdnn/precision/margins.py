"""Margins: how close predictions came to being lost, and the expected loss of top-1 accuracy in points.

One of n samples counts 100/n points. To lose no sample does not guarantee a finer bound: a candidate may bring many samples close
to the border and none across it. A sample's *margin* is the score of its class minus the best score of the other classes. The
*share* of the margin that a candidate takes is u = 1 - its margin / fp32's: 0 if nothing changed, 1 at the border, above 1 if the
prediction is lost.

The fraction of all predictions that is lost is P(u > 1), estimated from the tail of u. The k largest of n shares lie above some
t. A tail that falls as a power (Pareto's) continues to k/n x t^(1/i) at 1. Its index i is Hill's estimate (1975); of shares
beyond 1 it uses only that they are beyond 1. If t is already 1, the result is the plain count. A Gaussian model of the changes of
margins fits worse: the changes grow with the scores, differ from sample to sample, and have a nonzero mean.

The index is held to 1 or more. Margins of new samples reach down to zero with some density, and a ratio with such a denominator
has a tail of index 1. Training samples all have large margins: they do not show this, and would let the tail end too early. Even
so, their expected loss may be too low.

A drop is losses minus gains. Gains (fp32 wrong, the candidate right) are counted and not extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from optdnn.types import Array

KEPT = 1024
"""The number of the largest shares that are kept: the tail of up to a billion samples."""
LIGHTEST = 1.0
"""The least index of the tail."""
TAIL = 1 / 3
"""The exponent of the tail's size: of n samples, n to this power are in the tail."""
ROUNDING = 2e-5
"""A margin's change by less than this fraction of its two scores is ignored: two libraries differ by as much in fp32."""
TOGETHER = 1 << 22
"""Number of scores that are processed at a time."""


@dataclass(frozen=True)
class Margins:
    """Margins on ``count`` samples. fp32 predicts ``right`` of them correctly; the candidate gets ``lost`` of these wrong, and
    ``gained`` of the others right.

    ``shares``: the largest shares of margins that the candidate takes, over the samples that fp32 has right; in descending order,
    at most KEPT, 1 for a lost sample. ``part``: these samples as a fraction of all deciding samples, so that the tail of one part
    begins where the tail of all samples will begin.
    """

    count: int
    right: int
    lost: int
    gained: int
    shares: Array
    part: float = 1.0

    def expected(self) -> float:
        """The expected drop in points: losses minus gains."""
        return float(f"{100 * (self.losses() - self.gained) / max(1, self.count):.12g}")

    def losses(self) -> float:
        """The expected number of lost samples among those that fp32 has right, with a tail of index :data:`LIGHTEST` or more."""
        shares = self.shares[self.shares > 0]
        wanted = round(self.right * (self.right / self.part) ** (TAIL - 1)) if self.right else 0
        k = min(max(1, wanted), len(shares) - 1)
        if k < 1 or shares[k] >= 1:
            return float(self.lost)
        start, above = float(shares[k]), shares[:k]
        below = int(np.count_nonzero(above < 1))
        index = max(LIGHTEST, float(np.log(above / start).sum()) / below) if below else math.inf
        return k * start ** (1 / index) if index > 0 else 0.0


def merged(found: Iterable[Margins], part: float) -> Margins:
    """The margins of all samples together; they are the fraction ``part`` of all deciding samples."""
    every = list(found)
    shares = _largest(np.concatenate([np.empty(0), *(m.shares for m in every)]))
    count, right = sum(m.count for m in every), sum(m.right for m in every)
    return Margins(count, right, sum(m.lost for m in every), sum(m.gained for m in every), shares, part)


def _largest(shares: Array) -> Array:
    if len(shares) > KEPT:
        shares = np.partition(shares, len(shares) - KEPT)[-KEPT:]
    found: Array = np.sort(shares)[::-1]
    return found


def margins(scores: Array, reference: Array, classes: Array, found: Array, wanted: Array) -> Margins:
    """Margins of a candidate's ``scores`` against fp32's, both (samples, classes, …).

    ``classes`` are the right classes, ``found`` and ``wanted`` the classes that the candidate and fp32 predict, all (samples, …)
    integers. A label without a score (for positions that do not count) is never predicted.
    """
    likely = _probabilities(reference)
    step = max(1, TOGETHER // max(1, reference[:1].size))
    largest: list[Array] = [np.empty(0)]
    sure, lost, gained = wanted == classes, 0, 0
    for start in range(0, len(reference), step):
        here = slice(start, start + step)
        right, kept = sure[here], found[here] == classes[here]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # Differences of logarithms are differences of the scores before a softmax.
            a, b = (np.log(np.maximum(y[here], 0)) if likely else y[here] for y in (scores, reference))
            (own, best), (own_y, best_y) = _pair(b, classes[here]), _pair(a, classes[here])
            before, after = own - best, own_y - best_y
            moved = np.abs(before - after) > ROUNDING * np.maximum(np.abs(own), np.abs(best))
            shares = np.where(moved, 1 - after / before, 0.0)
        # A margin that is 0 or not finite has no share: all or nothing of it is lost.
        shares = np.where(kept, np.where(np.isfinite(shares), np.minimum(shares, 1.0), 0.0), 1.0)
        largest.append(_largest(shares[right]))
        lost += int(np.count_nonzero(right & ~kept))
        gained += int(np.count_nonzero(kept & ~right))
    return Margins(wanted.size, int(np.count_nonzero(sure)), lost, gained, _largest(np.concatenate(largest)))


def _pair(scores: Array, classes: Array) -> tuple[Array, Array]:
    """The score of ``classes``, and the best of the other scores."""
    at = np.clip(classes, 0, scores.shape[1] - 1)[:, None]
    own = np.take_along_axis(scores, at, axis=1)[:, 0]
    others = scores.copy()
    np.put_along_axis(others, at, -np.inf, axis=1)
    return own.astype(np.float64), others.max(axis=1).astype(np.float64)


def _probabilities(scores: Array) -> bool:
    """Whether the scores are a softmax's results. Near 1 a probability hardly moves, however much the scores before it do."""
    low = bool(scores.size) and scores.shape[1] > 1 and float(scores.min()) >= 0
    return low and bool(np.all(np.abs(scores.sum(axis=1, dtype=np.float64) - 1) < 1e-2))
