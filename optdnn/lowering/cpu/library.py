"""The libraries of the cpu target: how a graph is written for each library, and which operators each one does not run.

Such an operator runs elsewhere: on the other library if it can run it, otherwise from its NumPy kernel as a separate step. A
separate process tries such operators on a library. Operators that a library would accept but must not run are in
:mod:`optdnn.lowering.cpu.unsafe`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.errors import OptdnnError, RunError, UnsupportedError
from optdnn.ir.body import custom_digests
from optdnn.ir.export_onnx import ExportedModel, export_model
from optdnn.ir.extract import Region, extract, regions, single, whole
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.lowering.bounds import input_bounds
from optdnn.lowering.cpu.empty_sizes import may_be_empty
from optdnn.lowering.cpu.examine import refused_nodes
from optdnn.lowering.cpu.loops import bound_loops
from optdnn.lowering.cpu.onnxruntime_faults import keep_softmax
from optdnn.lowering.cpu.process_guards import guard
from optdnn.lowering.cpu.trials import Trial, Trials
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.lowering.cpu.unsafe import onnxruntime_must_not, openvino_must_not
from optdnn.lowering.steps import Lowering, plain_shape, port_spec
from optdnn.runtime.cpu import onnxruntime, openvino
from optdnn.runtime.cpu.library import Settings, symbols_of
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import machine
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LibraryPart
from optdnn.types import Array


@dataclass(frozen=True)
class Cut:
    """A region and its executor: a library with its model, or (without a library) NumPy kernels, operator by operator."""

    region: Region
    library: Library | None = None
    model: ExportedModel | None = None
    base: str = ""
    """The float precision requested from the library, if it is not the program's."""


@functools.cache
def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Library:
    """One CPU library: how the graph is written for it."""

    name: str
    weights: str
    """How large weights are passed: as "external" initializers, or as graph "inputs"."""
    refuses: Callable[[str], str | None]
    """Why the library cannot run a precision on this machine, or None."""
    unsafe: Callable[[Graph], Mapping[int, str]] = lambda graph: {}
    """Ops that the library would accept but must not run, with the reason."""

    def version(self) -> str | None:
        """Installed version, or None."""
        return _installed(self.name)

    def export(self, graph: Graph) -> ExportedModel:
        inputs = self.weights == "inputs"
        model = export_model(graph, external_weights=not inputs, weights_as_inputs=inputs)
        bound_loops(model.proto)
        if self.name == "onnxruntime":
            guard(model.proto, graph)
            keep_softmax(model.proto)
        return model


def lower(
    graph: Graph, cuts: Sequence[Cut], threads: int, base: str, meta: dict[str, Any], precision: str = ""
) -> Program:
    """The program of a graph cut into regions. ``base`` is the float precision requested from the libraries; ``precision`` is
    the name of the whole."""
    out = Lowering(graph, "cpu", precision or base)
    for cut in cuts:
        if cut.library is None or cut.model is None:
            for op in cut.region.ops:
                out.reference_step(op)
        elif cut.region.ops:
            empty = may_be_empty(graph, cut.region) if cut.library.name == "openvino" else None
            out.library_step(cut.library.name, cut.region, cut.model, Settings(threads, cut.base or base), empty)
    used = {c.library.name: c.library.version() for c in cuts if c.library is not None}
    needs = [f"package:{name}>={_minor(version)}" for name, version in sorted(used.items()) if version]
    return out.program(needs, meta)


LIBRARIES: dict[str, Library] = {
    "openvino": Library("openvino", "inputs", openvino.refuses, openvino_must_not),
    "onnxruntime": Library("onnxruntime", "external", onnxruntime.refuses, onnxruntime_must_not),
}


