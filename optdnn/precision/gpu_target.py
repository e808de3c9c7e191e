"""Automatic precision on GPUs: measured where the GPU is at hand, else in NumPy (``simulate``) with times of a model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from optdnn.config import GPU_PRECISIONS, QUANTIZED, BuildOptions
from optdnn.errors import OptdnnError, RunError
from optdnn.ir.graph import Graph
from optdnn.passes.support.precision import PrecisionPlan, choices
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import Table, Timed, model
from optdnn.precision.targets import Say, Way, assigned, permitted
from optdnn.precision.turns import alternating, identity, in_turns, remembered, turn_of
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.engine import Engine
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.feeds import random_feeds
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName
from optdnn.tuning.autotuner import tune
from optdnn.tuning.first_run import finish
from optdnn.tuning.result import Tuned
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array

CAST_US, BANDWIDTH = 1.5, 2e6
"""What a cast between two kernels adds to a CUDA graph, and bytes per microsecond; whole engines set it right."""
PLACEMENTS, SMALL_BYTES = 4, 64 << 20
"""Contexts by which an engine of at most so many bytes of activations is timed."""


@dataclass
class GpuTarget:
    """The kernels of one architecture; times of ops are what each step adds to a replay of the network's CUDA graph."""

    options: BuildOptions
    target: str
    cache: TimingCache
    calibrated: bool

    def __post_init__(self) -> None:
        self.facts = facts_for(TargetName.parse(self.options.target).arch)
        more = GPU_PRECISIONS.get(self.facts.arch, frozenset())
        floats = ["fp32", *(["tf32"] if "tf32" in more else []), "fp16", "bf16"]
        integers = ["int8", "int8+fp16"] if self.calibrated and "int8" in more else []
        integers += ["fp8+fp16"] if self.calibrated and "fp8" in more else []
        self.offers = permitted((*floats, *integers), self.options.candidates)
        self._gpu = None if self.target == "simulate" else _gpu(self.facts.arch)
        self.notes: dict[str, str] = {}

    def _engine(self, graph: Graph) -> Engine:
        program = self._lowered(graph)
        options = LoadOptions(simulate=self._gpu is None, trust_cubins=True)
        return Engine(program, options=options)

    def _lowered(self, graph: Graph, say: Say = lambda text: None, tuned: Tuned | None = None) -> Program:
        """The program; on the GPU after its first runs in a process of their own, since this one runs it next."""
        return finish(graph, self.options, self.facts, {}, say, tuned)[0]

    def ways(self, graph: Graph, calibration: Calibration | None, say: Say) -> list[Way]:
        single = list(dict.fromkeys(p for text in self.offers for p in text.split("+")))
        if self._gpu is None:
            offered = {c.key: tuple(p for p in c.precisions if p in single) for c in choices(graph, self.target)}
            table = model(graph, self.target, offered, {})
            wholes = {p: sum(t[p].us if p in t else t["fp32"].us for t in table.table.values()) / 1e3 for p in single}
            return [Way(self.target, tuple(single), table, wholes)]
        table = Table(f"each kernel's time on this {self._gpu}", True, overhead_us=CAST_US, bandwidth=BANDWIDTH)
        wholes = {}
        owners = {name: c.key for c in choices(graph, self.target) for name in c.nodes}
        asked = {c.key: c.precisions for c in choices(graph, self.target)}
        for precision in single:
            say(f"time each operator in {precision}")
            # Beside 8 bits stands the float precision that they will most likely stand beside.
            base = next((t for t in self.offers if t.startswith(f"{precision}+")), precision)
            graph_p, _ = assigned(graph, PrecisionPlan.of_option(base), self.target, calibration)
            try:
                times = self._step_times(graph_p, owners)
            except OptdnnError:
                continue
            wholes[precision] = sum(times.values()) / 1e3
            for k, us in times.items():
                if precision not in QUANTIZED or precision in asked.get(k, ()):
                    table.table.setdefault(k, {})[precision] = Timed(us, self.target)
        return [Way(self.target, tuple(wholes), table, wholes)]

    def _step_times(self, graph: Graph, owners: Mapping[str, str]) -> dict[str, float]:
        """Microseconds per op: the steps of an engine, joined with ops by their ONNX nodes."""
        from optdnn.runtime.bench import cuda_context
        from optdnn.runtime.cuda.measuring.measure import profile_gpu

        engine = self._engine(graph)
        head = f"op times {self._gpu} {identity(engine)}"
        kept = {k.removeprefix(head + " "): us for k, us in self.cache.entries.items() if k.startswith(head + " ")}
        if kept:
            return kept
        feeds = random_feeds(engine.inputs, seed=1)
        context = cuda_context(engine.context(), feeds)
        if context is None:
            raise RunError("the engine does not run on the GPU")
        found: dict[str, float] = {}
        for row in profile_gpu(context, feeds, repeats=10, inner=2):
            k = next((owners[n] for n in row.src if n in owners), None)
            if k is not None:
                found[k] = found.get(k, 0.0) + row.us
        for k, us in found.items():
            self.cache.put(f"{head} {k}", round(us, 3))
        return found

    def quick(self, graph: Graph, plan: PrecisionPlan, way: str) -> Engine:
        return self._engine(graph)

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Say) -> Engine:
        return self._engine(graph)

    def tuned(self, graph: Graph, shares: int, say: Say) -> Engine | None:
        """By the tuner of a build, whose times and choices the timing cache keeps: the build that follows measures nothing."""
        budget = self.options.budget
        share = replace(self.options, budget=None if budget is None else budget / shares)
        found = None if self._gpu is None else tune(graph, share, self.facts, self.cache, say)
        if found is None:
            return None
        program = self._lowered(graph, say, replace(found, streams=None, emitted=None))
        return Engine(program, options=LoadOptions(trust_cubins=True))

    def race(self, engines: Mapping[str, Engine], say: Say) -> dict[str, float] | None:
        if self._gpu is None:
            return None
        feeds = random_feeds(next(iter(engines.values())).inputs, seed=1)
        measure = partial(gpu_rounds, feeds=feeds, say=say, rounds=12, seconds=0.01, give_up_ratio=2.0)
        return remembered(engines, self.cache, self._gpu, measure)


