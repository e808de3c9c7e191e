"""The interfaces of import functions, which read ONNX nodes, and of export functions, which write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from optdnn.dim import Dim
from optdnn.errors import ShapeError
from optdnn.ops.base import STAGE_FIELDS, Attrs, Body, Known, Unsupported
from optdnn.types import ONNX_TYPES, Array, DType, TensorType, normalize_axis

if TYPE_CHECKING:
    from optdnn.ops.definition import OpDef

AnyAttrs = TypeVar("AnyAttrs", bound=Attrs)
Ref: TypeAlias = Any
"""A handle of a value while importing: opaque to operators."""


@dataclass(frozen=True)
class NodeSpec:
    """One ONNX node in plain types: no protobuf reaches an operator.

    ``attrs`` values are int, float, str, lists of these, arrays (tensor attributes), or imported subgraphs.
    ``opset`` is the version of the node's own domain in the model.
    """

    op_type: str
    domain: str
    opset: int
    name: str
    inputs: tuple[Ref | None, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]

    def input(self, i: int) -> Ref | None:
        return self.inputs[i] if i < len(self.inputs) else None

    def get(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def ints(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...] | None:
        v = self.attrs.get(name)
        return (None if default is None else tuple(default)) if v is None else tuple(int(x) for x in v)


@dataclass(frozen=True)
class Stacking:
    """A Loop without carried values: ``body`` reads the number of the iteration, the condition and captured values.

    It yields the condition, the rows of the Loop's own stacked results, and the tensors that iterations append to sequences.
    """

    body: Body
    captured: list[Ref]
    trips: int
    last: list[Array]
    """The last values of the counters that were carried."""


class Subgraph(Protocol):
    """A subgraph of a node during import, as seen by the import function of the node's operator."""

    inputs: int
    """Number of its own (formal) inputs."""
    outputs: int

    def fresh(self) -> Dim:
        """A new symbol for a size that differs between iterations, different from all others."""

    def inline(self, inputs: Sequence[Ref]) -> list[Ref]:
        """Import its nodes into the surrounding graph; returns its outputs."""

    def build(self, types: Sequence[TensorType]) -> tuple[Body, list[Ref]]:
        """Import it as a body with formal inputs of these types; returns the body and the outer values that it captures."""

    def builds(self, types: Sequence[TensorType]) -> bool:
        """Whether it can be imported as a body with formal inputs of these types. Nothing is reported."""

    def stacking(self, operands: Sequence[Ref | None]) -> Stacking | None:
        """The body of a Loop, with the Loop's operands, as a body that stacks the tensors that it appends to sequences.

        None if it uses a sequence in any other way, if a sequence is not empty at first, if a carried value is not a
        counter, or if the number of iterations is unknown.
        """

    def appending(self, operands: Sequence[Ref | None]) -> Subgraph | None:
        """The body of a Loop, with the Loop's operands, without the sequences. The tensors that it appends to them become its last
        outputs.

        None if it uses a sequence in any other way, or if a sequence is not empty at first.
        """

    def repeats(self, trips: int, most: int) -> bool:
        """Whether inlining it ``trips`` times makes at most ``most`` nodes, and no more than a model may have."""


class Emit(Protocol):
    """The builder that import functions use."""

    def op(
        self, kind: str, inputs: Sequence[Ref | Array | None], attrs: Attrs | None = None, outputs: int = 1
    ) -> tuple[Ref, ...]:
        """Add one op (arrays become constants) and return its outputs. Types are inferred at once."""

    def const(self, value: Array) -> Ref: ...

    def type(self, ref: Ref) -> TensorType: ...

    def value(self, ref: Ref) -> Known | None:
        """The constant (or symbolic integer) value of a ref if it is known."""

    def definition(self, kind: str) -> OpDef:
        """The definition of an operator kind."""

    def importer(self, op_type: str) -> FromOnnx:
        """The import function of an ONNX operator, for a node that is rewritten as this operator."""

    def unchecked(self, what: str) -> None:
        """Record that the current node ends a run with an error in ONNX where the graph returns a result."""


