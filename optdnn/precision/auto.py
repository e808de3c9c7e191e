"""Automatic precision: the fastest engine whose accuracy stays within a bound, and the account of how it was found.

Calibrate and measure on one part of the data; order the plans by predicted time and damage (:mod:`optdnn.precision.search`);
measure the real accuracy of those that matter; build the best and every single precision within the bound, time them side by
side; accept by the accuracy on the other part of the data, which none of this has seen. Where that fails, the bound for the
search is tightened by what was missed, and the search repeated. Of accuracy, a bound may be finer than samples can be counted: what
:mod:`optdnn.precision.margins` expects to be lost is held against it as well, in the search and in the decision.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
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
from optdnn.passes.support.precision import PrecisionPlan, key
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.account import Candidate, NodeFacts, SearchReport, reasons
from optdnn.precision.accuracy import DoesNotRun, Judge
from optdnn.precision.explore import Explorer
from optdnn.precision.metrics import Metric, metric_of
from optdnn.precision.samples import Samples, halves
from optdnn.precision.sensitivity import Kept, Sensitivities, mean, measure
from optdnn.precision.space import Space
from optdnn.precision.targets import SearchTarget, Way, machine_of, target_of
from optdnn.runtime.engine import Engine
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import TensorSpec, is_float

Say = Callable[[str], None]
BUDGET_SECONDS = 120.0
"""For sensitivities and the search where the user gives no budget. Calibration, the single precisions, the times of operators and
the last race come on top."""
SAMPLES = 32
"""Samples at a time on which sensitivities are measured."""
MOST_BATCHES = 4
"""Batches that sensitivities are averaged over, where a network's own batch is small."""
MOST_MIXTURES = 3
"""Mixtures that are built and raced beside the single precisions."""
ATTEMPTS = 4
CLOSE, FINALISTS = 1.25, 2
"""Before tactics are tuned, those within this factor of the fastest may still win: so many single precisions, so many mixtures."""
PREFER_SINGLE = 1.01
"""A single precision within this factor of the fastest mixture is taken instead: nothing is gained by more kinds of arithmetic."""


