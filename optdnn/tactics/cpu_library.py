"""The libraries of the cpu target: how a graph is written for each, and what each does not take of it.

What a library does not take runs from its NumPy kernel as a step of its own; which operators those are is found out by asking
the library, not by a list.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from optdnn.dim import Dim, Function, Symbol, evaluate
from optdnn.errors import OptdnnError, RunError, ShapeError, UnsupportedError
from optdnn.ir.export_onnx import ExportedModel, export_model
from optdnn.ir.extract import Region, extract, regions, single, whole
from optdnn.ir.graph import Graph, Op
from optdnn.lower import Lowering, plain_shape, port_spec
from optdnn.runtime.cpu import onnxruntime, openvino
from optdnn.runtime.cpu.library import Settings, symbols_of
from optdnn.runtime.engine import Engine
from optdnn.runtime.executor import LibraryPart
from optdnn.runtime.machine import machine
from optdnn.runtime.program import Program
from optdnn.tactics.bounds import input_bounds
from optdnn.tactics.examine import refused_nodes
from optdnn.tactics.loops import bound_loops
from optdnn.tactics.unsafe import onnxruntime_must_not, openvino_must_not
from optdnn.types import Array

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
        model = export_model(graph, self.opset, external_weights=not inputs, weights_as_inputs=inputs)
        bound_loops(model.proto)
        return model

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


class Contender:
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
            if refused := self._refused_in(region, model):
                self._unsafe = {**self._unsafe, **refused}
                raise UnsupportedError(f"{library.name} must not run some operators")
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
        # The libraries take any position and any length: what is outside gives some number, and no error.
        bounds = input_bounds(self.graph)
        meta: dict[str, Any] = {"bounds": bounds} if bounds else {}
        return Engine(self.library.lower(self.graph, self._cuts, Settings(threads, self.base), meta, self.precision))

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
        while True:
            found = regions(self.graph, lambda op: "reference" if op.id in reasons else self.library.name)  # noqa: B023
            cuts = [(r, None if r.label == "reference" else self.library.export(extract(self.graph, r))) for r in found]
            more = {i: why for r, m in cuts if m is not None for i, why in self._refused_in(r, m).items()}
            if not more:
                break
            reasons |= more  # a part by itself shows less than the network: what proved a position may lie outside
        self.fallbacks = [
            {"node": self.graph.op(i).name, "operator": self.graph.op(i).kind, "reason": r}
            for i, r in sorted(reasons.items())
        ]
        return cuts

    def _refused_in(self, region: Region, model: ExportedModel) -> dict[int, str]:
        """Op id -> why an engine file with this part would be refused (:mod:`optdnn.tactics.examine`)."""
        graph = self.graph
        read, made = (
            tuple((graph.output(v).name, graph.type(v).dtype, plain_shape(graph.type(v))) for v in values)
            for values in (region.inputs, region.outputs)
        )
        symbols = symbols_of([port_spec(graph.op(i)) for i in graph.inputs], graph.profiles)
        part = LibraryPart(self.library.name, model.to_bytes(), model.weights, read, made, symbols)
        try:
            nodes = refused_nodes(part)
        except OptdnnError as error:
            return dict.fromkeys((op.id for op in region.ops), f"it cannot be examined: {error.message}")
        owners = {op.outputs[0].name: op.id for op in region.ops}
        found = {owners.get(model.owners.get(name, ("", ""))[1], -1): reason for name, reason in nodes.items()}
        if -1 in found:  # a node that no op owns: the part as a whole
            return dict.fromkeys((op.id for op in region.ops), found[-1])
        return found


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


def typical_sizes(graph: Graph) -> dict[str, int]:
    """A size per symbol for timing: the first profile's optimum, else 1 for a leading (batch) dimension, 32 for any other, or as
    much more (doubled) as leaves something of every tensor: a second of sound is more than 32 samples. A symbol that meets another
    size where tensors broadcast takes that size: a mask over a cache and what follows it is as long as both."""
    fixed: dict[str, int] = {name: r.opt for p in graph.profiles[:1] for name, r in p.items()}
    free: dict[str, Symbol] = {}
    for i in graph.inputs:
        for axis, d in enumerate(graph.op(i).outputs[0].type.shape or ()):
            for s in d.symbols() if isinstance(d, Dim) else ():
                if axis == 0:
                    fixed.setdefault(s.name, max(s.lo, min(s.hi, 1)))
                elif s.name not in fixed:
                    free[s.name] = s
    wanted = _sizes_of_all(graph, {*fixed, *free}) if free else {}
    met = _met(wanted, free)
    tried: list[dict[str, int]] = []
    for size in _SIZES:
        sizes = {**{n: max(s.lo, min(s.hi, size)) for n, s in free.items()}, **fixed}
        for name, other in met.items():
            if _positive(other, sizes):
                sizes[name] = max(free[name].lo, min(free[name].hi, evaluate(other, sizes)))
        tried.append(sizes)
        if all(_positive(d, sizes) for d in wanted):
            return sizes
    return tried[0]


_SIZES = tuple(32 << k for k in range(12))
"""What dimensions that nothing is known of are tried with: 32 to 65,536."""


def _met(dims: Collection[Dim], free: Mapping[str, Symbol]) -> dict[str, Dim]:
    """Each free symbol that broadcasts with another size (the result's is ``max(symbol, size)``) and is in no such size itself."""
    met: dict[str, Dim] = {}
    used: set[str] = set()
    for d in dims:
        for atom in (a for monomial, _ in d.terms for a in monomial if isinstance(a, Function) and a.op == "max"):
            for own, other in ((atom.a, atom.b), (atom.b, atom.a)):
                name = next((n for n, s in free.items() if own == Dim((((s,), 1),))), None)
                if name is None or name in met or name in used or not isinstance(other, Dim):
                    continue
                names = {s.name for s in other.symbols()}
                if name not in names and not names & met.keys():
                    met[name] = other
                    used |= names
                    break
    return met


def _positive(d: Dim, sizes: Mapping[str, int]) -> bool:
    try:
        return evaluate(d, sizes) > 0
    except ShapeError:  # a division by a size that is 0
        return False


def _sizes_of_all(graph: Graph, symbols: Collection[str]) -> dict[Dim, None]:
    """The dimensions of all tensors that follow from ``symbols`` alone, each once."""
    dims = (d for op in graph.ops() for out in op.outputs for d in out.type.shape or ())
    return {d: None for d in dims if isinstance(d, Dim) and all(s.name in symbols for s in d.symbols())}


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
