"""Every part of a network is examined before a CPU library gets it: by the build that writes it, and by the loader.

A library trusts the ONNX that it is given. An engine file is untrusted input, and its ONNX may ask a library to read files, to
address memory outside of its operands, or to run forever. So a part is accepted only if

* it has the form that :mod:`optdnn.ir.export_onnx` writes: these fields of the protobuf, this opset, operators of our table, names
  that are defined once, no tensor in a file except the engine's own named weights, the program's types of inputs and outputs;
* every Loop is bounded (:mod:`optdnn.lowering.cpu.loops`);
* operators that end the process on some operands are guarded (:mod:`optdnn.lowering.cpu.process_guards`);
* the importer accepts it: operands, attributes and known values fit each operator, constant indices are in range;
* the library's rules (:mod:`optdnn.lowering.cpu.unsafe`) allow each operator, also in the bodies of If, Loop and Scan.

Only facts that follow from the part itself and from the sizes of the network's inputs count. Sizes that other steps compute are
unknown here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import TensorProto

from optdnn.dim_text import parse_dim
from optdnn.errors import EngineError, OptdnnError
from optdnn.importers.external_data import ExternalData
from optdnn.importers.model import Model, open_model
from optdnn.importers.onnx import import_model
from optdnn.importers.tensors import element_type
from optdnn.ir.body import bodies
from optdnn.ir.export_onnx import DOMAINS
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.loops import graphs_of, unbounded
from optdnn.lowering.cpu.process_guards import unguarded
from optdnn.lowering.cpu.unsafe import onnxruntime_must_not, openvino_must_not
from optdnn.ops.base import Unsupported
from optdnn.ops.exchange import OPSET
from optdnn.ops.table import IMPORTERS
from optdnn.ranges import DimRange
from optdnn.runtime.steps.executor import LibraryPart
from optdnn.types import Array, DType

RULES: Mapping[str, Callable[[Graph], Mapping[int, str]]] = {
    "onnxruntime": onnxruntime_must_not,
    "openvino": openvino_must_not,
}
"""CPU library -> the operators of a graph that it must not run, with reasons."""
FOREIGN_OPERATORS = {
    "ai.onnx.ml": frozenset({"TreeEnsembleRegressor", "TreeEnsembleClassifier"}),
    "com.microsoft": frozenset({"GatherBlockQuantized", "MatMulNBits"}),
}
"""Operators of other domains that the exporter writes."""
HINT = "do not use this file, or rebuild the engine with this version"
WEIGHTS = "weights"
"""The exporter's name for the place of weights that are handed over by name."""
_FORM: Mapping[str, frozenset[str]] = {
    "ModelProto": frozenset({"ir_version", "producer_name", "graph", "opset_import"}),
    "OperatorSetIdProto": frozenset({"domain", "version"}),
    "GraphProto": frozenset({"name", "node", "initializer", "input", "output"}),
    "NodeProto": frozenset({"name", "op_type", "domain", "input", "output", "attribute"}),
    "AttributeProto": frozenset({"name", "type", "i", "f", "s", "t", "g", "ints", "floats", "strings"}),
    "TensorProto": frozenset({"name", "data_type", "dims", "raw_data", "data_location", "external_data"}),
    "StringStringEntryProto": frozenset({"key", "value"}),
    "ValueInfoProto": frozenset({"name", "type"}),
    "TypeProto": frozenset({"tensor_type"}),
    "Tensor": frozenset({"elem_type", "shape"}),
    "TensorShapeProto": frozenset({"dim"}),
    "Dimension": frozenset({"dim_value", "dim_param"}),
}
"""Kind of message -> the fields that the exporter writes."""


def examine(part: LibraryPart) -> None:
    """Raises EngineError for a part of an engine that must not be given to its library, with the reason."""
    try:
        refused = refused_nodes(part)
    except OptdnnError as error:
        what = f"the engine's network for {part.library} is not one that optdnn writes: {error.message}"
        raise EngineError(what, hint=HINT) from error
    for node, reason in refused.items():
        raise EngineError(f"the engine gives {node!r} to {part.library}, which must not run it: {reason}", hint=HINT)


