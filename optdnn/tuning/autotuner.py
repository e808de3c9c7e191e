"""The autotuner of the cuda target: tries the candidates of every problem, then chooses among near-equals in the whole network.

Every time comes from a :class:`Timer`, so all else (what is tried, when it stops, what is kept) is tested without a GPU.

1. Each *problem* (operators of one signature) has candidates, ranked by the cost model. They are tried in waves: compiled in
   parallel, checked, timed. A problem is left alone once what its untried candidates promise (their prediction, as optimistic as
   those seen so far) would gain the network too little.
2. Candidates that are nearly as fast as the best are swapped in, one problem at a time, in the whole network: neighbours share L2
   and overlap there, so what wins alone need not win in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from optdnn.config import AUTO, BuildOptions
from optdnn.errors import InternalError, RunError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.libraries.providers import providers_here
from optdnn.kernels.tactic import PROVIDERS
from optdnn.lowering.assemble import placed
from optdnn.lowering.choose import Selection, TacticChoice
from optdnn.lowering.cuda import Emitted, emit_program
from optdnn.lowering.lane_choice import LaneChoice, on_lanes
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.gpu_lock import alone
from optdnn.runtime.cuda.trials.process import CandidateLost, NetworkLost
from optdnn.runtime.cuda.trials.timer import TrialFailed
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName
from optdnn.tuning.candidates import Problem, Trial, trials_of
from optdnn.tuning.lane_race import race_lanes
from optdnn.tuning.result import Timer, Tuned
from optdnn.tuning.timing_cache import TimingCache
from optdnn.tuning.timing_keys import candidate_key, network_key, signatures_digest, versions_of

ALONE = 0.6
"""At most this part of a budget goes to candidates alone; the rest is for the network."""
SPENT = "the budget was spent"
WAVE = 6
"""Candidates of a problem that are tried before the next decision whether to go on."""
WORTH, SCATTER = 5e-4, 0.15
"""A problem is tried further while its other candidates promise more than this fraction of the network's time, when they may be
faster than predicted by the scatter of the cost model."""
NEAR, NEAR_COUNT = 1.3, 5
"""How much slower than the best a near-equal may be, and how many of a problem are tried in the network."""
SHARE = 0.01
"""Problems with a smaller share of the network's time are chosen by their times alone: a swap would not show."""
CLEAR = 0.998
"""A swap is kept when it brings the network's time below this fraction of what it was, twice."""
ROUGH = 1.5
"""A candidate this much slower than the best so far is timed roughly."""


class OutOfTime(Exception):
    """The budget is spent."""


