"""Tactics of the cpu target: OpenVINO and ONNX Runtime on the optimized graph, with several thread counts, by measurement.

Neither library always wins, so both are tried on the network itself, in separate processes: a candidate that crashes or hangs
is refused (:mod:`optdnn.lowering.cpu.trials`). This process opens only the chosen one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optdnn.config import BuildOptions
from optdnn.errors import EngineError, MissingDependency, RunError, UnsupportedError
from optdnn.ir.digest import graph_digest
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.base import Measured, fastest, take_turns
from optdnn.lowering.cpu.check import check
from optdnn.lowering.cpu.eight_bits import with_float_weights
from optdnn.lowering.cpu.library import LIBRARIES, Contender
from optdnn.lowering.cpu.made_up import made_up_inputs
from optdnn.lowering.cpu.trials import Trial, TrialLost, Trials
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.runtime.program import Program
from optdnn.tuning.timing_cache import Outcome, TimingCache
from optdnn.types import Array

Progress = Callable[[str], None]


@dataclass
class LibraryChoice:
    """The program that was chosen and why."""

    engine: Engine
    rows: list[Measured]
    fallbacks: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Per library, the operators that it does not run, with the reason and the executor: another library, or NumPy if none is
    named."""
    ran: dict[str, str] = field(default_factory=dict)
    """The first output of an op -> the precision in which the chosen library reports to run it; ops that the library does not
    mention are absent."""
    library: str = ""


def choose(
    graph: Graph,
    options: BuildOptions,
    cache: TimingCache,
    meta: dict[str, Any],
    progress: Progress = lambda text: None,
    *,
    base: str | None = None,
    label: str | None = None,
) -> LibraryChoice:
    """Try every tactic that ``options`` allows on ``graph``, and keep the fastest correct one.

    ``base`` is the float precision requested from the libraries (default: the options'); a graph with several float types
    fixes the precision of each op itself and needs "fp32". ``label`` is the name of the engine's precision. Raises
    MissingDependency when no library is installed, UnsupportedError when each one refuses the network.
    """
    cores = options.threads or usable_cores()
    graph = with_float_weights(graph)
    with Trials(cores) as trials:
        search = _Search(
            graph, options, cache, progress, base or options.base_precision, label or options.precision, trials
        )
        search.measure([(c, cores) for c in search.contenders])
        if options.threads is None:
            search.measure(
                [(c, n) for c in search.near_best() for n in _fewer_threads(cores, search.times[c.tactic(cores)])]
            )
        if not search.times and not search.untimed_ones:
            search.without_helper()
            search.measure([(c, cores) for c in search.contenders])
    return search.conclude(meta)


def choose_again(
    graph: Graph,
    options: BuildOptions,
    like: Program,
    meta: dict[str, Any],
    progress: Progress,
    *,
    base: str | None,
    label: str | None,
) -> LibraryChoice:
    """The choice of an earlier build (its program: ``like``), for the same network with other weights. Nothing is measured.

    Raises EngineError for a malformed record, RunError or UnsupportedError if the library refuses the network."""
    tactic = like.meta.get("tactic", {})
    library, threads = tactic.get("library"), tactic.get("threads")
    if library not in LIBRARIES or type(threads) is not int:
        raise EngineError("the engine's record of its tactic is malformed", hint="build it again")
    graph = with_float_weights(graph)
    with Trials(threads) as trials:
        search = _Search(
            graph, options, TimingCache(None), progress, base or options.base_precision, label or options.precision, trials,
            only=library,
        )  # fmt: skip
        if tactic.get("alone"):
            search.without_helper()
        if not search.contenders:
            raise UnsupportedError("; ".join(reason for _, reason in search.refused.values()))
        (contender,) = search.contenders
        if tactic.get("cut"):
            contender.cut_again(tactic["cut"])
        contender.tried(trials, threads).close()
    return search.kept(contender, threads, [], meta)


def compile_with(graph: Graph, library: str, precision: str, threads: int) -> Engine:
    """``graph`` on one library, without measurements; compiled in a separate process first.

    Raises RunError or UnsupportedError if the library refuses it."""
    base = precision.partition("+")[2] or precision.replace("int8", "fp32")
    contender = Contender(with_float_weights(graph), LIBRARIES[library], base, precision)
    with Trials(threads or usable_cores()) as trials:
        contender.tried(trials, threads).close()
    return contender.engine(threads)


SMALL_MS = 3.0
"""Networks faster than this may lose more by waking threads than they gain, in milliseconds."""
HELPER = "onnxruntime"
"""The library that runs operators that another one must not or cannot run: it checks users' values, and accepts empty tensors."""
CHECKED = 2
"""Version of the candidates' checks. A new one makes the outcomes of earlier builds invalid."""
NEAR = 1.25
"""Libraries within this factor of the fastest are tried with other thread counts."""


