"""What automatic precision asks of a target: engines of plans, times of ops, and whole engines measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, OptdnnError, RunError, UnsupportedError
from optdnn.ir.digest import graph_digest
from optdnn.ir.evaluate import random_feeds
from optdnn.ir.graph import Graph
from optdnn.passes.assign_precision import AssignPrecision, is_mixture
from optdnn.passes.base import PassContext, PassReport, run_pipeline
from optdnn.passes.contract import Account
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.precision import PrecisionPlan
from optdnn.passes.ranges import Calibration
from optdnn.precision.latency import Latency, Table, Timed, model
from optdnn.runtime.engine import Engine
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.machine import machine, usable_cores
from optdnn.tactics.base import take_turns
from optdnn.tactics.cpu import LIBRARIES, choose, compile_with, typical_sizes
from optdnn.tactics.timing_cache import TimingCache
from optdnn.types import Array

Say = Callable[[str], None]
FAR = 1.5
"""A library whose best time is beyond this factor of the best of all has no part in the search."""


@dataclass(frozen=True)
class Way:
    """One way to run plans: a library (or the target's own kernels), the precisions it has, and what its ops cost."""

    name: str
    precisions: tuple[str, ...]
    latency: Latency
    whole_ms: Mapping[str, float]
    """Predicted milliseconds of the whole network at one precision."""


class Target(Protocol):
    """A target to search on. ``offers`` are option texts of single precisions ("fp32", "int8+bf16"), fp32 first; ``notes`` say why
    it lacks others."""

    offers: tuple[str, ...]
    notes: dict[str, str]

    def ways(self, graph: Graph, calibration: Calibration | None, say: Say) -> list[Way]: ...

    def quick(self, graph: Graph, plan: PrecisionPlan, way: str) -> Engine:
        """An engine of a graph whose precisions are assigned, to judge its accuracy. Raises RunError, UnsupportedError."""

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Say) -> Engine:
        """The engine that a build would give of it, tactics chosen by measurement."""

    def race(self, engines: Mapping[str, Engine], say: Say) -> dict[str, float] | None:
        """Milliseconds of whole engines, measured in turns; None where nothing can be measured."""


def assigned(
    graph: Graph,
    plan: PrecisionPlan,
    target: str,
    calibration: Calibration | None,
    level: int = 3,
    account: Account | None = None,
) -> tuple[Graph, list[PassReport]]:
    """A copy of ``graph`` with the plan carried out, and what comes behind that in the target's pipeline; the passes' reports."""
    copy = graph.copy()
    machine_ = "cuda:sm_90a" if target == "simulate" else target
    pipeline = PIPELINE(level, machine_)
    names = [p.name for p in pipeline]
    rest = pipeline[names.index(AssignPrecision.name) :] if AssignPrecision.name in names else (AssignPrecision(),)
    return copy, run_pipeline(
        copy, rest, PassContext(target=machine_, plan=plan, calibration=calibration, account=account)
    )


def base_of(plan: PrecisionPlan) -> str:
    """The float precision to ask of a CPU library for a plan: fp32 where the graph itself says what computes in which."""
    return "fp32" if is_mixture(plan) else plan.floats[0]


