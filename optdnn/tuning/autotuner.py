"""The autotuner of the cuda target.

1. :mod:`optdnn.tuning.candidate_stage` times the candidates of every problem alone. A *problem* is all operators of one signature.
2. :mod:`optdnn.tuning.network_stage` compares lanes and near-equal candidates in the whole network.

All times come from a :class:`Timer`, so tests need no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from optdnn.config import BuildOptions
from optdnn.errors import InternalError, RunError
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.libraries.providers import providers_here
from optdnn.kernels.tactic import PROVIDERS
from optdnn.lowering.assemble import placed
from optdnn.lowering.choose import Selection, TacticChoice
from optdnn.lowering.cuda import Emitted, emit_program
from optdnn.lowering.lane_choice import LaneChoice
from optdnn.lowering.table import TACTICS
from optdnn.ops.collective import COLLECTIVES
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.gpu_lock import alone
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName
from optdnn.tuning.candidate_stage import CandidateStage
from optdnn.tuning.candidates import Problem, trials_of
from optdnn.tuning.network_stage import NetworkStage
from optdnn.tuning.result import Timer, Tuned
from optdnn.tuning.session import SPENT, OutOfTime, Session
from optdnn.tuning.timing_cache import NetworkChoices, TimingCache
from optdnn.tuning.timing_keys import network_key, signatures_digest, versions_of


class Tuner:
    """Tunes one optimized graph. ``clock`` gives seconds. ``alone`` is entered while the GPU is measured; waiting for it does
    not count against the budget."""

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
        self.session = Session(graph, options, gpu, timer, cache, say, clock, begin=clock())
        self._alone = alone
        self._network = network_key(timer.machine, graph, options, options.target)

    def run(self, start: Mapping[str, TacticChoice] | None = None) -> Tuned:
        """Tune. However tuning ends (budget, Ctrl-C, a GPU failure), the best result so far is returned and the timing cache has
        the times.

        ``start``: the choices to begin with, instead of the cost model's.
        """
        session = self.session
        session.start = dict(start or {})
        tuned = self._recall()
        if tuned is not None:
            tuned.seconds["recall"] = session.clock() - session.begin
        else:
            tuned = self._measure()
        tuned.providers = sorted(Selection.of(session.options).providers)
        return tuned

    def _measure(self) -> Tuned:
        """Tune by measuring."""
        session = self.session
        self._leave_out_broken()
        tuned = session.tuned = Tuned(dict(session.start), ())
        try:
            emitted = self._collect(session.start)
        except (
            InternalError
        ):  # another version made the choices; this one lacks some of their tactics or configurations
            session.start, session.problems, tuned.choices = {}, {}, {}
            emitted = self._collect({})
        tuned.problems = [p for p in session.problems.values() if p.count]
        session.cold = _footprint(placed(emitted.program)) > 0.9 * session.timer.machine.l2_bytes
        candidates = CandidateStage(session)
        tuned.seconds["collect"] = session.clock() - session.begin
        try:
            self._run_stages(candidates)
        except OutOfTime:
            tuned.stopped = SPENT
        except KeyboardInterrupt:
            tuned.stopped = "interrupted"
        except RunError as error:
            tuned.stopped, tuned.failed = f"the GPU failed: {error.message}", True
        if tuned.streams is not None:  # near-equals may have been swapped since lanes were chosen
            tuned.streams = replace(tuned.streams, seconds=session.measured(tuned.choices))
        if tuned.stopped is not None:
            if tuned.after_ms is None:
                candidates.adopt()
            session.say(f"tuning ended early: {tuned.stopped}; the best so far is kept")
        self._remember()
        return tuned

    def _run_stages(self, candidates: CandidateStage) -> None:
        """Run both stages, alone on the GPU. The budget starts when the GPU is free."""
        session = self.session
        seconds, asked = session.tuned.seconds, session.clock()
        with self._alone():
            phase = session.clock()
            session.begin += phase - asked
            candidates.run()
            seconds["candidates"], phase = session.clock() - phase, session.clock()
            if not session.graph.of_kind(*COLLECTIVES):  # one rank does not run alone
                NetworkStage(session).run()
            else:
                candidates.adopt()
            seconds["network"] = session.clock() - phase

    def _leave_out_broken(self) -> None:
        """Restrict the options to libraries that can be loaded completely: their kernels are about to be tried."""
        session = self.session
        asked = Selection.of(session.options).providers
        sound = asked & providers_here(sure=True)
        if sound != asked:
            broken = " and ".join(sorted(asked - sound))
            session.say(f"tune: no candidates of {broken}: installed, but it cannot be loaded")
            session.options = replace(session.options, tactics=",".join(sorted(sound)))

    def _collect(self, choices: Mapping[str, TacticChoice]) -> Emitted:
        """Fill ``session.problems`` with every problem of the network and its candidates."""
        session = self.session
        problems = session.problems
        session.say("tune: collect candidates")
        selection = Selection.of(session.options)

        def visit(b: Builder, op: Op, key: str) -> None:
            if key not in problems:
                trials = trials_of(b, op, TACTICS[op.kind], selection)
                covered = {k: problems[k] for t in trials for k in t.covered_keys if k in problems}
                problems[key] = Problem(key, op, trials, TacticChoice(""), covered=covered)

        emitted = emit_program(
            session.graph, session.options, session.gpu, {}, choices, visit, constants=session.constants
        )
        for decision in emitted.decisions:
            problem = problems[decision.signature]
            problem.count += 1
            problem.default = decision.choice
        for problem in problems.values():
            for covered in problem.covered.values() if problem.count else ():
                if not covered.count:
                    # Another launch computes it by default. Its own launches are timed for comparison.
                    covered.count, covered.default = problem.count, covered.trials[0].choice
        return emitted

    # ---------------------------------------------------------------- the timing cache

    def _recall(self) -> Tuned | None:
        """The choices that an earlier build made for the same network, if all versions are equal and it had as much time.

        Choices of an earlier build under other versions are the start of this tuning.
        """
        session = self.session
        known = session.cache.network(self._network)
        if known is None:
            return None
        choices = {k: TacticChoice(*c) for k, c in known.choices.items()}
        try:
            emitted = session.emit(choices)
        except InternalError:
            return None
        if known.problems != signatures_digest(emitted):  # another version lowered this network to other operators
            return None
        same = known.versions == versions_of(session.timer.machine, *Selection.of(session.options).providers)
        budget = session.options.budget
        if same and (known.seconds is None or (budget is not None and budget <= known.seconds)):
            streams = LaneChoice.of_plain(known.streams)
            return Tuned(choices, (), None, known.ms, cached=True, streams=streams, emitted=emitted)
        if not same:
            session.say("the timing cache is of another driver or compiler: its times only rank")
        session.start = choices
        return None

    def _remember(self) -> None:
        """Store the network's choices in the timing cache, if the whole network was measured."""
        session, tuned = self.session, self.session.tuned
        if tuned.after_ms is None or tuned.failed:
            return
        spent = None
        if tuned.stopped is not None:
            spent = max(session.clock() - session.begin, session.options.budget or 0.0)
        versions = versions_of(session.timer.machine, *Selection.of(session.options).providers)
        lanes = None if tuned.streams is None else tuned.streams.to_plain()
        # The cost model's choices are kept as well: the next build need not ask it.
        tuned.choices |= {d.signature: d.choice for d in session.emit(tuned.choices).decisions if d.choice.config}
        tuned.emitted = session.emit(tuned.choices)
        problems = signatures_digest(tuned.emitted)
        found = NetworkChoices(tuned.choices, tuned.after_ms, versions, spent, lanes, problems)
        session.cache.note_network(self._network, found)


