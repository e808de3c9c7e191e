"""What an operator is: one :class:`OpDef` holds everything anyone needs to know about it.

``OpDef.infer`` gives output types (and, for small integer tensors, output *values*, symbolic ones included), ``kernel``
is its NumPy meaning (in ``runtime.reference``), ``onnx`` maps each ONNX operator that imports as this kind to its import
function, ``to_onnx`` writes it back, ``cost`` counts arithmetic, ``tol`` is the tolerance of comparisons and ``traits``
are the facts that passes ask for.

Conventions
-----------
* A kind is named as the ONNX operator of the newest opset ("Conv", "Softmax", "ReduceMean"), and its attributes and
  operands are that opset's. Older opsets are converted on import, so no pass ever sees an opset number.
* ``attrs`` is a frozen dataclass; its field names are the keyword arguments of the kind's NumPy kernel:
  ``kernel(*arrays, **asdict(attrs))`` returns a tuple of arrays.
* Missing optional operands are None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from optdnn.dim import Dim, DimLike
from optdnn.errors import ShapeError
from optdnn.runtime.reference.nested import PlainGraph
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import ONNX_TYPES, Array, DType, TensorType, normalize_axis

Known: TypeAlias = Array
"""A known value: an ordinary array, or an object array of ``int | Dim`` for a symbolic shape computation."""

KNOWN_LIMIT = 256
"""Integer tensors up to this many elements are evaluated symbolically while types are inferred."""


@dataclass(frozen=True)
class Attrs:
    """Base of every kind's attributes; a kind without any uses this class itself."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Attrs:
        """The attributes from their values by name, as a step holds them (with ``arity``, which is the kind's, beside stages)."""
        return cls(**{name: value for name, value in given.items() if name != "arity"})


@dataclass(frozen=True)
class NestedAttrs(Attrs):
    """Attributes that hold those of other operators, whose values a step holds among its own."""

    def plain(self) -> dict[str, Any]:
        """The attributes as a step holds them, stages in plain form: what :meth:`read` reads."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stage:
    """One pointwise step of a fused prologue or epilogue, or of a Pointwise body.

    ``kind`` is the kind of a pointwise operator. Each entry of ``args`` names one of its operands: ``a >= 0`` is operand
    slot ``a`` of the op that holds the stage, ``a < 0`` is register ``~a``, None is an absent optional operand.
    Register 0 holds the value that enters the chain (the accumulator of a convolution, operand 0 of a Pointwise); stage
    ``k`` writes register ``k + 1``; the last register is the result. So a chain may be any small DAG.
    """

    kind: str
    args: tuple[int | None, ...]
    attrs: Attrs = field(default_factory=Attrs)


@dataclass(frozen=True)
class FusedAttrs(Attrs):
    """Attributes of a kind that can hold stages. ``prologue`` transforms operand 0, ``epilogue`` the result.

    The operands that stages read follow the kind's own operands (``OpDef.arity`` of them). ``factors``: what fp32 operands may be
    rounded to before they are multiplied ("tf32"; "": they are not), which assign_precision alone decides.
    """

    prologue: tuple[Stage, ...] = field(default=(), kw_only=True)
    epilogue: tuple[Stage, ...] = field(default=(), kw_only=True)
    factors: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Call:
    """What ``OpDef.infer`` sees of one node.

    ``types[i]`` is None for an absent operand. ``values[i]`` is the known value of operand i (see :data:`Known`) or None.
    ``fresh(hint)`` makes a new symbol for a size that depends on data (NonZero).
    """

    kind: str
    attrs: Any
    types: tuple[TensorType | None, ...]
    values: tuple[Known | None, ...]
    n_outputs: int
    fresh: Callable[[str], Dim]

    def type(self, i: int) -> TensorType:
        """Type of operand i; raises ShapeError when it is absent."""
        t = self.types[i] if i < len(self.types) else None
        if t is None:
            raise ShapeError(f"{self.kind} needs operand {i}")
        return t

    def has(self, i: int) -> bool:
        return i < len(self.types) and self.types[i] is not None

    def value(self, i: int) -> Known | None:
        return self.values[i] if i < len(self.values) else None

    def ints(self, i: int) -> tuple[DimLike, ...] | None:
        """Known value of operand i as a flat tuple of ``int | Dim``, or None."""
        v = self.value(i)
        return None if v is None else tuple(x if isinstance(x, Dim) else int(x) for x in v.reshape(-1))


@dataclass(frozen=True)
class Result:
    """What ``OpDef.infer`` returns: a type per output and, where it can be told, a known value per output."""

    types: tuple[TensorType, ...]
    values: tuple[Known | None, ...] = ()


Infer: TypeAlias = Callable[[Call], Result]
AnyAttrs = TypeVar("AnyAttrs", bound=Attrs)


@dataclass(frozen=True)
class Cost:
    """Arithmetic of one evaluation. ``flops`` counts a multiply-add as two. Bytes are counted by the caller from types."""

    flops: float


@dataclass(frozen=True)
class Tol:
    """Tolerance at fp32: ``|a - b| <= atol * max|b| + rtol * |b|``; both are scaled by the unit roundoff of other types."""

    rtol: float = 1e-5
    atol: float = 1e-6


DEFAULT_TOL = Tol()
EXACT = Tol(0.0, 0.0)


@dataclass(frozen=True)
class Traits:
    """Facts that passes ask for instead of naming kinds."""

    pointwise: bool = False
    """Each output element depends on the same (broadcast) element of each operand alone."""
    commutative: bool = False
    idempotent: bool = False
    monotone: bool = False
    """Non-decreasing in operand 0 (so it commutes with max pooling)."""
    movement: bool = False
    """Only moves data: every output element is some input element (or a constant)."""
    shape_only: bool = False
    """The result depends on the operands' shapes alone."""
    fp16_risky: bool = False
    """May overflow or lose accuracy in half precision (exp, pow, variance, long sums)."""
    nondeterministic: bool = False
    own_precision: bool = False
    """The result depends on the very types of the operands (bits, roundings): it is never computed in wider ones."""


