"""The search carried out: plans of the frontier and their neighbours, tried by the accuracy that their engines really have."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from optdnn.errors import OptdnnError
from optdnn.ir.graph import Graph
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.account import Candidate
from optdnn.precision.accuracy import DoesNotRun, Judge
from optdnn.precision.latency import Table
from optdnn.precision.search import Problem, frontier, moves
from optdnn.precision.sensitivity import Sensitivities
from optdnn.precision.space import Space
from optdnn.precision.targets import Say, SearchTarget, Way, assigned

LEARN = 0.5
"""Casts whose cost turns out this part higher than believed are worth another search."""
MOST_MOVES = 12
SHOWN_PLANS = (0.25, 0.5, 0.75)
"""Places on the frontier that are tried in any case: predictions err, and the user wants to see what lies between."""


class Explorer:
    """Tries plans on a target and keeps all that it tried in ``candidates``, the single precisions first.

    ``bound`` is what the search holds itself to; ``deadline`` a time of ``time.perf_counter``. Both may be moved, and
    ``sensitivities`` are to be set before the first search.
    """

    def __init__(
        self, space: Space, driver: SearchTarget, judge: Judge, calibration: Calibration | None, bound: float, say: Say
    ):
        self.space, self.driver, self.judge, self.calibration, self.say = space, driver, judge, calibration, say
        self.bound, self.deadline = bound, math.inf
        self.candidates: list[Candidate] = []
        self.sensitivities = Sensitivities()
        self._problems: dict[str, Problem] = {}

    def singles(self) -> None:
        """fp32 first: what all else is held against. Pins hold in each, and what pins below fp32 lose is within the bound, too."""
        if any(p != "fp32" for p, _ in self.space.pins.values()):
            plan = PrecisionPlan.of_option("fp32")
            self.say("outputs of fp32")
            self.judge.refer(self.driver.quick(self.assigned(plan), plan, ""))
        for text in self.driver.offers:
            plan = PrecisionPlan.of_option(text, {k: p for k, (p, _) in self.space.pins.items()})
            assignment = {k: self.space.runs(plan, k) for k in self.space.choices}
            self.judged(Candidate(text, plan, assignment, single=True), way="")

    def predict(self, ways: Sequence[Way]) -> None:
        """Times of the single precisions by the search's own account: the best over the ways that have them."""
        for c in self.candidates:
            for way in ways:
                problem = self.problem(way)
                if all(c.assignment[n.key] in n.precisions for n in problem.nodes):
                    us = problem.time(c.assignment)
                    c.predicted_us = us if c.predicted_us is None else min(us, c.predicted_us)

    def problem(self, way: Way) -> Problem:
        if way.name not in self._problems:
            self._problems[way.name] = self.space.problem(way, self.sensitivities)
        return self._problems[way.name]

    def search(self, way: Way) -> None:
        problem = self.problem(way)
        if not problem.nodes or len(way.precisions) < 2:
            return
        self.say(f"search: {way.name}")
        plans = frontier(problem)
        low, high = 0, len(plans) - 1  # plans[high] is the most accurate
        while low < high and time.perf_counter() < self.deadline:
            middle = (low + high) // 2 if low else 0 if self._unknown(plans[0], way) else (low + high) // 2
            if self.within(self._tried(plans[middle], way)):
                high = middle
            else:
                low = middle + 1
        best = plans[high]
        self._tried(best, way)
        for k in sorted({round(f * (len(plans) - 1)) for f in SHOWN_PLANS} - {0, len(plans) - 1}):
            if time.perf_counter() < self.deadline:
                self._tried(plans[k], way)
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
                if self.within(self._tried(plan, way)):
                    best, improved = plan, True
                    break

    def learned(self, ways: Sequence[Way]) -> bool:
        """Whether whole engines say that casts cost more than was believed; the times of the search are then set right.

        What a mixture takes beyond its prediction, scaled by how single precisions of the same library turned out, is put down to
        the borders between its precisions.
        """
        if time.perf_counter() > self.deadline:
            return False
        learned = False
        for way in ways:
            table, problem = way.latency, self._problems.get(way.name)
            told = [
                c.ms / way.whole_ms[c.name]
                for c in self.candidates
                if c.single
                and c.ms is not None
                and c.name in way.whole_ms
                and (c.tactic or way.name).startswith(way.name)
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
                del self._problems[way.name]
                learned = True
        return learned

    def _unknown(self, assignment: Mapping[str, str], way: Way) -> bool:
        return self._known(assignment, way) is None

    def _known(self, assignment: Mapping[str, str], way: Way) -> Candidate | None:
        for c in self.candidates:
            if c.way in ("", way.name) and all(c.assignment.get(k) == p for k, p in assignment.items()):
                return c
        return None

    def _tried(self, assignment: Mapping[str, str], way: Way) -> Candidate:
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
        return self.judged(candidate, way.name)

    def within(self, candidate: Candidate) -> bool:
        return candidate.error is None and candidate.searched <= self.bound

    # ------------------------------------------------------------------ accuracy

    def judged(self, candidate: Candidate, way: str) -> Candidate:
        """Measure the candidate's drop on the data that the search may see; what they are held against is the first's, unless
        it is there already."""
        self.say(f"accuracy of {candidate.name}")
        first = not self.candidates
        self.candidates.append(candidate)
        try:
            engine = self.driver.quick(self.assigned(candidate.plan), candidate.plan, way)
            if not self.judge.refers:
                self.judge.refer(engine)
        except OptdnnError as error:
            if first:
                raise  # fp32 itself does not run
            candidate.error = error.message
            return candidate
        try:
            loss = self.judge.loss(engine)
            candidate.drop, candidate.margins = loss.drop, loss.margins
        except DoesNotRun as error:
            candidate.error = error.message
        return candidate

    def assigned(self, plan: PrecisionPlan) -> Graph:
        return assigned(self.space.graph, plan, self.space.target, self.calibration, self.space.level)[0]