def tune(
    graph: Graph, options: BuildOptions, gpu: GpuFacts, cache: TimingCache, say: Callable[[str], None]
) -> Tuned | None:
    """Tune the graph for ``options.target`` on this machine's GPU.

    None if the cost model is to choose: with ``tactics="heuristic"``, on ``simulate``, or without a GPU of that architecture.
    """
    name = TargetName.parse(options.target)
    if "heuristic" in options.tactics.split(",") or name.family != "cuda":
        return None
    from optdnn.runtime.cuda.usable import why_not

    begin = time.monotonic()
    if why := why_not():
        say(f"tactics by the cost model: {why}")
        return None
    from optdnn.runtime.cuda.device import differs_here
    from optdnn.runtime.cuda.trials.process import TrialTimer, gpu_process

    if why := differs_here(name):
        say(f"tactics by the cost model: {why}")
        return None
    selection = Selection.of(options)
    if options.tactics == "auto" and (absent := [p for p in PROVIDERS if p not in selection.providers]):
        say(f"tune: no candidates of {' and '.join(absent)}: not installed (pip install 'optdnn[cuda-libs]')")
    with gpu_process() as process:
        timer = TrialTimer(process, selection.providers)
        started = time.monotonic() - begin
        tuned = Tuner(graph, options, gpu, timer, cache, say, alone=partial(alone, timer.machine.place, say)).run()
    tuned.seconds = {"start": started, **tuned.seconds}
    return tuned


def _footprint(program: Program) -> int:
    """Bytes that one run of the network touches."""
    used = {i for s in program.steps for i in s.inputs}
    constants = sum(program.buffers[i].nbytes or 0 for i in used if program.buffers[i].blob is not None)
    return constants + program.arena_bytes
