"""Geometry of the charts: where marks lie, as numbers. The template draws them (and escapes every text).

Horizontal positions are percent of the plot's width, so that text next to the marks keeps its size on any screen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.report.words import layer_error

WIDE = 8.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
HALF_HEIGHT = 15.0
MIDDLE = 18.0


@dataclass(frozen=True)
class Axis:
    """From values to percent; ``ticks`` are (percent, label)."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Percent of the width, clamped to the plot."""
        if self.log:
            where = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            where = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, where)), 3)


def axis_over(values: Sequence[float]) -> Axis:
    """An axis that holds positive values with a margin; logarithmic where they are far apart."""
    low, high = min(values), max(values)
    if high / low >= WIDE:
        return _log_axis(low / 1.15, high * 1.15)
    margin = 0.06 * (high - low) or 0.1 * high or 1.0
    return linear_axis(max(0.0, low - margin), high + margin)


def linear_axis(low: float, high: float) -> Axis:
    """A linear axis with ticks at round values."""
    raw = (high - low) / 6
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    digits = max(0, -math.floor(math.log10(step)) + (1 if abs(step / unit - 2.5) < 1e-9 else 0))
    values = [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    plain = Axis(low, high, False, ())
    return Axis(low, high, False, tuple((plain.at(v), f"{v:.{digits}f}") for v in values))


def _log_axis(low: float, high: float) -> Axis:
    plain = Axis(low, high, True, ())
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 4 else (1,)
    values = [m * 10.0**e for e in range(first, last + 1) for m in steps if low <= m * 10.0**e <= high]
    return Axis(low, high, True, tuple((plain.at(v), _power(v) if len(steps) == 1 else f"{v:g}") for v in values))


def _power(value: float) -> str:
    """A power of ten, short: 1e-7, 0.01, 100."""
    exponent = round(math.log10(value))
    return f"{value:g}" if -2 <= exponent <= 4 else f"1e{exponent}"


# ---------------------------------------------------------------- latencies


@dataclass(frozen=True)
class Violin:
    """One candidate's distribution: an SVG path in a box of 1000 x 36, and the percents of its marks."""

    path: str
    median: float
    p99: float
    rounds: tuple[float, ...]


def violins(rows: Sequence[Mapping[str, Any]]) -> tuple[Axis, list[Violin | None]]:
    """The axis in milliseconds that holds 99 % of all latencies, and one violin per row (None: not measured)."""
    measured = [r["quantiles_ms"] for r in rows if r["quantiles_ms"]]
    axis = axis_over([v for q in measured for v in (q[0], q[99])])
    return axis, [_violin(r, axis) if r["quantiles_ms"] else None for r in rows]


def _violin(row: Mapping[str, Any], axis: Axis) -> Violin:
    """A kernel density estimate over the quantiles, each for one percent of the calls (Silverman's bandwidth)."""
    points = np.array([10 * axis.at(v) for v in row["quantiles_ms"][:100]])
    middle = points[10:90]
    spread = min(float(points.std()), float(np.subtract(*np.percentile(points, [75, 25]))) / 1.34)
    bandwidth = max(1.06 * spread * len(points) ** -0.2, 2.5)
    low, high = float(points[0]) - 2 * bandwidth, float(points[-1]) + 2 * bandwidth
    grid = np.unique(np.concatenate([np.linspace(low, high, 90), np.linspace(middle[0], middle[-1], 60)]))
    density = np.exp(-0.5 * ((grid[:, None] - points[None]) / bandwidth) ** 2).sum(axis=1)
    density *= HALF_HEIGHT / density.max()
    upper = [f"{x:.1f},{MIDDLE - d:.2f}" for x, d in zip(grid, density, strict=True)]
    lower = [f"{x:.1f},{MIDDLE + d:.2f}" for x, d in zip(grid[::-1], density[::-1], strict=True)]
    rounds = tuple(axis.at(v) for v in row["round_medians_ms"])
    return Violin(f"M{'L'.join(upper + lower)}Z", axis.at(row["median_ms"]), axis.at(row["p99_ms"]), rounds)


# ---------------------------------------------------------------- errors


def error_axis(report: Mapping[str, Any]) -> tuple[Axis, list[float | None], float | None]:
    """A logarithmic axis of relative errors, and where the error of each row and the difference of other inputs lie on it.

    An error of 0 lies at its left end.
    """
    errors = [r["max_rel_err"] if r["error"] is None else None for r in report["rows"]]
    shown = [e for e in (*errors, report["input_difference"]) if e]
    axis = _log_axis(
        10.0 ** math.floor(math.log10(min([*shown, 1e-7]))), 10.0 ** math.ceil(math.log10(max([*shown, 1.0])))
    )
    dots = [None if e is None else axis.at(e) if e else 0.0 for e in errors]
    difference = report["input_difference"]
    return axis, dots, axis.at(difference) if difference else None


@dataclass(frozen=True)
class Profile:
    """Errors along the network: points (x, y, hint) in a box of 1000 x 200, the tolerance's height, ticks (y percent, label)."""

    points: tuple[tuple[float, float, str], ...]
    tolerance: float
    ticks: tuple[tuple[float, str], ...]


def error_profile(layers: Sequence[Mapping[str, Any]], tolerance: float) -> Profile:
    """Relative errors over the position in topological order; ones that are not finite lie on the top edge."""
    known = [e for d in layers if (e := layer_error(d))]
    low = 10.0 ** math.floor(math.log10(min([*known, tolerance, 1e-8])))
    high = 10.0 ** math.ceil(math.log10(max([*known, tolerance * 10])))
    axis = _log_axis(low, high)
    last = max(max((d["position"] for d in layers), default=0), 1)

    def height(value: float | None) -> float:
        return 0.0 if value is None else 200 - 2 * axis.at(value)

    points = tuple(
        (round(1000 * d["position"] / last, 1), round(height(layer_error(d)), 1), f"{d['operator']} {d['node']}")
        for d in sorted(layers, key=lambda d: d["position"])
    )
    decades = [(100 - at, label) for at, label in axis.ticks]
    return Profile(points, round(height(tolerance), 1), tuple(decades[:: max(1, len(decades) // 6)]))


# ---------------------------------------------------------------- bars


@dataclass(frozen=True)
class Bar:
    """A pair of bars: lengths in percent of the longest."""

    label: str
    before: int
    after: int
    before_percent: float
    after_percent: float


def operator_bars(before: Mapping[str, int], after: Mapping[str, int]) -> list[Bar]:
    """How many of each kind there are in the model and in the engine, most frequent first."""
    kinds = sorted({*before, *after}, key=lambda k: (-max(before.get(k, 0), after.get(k, 0)), k))
    most = max([*before.values(), *after.values(), 1])
    return [
        Bar(k, before.get(k, 0), after.get(k, 0), 100 * before.get(k, 0) / most, 100 * after.get(k, 0) / most)
        for k in kinds
    ]


def tactic_bars(tactics: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float | None]]:
    """Each tactic with its time's percent of the longest (None: refused)."""
    most = max((t["median_ms"] for t in tactics if t.get("median_ms")), default=1.0)
    return [(t, 100 * t["median_ms"] / most if t.get("median_ms") else None) for t in tactics]