@dataclass
class Found:
    """What the build goes on with. ``met`` is False where even the closest engine is beyond the bound. ``passes``: reports of what
    was done to the graph for the sake of integers, exactly."""

    plan: PrecisionPlan
    label: str
    account: SearchReport
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
        images = None if options.images is None else ImageSpec.read(options.images)
        self.seen, self.unseen = halves(options.calib, specs(graph), options.labels, images)
        self.metric: Metric = metric_of(options.metric, self.seen.labels)
        self.judge = Judge(self.metric, self.seen, self.unseen)
        self.bound = self.metric.bound(options.max_drop)
        self.machine = machine_of(target)
        self.space = Space(graph, target, options.opt_level, options.precision_map)
        self.passes: list[PassReport] = []
        self.calibration = self._calibrated()
        self.driver: SearchTarget = target_of(options, target, cache, calibrated=self.calibration is not None)
        self.explorer = Explorer(self.space, self.driver, self.judge, self.calibration, self.bound, say)
        self.candidates = self.explorer.candidates
        self.built: dict[str, Engine] = {}
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
        self.explorer.singles()
        ways = self.driver.ways(self.graph, self.calibration, self.say)
        self.explorer.deadline = time.perf_counter() + (self.options.budget or BUDGET_SECONDS)
        self._measure(ways)
        self.explorer.predict(ways)
        for attempt in range(ATTEMPTS):
            for way in ways:
                self.explorer.search(way)
            self._race(first=attempt == 0)
            chosen = self._verified()
            if chosen is not None and not self.explorer.learned(ways):
                break
            if chosen is not None:
                continue
            missed = [c.worst - c.searched for c in self.candidates if c.verified is not None and math.isfinite(c.drop)]
            tighter = max(0.0, min(self.explorer.bound, self.bound - max([0.0, *missed])) * 0.75)
            self.explorer.bound = tighter
            self.say(f"beyond the bound on unseen data: search again within {tighter:.3g}")
        if chosen is not None:
            chosen = self._finals(chosen)
        met = chosen is not None
        if chosen is None:
            chosen = min(self._judged(), key=lambda c: (c.worst, c.ms if c.ms is not None else math.inf))
        return self._conclude(chosen, ways, met)

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
        half = time.perf_counter() + 0.5 * (self.explorer.deadline - time.perf_counter())
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
        self.explorer.sensitivities = mean(found)

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

    # ------------------------------------------------------------------ the decision

    def _race(self, *, first: bool) -> None:
        """Build the candidates that may win, verify them, and time them in turns."""
        entrants = [c for c in self.candidates if c.single and c.error is None and (first or c.name in self.built)]
        mixtures = sorted(
            (c for c in self.candidates if not c.single and self.explorer.within(c)),
            key=lambda c: c.predicted_us or 0.0,
        )
        entrants += mixtures[:MOST_MIXTURES]
        for c in entrants:
            if c.name in self.built:
                continue
            self.say(f"build {c.name}")
            try:
                graph = self.explorer.assigned(c.plan)
                engine = self.driver.built(graph, c.plan, c.label, self.say)
                c.bytes = sum(b.nbytes for b in engine.program.blobs)
                tactic: Any = engine.meta.get("tactic")
                c.tactic = tactic["name"] if tactic else ""
            except OptdnnError as error:
                c.error = error.message
                continue
            try:
                self._verify(c, engine)
            except DoesNotRun as error:
                c.error = error.message
                continue
            self.built[c.name] = engine
        racing = {c.name: self.built[c.name] for c in entrants if c.name in self.built}
        measured = self.driver.race(racing, self.say) if racing else {}
        for c in entrants:
            if measured is not None:
                c.ms = measured.get(c.name)

    def _verify(self, c: Candidate, engine: Engine) -> None:
        """What the engine loses on the data that had no part in choosing. Raises DoesNotRun, and what the metric raises."""
        loss = self.judge.loss(engine, unseen=True)
        c.verified, c.margins_unseen = loss.drop, loss.margins

    def _judged(self) -> list[Candidate]:
        return [c for c in self.candidates if c.name in self.built and c.verified is not None]

    def _verified(self) -> Candidate | None:
        """The fastest that is within the bound on both parts of the data, and is expected to be on others; None where no mixture
        that could win is, and the search may still find one."""
        good = [c for c in self._judged() if c.worst <= self.bound]
        wrong = [c for c in self._judged() if not c.single and c.searched <= self.bound < c.worst]
        if not good or (wrong and all(c.single for c in good) and time.perf_counter() < self.explorer.deadline):
            return None
        return _fastest(good)

    def _finals(self, chosen: Candidate) -> Candidate | None:
        """The race that decides where tactics are tuned: what came close is tuned, verified and timed once more.

        None where tuning took the last one that was within the bound beyond it.
        """
        good = [c for c in self._judged() if c.worst <= self.bound]
        near = [c for c in good if _cost(c) <= _cost(chosen) * CLOSE]
        close = [
            c for kind in (True, False) for c in sorted((c for c in near if c.single == kind), key=_cost)[:FINALISTS]
        ]
        engines: dict[str, Engine] = {}
        for c in close:
            self.say(f"tune {c.name}")
            engine = self.driver.tuned(self.explorer.assigned(c.plan), len(close), self.say)
            if engine is None:
                return chosen
            self._verify(c, engine)
            c.tuned = True
            engines[c.name] = engine
        measured = self.driver.race(engines, self.say) or {}
        for c in close:
            c.ms = measured.get(c.name, c.ms)
        left = [c for c in close if c.worst <= self.bound] or [c for c in good if not c.tuned]
        return _fastest(left) if left else None

    def _conclude(self, chosen: Candidate, ways: Sequence[Way], met: bool) -> Found:
        library = chosen.way or chosen.tactic.partition("/")[0]
        way = next((w for w in ways if w.name == library), ways[0] if ways else None)
        facts = self._facts(chosen, way)
        account = SearchReport(
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
            right=self._right(),
            notes=dict(self.driver.notes),
        )
        plan = replace(chosen.plan, reasons={f.key: f.reason for f in facts})
        return Found(plan, chosen.label, account, self.calibration, met, self.passes)

    def _right(self) -> float | None:
        """Percent of the samples that fp32 has right."""
        first = self.candidates[0]
        known = [m for m in (first.margins, first.margins_unseen) if m is not None]
        if not known or self.seen.labels is None:
            return None
        return 100 * sum(m.right for m in known) / sum(m.count for m in known)

    def _facts(self, chosen: Candidate, way: Way | None) -> list[NodeFacts]:
        found = []
        times = {} if way is None else way.latency.times()
        problem = None if way is None else self.explorer.problem(way)
        known = set() if problem is None else {n.key for n in problem.nodes}
        for choice in self.space.choices.values():
            op = self.space.by_key[choice.key]
            if not is_float(op.outputs[0].type.dtype):
                continue
            precision = self.space.runs(chosen.plan, choice.key)
            sens = {p: s for (k, p), s in self.explorer.sensitivities.table.items() if k == choice.key}
            node = NodeFacts(
                key=choice.key,
                kind=choice.kind,
                nodes=choice.nodes,
                precision=precision,
                times=dict(times.get(choice.key, {}).items()),
                sensitivity=sens,
                refused={
                    **{p: r for p, r in choice.refused.items() if p in self.offered},
                    **{p: r for (k, p), r in self.explorer.sensitivities.failed.items() if k == choice.key},
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


def _fastest(good: Sequence[Candidate]) -> Candidate:
    """The fastest; a single precision where no mixture is clearly faster."""
    fastest = min(good, key=_cost)
    simple = [c for c in good if c.single and _cost(c) <= _cost(fastest) * PREFER_SINGLE]
    return min(simple, key=_cost) if simple else fastest


def _cost(c: Candidate) -> float:
    if c.ms is not None:
        return c.ms
    return c.predicted_us / 1e3 if c.predicted_us is not None else math.inf
