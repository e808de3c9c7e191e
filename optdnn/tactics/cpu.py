"""Tactics of the cpu target: OpenVINO and ONNX Runtime on the optimized graph, with several thread counts, by measurement.

Neither library always wins, so both are tried on the very network. What a library does not take runs from its NumPy
kernel as a step of its own; which operators those are is found out by asking the library, not by a list.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, RunError, UnsupportedError
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.export_onnx import ExportedModel, export_model
from optdnn.ir.extract import extract, regions, single
from optdnn.ir.graph import Graph, Op
from optdnn.lower import Lowering
from optdnn.runtime.cpu.library import LibraryModel, MakeModel, Settings
from optdnn.runtime.cpu.onnxruntime import OnnxRuntimeModel
from optdnn.runtime.cpu.openvino import OpenVinoModel
from optdnn.runtime.engine import Engine
from optdnn.runtime.machine import machine, usable_cores
from optdnn.runtime.program import Program
from optdnn.tactics.base import Measured, fastest, take_turns
from optdnn.tactics.timing_cache import TimingCache
from optdnn.types import Array, is_float

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Library:
    """One CPU library: how the graph is written for it, and who makes its model."""

    name: str
    opset: int
    weights: str
    """How large weights travel: "external" initializers, or graph "inputs"."""
    make: MakeModel

    def version(self) -> str | None:
        """Installed version, or None."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def export(self, graph: Graph) -> ExportedModel:
        inputs = self.weights == "inputs"
        return export_model(graph, self.opset, external_weights=not inputs, weights_as_inputs=inputs)

    def compile(self, graph: Graph, settings: Settings) -> LibraryModel:
        """The graph as a model of this library; raises RunError when the library refuses."""
        model = self.export(graph)
        inputs = [graph.op(i).outputs[0].name for i in graph.inputs]
        outputs = [graph.op(i).outputs[0].name for i in graph.outputs]
        return self.make(model.to_bytes(), model.weights, inputs, outputs, settings)


LIBRARIES: dict[str, Library] = {
    "openvino": Library("openvino", 21, "inputs", OpenVinoModel),
    "onnxruntime": Library("onnxruntime", 21, "external", OnnxRuntimeModel),
}