@dataclass
class CpuTarget:
    """OpenVINO (fp32, bf16, int8, any mixture) and ONNX Runtime (fp32, int8)."""

    options: BuildOptions
    cache: TimingCache
    calibrated: bool

    def __post_init__(self) -> None:
        wanted = list(LIBRARIES) if self.options.tactics == "auto" else [self.options.tactics]
        self._libraries = {
            name: tuple(p for p in ("fp32", "bf16") if LIBRARIES[name].refuses(p) is None)
            for name in wanted
            if LIBRARIES[name].version() is not None
        }
        if not self._libraries:
            raise MissingDependency(" or ".join(wanted), "cpu", "for the cpu target")
        self._threads = self.options.threads or usable_cores()
        floats = sorted({p for ps in self._libraries.values() for p in ps}, key=("fp32", "bf16").index)
        integers = ["int8", *(f"int8+{p}" for p in floats if p != "fp32")] if self.calibrated else []
        self.offers = (*floats, *integers)
        self.notes = {} if "bf16" in floats else {"bf16": "this processor has no native bf16 arithmetic"}

    def ways(self, graph: Graph, calibration: Calibration | None, say: Say) -> list[Way]:
        feeds = random_feeds(graph, seed=1, sizes=typical_sizes(graph))
        found = []
        for library, floats in self._libraries.items():
            table = Table(f"the counters of {library} on this machine, {self._threads} threads", True)
            wholes: dict[str, float] = {}
            for precision in (*floats, *(("int8",) if calibration is not None else ())):
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
        from optdnn.tactics.cpu_profile import profile

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

    def race(self, engines: Mapping[str, Engine], say: Say) -> dict[str, float] | None:
        names = list(engines)
        keys = {n: f"whole engine in turns {machine()['cpu']} {_digest(e)}" for n, e in engines.items()}
        known = {n: self.cache.get(keys[n]) for n in names}
        if all(v is not None for v in known.values()):
            return {n: float(v or 0.0) for n, v in known.items()}
        first = engines[names[0]]
        from optdnn.runtime.feeds import random_feeds as feeds_of

        feeds = feeds_of(first.inputs, seed=1)
        contexts = {n: e.context() for n, e in engines.items()}
        found = take_turns(
            {n: _runner(c, feeds) for n, c in contexts.items()},
            rounds=8,
            turn_seconds=0.1,
            budget_seconds=30.0,
            give_up_ratio=3.0,
            tick=lambda n: say(f"measure {n}"),
        )
        rounded = {n: round(ms, 5) for n, ms in found.items()}
        for n, ms in rounded.items():
            self.cache.put(keys[n], ms)
        return rounded


def _digest(engine: Engine) -> str:
    """What an engine's speed depends on: its steps and the digests of what they hold."""
    import hashlib

    digest = hashlib.sha256()
    for s in engine.program.steps:
        digest.update(repr((s.executor, sorted(s.params.items(), key=str), s.inputs, s.outputs)).encode())
    for b in engine.program.blobs:
        digest.update(b.tobytes())
    return digest.hexdigest()[:32]


def _runner(context: Any, feeds: Mapping[str, Array]) -> Callable[[], object]:
    return lambda: context.run(feeds)


