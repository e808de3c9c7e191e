"""A subgraph of a node: its nodes become nodes of the surrounding graph, or a body of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from optdnn.dim import Dim
from optdnn.errors import ModelError, RefusedNode, ShapeError
from optdnn.importers.emitter import Emitter, Weight, fits
from optdnn.importers.inputs import refusal
from optdnn.importers.scope import UNKNOWN, InnerScope, Scope
from optdnn.importers.sequence_loops import looked_up, nodes_of, stacking, without_lists
from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Value
from optdnn.limits import INLINED_NODES, SUBGRAPH_NESTING
from optdnn.ops.base import Body, Unsupported
from optdnn.ops.exchange import Stacking
from optdnn.ops.sequences import TensorList
from optdnn.types import Array, TensorType


class Consequence(Unsupported):
    """A part of a subgraph is not supported; it has been reported."""


@dataclass(frozen=True)
class Place:
    """The context of nodes: the values that they see by name, the opsets, the attributes of the call of the function that contains
    them, the prefix of their names, and their depth of inlining."""

    scope: Scope
    opsets: Mapping[str, int]
    bound: Mapping[str, tuple[int, Any]]
    prefix: str = ""
    depth: int = 0


class NodesImporter(Emitter):
    """The part of the node importer that a subgraph uses."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.unsupported: list[RefusedNode] = []
        self.taken: set[str] = set()
        """Names of nodes so far."""
        self.count = 0
        """Number of nodes so far; ``inlined``: the nodes of functions and subgraphs among them."""
        self.inlined = 0

    @abstractmethod
    def weights(self, proto: onnx.GraphProto, scope: Scope) -> None:
        """Read the initializers of a graph, or of a body, into ``scope``."""

    @abstractmethod
    def nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        place: Place,
        wanted: Sequence[str],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Import ``nodes`` (of the graph, or of an inlined function); their results go to ``place.scope``.

        ``wanted`` are the values that are read from outside; ``labels`` gives the outer names of a call's results.
        """

    @abstractmethod
    def nested(self, lift: Callable[[Weight], Value]) -> NodesImporter:
        """An importer of a body. It has its own graph; messages, names and symbols are shared.

        ``lift`` makes an input from a constant that is too large for a body.
        """


class Subgraph:
    """Implements ``ops.base.Subgraph`` for one GraphProto at its position in the model."""

    def __init__(
        self,
        importer: NodesImporter,
        proto: onnx.GraphProto,
        name: str,
        place: Place,
        tables: Mapping[str, Array] | None = None,
    ):
        """``tables``: values inside of a Loop's body that are known for each iteration, on the first axis."""
        self.importer, self.proto, self.name, self.place, self.tables = importer, proto, name, place, tables or {}
        self.seen: Scope = {}
        self.inputs, self.outputs = len(proto.input), len(proto.output)

    def fresh(self) -> Dim:
        return self.importer.graph.fresh_symbol("varying")

    def inline(self, inputs: Sequence[Any]) -> list[Any]:
        """Inline the subgraph: its nodes become nodes of the surrounding graph. Returns the refs of its outputs."""
        importer, outputs = self.importer, self.importer.outputs_at_hand
        scope = InnerScope(self.place.scope, self._own(), lambda ref: ref)
        for v, ref in zip(self.proto.input, inputs, strict=True):
            scope[v.name] = ref
        wanted = [v.name for v in self.proto.output]
        labels = {x: y for x, y in zip(wanted, outputs, strict=False) if y and x not in self.place.scope}
        with importer.apart():
            self._run(importer, scope, wanted, labels)
        return [self._output(scope, x) for x in wanted]

    def build(self, types: Sequence[TensorType]) -> tuple[Body, list[Any]]:
        """A body with formal inputs of these types, and the outer refs that it captures, in the order of its inputs.

        Afterward ``seen`` holds the values inside of the body.
        """
        captured: list[Any] = []

        def lift(ref: Any) -> Value:
            captured.append(ref)
            name = self.importer.graph.output(ref).name if isinstance(ref, Value) else ref.name
            return inner.graph.add_input(inner.graph.fresh_name(name), self.importer.type(ref))

        def capture(ref: Any) -> Any:
            """An outer value as seen inside: a small constant is repeated there, any other value becomes an input."""
            if ref is None or ref is UNKNOWN:
                return ref
            if isinstance(ref, TensorList):
                return type(ref)(map(capture, ref))
            known = self.importer.value(ref)
            if known is not None and known.dtype != object and fits(known):
                return inner.const(known)
            return lift(ref)

        inner = self.importer.nested(lift)
        scope = InnerScope(self.place.scope, self._own(), capture)
        if len(types) != self.inputs:
            raise ModelError(f"its subgraph has {self.inputs} inputs, {len(types)} are fed")
        for v, t in zip(self.proto.input, types, strict=True):
            if reason := refusal(v.type, untyped=True):
                raise Unsupported(reason)
            scope[v.name] = inner.graph.add_input(v.name, t)
        for x, table in self.tables.items():
            scope[x] = looked_up(inner, table, scope[self.proto.input[0].name])
        self.seen = scope
        wanted = [v.name for v in self.proto.output]
        taken = set(self.importer.taken)
        self._run(inner, scope, wanted, {})
        found = [self._output(scope, x) for x in wanted]
        if any(isinstance(ref, TensorList) for ref in found):
            raise Unsupported("its subgraph yields a sequence of tensors")
        refs = [inner.enter(ref) for ref in found]
        for x, ref in zip(wanted, refs, strict=True):
            inner.graph.add_output(ref, inner.graph.fresh_name(x))
        # A body may be built again, with other types: free its names for the next time.
        self.importer.taken.intersection_update(taken)
        self.importer.count, self.importer.inlined = inner.count, inner.inlined
        return GraphBody(inner.graph), captured

    def stacking(self, operands: Sequence[Any]) -> Stacking | None:
        reported = len(self.importer.unsupported)
        try:
            return stacking(self, operands, self.importer)
        except (Unsupported, ShapeError):  # a size is known only if the loop is unrolled
            del self.importer.unsupported[reported:]
            return None

    def appending(self, operands: Sequence[Any]) -> Subgraph | None:
        lists = [k for k, v in enumerate(operands) if isinstance(v, TensorList)]
        plain = None if any(operands[k] for k in lists) else without_lists(self.proto, lists)
        return None if plain is None else self.variant(plain, {})

    def builds(self, types: Sequence[TensorType]) -> bool:
        taken, reported = set(self.importer.taken), len(self.importer.unsupported)
        try:
            self.build(types)
        except (Unsupported, ShapeError):
            self.importer.taken.intersection_update(taken)
            del self.importer.unsupported[reported:]
            return False
        return True

    def variant(self, proto: onnx.GraphProto, tables: Mapping[str, Array]) -> Subgraph:
        """Another subgraph at the same position."""
        return Subgraph(self.importer, proto, self.name, self.place, tables)

    def repeats(self, trips: int, most: int) -> bool:
        return trips * nodes_of(self.proto) <= min(most, INLINED_NODES.value - self.importer.inlined)

    def _own(self) -> set[str]:
        """Names of the values that its nodes produce."""
        return {x for n in self.proto.node for x in n.output if x}

    def _run(self, importer: NodesImporter, scope: Scope, wanted: Sequence[str], labels: Mapping[str, str]) -> None:
        if self.place.depth >= SUBGRAPH_NESTING.value:
            deep = f"subgraphs are more than {SUBGRAPH_NESTING.value} deep in one another"
            raise ModelError(deep, hint=SUBGRAPH_NESTING.hint)
        local: Scope = {}
        importer.weights(self.proto, local)
        scope.update(local)
        place = replace(self.place, scope=scope, prefix=f"{self.name}/", depth=self.place.depth + 1)
        importer.nodes(self.proto.node, place, wanted, labels)

    def _output(self, scope: Scope, name: str) -> Any:
        try:
            ref = scope[name]
        except KeyError:
            raise ModelError(f"its subgraph does not produce its output {name!r}") from None
        if ref is None:
            raise Unsupported(f"its subgraph yields {name!r}, an optional value that is absent")
        if ref is UNKNOWN:
            raise Consequence
        return ref
