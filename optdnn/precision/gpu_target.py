"""Automatic precision on GPUs: measured if the GPU is available; otherwise computed in NumPy (``simulate``), with the cost model's
times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from optdnn.config import GPU_PRECISIONS, OF_PRODUCTS, PACKED_WEIGHTS, ROUNDED_ROWS, BuildOptions, Progress
from optdnn.errors import OptdnnError
from optdnn.ir.graph import Graph
from optdnn.passes.support.precision import PrecisionPlan, no_rounded_rows
from optdnn.passes.support.precision_choices import choices
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import OperatorTimes, Timed, by_operator, work_of_ops
from optdnn.precision.predicted import lowered, microseconds, step_times
from optdnn.precision.targets import assigned, beside_packed, packed_offers, permitted
from optdnn.precision.turns import alternating, identity, in_turns, remembered, stored_times
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.cuda.device import Device, differs_here, facts_for, gpu_count
from optdnn.runtime.cuda.gpu_facts import fitted
from optdnn.runtime.cuda.measuring import measure
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring import bench
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.target_name import TargetName
from optdnn.tuning.autotuner import tune
from optdnn.tuning.first_run import finish
from optdnn.tuning.result import Tuned
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array

if TYPE_CHECKING:
    from optdnn.runtime.cuda.runner import CudaContext

CAST_US, BANDWIDTH = 1.5, 2e6
"""Microseconds that a cast between two kernels adds to a CUDA graph, and bytes per microsecond. Races of whole engines correct
both."""
PLACEMENTS, SMALL_BYTES = 4, 64 << 20
"""Number of contexts that time an engine, and the largest engine, in bytes of activations, that gets several contexts."""


@dataclass
class GpuTarget:
    """The kernels of one architecture. An op's time is the time that its steps add to a replay of the network's CUDA graph."""

    options: BuildOptions
    target: str
    cache: TimingCache
    calibrated: bool
    packed: bool = False
    """Whether the network has weights that can be packed."""

    def __post_init__(self) -> None:
        self.facts = facts_for(TargetName.parse(self.options.target))
        more = GPU_PRECISIONS.get(self.facts.arch, frozenset())
        floats = ["fp32", *(["tf32"] if "tf32" in more else []), "fp16", "bf16"]
        integers = ["int8", "int8+fp16"] if self.calibrated and "int8" in more else []
        integers += ["fp8+fp16"] if self.calibrated and "fp8" in more else []
        packed = packed_offers(self.target, self.options.candidates) if self.packed else []
        self.offers = permitted((*floats, *integers, *packed), self.options.candidates)
        self.beside = beside_packed(self.target, self.options.candidates)
        self._gpu = None if self.target == "simulate" else _gpu(TargetName.parse(self.options.target))
        asked = sorted(PACKED_WEIGHTS.intersection(self.options.candidates or ())) if self.packed and not packed else []
        self.notes = dict.fromkeys(asked, "its data are fp16 or bf16, which are not among the candidates")
        reason = no_rounded_rows(self.target)
        if self.packed and reason is not None and ROUNDED_ROWS in (self.options.candidates or ()):
            self.notes[ROUNDED_ROWS] = reason

    def _engine(self, graph: Graph, say: Progress = lambda text: None, tuned: Tuned | None = None) -> Engine:
        """An engine. On the GPU, its first runs have happened in a separate process, because this process runs it next."""
        if self._gpu is None:
            return Engine(lowered(graph, self.options, self.facts), options=LoadOptions(simulate=True))
        program = finish(graph, self.options, self.facts, {}, say, tuned)[0]
        return Engine(program, options=LoadOptions(trust_cubins=True))

    def operator_times(self, graph: Graph, calibration: Calibration | None, say: Progress) -> list[OperatorTimes]:
        single = tuple(dict.fromkeys(p for text in self.offers for p in text.split("+")))
        model = f"the cost model of {fitted(self.facts).name}: nothing was measured"
        source = model if self._gpu is None else f"each kernel's time on this {self._gpu}"
        times = OperatorTimes(self.target, source, cast_us=CAST_US, bandwidth=BANDWIDTH, beside=self.beside)
        found = choices(graph, self.target)
        asked = {c.key: c.precisions for c in found}
        owners = {name: c.key for c in found for name in c.nodes}
        work = work_of_ops(graph, self.facts)
        for precision in single:
            say(f"time each operator in {precision}")
            # Integers are measured with the float precision that will most likely accompany them.
            base = next((t for t in self.offers if t.startswith(f"{precision}+")), precision)
            graph_p, _ = assigned(graph, PrecisionPlan.of_option(base), self.target, calibration)
            try:
                us_of = by_operator(self._launches(graph_p), owners, work)
            except OptdnnError:
                continue  # the network does not run in this precision
            times.precisions += (precision,)
            for k, us in us_of.items():
                if precision not in OF_PRODUCTS or precision in asked.get(k, ()):
                    times.table.setdefault(k, {})[precision] = Timed(us, self.target)
        return [times]

    def _launches(self, graph: Graph) -> list[tuple[tuple[str, ...], float]]:
        """The steps of a network's engine: their ONNX nodes and microseconds, measured or predicted."""
        if self._gpu is None:
            program = lowered(graph, self.options, self.facts)
            return [(step.src, us) for step, us in zip(program.steps, step_times(program), strict=True)]
        engine = self._engine(graph)

        def measured() -> dict[str, float]:
            feeds = random_feeds(engine.inputs, seed=1)
            rows = measure.profile_gpu(_context(engine, feeds), feeds, repeats=10, inner=2)
            return {str(k): row.us for k, row in enumerate(rows)}

        rows = stored_times(self.cache, f"step times {self._gpu} {identity(engine)}", measured)
        return [(step.src, rows[str(k)]) for k, step in enumerate(engine.program.steps)]

    def quick(self, graph: Graph, plan: PrecisionPlan, library: str) -> Engine:
        return self._engine(graph)

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Progress) -> Engine:
        return self._engine(graph)

    def tuned(self, graph: Graph, shares: int, say: Progress) -> Engine | None:
        """The engine tuned as in a build. The timing cache keeps times and choices, so the build that follows measures nothing."""
        budget = self.options.budget
        share = replace(self.options, budget=None if budget is None else budget / shares)
        found = None if self._gpu is None else tune(graph, share, self.facts, self.cache, say)
        if found is None:
            return None
        return self._engine(graph, say, replace(found, streams=None, emitted=None))

    def race(self, engines: Mapping[str, Engine], say: Progress) -> dict[str, float]:
        if self._gpu is None:
            return {}
        feeds = random_feeds(next(iter(engines.values())).inputs, seed=1)
        timed = partial(gpu_rounds, feeds=feeds, say=say, rounds=12, seconds=0.01, give_up_ratio=2.0)
        return remembered(engines, self.cache, self._gpu, timed)

    def predicted(self, engine: Engine) -> float | None:
        return microseconds(engine.program) if self._gpu is None else None


