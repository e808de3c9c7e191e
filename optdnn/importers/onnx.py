"""ONNX in, :class:`~optdnn.ir.graph.Graph` out.

Nodes become ops through ``ops.table.IMPORTERS``; types and known values are inferred as they are added. Model-local
functions, and ONNX's own operators that have no import function but are defined by one, are inlined. Everything that is
not supported is collected and reported in one :class:`~optdnn.errors.UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import onnx
import onnx.defs
from onnx import AttributeProto

from optdnn.custom import CustomOp
from optdnn.errors import ModelError, ShapeError, UnsupportedError, UnsupportedNode, UsageError
from optdnn.importers.emitter import Emitter, Weight
from optdnn.importers.functions import default_attributes, definition, resolved, schema_defaults
from optdnn.importers.inputs import graph_inputs, known_type, profiles_of, refusal
from optdnn.importers.model import Model, Source, domain_of, open_model, read_opsets
from optdnn.importers.nodes import (
    NO_SUCH_OPERATOR,
    attributes,
    check_node,
    describe,
    in_order,
    live_nodes,
    reads,
    schema,
    unique_names,
    variadic_outputs,
)
from optdnn.importers.subgraphs import Consequence, Subgraph
from optdnn.importers.tensors import element_type, sparse_to_array, to_array
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Unsupported
from optdnn.ops.custom import importer_of
from optdnn.ops.exchange import FromOnnx, NodeSpec
from optdnn.ops.legacy import FIRST_MODERN, modernize
from optdnn.ops.table import IMPORTERS
from optdnn.ranges import ShapeSpec
from optdnn.types import Array, TensorType, dtype_name

MAX_FUNCTION_DEPTH = 64
MAX_NODES = 1_000_000
"""Bound on the nodes of a model after inlining: functions that call one another twice grow exponentially."""


class Unknown:
    """Stands for a value that an unsupported node would have produced."""


UNKNOWN = Unknown()
Scope: TypeAlias = dict[str, "Value | Weight | Unknown | None"]
_INVALID = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, NotImplementedError)


def import_model(
    source: Source | Model,
    *,
    shapes: Mapping[str, ShapeSpec] | None = None,
    source_name: str | None = None,
    notes: list[str] | None = None,
    custom_ops: Sequence[CustomOp] = (),
) -> Graph:
    """Import an ONNX model, given as a path, as the file's bytes, as a ModelProto, or opened already.

    ``shapes`` gives dimensions to inputs by name (None leaves one as it is); a symbol it binds is bound everywhere, one that
    it gives a range (:mod:`optdnn.ranges`) has it.
    Named dimensions become symbols of that name, unnamed ones are called ``<input>.<axis>``. An initializer that is also
    listed as an input is a constant: the default that the model gives it is final. ``notes`` receives remarks of this
    sort. ``source_name`` replaces the path in messages.

    Raises UsageError (no such file or input), ModelError (not valid ONNX), ShapeError (shapes contradict), and one
    UnsupportedError that lists every node that cannot be imported.
    """
    model = source if isinstance(source, Model) else open_model(source, source_name)
    importer = Importer(model, notes if notes is not None else [])
    importer.custom = custom_importers(custom_ops)
    return importer.run(shapes or {})


def custom_importers(custom_ops: Sequence[CustomOp]) -> dict[str, FromOnnx]:
    """Operator -> import function of the user's own operators. Raises UsageError for a name that ONNX or optdnn has."""
    if taken := sorted(op.name for op in custom_ops if op.name in IMPORTERS or op.name.startswith("ai.onnx.")):
        raise UsageError(f"the custom operator {taken[0]} has a name that is taken", hint="use a domain of your own")
    return {op.name: importer_of(op) for op in custom_ops}


