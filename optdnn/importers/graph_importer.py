"""Import of one graph: the model's, the body of a function that is inlined, or a subgraph of a node.

Nodes become ops through ``ops.table.IMPORTERS``; types and known values are inferred as they are added. Model-local
functions are inlined, and so are ONNX's own operators without an import function that are defined by a function. A subgraph is
inlined if it is known to run once; otherwise it becomes a body. Everything unsupported is collected and reported together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import onnx
from onnx import AttributeProto

from optdnn.errors import ModelError, RefusedNode, ShapeError
from optdnn.importers.draws import REFUSED, is_random
from optdnn.importers.emitter import Weight
from optdnn.importers.functions import default_attributes, definition, resolved, schema_defaults, too_deep
from optdnn.importers.inputs import known_type
from optdnn.importers.model import Model, domain_of, read_opsets
from optdnn.importers.nodes import (
    NO_SUCH_OPERATOR,
    Schema,
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
from optdnn.importers.refused_operators import why_unknown
from optdnn.importers.scope import UNKNOWN, Scope
from optdnn.importers.subgraph import Consequence, NodesImporter, Place, Subgraph
from optdnn.importers.tensors import sparse_to_array, to_array
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.unknown_ranks import unknown_rank
from optdnn.limits import FUNCTION_NESTING, INLINED_NODES, NODES, Limit
from optdnn.ops.base import Unsupported
from optdnn.ops.exchange import FromOnnx, NodeSpec
from optdnn.ops.legacy import FIRST_MODERN, modernize
from optdnn.ops.sequences import IMPORTERS as SEQUENCES
from optdnn.ops.sequences import TensorList
from optdnn.ops.table import IMPORTERS
from optdnn.types import BF16, FP16, FP32, FP64, Array, DType, TensorType, dtype_name

_WIDE_FLOATS = frozenset({BF16, FP16, FP32, FP64})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose result has the elements of their operand, and whose rank may be unknown."""
_INVALID = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, NotImplementedError)


