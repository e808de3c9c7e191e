"""Tactics of the cpu target: OpenVINO and ONNX Runtime on the optimized graph, with several thread counts, by measurement.

Neither library always wins, so both are tried on the very network. What a library does not take runs from its NumPy
kernel as a step of its own; which operators those are is found out by asking the library, not by a list.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, RunError, UnsupportedError
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.export_onnx import ExportedModel, export_model
from optdnn.ir.extract import Region, extract, regions, single, whole
from optdnn.ir.graph import Graph, Op
from optdnn.lower import Lowering
from optdnn.runtime.cpu import onnxruntime, openvino
from optdnn.runtime.cpu.huge_pages import settle
from optdnn.runtime.cpu.library import Settings
from optdnn.runtime.engine import Engine
from optdnn.runtime.machine import machine, usable_cores
from optdnn.runtime.program import Program
from optdnn.tactics.base import Measured, fastest, take_turns
from optdnn.tactics.timing_cache import TimingCache
from optdnn.tactics.unsafe import onnxruntime_must_not, openvino_must_not
from optdnn.types import BF16, FP16, Array, is_float, is_int

Progress = Callable[[str], None]
Cut: TypeAlias = tuple[Region, ExportedModel | None]
"""A region with its model; without one, its operators run from NumPy kernels."""


@dataclass(frozen=True)
class Library:
    """One CPU library: how the graph is written for it."""

    name: str
    opset: int
    weights: str
    """How large weights travel: "external" initializers, or graph "inputs"."""
    refuses: Callable[[str], str | None]
    """Why the library cannot run in a precision at all on this machine, or None."""
    unsafe: Callable[[Graph], Mapping[int, str]] = lambda graph: {}
    """Ops that it would take and must not, with the reason."""

    def version(self) -> str | None:
        """Installed version, or None."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def export(self, graph: Graph) -> ExportedModel:
        inputs = self.weights == "inputs"
        return export_model(graph, self.opset, external_weights=not inputs, weights_as_inputs=inputs)

    def lower(
        self, graph: Graph, cuts: Sequence[Cut], settings: Settings, meta: dict[str, Any], precision: str = ""
    ) -> Program:
        """The program of a graph cut into regions: this library's, and (without a model) those of NumPy kernels.

        ``precision`` is what the whole goes by; the library's own settings name the float precision alone.
        """
        out = Lowering(graph, "cpu", precision or settings.precision)
        for region, model in cuts:
            if model is None:
                for op in region.ops:
                    out.reference_step(op)
            elif region.ops:
                out.library_step(self.name, region, model, settings)
        version = self.version()
        used = any(model is not None for _, model in cuts)
        needs = [f"package:{self.name}>={_minor(version)}"] if version and used else []
        return out.program(needs, meta)


LIBRARIES: dict[str, Library] = {
    "openvino": Library("openvino", 21, "inputs", openvino.refuses, openvino_must_not),
    "onnxruntime": Library("onnxruntime", 21, "external", onnxruntime.refuses, onnxruntime_must_not),
}


