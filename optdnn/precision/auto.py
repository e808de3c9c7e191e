"""Automatic precision: the fastest engine whose accuracy stays within a bound, and the account of how it was found.

Calibrate and measure on one part of the data; order the plans by predicted time and damage (:mod:`optdnn.precision.search`);
measure the real accuracy of those that matter; build the best and every single precision within the bound, time them side by
side; accept by the accuracy on the other part of the data, which none of this has seen. Where that fails, the bound for the
search is tightened by what was missed, and the search repeated.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optdnn.calibration import calibrate
from optdnn.calibration.images import ImageSpec
from optdnn.config import QUANTIZED, BuildOptions
from optdnn.errors import OptdnnError, UsageError
from optdnn.ir.digest import graph_digest
from optdnn.ir.graph import Graph, Op
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.equalize import Equalize
from optdnn.passes.precision import PrecisionPlan, key
from optdnn.passes.ranges import Calibration
from optdnn.precision.account import Account, Candidate, NodeFacts, reasons
from optdnn.precision.accuracy import Judge
from optdnn.precision.latency import Table
from optdnn.precision.metrics import Metric, metric_of
from optdnn.precision.samples import Samples, load, split
from optdnn.precision.search import Problem, frontier, moves
from optdnn.precision.sensitivity import Kept, Sensitivities, mean, measure
from optdnn.precision.space import Space
from optdnn.precision.targets import Target, Way, assigned, machine_of, target_of
from optdnn.runtime.engine import Engine
from optdnn.tactics.timing_cache import TimingCache
from optdnn.types import TensorSpec, is_float

Say = Callable[[str], None]
BUDGET_SECONDS = 120.0
"""For sensitivities and the search where the user gives no budget. Calibration, the single precisions, the times of operators and
the last race come on top."""
SAMPLES = 32
"""Samples at a time on which sensitivities are measured."""
MOST_BATCHES = 4
"""Batches that sensitivities are averaged over, where a network's own batch is small."""
LEARN = 0.5
"""Casts whose cost turns out this part higher than believed are worth another search."""
MOST_MOVES = 12
SHOWN_PLANS = (0.25, 0.5, 0.75)
"""Places on the frontier that are tried in any case: predictions err, and the user wants to see what lies between."""
MOST_MIXTURES = 3
"""Mixtures that are built and raced beside the single precisions."""
ATTEMPTS = 4
PREFER_SINGLE = 1.01
"""A single precision within this factor of the fastest mixture is taken instead: nothing is gained by more kinds of arithmetic."""


@dataclass
class Found:
    """What the build goes on with. ``met`` is False where even the closest engine is beyond the bound. ``passes``: reports of what
    was done to the graph for the sake of integers, exactly."""

    plan: PrecisionPlan
    label: str
    account: Account
    calibration: Calibration | None
    met: bool
    passes: list[PassReport] = field(default_factory=list)


def find(
    graph: Graph,
    options: BuildOptions,
    target: str,
    cache: TimingCache,
    say: Say = lambda text: None,
) -> Found:
    """The precision of each op of ``graph`` (exact passes done, precisions not assigned), for ``options.precision == "auto"``.

    Where integers may be chosen, ``graph`` is equalized first (exactly, in place), as it is for ``precision="int8"``.
    Raises UsageError without data or for a metric that does not fit; what the metric, the data and the libraries raise.
    """
    return _Auto(graph, options, target, cache, say).run()