def _fewer_threads(cores: int, median_ms: float) -> list[int]:
    """The smaller thread counts worth trying: half of many cores, one for a small network."""
    counts = ([cores // 2] if cores > 4 else []) + ([1] if cores > 1 and median_ms < SMALL_MS else [])
    return sorted(set(counts), reverse=True)


@dataclass(eq=False)
class _Search:
    """The state of one search: the candidates, their times, and the refused ones with reasons."""

    graph: Graph
    options: BuildOptions
    cache: TimingCache
    progress: Progress
    base: str
    label: str
    trials: Trials
    times: dict[str, float] = field(default_factory=dict)
    cached: set[str] = field(default_factory=set)
    refused: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    untimed_ones: list[str] = field(default_factory=list)
    owner: dict[str, tuple[Contender, int]] = field(default_factory=dict)
    contenders: list[Contender] = field(default_factory=list)
    untimed: str = ""
    doubts: dict[str, str] = field(default_factory=dict)
    only: str | None = None
    """The only library that is tried; None: all."""
    alone: bool = False
    """Whether no candidate has the helper."""

    def __post_init__(self) -> None:
        every = self.options.tactics == "auto"
        wanted = [self.only] if self.only else list(LIBRARIES) if every else [self.options.tactics]
        helper = LIBRARIES[HELPER] if every and LIBRARIES[HELPER].version() is not None else None
        for name in wanted:
            if LIBRARIES[name].version() is None:
                self._refuse(name, {}, "not installed: pip install 'optdnn[cpu]'")
            elif (reason := LIBRARIES[name].refuses(self.base)) is not None:
                self._refuse(name, {}, reason)
            else:
                try:
                    other = None if name == HELPER else helper
                    self.contenders.append(Contender(self.graph, LIBRARIES[name], self.base, self.label, other))
                except UnsupportedError as error:
                    self._refuse(name, {}, error.message)
        if len(self.refused) == len(wanted) and all("not installed" in reason for _, reason in self.refused.values()):
            raise MissingDependency(" or ".join(wanted), "cpu", "for the cpu target")

    def _refuse(self, name: str, settings: dict[str, Any], reason: str) -> None:
        self.refused[name] = ({"precision": self.label, **settings}, reason)

    def _settings(self, name: str) -> dict[str, Any]:
        contender, threads = self.owner[name]
        return contender.settings(threads)

    def measure(self, wanted: Sequence[tuple[Contender, int]]) -> None:
        """Find the time of each correct (library, threads) pair: from the cache, or in separate processes, which compile,
        check and time candidates in turns."""
        fresh = []
        for contender, threads in wanted:
            name = contender.tactic(threads)
            self.owner[name] = (contender, threads)
            if not self._known(name):
                fresh.append(name)
        if not fresh:
            return
        self.trials.start(len(fresh))
        opened: dict[str, Trial] = {}
        for name in fresh:
            contender, threads = self.owner[name]
            self.progress(f"compile {name}")
            try:
                opened[name] = contender.tried(self.trials, threads)
            except (RunError, UnsupportedError) as error:
                self._found(name, error.message)
        if opened and self._feeds is None:
            self.untimed_ones += opened
        elif opened:
            self._check_and_time(opened)
        for trial in opened.values():
            trial.close()

    def without_helper(self) -> None:
        """No candidate was right: continue with NumPy kernels in place of the helper."""
        self.contenders, self.alone = [c.alone() for c in self.contenders if c.helped], True

    def _known(self, name: str) -> bool:
        """Whether the cache knows that a candidate is wrong, or that it is correct and how fast it is."""
        contender, threads = self.owner[name]
        key = contender.key(threads)
        found = self.cache.outcome(self._trial_key(key)) if key in self.cache.entries or self.cache.tried else None
        if found is None:
            return False
        if found.refused is not None:
            self._refuse(name, self._settings(name), found.refused)
            return True
        known = self.cache.get(key)
        if known is None:
            return False
        if found.cut:
            contender.cut_again(found.cut)
        self.times[name] = known
        self.cached.add(name)
        return True

    def _trial_key(self, key: str) -> str:
        """A time is valid for a network with any weights, the outcome of a trial only for the weights that were tried."""
        return f"{CHECKED} {self._weights} {key}"

    @functools.cached_property
    def _weights(self) -> str:
        return graph_digest(self.graph)[:32]

    def _found(self, name: str, refused: str | None = None) -> None:
        """Record the outcome of a candidate's trial."""
        contender, threads = self.owner[name]
        if refused is not None:
            self._refuse(name, self._settings(name), refused)
            if "SIGKILL" in refused:  # the system seems to have run out of memory; that may be temporary
                return
        self.cache.note_outcome(self._trial_key(contender.key(threads)), Outcome(refused, contender.cut))

    def _check_and_time(self, opened: Mapping[str, Trial]) -> None:
        self.progress("check results")
        assert self._feeds is not None
        wrong, doubts = check(self.graph, opened, self._feeds, self.base)
        if wrong and (unjudged := self._taking_other_sizes(opened, wrong)):
            self.untimed_ones += unjudged
            return
        self.doubts.update(doubts)
        runners = {}
        for name, trial in opened.items():
            self._found(name, wrong.get(name))
            known = self.cache.get(self.owner[name][0].key(self.owner[name][1]))
            if name in wrong:
                continue
            if known is not None:  # measured with other weights; the candidate is correct with these, too
                self.times[name] = known
                self.cached.add(name)
            else:
                runners[name] = functools.partial(self._turn, name, trial)
        if runners:
            times = take_turns(runners, tick=lambda name: self.progress(f"time {name}"))
            for name, ms in times.items():
                contender, threads = self.owner[name]
                self.refused.pop(name, None)  # it was right with another library's help
                self.times[name] = round(ms, 4)
                self.cache.put(contender.key(threads), self.times[name])

    def _taking_other_sizes(self, opened: Mapping[str, Trial], wrong: Mapping[str, str]) -> list[str]:
        """The candidates that did not crash, if the reference rejects the made-up inputs: the model declares sizes as free
        that are fixed. Exporters record a dynamic axis, but write the size of their example into a Reshape."""
        assert self._feeds is not None
        if not typical_sizes(self.graph):
            return []
        try:
            evaluate(self.graph, self._feeds)
            return []
        except RunError as error:
            self.untimed = f"not timed: it takes none of the made-up inputs ({error.message})"
        found = []
        for name, trial in opened.items():
            try:
                if name in wrong:
                    trial.run(self._feeds)
            except TrialLost:
                continue
            except RunError:
                pass
            found.append(name)
            trial.abandon()
        return found

    def _turn(self, name: str, trial: Trial, seconds: float) -> list[float]:
        """The times of one turn; empty if the candidate failed in it, which refuses it."""
        try:
            return trial.turn(seconds)
        except RunError as error:
            self._found(name, error.message)
            return []

    @functools.cached_property
    def _feeds(self) -> Mapping[str, Array] | None:
        """Inputs for checks and timing; None if no valid ones are found."""
        feeds, reason = made_up_inputs(self.graph)
        if feeds is None:
            self.untimed = f"not timed: it takes none of the made-up inputs ({reason})"
        return feeds

    def near_best(self) -> list[Contender]:
        """Contenders whose best time is within NEAR of the best of all."""
        if not self.times:
            return []
        limit = NEAR * min(self.times.values())
        return list(dict.fromkeys(self.owner[n][0] for n, ms in self.times.items() if ms <= limit))

    def conclude(self, meta: dict[str, Any]) -> LibraryChoice:
        """The fastest candidate as an engine with ``meta``, and the record of all candidates."""
        rows = []
        for name, ms in sorted(self.times.items(), key=lambda item: (item[1], item[0])):
            rows.append(
                Measured(name, self._settings(name), ms, cached=name in self.cached, note=self.doubts.get(name))
            )
        rows += [Measured(name, settings, refused=reason) for name, (settings, reason) in sorted(self.refused.items())]
        best = fastest(rows)
        if best is None and self.untimed_ones:
            # no inputs to time with: the library that checks the user's inputs is preferred
            name = min(self.untimed_ones, key=lambda n: (not n.startswith("onnxruntime"), n))
            best = Measured(name, self._settings(name), refused=self.untimed)
            rows.insert(0, best)
        if best is None:
            reasons = "; ".join(f"{r.name}: {r.refused}" for r in rows)
            raise UnsupportedError(f"no tactic of the cpu target runs this network in {self.label}: {reasons}")
        return self.kept(*self.owner[best.name], rows, meta)

    def kept(self, contender: Contender, threads: int, rows: list[Measured], meta: dict[str, Any]) -> LibraryChoice:
        """A candidate as the choice; ``meta["tactic"]`` records the reasons."""
        engine = contender.engine(threads)
        tactic: dict[str, Any] = {
            "name": contender.tactic(threads),
            "library": contender.library.name,
            "threads": threads,
        }
        tactic |= {"cut": contender.cut} if contender.cut else {}
        tactic |= {"alone": True} if self.alone else {}
        engine.program.meta.update(
            meta,
            tactic=tactic,
            sizes=typical_sizes(self.graph),
        )
        fallbacks = {c.library.name: c.fallbacks for c in self.contenders if c.fallbacks}
        ran = contender.ran(engine, self._feeds if contender.library.name == "onnxruntime" else None)
        return LibraryChoice(engine, rows, fallbacks, ran, contender.library.name)