@dataclass
class Choice:
    """The program that was chosen and why."""

    engine: Engine
    rows: list[Measured]
    fallbacks: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Per library, the operators that run from their NumPy kernels and why."""
    ran: dict[str, str] = field(default_factory=dict)
    """The first output of an op -> the precision in which the chosen library says it runs; those it does not tell of are absent."""
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
) -> Choice:
    """Try every tactic that ``options`` allows on ``graph``, and keep the fastest that is right.

    ``base`` is the float precision that is asked of the libraries (default: the options'); a graph that holds several types
    says itself what computes in which, and wants "fp32". ``label`` is what the engine's precision is called.
    Raises MissingDependency when no library is installed, UnsupportedError when each one refuses the network.
    """
    search = _Search(graph, options, cache, progress, base or options.base_precision, label or options.precision)
    cores = options.threads or usable_cores()
    search.measure([(c, cores) for c in search.contenders])
    if options.threads is None:
        search.measure(
            [(c, n) for c in search.near_best() for n in _fewer_threads(cores, search.times[c.tactic(cores)])]
        )
    return search.conclude(meta)


def compile_with(graph: Graph, library: str, precision: str, threads: int) -> Engine:
    """``graph`` on one library, nothing measured; raises RunError or UnsupportedError where the library refuses it."""
    return _Contender(
        graph, LIBRARIES[library], precision.partition("+")[2] or precision.replace("int8", "fp32"), precision
    ).engine(threads)


SMALL_MS = 3.0
"""Networks quicker than this may lose more by waking threads than they gain."""
NEAR = 1.25
"""Libraries within this factor of the fastest are tried with other thread counts."""


def _fewer_threads(cores: int, median_ms: float) -> list[int]:
    """The smaller thread counts worth trying: half of many cores, one for a small network."""
    counts = ([cores // 2] if cores > 4 else []) + ([1] if cores > 1 and median_ms < SMALL_MS else [])
    return sorted(set(counts), reverse=True)


class _Search:
    """The state of one search: who is in it, what has been measured, who was refused and why."""

    def __init__(
        self, graph: Graph, options: BuildOptions, cache: TimingCache, progress: Progress, base: str, label: str
    ):
        self.graph, self.options, self.cache, self.progress = graph, options, cache, progress
        self.base, self.label = base, label
        self.times: dict[str, float] = {}
        self.cached: set[str] = set()
        self.refused: dict[str, tuple[dict[str, Any], str]] = {}
        self.engines: dict[str, Engine] = {}
        self.owner: dict[str, tuple[_Contender, int]] = {}
        self.contenders: list[_Contender] = []
        self.untimed = ""
        self.doubts: dict[str, str] = {}
        wanted = list(LIBRARIES) if options.tactics == "auto" else [options.tactics]
        for name in wanted:
            if LIBRARIES[name].version() is None:
                self._refuse(name, {}, "not installed: pip install 'optdnn[cpu]'")
            elif (reason := LIBRARIES[name].refuses(base)) is not None:
                self._refuse(name, {}, reason)
            else:
                try:
                    self.contenders.append(_Contender(graph, LIBRARIES[name], base, label))
                except UnsupportedError as error:
                    self._refuse(name, {}, error.message)
        if len(self.refused) == len(wanted) and all("not installed" in reason for _, reason in self.refused.values()):
            raise MissingDependency(" or ".join(wanted), "cpu", "for the cpu target")

    def _refuse(self, name: str, settings: dict[str, Any], reason: str) -> None:
        self.refused[name] = ({"precision": self.label, **settings}, reason)

    def measure(self, wanted: Sequence[tuple[_Contender, int]]) -> None:
        """Find the time of each (library, threads): from the cache, else compiled, checked and timed in turns."""
        fresh: dict[str, Engine] = {}
        for contender, threads in wanted:
            name = contender.tactic(threads)
            self.owner[name] = (contender, threads)
            known = self.cache.get(contender.key(threads))
            if known is not None:
                self.times[name] = known
                self.cached.add(name)
                continue
            self.progress(f"compile {name}")
            try:
                fresh[name] = contender.engine(threads)
            except RunError as error:
                self._refuse(name, contender.settings(threads), error.message)
        if not fresh:
            return
        self.engines.update(fresh)
        self.progress("check results")
        feeds = self._feeds
        if feeds is None:
            return
        wrong, doubts = _check(self.graph, fresh, feeds, self.base)
        self.doubts.update(doubts)
        for name, reason in wrong.items():
            contender, threads = self.owner[name]
            self._refuse(name, contender.settings(threads), reason)
            del fresh[name], self.engines[name]
        runners = {name: _runner(engine.context(), feeds) for name, engine in fresh.items()}
        if runners:
            for run in runners.values():
                run()
            settle()
            times = take_turns(runners, tick=lambda name: self.progress(f"time {name}"))
            for name, ms in times.items():
                contender, threads = self.owner[name]
                self.times[name] = round(ms, 4)
                self.cache.put(contender.key(threads), self.times[name])

    @functools.cached_property
    def _feeds(self) -> Mapping[str, Array] | None:
        """Inputs to check and time with; None where none are found that the network takes.

        Integers and short float inputs may be axes, sizes, pads, positions or scales, which not every value fits, and what
        a library does then ranges from an error to a crash of the process. So the oracle is asked first, and such inputs
        are 1 if they may be, else 0.
        """
        feeds = random_feeds(self.graph, seed=1, sizes=typical_sizes(self.graph))
        if not any(is_int(a.dtype) or a.ndim < 2 for a in feeds.values()):
            return feeds
        for control, other in ((1, None), (0, None), (1, 0), (0, 0), (None, None)):
            tried = dict(feeds)
            for name, array in feeds.items():
                integer = is_int(array.dtype)
                fill = other if array.ndim > 1 else control if integer or control is None else 1
                if fill is not None and (integer or array.ndim < 2):
                    tried[name] = np.full_like(array, fill)
            try:
                evaluate(self.graph, tried)
                return tried
            except RunError as error:
                self.untimed = f"not timed: it takes none of the made-up inputs ({error.message})"
        return None

    def near_best(self) -> list[_Contender]:
        """Contenders whose best time is within NEAR of the best of all."""
        if not self.times:
            return []
        limit = NEAR * min(self.times.values())
        return list(dict.fromkeys(self.owner[n][0] for n, ms in self.times.items() if ms <= limit))

    def conclude(self, meta: dict[str, Any]) -> Choice:
        """The fastest as an engine that carries ``meta``, and the account of all."""
        rows = []
        for name, ms in sorted(self.times.items(), key=lambda item: (item[1], item[0])):
            settings = self.owner[name][0].settings(self.owner[name][1])
            rows.append(Measured(name, settings, ms, cached=name in self.cached, note=self.doubts.get(name)))
        rows += [Measured(name, settings, refused=reason) for name, (settings, reason) in sorted(self.refused.items())]
        best = fastest(rows)
        if best is None and self.engines:  # no inputs to time with: the library that checks the user's comes first
            name = min(self.engines, key=lambda n: (not n.startswith("onnxruntime"), n))
            best = Measured(name, self.owner[name][0].settings(self.owner[name][1]), refused=self.untimed)
            rows.insert(0, best)
        if best is None:
            reasons = "; ".join(f"{r.name}: {r.refused}" for r in rows)
            raise UnsupportedError(f"no tactic of the cpu target runs this network in {self.label}: {reasons}")
        contender, threads = self.owner[best.name]
        engine = self.engines.get(best.name) or contender.engine(threads)
        engine.program.meta.update(
            meta, tactic={"name": best.name, "library": contender.library.name, "threads": threads}
        )
        fallbacks = {c.library.name: c.fallbacks for c in self.contenders if c.fallbacks}
        ran = contender.ran(engine, self._feeds if contender.library.name == "onnxruntime" else None)
        return Choice(engine, rows, fallbacks, ran, contender.library.name)


class _Contender:
    """One library on one graph: the graph as the library reads it, cut where the library does not take an operator."""

    def __init__(self, graph: Graph, library: Library, base: str, precision: str = ""):
        self.graph, self.library, self.base, self.precision = graph, library, base, precision or base
        self.fallbacks: list[dict[str, str]] = []
        region = whole(graph)
        self._unsafe = library.unsafe(graph)
        try:
            if self._unsafe:
                raise UnsupportedError(f"{library.name} must not run some operators")
            model = library.export(extract(graph, region))
        except UnsupportedError:  # an operator that its opset cannot express, or that it must not run: cut around it
            self._cuts = self._cut()
        else:
            self._cuts = [(region, model)]
        sizes = sorted(typical_sizes(graph).items()) if graph.profiles else ""
        digest = hashlib.sha256(repr((precision, library.name, library.version(), machine()["cpu"], sizes)).encode())
        for _, part in self._cuts:
            digest.update(part.to_bytes() if part is not None else b"")
        self._digest = digest.hexdigest()[:32]

    def tactic(self, threads: int) -> str:
        return f"{self.library.name}/{threads}t"

    def key(self, threads: int) -> str:
        """Timing-cache key: names all that the time depends on."""
        return f"{self.tactic(threads)} {self.precision} {self.library.version()} {machine()['cpu']} {self._digest}"

    def settings(self, threads: int) -> dict[str, Any]:
        return {"library": self.library.name, "threads": threads, "precision": self.precision}

    def engine(self, threads: int) -> Engine:
        """Compile. When the library refuses the network, the operators it refuses are cut out and run from NumPy."""
        try:
            return self._engine(threads)
        except RunError:
            if self.fallbacks:
                raise
            cuts = self._cut()
            if not self.fallbacks:  # each operator alone is taken: it is the network as a whole that is refused
                raise
            self._cuts = cuts
            return self._engine(threads)

    def _engine(self, threads: int) -> Engine:
        return Engine(self.library.lower(self.graph, self._cuts, Settings(threads, self.base), {}, self.precision))

    def ran(self, engine: Engine, feeds: Mapping[str, Array] | None) -> dict[str, str]:
        """What the library says of the ops that anchor kernels: key -> precision. ONNX Runtime computes in the types of operands,
        so it is asked for quantized networks alone, and (needing inputs for that) where it has the whole network."""
        found: dict[str, str] = {}
        executors = iter(engine.executors)
        for region, model in self._cuts:
            if model is None:
                for _ in region.ops:
                    next(executors, None)
                continue
            executor = next(executors, None) if region.ops else None
            if executor is None:
                continue
            if self.library.name == "openvino":
                said = executor.layers()
                told = {name: said.get(name) for name in model.owners}
            elif feeds is not None and len(self._cuts) == 1 and self.graph.of_kind("QuantizeLinear"):
                operators = executor.layers([feeds[self.graph.output(v).name] for v in region.inputs])
                told = {n: None if n not in operators else _of_operator(operators[n]) for n in model.owners}
            else:
                continue
            kinds = {op.outputs[0].name: op.kind for op in region.ops}
            for name, (op_type, key) in model.owners.items():
                precision = told.get(name)
                if precision is None or op_type != kinds.get(key):
                    continue
                if op_type in _ANCHORS or (self.base != "fp32" and precision != "int8"):
                    found[key] = precision
        return found

    def _cut(self) -> list[Cut]:
        reasons = {**_refused_ops(self.graph, self.library, Settings(0, self.base)), **self._unsafe}
        self.fallbacks = [
            {"node": self.graph.op(i).name, "operator": self.graph.op(i).kind, "reason": r}
            for i, r in sorted(reasons.items())
        ]
        found = regions(self.graph, lambda op: "reference" if op.id in reasons else self.library.name)
        return [(r, None if r.label == "reference" else self.library.export(extract(self.graph, r))) for r in found]


_ANCHORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _of_operator(name: str) -> str:
    """int8 for ONNX Runtime's quantized operators, by their names."""
    return "int8" if name.startswith(("QLinear", "QGemm", "QAttention")) or "Integer" in name else "fp32"


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
                part = single(graph, op)
                Engine(library.lower(part, [(whole(part), library.export(part))], settings, {}))
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
    graph: Graph, engines: Mapping[str, Engine], feeds: Mapping[str, Array], precision: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Tactics whose results are wrong, and those whose results cannot be judged, with the reasons.

    The oracle is asked when no two libraries vouch for each other. A network that selects (a detector on made-up inputs)
    may itself turn a roundoff into another result: what differs no more than that is not called wrong.
    """
    limit = {"fp32": 1e-3, "bf16": 0.25}[precision]
    quantized = bool(graph.of_kind(*_ROUNDS))
    if quantized:
        limit = max(
            limit, 0.1
        )  # a value on the edge between two integers falls either way: steps of 1/255, layers deep
    types = {o.type.dtype for op in graph.ops() for o in op.outputs}
    limit = max(
        limit, 2**-5 if BF16 in types else 2**-8 if FP16 in types else 0.0
    )  # a few roundoffs of the model's own
    results: dict[str, dict[str, Array]] = {}
    wrong: dict[str, str] = {}
    for name, engine in engines.items():
        try:
            results[name] = engine.run(feeds)
        except RunError as error:
            wrong[name] = error.message
    libraries = {name.split("/")[0] for name in results}
    first = next(iter(results.values()), None)
    if first is None or (len(libraries) > 1 and all(_distance(r, first) <= limit for r in results.values())):
        return wrong, {}
    oracle = evaluate(graph, feeds)
    distances = {name: _distance(outputs, oracle) for name, outputs in results.items()}
    doubts: dict[str, str] = {}
    own = 0.0
    if any(not d <= limit for d in distances.values()):
        own = _own_error(graph, feeds, oracle, _STEP if quantized else _NUDGE)
        if quantized:  # another result is no nearer than 1: half of that still tells the network from any other
            limit = max(limit, min(_MARGIN * own, 0.5))
    for name, distance in distances.items():
        if distance <= limit:
            continue
        if limit < own and distance <= _MARGIN * own:
            doubts[name] = (
                f"its result differs from the reference by {distance:.2g} of the largest output, and the network's own "
                f"by {own:.2g} when its input changes by {_STEP if quantized else _NUDGE:.1g}: no made-up input can judge it"
            )
        else:
            wrong[name] = f"its result differs from the reference by {distance:.2g} of the largest output"
    return wrong, doubts


_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
_NUDGE = 2.0**-20
_STEP = 2.0**-10
"""A nudge of a quarter of a step of 8-bit integers."""
_MARGIN = 4


def _own_error(graph: Graph, feeds: Mapping[str, Array], oracle: Mapping[str, Array], nudge: float = _NUDGE) -> float:
    """How far the reference's own results move when each floating-point input changes by ``nudge`` of itself."""
    signs = np.random.default_rng(0)
    nudged = {
        name: (x * (1 + nudge * signs.choice((-1, 1), x.shape))).astype(x.dtype) if is_float(x.dtype) else x
        for name, x in feeds.items()
    }
    return _distance(evaluate(graph, nudged), oracle)


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


def typical_sizes(graph: Graph) -> dict[str, int]:
    """A size per symbol for timing: the first profile's optimum, else 1 for a leading (batch) dimension, 32 for any other."""
    sizes: dict[str, int] = {name: r.opt for p in graph.profiles[:1] for name, r in p.items()}
    for i in graph.inputs:
        for axis, d in enumerate(graph.op(i).outputs[0].type.shape or ()):
            if not isinstance(d, int):
                for s in d.symbols():
                    sizes.setdefault(s.name, max(s.lo, min(s.hi, 1 if axis == 0 else 32)))
    return sizes


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