class Body(ABC):
    """A subgraph as an attribute: its inputs are what the operator feeds, then the outer values that it captures."""

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @property
    @abstractmethod
    def plain(self) -> PlainGraph:
        """The form that NumPy kernels and engine files hold."""


# ---------------------------------------------------------------- import from ONNX

Ref: TypeAlias = Any
"""A handle of a value while importing: opaque to operators."""


@dataclass(frozen=True)
class NodeSpec:
    """One ONNX node in plain types: no protobuf reaches an operator.

    ``attrs`` values are int, float, str, lists of these, arrays (tensor attributes), or imported subgraphs.
    ``opset`` is the version of the node's own domain that the model imports.
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


class Subgraph(Protocol):
    """A subgraph of a node that is being imported, seen by the import function of its operator."""

    inputs: int
    """Number of its own (formal) inputs."""
    outputs: int

    def fresh(self) -> Dim:
        """A symbol unlike all others, for a size that differs between iterations."""

    def inline(self, inputs: Sequence[Ref]) -> list[Ref]:
        """Import its nodes into the graph around it; returns its outputs."""

    def build(self, types: Sequence[TensorType]) -> tuple[Body, list[Ref]]:
        """Import it as a body whose formal inputs have these types; returns it and the outer values that it captures."""


class Unsupported(Exception):
    """Raised by an import function for a node it cannot take; the importer collects all of them in one message."""


class Emit(Protocol):
    """What an import function builds with."""

    def op(
        self, kind: str, inputs: Sequence[Ref | Array | None], attrs: Attrs | None = None, outputs: int = 1
    ) -> tuple[Ref, ...]:
        """Add one op (arrays become constants) and return its outputs. Types are inferred at once."""

    def const(self, value: Array) -> Ref: ...

    def type(self, ref: Ref) -> TensorType: ...

    def value(self, ref: Ref) -> Known | None:
        """The constant (or symbolic integer) value of a ref where it is known."""


FromOnnx: TypeAlias = Callable[[NodeSpec, Emit], Sequence[Ref]]
"""Import one node: returns one ref per ONNX output (trailing absent outputs may be left off)."""


class Export(Protocol):
    """What an export function writes ONNX with. Values are ONNX names; an attribute that is a dtype becomes ONNX's number."""

    opset: int

    def node(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, *, domain: str = "", **attrs: Any
    ) -> tuple[str, ...]: ...

    def const(self, value: Array, hint: str = "c") -> str: ...

    def type(self, name: str) -> TensorType: ...

    def value(self, name: str) -> Array | None:
        """The array of a constant (operand that older opsets want as an attribute), else None."""

    def subgraph(self, body: Body, captured: Sequence[str]) -> Any:
        """A body as the value of a graph attribute; ``captured`` are the names of the outer values that it reads."""


