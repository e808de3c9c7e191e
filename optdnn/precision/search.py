"""Automatic precision: the search for the fastest engine whose accuracy stays within a bound.

1. Every single precision is tried: its drop in the metric on the calibration part of the data.
2. Each operator's time and sensitivity at each precision are measured.
3. The descent (:func:`optdnn.precision.plans.descent`) orders mixtures from fast to accurate. Bisection finds the first one
   whose real drop is within the bound, and moves of single operators continue from there.
4. Mixtures and single precisions are built, verified on the other part of the data, and timed in turns. Where verification
   refuses a mixture, or casts cost more than predicted, 3 and 4 are repeated with a tighter bound or with the new costs.
5. Where tactics can be tuned, the engines that came close are tuned, verified and timed once more. The fastest wins.

No engine beyond the bound is chosen, and none slower than the fastest single precision within it. A bound may be finer than
samples can be counted: the drop that :mod:`optdnn.precision.margins` expects is compared with the bound as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from optdnn.calibration import calibrate, input_specs
from optdnn.calibration.images import pictures_of
from optdnn.config import PACKED_WEIGHTS, QUANTIZED, BuildOptions, Progress
from optdnn.errors import OptdnnError, UsageError
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.equalize import Equalize
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.accuracy import DoesNotRun, Judge
from optdnn.precision.cpu_target import CpuTarget
from optdnn.precision.gpu_target import GpuTarget
from optdnn.precision.latency import OperatorTimes
from optdnn.precision.metrics import metric_of
from optdnn.precision.plans import Assignment, Problem, Space, descent, faster
from optdnn.precision.samples import halves
from optdnn.precision.search_report import Candidate, Reasons, SearchReport, node_facts
from optdnn.precision.sensitivity import Sensitivities, StoredSensitivities, batches_of, measure_sensitivities
from optdnn.precision.targets import SearchTarget, assigned, beside_packed
from optdnn.runtime.engine import Engine
from optdnn.target_name import TargetName
from optdnn.tuning.timing_cache import TimingCache

BUDGET_SECONDS = 120.0
"""For sensitivities and the search, if the user gives no budget. Calibration, the single precisions, the times of operators and
the last race take further time."""
MOST_MOVES = 12
"""Moves from a library's best plan that are tried."""
MOST_MIXTURES = 3
"""Mixtures that are built and raced in addition to the single precisions."""
ATTEMPTS = 4
LEARN = 0.5
"""If casts cost more than predicted by this fraction, another attempt is made."""
CLOSE, FINALISTS = 1.25, 2
"""Engines within this factor of the fastest are tuned and may win: at most this many single precisions, and as many
mixtures."""
PREFER_SINGLE, PREFER_PREDICTED = 1.01, 1.03
"""A single precision within this factor of the fastest mixture is preferred: the mixture then gains nothing. The second factor is
for predicted times."""

Whole = Callable[[str], Graph]
"""Makes the graph of a build in one float precision."""


@dataclass
class SearchResult:
    """The result of the search. ``met`` is False if even the closest engine is beyond the bound. ``alone``: the one float precision
    that was chosen for the whole network. ``passes``: reports of the exact changes to the graph that prepare it for integers."""

    plan: PrecisionPlan
    label: str
    report: SearchReport
    calibration: Calibration | None
    met: bool
    alone: str | None = None
    passes: list[PassReport] = field(default_factory=list)


def search_precisions(
    graph: Graph,
    options: BuildOptions,
    target: str,
    cache: TimingCache,
    say: Progress = lambda text: None,
    whole: Whole | None = None,
) -> SearchResult:
    """The precision of each op of ``graph`` (exact passes done, precisions not assigned), for ``options.precision == "auto"``.

    ``whole`` makes the graph of a build in one float precision, for which some exact passes do more. Without it, single precisions
    are tried on ``graph``. If integers may be chosen, ``graph`` is equalized first, as for ``precision="int8"``.
    Raises UsageError without data or for a metric that does not fit. Errors of the metric, the data and the libraries pass through.
    """
    return _Search(graph, options, target, cache, say, whole).run()


def target_of(
    options: BuildOptions, target: str, cache: TimingCache, *, calibrated: bool, packed: bool = False
) -> SearchTarget:
    """The search's view of a build's target. ``calibrated``: integers may be chosen; ``packed``: packed weights."""
    if TargetName.parse(target).on_gpu:
        return GpuTarget(options, target, cache, calibrated, packed)
    return CpuTarget(options, cache, calibrated, packed)


