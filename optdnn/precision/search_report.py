"""The report of automatic precision: every plan tried, the front, and the precision of each node with its reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optdnn.config import PRECISIONS
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.precision.latency import OperatorTimes, Timed
from optdnn.precision.margins import Margins, merged
from optdnn.precision.plans import Problem, Space
from optdnn.precision.sensitivity import Sensitivities, Sensitivity, rounded
from optdnn.types import is_float

NOTHING_US, NOTHING = 0.05, 0.03
"""Differences of times below this (µs), or below this fraction of a time, are ignored: counters scatter as much."""


@dataclass
class Candidate:
    """One plan and its measurements.

    ``assignment``: op key -> precision, as requested. ``drop`` is the metric's drop on the calibration part of the data,
    ``verified`` the drop of the built engine on the other part. ``margins`` and ``margins_unseen`` are the margins on these
    parts, for a metric that counts predictions. ``ms`` is measured in turns; ``predicted_us`` is the search's estimate.
    ``library``: the library whose times led to a mixture.
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
    """``ms`` and ``verified`` were measured after its tactics were tuned."""

    @property
    def expected(self) -> float | None:
        """The drop to expect from margins, on all samples of its measurements; None for a metric without margins."""
        known = [m for m in (self.margins, self.margins_unseen) if m is not None]
        return merged(known, sum(m.part for m in known)).expected() if known else None

    @property
    def right(self) -> float | None:
        """The percentage of samples that it predicts correctly; None for a metric without margins."""
        known = [m for m in (self.margins, self.margins_unseen) if m is not None]
        return 100 * sum(m.right for m in known) / sum(m.count for m in known) if known else None

    @property
    def searched(self) -> float:
        """The loss that the search compares with its bound: the drop on the calibration part, or the drop expected from margins."""
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
        """The name of the engine's precision: the option's text for a single one, all precisions in it for a mixture."""
        return self.name if self.single else "+".join(reversed(self.counts))

    def to_plain(self, bound: float) -> dict[str, Any]:
        """JSON data, without the key ``front``."""
        plain: dict[str, Any] = {
            "name": self.name,
            "precisions": self.counts,
            "single": self.single,
            "drop": rounded(self.drop, 6),
            "verified": None if self.verified is None else rounded(self.verified, 6),
            "ms": self.ms,
            "predicted_us": None if self.predicted_us is None else round(self.predicted_us, 2),
            "weights_bytes": self.bytes,
            "tactic": self.tactic,
            "within": self.verified is not None and self.worst <= bound,
        }
        plain |= {} if self.expected is None else {"expected": rounded(self.expected, 6)}
        return plain | ({"tuned": True} if self.tuned else {}) | ({"error": self.error} if self.error else {})


@dataclass(frozen=True)
class NodeFacts:
    """One op: its times and sensitivities, its precision, and the reason."""

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


def node_facts(
    space: Space,
    plan: PrecisionPlan,
    times: OperatorTimes | None,
    sensitivities: Sensitivities,
    offered: Collection[str],
) -> list[NodeFacts]:
    """The facts of each op with a float result. ``offered``: the precisions that were tried; the facts hold their refusals."""
    return [
        NodeFacts(
            key=choice.key,
            kind=choice.kind,
            nodes=choice.nodes,
            precision=space.runs(plan, choice.key),
            times={} if times is None else times.table.get(choice.key, {}),
            sensitivity={p: s for (k, p), s in sensitivities.table.items() if k == choice.key},
            refused={
                **{p: why for p, why in choice.refused.items() if p in offered},
                **{p: why for (k, p), why in sensitivities.failed.items() if k == choice.key},
            },
            pin=space.pins.get(choice.key),
            follows=choice.key not in space.variables,
        )
        for choice in space.choices.values()
        if is_float(space.by_key[choice.key].outputs[0].type.dtype)
    ]


@dataclass
class SearchReport:
    """The whole search. ``right``: the percentage of all samples that fp32 predicts correctly, with labels and a metric that counts
    predictions. ``notes``: precisions that the target lacks altogether, with the reason."""

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
        """The candidates that no other beats in both accuracy and latency, fastest first; only candidates with both values
        known."""
        known: list[tuple[float, float, Candidate]] = []
        for c in self.candidates:
            ms = c.ms if self.measured or c.predicted_us is None else c.predicted_us / 1e3
            if c.error is None and ms is not None and math.isfinite(c.drop):
                known.append((ms, c.searched if c.verified is None else c.worst, c))
        found: list[Candidate] = []
        least = math.inf
        for _, drop, c in sorted(known, key=lambda item: item[:2]):
            if drop < least:
                found.append(c)
                least = drop
        return found

    def candidate(self) -> Candidate:
        return next(c for c in self.candidates if c.name == self.chosen)

    def to_plain(self) -> dict[str, Any]:
        """JSON data. Numbers that are not finite are None. The same for the same model, options, data and timing cache."""
        best = {c.name for c in self.front()}
        rows = [{**c.to_plain(self.bound), "front": c.name in best} for c in self.candidates]
        return {
            "metric": {"name": self.metric, "unit": self.unit, "bound": self.bound},
            "samples": {
                "calibration": self.calibration_samples,
                "verification": self.verification_samples,
                "labelled": self.labelled,
                **({} if self.right is None else {"right": rounded(self.right, 6)}),
            },
            "latency": {"source": self.latency, "measured": self.measured},
            "candidates": rows,
            "chosen": self.chosen,
            "met": self.met,
            "notes": dict(self.notes),
            "nodes": [n.to_plain() for n in self.nodes],
        }