@dataclass
class Choice:
    """The program that was chosen and why."""

    program: Program
    rows: list[Measured]
    fallbacks: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Per library, the operators that run from their NumPy kernels and why."""


@dataclass(frozen=True)
class Tactic:
    """One library with one thread count."""

    library: Library
    threads: int

    @property
    def name(self) -> str:
        return f"{self.library.name}/{self.threads}t"


def choose(
    graph: Graph,
    options: BuildOptions,
    cache: TimingCache,
    meta: dict[str, Any],
    progress: Progress = lambda text: None,
) -> Choice:
    """Try every tactic that ``options`` allows on ``graph``, and keep the fastest that is right.

    Raises MissingDependency when no library is installed, UnsupportedError when each one refuses the network.
    """
    rows: list[Measured] = []
    tactics, plans = _candidates(graph, options, rows, progress)
    keys = {t.name: _key(graph, t, options, plans[t.library.name].program) for t in tactics}
    cached = {t.name: ms for t in tactics if (ms := cache.get(keys[t.name])) is not None}
    if len(cached) < len(tactics):
        feeds = random_feeds(graph, seed=1, sizes=_typical_sizes(graph))
        engines = {}
        for t in tactics:
            progress(f"compile {t.name}")
            engines[t.name] = Engine(plans[t.library.name].program, threads=t.threads)
        wrong = _check(graph, {t.name: t for t in tactics}, engines, feeds, options.precision)
        for name, reason in wrong.items():
            rows.append(_row(tactics, name, options, refused=reason))
            del engines[name]
        tactics = [t for t in tactics if t.name in engines]
        contexts = {name: engine.context() for name, engine in engines.items()}
        runners = {name: _runner(context, feeds) for name, context in contexts.items() if name not in cached}
        measured = take_turns(runners, tick=lambda name: progress(f"time {name}")) if runners else {}
        for name, ms in measured.items():
            cache.put(keys[name], round(ms, 4))
        rows += [_row(tactics, name, options, median_ms=cache.get(keys[name])) for name in measured]
    rows += [_row(tactics, name, options, median_ms=ms, cached=True) for name, ms in cached.items()]
    rows.sort(key=lambda r: (r.median_ms is None, r.median_ms or 0.0, r.name))
    best = fastest(rows)
    if best is None:
        reasons = "; ".join(f"{r.name}: {r.refused}" for r in rows)
        raise UnsupportedError(f"no tactic of the cpu target runs this network in {options.precision}: {reasons}")
    chosen = next(t for t in tactics if t.name == best.name)
    plan = plans[chosen.library.name]
    program = plan.lower(chosen.threads, {**meta, "tactic": {"name": chosen.name, "library": chosen.library.name}})
    return Choice(program, rows, {name: p.fallbacks for name, p in plans.items() if p.fallbacks})


def _candidates(
    graph: Graph, options: BuildOptions, rows: list[Measured], progress: Progress
) -> tuple[list[Tactic], dict[str, _Plan]]:
    wanted = list(LIBRARIES) if options.tactics == "auto" else [options.tactics]
    tactics: list[Tactic] = []
    plans: dict[str, _Plan] = {}
    missing: list[str] = []
    for name in wanted:
        library = LIBRARIES[name]
        if library.version() is None:
            missing.append(name)
            rows.append(
                Measured(name, {"precision": options.precision}, refused="not installed: pip install 'optdnn[cpu]'")
            )
            continue
        progress(f"plan {name}")
        try:
            plans[name] = _Plan.make(graph, library, options)
        except RunError as error:
            rows.append(Measured(name, {"precision": options.precision}, refused=error.message))
            continue
        tactics += [Tactic(library, n) for n in _thread_counts(options)]
    if not tactics and len(missing) == len(wanted):
        raise MissingDependency(" and ".join(missing), "cpu", "for the cpu target")
    return tactics, plans


@dataclass
class _Plan:
    """How a library runs the graph: its regions, exported once, and the operators it leaves to NumPy."""

    graph: Graph
    library: Library
    precision: str
    fallbacks: list[dict[str, str]]
    program: Program
    """The program at the library's default thread count; its blobs are shared by all."""
    _cuts: list[tuple[Any, ExportedModel | None]]

    @classmethod
    def make(cls, graph: Graph, library: Library, options: BuildOptions) -> _Plan:
        settings = Settings(0, options.precision)
        reasons: dict[int, str] = {}
        try:
            library.compile(graph, settings)
        except (RunError, UnsupportedError) as error:
            reasons = _refused_ops(graph, library, settings)
            if not reasons:  # each operator alone is taken: it is the network as a whole that is refused
                raise RunError(error.message) from None
        cuts: list[tuple[Any, ExportedModel | None]] = []
        for region in regions(graph, lambda op: "reference" if op.id in reasons else library.name):
            cuts.append((region, None if region.label == "reference" else library.export(extract(graph, region))))
        fallbacks = [
            {"node": graph.op(i).name, "operator": graph.op(i).kind, "reason": r} for i, r in sorted(reasons.items())
        ]
        plan = cls(graph, library, options.precision, fallbacks, None, cuts)  # type: ignore[arg-type]
        plan.program = plan.lower(0, {})
        return plan

    def lower(self, threads: int, meta: dict[str, Any]) -> Program:
        out = Lowering(self.graph, "cpu", self.precision)
        for region, model in self._cuts:
            if model is None:
                for op in region.ops:
                    out.reference_step(op)
            else:
                out.library_step(self.library.name, region, model, Settings(threads, self.precision))
        version = self.library.version()
        needs = [f"package:{self.library.name}>={_minor(version)}"] if version and any(m for _, m in self._cuts) else []
        return out.program(needs, meta)