class Importer(Emitter):
    """Imports one graph: the model's, or that of a body inside of it."""

    def __init__(self, model: Model, notes: list[str]):
        super().__init__(Graph(model.proto.graph.name or "graph"))
        self.model = model
        self.notes = notes
        self.unsupported: list[UnsupportedNode] = []
        self.taken: set[str] = set()
        self._hints: dict[str, onnx.TypeProto] | None = None
        self._live: set[int] | None = None
        self.count = 0
        self._alive = True
        self.custom: Mapping[str, FromOnnx] = {}

    # ------------------------------------------------------------------ the model

    def run(self, shapes: Mapping[str, ShapeSpec]) -> Graph:
        proto, name = self.model.proto.graph, self.model.name
        scope: Scope = {}
        self.weights(proto, scope)
        free = []
        for v in proto.input:
            if v.name in scope:
                self.notes.append(f"input {v.name!r} has a default value in the model and is treated as a constant")
            else:
                free.append(v)
        for v, found in graph_inputs(free, shapes, name):
            if isinstance(found, str):
                self._refuse(v.name, "graph input", "", found)
                scope[v.name] = UNKNOWN
            else:
                scope[v.name] = self.graph.add_input(v.name, found)
        ports = [self.graph.op(i).outputs[0] for i in self.graph.inputs]
        self.graph.profiles = profiles_of({p.name: p.type.shape or () for p in ports}, shapes)
        for v in proto.output:
            reason = refusal(v.type) if v.type.WhichOneof("value") and v.type.tensor_type.elem_type != 0 else None
            if reason is not None or v.type.WhichOneof("value") not in (None, "tensor_type"):
                self._refuse(v.name, "graph output", "", reason or refusal(v.type) or "")
        wanted = [v.name for v in proto.output]
        self.nodes(proto.node, scope, self.model.opsets, "", {}, wanted, 0)
        if self.unsupported:
            raise UnsupportedError(
                f"{name} holds {len(self.unsupported)} things that optdnn does not support:", self.unsupported
            )
        seen: set[str] = set()
        for v in proto.output:
            ref = scope.get(v.name)
            if ref is None or v.name in seen:
                raise ModelError(f"{name}: output {v.name!r} is {'listed twice' if ref else 'produced by no node'}")
            seen.add(v.name)
            self._check_output(v, self.graph.add_output(self.enter(ref), v.name).outputs[0].type)
        if not proto.output:
            raise ModelError(f"{name} has no outputs", hint="the file is truncated or corrupt")
        return self.graph

    def weights(self, proto: onnx.GraphProto, scope: Scope) -> None:
        """Take the initializers of a graph, or of a body, into ``scope``."""
        for t in proto.initializer:
            self._weight(scope, t.name, partial(self._tensor, t))
        for s in proto.sparse_initializer:
            self._weight(scope, s.values.name, partial(self._sparse, s))

    def _weight(self, scope: Scope, name: str, read: Callable[[], Array]) -> None:
        if not name or name in scope:
            raise ModelError(f"{self.model.name}: initializer {name!r} {'is defined twice' if name else 'has no name'}")
        try:
            scope[name] = Weight(read(), name)
        except Unsupported as error:
            self._refuse(name, "initializer", "", str(error))
            scope[name] = UNKNOWN

    def _check_output(self, v: onnx.ValueInfoProto, actual: TensorType) -> None:
        code = v.type.tensor_type.elem_type
        if code and element_type(code) != actual.dtype:
            raise ModelError(
                f"{self.model.name}: output {v.name!r} is declared as {dtype_name(element_type(code))}, "
                f"but its node computes {dtype_name(actual.dtype)}"
            )

    # ------------------------------------------------------------------ nodes

    def nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        scope: Scope,
        opsets: Mapping[str, int],
        prefix: str,
        bound: Mapping[str, tuple[int, Any]],
        wanted: Sequence[str],
        depth: int,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Import ``nodes`` (of the graph, or of a function that is being inlined) into ``scope``.

        ``wanted`` are the values that are read from outside; ``labels`` says what the results of a call are called there.
        """
        self.count += len(nodes)
        if self.count > MAX_NODES:
            raise ModelError(f"{self.model.name} has more than {MAX_NODES} nodes once its functions are inlined")
        names = unique_names(nodes, prefix, self.taken)
        order = in_order(nodes, names, scope, self.model.name)
        used = {x for n in nodes for x in reads(n)}
        used.update(wanted)
        for i in order:
            node = nodes[i]
            if depth == 0:
                self._alive = True if self._live is None else i in self._live
            outputs = list(node.output)
            while len(outputs) > 1 and outputs[-1] not in used and not _variadic(node, opsets):
                outputs.pop()
            shown = outputs if labels is None else [x and labels.get(x, prefix + x) for x in outputs]
            refs = self._node(node, names[i], shown, scope, opsets, bound, depth, (nodes, wanted, i))
            for out, ref in zip(outputs, refs, strict=False):
                if out:
                    scope[out] = ref

    def _node(
        self,
        node: onnx.NodeProto,
        name: str,
        outputs: list[str],
        scope: Scope,
        opsets: Mapping[str, int],
        bound: Mapping[str, tuple[int, Any]],
        depth: int,
        place: tuple[Sequence[onnx.NodeProto], Sequence[str], int],
    ) -> Sequence[Any]:
        """The refs of one node's outputs (UNKNOWN for those of an unsupported node)."""
        domain = domain_of(node.domain)
        where = f"{self.model.name}: {describe(node, name)}"
        try:
            operands: list[Any] = [scope[x] if x else None for x in node.input]
        except KeyError as error:
            raise ModelError(f"{where} reads {error.args[0]!r}, which nothing produces") from None
        while operands and operands[-1] is None:
            operands.pop()
        function = self.model.functions.get((domain, node.op_type, node.overload))
        opset = opsets.get(domain, 0 if function is None else 1)
        try:
            if not opset and domain == "":
                raise ModelError("belongs to a domain that the model does not import")
            attrs = attributes(
                node,
                bound,
                self._tensor,
                self._sparse,
            )
            if function is not None:
                return self._call(function, name, operands, attrs, outputs, depth)
            full = f"{domain}.{node.op_type}" if domain else node.op_type
            importer = IMPORTERS.get(full) or self.custom.get(full)
            rules = schema(node.op_type, domain, opset)
            if isinstance(rules, str) and (importer is None or rules != NO_SUCH_OPERATOR):
                raise Unsupported(rules)
            if rules is not None and not isinstance(rules, str):
                check_node(node, attrs, rules)
            if importer is None:
                known = None if UNKNOWN in operands else [None if r is None else self.type(r) for r in operands]
                body = definition(resolved(node, attrs), domain, opset, known)
                if body is None:
                    raise Unsupported("the operator is not supported" if rules else "the custom operator is unknown")
                defaults = schema_defaults(node.op_type, domain, opset)
                return self._call(body, name, operands, {**defaults, **attrs}, outputs, depth)
            if any(r is UNKNOWN for r in operands):
                return [UNKNOWN] * len(outputs)
            plain = {
                k: Subgraph(self, v, name, scope, opsets, bound, depth) if kind == AttributeProto.GRAPH else v
                for k, (kind, v) in attrs.items()
            }
            spec = NodeSpec(node.op_type, domain, opset, name, tuple(operands), tuple(outputs), plain)
            return self._import(importer, spec)
        except Unsupported as error:
            if depth == 0 and self._live is None:
                self._live = live_nodes(place[0], place[1])
                self._alive = place[2] in self._live
            if not isinstance(error, Consequence):
                self._refuse(name, node.op_type, domain, str(error), opset)
            return self._stand_ins(outputs)
        except ShapeError as error:
            if self.unsupported or UNKNOWN in operands:  # may be a consequence; what is unsupported comes first
                return self._stand_ins(outputs)
            if error.message.startswith(self.model.name + ":"):
                raise
            types = ", ".join("-" if r is None else str(self.type(r)) for r in operands)
            raise ShapeError(f"{where}, opset {opset}: {error.message}; operands: {types}", hint=error.hint) from error
        except ModelError as error:
            if error.message.startswith(self.model.name + ":"):
                raise
            raise ModelError(f"{where}: {error.message}", hint=error.hint) from error
        except _INVALID as error:
            raise ModelError(
                f"{where}, opset {opset}: cannot be understood ({type(error).__name__}: {error})",
                hint="check the model with onnx.checker; if it is valid, this is a defect of optdnn",
            ) from error

    def _import(self, importer: Any, spec: NodeSpec) -> Sequence[Any]:
        """Run an import function; the values it returns get the names of the node's outputs."""
        self._outputs, self._src, self._made = spec.outputs, frozenset((spec.name,)), {}
        if spec.domain == "" and spec.opset < FIRST_MODERN:
            spec = modernize(spec, self)
        refs = list(importer(spec, self))
        if len(refs) < len(spec.outputs):
            raise Unsupported(f"output {len(refs)} is not supported")
        for wanted, ref in zip(spec.outputs, refs, strict=False):
            if isinstance(ref, Value) and wanted and wanted in self._made and self._made[wanted] != ref:
                own = self.graph.output(ref).name
                if own in self._made:
                    first = self._made[wanted]
                    self.graph.rename(first, own)
                    self.graph.rename(ref, wanted)
                    self._made[own], self._made[wanted] = first, ref
        for ref in refs:
            if isinstance(ref, Value) and self.graph.type(ref).shape is None:
                self._declare(ref)
        return refs

    def _declare(self, ref: Value) -> None:
        """Give a value whose rank cannot be inferred the shape that the model declares for it, where it does."""
        op = self.graph.op(ref)
        out = op.outputs[ref.port]
        declared = self._declared(out.name)
        if declared is not None and declared.dtype == out.type.dtype:
            outs = list(op.outputs)
            outs[ref.port] = replace(out, type=declared)
            self.graph.set_op(replace(op, outputs=tuple(outs)))

    def _declared(self, name: str) -> TensorType | None:
        """What the model declares a value of the main graph to be, where that gives element type and rank."""
        if self._hints is None:
            proto = self.model.proto.graph
            self._hints = {v.name: v.type for v in (*proto.value_info, *proto.output)}
        return known_type(self._hints[name], name, self.graph.symbols()) if name in self._hints else None

    def _refuse(self, name: str, op_type: str, domain: str, reason: str, opset: int | None = None) -> None:
        if self._alive:
            opset = self.model.opsets.get(domain, 0) if opset is None else opset
            node = UnsupportedNode(name, op_type, domain, opset, reason)
            if node not in self.unsupported:  # a body is perhaps imported more than once
                self.unsupported.append(node)

    def _stand_ins(self, outputs: Sequence[str]) -> list[Any]:
        """Stand-ins of the declared type for an unsupported node's outputs, so that what follows is checked too."""
        refs: list[Any] = []
        for out in outputs:
            declared = self._declared(out)
            refs.append(UNKNOWN if declared is None else self.graph.add_input(out, declared))
        return refs

    # ------------------------------------------------------------------ subgraphs

    def nested(self, lift: Callable[[Weight], Value]) -> Importer:
        """An importer of a body: its graph is its own, messages, names and symbols are shared.

        ``lift`` makes an input of a constant that is too large for a body.
        """
        inner = Importer(self.model, self.notes)
        inner.graph.share_symbols(self.graph)
        inner.unsupported, inner.taken, inner.count = self.unsupported, self.taken, self.count
        inner._hints, inner._live, inner._alive = self._hints, self._live, self._alive
        inner.lift, inner.custom = lift, self.custom
        return inner

    def is_unknown(self, ref: Any) -> bool:
        return ref is UNKNOWN

    # ------------------------------------------------------------------ functions

    def _call(
        self,
        function: onnx.FunctionProto,
        name: str,
        operands: Sequence[Any],
        attrs: Mapping[str, tuple[int, Any]],
        outputs: Sequence[str],
        depth: int,
    ) -> Sequence[Any]:
        """Inline one call: the body's nodes are called ``<call>/<node>``, in the function's own opsets."""
        if depth >= MAX_FUNCTION_DEPTH:
            raise ModelError(f"functions call one another more than {MAX_FUNCTION_DEPTH} deep (recursion?)")
        if len(operands) > len(function.input):
            raise ModelError(f"is called with {len(operands)} operands, the function has {len(function.input)}")
        if len(outputs) > len(function.output):
            raise ModelError(f"is called for {len(outputs)} outputs, the function has {len(function.output)}")
        scope: Scope = {x: operands[i] if i < len(operands) else None for i, x in enumerate(function.input)}
        bound = {**attributes(default_attributes(function), {}, self._tensor, self._sparse), **attrs}
        opsets = read_opsets(function.opset_import, f"{self.model.name}: function {function.name}")
        opsets = {**self.model.opsets, **opsets}
        wanted = [x for x, out in zip(function.output, outputs, strict=False) if out]
        labels = dict(zip(wanted, (out for out in outputs if out), strict=True))
        self.nodes(function.node, scope, opsets, f"{name}/", bound, wanted, depth + 1, labels)
        missing = [x for x in wanted if x not in scope]
        if missing:
            raise ModelError(f"function {function.name} does not produce its output {missing[0]!r}")
        return [scope.get(x) for x in function.output[: len(outputs)]]

    def _tensor(self, t: onnx.TensorProto) -> Array:
        return to_array(t, self.model.external, self.model.name)

    def _sparse(self, t: onnx.SparseTensorProto) -> Array:
        return sparse_to_array(t, self.model.external, self.model.name)


def _variadic(node: onnx.NodeProto, opsets: Mapping[str, int]) -> bool:
    domain = domain_of(node.domain)
    return variadic_outputs(node.op_type, domain, opsets.get(domain, 0))