def gpu_rounds(
    engines: Mapping[str, Engine],
    *,
    feeds: Mapping[str, Array],
    say: Progress,
    rounds: int,
    seconds: float,
    give_up_ratio: float,
) -> dict[str, list[float]]:
    """Median milliseconds of each engine's turn in each round: replays of its CUDA graph between events.

    The address of activations changes a small network's time by a few percent, more than the precisions do. So each engine has
    several contexts, and the rounds alternate between them.
    """
    turns = {}
    for n, engine in engines.items():
        large = engine.program.arena_bytes > SMALL_BYTES
        turns[n] = alternating([_turn(engine, feeds, seconds) for _ in range(1 if large else PLACEMENTS)])
    return in_turns(turns, rounds=rounds, give_up_ratio=give_up_ratio, tick=lambda n: say(f"measure {n}"))


def _turn(engine: Engine, feeds: Mapping[str, Array], seconds: float) -> Callable[[], float]:
    context = _context(engine, feeds)
    context.run(feeds)  # stages the inputs and makes the graph
    graph, stream = context.graph(), context.stream

    def turn(owner: object = context) -> float:  # the context owns the memory that its graph works on
        for _ in range(5):
            graph.replay(stream)
        taken, _, _ = measure.replay_times(lambda: graph.replay(stream), stream, duration=seconds)
        return statistics.median(taken) / 1e6

    return turn


def _context(engine: Engine, feeds: Mapping[str, Array]) -> CudaContext:
    """A context of an engine that was built for this machine's GPU."""
    context = bench.cuda_context(engine.context(), feeds)
    assert context is not None
    return context


def _gpu(target: TargetName) -> str | None:
    """The name of this machine's GPU, if the target means it."""
    try:
        return str(Device.open().name) if gpu_count() and differs_here(target) is None else None
    except OptdnnError:
        return None
