"""A graph as ONNX: for other runtimes, for ``--emit-onnx``, and to check every pass on ONNX Runtime.

Each op is written by its ``OpDef.to_onnx`` (by default: a node of its kind with its fields as attributes); fused stages
become separate nodes. An op that opset 21 cannot express raises a typed error that names all such ops.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx import AttributeProto, TensorProto

from optdnn.errors import InternalError, RefusedNode, UnsupportedError, UsageError
from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.inference import infer
from optdnn.ir.onnx_protos import little_endian, node_attributes, tensor_proto
from optdnn.ir.tree_classifiers import with_classifiers
from optdnn.ops.base import Body, FusedAttrs, Unsupported
from optdnn.ops.exchange import OPSET, onnx_number
from optdnn.ops.fused import export_op, export_stages, infer_stages
from optdnn.runtime.file.atomic import write_atomic
from optdnn.types import INT64, Array, TensorType, bits_of, packed_bytes

EXTERNAL_FROM_BYTES = 1024
"""Larger constants, in bytes, are stored outside of the protobuf if weights are external."""
_ALIGNMENT = 64
_PROTOBUF_LIMIT = (1 << 31) - (1 << 20)
_SHOWN_NAMES = 4
DOMAINS = {"ai.onnx.ml": 3, "com.microsoft": 1}
"""The version at which operators of other domains are written."""


@dataclass(frozen=True)
class ExportedModel:
    """An ONNX model. ``weights`` are the constants that are not in ``proto``, by name; ``nodes`` maps each node's name to
    the names of the ONNX nodes it came from; ``owners`` maps it to the first output of the op that it implements (with other
    nodes)."""

    proto: onnx.ModelProto
    weights: dict[str, Array] = field(default_factory=dict)
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    owners: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Each node's name -> its operator, and the name of the first output of the graph's op that the node is (a part of)."""

    def to_bytes(self) -> bytes:
        """The serialized protobuf, the same for the same graph. Raises UsageError if it would exceed 2 GiB."""
        if self.proto.ByteSize() > _PROTOBUF_LIMIT:
            raise UsageError("the model is larger than a protobuf may be (2 GiB)", hint="export with external weights")
        return bytes(self.proto.SerializeToString(deterministic=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, and ``<path>.data`` next to it if weights are external. Raises OutputError."""
        path = Path(path)
        if self.weights:
            declared = {t.name: t for t in self.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL}
            if declared.keys() != self.weights.keys():
                raise UsageError("a model whose weights are inputs cannot be saved as a separate file")
            position = 0
            pieces: list[bytes | memoryview] = []
            for name, array in self.weights.items():
                pieces += [bytes(-position % _ALIGNMENT), little_endian(array).data]
                position += -position % _ALIGNMENT
                _declare_external(declared[name], f"{path.name}.data", position, packed_bytes(array.dtype, array.size))
                position += packed_bytes(array.dtype, array.size)
            write_atomic(f"{path}.data", pieces)
        write_atomic(path, [self.to_bytes()])


def export_model(
    graph: Graph,
    *,
    external_weights: bool = False,
    weights_as_inputs: bool = False,
) -> ExportedModel:
    """Write ``graph`` as ONNX at :data:`OPSET`; inputs, outputs and symbolic dimensions keep their names.

    ``external_weights`` leaves constants of more than 1 KiB out of the protobuf, declared as initializers with external
    data (ONNX Runtime: ``SessionOptions.add_external_initializers``); ``weights_as_inputs`` declares them as inputs of the
    graph instead (OpenVINO: its Parameters are replaced by constants that share memory). int64 constants always stay in,
    because they are used for shapes.

    Raises UnsupportedError listing every op that this opset cannot express.
    """
    if external_weights and weights_as_inputs:
        raise UsageError("weights are either external or inputs, not both")
    return _Exporter(graph).run(external_weights, weights_as_inputs)


class _Exporter:
    """Implements ``ops.exchange.Export``."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []
        self.provenance: dict[str, tuple[str, ...]] = {}
        self.owners: dict[str, tuple[str, str]] = {}
        self._types: dict[str, TensorType] = {}
        self._constants: dict[str, Array] = {}
        self._small: dict[tuple[Any, ...], str] = {}
        self._taken: set[str] = set()
        self._node_names: set[str] = set()
        self._domains: set[str] = set()
        self._op: Op | None = None
        self.refused: list[RefusedNode] = []

    # ------------------------------------------------------------------ ops.exchange.Export

    def node(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, *, domain: str = "", **attrs: Any
    ) -> tuple[str, ...]:
        op = self._op
        assert op is not None
        names = list(inputs)
        while names and not names[-1]:
            names.pop()
        made = onnx.NodeProto(op_type=op_type, domain=domain, input=names)
        results = tuple(self._fresh(f"{op.outputs[0].name}/{op_type}") for _ in range(outputs))
        made.output.extend(results)
        made.name = self._node_name(op, op_type)
        self.owners[made.name] = (op_type, op.outputs[0].name)
        made.attribute.extend(node_attributes(op_type, domain, DOMAINS.get(domain, OPSET), attrs, len(names)))
        self._domains.add(domain)
        self.nodes.append(made)
        return results

    def const(self, value: Array, hint: str = "c") -> str:
        value = np.asarray(value)
        key = (value.dtype, value.shape, value.tobytes()) if value.nbytes <= EXTERNAL_FROM_BYTES else None
        if key is not None and key in self._small:
            return self._small[key]
        name = self._fresh(f"const/{hint}")
        self._constants[name] = value
        self._types[name] = TensorType(value.dtype, value.shape)
        if key is not None:
            self._small[key] = name
        return name

    def type(self, name: str) -> TensorType:
        try:
            return self._types[name]
        except KeyError:
            raise InternalError(f"the type of {name!r} is not known while exporting") from None

    def declare(self, name: str, type: TensorType) -> None:
        self._types[name] = type

    def value(self, name: str) -> Array | None:
        return self._constants.get(name)

    def subgraph(self, body: Body, captured: Sequence[str]) -> onnx.GraphProto:
        assert isinstance(body, GraphBody)
        inner = _BodyExporter(self, body.graph, captured)
        proto = inner.body()
        if inner.refused:
            raise UnsupportedError("its body holds " + "; ".join(map(str, inner.refused)))
        return proto

    # ------------------------------------------------------------------ names

    def _fresh(self, hint: str) -> str:
        name, k = hint, 1
        while name in self._taken:
            name, k = f"{hint}_{k}", k + 1
        self._taken.add(name)
        return name

    def _node_name(self, op: Op, op_type: str) -> str:
        src = sorted(op.src)
        base = " + ".join(src[:_SHOWN_NAMES]) or op.outputs[0].name
        if len(src) > _SHOWN_NAMES:
            base += f" + {len(src) - _SHOWN_NAMES} more"
        name, k = base, 1
        while name in self._node_names:
            name, k = f"{base}/{op_type}" + (f"_{k}" if k > 1 else ""), k + 1
        self._node_names.add(name)
        self.provenance[name] = tuple(src)
        return name

    def _value_names(self) -> dict[Value, str]:
        """ONNX names: inputs and outputs always keep their names; other values keep theirs if it is free."""
        graph, names = self.graph, {}
        for i in graph.inputs:
            names[Value(i)] = graph.op(i).outputs[0].name
        for i in graph.outputs:
            source, wanted = graph.op(i).inputs[0], graph.op(i).outputs[0].name
            assert source is not None
            if source not in names and graph.op(source).kind != "Constant":
                names[source] = wanted
        self._taken = {graph.op(i).outputs[0].name for i in (*graph.inputs, *graph.outputs)}
        for op in graph.order():
            if op.kind != "Output":
                for port, out in enumerate(op.outputs):
                    value = Value(op.id, port)
                    if value not in names:
                        names[value] = self._fresh(out.name)
                    self._types[names[value]] = out.type
        return names

    # ------------------------------------------------------------------ the graph

    def run(self, external_weights: bool, weights_as_inputs: bool) -> ExportedModel:
        self._write(self._value_names())
        if self.refused:
            raise UnsupportedError(f"{len(self.refused)} ops cannot be written in ONNX opset {OPSET}:", self.refused)
        self.nodes, gone = with_classifiers(self.nodes)
        for name, kept in gone.items():
            del self.owners[name]
            self.provenance[kept] = tuple(
                dict.fromkeys((*self.provenance.get(kept, ()), *self.provenance.pop(name, ())))
            )
        return self._model(external_weights, weights_as_inputs)

    def _write(self, names: Mapping[Value, str]) -> None:
        """Write the nodes of all ops; ``refused`` collects the ops that this opset cannot express."""
        graph, refused = self.graph, self.refused
        for op in graph.order():
            self._op = op
            if op.kind == "Constant":
                self._constants[names[op.value]] = op.attrs.value
            elif op.kind == "Output":
                source = op.inputs[0]
                assert source is not None
                self._output(op, names, source)
            elif op.kind != "Input":
                try:
                    self._export(op, names)
                except (Unsupported, UnsupportedError) as error:
                    reason = error.message if isinstance(error, UnsupportedError) else str(error)
                    refused.append(RefusedNode(op.name, op.kind, "", OPSET, reason))

    def _output(self, op: Op, names: Mapping[Value, str], source: Value) -> None:
        wanted = op.outputs[0].name
        if names[source] != wanted:
            self._name_results(len(self.nodes), self.node("Identity", [names[source]]), [wanted])

    def _export(self, op: Op, names: Mapping[Value, str]) -> None:
        inputs = ["" if v is None else names[v] for v in op.inputs]
        start, attrs = len(self.nodes), op.attrs
        if isinstance(attrs, FusedAttrs):
            results = self._export_fused(op, attrs, inputs)
        else:
            results = export_op(op.definition, attrs, inputs, len(op.outputs), self)
        self._name_results(start, results, [names[v] for v in op.values])

    def _export_fused(self, op: Op, attrs: FusedAttrs, inputs: list[str]) -> Sequence[str]:
        """The kind's own node between the nodes of its prologue and epilogue."""
        arity = op.definition.arity
        if arity is None:
            raise InternalError(f"{op.kind} holds stages but has no arity")
        types = [self.type(n) if n else None for n in inputs]
        own = inputs[:arity]
        if attrs.prologue:
            first = types[0]
            assert first is not None
            own[0] = export_stages(attrs.prologue, own[0], first, inputs, self)
            types[0] = infer_stages(attrs.prologue, first, types)
        plain = replace(attrs, prologue=(), epilogue=())
        results = list(export_op(op.definition, plain, own, len(op.outputs), self))
        if attrs.epilogue:
            known = [self._constants.get(n) if n else None for n in own]
            t = infer(op.kind, plain, types[:arity], known, len(op.outputs), self.graph.fresh_symbol).types[0]
            results[0] = export_stages(attrs.epilogue, results[0], t, inputs, self)
        return results

    def _name_results(self, start: int, results: Sequence[str], wanted: Sequence[str]) -> None:
        """Rename the results of the nodes from ``start`` on as wanted; a result that is an older value is copied."""
        made = {x for n in self.nodes[start:] for x in n.output if x}
        mapping: dict[str, str] = {}
        for result, name in zip(results, wanted, strict=True):
            if result in made and result not in mapping:
                mapping[result] = name
            else:
                (copied,) = self.node("Identity", [result])
                mapping[copied] = name
        for n in self.nodes[start:]:
            for field_ in (n.input, n.output):
                for k, x in enumerate(field_):
                    if x in mapping:
                        field_[k] = mapping[x]

    def _model(self, external_weights: bool, weights_as_inputs: bool) -> ExportedModel:
        graph = self.graph
        used = _read(self.nodes)
        proto = onnx.GraphProto(name=graph.name, node=self.nodes)
        weights: dict[str, Array] = {}
        for i in graph.inputs:
            out = graph.op(i).outputs[0]
            proto.input.append(_value_info(out.name, out.type))
        for name, array in self._constants.items():
            if name not in used:
                continue
            large = array.nbytes > EXTERNAL_FROM_BYTES and array.dtype != INT64 and bits_of(array.dtype) >= 8
            if large and weights_as_inputs:
                proto.input.append(_value_info(name, TensorType(array.dtype, array.shape)))
                weights[name] = array
            elif large and external_weights:
                declared = TensorProto(name=name, data_type=onnx_number(array.dtype), dims=array.shape)
                _declare_external(declared, "weights", sum(w.nbytes for w in weights.values()), array.nbytes)
                proto.initializer.append(declared)
                weights[name] = array
            else:
                proto.initializer.append(tensor_proto(array, name))
        for i in graph.outputs:
            out, source = graph.op(i).outputs[0], graph.op(i).inputs[0]
            assert source is not None
            proto.output.append(_value_info(out.name, graph.type(source)))
        imports = [onnx.helper.make_opsetid("", OPSET)]
        imports += [onnx.helper.make_opsetid(d, DOMAINS[d]) for d in sorted(self._domains - {""})]
        model = onnx.ModelProto(
            ir_version=onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True),
            producer_name="optdnn",
            graph=proto,
            opset_import=imports,
        )
        return ExportedModel(model, weights, self.provenance, self.owners)


class _BodyExporter(_Exporter):
    """A body as a GraphProto. Its captured inputs are names of the surrounding graph; all other names differ from outer names."""

    def __init__(self, outer: _Exporter, graph: Graph, captured: Sequence[str]):
        super().__init__(graph)
        self._outer, self._captured = outer, captured
        self._taken, self._node_names, self._domains = outer._taken, outer._node_names, outer._domains
        self.provenance, self._types = outer.provenance, outer._types

    def value(self, name: str) -> Array | None:
        return self._constants[name] if name in self._constants else self._outer.value(name)

    def body(self) -> onnx.GraphProto:
        graph, names = self.graph, dict[Value, str]()
        formal = graph.inputs[: len(graph.inputs) - len(self._captured)]
        for i, name in zip(graph.inputs[len(formal) :], self._captured, strict=True):
            names[Value(i)] = name
        for op in graph.order():
            for port, out in enumerate(op.outputs):
                value = Value(op.id, port)
                if op.kind != "Output" and value not in names:
                    names[value] = self._fresh(out.name)
                    self._types[names[value]] = out.type
        outputs = [graph.op(i) for i in graph.outputs]
        shown = {op.id: self._fresh(op.outputs[0].name) for op in outputs}
        self._write({**names, **{op.value: shown[op.id] for op in outputs}})
        proto = onnx.GraphProto(name=graph.name or "body", node=self.nodes)
        used = _read(self.nodes)
        proto.input.extend(_value_info(names[Value(i)], graph.op(i).outputs[0].type) for i in formal)
        proto.initializer.extend(tensor_proto(array, name) for name, array in self._constants.items() if name in used)
        proto.output.extend(_value_info(shown[op.id], op.outputs[0].type) for op in outputs)
        return proto

    def _output(self, op: Op, names: Mapping[Value, str], source: Value) -> None:
        self._name_results(len(self.nodes), self.node("Identity", [names[source]]), [names[op.value]])


# ---------------------------------------------------------------- protobuf


def _read(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Names that nodes, or the nodes of their subgraphs, read."""
    found: set[str] = set()
    for n in nodes:
        found.update(n.input)
        for a in n.attribute:
            if a.type == AttributeProto.GRAPH:
                found.update(_read(a.g.node))
    return found


def _declare_external(t: TensorProto, location: str, offset: int, length: int) -> None:
    t.data_location = TensorProto.EXTERNAL
    del t.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        t.external_data.add(key=key, value=str(value))


def _value_info(name: str, t: TensorType) -> onnx.ValueInfoProto:
    shape = None if t.shape is None else [d if isinstance(d, int) else str(d) for d in t.shape]
    return onnx.helper.make_tensor_value_info(name, onnx_number(t.dtype), shape)