# ---------------------------------------------------------------- reasons


@dataclass(frozen=True)
class Reasons:
    """Explains the choice for each node: the gain of its precision, and the reasons against the other precisions."""

    chosen: Candidate
    candidates: Sequence[Candidate]
    problem: Problem | None
    bound: float
    unit: str

    def of(self, node: NodeFacts) -> str:
        if node.pin is not None:
            return f"pinned by --pin {node.pin[1]}={node.pin[0]}"
        if node.follows:
            return "it goes with the operators around it"
        others = (self._against(node, q) for q in PRECISIONS if q not in (node.precision, "fp32"))
        parts = [text for text in (self._gain(node), *others) if text is not None]
        only = "fp32 is the only precision it has" if node.precision == "fp32" else "nothing to gain by another"
        return "; ".join(parts) or only

    def _gain(self, node: NodeFacts) -> str | None:
        """The gain over fp32, and its price in noise."""
        p = node.precision
        base, mine = node.times.get("fp32"), node.times.get(p)
        if p == "fp32" or base is None or mine is None:
            return None
        price = f", for {_share(node.sensitivity[p].noise)} of the output's variation" if p in node.sensitivity else ""
        if _faster(mine, base):
            return f"{p} is faster than fp32 here: {_us(mine.us)} against {_us(base.us)}{price}"
        if _faster(base, mine):
            still = "all of the network is" if self.chosen.single else "it saves casts"
            return f"{p} is slower than fp32 here, {_us(mine.us)} against {_us(base.us)}, but {still}{price}"
        return f"{p} is as fast as fp32 here ({_us(mine.us)}){price}"

    def _against(self, node: NodeFacts, q: str) -> str | None:
        """The reason against ``q``; None if it was never considered."""
        if q in node.refused:
            same = [r for r in PRECISIONS if node.refused.get(r) == node.refused[q]]
            return f"{', '.join(same)}: {node.refused[q]}" if q == same[0] else None
        s, p = node.sensitivity.get(q), node.precision
        if s is None:
            return None
        if s.hazard:
            return f"{q}: {s.hazard}"
        if not math.isfinite(s.noise):
            return f"{q}: its result is not finite"
        mine, other, saves = node.times.get(p), node.times.get(q), ""
        if mine is not None and other is not None:
            if not _faster(other, mine):
                word = "slower than" if _faster(mine, other) else "no faster than"
                return f"{q} is {word} {p} here: {_us(other.us)} against {_us(mine.us)}"
            saves = f" would save {_us(mine.us - other.us)}, but"
        error = f"its error is {_share(s.noise)} of the output's variation"
        if self.chosen.single:
            return f"{q}{saves or ':'} no mixture was faster{f' ({error})' if s.noise > 0 else ''}"
        if (why := self._beyond(node, q)) is not None:
            return f"{q}{saves} {why}"
        alone = f" (in {q} alone, {s.drop:.3g} {self.unit})" if math.isfinite(s.drop) and s.drop > self.bound else ""
        return f"{q}{saves or ':'} {error}{alone}"

    def _beyond(self, node: NodeFacts, q: str) -> str | None:
        """The result of the search for the chosen plan with this one change; None if it was not tried."""
        now = self.chosen.assignment
        if self.problem is None or node.key not in now:
            return None
        if q not in self.problem.nodes[node.key].times:
            return f"is not a precision of {self.chosen.library} here"
        changed = {**now, node.key: q}
        if self.problem.time(changed) >= self.problem.time(now) - NOTHING_US:
            return "the casts around it would cost more"
        tried = next((c for c in self.candidates if c.assignment == changed and c.searched > self.bound), None)
        if tried is None:
            return None
        what = "the drop is" if tried.drop > self.bound else "margins predict a drop of"
        return f"with it {what} {tried.searched:.3g} {self.unit}, beyond {self.bound:g}"


def _faster(a: Timed, b: Timed) -> bool:
    """Whether ``a`` takes less time than ``b``, by more than the scatter of counters."""
    return a.us < b.us - max(NOTHING_US, NOTHING * b.us)


def _us(us: float) -> str:
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def _share(power: float) -> str:
    """A noise power as a share of the output's root-mean-square variation."""
    share = 100 * math.sqrt(max(0.0, power))
    return "nothing" if share == 0 else f"{share:.2g} %"