class Contender:
    """One library on one graph: the graph as the library reads it, cut at operators that the library does not run.

    Such operators run on ``helper`` if there is one that can run them, otherwise from their NumPy kernels. Some are known
    beforehand (:mod:`optdnn.lowering.cpu.unsafe`, and ops that an opset cannot express). If the library refuses the network,
    or crashes, each operator is tried alone.
    """

    def __init__(self, graph: Graph, library: Library, base: str, precision: str = "", helper: Library | None = None):
        self.graph, self.library, self.base, self.precision = graph, library, base, precision or base
        self._helper = helper
        self._reasons: dict[int, str] = dict(library.unsafe(graph))
        self._unhelped: set[int] = set() if helper is None else set(helper.unsafe(graph))
        self._probed: dict[int, str] | None = None
        self._make_cuts()
        sizes = sorted(typical_sizes(graph).items()) if graph.profiles else ""
        digest = hashlib.sha256(repr((precision, library.name, library.version(), machine()["cpu"], sizes)).encode())
        for cut in self._cuts:
            digest.update(cut.model.to_bytes() if cut.model is not None else b"")
        self._digest = digest.hexdigest()[:32]

    def tactic(self, threads: int) -> str:
        return f"{self.library.name}/{threads}t"

    def key(self, threads: int) -> str:
        """Timing-cache key: everything that the time depends on."""
        return f"{self.tactic(threads)} {self.precision} {self.library.version()} {machine()['cpu']} {self._digest}"

    def settings(self, threads: int) -> dict[str, Any]:
        return {"library": self.library.name, "threads": threads, "precision": self.precision}

    @property
    def fallbacks(self) -> list[dict[str, str]]:
        """The operators that the library does not run, with the reason and who runs them."""
        return [
            {
                "node": self.graph.op(i).name,
                "operator": self.graph.op(i).kind,
                "reason": reason,
                **({"library": self._helper.name} if self._helper is not None and i not in self._unhelped else {}),
            }
            for i, reason in sorted(self._reasons.items())
        ]

    @property
    def helped(self) -> bool:
        """Whether another library runs a part of the network."""
        return self._helper is not None and any(cut.library is self._helper for cut in self._cuts)

    def alone(self) -> Contender:
        """The same without another library."""
        return Contender(self.graph, self.library, self.base, self.precision)

    @property
    def cut(self) -> dict[str, str]:
        """The operators that the library refused in its trial: the first output's name -> the reason."""
        return {self.graph.op(i).outputs[0].name: reason for i, reason in (self._probed or {}).items()}

    def tried(self, trials: Trials, threads: int) -> Trial:
        """The candidate, compiled in a separate process; cut once more if the library refuses the network as it is.

        Raises RunError if the library accepts every operator alone: then it refuses only the network as a whole."""
        custom = bool(custom_digests(self.graph))
        try:
            return trials.open(self.program(threads), threads, custom=custom)
        except RunError:
            if self._probed is not None or not self._probe(trials):
                raise
            return trials.open(self.program(threads), threads, custom=custom)

    def cut_again(self, found: Mapping[str, str]) -> None:
        """Cut at the operators that an earlier trial found (:attr:`cut`)."""
        self._probed = {
            op.id: found[op.outputs[0].name] for op in self.graph.ops() if op.outputs and op.outputs[0].name in found
        }
        self._reasons = {**self._probed, **self._reasons}
        self._make_cuts()

    def program(self, threads: int) -> Program:
        # The libraries accept any position and length: one out of range gives a wrong number instead of an error.
        bounds = input_bounds(self.graph)
        meta: dict[str, Any] = {"bounds": bounds} if bounds else {}
        return lower(self.graph, self._cuts, threads, self.base, meta, self.precision)

    def engine(self, threads: int) -> Engine:
        """Open the candidate in this process, after it has been tried."""
        return Engine(self.program(threads))

    def ran(self, engine: Engine, feeds: Mapping[str, Array] | None) -> dict[str, str]:
        """The precisions that the library reports for the ops that anchor kernels: key -> precision. ONNX Runtime computes in the
        types of operands, so it is asked only for quantized networks. The report needs inputs, so it is asked only if it has the
        whole network."""
        found: dict[str, str] = {}
        executors = iter(engine.executors)
        for cut in self._cuts:
            region, model = cut.region, cut.model
            if model is None:
                for _ in region.ops:
                    next(executors, None)
                continue
            executor = next(executors, None) if region.ops else None
            if executor is None or cut.library is not self.library:
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

    def _make_cuts(self) -> None:
        """Cut around the operators that the library must not or cannot run."""
        if not self._reasons:
            region = whole(self.graph)
            try:
                model = self.library.export(extract(self.graph, region))
                self._reasons = self._refused_in(self.library, region, model)
                if not self._reasons:
                    self._cuts = [Cut(region, self.library, model)]
                    return
            except UnsupportedError:  # an operator that its opset cannot express
                pass
        inexpressible = _inexpressible(self.graph, self.library, self._computing() - self._reasons.keys())
        self._reasons = {**inexpressible, **self._reasons}
        if self._helper is not None:
            left = self._reasons.keys() - self._unhelped
            self._unhelped |= _inexpressible(self.graph, self._helper, left).keys()
        while True:
            made, more = self._regions()
            if not more:
                break
            # The proof that a position is in range may be outside of the part.
            for i, (library, reason) in more.items():
                if library is self.library:
                    self._reasons.setdefault(i, reason)
                else:
                    self._unhelped.add(i)
        if self._helper is not None and all(cut.library is not self.library for cut in made):
            self._helper = None  # it tries the whole network itself; here NumPy kernels remain
            self._make_cuts()
        else:
            self._cuts = made

    def _regions(self) -> tuple[list[Cut], dict[int, tuple[Library, str]]]:
        """The current regions, and each op that would make an engine file with its region invalid."""
        names = {op.id: self._by(op.id) for op in self.graph.ops()}
        made: list[Cut] = []
        more: dict[int, tuple[Library, str]] = {}
        for region in regions(self.graph, lambda op: names[op.id]):
            library = {c.name: c for c in (self.library, self._helper) if c is not None}.get(region.label)
            model = None if library is None else library.export(extract(self.graph, region))
            if library is not None and model is not None:
                more |= {i: (library, why) for i, why in self._refused_in(library, region, model).items()}
            made.append(Cut(region, library, model, "fp32" if library is self._helper else ""))
        return made, more

    def _by(self, op: int) -> str:
        """The executor of an op."""
        if op not in self._reasons:
            return self.library.name
        return "reference" if self._helper is None or op in self._unhelped else self._helper.name

    def _computing(self) -> set[int]:
        return {op.id for op in self.graph.ops() if op.kind not in STRUCTURAL}

    def _probe(self, trials: Trials) -> bool:
        """Try each operator alone, on the library that is to run it. True if an operator is refused that was not refused before."""
        ids = self._computing() - self._reasons.keys()
        self._probed = _refused_ops(self.graph, self.library, ids, self.base, trials)
        self._reasons |= self._probed
        unhelped: dict[int, str] = {}
        if self._helper is not None:
            ids = self._reasons.keys() - self._unhelped
            unhelped = _refused_ops(self.graph, self._helper, ids, "fp32", trials)
            self._unhelped |= unhelped.keys()
        if self._probed or unhelped:
            self._make_cuts()
        return bool(self._probed or unhelped)

    def _refused_in(self, library: Library, region: Region, model: ExportedModel) -> dict[int, str]:
        """Op id -> why an engine file with this part would be refused (:mod:`optdnn.lowering.cpu.examine`)."""
        graph = self.graph
        read, made = (
            tuple((graph.output(v).name, graph.type(v).dtype, plain_shape(graph.type(v))) for v in values)
            for values in (region.inputs, region.outputs)
        )
        symbols = symbols_of([port_spec(graph, i) for i in graph.inputs], graph.profiles)
        part = LibraryPart(library.name, model.to_bytes(), model.weights, read, made, symbols)
        try:
            nodes = refused_nodes(part)
        except OptdnnError as error:
            return dict.fromkeys((op.id for op in region.ops), f"it cannot be examined: {error.message}")
        owners = {op.outputs[0].name: op.id for op in region.ops}
        found = {owners.get(model.owners.get(name, ("", ""))[1], -1): reason for name, reason in nodes.items()}
        if -1 in found:  # the node belongs to no op: the part as a whole is refused
            return dict.fromkeys((op.id for op in region.ops), found[-1])
        return found


_ANCHORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _of_operator(name: str) -> str:
    """int8 for ONNX Runtime's quantized operators, judged by their names."""
    return "int8" if name.startswith(("QLinear", "QGemm", "QAttention")) or "Integer" in name else "fp32"


def _inexpressible(graph: Graph, library: Library, ids: Collection[int]) -> dict[int, str]:
    """The ops that the library's opset cannot express, with the reason."""
    return _failing(graph, [op for op in graph.order() if op.id in ids], library.export)


def _refused_ops(graph: Graph, library: Library, ids: Collection[int], base: str, trials: Trials) -> dict[int, str]:
    """The ops that the library refuses on their own, with the library's reason."""

    def attempt(part: Graph) -> None:
        cut = Cut(whole(part), library, library.export(part))
        trials.open(lower(part, [cut], 0, base, {}), 1).close()

    return _failing(graph, [op for op in graph.order() if op.id in ids and op.kind != "Custom"], attempt)


def _failing(graph: Graph, ops: Sequence[Op], attempt: Callable[[Graph], object]) -> dict[int, str]:
    """Op id -> why ``attempt`` fails on a graph of that op alone. Only the first of several equal ops is tried."""
    known: dict[str, str | None] = {}
    for op in ops:
        signature = _signature(graph, op)
        if signature not in known:
            try:
                attempt(single(graph, op))
                known[signature] = None
            except UnsupportedError as error:  # the graph has one operator: the reason is complete
                known[signature] = "; ".join(dict.fromkeys(n.reason for n in error.nodes)) or error.message
            except RunError as error:
                known[signature] = error.message
    reasons = {op.id: known[_signature(graph, op)] for op in ops}
    return {op: reason for op, reason in reasons.items() if reason is not None}


def _signature(graph: Graph, op: Op) -> str:
    operands = [
        None if v is None else f"{graph.type(v)}{'c' if graph.op(v).kind == 'Constant' else ''}" for v in op.inputs
    ]
    return f"{op.kind} {op.attrs!r} {operands} {len(op.outputs)}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
