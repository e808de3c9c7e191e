"""Margins: how near predictions came to being lost, and the points of top-1 accuracy that are expected to go.

Of n samples one counts 100/n points. A finer bound is not kept by losing none of them: a candidate may bring many close to the
border and none across. A sample's *margin* is the score of its class less the best of the others. The *share* of it that a
candidate takes is u = 1 - its margin / fp32's: 0 where nothing changed, 1 at the border, above 1 where the prediction is lost.

The part of all predictions that is lost is P(u > 1), read off the tail of u. The k largest of n shares lie above some t. A tail
that falls as a power (Pareto's) continues to k/n x t^(1/i) at 1. Its index i is Hill's estimate (1975), in which shares beyond 1
show only that they are beyond. Where t is 1 already, this is the plain count. A Gaussian model of the changes of margins fits
worse: they grow with the scores, differ from sample to sample, and have a mean.

The index is held to 1 or more. Margins of new samples reach down to zero with some density, and a ratio with such a denominator
has a tail of index 1. Training samples, whose margins are all large, do not show it and would let the tail end too early. Even so
their expected loss may be too low.

A drop is losses less gains. Gains (fp32 wrong, the candidate right) are counted and not extrapolated.
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
"""The tail of n samples has n to this power."""
ROUNDING = 2e-5
"""A margin's change by less than this part of its two scores is ignored: two libraries differ by as much in fp32."""
TOGETHER = 1 << 22
"""Scores that are worked on at a time."""


@dataclass(frozen=True)
class Margins:
    """Margins on ``count`` samples; fp32 has ``right`` of them right. The candidate has ``lost`` of these wrong, and ``gained`` of
    the others right.

    ``shares``: the largest shares of margins that the candidate takes, of samples that fp32 has right; falling, at most KEPT, 1 for
    a lost one. ``part``: these samples' part of all that will decide, so that one part's tail begins where that of all will.
    """

    count: int
    right: int
    lost: int
    gained: int
    shares: Array
    part: float = 1.0

    def expected(self) -> float:
        """The drop to be expected, in points: losses less gains."""
        return float(f"{100 * (self.losses() - self.gained) / max(1, self.count):.12g}")

    def losses(self, lightest: float = LIGHTEST) -> float:
        """How many of the samples that fp32 has right are expected to be lost, by a tail of index ``lightest`` or more."""
        shares = self.shares[self.shares > 0]
        wanted = round(self.right * (self.right / self.part) ** (TAIL - 1)) if self.right else 0
        k = min(max(1, wanted), len(shares) - 1)
        if k < 1 or shares[k] >= 1:
            return float(self.lost)
        start, above = float(shares[k]), shares[:k]
        below = int(np.count_nonzero(above < 1))
        index = max(lightest, float(np.log(above / start).sum()) / below) if below else math.inf
        return k * start ** (1 / index) if index > 0 else 0.0


def merged(found: Iterable[Margins], part: float) -> Margins:
    """The margins of all samples together, which are ``part`` of the samples that will decide."""
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
    integers. A label without a score (for places that do not count) is never predicted.
    """
    likely = _probabilities(reference)
    step = max(1, TOGETHER // max(1, reference[:1].size))
    largest: list[Array] = [np.empty(0)]
    sure, lost, gained = wanted == classes, 0, 0
    for start in range(0, len(reference), step):
        here = slice(start, start + step)
        right, kept = sure[here], found[here] == classes[here]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # Differences of logarithms are those of the scores before a softmax.
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
    """The score of ``classes``, and the best of the others."""
    at = np.clip(classes, 0, scores.shape[1] - 1)[:, None]
    own = np.take_along_axis(scores, at, axis=1)[:, 0]
    others = scores.copy()
    np.put_along_axis(others, at, -np.inf, axis=1)
    return own.astype(np.float64), others.max(axis=1).astype(np.float64)


def _probabilities(scores: Array) -> bool:
    """Whether these are a softmax's results: near 1 a probability hardly moves, however far the scores before it do."""
    low = bool(scores.size) and scores.shape[1] > 1 and float(scores.min()) >= 0
    return low and bool(np.all(np.abs(scores.sum(axis=1, dtype=np.float64) - 1) < 1e-2))
