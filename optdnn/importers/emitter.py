"""The emitter of import functions: it names results, and sets their provenance, after the current node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Value
from optdnn.limits import TENSOR_BYTES
from optdnn.ops.base import Attrs, Known
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import FromOnnx
from optdnn.ops.table import IMPORTERS, OPDEFS
from optdnn.runtime.reference.nested import CONSTANT_LIMIT
from optdnn.types import Array, TensorType


def fits(array: Array) -> bool:
    """Whether a constant is small enough to be stored in a body."""
    return array.size <= CONSTANT_LIMIT and array.dtype.kind != "c"


class Weight:
    """A constant that enters the graph when the first op uses it. So unused constants never enter."""

    __slots__ = ("array", "name", "src", "value")

    def __init__(self, array: Array, name: str, src: frozenset[str] = frozenset()):
        self.array, self.name, self.src = array, name, src
        self.value: Value | None = None


class Emitter:
    """Implements ``ops.exchange.Emit`` for one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.lift: Callable[[Weight], Value] | None = None
        """In a body: makes an input from a constant that is too large for it."""
        self._lifted: dict[int, Value] = {}
        self._outputs: tuple[str, ...] = ()
        self._src: frozenset[str] = frozenset()
        self._made: dict[str, Value] = {}
        self.lenient: dict[str, str] = {}
        """Nodes that end a run with an error in ONNX where the graph returns a result, and when they do so."""

    @property
    def outputs_at_hand(self) -> tuple[str, ...]:
        """Names of the current node's outputs."""
        return self._outputs

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Import other nodes in the middle of a node."""
        outputs, src = self._outputs, self._src
        yield
        self._outputs, self._src, self._made = outputs, src, {}

    def op(self, kind: str, inputs: Sequence[Any], attrs: Attrs | None = None, outputs: int = 1) -> tuple[Value, ...]:
        operands = [None if r is None else self.enter(r, kind) for r in inputs]
        while operands and operands[-1] is None:
            operands.pop()
        base = self._outputs[0] if self._outputs else kind
        names = [base + "." + kind] if self._made else self._outputs
        op = self.graph.add(kind, operands, attrs, names=names, outputs=outputs, src=self._src)
        for i, out in enumerate(op.outputs):
            extent = out.type.dtype.itemsize
            for d in out.type.shape or ():
                if type(d) is int:
                    extent *= d
            if extent > TENSOR_BYTES.value:
                size = f"{extent / (1 << 30):.3g} GiB"
                raise ShapeError(f"the output would be {out.type}, which takes {size}", hint=TENSOR_BYTES.hint)
            self._made[out.name] = Value(op.id, i)
        return tuple(op.values)

    def const(self, value: Array) -> Weight:
        return Weight(value, self._outputs[0] if self._outputs else "const", self._src)

    def type(self, ref: Any) -> TensorType:
        if isinstance(ref, Weight):
            return TensorType(ref.array.dtype, ref.array.shape)
        return self.graph.type(ref)

    def value(self, ref: Any) -> Known | None:
        return ref.array if isinstance(ref, Weight) else self.graph.known(ref)

    def definition(self, kind: str) -> OpDef:
        return OPDEFS[kind]

    def unchecked(self, what: str) -> None:
        self.lenient.update(dict.fromkeys(self._src, what))

    def importer(self, op_type: str) -> FromOnnx:
        return IMPORTERS[op_type]

    def enter(self, ref: Any, kind: str = "") -> Value:
        """The value of a ref. A constant enters the graph at its first use; ``kind`` is the kind of the op that uses it."""
        if isinstance(ref, Value):
            return ref
        if self.lift is not None and not fits(ref.array if isinstance(ref, Weight) else ref):
            weight = ref if isinstance(ref, Weight) else self.const(ref)
            if id(weight) not in self._lifted:
                self._lifted[id(weight)] = self.lift(weight)
            return self._lifted[id(weight)]
        if isinstance(ref, Weight):
            if ref.value is None:
                ref.value = self.graph.add_constant(ref.array, ref.name, ref.src)
            return ref.value
        name = f"{self._outputs[0]}.{kind}.const" if self._outputs else "const"
        return self.graph.add_constant(ref, name)