class Tuner:
    """Tunes one optimized graph. ``clock`` gives seconds; what is measured is measured within ``alone()``, and the wait for it
    does not count as time spent."""

    def __init__(
        self,
        graph: Graph,
        options: BuildOptions,
        gpu: GpuFacts,
        timer: Timer,
        cache: TimingCache,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.graph, self.options, self.gpu, self.timer, self.cache = graph, options, gpu, timer, cache
        self.say, self.clock, self.alone = say, clock, alone
        self.begin = clock()
        self.problems: dict[str, Problem] = {}
        self.cold = False
        self._start: dict[str, TacticChoice] = {}
        self._kept = ConstantCache()
        """Constants: all networks that are raced hold the very same, so that each is made and uploaded once."""

    # ---------------------------------------------------------------- the course of things

    def run(self, start: Mapping[str, TacticChoice] | None = None) -> Tuned:
        """Tune. Whatever ends it (budget, Ctrl-C, a GPU that fails), the best so far is returned and the times are in the cache.

        ``start``: choices to begin with, instead of the cost model's.
        """
        self._start = dict(start or {})
        known = self._known()
        if known is not None:
            known.seconds["recall"] = self.clock() - self.begin
        found = known or self._measure()
        found.providers = sorted(Selection.of(self.options).providers)
        return found

    def _measure(self) -> Tuned:
        """Tune by measuring."""
        self._leave_out_broken()
        found = Tuned(dict(self._start), ())
        try:
            emitted = self._collect(self._start)
        except InternalError:  # made by another version, with tactics or configurations that this one has not
            self._start, self.problems, found.choices = {}, {}, {}
            emitted = self._collect({})
        found.problems = [p for p in self.problems.values() if p.count]
        self.cold = _footprint(placed(emitted.program)) > 0.9 * self.timer.machine.l2_bytes
        phase = self.clock()
        found.seconds["collect"] = phase - self.begin
        try:
            with self.alone():
                waited, phase = self.clock() - phase, self.clock()
                self.begin += waited
                self._try_candidates(found)
                found.seconds["candidates"], phase = self.clock() - phase, self.clock()
                self._choose_in_network(found)
                found.seconds["network"] = self.clock() - phase
        except OutOfTime:
            found.stopped = SPENT
        except KeyboardInterrupt:
            found.stopped = "interrupted"
        except RunError as error:
            found.stopped, found.failed = f"the GPU failed: {error.message}", True
        if found.streams is not None:  # near-equals may have been swapped since
            found.streams = replace(found.streams, seconds=self._times(found.choices))
        if found.stopped is not None:
            if found.after_ms is None:
                self._adopt(found)
            self.say(f"tuning ended early: {found.stopped}; the best so far is kept")
        self._remember(found)
        return found

    def _leave_out_broken(self) -> None:
        """Restrict the options to libraries that can be loaded whole, now that their kernels are to be tried."""
        asked = Selection.of(self.options).providers
        sound = asked & providers_here(sure=True)
        if sound != asked:
            self.say(
                f"tune: no candidates of {' and '.join(sorted(asked - sound))}: installed, but it cannot be loaded"
            )
            self.options = replace(self.options, tactics=",".join(sorted(sound)))

    def _collect(self, choices: Mapping[str, TacticChoice]) -> Emitted:
        """Every problem of the network, with its candidates."""
        self.say("tune: collect candidates")
        selection = Selection.of(self.options)

        def visit(b: Builder, op: Op, key: str) -> None:
            if key not in self.problems:
                trials = trials_of(b, op, TACTICS[op.kind], selection)
                spared = next((self.problems.get(t.absorbs) for t in trials if t.absorbs), None)
                self.problems[key] = Problem(key, op, trials, TacticChoice(""), spared=spared)

        emitted = emit_program(self.graph, self.options, self.gpu, {}, choices, visit, self._kept)
        for d in emitted.decisions:
            problem = self.problems[d.signature]
            problem.count += 1
            problem.default = d.choice
        for problem in self.problems.values():
            dropped = problem.spared
            if problem.count and dropped is not None and not dropped.count:  # to be compared with, all the same
                dropped.count, dropped.default = problem.count, dropped.trials[0].choice
        return emitted

    def _spent(self, part: float = 1.0) -> bool:
        """Whether (a part of) the budget is spent."""
        return self.options.budget is not None and self.clock() - self.begin > part * self.options.budget

    def _check_time(self) -> None:
        if self._spent():
            raise OutOfTime

    # ---------------------------------------------------------------- candidates alone

    def _try_candidates(self, found: Tuned) -> None:
        open_ = {p.key: list(p.trials) for p in found.problems if len(p.trials) > 1}
        for key, trials in open_.items():
            self._recall(self.problems[key], trials)
        wave = 0
        while open_:
            wave += 1
            batch: list[tuple[Problem, Trial]] = []
            for key in sorted(open_, key=lambda k: -self.problems[k].weight):
                if not self._promising(self.problems[key], open_[key], found.problems):
                    del open_[key]
                    continue
                batch += [(self.problems[key], t) for t in open_[key][:WAVE]]
                del open_[key][:WAVE]
            self.say(f"tune: compile {len(batch)} candidates")
            recipes = {r.key(): r for _, t in batch for k in t.program.kernels for r in [recipe_of(k)]}
            if self._spent(ALONE):
                found.stopped = SPENT
                break
            self.timer.compile(list(recipes.values()), min(16, os.cpu_count() or 1))
            started = self.clock()
            for done, (problem, trial) in enumerate(batch):
                if self._spent(ALONE):
                    found.stopped = SPENT
                    open_.clear()
                    break
                self._progress(wave, done, len(batch), started, problem, found)
                if not self._hopeless(problem, trial):
                    self._try(problem, trial, found)
        self._adopt(found)

    def _promising(self, problem: Problem, left: Sequence[Trial], problems: Sequence[Problem]) -> bool:
        """Whether untried candidates could gain the network enough."""
        if not left:
            return False
        if not problem.times:
            return True
        left = [t for t in left if not self._hopeless(problem, t)]
        if any(t.seconds is None for t in left) or not left:
            return bool(left)
        predicted = {t.choice: t.seconds for t in problem.trials}
        ratios: dict[str, float] = {}  # measured to predicted, the least of a tactic: each has a cost model of its own
        for c, s in problem.times.items():
            if p := predicted.get(c):
                ratios[c.tactic] = min(s / p, ratios.get(c.tactic, s / p))
        if any(t.choice.tactic not in ratios for t in left):
            return True
        hoped = min(
            (t.seconds or 0.0) * ratios[t.choice.tactic] * (1 - SCATTER) - problem.saved(t.choice) for t in left
        )
        total = sum(p.count * p.seconds for p in problems)
        return problem.count * (problem.seconds - hoped) > WORTH * total

    @staticmethod
    def _hopeless(problem: Problem, trial: Trial) -> bool:
        """Whether a library's better ranked algorithms were far behind already."""
        theirs = [s for c, s in problem.times.items() if c.tactic == trial.choice.tactic]
        return trial.provider != "own" and bool(theirs) and min(theirs) > ROUGH * problem.seconds

    def _try(self, problem: Problem, trial: Trial, found: Tuned) -> None:
        best = problem.seconds + problem.saved(trial.choice) if problem.times else float("inf")
        try:
            seconds = self.timer.trial(problem.key, trial.program, cold=self.cold, give_up=ROUGH * max(best, 1e-7))
        except CandidateLost as lost:
            problem.failed[trial.choice] = lost.message
            name = " + ".join(sorted(problem.op.src)) or problem.op.name
            self._lose(found, f"{problem.op.kind} {name} by {trial.choice}", lost.message)
            return
        except TrialFailed as failure:
            problem.failed[trial.choice] = failure.message
        else:
            problem.times[trial.choice] = seconds
        self._note(problem, trial)

    def _lose(self, found: Tuned, what: str, why: str) -> None:
        """Tell of something that hung, crashed or wrote outside of its memory. No cache remembers it."""
        found.lost.append(f"{what}: {why}")
        self.say(f"tune: refused {found.lost[-1]}")

    def _note(self, problem: Problem, trial: Trial) -> None:
        """Keep a candidate's outcome in the timing cache."""
        outcome = (
            problem.times.get(trial.choice),
            versions_of(self.timer.machine, trial.provider),
            problem.failed.get(trial.choice),
        )
        self.cache.note(candidate_key(self.timer.machine, problem.key, trial, cold=self.cold), *outcome)

    def _recall(self, problem: Problem, trials: list[Trial]) -> None:
        """Take what the timing cache knows; times under another driver only say what to try first."""
        ranked: list[tuple[float, Trial]] = []
        for trial in list(trials):
            known = self.cache.measured(candidate_key(self.timer.machine, problem.key, trial, cold=self.cold))
            if known is None:
                continue
            if known.failed is not None:
                problem.failed[trial.choice] = known.failed
                trials.remove(trial)
            elif known.seconds is not None and known.versions == versions_of(self.timer.machine, trial.provider):
                problem.times[trial.choice] = known.seconds
                trials.remove(trial)
            elif known.seconds is not None:
                ranked.append((known.seconds, trial))
                trials.remove(trial)
        trials[:0] = [t for _, t in sorted(ranked, key=lambda r: r[0])]

    def _adopt(self, found: Tuned) -> None:
        """The best measured alone; the network has not decided yet."""
        for problem in found.problems:
            if problem.times:
                found.choices[problem.key] = problem.best
            elif problem.default in problem.failed and problem.untried is not None:
                found.choices[problem.key] = problem.untried

    def _progress(self, wave: int, done: int, total: int, started: float, problem: Problem, found: Tuned) -> None:
        left = (self.clock() - started) / done * (total - done) if done else None
        eta = "" if left is None else f", {left:.0f} s left"
        best = f"{problem.best} {problem.seconds * 1e6:.2f} us" if problem.times else "none yet"
        network = sum(p.count * p.seconds for p in found.problems) * 1e3
        name = next(iter(sorted(problem.op.src)), problem.op.name)
        self.say(f"tune: wave {wave}, {done}/{total}{eta}; {name}: {best}; sum {network:.3f} ms")

    # ---------------------------------------------------------------- near-equals, in the network

    def _choose_in_network(self, found: Tuned) -> None:
        """Swap near-equals one problem at a time, and keep what makes the whole network faster."""
        nets: dict[str, Any] = {}
        try:
            if not self._load_both(found, nets):
                return
            self._choose_lanes(found, nets)
            total = sum(p.count * p.seconds for p in found.problems)
            large = [p for p in found.problems if p.weight > SHARE * total]
            order = sorted(large, key=lambda p: -p.weight)
            jobs = [(p, c) for p in order for c in self._near(p, found.choices)]
            started = self.clock()
            for done, (problem, choice) in enumerate(jobs):
                self._check_time()
                left = (self.clock() - started) / done * (len(jobs) - done) if done else None
                eta = "" if left is None else f", {left:.0f} s left"
                self.say(f"tune: in the network, {done}/{len(jobs)}{eta}; {found.after_ms:.4f} ms")
                choices = {**found.choices, problem.key: choice}
                try:
                    nets["trial"] = self._load(choices, found.streams)
                    ours, now = self.timer.race([nets["trial"], nets["best"]], 1)
                    if ours < CLEAR * now:
                        ours, now = self.timer.race([nets["trial"], nets["best"]], 3)
                except NetworkLost as lost:
                    if lost.network is nets["best"]:
                        raise
                    self._lose(found, f"the network with {problem.op.kind} by {choice}", lost.message)
                    if "trial" in nets:
                        nets.pop("trial").close()
                    continue
                if ours < CLEAR * now:
                    nets["trial"], nets["best"] = nets["best"], nets["trial"]
                    found.choices, found.after_ms = choices, ours
                nets.pop("trial").close()
            self._race_both(found, nets)
        finally:
            for net in nets.values():
                net.close()

    def _load_both(self, found: Tuned, nets: dict[str, Any]) -> bool:
        """Load the network by the choices to begin with ("plain") and by the best of the candidates ("best"), and begin with the
        faster one; False where neither runs."""
        for name, choices, what in (
            ("plain", self._start, "the choices to begin with"),
            ("best", found.choices, "the fastest candidates"),
        ):
            try:
                nets[name] = self._load(choices, LaneChoice())
                self.timer.race([nets[name]], 1)
            except NetworkLost as lost:
                self._lose(found, f"the network by {what}", lost.message)
                if name in nets:
                    nets.pop(name).close()
        if not nets:
            found.stopped = "the network does not run in one graph"
            return False
        if "best" in nets:
            self._race_both(found, nets)
        slower = found.before_ms is not None and found.after_ms is not None and found.before_ms < found.after_ms
        if "best" not in nets or slower:  # the choices to begin with are the better ones
            found.choices = {**self._start, **{p.key: p.default for p in found.problems if p.times}}
            if "best" in nets:
                nets.pop("best").close()  # what follows may fail, and whatever is in nets is closed then
            nets["best"] = self._load(found.choices, LaneChoice())
            if not slower:
                self._race_both(found, nets)
            found.after_ms = found.before_ms
        return True

    def _race_both(self, found: Tuned, nets: Mapping[str, Any]) -> None:
        """Measure the network as it was and as it is now."""
        if "plain" in nets:
            found.before_ms, found.after_ms = self.timer.race([nets["plain"], nets["best"]], 3)
        else:
            (found.after_ms,) = self.timer.race([nets["best"]], 3)

    def _near(self, problem: Problem, choices: Mapping[str, TacticChoice]) -> list[TacticChoice]:
        """The near-equals of what was chosen, the best first."""
        other = 0.0 if problem.spared is None else problem.spared.seconds  # of both launches, where one may do for two
        limit = NEAR * (problem.seconds + other)
        near = sorted((s, c) for c in problem.times if (s := problem.adds(c)) + other <= limit)
        found = [c for _, c in near[:NEAR_COUNT]]
        if problem.default in problem.times and problem.default not in found:
            found.append(problem.default)
        return [c for c in found if c != choices.get(problem.key)]

    def _load(self, choices: Mapping[str, TacticChoice], streams: LaneChoice | None) -> Any:
        """The network with these choices, its steps in lanes as the options or ``streams`` want it."""
        emitted = emit_program(self.graph, self.options, self.gpu, {}, choices, kept=self._kept)
        return self.timer.load(
            placed(on_lanes(emitted.program, self.gpu, emitted.seconds(self._times(choices)), self.options, streams))
        )

    def _times(self, choices: Mapping[str, TacticChoice]) -> dict[str, float]:
        """The measured seconds of operators by signature, as the timing cache keeps them."""
        chosen = {p.key: p.times.get(choices.get(p.key, p.default)) for p in self.problems.values()}
        return {key: round(t, 10) for key, t in chosen.items() if t is not None}

    # ---------------------------------------------------------------- lanes, in the network

    def _choose_lanes(self, found: Tuned, nets: dict[str, Any]) -> None:
        """Run independent steps side by side where that makes the network faster; ``nets["best"]`` is then the one so made."""
        if self.options.streams != AUTO:
            return
        emitted = emit_program(self.graph, self.options, self.gpu, {}, found.choices, kept=self._kept)
        times = self._times(found.choices)
        program, seconds = emitted.program, emitted.seconds(times)
        race_lanes(found, nets, program, self.gpu, seconds, times, self.options, self.timer, self._check_time)
        if found.streams is not None and found.streams.lanes_ms is not None:
            self.say(f"tune: steps side by side: {found.streams.why()}")

    # ---------------------------------------------------------------- the timing cache

    def _known(self) -> Tuned | None:
        """What an earlier build chose for this very network, where all versions are the same and it had as much time."""
        self._network = network_key(self.timer.machine, self.graph, self.options, self.options.target)
        known = self.cache.network(self._network)
        if known is None:
            return None
        choices = {k: TacticChoice(*c) for k, c in known.choices.items()}
        try:
            emitted = emit_program(self.graph, self.options, self.gpu, {}, choices, kept=self._kept)
        except InternalError:
            return None
        if known.problems != signatures_digest(
            emitted
        ):  # of another version, which would make something else of this network
            return None
        same = known.versions == versions_of(self.timer.machine, *Selection.of(self.options).providers)
        budget = self.options.budget
        if same and (known.seconds is None or (budget is not None and budget <= known.seconds)):
            streams = LaneChoice.of_plain(known.streams)
            return Tuned(choices, (), None, known.ms, cached=True, streams=streams, emitted=emitted)
        if not same:
            self.say("the timing cache is of another driver or compiler: its times only rank")
        self._start = choices
        return None

    def _remember(self, found: Tuned) -> None:
        if found.after_ms is None or found.failed:
            return
        spent = None if found.stopped is None else max(self.clock() - self.begin, self.options.budget or 0.0)
        versions = versions_of(self.timer.machine, *Selection.of(self.options).providers)
        lanes = None if found.streams is None else found.streams.to_plain()
        # What the cost model chose is kept as well: the next build need not ask it.
        made = emit_program(self.graph, self.options, self.gpu, {}, found.choices, kept=self._kept)
        found.choices |= {d.signature: d.choice for d in made.decisions if d.choice.config}
        found.emitted = emit_program(self.graph, self.options, self.gpu, {}, found.choices, kept=self._kept)
        problems = signatures_digest(found.emitted)
        self.cache.note_network(self._network, found.choices, found.after_ms, versions, spent, lanes, problems)


def tune(
    graph: Graph, options: BuildOptions, gpu: GpuFacts, cache: TimingCache, say: Callable[[str], None]
) -> Tuned | None:
    """Tune the graph for ``options.target`` on this machine's GPU; None where the cost model is to choose: with
    ``tactics="heuristic"``, on ``simulate``, and where there is no GPU of that architecture."""
    arch = gpu.arch
    if "heuristic" in options.tactics.split(",") or TargetName.parse(options.target).family != "cuda":
        return None
    from optdnn.runtime.cuda.usable import why_not

    begin = time.monotonic()
    if why := why_not():
        say(f"tactics by the cost model: {why}")
        return None
    from optdnn.runtime.cuda.device import arch_here
    from optdnn.runtime.cuda.trials.process import TrialTimer, gpu_process

    if (here := arch_here()) != arch:
        say(f"tactics by the cost model: this GPU is {here}, not {arch}")
        return None
    selection = Selection.of(options)
    if options.tactics == "auto" and (absent := [p for p in PROVIDERS if p not in selection.providers]):
        say(f"tune: no candidates of {' and '.join(absent)}: not installed (pip install 'optdnn[cuda-libs]')")
    with gpu_process() as process:
        timer = TrialTimer(process, selection.providers)
        started = time.monotonic() - begin
        found = Tuner(graph, options, gpu, timer, cache, say, alone=partial(alone, timer.machine.place, say)).run()
    found.seconds = {"start": started, **found.seconds}
    return found


def _footprint(program: Program) -> int:
    """Bytes that one run of the network touches."""
    used = {i for s in program.steps for i in s.inputs}
    constants = sum(program.buffers[i].nbytes or 0 for i in used if program.buffers[i].blob is not None)
    return constants + program.arena_bytes
