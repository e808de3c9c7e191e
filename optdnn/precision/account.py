"""The account of automatic precision: every plan that was tried, the front, and for each node its precision and the reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optdnn.config import PRECISIONS
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.precision.latency import Timed
from optdnn.precision.margins import Margins, merged
from optdnn.precision.plans import Problem
from optdnn.precision.sensitivity import Sensitivity

NOTHING_US, NOTHING = 0.05, 0.03
"""Differences below this, or below this part of a time, are none: what counters scatter by."""


@dataclass
class Candidate:
    """One plan with what is known of it.

    ``assignment``: op key -> precision, as asked. ``drop`` is the metric's on the calibration part, ``verified`` on the other part,
    by the built engine; ``margins`` and ``margins_unseen`` say on the same parts how near predictions came to being lost, where
    the metric counts predictions. ``ms`` is measured in turns; ``predicted_us`` is the search's estimate.
    ``library``: the one whose operator times led to a mixture.
    """

    name: str
    plan: PrecisionPlan
    assignment: Mapping[str, str]
    single: bool = False
    library: str = ""
    predicted_us: float | None = None
    drop: float = math.inf
    verified: float | None = None
    margins: Margins | None = None
    margins_unseen: Margins | None = None
    ms: float | None = None
    bytes: int | None = None
    tactic: str = ""
    error: str | None = None
    tuned: bool = False
    """``ms`` and ``verified`` are those after its tactics were tuned."""

    @property
    def expected(self) -> float | None:
        """The drop that margins let expect, on all samples that it was judged on; None where the metric has none."""
        known = [m for m in (self.margins, self.margins_unseen) if m is not None]
        return merged(known, sum(m.part for m in known)).expected() if known else None

    @property
    def searched(self) -> float:
        """What the search holds against its bound: the drop on the calibration part, or what margins there let expect."""
        if self.error is not None:
            return math.inf
        return max(self.drop, -math.inf if self.margins is None else self.margins.expected())

    @property
    def worst(self) -> float:
        """The largest of the two drops and the expected one."""
        expected = self.expected
        return max(
            self.drop, math.inf if self.verified is None else self.verified, -math.inf if expected is None else expected
        )

    @property
    def counts(self) -> dict[str, int]:
        """Ops per precision."""
        found = Counter(self.assignment.values())
        return {p: found[p] for p in PRECISIONS if found[p]}

    @property
    def label(self) -> str:
        """What the engine's precision is called: the option's text for a single one, all that occur for a mixture."""
        return self.name if self.single else "+".join(reversed(self.counts))


@dataclass(frozen=True)
class NodeFacts:
    """One op: what is known of it at each precision, what it got, and why."""

    key: str
    kind: str
    nodes: tuple[str, ...]
    precision: str
    times: Mapping[str, Timed]
    sensitivity: Mapping[str, Sensitivity]
    refused: Mapping[str, str]
    pin: tuple[str, str] | None
    follows: bool
    reason: str = ""

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "key": self.key,
            "kind": self.kind,
            "nodes": list(self.nodes),
            "precision": self.precision,
            "reason": self.reason,
        }
        if self.times:
            plain["us"] = {p: round(t.us, 2) for p, t in self.times.items()}
            tactics = {p: t.tactic for p, t in self.times.items() if t.tactic}
            plain |= {"tactics": tactics} if tactics else {}
        if self.sensitivity:
            plain["sensitivity"] = {p: s.to_plain() for p, s in self.sensitivity.items() if p != "fp32"}
        return plain | ({"refused": dict(self.refused)} if self.refused else {})


@dataclass
class SearchReport:
    """All of it. ``right``: percent of all samples that fp32 has right, where they have labels and the metric counts predictions.
    ``notes``: precisions that the target lacks altogether, with the reason."""

    metric: str
    unit: str
    bound: float
    calibration_samples: int
    verification_samples: int
    labelled: bool
    chosen: str
    met: bool
    candidates: Sequence[Candidate]
    nodes: Sequence[NodeFacts]
    latency: str
    measured: bool
    right: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def front(self) -> list[Candidate]:
        """The candidates that none beats in both accuracy and latency, fastest first."""
        return front(self.candidates)

    def candidate(self) -> Candidate:
        return next(c for c in self.candidates if c.name == self.chosen)

    def to_plain(self) -> dict[str, Any]:
        """JSON data. Numbers that are not finite are None. The same for the same model, options, data and timing cache."""
        best = {c.name for c in self.front()}
        rows = [
            {
                "name": c.name,
                "precisions": c.counts,
                "single": c.single,
                "drop": finite(c.drop),
                "verified": None if c.verified is None else finite(c.verified),
                **({} if (expected := c.expected) is None else {"expected": finite(expected)}),
                "ms": c.ms,
                "predicted_us": None if c.predicted_us is None else round(c.predicted_us, 2),
                "weights_bytes": c.bytes,
                "tactic": c.tactic,
                "within": c.verified is not None and c.worst <= self.bound,
                "front": c.name in best,
                **({"tuned": True} if c.tuned else {}),
                **({"error": c.error} if c.error else {}),
            }
            for c in self.candidates
        ]
        return {
            "metric": {"name": self.metric, "unit": self.unit, "bound": self.bound},
            "samples": {
                "calibration": self.calibration_samples,
                "verification": self.verification_samples,
                "labelled": self.labelled,
                **({} if self.right is None else {"right": finite(self.right)}),
            },
            "latency": {"source": self.latency, "measured": self.measured},
            "candidates": rows,
            "chosen": self.chosen,
            "met": self.met,
            "notes": dict(self.notes),
            "nodes": [n.to_plain() for n in self.nodes],
        }


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The Pareto front of latency and accuracy over the candidates whose time and accuracy are both known, fastest first."""

    def cost(c: Candidate) -> float | None:
        return c.ms if c.ms is not None else None if c.predicted_us is None else c.predicted_us / 1e3

    measured = any(c.ms is not None for c in candidates)
    known = [
        (t, c.worst if c.verified is not None else c.searched, c)
        for c in candidates
        if c.error is None and (t := (c.ms if measured else cost(c))) is not None and math.isfinite(c.drop)
    ]
    found: list[Candidate] = []
    least = math.inf
    for _, drop, c in sorted(known, key=lambda item: (item[0], item[1])):
        if drop < least:
            found.append(c)
            least = drop
    return found