@dataclass
class GpuTarget:
    """Our kernels for a GPU: measured where it is at hand, else in NumPy (``simulate``) with times of a model."""

    options: BuildOptions
    target: str
    calibrated: bool

    def __post_init__(self) -> None:
        arch = self.target.partition(":")[2] or "sm_90a"
        floats = ["fp32", "fp16", "bf16"]
        integers = ["int8", "int8+fp16"] if self.calibrated else []
        if self.calibrated and arch == "sm_90a":
            integers += ["fp8+fp16"]
        self.offers = (*floats, *integers)
        self._present = self._here(arch)
        self.notes: dict[str, str] = {}

    def _here(self, arch: str) -> bool:
        if self.target == "simulate":
            return False
        try:
            from optdnn.runtime.cuda.device import Device, gpu_count

            return gpu_count() > 0 and Device.open().arch == arch
        except OptdnnError:
            return False

    def _engine(self, graph: Graph) -> Engine:
        from optdnn.lower_cuda import lower_cuda

        program = lower_cuda(graph, self.options, self.target, {})
        options = LoadOptions() if self._present else LoadOptions(simulate=True)
        return Engine(program, options=options)

    def ways(self, graph: Graph, calibration: Calibration | None, say: Say) -> list[Way]:
        single = [p for p in self.offers if "+" not in p] + (["fp8"] if "fp8+fp16" in self.offers else [])
        if not self._present:
            from optdnn.passes.precision import choices

            offered = {c.key: tuple(p for p in c.precisions if p in single) for c in choices(graph, self.target)}
            table = model(graph, self.target, offered, {})
            wholes = {p: sum(t[p].us if p in t else t["fp32"].us for t in table.table.values()) / 1e3 for p in single}
            return [Way(self.target, tuple(single), table, wholes)]
        table = Table(f"each kernel's time on this {self.target} GPU", True, overhead_us=3.0, bandwidth=2e6)
        wholes = {}
        for precision in single:
            say(f"time each operator in {precision}")
            graph_p, _ = assigned(graph, PrecisionPlan.of_option(precision), self.target, calibration)
            try:
                times = self._step_times(graph_p)
            except OptdnnError:
                continue
            wholes[precision] = sum(times.values()) / 1e3
            for key, us in times.items():
                table.table.setdefault(key, {})[precision] = Timed(us, self.target)
        return [Way(self.target, tuple(wholes), table, wholes)]

    def _step_times(self, graph: Graph) -> dict[str, float]:
        """Microseconds per op: the steps of an engine, joined with ops by their ONNX nodes."""
        from optdnn.ir.graph import STRUCTURAL
        from optdnn.passes.precision import key
        from optdnn.runtime.bench import profile
        from optdnn.runtime.feeds import random_feeds as feeds_of

        engine = self._engine(graph)
        owner: dict[str, str] = {}
        for op in graph.order():
            if op.kind not in STRUCTURAL and op.kind not in ("Cast", "QuantizeLinear", "DequantizeLinear"):
                for name in op.src:
                    owner.setdefault(name, key(op))
        found: dict[str, float] = {}
        for row in profile(engine, feeds_of(engine.inputs, seed=1)):
            for name in row.src:
                if name in owner:
                    found[owner[name]] = found.get(owner[name], 0.0) + row.median_ms * 1e3
                    break
        return found

    def quick(self, graph: Graph, plan: PrecisionPlan, way: str) -> Engine:
        return self._engine(graph)

    def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Say) -> Engine:
        return self._engine(graph)

    def race(self, engines: Mapping[str, Engine], say: Say) -> dict[str, float] | None:
        if not self._present:
            return None
        from optdnn.runtime.feeds import random_feeds as feeds_of

        return gpu_milliseconds(engines, feeds_of(next(iter(engines.values())).inputs, seed=1), say)


def gpu_milliseconds(
    engines: Mapping[str, Engine],
    feeds: Mapping[str, Array],
    say: Say = lambda text: None,
    *,
    rounds: int = 5,
    turn_seconds: float = 0.05,
) -> dict[str, float]:
    """Median GPU time of a run of each engine, in milliseconds, without copies from and to the host; all in turns.

    An engine whose runs are not all on the GPU (steps on the CPU) is timed by the host's clock.
    """
    from optdnn.runtime.bench import cuda_context
    from optdnn.runtime.cuda.measure import sample_gpu

    contexts = {n: e.context() for n, e in engines.items()}
    on_gpu = {n: cuda_context(c, feeds) for n, c in contexts.items()}
    taken: dict[str, list[float]] = {n: [] for n in engines}
    for k in range(rounds):
        for n, context in on_gpu.items():
            say(f"measure {n}, round {k + 1} of {rounds}")
            if context is None:
                taken[n] += [take_turns({n: _runner(contexts[n], feeds)}, rounds=1, turn_seconds=turn_seconds)[n]]
            else:
                samples = sample_gpu(context, feeds, warmup=5, duration=2 * turn_seconds)
                taken[n].append(statistics.median(samples.compute) / 1e6)
    return {n: statistics.median(ms) for n, ms in taken.items()}


def target_of(options: BuildOptions, target: str, cache: TimingCache, *, calibrated: bool) -> Target:
    """The target that a build is for, as the search sees it."""
    if target.partition(":")[0] in ("cuda", "simulate"):
        return GpuTarget(options, target, calibrated)
    return CpuTarget(options, cache, calibrated)