def gpu_rounds(
    engines: Mapping[str, Engine],
    *,
    feeds: Mapping[str, Array],
    say: Say,
    rounds: int,
    seconds: float,
    give_up_ratio: float,
) -> dict[str, list[float]]:
    """Median milliseconds of each engine's turn in each round: replays of its CUDA graph between events.

    Where activations lie in memory makes a few percent in small networks, more than precisions differ by. So each engine has
    several contexts, and round after round another of them runs. An engine whose runs are not all on the GPU (steps on the CPU)
    is timed by the host's clock.
    """
    turns = {}
    for n, engine in engines.items():
        few = engine.program.arena_bytes > SMALL_BYTES
        turns[n] = alternating([_turn(engine, feeds, seconds) for _ in range(1 if few else PLACEMENTS)])
    return in_turns(turns, rounds=rounds, give_up_ratio=give_up_ratio, tick=lambda n: say(f"measure {n}"))


def _turn(engine: Engine, feeds: Mapping[str, Array], seconds: float) -> Callable[[], float]:
    from optdnn.runtime.bench import cuda_context

    context = engine.context()
    on_gpu = cuda_context(context, feeds)
    if on_gpu is None:
        return turn_of(partial(context.run, feeds), seconds=seconds, rest=0.0)
    return _replays(on_gpu, feeds, seconds)


def _replays(context: Any, feeds: Mapping[str, Array], seconds: float) -> Callable[[], float]:
    from optdnn.runtime.cuda.measuring.measure import replay_times

    context.run(feeds)  # stages the inputs and makes the graph
    graph, stream = context.graph(), context.stream

    def turn(owner: object = context) -> float:  # the context owns the memory that its graph works on
        for _ in range(5):
            graph.replay(stream)
        taken, _, _ = replay_times(lambda: graph.replay(stream), stream, duration=seconds)
        return statistics.median(taken) / 1e6

    return turn


def _gpu(arch: str) -> str | None:
    """The name of this machine's GPU, if it is of an architecture."""
    try:
        from optdnn.runtime.cuda.device import Device, gpu_count

        if gpu_count() == 0 or Device.open().arch != arch:
            return None
        return str(Device.open().name)
    except OptdnnError:
        return None