class _Search:
    def __init__(
        self,
        graph: Graph,
        options: BuildOptions,
        target: str,
        cache: TimingCache,
        say: Progress,
        whole: Whole | None,
    ):
        self.graph, self.options, self.target, self.say, self.whole = graph, options, target, say, whole
        if options.calib is None:
            raise UsageError(
                "precision auto needs data to judge accuracy by", hint="give --calib DATA.npz (inputs, and labels)"
            )
        images = pictures_of(options)
        self.seen, self.unseen = halves(options.calib, input_specs(graph), options.labels, images)
        self.metric = metric_of(options.metric, self.seen.labels)
        self.bound = self.metric.bound(options.max_drop)
        self.judge = Judge(self.metric, self.seen, self.unseen)
        self.machine = str(TargetName.parse(target).machine)
        self.beside = beside_packed(target, options.candidates)
        self.space = self._space()
        self.passes: list[PassReport] = []
        self.calibration = self._calibrated()
        packed = any(not PACKED_WEIGHTS.isdisjoint(c.precisions) for c in self.space.choices.values())
        self.driver = target_of(options, target, cache, calibrated=self.calibration is not None, packed=packed)
        self.candidates: list[Candidate] = []
        self.engines: dict[str, Engine] = {}
        self.wholes: dict[str, Graph] = {}
        self.sensitivities = Sensitivities()
        self.problems: dict[str, Problem] = {}
        self.deadline = math.inf

    def _calibrated(self) -> Calibration | None:
        """Equalize and calibrate, if integers are a choice, on the part of the data that is not kept for verification."""
        wanted = QUANTIZED if self.options.candidates is None else QUANTIZED & set(self.options.candidates)
        wanted |= QUANTIZED & set(self.options.precision_map.values())
        if not any(wanted & set(c.precisions) for c in self.space.choices.values()):
            return None

        def ranges(graph: Graph) -> Calibration:
            data, cache = dict(self.seen.feeds), self.options.calib_cache
            return calibrate(graph, data, self.options.calibrator, cache=cache, progress=self.say)

        context = PassContext(target=self.machine, plan=self.space.single("int8"), calibration=ranges)
        self.passes.append(Equalize()(self.graph, context))
        self.space = self._space()
        return ranges(self.graph)

    def _space(self) -> Space:
        return Space(self.graph, self.target, self.options.opt_level, self.options.precision_map, self.beside)

    def run(self) -> SearchResult:
        self._try_singles()
        tables = self.driver.operator_times(self.graph, self.calibration, self.say)
        self.deadline = time.perf_counter() + (self.options.budget or BUDGET_SECONDS)
        self._measure_sensitivities(tables)
        bound = self.bound
        for _ in range(ATTEMPTS):
            for times in tables:
                self._search(times, bound)
            self._race(self._entrants(bound))
            refused = [c for c in self._verified() if not c.single and c.searched <= self.bound < c.worst]
            refused = [] if any(not c.single for c in self._within()) else refused
            late = time.perf_counter() > self.deadline
            dearer = [times for times in tables if not late and self._learn_casts(times)]
            if late or not (refused or dearer):
                break
            if refused:
                missed = max(c.worst - c.searched for c in refused)
                bound = max(0.0, min(bound, self.bound - missed) * 0.75)
                self.say(f"beyond the bound on unseen data: search again within {bound:.3g}")
        chosen = self._finals()
        met = chosen is not None
        return self._found(chosen or min(self._verified(), key=lambda c: (c.worst, _milliseconds(c))), tables, met)

    # ------------------------------------------------------------------ accuracy

    def _try_singles(self) -> None:
        """Try fp32 first: it is the reference of all others. Pins apply to each precision, and the drop of pins below fp32 counts,
        too."""
        if any(p != "fp32" for p, _ in self.space.pins.values()):
            self.say("outputs of fp32")
            plan = PrecisionPlan.of_option("fp32")
            self.judge.refer(self.driver.quick(self._assigned(plan), plan, ""))
        for text in self.driver.offers:
            plan = self.space.single(text)
            assignment = {k: self.space.runs(plan, k) for k in self.space.choices}
            self._judge(Candidate(text, plan, assignment, single=True))

    def _judge(self, candidate: Candidate) -> None:
        """Measure the candidate's drop on the data of the search. The first candidate becomes the reference, unless there is
        one."""
        self.say(f"accuracy of {candidate.name}")
        self.candidates.append(candidate)
        try:
            engine = self.driver.quick(self._graph(candidate), candidate.plan, candidate.library)
            if not self.judge.refers:
                self.judge.refer(engine)
        except OptdnnError as error:
            if len(self.candidates) == 1:
                raise  # fp32 itself does not run
            candidate.error = error.message
            return
        try:
            candidate.drop, candidate.margins = self.judge.loss(engine)
        except DoesNotRun as error:
            candidate.error = error.message

    def _is_of_one_precision(self, c: Candidate) -> bool:
        """Whether a build in one float precision makes a candidate's engine."""
        return self.whole is not None and c.single and not c.plan.quantizes and not c.plan.packs

    def _graph(self, c: Candidate) -> Graph:
        """The graph of a candidate, with its precisions."""
        if self.whole is None or not self._is_of_one_precision(c):
            return self._assigned(c.plan)
        if c.name not in self.wholes:
            self.wholes[c.name] = self.whole(c.name)
        return self.wholes[c.name].copy()

    def _assigned(self, plan: PrecisionPlan) -> Graph:
        level, kept = self.options.opt_level, self.space.kept
        return assigned(self.graph, plan, self.target, self.calibration, level, kept=kept)[0]

    def _measure_sensitivities(self, tables: Sequence[OperatorTimes]) -> None:
        """Measure the sensitivity of every op at every precision that some library offers, within half of the search's time."""
        offered = {p for times in tables for p in times.precisions}
        wanted = [(op, self.space.allowed(k, offered)) for k, op in self.space.variables.items()]
        wanted = [(op, allowed) for op, allowed in wanted if allowed != ("fp32",)]
        if not wanted:
            return
        parts = batches_of(self.graph, self.seen)
        about = f"{self.metric.name} {self.machine} {self.options.calibrator} {self.beside}"
        now = time.perf_counter()
        self.sensitivities = measure_sensitivities(
            self.graph,
            wanted,
            parts,
            self.metric,
            target=self.machine,
            calibration=self.calibration,
            beside=self.beside,
            deadline=now + 0.5 * (self.deadline - now),
            stored=StoredSensitivities.beside(self.options.calib_cache, self.graph, parts, about),
            progress=self.say,
        )

    # ------------------------------------------------------------------ mixtures

    def _search(self, times: OperatorTimes, bound: float) -> None:
        """Bisect the descent for the fastest plan within ``bound``; then try faster plans, as long as they stay within the
        bound."""
        problem = self.problems[times.library] = self.space.problem(times, self.sensitivities)
        for c in self.candidates:
            offered = all(c.assignment[k] in n.times for k, n in problem.nodes.items())
            if c.single and c.name not in self.engines and offered:
                c.predicted_us = min(c.predicted_us or math.inf, problem.time(c.assignment))
        if not problem.nodes or len(times.precisions) < 2:
            return
        self.say(f"search: {times.library}")
        plans = descent(problem)
        low, high = 0, len(plans) - 1  # the last plan is the most accurate
        middle = 0  # the fastest plan is often within the bound
        while low < high and time.perf_counter() < self.deadline:
            if self._tried(plans[middle], times, problem).searched <= bound:
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        best, tries = plans[high], len(self.candidates) + MOST_MOVES
        self._tried(best, times, problem)
        moves = faster(problem, best)
        while moves and len(self.candidates) < tries and time.perf_counter() < self.deadline:
            move = moves.pop(0)
            if self._known(move, times.library) is None and self._tried(move, times, problem).searched <= bound:
                best, moves = move, faster(problem, move)

    def _tried(self, assignment: Assignment, times: OperatorTimes, problem: Problem) -> Candidate:
        """The candidate of an assignment, judged if it is new."""
        if (known := self._known(assignment, times.library)) is not None:
            return known
        assignment = self.space.realizable(assignment, problem, self.calibration)
        if (known := self._known(assignment, times.library)) is not None:
            return known
        number = sum(not c.single for c in self.candidates) + 1
        found = Candidate(f"mixture {number}", self.space.plan(assignment), assignment, library=times.library)
        found.predicted_us = problem.time(assignment)
        self._judge(found)
        return found

    def _known(self, assignment: Assignment, library: str) -> Candidate | None:
        for c in self.candidates:
            if c.library in ("", library) and all(c.assignment.get(k) == p for k, p in assignment.items()):
                return c
        return None

    def _learn_casts(self, times: OperatorTimes) -> bool:
        """Whether whole engines show that casts cost more than predicted. If so, ``times`` gets the new cost.

        The time of a mixture beyond its prediction is attributed to its casts; predictions are scaled by the ratio of single
        precisions.
        """
        problem = self.problems[times.library]
        scales = [1e3 * c.ms / c.predicted_us for c in self._verified() if c.single and c.ms and c.predicted_us]
        dearer = 0.0
        for c in self._verified():
            if c.library == times.library and c.ms is not None and scales:
                beyond = 1e3 * c.ms / median(scales) - problem.time(c.assignment)
                dearer = max(dearer, beyond / (sum(1 for _ in problem.casts(c.assignment)) or math.inf))
        if dearer <= LEARN * times.cast_us:
            return False
        self.say(f"casts cost {dearer:.1f} µs more each than was predicted: search again")
        times.cast_us += dearer
        return True

    # ------------------------------------------------------------------ the decision

    def _entrants(self, bound: float) -> list[Candidate]:
        """The single precisions, and the mixtures that are predicted to be the fastest within ``bound``."""
        runs = [c for c in self.candidates if c.error is None]
        mixtures = [c for c in runs if not c.single and c.searched <= bound]
        return [c for c in runs if c.single] + sorted(mixtures, key=lambda c: c.predicted_us or 0.0)[:MOST_MIXTURES]

    def _race(self, entrants: Sequence[Candidate]) -> None:
        """Build the entrants, verify them on the data that was not used for the choice, and time all engines in turns."""
        for c in entrants:
            if c.name in self.engines:
                continue
            self.say(f"build {c.name}")
            try:
                engine = self.driver.built(self._graph(c), c.plan, c.label, self.say)
            except OptdnnError as error:
                c.error = error.message
                continue
            c.bytes = sum(b.nbytes for b in engine.program.blobs)
            tactic: Any = engine.meta.get("tactic")
            c.tactic = tactic["name"] if tactic else ""
            c.predicted_us = self.driver.predicted(engine) or c.predicted_us
            try:
                self._verify(c, engine)
            except DoesNotRun as error:
                c.error = error.message
                continue
            self.engines[c.name] = engine
        self._time(self.engines)

    def _time(self, engines: Mapping[str, Engine]) -> None:
        measured = self.driver.race(engines, self.say) if engines else {}
        for c in self.candidates:
            c.ms = measured.get(c.name, c.ms)

    def _verify(self, c: Candidate, engine: Engine) -> None:
        c.verified, c.margins_unseen = self.judge.loss(engine, unseen=True)

    def _verified(self) -> list[Candidate]:
        return [c for c in self.candidates if c.verified is not None]

    def _within(self) -> list[Candidate]:
        """The candidates within the bound on both parts of the data, and expected to be within it on other data."""
        return [c for c in self._verified() if c.worst <= self.bound]

    def _finals(self) -> Candidate | None:
        """The fastest candidate within the bound. If tactics are tuned: the fastest of the close candidates, tuned and timed once
        more.

        None if there is no candidate, or if tuning took the last one beyond the bound.
        """
        good = self._within()
        if not good:
            return None
        limit = _milliseconds(_fastest(good)) * CLOSE
        near = sorted((c for c in good if _milliseconds(c) <= limit), key=_milliseconds)
        close = [c for kind in (True, False) for c in [c for c in near if c.single == kind][:FINALISTS]]
        engines: dict[str, Engine] = {}
        for c in close:
            self.say(f"tune {c.name}")
            engine = self.driver.tuned(self._graph(c), len(close), self.say)
            if engine is None:
                return _fastest(good)
            self._verify(c, engine)
            c.tuned, engines[c.name] = True, engine
        self._time(engines)
        left = [c for c in close if c.worst <= self.bound] or [c for c in good if not c.tuned]
        return _fastest(left) if left else None

    # ------------------------------------------------------------------ the report

    def _found(self, chosen: Candidate, tables: Sequence[OperatorTimes], met: bool) -> SearchResult:
        library = chosen.library or chosen.tactic.partition("/")[0]
        times = next((t for t in tables if t.library == library), tables[0] if tables else None)
        problem = None if times is None else self.problems[times.library]
        why = Reasons(chosen, self.candidates, problem, self.bound, self.metric.unit)
        offered = {p for text in self.driver.offers for p in text.split("+")}
        facts = node_facts(self.space, chosen.plan, times, self.sensitivities, offered)
        facts = [replace(f, reason=why.of(f)) for f in facts]
        report = SearchReport(
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
            latency="" if times is None else times.source,
            measured=any(c.ms is not None for c in self.candidates),
            right=self.candidates[0].right if self.seen.labels is not None else None,
            notes=dict(self.driver.notes),
        )
        plan = replace(chosen.plan, reasons={f.key: f.reason for f in facts})
        alone = chosen.name if self._is_of_one_precision(chosen) else None
        return SearchResult(plan, chosen.label, report, self.calibration, met, alone, self.passes)


def _fastest(good: Sequence[Candidate]) -> Candidate:
    """The fastest candidate; a single precision if no mixture is clearly faster."""
    measured = any(c.ms is not None for c in good)
    limit = min(map(_milliseconds, good)) * (PREFER_SINGLE if measured else PREFER_PREDICTED)
    return min(
        [c for c in good if c.single and _milliseconds(c) <= limit] or good, key=lambda c: (_milliseconds(c), c.worst)
    )


def _milliseconds(c: Candidate) -> float:
    """Measured milliseconds, otherwise predicted ones."""
    if c.ms is not None:
        return c.ms
    return math.inf if c.predicted_us is None else c.predicted_us / 1e3