def _refused_ops(graph: Graph, library: Library, settings: Settings) -> dict[int, str]:
    """Each op that the library does not take on its own, with the library's reason."""
    known: dict[str, str | None] = {}
    refused: dict[int, str] = {}
    for op in graph.order():
        if op.kind in ("Input", "Output", "Constant"):
            continue
        signature = _signature(graph, op)
        if signature not in known:
            try:
                library.compile(single(graph, op), settings)
                known[signature] = None
            except (RunError, UnsupportedError) as error:
                known[signature] = error.message
        reason = known[signature]
        if reason is not None:
            refused[op.id] = reason
    return refused


def _signature(graph: Graph, op: Op) -> str:
    operands = [
        None if v is None else f"{graph.type(v)}{'c' if graph.op(v).kind == 'Constant' else ''}" for v in op.inputs
    ]
    return f"{op.kind} {op.attrs!r} {operands} {len(op.outputs)}"


def _check(
    graph: Graph,
    tactics: Mapping[str, Tactic],
    engines: Mapping[str, Engine],
    feeds: Mapping[str, Array],
    precision: str,
) -> dict[str, str]:
    """Tactics whose results are wrong, with the reason. The oracle is asked when no two libraries can vouch for each other."""
    limit = {"fp32": 1e-3, "bf16": 0.25}[precision]
    results: dict[str, dict[str, Array]] = {}
    wrong: dict[str, str] = {}
    for name, engine in engines.items():
        try:
            results[name] = engine.run(feeds)
        except RunError as error:
            wrong[name] = error.message
    libraries = {tactics[n].library.name for n in results}
    agreed = len(libraries) > 1 and all(_distance(a, b) <= limit for a in results.values() for b in results.values())
    if not agreed and results:
        oracle = evaluate(graph, feeds)
        for name, outputs in results.items():
            distance = _distance(outputs, oracle)
            if not distance <= limit:
                wrong[name] = f"its result differs from the reference by {distance:.2g} of the largest output"
    return wrong


def _distance(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
    """Largest difference over the largest magnitude, over all floating-point outputs; inf where one is not finite."""
    worst = 0.0
    for name, x in a.items():
        y = b[name]
        if not is_float(x.dtype) or x.shape != y.shape or not x.size:
            continue
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(y64)
        if not np.array_equal(np.isfinite(x64), finite):
            return float("inf")
        if finite.any():
            scale = float(np.abs(y64[finite]).max()) or 1.0
            worst = max(worst, float(np.abs(x64 - y64)[finite].max()) / scale)
    return worst


def _runner(context: Any, feeds: Mapping[str, Array]) -> Callable[[], object]:
    return lambda: context.run(feeds)


def _row(tactics: Sequence[Tactic], name: str, options: BuildOptions, **outcome: Any) -> Measured:
    tactic = next(t for t in tactics if t.name == name)
    settings = {"library": tactic.library.name, "threads": tactic.threads, "precision": options.precision}
    return Measured(name, settings, **outcome)


def _thread_counts(options: BuildOptions) -> list[int]:
    """The counts worth trying: all available cores, half of them, and one."""
    if options.threads is not None:
        return [options.threads]
    cores = usable_cores()
    return sorted({cores, max(1, cores // 2), 1}, reverse=True)


def _typical_sizes(graph: Graph) -> dict[str, int]:
    """A size per symbol for timing: 1 for a leading (batch) dimension, 32 for any other."""
    sizes: dict[str, int] = {}
    for i in graph.inputs:
        for axis, d in enumerate(graph.op(i).outputs[0].type.shape or ()):
            if not isinstance(d, int):
                for s in d.symbols():
                    sizes.setdefault(s.name, max(s.lo, min(s.hi, 1 if axis == 0 else 32)))
    return sizes


def _key(graph: Graph, tactic: Tactic, options: BuildOptions, program: Program) -> str:
    """Timing-cache key: all that the time depends on."""
    digest = hashlib.sha256()
    for step in program.steps:
        digest.update(json.dumps([step.executor, step.params], sort_keys=True, default=str).encode())
        if "model" in step.params:
            digest.update(program.blobs[step.params["model"]].data)
    version = tactic.library.version()
    return f"{digest.hexdigest()[:32]} {tactic.name} {options.precision} {tactic.library.name}-{version} {machine()['cpu']}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
