"""A patch: a local rewrite that is checked before it is applied.

A rule builds new ops through :meth:`Patch.add` (types are inferred as they are added) and states with :meth:`Patch.replace` which
old values they replace; the pass applies the patch. Nothing of the graph changes until :meth:`Patch.apply`, which refuses a patch
that would change the type of a value. Ops that become unused are removed, and the names of the ONNX nodes they came from pass to
the new ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from optdnn.dim import Dim, DimLike, Symbol, bounds
from optdnn.errors import InternalError
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Output, Value
from optdnn.ir.inference import known_shape
from optdnn.ops.base import KNOWN_LIMIT, Attrs, Known
from optdnn.types import Array, Shape, TensorType


@dataclass(frozen=True)
class Applied:
    """The outcome of a patch, for the worklist and the report."""

    added: tuple[int, ...]
    removed: tuple[Op, ...]
    touched: tuple[int, ...]
    """Ops with changed operands, or changed operand types."""


def _sources(ops: Iterable[Op]) -> frozenset[str]:
    """The provenance of several ops."""
    return frozenset[str]().union(*(op.src for op in ops))


def _symbols(shape: Shape | None) -> frozenset[Symbol]:
    """The symbols of a shape."""
    return frozenset[Symbol]().union(*(d.symbols() for d in shape or () if isinstance(d, Dim)))


def _is_named(a: DimLike, b: DimLike, fresh: frozenset[Symbol]) -> bool:
    """Whether the size ``b`` has a new symbol, and is not known better than ``a``."""
    return isinstance(a, Dim) and isinstance(b, Dim) and bool(b.symbols() & fresh) and bounds(a)[1] <= bounds(b)[1]


def _with_shape(op: Op, port: int, shape: Shape) -> Op:
    """The op with another shape of a result."""
    outputs = [replace(o, type=o.type.with_shape(shape)) if i == port else o for i, o in enumerate(op.outputs)]
    return replace(op, outputs=tuple(outputs))


class Patch:
    """``covers``: the matched ops; the union of their ``src`` is handed to every new computing op."""

    def __init__(self, graph: Graph, covers: Iterable[Op]):
        self.graph = graph
        self.covers = tuple(covers)
        self.src: frozenset[str] = frozenset().union(*(op.src for op in self.covers))
        self._new: dict[int, Op] = {}
        self._replaced: dict[Value, Value] = {}

    def type(self, value: Value) -> TensorType:
        return self._output(value).type

    def known(self, value: Value | None) -> Known | None:
        if value is None:
            return None
        op = self._new.get(value.op)
        if op is None:
            return self.graph.known(value)
        return op.attrs.value if op.kind == "Constant" else op.outputs[value.port].known

    def _output(self, value: Value) -> Output:
        op = self._new.get(value.op)
        return (op or self.graph.op(value)).outputs[value.port]

    def add(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        attrs: Attrs | None = None,
        *,
        name: str = "",
        src: Iterable[str] | None = None,
    ) -> Value:
        """Add a single-output op; returns its value."""
        return self.add_op(kind, inputs, attrs, names=(name,), src=src).value

    def add_op(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        attrs: Attrs | None = None,
        *,
        names: Sequence[str] = (),
        outputs: int = 1,
        src: Iterable[str] | None = None,
    ) -> Op:
        """Add an op of any number of outputs. ``src`` overrides the provenance (default: all that the patch covers)."""
        names = [n or f"{kind}" for n in names] or [kind]
        op = self.graph.make(
            kind,
            inputs,
            attrs,
            [None if v is None else self.type(v) for v in inputs],
            [self.known(v) for v in inputs],
            names=names,
            outputs=outputs,
            src=self.src if src is None else src,
        )
        self._new[op.id] = op
        return op

    def constant(self, value: Array, name: str = "const") -> Value:
        op = self.graph.make_constant(value, name)
        self._new[op.id] = op
        return op.value

    def replace(self, old: Value, new: Value) -> None:
        """Make every user of ``old`` read ``new``; ``new`` takes over the name if a new op computes it."""
        self._replaced[old] = new

    def replace_each(self, old: Iterable[Value], new: Iterable[Value]) -> None:
        """:meth:`replace` for each of the values that is read, by the one at its place in ``new``, which may have further ones."""
        for before, after in zip(old, new, strict=False):
            if self.graph.uses(before):
                self.replace(before, after)

    def apply(self) -> Applied:
        """Check, then change the graph."""
        for old, new in self._replaced.items():
            before, after = self.graph.type(old), self.type(new)
            if before.layout != after.layout or not before.agrees(after):
                raise InternalError(
                    f"a patch over {', '.join(op.name for op in self.covers)} would change the type of "
                    f"{self.graph.output(old).name!r} from {before} to {after}"
                )
        for op in self._new.values():
            self.graph.insert(op)
        touched: set[int] = set()
        self._name_sizes()
        again, sizes = set[int](), self._known_sizes()
        for old, new in self._replaced.items():
            users = {u.op for u in self.graph.uses(old)}
            touched |= users
            if self._sharpens(old, new):
                again |= users
            name = self.graph.output(old).name
            self.graph.replace_uses(old, new)
            if new.op in self._new:
                self.graph.rename(new, name)
        if again:
            touched.update(self.graph.refresh(again))
        if sizes:
            touched.update(self.graph.set_sizes(sizes))
        removed = self.graph.remove_dead(
            {v.op for v in self._replaced} | {op.id for op in self.covers} | set(self._new)
        )
        covered = {op.id for op in self.covers}
        others = _sources(op for op in removed if op.id not in covered)
        lost = others - self.src
        survivors = [i for i in self._new if i in self.graph]
        if not survivors:
            gone = {op.id for op in removed}
            whole = self.src if covered <= gone else _sources(op for op in removed if op.id in covered)
            self._hand_over(whole | lost if lost else whole, touched)
        elif lost:
            for i in survivors:
                op = self.graph.op(i)
                if op.kind != "Constant":
                    self.graph.set_op(replace(op, src=op.src | lost))
        return Applied(tuple(survivors), tuple(removed), tuple(sorted(i for i in touched if i in self.graph)))

    def _name_sizes(self) -> None:
        """An op that makes a symbol for a size gets that of the value that it replaces.

        So the positions of one mask instead of another have the size that all readers know."""
        readers = set[int]()
        for old, new in self._replaced.items():
            before, after, made = self.graph.type(old).shape, self.type(new).shape, self._new.get(new.op)
            if made is None or before == after or before is None or after is None:
                continue
            fresh = _symbols(after) - self._given(made)
            shape = tuple(a if _is_named(a, b, fresh) else b for a, b in zip(before, after, strict=True))
            if shape != after:
                self.graph.set_op(_with_shape(self.graph.op(new), new.port, shape))
                readers |= {u.op for u in self.graph.uses(new)}
        self.graph.refresh(readers)

    def _known_sizes(self) -> dict[str, DimLike]:
        """The symbols that only a replaced op makes, and the expressions of the new value.

        A loop's result has as many rows as those that it reads, for example."""
        found = dict[str, DimLike]()
        for old, new in self._replaced.items():
            before, after = self.graph.type(old).shape, self.graph.type(new).shape
            if new.op not in self._new or before == after or before is None or after is None:
                continue
            own, inputs = _symbols(before) - self._given(self.graph.op(old)), self.graph.symbols()
            for a, b in zip(before, after, strict=True):
                lone = next((s for s in own if s.name not in inputs and a == Dim((((s,), 1),))), None)
                if lone is not None and isinstance(b, Dim) and lone not in b.symbols():
                    found[lone.name] = b
        return found

    def _given(self, op: Op) -> frozenset[Symbol]:
        """The symbols of an op's operands, their sizes and their known values."""
        known = [known_shape(k) for v in op.inputs if (k := self.known(v)) is not None and k.dtype == object]
        given = [*(self.type(v).shape for v in op.inputs if v is not None), *known]
        return frozenset[Symbol]().union(*map(_symbols, given))

    def _sharpens(self, old: Value, new: Value) -> bool:
        """Whether more is known of the new value than of the old one, so that its users may infer more."""
        if self.graph.type(old) != self.graph.type(new):
            return True
        known = self.graph.known(new)
        return known is not None and known.size <= KNOWN_LIMIT and self.graph.known(old) is None

    def _hand_over(self, src: frozenset[str], users: set[int]) -> None:
        """A removal without new ops: the replacement takes the provenance of the removed op.

        If the replacement is an input or a constant, the ops that now read it take the provenance.
        """
        for new in self._replaced.values():
            if new.op not in self.graph:  # nothing read the replaced value: old and new are both gone
                continue
            heirs = [new.op] if self.graph.op(new).kind not in STRUCTURAL else sorted(users)
            for op in (self.graph.op(i) for i in heirs if i in self.graph):
                if op.kind not in STRUCTURAL:
                    self.graph.set_op(replace(op, src=op.src | src))
