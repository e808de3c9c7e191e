"""Automatic precision on the CPU: OpenVINO (fp32, bf16, int8, any mixture) and ONNX Runtime (fp32, int8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, OptdnnError, RunError, UnsupportedError
from optdnn.ir.digest import graph_digest
from optdnn.ir.evaluate import random_feeds
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.base import REST_SECONDS
from optdnn.lowering.cpu.library import LIBRARIES, typical_sizes
from optdnn.lowering.cpu.partition import choose, compile_with
from optdnn.passes.assign_precision import is_mixture
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.latency import Table, Timed
from optdnn.precision.targets import Say, Way, assigned, base_of, permitted
from optdnn.precision.turns import alternating, in_turns, remembered, turn_of
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.engine import Engine
from optdnn.runtime.feeds import random_feeds as engine_feeds
from optdnn.runtime.machine import machine, usable_cores
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array

FAR = 1.5
"""A library whose best time is beyond this factor of the best of all has no part in the search."""
TURN_SECONDS = 0.08
PLACEMENTS, SMALL_BYTES = 3, 64 << 20
"""How many times engines of at most so many bytes are loaded to be timed."""


@dataclass
class CpuTarget:
    """The libraries of the cpu target as rivals; times of ops are their own counters'."""

    options: BuildOptions
    cache: TimingCache
    calibrated: bool

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
        floats = sorted({p for ps in self._libraries.values() for p in ps}, key=("fp32", "bf16").index)
        integers = ["int8", *(f"int8+{p}" for p in floats if p != "fp32")] if self.calibrated else []
        self.offers = permitted((*floats, *integers), candidates)
        native = any("bf16" in floats for floats in able.values())
        self.notes = {} if native else {"bf16": "this processor has no native bf16 arithmetic"}

    def ways(self, graph: Graph, calibration: Calibration | None, say: Say) -> list[Way]:
        feeds = random_feeds(graph, seed=1, sizes=typical_sizes(graph))
        found = []
        for library, floats in self._libraries.items():
            table = Table(f"the counters of {library} on this machine, {self._threads} threads", True)
            wholes: dict[str, float] = {}
            for precision in (*floats, *(("int8",) if "int8" in self.offers else ())):
                say(f"time each operator: {library}, {precision}")
                graph_p, _ = assigned(graph, PrecisionPlan.of_option(precision), "cpu", calibration)
                try:
                    whole_us, rows = self._profile(graph_p, library, "bf16" if precision == "bf16" else "fp32", feeds)
                except OptdnnError:
                    continue
                wholes[precision] = whole_us / 1e3
                for key, us, kernel in rows:
                    table.table.setdefault(key, {})[precision] = Timed(us, f"{library} {kernel}".strip())
            if "fp32" in wholes:
                found.append(Way(library, tuple(wholes), table, wholes))
        best = min((ms for w in found for ms in w.whole_ms.values()), default=0.0)
        return [w for w in found if min(w.whole_ms.values()) <= FAR * best]

    def _profile(
        self, graph: Graph, library: str, precision: str, feeds: Mapping[str, Array]
    ) -> tuple[float, list[tuple[str, float, str]]]:
        from optdnn.lowering.cpu.profile import profile

        head = (
            f"op times {library} {LIBRARIES[library].version()} {precision} {self._threads}t {machine()['cpu']} "
            f"{graph_digest(graph)[:32]}"
        )
        whole_us = self.cache.get(head)
        keys = {k: v for k, v in self.cache.entries.items() if k.startswith(head + " ")}
        if whole_us is not None and keys:
            rows = []
            for k, us in keys.items():
                kernel, _, key = k.removeprefix(head + " ").partition(" ")
                rows.append((key, us, "" if kernel == "-" else kernel))
            return whole_us, rows
        found = profile(graph, library, precision, self._threads, feeds)
        rows = [(key, round(us, 2), found.kernels.get(key, "")) for key, us in found.nodes.items()]
        self.cache.put(head, round(found.whole_us, 2))
        for key, us, kernel in rows:
            self.cache.put(f"{head} {kernel or '-'} {key}", us)
        return found.whole_us, rows

    def quick(self, graph: Graph, plan: PrecisionPlan, way: str) -> Engine:
        able = [n for n, floats in self._libraries.items() if set(plan.floats) <= set(floats)]
        error: OptdnnError | None = None
        for library in sorted(able, key=lambda n: n != way):
            try:
                return compile_with(graph, library, base_of(plan), self._threads)
            except (RunError, UnsupportedError) as e:
                error = e
        raise error or RunError("no library of the cpu target has these precisions")

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Say) -> Engine:
        narrow = is_mixture(plan) and "bf16" in plan.floats
        options = replace(self.options, tactics="openvino" if narrow else self.options.tactics)
        return choose(graph, options, self.cache, {}, say, base=base_of(plan), label=label).engine

    def tuned(self, graph: Graph, shares: int, say: Say) -> Engine | None:
        return None

    def race(self, engines: Mapping[str, Engine], say: Say) -> dict[str, float] | None:
        feeds = engine_feeds(next(iter(engines.values())).inputs, seed=1)
        measure = partial(cpu_rounds, feeds=feeds, say=say, rounds=9, seconds=TURN_SECONDS, give_up_ratio=2.0)
        return remembered(engines, self.cache, machine()["cpu"], measure)


def cpu_rounds(
    engines: Mapping[str, Engine],
    *,
    feeds: Mapping[str, Array],
    say: Say,
    rounds: int,
    seconds: float,
    give_up_ratio: float,
) -> dict[str, list[float]]:
    """Median milliseconds of each engine's turn in each round, by the host's clock.

    Small engines are loaded several times, and their copies run in turn: where their memory lies makes a few percent.
    """
    turns: dict[str, Callable[[], float]] = {}
    for n, engine in engines.items():
        few = sum(b.nbytes for b in engine.program.blobs) > SMALL_BYTES
        copies = [engine, *(Engine(engine.program) for _ in range(0 if few else PLACEMENTS - 1))]
        runs = [partial(c.context().run, feeds) for c in copies]
        for run in runs:
            run()  # after the first run, memory is moved onto huge pages
        turns[n] = alternating([turn_of(r, seconds=seconds, rest=REST_SECONDS) for r in runs])
    settle()
    return in_turns(turns, rounds=rounds, give_up_ratio=give_up_ratio, tick=lambda n: say(f"measure {n}"))
