"""Second stage of tuning: lanes and near-equal candidates are compared in the whole network.

Neighbors share L2 and overlap in the network, so the fastest candidate alone need not be the fastest there. A change is kept
if the network is clearly faster with it, twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from optdnn.config import AUTO
from optdnn.lowering.assemble import placed
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.lane_choice import CLEAR_LANES, WAYS, LaneChoice, on_lanes
from optdnn.runtime.cuda.trials.process import NetworkLost
from optdnn.runtime.program import Program
from optdnn.tuning.candidates import Problem
from optdnn.tuning.session import Session

NEAR, NEAR_COUNT = 1.3, 5
"""A near-equal is at most this many times slower than the best; at most this many of a problem are tried in the network."""
SHARE = 0.01
"""Problems with a smaller share of the network's time keep their fastest candidate: a swap would not show."""
CLEAR = 0.998
"""A swap is kept when it brings the network's time below this fraction of the previous time, twice."""


class Race(NamedTuple):
    """The milliseconds of a challenger and of the network it was raced against, and whether it won."""

    won: bool
    ms: float
    best_ms: float


class NetworkStage:
    """Races whole networks, and sets choices, lanes and times of ``session.tuned``."""

    def __init__(self, session: Session):
        self.session = session
        self._loaded: list[Any] = []
        self._start: Any = None
        """The network with the choices that tuning started from; None if it does not run."""
        self._best: Any = None
        """The fastest network so far."""

    def run(self) -> None:
        """Compare the candidates with the starting choices, then lanes, then near-equals."""
        try:
            if self._load_both():
                self._choose_lanes()
                self._swap_near_equals()
                self._race_start()
        finally:
            for network in list(self._loaded):
                self._close(network)

    # ---------------------------------------------------------------- networks

    def _program(self, choices: Mapping[str, TacticChoice], streams: LaneChoice | None) -> Program:
        """The network with these choices, with lanes as the options or ``streams`` say."""
        session = self.session
        emitted = session.emit(choices)
        seconds = emitted.seconds(session.gpu, session.measured(choices))
        return placed(on_lanes(emitted.program, session.gpu, seconds, session.options, streams))

    def _load(self, program: Program) -> Any:
        network = self.session.timer.load(program)
        self._loaded.append(network)
        return network

    def _close(self, network: Any) -> None:
        self._loaded = [x for x in self._loaded if x is not network]
        network.close()

    def _load_both(self) -> bool:
        """Load the network with the starting choices and with the fastest candidates, and continue with the faster one.

        False if neither runs.
        """
        session, tuned = self.session, self.session.tuned
        self._start = self._load_if_it_runs(session.start, "the choices to begin with")
        self._best = self._load_if_it_runs(tuned.choices, "the fastest candidates")
        if self._start is None and self._best is None:
            tuned.stopped = "the network does not run in one graph"
            return False
        if self._best is not None:
            self._race_start()
        slower = tuned.before_ms is not None and tuned.after_ms is not None and tuned.before_ms < tuned.after_ms
        if self._best is None or slower:
            tuned.choices = {**session.start, **{p.key: p.default for p in tuned.problems if p.times}}
            if self._best is not None:
                self._close(self._best)
            self._best = self._load(self._program(tuned.choices, LaneChoice()))
            if not slower:
                self._race_start()
            tuned.after_ms = tuned.before_ms
        return True

    def _load_if_it_runs(self, choices: Mapping[str, TacticChoice], what: str) -> Any:
        """Load the network in one lane and run it; None if it hangs or crashes."""
        loaded = len(self._loaded)
        try:
            network = self._load(self._program(choices, LaneChoice()))
            self.session.timer.race([network], 1)
        except NetworkLost as lost:
            self.session.lose(f"the network by {what}", lost.message)
            for network in self._loaded[loaded:]:
                self._close(network)
            return None
        return network

    def _race_start(self) -> None:
        """Measure the network with the starting choices, if it runs, and the best one."""
        tuned, timer = self.session.tuned, self.session.timer
        if self._start is not None:
            tuned.before_ms, tuned.after_ms = timer.race([self._start, self._best], 3)
        else:
            (tuned.after_ms,) = timer.race([self._best], 3)

    def _challenge(self, program: Program, what: str, clear: float) -> Race | None:
        """Race a program against the best network, and keep the faster one loaded.

        It wins if it takes less than the fraction ``clear`` of the best network's time, twice. None if it hangs or crashes.
        """
        timer, challenger = self.session.timer, None
        try:
            challenger = self._load(program)
            ms, best_ms = timer.race([challenger, self._best], 1)
            if ms < clear * best_ms:
                ms, best_ms = timer.race([challenger, self._best], 3)
        except NetworkLost as lost:
            if lost.network is self._best:
                raise
            self.session.lose(what, lost.message)
            if challenger is not None:
                self._close(challenger)
            return None
        won = ms < clear * best_ms
        if won:
            challenger, self._best = self._best, challenger
        self._close(challenger)
        return Race(won, ms, best_ms)

    # ---------------------------------------------------------------- lanes

    def _choose_lanes(self) -> None:
        """Race the network on lanes, in each of :data:`WAYS`; lanes with which it is not clearly faster are dropped."""
        session, tuned = self.session, self.session.tuned
        if session.options.streams != AUTO:
            return
        emitted, measured = session.emit(tuned.choices), session.measured(tuned.choices)
        seconds = emitted.seconds(session.gpu, measured)
        lanes = tuned.streams = LaneChoice()
        raced: set[Any] = set()
        for most in WAYS:
            session.check_time()
            way = LaneChoice(most, measured)
            program = on_lanes(emitted.program, session.gpu, seconds, session.options, way)
            form = (program.lanes, tuple(s.outputs for s in program.steps))
            if not program.lanes or form in raced:
                continue
            raced.add(form)
            what = f"the network with its steps on {1 + max(s.lane for s in program.lanes)} lanes"
            race = self._challenge(placed(program), what, CLEAR_LANES)
            if race is None:
                continue
            lanes = lanes.after_race(way, race.ms, race.best_ms, won=race.won)
            tuned.streams = lanes
            if race.won:
                tuned.after_ms = race.ms
        if lanes.lanes_ms is not None:
            session.say(f"tune: steps side by side: {lanes.why()}")

    # ---------------------------------------------------------------- near-equals

    def _swap_near_equals(self) -> None:
        """Swap in near-equals, one problem at a time, and keep each swap that makes the network faster."""
        session, tuned = self.session, self.session.tuned
        least = SHARE * session.problem_seconds()
        problems = sorted((p for p in tuned.problems if p.weight > least), key=lambda p: -p.weight)
        swaps = [(p, c) for p in problems for c in _near_equals(p, tuned.choices)]
        started = session.clock()
        for done, (problem, choice) in enumerate(swaps):
            session.check_time()
            left = session.remaining(started, done, len(swaps))
            session.say(f"tune: in the network, {done}/{len(swaps)}{left}; {tuned.after_ms:.4f} ms")
            choices = {**tuned.choices, problem.key: choice}
            what = f"the network with {problem.op.kind} by {choice}"
            race = self._challenge(self._program(choices, tuned.streams), what, CLEAR)
            if race is not None and race.won:
                tuned.choices, tuned.after_ms = choices, race.ms


def _near_equals(problem: Problem, choices: Mapping[str, TacticChoice]) -> list[TacticChoice]:
    """Candidates that are nearly as fast as the chosen one, the fastest first, and the default.

    If one launch may replace two, the times of both count.
    """
    covered = problem.covered_seconds
    limit = NEAR * (problem.seconds + covered)
    times = sorted((problem.added_seconds(c), c) for c in problem.times)
    near = [c for seconds, c in times if seconds + covered <= limit][:NEAR_COUNT]
    if problem.default in problem.times and problem.default not in near:
        near.append(problem.default)
    return [c for c in near if c != choices.get(problem.key)]