FromOnnx: TypeAlias = Callable[[NodeSpec, Emit], Sequence[Ref]]
"""Import one node: returns one ref per ONNX output (trailing absent outputs may be left off)."""


class Export(Protocol):
    """The writer of ONNX (opset :data:`OPSET`) that export functions use.

    Values are ONNX names; a dtype as an attribute becomes ONNX's number.
    """

    def node(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, *, domain: str = "", **attrs: Any
    ) -> tuple[str, ...]: ...

    def const(self, value: Array, hint: str = "c") -> str: ...

    def type(self, name: str) -> TensorType: ...

    def declare(self, name: str, type: TensorType) -> None:
        """Record the type of a value between the nodes of one op."""

    def value(self, name: str) -> Array | None:
        """The array of a constant (for operands that older opsets want as attributes), otherwise None."""

    def subgraph(self, body: Body, captured: Sequence[str]) -> Any:
        """A body as the value of a graph attribute; ``captured`` are the names of its captured outer values."""


OPSET = 21
"""The opset that optdnn writes. Newer operators are written as equivalent older ones."""
ToOnnx: TypeAlias = Callable[[Any, Sequence[str], int, Export], Sequence[str]]
"""Export one op: ``to_onnx(attrs, input_names ("" = absent), n_outputs, e)`` returns a name per output."""


def not_written(why: str) -> ToOnnx:
    """Export of a kind without an ONNX form."""

    def to_onnx(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
        raise Unsupported(why)

    return to_onnx


def simple_import(kind: str, attrs: Callable[[NodeSpec], Attrs] | None = None) -> FromOnnx:
    """Import function of an operator with unchanged operands; ``attrs`` reads its attributes."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        return e.op(kind, node.inputs, attrs(node) if attrs else None, outputs=len(node.outputs))

    return from_onnx


def onnx_dtype(number: int) -> DType:
    """The dtype of a ``TensorProto.DataType`` number; raises Unsupported for a type that optdnn does not store."""
    try:
        return ONNX_TYPES[int(number)]
    except KeyError:
        raise Unsupported(f"element type {number} of TensorProto.DataType is not supported") from None


def read_attrs(cls: type[AnyAttrs]) -> Callable[[NodeSpec], AnyAttrs]:
    """A reader of ONNX attributes named like the dataclass fields; a field's default replaces an absent attribute.

    Raises ShapeError if an attribute without a default is absent.
    """

    def read(node: NodeSpec) -> AnyAttrs:
        given: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in STAGE_FIELDS:
                continue
            if f.name in node.attrs:
                given[f.name] = _read(str(f.type).removesuffix(" | None"), node.attrs[f.name])
            elif f.default is MISSING and f.default_factory is MISSING:
                raise ShapeError(f"{node.op_type} needs attribute {f.name!r}")
        return cls(**given)

    return read


def _read(annotation: str, value: Any) -> Any:
    """An ONNX attribute converted to the type of its field."""
    if annotation.startswith("tuple"):
        return tuple(value)
    readers: dict[str, Callable[[Any], Any]] = {
        "bool": bool,
        "int": int,
        "float": float,
        "str": str,
        "DType": onnx_dtype,
    }
    return readers[annotation](value) if annotation in readers else value


def onnx_number(dtype: DType) -> int:
    """The ``TensorProto.DataType`` number of a dtype."""
    return next(n for n, d in ONNX_TYPES.items() if d == dtype)


def normalized_axis(node: NodeSpec, e: Emit, default: int) -> int:
    """The attribute ``axis``, counted from the front if the rank of operand 0 is known."""
    axis, ref = int(node.get("axis", default)), node.input(0)
    rank = None if ref is None else e.type(ref).rank
    return axis if rank is None else normalize_axis(axis, rank)