# ---------------------------------------------------------------- reasons


def reasons(
    nodes: Sequence[NodeFacts],
    chosen: Candidate,
    problem: Problem | None,
    bound: float,
    unit: str,
    candidates: Sequence[Candidate],
) -> list[NodeFacts]:
    """The nodes with the reason of each in words: what the precision brings, and what spoke against every other."""
    return [replace(n, reason=_reason(n, chosen, problem, bound, unit, candidates)) for n in nodes]


def _reason(
    node: NodeFacts,
    chosen: Candidate,
    problem: Problem | None,
    bound: float,
    unit: str,
    candidates: Sequence[Candidate],
) -> str:
    if node.pin is not None:
        return f"pinned by --pin {node.pin[1]}={node.pin[0]}"
    if node.follows:
        return "it goes with the operators around it"
    parts = []
    p = node.precision
    base, mine = node.times.get("fp32"), node.times.get(p)
    if p != "fp32" and base is not None and mine is not None:
        s = node.sensitivity.get(p)
        won = _against(p, mine, "fp32", base, "all of the network is" if chosen.single else "it saves casts")
        parts.append(won + (f", for {_share(s.noise)} of the output's variation" if s is not None else ""))
    for q in PRECISIONS:
        if q not in (p, "fp32"):
            why = _against_other(node, p, q, chosen, problem, bound, unit, candidates)
            parts += [why] if why is not None else []
    return "; ".join(parts) or ("fp32 is the only precision it has" if p == "fp32" else "nothing to gain by another")


def _faster(a: float, b: float) -> bool:
    """Whether ``a`` microseconds are fewer than ``b``, by more than nothing."""
    return a < b - max(NOTHING_US, NOTHING * b)


def _against(p: str, mine: Timed, q: str, other: Timed, why_still: str) -> str:
    if _faster(mine.us, other.us):
        return f"{p} is faster than {q} here: {_us(mine.us)} against {_us(other.us)}"
    if _faster(other.us, mine.us):
        return f"{p} is slower than {q} here, {_us(mine.us)} against {_us(other.us)}, but {why_still}"
    return f"{p} is as fast as {q} here ({_us(mine.us)})"


def _against_other(
    node: NodeFacts,
    p: str,
    q: str,
    chosen: Candidate,
    problem: Problem | None,
    bound: float,
    unit: str,
    candidates: Sequence[Candidate],
) -> str | None:
    """Why not ``q``; None where it was never a question."""
    if q in node.refused:
        return f"{q}: {node.refused[q]}"
    s, mine, other = node.sensitivity.get(q), node.times.get(p), node.times.get(q)
    if s is None:
        return None
    if s.hazard:
        return f"{q}: {s.hazard}"
    if not math.isfinite(s.noise):
        return f"{q}: its result is not finite"
    if mine is not None and other is not None and not _faster(other.us, mine.us):
        word = "slower than" if _faster(mine.us, other.us) else "no faster than"
        return f"{q} is {word} {p} here: {_us(other.us)} against {_us(mine.us)}"
    saves = "" if mine is None or other is None else f" would save {_us(mine.us - other.us)}, but it"
    if chosen.single:
        return f"{q}{saves} puts {_share(s.noise)} of the output's variation on it, and no mixture was faster"
    if problem is not None and not chosen.single and node.key in chosen.assignment:
        changed = {**chosen.assignment, node.key: q}
        if problem.time(changed) >= problem.time(chosen.assignment) - NOTHING_US:
            return f"{q}{saves.removesuffix(' it')} the casts around it would cost more"
        for c in candidates:
            if c.assignment == changed and c.searched > bound:
                what = "the drop is" if c.drop > bound else "margins let expect a drop of"
                return f"{q}{saves.removesuffix(' it')} with it {what} {c.searched:.3g} {unit}, beyond {bound:g}"
    alone = f" (in {q} alone, {s.drop:.3g} {unit})" if math.isfinite(s.drop) and s.drop > bound else ""
    return f"{q}{saves} puts {_share(s.noise)} of the output's variation on it{alone}"


def _us(us: float) -> str:
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def _share(power: float) -> str:
    """A noise power as a share of the output's root-mean-square variation."""
    share = 100 * math.sqrt(max(0.0, power))
    return "nothing" if share == 0 else f"{share:.2g} %"


def finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