class GraphImporter(NodesImporter):
    """Imports one graph: the model's, or the graph of a body inside of it."""

    def __init__(self, model: Model, custom: Mapping[str, FromOnnx]):
        super().__init__(Graph(model.proto.graph.name or "graph"))
        self.model, self.custom = model, custom
        self._hints: dict[str, onnx.TypeProto] | None = None
        self._live: set[int] | None = None
        self._alive = True
        self.mixed: dict[str, str] = {}
        """Nodes with weights of another float type than their data, and these types."""
        self._in_types: dict[tuple[Weight, DType], Weight] = {}

    def weights(self, proto: onnx.GraphProto, scope: Scope) -> None:
        for t in proto.initializer:
            self._weight(scope, t.name, partial(self._tensor, t))
        for s in proto.sparse_initializer:
            self._weight(scope, s.values.name, partial(self._sparse, s))

    def _weight(self, scope: Scope, name: str, read: Callable[[], Array]) -> None:
        if name in scope and self._equal(scope[name], read):
            return
        if not name or name in scope:
            raise ModelError(f"{self.model.name}: initializer {name!r} {'is defined twice' if name else 'has no name'}")
        try:
            scope[name] = Weight(read(), name)
        except Unsupported as error:
            self.refuse(name, "initializer", "", str(error))
            scope[name] = UNKNOWN

    @staticmethod
    def _equal(known: Any, read: Callable[[], Array]) -> bool:
        """Whether an initializer that is written twice has one value: Intel Neural Compressor repeats shared biases."""
        if not isinstance(known, Weight):
            return False
        again = read()
        return (
            again.dtype == known.array.dtype
            and again.shape == known.array.shape
            and again.tobytes() == known.array.tobytes()
        )

    # ------------------------------------------------------------------ nodes

    def nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        place: Place,
        wanted: Sequence[str],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.count += len(nodes)
        self._check_count(self.count, NODES, "nodes")
        if labels is not None:
            self.inlined += len(nodes)
            self._check_count(self.inlined, INLINED_NODES, "nodes once its functions and subgraphs are inlined")
        names = unique_names(nodes, place.prefix, self.taken)
        order = in_order(nodes, names, place.scope, self.model.name, partial(self._refused, place))
        used = {*wanted, *(x for n in nodes for x in reads(n))}
        for i in order:
            node, domain = nodes[i], domain_of(nodes[i].domain)
            if place.depth == 0:
                self._alive = self._live is None or i in self._live
            outputs = list(node.output)
            while len(outputs) > 1 and outputs[-1] not in used:
                if variadic_outputs(node.op_type, domain, place.opsets.get(domain, 0)):
                    break
                outputs.pop()
            shown = outputs if labels is None else [x and labels.get(x, place.prefix + x) for x in outputs]
            try:
                refs = self._node(node, names[i], shown, place)
            except Unsupported as error:
                if place.depth == 0 and self._live is None:
                    self._live = live_nodes(nodes, wanted)
                    self._alive = i in self._live
                if not isinstance(error, Consequence):
                    self.refuse(names[i], node.op_type, domain, str(error), self._opset(node, place))
                refs = self._stand_ins(shown)
            place.scope.update({out: ref for out, ref in zip(outputs, refs, strict=False) if out})

    def _check_count(self, count: int, limit: Limit, what: str) -> None:
        if count > limit.value:
            raise ModelError(f"{self.model.name} has more than {limit.value} {what}", hint=limit.hint)

    def _opset(self, node: onnx.NodeProto, place: Place) -> int:
        """The opset of a node's domain: 1 for a domain of model-local functions that is not imported, otherwise 0."""
        key = (domain_of(node.domain), node.op_type, node.overload)
        return place.opsets.get(key[0], int(key in self.model.functions))

    def _refused(self, place: Place, node: onnx.NodeProto, name: str, reason: str) -> RefusedNode:
        """A node that an error is about, with the reason."""
        return RefusedNode(name, node.op_type, domain_of(node.domain), self._opset(node, place), reason)

    def _node(self, node: onnx.NodeProto, name: str, outputs: list[str], place: Place) -> Sequence[Any]:
        """The refs of one node's outputs (UNKNOWN for the outputs of an unsupported node). Errors name the node."""
        where = f"{self.model.name}: {describe(node, name)}"
        refused = partial(self._refused, place, node, name)
        try:
            operands: list[Any] = [place.scope[x] if x else None for x in node.input]
        except KeyError as error:
            message = f"reads {error.args[0]!r}, which nothing produces"
            raise ModelError(f"{where} {message}", [refused(message)]) from None
        while operands and operands[-1] is None:
            operands.pop()
        at = f"{where}, opset {self._opset(node, place)}"
        try:
            return self._results(node, name, operands, outputs, place)
        except ShapeError as error:
            if self.unsupported or UNKNOWN in operands:  # perhaps a consequence: unsupported nodes are reported first
                return self._stand_ins(outputs)
            if error.message.startswith(self.model.name + ":"):
                raise
            types = ", ".join(map(self._shown, operands))
            message = f"{error.message}; operands: {types}"
            hint = error.hint or unknown_rank(self.graph, operands)
            raise ShapeError(f"{at}: {message}", [refused(message)], hint=hint) from error
        except ModelError as error:
            if error.message.startswith(self.model.name + ":"):
                raise
            raise ModelError(f"{where}: {error.message}", [refused(error.message)], hint=error.hint) from error
        except _INVALID as error:
            message = f"cannot be understood ({type(error).__name__}: {error})"
            raise ModelError(
                f"{at}: {message}",
                [refused(message)],
                hint="check the model with onnx.checker; if it is valid, this is a defect of optdnn",
            ) from error

    def _shown(self, ref: Any) -> str:
        """The type of an operand, for a message."""
        if isinstance(ref, TensorList):
            return f"a sequence of {len(ref)}"
        return "-" if ref is None else str(self.type(ref))

    def _results(
        self, node: onnx.NodeProto, name: str, operands: list[Any], outputs: list[str], place: Place
    ) -> Sequence[Any]:
        domain, opset = domain_of(node.domain), self._opset(node, place)
        if not opset and domain == "":
            raise ModelError("belongs to a domain that the model does not import")
        function = self.model.functions.get((domain, node.op_type, node.overload))
        full = f"{domain}.{node.op_type}" if domain else node.op_type
        importer = IMPORTERS.get(full) or self.custom.get(full)
        rules = schema(node.op_type, domain, opset)
        if function is None and isinstance(rules, str) and (importer is None or rules != NO_SUCH_OPERATOR):
            raise Unsupported(rules)  # before its attributes are read: TensorFlow's may be no text
        attrs = attributes(node, place.bound, self._tensor, self._sparse)
        if function is not None:
            return self._call(function, name, operands, attrs, outputs, place.depth)
        if full not in (*SEQUENCES, "Loop") and any(isinstance(r, TensorList) for r in operands):
            raise Unsupported("it takes a sequence of tensors")
        if rules is not None and not isinstance(rules, str):
            check_node(node, attrs, rules)
        if importer is None:
            if is_random(node):
                raise Unsupported(REFUSED)
            known = None if UNKNOWN in operands else [None if r is None else self.type(r) for r in operands]
            body = definition(resolved(node, attrs), domain, opset, known)
            if body is None:
                raise Unsupported("the operator is not supported" if rules else why_unknown(domain, node.op_type))
            attrs = {**schema_defaults(node.op_type, domain, opset), **attrs}
            return self._call(body, name, operands, attrs, outputs, place.depth)
        if UNKNOWN in operands:
            return [UNKNOWN] * len(outputs)
        if isinstance(rules, Schema):
            operands = self._of_one_type(operands, rules, node, name)
        plain = {
            k: Subgraph(self, v, name, place) if kind == AttributeProto.GRAPH else v for k, (kind, v) in attrs.items()
        }
        return self._import(
            importer, NodeSpec(node.op_type, domain, opset, name, tuple(operands), tuple(outputs), plain)
        )

    def _of_one_type(self, operands: list[Any], rules: Schema, node: onnx.NodeProto, name: str) -> list[Any]:
        """``operands`` with float weights converted to the type of the data that shares their type parameter.

        PyTorch's exporter folds batch norms into bf16 convolutions, and writes these weights in fp32.
        """
        made = list(operands)
        for i, (ref, own) in enumerate(zip(operands, rules.types, strict=False)):
            if not isinstance(ref, Weight) or ref.array.dtype not in _WIDE_FLOATS:
                continue
            beside = {
                self.graph.type(other).dtype
                for other, parameter in zip(operands, rules.types, strict=False)
                if isinstance(other, Value) and parameter == own
            }
            if len(beside) == 1 and (dtype := beside.pop()) != ref.array.dtype and dtype in _WIDE_FLOATS:
                made[i] = self._rounded(ref, dtype)
                types = f"{dtype_name(ref.array.dtype)} weights {ref.name!r} beside {dtype_name(dtype)} data"
                self.mixed.setdefault(describe(node, name), types)
        return made

    def _rounded(self, weight: Weight, dtype: DType) -> Weight:
        """A weight in another float type, converted once for all its readers."""
        key = (weight, dtype)
        if key not in self._in_types:
            self._in_types[key] = Weight(weight.array.astype(dtype), weight.name, weight.src)
        return self._in_types[key]

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
        """Give a value whose rank cannot be inferred the shape that the model declares for it, if there is one."""
        op = self.graph.op(ref)
        out = op.outputs[ref.port]
        declared = self._declared(out.name)
        if declared is not None and declared.dtype == out.type.dtype:
            self._check_elements(op, declared)
            outs = list(op.outputs)
            outs[ref.port] = replace(out, type=declared)
            self.graph.set_op(replace(op, outputs=tuple(outs)))

    def _check_elements(self, op: Op, declared: TensorType) -> None:
        """Raise ShapeError if a view is declared with another number of elements than its operand has."""
        if op.kind not in _VIEWS or op.inputs[0] is None:
            return
        given = self.graph.type(op.inputs[0])
        known = given.is_static and declared.is_static
        if known and math.prod(given.static_shape) != math.prod(declared.static_shape):
            raise ShapeError(f"the result is declared as {declared}, which has another number of elements than {given}")

    def _declared(self, name: str) -> TensorType | None:
        """The type that the model declares for a value of the main graph, if it gives element type and rank."""
        if self._hints is None:
            proto = self.model.proto.graph
            self._hints = {v.name: v.type for v in (*proto.value_info, *proto.output)}
        return known_type(self._hints[name], name, self.graph.symbols()) if name in self._hints else None

    def refuse(self, name: str, op_type: str, domain: str, reason: str, opset: int | None = None) -> None:
        if self._alive:
            opset = self.model.opsets.get(domain, 0) if opset is None else opset
            node = RefusedNode(name, op_type, domain, opset, reason)
            if node not in self.unsupported:  # a body may be imported more than once
                self.unsupported.append(node)

    def _stand_ins(self, outputs: Sequence[str]) -> list[Any]:
        """Stand-ins of the declared type for an unsupported node's outputs, so that later nodes are checked too."""
        refs: list[Any] = []
        for out in outputs:
            declared = self._declared(out)
            refs.append(UNKNOWN if declared is None else self.graph.add_input(out, declared))
        return refs

    def nested(self, lift: Callable[[Weight], Value]) -> GraphImporter:
        inner = GraphImporter(self.model, self.custom)
        inner.graph.share_symbols(self.graph)
        inner.unsupported, inner.taken, inner.mixed = self.unsupported, self.taken, self.mixed
        inner.count, inner.inlined, inner.lenient = self.count, self.inlined, self.lenient
        inner._hints, inner._live, inner._alive = self._hints, self._live, self._alive
        inner.lift = lift
        return inner

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
        if depth >= FUNCTION_NESTING.value:
            raise ModelError(too_deep(), hint=FUNCTION_NESTING.hint)
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
        self.nodes(function.node, Place(scope, opsets, bound, f"{name}/", depth + 1), wanted, labels)
        missing = [x for x in wanted if x not in scope]
        if missing:
            raise ModelError(f"function {function.name} does not produce its output {missing[0]!r}")
        return [scope.get(x) for x in function.output[: len(outputs)]]

    def _tensor(self, t: onnx.TensorProto) -> Array:
        return to_array(t, self.model.external, self.model.name)

    def _sparse(self, t: onnx.SparseTensorProto) -> Array:
        return sparse_to_array(t, self.model.external, self.model.name)
