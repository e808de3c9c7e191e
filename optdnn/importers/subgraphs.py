"""Subgraphs of ONNX nodes: inlined where it is known that they run once, else imported as bodies of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx

from optdnn.dim import Dim
from optdnn.errors import ModelError
from optdnn.importers.inputs import refusal
from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Value
from optdnn.ops.base import Body, Unsupported
from optdnn.runtime.reference.nested import CONSTANT_LIMIT
from optdnn.types import Array, TensorType

if TYPE_CHECKING:
    from optdnn.importers.onnx import Importer

Scope = dict[str, Any]
MAX_DEPTH = 16
"""Most subgraphs inside of one another."""


def fits(array: Array) -> bool:
    """True for a constant that a body may hold."""
    return array.size <= CONSTANT_LIMIT and array.dtype.kind != "c"


class Consequence(Unsupported):
    """Something inside of a subgraph is not supported, and has been reported."""


class Inner(Scope):
    """The names inside of a subgraph. One that is not its own is looked up outside, when it is first read."""

    def __init__(self, outer: Scope, own: Collection[str], capture: Any):
        super().__init__()
        self._outer, self._own, self._capture = outer, frozenset(own), capture

    def __missing__(self, name: str) -> Any:
        if name in self._own:  # produced inside, later
            raise KeyError(name)
        self[name] = self._capture(self._outer[name])
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name not in self._own and name in self._outer)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (dict.get would not look outside)


class Subgraph:
    """Implements ``ops.exchange.Subgraph`` for one GraphProto at its place in the model."""

    def __init__(
        self,
        importer: Importer,
        proto: onnx.GraphProto,
        name: str,
        scope: Scope,
        opsets: Mapping[str, int],
        bound: Mapping[str, tuple[int, Any]],
        depth: int,
    ):
        self.importer, self.proto, self.name = importer, proto, name
        self.scope, self.opsets, self.bound, self.depth = scope, opsets, bound, depth
        self.inputs, self.outputs = len(proto.input), len(proto.output)

    def fresh(self) -> Dim:
        return self.importer.graph.fresh_symbol("varying")

    def inline(self, inputs: Sequence[Any]) -> list[Any]:
        """The refs of its outputs; its nodes become nodes of the graph around it."""
        importer, outputs = self.importer, self.importer.outputs_at_hand
        scope = Inner(self.scope, self._own(), lambda ref: ref)
        for v, ref in zip(self.proto.input, inputs, strict=True):
            scope[v.name] = ref
        wanted = [v.name for v in self.proto.output]
        labels = {x: y for x, y in zip(wanted, outputs, strict=False) if y and x not in self.scope}
        with importer.apart():
            self._run(importer, scope, wanted, labels)
        return [self._output(scope, x) for x in wanted]

    def build(self, types: Sequence[TensorType]) -> tuple[Body, list[Any]]:
        """A body whose formal inputs have these types, and the outer refs that it captures, in the order of its inputs."""
        captured: list[Any] = []

        def lift(ref: Any) -> Value:
            captured.append(ref)
            name = self.importer.graph.output(ref).name if isinstance(ref, Value) else ref.name
            return inner.graph.add_input(inner.graph.fresh_name(name), self.importer.type(ref))

        def capture(ref: Any) -> Any:
            """An outer value inside: a small constant is repeated there, anything else becomes an input."""
            if ref is None or self.importer.is_unknown(ref):
                return ref
            known = self.importer.value(ref)
            if known is not None and known.dtype != object and fits(known):
                return inner.const(known)
            return lift(ref)

        inner = self.importer.nested(lift)
        scope = Inner(self.scope, self._own(), capture)
        if len(types) != self.inputs:
            raise ModelError(f"its subgraph has {self.inputs} inputs, {len(types)} are fed")
        for v, t in zip(self.proto.input, types, strict=True):
            reason = refusal(v.type) if v.type.WhichOneof("value") and v.type.tensor_type.elem_type != 0 else None
            if reason is not None:
                raise Unsupported(reason)
            scope[v.name] = inner.graph.add_input(v.name, t)
        wanted = [v.name for v in self.proto.output]
        taken = set(self.importer.taken)
        self._run(inner, scope, wanted, {})
        refs = [inner.enter(self._output(scope, x)) for x in wanted]
        for x, ref in zip(wanted, refs, strict=True):
            inner.graph.add_output(ref, inner.graph.fresh_name(x))
        # A body may be built again, with other types: the same names are free for it.
        self.importer.taken.intersection_update(taken)
        self.importer.count = inner.count
        return GraphBody(inner.graph), captured

    def _own(self) -> set[str]:
        """Names of the values that its nodes produce."""
        return {x for n in self.proto.node for x in n.output if x}

    def _run(self, importer: Importer, scope: Scope, wanted: Sequence[str], labels: Mapping[str, str]) -> None:
        if self.depth >= MAX_DEPTH:
            raise ModelError(f"subgraphs are more than {MAX_DEPTH} deep in one another")
        local: Scope = {}
        importer.weights(self.proto, local)
        scope.update(local)
        importer.nodes(self.proto.node, scope, self.opsets, f"{self.name}/", self.bound, wanted, self.depth + 1, labels)

    def _output(self, scope: Scope, name: str) -> Any:
        try:
            ref = scope[name]
        except KeyError:
            raise ModelError(f"its subgraph does not produce its output {name!r}") from None
        if ref is None:
            raise Unsupported(f"its subgraph yields {name!r}, an optional value that is absent")
        if self.importer.is_unknown(ref):
            raise Consequence
        return ref
