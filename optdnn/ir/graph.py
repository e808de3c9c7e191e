"""The graph: operators as nodes of a networkx multigraph, one edge per use of a value.

Ops (:mod:`optdnn.ir.op`) are immutable; rewriting replaces them (see :mod:`optdnn.ir.patch`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import networkx as nx
import numpy as np

from optdnn.dim import INF, Dim, DimLike, bounds, symbol
from optdnn.errors import InternalError, ShapeError
from optdnn.ir.inference import better_known, infer, kept, sharper, with_sizes
from optdnn.ir.multigraph import topological_order
from optdnn.ir.op import STRUCTURAL, ConstantAttrs, Op, Output, Use, Value
from optdnn.ops.base import Attrs, Known, Result
from optdnn.ranges import Profile
from optdnn.types import Array, TensorType

__all__ = ["STRUCTURAL", "ConstantAttrs", "Graph", "Op", "Output", "Use", "Value"]

T = TypeVar("T")


class Graph:
    """A network. ``inputs`` and ``outputs`` are op ids in ONNX order."""

    def __init__(self, name: str = "graph"):
        self.name = name
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self._g: nx.MultiDiGraph = nx.MultiDiGraph()
        self._ops: dict[int, Op] = {}
        """A copy of the node attributes "op" of ``_g``: they are read more often than anything else."""
        self._ids = itertools.count()
        self._order: list[int] | None = None
        self._kinds: dict[str, int] | None = None
        self._kept: dict[Callable[[Graph], Any], Any] = {}
        self._names: set[str] = set()
        self._suffixes: dict[str, int] = {}
        self._symbols: set[str] = set()
        self._symbol_counts: dict[str, int] = {}
        self.profiles: tuple[Profile, ...] = ()
        """Boxes of sizes for which the network is built; none: all sizes. A symbol's own range spans all boxes."""
        self.description: Mapping[str, Any] = {}
        """What the model says about itself (:func:`optdnn.importers.model.description`)."""

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """Number of computing ops (constants, inputs and outputs not counted)."""
        return sum(1 for op in self.ops() if op.kind not in STRUCTURAL)

    def __contains__(self, op_id: int) -> bool:
        return op_id in self._ops

    @property
    def nx(self) -> nx.MultiDiGraph:
        """The networkx graph itself (node attribute "op", edge key = operand slot). Read it; change it through patches."""
        return self._g

    def op(self, ref: int | Value) -> Op:
        """The op with this id, or the producer of this value."""
        return self._ops[ref.op if isinstance(ref, Value) else ref]

    def ops(self) -> Iterator[Op]:
        """All ops, in no particular order."""
        return iter(self._ops.values())

    def order(self) -> list[Op]:
        """All ops in a deterministic topological order (cached until the next change).

        Raises InternalError when there is a cycle.
        """
        if self._order is None:
            self._order = topological_order(self._g)
        return [self._ops[i] for i in self._order]

    def of_kind(self, *kinds: str) -> list[Op]:
        """Ops of these kinds in topological order."""
        if not any(op.kind in kinds for op in self.ops()):
            return []
        return [op for op in self.order() if op.kind in kinds]

    def output(self, value: Value) -> Output:
        return self.op(value).outputs[value.port]

    def type(self, value: Value) -> TensorType:
        return self.output(value).type

    def known(self, value: Value | None) -> Known | None:
        """The value as an array if it is a constant or a resolved shape computation (may contain Dim), otherwise None."""
        if value is None:
            return None
        op = self.op(value)
        if op.kind == "Constant":
            array: Array = op.attrs.value
            return array
        return op.outputs[value.port].known

    def constant_value(self, value: Value | None) -> Array | None:
        """The array of a Constant op, otherwise None."""
        if value is None:
            return None
        op = self.op(value)
        return op.attrs.value if op.kind == "Constant" else None

    def uses(self, value: Value) -> list[Use]:
        """Every operand slot that reads the value, in deterministic order."""
        return sorted(
            Use(user, slot)
            for user, edges in self._g._adj[value.op].items()  # the dictionaries directly: views are ten times slower
            for slot, data in edges.items()
            if data["port"] == value.port
        )

    def use_count(self, value: Value) -> int:
        """Number of operand slots that read the value."""
        return sum(data["port"] == value.port for edges in self._g._adj[value.op].values() for data in edges.values())

    def users(self, value: Value) -> list[Op]:
        """The ops that read the value, each once."""
        return [self.op(i) for i in dict.fromkeys(u.op for u in self.uses(value))]

    def readers(self, op: Op) -> list[Op]:
        """The ops that read each result of ``op``, in the order of the results."""
        reads = {(data["port"], user) for user, edges in self._g._adj[op.id].items() for data in edges.values()}
        return [self._ops[user] for _, user in sorted(reads)]

    def sole_user(self, value: Value) -> Op | None:
        """The op that reads the value, if exactly one slot of one op reads it."""
        found: int | None = None
        for user, edges in self._g._adj[value.op].items():
            for data in edges.values():
                if data["port"] == value.port:
                    if found is not None:
                        return None  # stop early: a value may have thousands of uses
                    found = user
        return None if found is None else self._ops[found]

    def critical_path(self) -> list[Op]:
        """A longest chain of dependent ops."""
        return [self.op(i) for i in nx.dag_longest_path(nx.DiGraph(self._g), weight=None)]

    def kinds(self) -> dict[str, int]:
        """Number of ops of each computing kind, by name (cached until the next change)."""
        if self._kinds is None:
            found = Counter(op.kind for op in self.ops() if op.kind not in STRUCTURAL)
            self._kinds = dict(sorted(found.items()))
        return dict(self._kinds)

    def kept(self, find: Callable[[Graph], T]) -> T:
        """What ``find`` finds in this graph, kept until the graph changes."""
        if find not in self._kept:
            self._kept[find] = find(self)
        return self._kept[find]  # type: ignore[no-any-return]

    def symbols(self) -> dict[str, Dim]:
        """The symbolic dimensions of the inputs, by name."""
        found: dict[str, Dim] = {}
        for i in self.inputs:
            for d in self.op(i).outputs[0].type.shape or ():
                if isinstance(d, Dim):
                    found.update({s.name: Dim((((s,), 1),)) for s in d.symbols()})
        return found

    def known_of(self, values: Sequence[Value | None]) -> tuple[list[TensorType | None], list[Known | None]]:
        """The types and the known values of operands; None for an absent one."""
        return [None if v is None else self.type(v) for v in values], [self.known(v) for v in values]

    def infer(self, op: Op) -> Result:
        """The result of inference for an op from its current operands. Raises ShapeError if they contradict."""
        types, values = self.known_of(op.inputs)
        if op.kind == "Output":
            return Result(tuple(t for t in types if t is not None), tuple(values))
        return infer(op.kind, op.attrs, types, values, len(op.outputs), self.fresh_symbol)

    # ------------------------------------------------------------------ building

    def new_id(self) -> int:
        return next(self._ids)

    def fresh_name(self, hint: str) -> str:
        """``hint``, or ``hint_1`` and so on when an output of that name exists already; the name is taken."""
        hint = hint or "v"
        name = hint
        while name in self._names:
            self._suffixes[hint] = self._suffixes.get(hint, 0) + 1
            name = f"{hint}_{self._suffixes[hint]}"
        self._names.add(name)
        return name

    def fresh_symbol(self, hint: str, most: DimLike = INF) -> Dim:
        """A new symbol for a size that depends on data, different from all others (the inputs' included); at most ``most``."""
        first = self._symbol_counts.get(hint, 0)  # earlier names are taken
        numbered = ((k, f"{hint}_{k}" if k else hint) for k in itertools.count(first))
        self._symbol_counts[hint], name = next((k, n) for k, n in numbered if n not in self._symbols)
        self._symbols.add(name)
        return symbol(name, 0, max(0, bounds(most)[1]))

    def share_symbols(self, outer: Graph) -> None:
        """Share the names of symbols with ``outer``, so that neither graph reuses a symbol of the other: this graph is a body
        inside of ``outer``."""
        self._symbols = outer._symbols

    def add_input(self, name: str, type: TensorType) -> Value:
        for d in type.shape or ():
            if isinstance(d, Dim):
                self._symbols.update(s.name for s in d.symbols())
        op = self.insert(Op(self.new_id(), "Input", Attrs(), (), (Output(self.fresh_name(name), type),)))
        self.inputs.append(op.id)
        return op.value

    def add_constant(self, value: Array, name: str = "const", src: Iterable[str] = ()) -> Value:
        """A constant. The array must not be changed afterward."""
        return self.insert(self.make_constant(value, name, src)).value

    def make_constant(self, value: Array, name: str, src: Iterable[str] = ()) -> Op:
        value = np.asarray(value)
        out = Output(self.fresh_name(name), TensorType(value.dtype, value.shape))
        return Op(self.new_id(), "Constant", ConstantAttrs(value), (), (out,), frozenset(src))

    def add_output(self, value: Value, name: str) -> Op:
        """Declare ``value`` an output of the network, called ``name``."""
        op = self.insert(Op(self.new_id(), "Output", Attrs(), (value,), (Output(name, self.type(value)),)))
        self.outputs.append(op.id)
        return op

    def add(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        attrs: Attrs | None = None,
        *,
        names: Sequence[str] = (),
        outputs: int = 1,
        src: Iterable[str] = (),
    ) -> Op:
        """Add one op; its output types (and known values) are inferred. Raises ShapeError if they contradict."""
        types, values = self.known_of(inputs)
        return self.insert(self.make(kind, inputs, attrs, types, values, names=names, outputs=outputs, src=src))

    def make(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        attrs: Attrs | None,
        types: Sequence[TensorType | None],
        values: Sequence[Known | None],
        *,
        names: Sequence[str] = (),
        outputs: int = 1,
        src: Iterable[str] = (),
    ) -> Op:
        """An op with inferred output types, not yet inserted."""
        attrs = attrs if attrs is not None else Attrs()
        result = infer(kind, attrs, types, values, outputs, self.fresh_symbol)
        base = names[0] if names else kind
        labels = [
            names[i] if i < len(names) and names[i] else f"{base}.{i}" if i else base for i in range(len(result.types))
        ]
        outs = tuple(
            Output(self.fresh_name(label), t, kept(result.values[i] if i < len(result.values) else None))
            for i, (label, t) in enumerate(zip(labels, result.types, strict=True))
        )
        return Op(self.new_id(), kind, attrs, tuple(inputs), outs, frozenset(src))

    # ------------------------------------------------------------------ changing (patches and passes use these)

    def insert(self, op: Op) -> Op:
        """Add an op whose operands exist already."""
        for value in op.inputs:
            if value is not None and (value.op not in self._ops or value.port >= len(self.op(value).outputs)):
                raise InternalError(f"{op.kind} {op.name!r} reads {value}, which does not exist")
        self._g.add_node(op.id, op=op)
        self._ops[op.id] = op
        for slot, value in enumerate(op.inputs):
            if value is not None:
                self._g.add_edge(value.op, op.id, key=slot, port=value.port)
        self._order = self._kinds = None
        self._kept.clear()
        return op

    def set_op(self, op: Op) -> None:
        """Replace the op of the same id; operand edges follow ``op.inputs``."""
        old = self.op(op.id)
        if old.inputs != op.inputs:
            for slot, (before, after) in enumerate(itertools.zip_longest(old.inputs, op.inputs)):
                if before == after:
                    continue  # a Concat of a thousand operands changes one at a time
                if before is not None:
                    self._g.remove_edge(before.op, op.id, key=slot)
                if after is not None:
                    self._g.add_edge(after.op, op.id, key=slot, port=after.port)
            self._order = None
        if old.kind != op.kind:
            self._kinds = None
        self._g._node[op.id]["op"] = self._ops[op.id] = op
        self._kept.clear()

    def rename(self, value: Value, name: str) -> None:
        """Give a value the (already free or taken-over) name."""
        op = self.op(value)
        outs = list(op.outputs)
        outs[value.port] = replace(outs[value.port], name=name)
        self._names.add(name)
        self.set_op(replace(op, outputs=tuple(outs)))

    def replace_uses(self, old: Value, new: Value) -> None:
        """Make every user of ``old`` read ``new`` instead."""
        for user_id in {u.op for u in self.uses(old)}:
            user = self.op(user_id)
            self.set_op(replace(user, inputs=tuple(new if v == old else v for v in user.inputs)))

    def refresh(self, start: Iterable[int]) -> list[int]:
        """Infer these ops again, then their users, as long as a type or a known value becomes sharper.

        Returns the sorted ids of the ops that changed. Raises ShapeError, naming the op, if its operands contradict.
        """
        changed, left, late = set[int](), set(start), dict[int, ShapeError]()
        while left:
            before = late
            late = self._infer_again(left, changed)
            if late and late.keys() == before.keys():
                op, error = self.op(min(late)), late[min(late)]
                raise ShapeError(f"{op.kind} {op.name!r}: {error.message}", hint=error.hint) from error
            left = set(late)
        return sorted(changed)

    def _infer_again(self, start: Iterable[int], changed: set[int]) -> dict[int, ShapeError]:
        """One round of :meth:`refresh`. Returns the errors of ops with contradicting operands: another operand may have been
        inferred since."""
        inputs = frozenset(self.symbols())
        stack, late = sorted(start, reverse=True), dict[int, ShapeError]()
        while stack:
            op = self.op(stack.pop())
            late.pop(op.id, None)
            try:
                found = self.infer(op)
            except ShapeError as error:
                late[op.id] = error
                continue
            outputs = []
            for i, out in enumerate(op.outputs):
                known = kept(found.values[i]) if i < len(found.values) else None
                better = better_known(out.known, known, inputs)
                type = out.type.with_shape(sharper(out.type.shape, found.types[i].shape, inputs))
                outputs.append(Output(out.name, type, known if better else out.known))
                if better or type != out.type:
                    changed.add(op.id)
                    stack.extend(sorted({u.op for u in self.uses(Value(op.id, i))}, reverse=True))
            self.set_op(replace(op, outputs=tuple(outputs)))
        return late

    def set_sizes(self, sizes: Mapping[str, DimLike]) -> list[int]:
        """Replace the symbols named in ``sizes`` in all types and known values. Returns the sorted ids of the ops that changed."""
        changed: list[int] = []
        for op in [*self._ops.values()]:
            outputs = tuple(with_sizes(out, sizes) for out in op.outputs)
            if any(new is not out for new, out in zip(outputs, op.outputs, strict=True)):
                self.set_op(replace(op, outputs=outputs))
                changed.append(op.id)
        return sorted(changed)

    def remove(self, op_id: int) -> None:
        """Remove an op that nothing uses any more."""
        if self._g._adj[op_id]:
            raise InternalError(f"{self.op(op_id).name!r} is still used")
        if op_id in self.inputs or op_id in self.outputs:
            raise InternalError(f"{self.op(op_id).name!r} is an input or output of the network")
        self._g.remove_node(op_id)
        del self._ops[op_id]
        self._order = self._kinds = None
        self._kept.clear()

    def remove_dead(self, start: Iterable[int]) -> list[Op]:
        """Remove the unused ops among ``start``, then producers that only they used; returns the removed ops."""
        stack, removed = sorted(start, reverse=True), []
        while stack:
            i = stack.pop()
            if i not in self._ops or self._g._adj[i] or self.op(i).kind in ("Input", "Output"):
                continue
            op = self.op(i)
            self.remove(i)
            removed.append(op)
            stack.extend(v.op for v in op.inputs if v is not None)
        return removed

    def copy(self) -> Graph:
        """An independent graph that shares the (immutable) ops."""
        other = Graph(self.name)
        other.inputs, other.outputs, other.profiles = list(self.inputs), list(self.outputs), self.profiles
        other.description = self.description
        other._g, other._ops = self._g.copy(), dict(self._ops)
        other._suffixes, other._symbol_counts = dict(self._suffixes), dict(self._symbol_counts)
        other._ids = itertools.count(max(self._g.nodes, default=-1) + 1)
        other._names, other._symbols = set(self._names), set(self._symbols)
        other._order = None if self._order is None else list(self._order)
        return other
