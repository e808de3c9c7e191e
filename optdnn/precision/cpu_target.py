"""Automatic precision on the CPU: OpenVINO (fp32, bf16, int8, any mixture) and ONNX Runtime (fp32, int8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from optdnn.config import OF_PRODUCTS, BuildOptions, Progress
from optdnn.errors import MissingDependency, OptdnnError, RunError, UnsupportedError
from optdnn.ir.digest import graph_digest
from optdnn.ir.evaluate import random_feeds
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.base import REST_SECONDS
from optdnn.lowering.cpu.library import LIBRARIES
from optdnn.lowering.cpu.partition import choose, compile_with
from optdnn.lowering.cpu.profile import profile
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import OperatorTimes, Timed
from optdnn.precision.targets import assigned, packed_offers, permitted
from optdnn.precision.turns import alternating, in_turns, remembered, stored_times, turn_of
from optdnn.runtime.contexts.feeds import random_feeds as engine_feeds
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import machine, usable_cores
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array

FAR = 1.5
"""The search leaves out a library if its best time is beyond this factor of the best of all."""
TURN_SECONDS = 0.08
PLACEMENTS, SMALL_BYTES = 3, 64 << 20
"""Number of loads of an engine for timing, and the largest engine, in bytes, that is loaded several times."""


@dataclass
class CpuTarget:
    """The libraries of the cpu target as rivals. Times of operators come from the libraries' own counters."""

    options: BuildOptions
    cache: TimingCache
    calibrated: bool
    packed: bool = False
    """Whether the network has weights that can be packed."""

    def __post_init__(self) -> None:
        wanted = list(LIBRARIES) if self.options.tactics == "auto" else [self.options.tactics]
        able = {
            name: tuple(p for p in ("fp32", "bf16") if LIBRARIES[name].refuses(p) is None)
            for name in wanted
            if LIBRARIES[name].version() is not None
        }
        if not able:
            raise MissingDependency(" or ".join(wanted), "cpu", "for the cpu target")
        candidates = self.options.candidates
        self._libraries = {name: permitted(floats, candidates) for name, floats in able.items()}
        self._threads = self.options.threads or usable_cores()
        floats = [p for p in ("fp32", "bf16") if any(p in ps for ps in self._libraries.values())]
        integers = ["int8", *(f"int8+{p}" for p in floats if p != "fp32")] if self.calibrated else []
        packed = packed_offers("cpu", candidates) if self.packed else []
        self.offers = permitted((*floats, *integers, *packed), candidates)
        native = any("bf16" in floats for floats in able.values())
        self.notes = {} if native else {"bf16": "this processor has no native bf16 arithmetic"}

    def operator_times(self, graph: Graph, calibration: Calibration | None, say: Progress) -> list[OperatorTimes]:
        feeds = random_feeds(graph, seed=1, sizes=typical_sizes(graph))
        found: list[tuple[float, OperatorTimes]] = []
        for library, floats in self._libraries.items():
            times = OperatorTimes(library, f"the counters of {library} on this machine, {self._threads} threads")
            best = float("inf")
            for precision in (*floats, *(p for p in self.offers if p in OF_PRODUCTS)):
                say(f"time each operator: {library}, {precision}")
                graph_p, _ = assigned(graph, PrecisionPlan.of_option(precision), "cpu", calibration)
                try:
                    rows = self._profile(graph_p, library, "bf16" if precision == "bf16" else "fp32", feeds)
                except OptdnnError:
                    continue  # the library does not run the network in this precision
                best = min(best, rows.pop("whole"))
                times.precisions += (precision,)
                for name, us in rows.items():
                    kernel, _, key = name.partition(" ")
                    timed = Timed(us, library if kernel == "-" else f"{library} {kernel}")
                    times.table.setdefault(key, {})[precision] = timed
            if "fp32" in times.precisions:
                found.append((best, times))
        limit = FAR * min((best for best, _ in found), default=0.0)
        return [times for best, times in found if best <= limit]

    def _profile(self, graph: Graph, library: str, precision: str, feeds: Mapping[str, Array]) -> dict[str, float]:
        """Microseconds of the network (under "whole") and of its operators (under "KERNEL KEY", or "- KEY" if the kernel is
        unknown)."""

        def measured() -> dict[str, float]:
            found = profile(graph, library, precision, self._threads, feeds)
            nodes = {f"{found.kernels.get(k) or '-'} {k}": us for k, us in found.nodes.items()}
            return {"whole": found.whole_us, **nodes}

        version, cpu = LIBRARIES[library].version(), machine()["cpu"]
        head = f"operators {library} {version} {precision} {self._threads}t {cpu} {graph_digest(graph)[:32]}"
        return stored_times(self.cache, head, measured)

    def quick(self, graph: Graph, plan: PrecisionPlan, library: str) -> Engine:
        able = [n for n, floats in self._libraries.items() if set(plan.floats) <= set(floats)]
        error: OptdnnError = RunError("no library of the cpu target has these precisions")
        for name in sorted(able, key=lambda n: n != library):
            try:
                return compile_with(graph, name, plan.library_precision, self._threads)
            except (RunError, UnsupportedError) as refused:
                error = refused
        raise error

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Progress) -> Engine:
        mixed = plan.is_mixture and "bf16" in plan.floats
        options = replace(self.options, tactics="openvino" if mixed else self.options.tactics)
        return choose(graph, options, self.cache, {}, say, base=plan.library_precision, label=label).engine

    def tuned(self, graph: Graph, shares: int, say: Progress) -> Engine | None:
        return None

    def race(self, engines: Mapping[str, Engine], say: Progress) -> dict[str, float]:
        feeds = engine_feeds(next(iter(engines.values())).inputs, seed=1)
        measure = partial(cpu_rounds, feeds=feeds, say=say, rounds=9, seconds=TURN_SECONDS, give_up_ratio=2.0)
        return remembered(engines, self.cache, machine()["cpu"], measure)

    def predicted(self, engine: Engine) -> float | None:
        return None


def cpu_rounds(
    engines: Mapping[str, Engine],
    *,
    feeds: Mapping[str, Array],
    say: Progress,
    rounds: int,
    seconds: float,
    give_up_ratio: float,
) -> dict[str, list[float]]:
    """Median milliseconds of each engine's turn in each round, by the host's clock.

    The address of an engine's memory changes its time by a few percent. So small engines are loaded several times, and their copies
    run in turn.
    """
    turns: dict[str, Callable[[], float]] = {}
    for n, engine in engines.items():
        large = sum(b.nbytes for b in engine.program.blobs) > SMALL_BYTES
        copies = [engine, *(Engine(engine.program) for _ in range(0 if large else PLACEMENTS - 1))]
        runs = [partial(c.context().run, feeds) for c in copies]
        for run in runs:
            run()  # after the first run, memory is moved onto huge pages
        turns[n] = alternating([turn_of(r, seconds=seconds, rest=REST_SECONDS) for r in runs])
    settle()
    return in_turns(turns, rounds=rounds, give_up_ratio=give_up_ratio, tick=lambda n: say(f"measure {n}"))