def refused_nodes(part: LibraryPart) -> dict[str, str]:
    """Name of a node -> why the library must not run it. Raises OptdnnError if the part as a whole is invalid."""
    proto = _parse(part.model)
    _check_form(proto)
    _check_header(proto)
    _check_names(proto.graph)
    _check_operators(proto.graph)
    _check_ports(proto.graph, part)
    if loops := unbounded(proto):
        raise EngineError(f"the loop {loops[0]!r} has no bound")
    named = set(_names(proto.graph))
    graph = _imported(proto, part)
    if unseen := sorted(named - _seen(graph)):
        raise EngineError(f"the node {unseen[0]!r:.60} does nothing, and cannot be judged")
    found = {min(graph.op(i).src, default=graph.op(i).name): r for i, r in RULES[part.library](graph).items()}
    return found | (unguarded(proto, graph) if part.library == "onnxruntime" else {})


# ---------------------------------------------------------------- the protobuf


def _parse(data: bytes) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise EngineError(f"it is not ONNX: {error}") from error
    proto.DiscardUnknownFields()
    if proto.SerializeToString(deterministic=True) != data:
        raise EngineError("its bytes are not in canonical form")
    return proto


def _check_form(message: Message) -> None:
    """Check that the exporter writes every field that the message contains."""
    kind = message.DESCRIPTOR.name
    for field, value in message.ListFields():
        if field.name not in _FORM[kind]:
            raise EngineError(f"it holds {kind}.{field.name}")
        if field.type == field.TYPE_STRING:  # protobuf returns bytes where decoding fails
            texts = [value] if isinstance(value, (str, bytes)) else value
            if not all(isinstance(text, str) for text in texts):
                raise EngineError(f"its {kind}.{field.name} is not UTF-8 text")
        if field.message_type is not None:
            for child in (value,) if isinstance(value, Message) else value:
                _check_form(child)
    if kind == "AttributeProto" and len(message.ListFields()) > 3:
        raise EngineError(f"the attribute {message.name!r:.60} has several values")


def _check_header(proto: onnx.ModelProto) -> None:
    known = {"": OPSET, **DOMAINS}
    found = [(entry.domain, entry.version) for entry in proto.opset_import]
    if len(set(found)) != len(found) or ("", OPSET) not in found:
        raise EngineError(f"it imports the operators {found}")
    for domain, version in found:
        if known.get(domain) != version:
            raise EngineError(f"it imports operators of {domain or 'ai.onnx'!r:.60} at version {version}")


def _check_names(graph: onnx.GraphProto) -> None:
    """Check that each value has one definition in the whole part, so that a name never refers to another value."""
    values: set[str] = set()
    nodes: set[str] = set()
    for g in graphs_of(graph):
        made = [v.name for v in g.input] + [t.name for t in g.initializer] + [x for n in g.node for x in n.output if x]
        for taken, names in ((values, made), (nodes, [n.name for n in g.node])):
            for name in names:
                if not name or name in taken:
                    raise EngineError(f"the name {name!r:.60} is not defined exactly once")
                taken.add(name)
        for node in g.node:
            attributes = [a.name for a in node.attribute]
            if len(set(attributes)) != len(attributes):
                raise EngineError(f"the node {node.name!r:.60} has an attribute twice")


def _check_operators(graph: onnx.GraphProto) -> None:
    """Check that all operators are in the table, and that no tensor except the weights of the outermost graph is in a file."""
    for depth, g in enumerate(graphs_of(graph)):
        for node in g.node:
            known = IMPORTERS if not node.domain else FOREIGN_OPERATORS.get(node.domain, ())
            if node.op_type not in known or "." in node.op_type:
                shown = f"{node.domain}.{node.op_type}".strip(".")
                raise EngineError(f"it holds the operator {shown!r:.80}, which optdnn does not write")
            for a in node.attribute:
                if a.HasField("t"):
                    _check_tensor(a.t, False)
        for t in g.initializer:
            _check_tensor(t, depth == 0)


def _check_tensor(t: TensorProto, may_be_weight: bool) -> None:
    if not t.external_data and t.data_location == TensorProto.DEFAULT:
        return
    entries = {e.key: e.value for e in t.external_data}
    if not may_be_weight or entries.keys() != {"location", "offset", "length"} or entries["location"] != WEIGHTS:
        raise EngineError(f"the tensor {t.name!r:.60} is declared to be in a file, {entries.get('location', '')!r:.80}")
    if t.data_location != TensorProto.EXTERNAL or t.HasField("raw_data"):
        raise EngineError(f"the tensor {t.name!r:.60} is in two places")


# ---------------------------------------------------------------- inputs, outputs and weights