ToOnnx: TypeAlias = Callable[[Any, Sequence[str], int, Export], Sequence[str]]
"""Export one op: ``to_onnx(attrs, input_names ("" = absent), n_outputs, e)`` returns a name per output."""


@dataclass(frozen=True)
class OpDef:
    """All that is known of one operator kind."""

    kind: str
    infer: Infer
    attrs: type[Attrs] = Attrs
    onnx: Mapping[str, FromOnnx] | FromOnnx | None = None
    """ONNX operators ("Conv", or "com.microsoft.FusedMatMul") that import through this kind.

    A function imports the operator of the same name. None: its operands carry over, and its attributes are the dataclass
    fields.
    """
    to_onnx: ToOnnx | None = None
    """None: a node of the same name whose attributes are the dataclass fields that are not None."""
    cost: Callable[[Call, Result], Cost] | None = None
    """None: one operation per output element."""
    tol: Tol = Tol()
    traits: Traits = Traits()
    arity: int | None = None
    """Number of operand slots of the kind's own, after which the operands of fused stages follow (fusible kinds)."""

    @property
    def importers(self) -> Mapping[str, FromOnnx]:
        """The import functions by ONNX operator."""
        if isinstance(self.onnx, Mapping):
            return self.onnx
        return {self.kind: self.onnx or simple_import(self.kind, read_attrs(self.attrs))}

    def kernel(self, *operands: Array | None, **attrs: Any) -> tuple[Array, ...]:
        """The NumPy meaning: the kind's entry in the table of :mod:`optdnn.runtime.reference.table`."""
        return run_kernel(self.kind, operands, attrs)


def attrs_dict(attrs: Attrs) -> dict[str, Any]:
    """The attributes as keyword arguments (not recursive: stages stay :class:`Stage`)."""
    return {f.name: getattr(attrs, f.name) for f in fields(attrs)}


def simple_import(kind: str, attrs: Callable[[NodeSpec], Attrs] | None = None) -> FromOnnx:
    """Import function of an operator whose operands carry over as they are and whose attributes ``attrs`` reads."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        return e.op(kind, node.inputs, attrs(node) if attrs else None, outputs=len(node.outputs))

    return from_onnx


def onnx_dtype(number: int) -> DType:
    """The dtype of a ``TensorProto.DataType`` number; raises Unsupported for one optdnn does not store."""
    try:
        return ONNX_TYPES[int(number)]
    except KeyError:
        raise Unsupported(f"element type {number} of TensorProto.DataType is not supported") from None


def read_attrs(cls: type[AnyAttrs]) -> Callable[[NodeSpec], AnyAttrs]:
    """Reader of ONNX attributes named as the dataclass fields; a field's default stands for an absent attribute.

    Raises ShapeError where an attribute without a default is absent.
    """

    def read(node: NodeSpec) -> AnyAttrs:
        given: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in node.attrs:
                given[f.name] = _read(str(f.type).removesuffix(" | None"), node.attrs[f.name])
            elif f.default is MISSING and f.default_factory is MISSING:
                raise ShapeError(f"{node.op_type} needs attribute {f.name!r}")
        return cls(**given)

    return read


def _read(annotation: str, value: Any) -> Any:
    """An ONNX attribute as a field of this type holds it."""
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


def normalized_axis(node: NodeSpec, e: Emit, default: int | None = None) -> int:
    """The attribute ``axis``, counted from the front where the rank of operand 0 is known."""
    axis = node.get("axis", default)
    if axis is None:
        raise ShapeError(f"{node.op_type} needs the attribute axis")
    ref = node.input(0)
    rank = None if ref is None else e.type(ref).rank
    return int(axis) if rank is None else normalize_axis(int(axis), rank)


def same_type(call: Call) -> Result:
    """Inference of an operator whose one output has the type of operand 0."""
    return Result((call.type(0),))


def promote_types(types: Sequence[TensorType], kind: str) -> DType:
    """The common dtype of operands that ONNX requires to agree; raises ShapeError when they do not."""
    dtypes = {t.dtype for t in types}
    if len(dtypes) != 1:
        raise ShapeError(f"{kind} operands have different types: {', '.join(map(str, types))}")
    return dtypes.pop()


def known_array(values: Sequence[DimLike]) -> Known:
    """A known 1-D value: an int64 array where all are integers, else an object array."""
    if any(isinstance(v, Dim) for v in values):
        out = np.empty(len(values), dtype=object)
        out[:] = list(values)
        return out
    return np.asarray(values, dtype=np.int64)