class _Auto:
    def __init__(self, graph: Graph, options: BuildOptions, target: str, cache: TimingCache, say: Say):
        self.graph, self.options, self.target, self.say = graph, options, target, say
        if options.calib is None:
            raise UsageError(
                "precision auto needs data to judge accuracy by", hint="give --calib DATA.npz (inputs, and labels)"
            )
        self.deadline = math.inf
        images = None if options.images is None else ImageSpec.read(options.images)
        samples = load(options.calib, specs(graph), options.labels, images)
        self.seen, self.unseen = split(samples)
        self.metric: Metric = metric_of(options.metric, samples.labels)
        self.judge = Judge(self.metric, self.seen, self.unseen)
        self.bound = self.metric.bound(options.max_drop)
        self.search_bound = self.bound
        self.machine = machine_of(target)
        self.space = Space(graph, target, options.opt_level, options.precision_map)
        self.passes: list[PassReport] = []
        self.calibration = self._calibrated()
        self.driver: Target = target_of(options, target, cache, calibrated=self.calibration is not None)
        self.candidates: list[Candidate] = []
        self.built: dict[str, Engine] = {}
        self.problems: dict[str, Problem] = {}
        self.sensitivities = Sensitivities()
        self.offered = {p for text in self.driver.offers for p in text.split("+")}

    def _calibrated(self) -> Calibration | None:
        """Equalize and calibrate, where integers are a choice; on the part of the data that the search may see."""
        wanted = QUANTIZED if self.options.candidates is None else QUANTIZED & set(self.options.candidates)
        wanted |= QUANTIZED & set(self.options.precision_map.values())
        if not any(wanted & set(c.precisions) for c in self.space.choices.values()):
            return None

        def ranges(graph: Graph) -> Calibration:
            return calibrate(
                graph,
                dict(self.seen.feeds),
                self.options.calibrator,
                cache=self.options.calib_cache,
                progress=self.say,
            )

        plan = PrecisionPlan.of_option("int8", {k: p for k, (p, _) in self.space.pins.items()})
        self.passes.append(Equalize()(self.graph, PassContext(target=self.machine, plan=plan, calibration=ranges)))
        self.space = Space(self.graph, self.target, self.options.opt_level, self.options.precision_map)
        return ranges(self.graph)

    # ------------------------------------------------------------------ the way through

    def run(self) -> Found:
        self._singles()
        ways = self.driver.ways(self.graph, self.calibration, self.say)
        self.deadline = time.perf_counter() + (self.options.budget or BUDGET_SECONDS)
        self._measure(ways)
        self._predict(ways)
        for attempt in range(ATTEMPTS):
            for way in ways:
                self._search(way)
            self._race(first=attempt == 0)
            chosen = self._verified()
            if chosen is not None and not self._learned(ways):
                break
            if chosen is not None:
                continue
            missed = [c.verified - c.drop for c in self.candidates if c.verified is not None and math.isfinite(c.drop)]
            self.search_bound = max(0.0, min(self.search_bound, self.bound - max([0.0, *missed])) * 0.75)
            self.say(f"beyond the bound on unseen data: search again within {self.search_bound:.3g}")
        met = chosen is not None
        if chosen is None:
            chosen = min(self._judged(), key=lambda c: (c.worst, c.ms if c.ms is not None else math.inf))
        return self._conclude(chosen, ways, met)

    def _singles(self) -> None:
        """fp32 first: what all else is held against. Pins hold in each."""
        for text in self.driver.offers:
            plan = PrecisionPlan.of_option(text, {k: p for k, (p, _) in self.space.pins.items()})
            assignment = {k: self.space.runs(plan, k) for k in self.space.choices}
            self._judge(Candidate(text, plan, assignment, single=True), way="")

    def _predict(self, ways: Sequence[Way]) -> None:
        """Times of the single precisions by the search's own account: the best over the ways that have them."""
        for c in self.candidates:
            for way in ways:
                problem = self.problem(way)
                if all(c.assignment[n.key] in n.precisions for n in problem.nodes):
                    us = problem.time(c.assignment)
                    c.predicted_us = us if c.predicted_us is None else min(us, c.predicted_us)

    def _measure(self, ways: Sequence[Way]) -> None:
        """Sensitivities of every op at every precision that some way offers."""
        wanted: list[tuple[Op, tuple[str, ...]]] = []
        offered = {p for w in ways for p in w.precisions}
        for op in self.space.variables():
            allowed = self.space.allowed(op, offered)
            if len(allowed) > 1 or key(op) in self.space.pins:
                wanted.append((op, allowed))
        if not wanted:
            return
        batch = self._batch(SAMPLES)
        half = time.perf_counter() + 0.5 * (self.deadline - time.perf_counter())
        found: list[Sensitivities] = []
        for k in range(max(1, min(MOST_BATCHES, SAMPLES // batch, len(self.seen) // batch))):
            if found and time.perf_counter() > half:
                break
            part = self.seen.take(slice(k * batch, (k + 1) * batch))
            found.append(
                measure(
                    self.graph,
                    wanted,
                    part.feeds,
                    part.labels,
                    self.metric,
                    target=self.machine,
                    calibration=self.calibration,
                    deadline=half,
                    kept=self._kept(part, k),
                    progress=self.say,
                )
            )
            if found[-1].skipped:  # what time did not suffice for is not worth an average
                found = found[:1]
                break
        self.sensitivities = mean(found)

    def _kept(self, part: Samples, k: int) -> Kept:
        """The cache of sensitivities on batch ``k``: beside that of the ranges, RANGES.sensitivity.json."""
        ranges = self.options.calib_cache
        digest = hashlib.sha256(
            f"{graph_digest(self.graph)} {self.metric.name} {self.machine} {self.options.calibrator}".encode()
        )
        for array in (*part.feeds.values(), *(() if part.labels is None else (part.labels,))):
            digest.update(np.ascontiguousarray(array).tobytes())
        path = None if ranges is None else ranges.with_name(f"{ranges.stem}.sensitivity{k or ''}.json")
        return Kept(path, digest.hexdigest())

    def _batch(self, wanted: int) -> int:
        """Samples to a call: the network's own batch where it is fixed."""
        first = specs(self.graph)[0].shape[0]
        return first if isinstance(first, int) else min(wanted, len(self.seen))

    # ------------------------------------------------------------------ search

    def problem(self, way: Way) -> Problem:
        if way.name not in self.problems:
            self.problems[way.name] = self.space.problem(way, self.sensitivities)
        return self.problems[way.name]

    def _search(self, way: Way) -> None:
        problem = self.problem(way)
        if not problem.nodes or len(way.precisions) < 2:
            return
        self.say(f"search: {way.name}")
        plans = frontier(problem)
        low, high = 0, len(plans) - 1  # plans[high] is the most accurate
        while low < high and time.perf_counter() < self.deadline:
            middle = (low + high) // 2 if low else 0 if self._unknown(plans[0], way) else (low + high) // 2
            if self._within(self._try(plans[middle], way)):
                high = middle
            else:
                low = middle + 1
        best = plans[high]
        self._try(best, way)
        for k in sorted({round(f * (len(plans) - 1)) for f in SHOWN_PLANS} - {0, len(plans) - 1}):
            if time.perf_counter() < self.deadline:
                self._try(plans[k], way)
        tries = 0
        improved = True
        while improved and tries < MOST_MOVES:
            improved = False
            for plan in moves(problem, best):
                if tries >= MOST_MOVES or time.perf_counter() > self.deadline:
                    return
                if not self._unknown(plan, way):
                    continue
                tries += 1
                if self._within(self._try(plan, way)):
                    best, improved = plan, True
                    break

    def _learned(self, ways: Sequence[Way]) -> bool:
        """Whether whole engines say that casts cost more than was believed; the times of the search are then set right.

        What a mixture takes beyond its prediction, scaled by how single precisions of the same library turned out, is put down to
        the borders between its precisions.
        """
        if time.perf_counter() > self.deadline:
            return False
        learned = False
        for way in ways:
            table, problem = way.latency, self.problems.get(way.name)
            told = [
                c.ms / way.whole_ms[c.name]
                for c in self.candidates
                if c.single and c.ms is not None and c.name in way.whole_ms and c.tactic.startswith(way.name)
            ]
            if not isinstance(table, Table) or problem is None or not told:
                continue
            scale, worst = float(np.median(told)), 0.0
            for c in self.candidates:
                if c.way == way.name and c.ms is not None:
                    borders = sum(1 for _ in problem.casts(c.assignment))
                    beyond = c.ms * 1e3 / scale - problem.time(c.assignment)
                    worst = max(worst, beyond / borders) if borders else worst
            if worst > LEARN * table.overhead_us:
                self.say(f"casts cost {worst:.1f} µs more each than was believed: search again")
                table.overhead_us += worst
                del self.problems[way.name]
                learned = True
        return learned

    def _unknown(self, assignment: Mapping[str, str], way: Way) -> bool:
        return self._known(assignment, way) is None

    def _known(self, assignment: Mapping[str, str], way: Way) -> Candidate | None:
        for c in self.candidates:
            if c.way in ("", way.name) and all(c.assignment.get(k) == p for k, p in assignment.items()):
                return c
        return None

    def _try(self, assignment: Mapping[str, str], way: Way) -> Candidate:
        known = self._known(assignment, way)
        if known is not None:
            return known
        problem = self.problem(way)
        assignment = self.space.realizable(assignment, problem, self.calibration)
        known = self._known(assignment, way)
        if known is not None:
            return known
        count = sum(not c.single for c in self.candidates) + 1
        candidate = Candidate(
            f"mixture {count}",
            self.space.plan(assignment),
            dict(assignment),
            way=way.name,
            predicted_us=problem.time(assignment),
            noise=problem.damage(assignment),
        )
        return self._judge(candidate, way.name)

    def _within(self, candidate: Candidate) -> bool:
        return candidate.error is None and candidate.drop <= self.search_bound

    # ------------------------------------------------------------------ accuracy

    def _judge(self, candidate: Candidate, way: str) -> Candidate:
        """Measure the candidate's drop on the data that the search may see; the first is what all others are held against."""
        self.say(f"accuracy of {candidate.name}")
        first = not self.candidates
        self.candidates.append(candidate)
        try:
            engine = self.driver.quick(self._assigned(candidate.plan), candidate.plan, way)
            if first:
                self.judge.refer(engine)
            outputs = self.judge.run(engine)
        except OptdnnError as error:
            if first:
                raise  # fp32 itself does not run
            candidate.error = error.message
            return candidate
        candidate.drop = self.judge.drop(outputs)
        return candidate

    def _assigned(self, plan: PrecisionPlan) -> Graph:
        return assigned(self.graph, plan, self.target, self.calibration, self.options.opt_level)[0]

    # ------------------------------------------------------------------ the decision

    def _race(self, *, first: bool) -> None:
        """Build the candidates that may win, verify them, and time them in turns."""
        entrants = [c for c in self.candidates if c.single and c.error is None and (first or c.name in self.built)]
        mixtures = sorted(
            (c for c in self.candidates if not c.single and self._within(c)), key=lambda c: c.predicted_us or 0.0
        )
        entrants += mixtures[:MOST_MIXTURES]
        for c in entrants:
            if c.name in self.built:
                continue
            self.say(f"build {c.name}")
            try:
                graph = self._assigned(c.plan)
                engine = self.driver.built(graph, c.plan, c.label, self.say)
                outputs = self.judge.run(engine, unseen=True)
                c.bytes = sum(b.nbytes for b in engine.program.blobs)
                tactic: Any = engine.meta.get("tactic")
                c.tactic = tactic["name"] if tactic else ""
                self.built[c.name] = engine
            except OptdnnError as error:
                c.error = error.message
                continue
            c.verified = self.judge.drop(outputs, unseen=True)
        racing = {c.name: self.built[c.name] for c in entrants if c.name in self.built}
        measured = self.driver.race(racing, self.say) if racing else {}
        for c in entrants:
            if measured is not None:
                c.ms = measured.get(c.name)

    def _judged(self) -> list[Candidate]:
        return [c for c in self.candidates if c.name in self.built and c.verified is not None]

    def _verified(self) -> Candidate | None:
        """The fastest that is within the bound on both parts of the data; None where no mixture that could win is, and the
        search may still find one."""
        good = [c for c in self._judged() if c.worst <= self.bound]
        wrong = [c for c in self._judged() if not c.single and c.drop <= self.bound < (c.verified or 0.0)]
        if not good or (wrong and all(c.single for c in good) and time.perf_counter() < self.deadline):
            return None
        fastest = min(good, key=_cost)
        simple = [c for c in good if c.single and _cost(c) <= _cost(fastest) * PREFER_SINGLE]
        return min(simple, key=_cost) if simple else fastest

    def _conclude(self, chosen: Candidate, ways: Sequence[Way], met: bool) -> Found:
        library = chosen.way or chosen.tactic.partition("/")[0]
        way = next((w for w in ways if w.name == library), ways[0] if ways else None)
        facts = self._facts(chosen, way)
        account = Account(
            metric=self.metric.name,
            unit=self.metric.unit,
            bound=self.bound,
            calibration_samples=len(self.seen),
            verification_samples=len(self.unseen),
            labelled=self.seen.labels is not None,
            chosen=chosen.name,
            met=met,
            candidates=self.candidates,
            nodes=facts,
            latency=way.latency.source if way is not None else "",
            measured=any(c.ms is not None for c in self.candidates),
            notes=dict(self.driver.notes),
        )
        plan = replace(chosen.plan, reasons={f.key: f.reason for f in facts})
        return Found(plan, chosen.label, account, self.calibration, met, self.passes)

    def _facts(self, chosen: Candidate, way: Way | None) -> list[NodeFacts]:
        found = []
        times = {} if way is None else way.latency.times()
        problem = None if way is None else self.problem(way)
        known = set() if problem is None else {n.key for n in problem.nodes}
        for choice in self.space.choices.values():
            op = self.space.by_key[choice.key]
            if not is_float(op.outputs[0].type.dtype):
                continue
            precision = self.space.runs(chosen.plan, choice.key)
            sens = {p: s for (k, p), s in self.sensitivities.table.items() if k == choice.key}
            node = NodeFacts(
                key=choice.key,
                kind=choice.kind,
                nodes=choice.nodes,
                precision=precision,
                times=dict(times.get(choice.key, {}).items()),
                sensitivity=sens,
                refused={
                    **{p: r for p, r in choice.refused.items() if p in self.offered},
                    **{p: r for (k, p), r in self.sensitivities.failed.items() if k == choice.key},
                },
                pin=self.space.pins.get(choice.key),
                follows=choice.key not in known,
            )
            found.append(node)
        return reasons(found, chosen, problem, self.bound, self.metric.unit, self.candidates)


def specs(graph: Graph) -> list[TensorSpec]:
    """The network's inputs as data must fit them."""
    return [
        TensorSpec(o.name, o.type.dtype, tuple(d if isinstance(d, int) else str(d) for d in o.type.dims))
        for o in (graph.op(i).outputs[0] for i in graph.inputs)
    ]


def _cost(c: Candidate) -> float:
    if c.ms is not None:
        return c.ms
    return c.predicted_us / 1e3 if c.predicted_us is not None else math.inf