def _check_ports(graph: onnx.GraphProto, part: LibraryPart) -> None:
    """Check that inputs, outputs and weights are those of the step, with the types that the program declares."""
    declared = {v.name: v for v in graph.input}
    external = {t.name: t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL}
    weights = {name: v for name, v in declared.items() if name in part.weights}
    for what, found, wanted in (
        ("inputs", declared.keys() - weights.keys(), [spec[0] for spec in part.inputs]),
        ("outputs", {v.name for v in graph.output}, [spec[0] for spec in part.outputs]),
        ("weights", external.keys() | weights.keys(), list(part.weights)),
    ):
        if found != set(wanted) or len(set(wanted)) != len(wanted):
            raise EngineError(f"its {what} are {sorted(found)!s:.80}, those of the step {sorted(wanted)!s:.80}")
    if len(graph.output) != len(part.outputs):
        raise EngineError("an output is listed twice")
    outputs = {v.name: v for v in graph.output}
    for ports, specs in ((declared, part.inputs), (outputs, part.outputs)):
        for name, dtype, shape in specs:
            if _declared(ports[name]) != (dtype, shape):
                raise EngineError(f"{name!r:.60} is declared otherwise than in the program, {dtype}{shape}")
    for name, array in part.weights.items():
        given = _declared(declared[name]) if name in weights else _of_tensor(external[name])
        if given != (array.dtype, array.shape):
            raise EngineError(f"the weight {name!r:.60} is declared as {given}, it is {array.dtype}{array.shape}")


def _declared(v: onnx.ValueInfoProto) -> tuple[DType, tuple[int | str, ...] | None]:
    t = v.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in t.shape.dim)
    return _element_type(t.elem_type), shape if t.HasField("shape") else None


def _of_tensor(t: TensorProto) -> tuple[DType, tuple[int, ...]]:
    return _element_type(t.data_type), tuple(t.dims)


def _element_type(code: int) -> DType:
    try:
        return element_type(code)
    except Unsupported as error:
        raise EngineError(str(error)) from error


class _Weights(ExternalData):
    """The arrays of a step; a location is a name."""

    def __init__(self, weights: Mapping[str, Array]):
        super().__init__(None, "the network")
        self._weights = weights

    def read(self, tensor: str, entries: Mapping[str, str], nbytes: int) -> Array:
        return np.ascontiguousarray(self._weights[entries["location"]]).reshape(-1).view(np.uint8)


def _imported(proto: onnx.ModelProto, part: LibraryPart) -> Graph:
    """The part as a graph. Weights are constants; sizes that other steps compute, and shapes that outputs declare, are unknown."""
    graph = proto.graph
    name_weights(graph, part.weights)
    ranges: dict[str, tuple[DimRange | None, ...]] = {}
    fresh = (name for k in itertools.count() if (name := f"?{k}") not in part.symbols)
    for v in graph.input:
        dims = list(v.type.tensor_type.shape.dim)
        for d in dims:
            if d.HasField("dim_param") and not _follows(d.dim_param, part.symbols):
                d.dim_param = next(fresh)
        ranges[v.name] = tuple(part.symbols.get(d.dim_param) if d.HasField("dim_param") else None for d in dims)
    for v in graph.output:
        v.type.tensor_type.ClearField("shape")
    model = open_model(proto, "the network")
    return import_model(Model(proto, model.name, _Weights(part.weights), model.opsets, {}), shapes=ranges)


def name_weights(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Turn the weights of a part (inputs or initializers) into initializers in a file whose location is the weight's name."""
    for v in [v for v in graph.input if v.name in names]:
        t = v.type.tensor_type
        graph.initializer.add(name=v.name, data_type=t.elem_type, dims=[d.dim_value for d in t.shape.dim])
        graph.input.remove(v)
    for tensor in graph.initializer:
        if tensor.name in names:
            del tensor.external_data[:]
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=tensor.name)


def _follows(text: str, symbols: Mapping[str, DimRange | None]) -> bool:
    """Whether a size follows from the sizes of the network's inputs."""
    expression = parse_dim(text)
    return text in symbols or (expression is not None and all(s.name in symbols for s in expression.symbols()))


_VANISH = frozenset({"Constant", "Identity"})
"""Operators that the importer removes: they become no op."""


def _names(graph: onnx.GraphProto, prefix: str = "") -> Iterator[str]:
    """The names of all nodes as the importer gives them."""
    for node in graph.node:
        if node.op_type not in _VANISH:
            yield prefix + node.name
        for a in node.attribute:
            if a.HasField("g"):
                yield from _names(a.g, f"{prefix}{node.name}/")


def _seen(graph: Graph) -> set[str]:
    """The names of the nodes that the ops of a graph, and of its bodies, came from."""
    found: set[str] = set()
    for op in graph.ops():
        found |= op.src
        for body in bodies(op):
            found |= _seen(body.graph)
    return found
