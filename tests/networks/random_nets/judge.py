"""Whether results are right: compared with how far small changes of the network's own numbers move them.

A network that rounds (Cast, Round, QuantizeLinear), compares or sorts can jump at an edge. The same jump shows when its
numbers are nudged: an error is measured against that, not against a fixed tolerance alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from random_nets.draw import Array
from random_nets.explanations import Case, explained
from random_nets.instrument import HALVES
from random_nets.oracle import Feeds, NoOracleError, Oracle, Results, in_float64


@dataclass(frozen=True)
class Tolerance:
    """Bounds of errors relative to the largest element (root mean square for ``mean``).

    ``nudge``: the relative size of a rounding. ``times``: the error may be so many times the effect of a nudge. ``edge``: a
    nudge so many times as large shows jumps nearby.
    """

    floor: float
    mean: float
    nudge: float
    times: float
    edge: float


TOLERANCES = {
    "fp32": Tolerance(5e-5, 2e-5, 1e-6, 30, 30),
    "fp16": Tolerance(8e-3, 3e-3, 1.5e-3, 12, 5),
    "bf16": Tolerance(6e-2, 2.4e-2, 1.2e-2, 12, 5),
    "tf32": Tolerance(8e-3, 3e-3, 1.5e-3, 12, 5),
    "int8": Tolerance(1.5, 0.5, 1e-2, 12, 3),
}
"""Precision -> tolerance. "int8" is for float networks quantized by calibration, whose error has no guarantee."""


ZERO = 0.1
"""The reference size of an error if all elements should be 0: terms that cancel leave the rounding of their own size."""

CHANGED = 4.0
"""An error may be so many times the effect of the change that explains it."""


@dataclass(frozen=True)
class Distance:
    """The distance of two results: of floats relative to the wanted ones, of integers the share that differs."""

    most: float = 0.0
    mean: float = 0.0
    share: float = 0.0
    why: str = ""

    def within(self, floor: float, mean: float) -> bool:
        return not self.why and self.most <= floor and self.mean <= mean and self.share == 0.0

    def __str__(self) -> str:
        return self.why or (
            f"{self.share:.2%} of integers" if self.share else f"{self.most:.2g} (mean {self.mean:.2g})"
        )


def distance(got: Array, want: Array) -> Distance:
    """The distance of one output."""
    if got.size == want.size == 0 and got.ndim == want.ndim and got.dtype == want.dtype:
        return Distance()  # the specification leaves the width of rows open that a loop without iterations gives
    if got.shape != want.shape or (got.dtype != want.dtype and not (got.dtype.kind == want.dtype.kind == "f")):
        return Distance(np.inf, np.inf, 1.0, f"{got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}")
    if got.dtype.kind != "f":
        differ = got != want
        return Distance(share=float(differ.mean()) if differ.size else 0.0)
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Distance(np.inf, np.inf, 0.0, "NaN or infinity differs")
    if not finite.any():
        return Distance()
    off, size = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    root = float(np.sqrt((b[finite] ** 2).mean()))
    least = 1e-6 if size.any() else ZERO  # zeros alone have no size
    most = float(off.max()) / max(float(size.max()), least)
    return Distance(most, float(np.sqrt((off**2).mean())) / max(root, least))


@dataclass(frozen=True)
class Verdict:
    """``kind``: right, edge (the network jumps nearby), oracle (float64 agrees with us), beyond_fp16, explained (by
    :mod:`random_nets.explanations`; the detail begins with the name), disputed or wrong."""

    kind: str
    detail: str = ""


def judged(
    oracle: Oracle, feeds: Sequence[Feeds], got: Sequence[Results], want: Sequence[Results], precision: str,
    calibration: Sequence[Feeds] = (),
) -> Verdict:  # fmt: skip
    """The verdict on all runs of one network. ``calibration``: the feeds of its calibration."""
    tolerance = TOLERANCES[precision]
    off = [(k, n) for k in range(len(feeds)) for n in want[k] if not _close(got[k].get(n), want[k][n], tolerance)]
    if not off:
        return Verdict("right")
    k, name = off[0]
    detail = f"{name}: {distance(got[k][name], want[k][name])} in run {k}, {len(off)} of {sum(map(len, want))} results"
    if precision == "fp16" and any(_beyond(oracle, feeds[j]) for j in {j for j, _ in off}):
        return Verdict("beyond_fp16", detail)
    for kind, nudge, times, draws in (("right", 1.0, tolerance.times, 4), ("edge", tolerance.edge, 2.0, 6)):
        moved = oracle.nudged(feeds, tolerance.nudge * nudge, draws)
        off = [
            (j, n) for j, n in off if not _explained(got[j][n], want[j][n], [m[j][n] for m in moved], tolerance, times)
        ]
        if not off:
            return Verdict(kind, detail)
    verdict = _by_float64(oracle.model, feeds, got, want, off, tolerance, detail)
    if verdict.kind == "oracle":
        return verdict

    def near(ours: Array, theirs: Array, moved: Sequence[Array]) -> bool:
        return _explained(ours, theirs, moved, tolerance, CHANGED)

    half = precision if precision in HALVES else ""
    why = explained(Case(oracle, feeds, got, want, off, tolerance.nudge, near, calibration, half))
    return verdict if why is None else Verdict("explained", f"{why}: {verdict.detail}")


def _close(got: Array | None, want: Array, tolerance: Tolerance) -> bool:
    return got is not None and distance(got, want).within(tolerance.floor, tolerance.mean)


def _beyond(oracle: Oracle, feeds: Feeds) -> bool:
    """An inner value comes near the largest number of fp16."""
    try:
        return not oracle.largest(feeds) < 2.0e4
    except NoOracleError:
        return False


def _explained(got: Array, want: Array, moved: Sequence[Array], tolerance: Tolerance, times: float) -> bool:
    """The error is at most ``times`` the distance of the nudged networks from the wanted result."""
    error = distance(got, want)
    noise = [distance(m, want) for m in moved]
    if error.why:
        return any(n.why for n in noise)
    share = max(n.share for n in noise)
    if error.share > 3 * share:
        return False
    most, mean = max(n.most for n in noise), max(n.mean for n in noise)
    return error.most <= tolerance.floor + times * most and error.mean <= tolerance.mean + times * mean


def _by_float64(
    model: onnx.ModelProto, feeds: Sequence[Feeds], got: Sequence[Results], want: Sequence[Results],
    off: Sequence[tuple[int, str]], tolerance: Tolerance, detail: str,
) -> Verdict:  # fmt: skip
    """The verdict of float64 if ONNX Runtime and optdnn disagree."""
    k = off[0][0]
    found = in_float64(model, feeds[k])
    if found is None:
        return Verdict("wrong", f"{detail}; no float64")
    truth, source = found
    names = [n for j, n in off if j == k]
    ours = [distance(got[k][n], truth[n].astype(want[k][n].dtype)) for n in names]
    theirs = [distance(want[k][n], truth[n].astype(want[k][n].dtype)) for n in names]
    detail += f"; from float64 ({source}): ONNX Runtime {theirs[0]}, optdnn {ours[0]}"
    if all(d.within(tolerance.floor, tolerance.mean) for d in ours):
        return Verdict("disputed" if source == "optdnn" else "oracle", detail)
    return Verdict("wrong", detail)
