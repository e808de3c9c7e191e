"""The parts of an operator's definition: attributes, stages, calls and their results, costs, tolerances, traits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from optdnn.dim import INF, Dim, DimLike
from optdnn.errors import ShapeError
from optdnn.runtime.reference.nested import PlainGraph
from optdnn.types import Array, DType, TensorType

Known: TypeAlias = Array
"""A known value: an ordinary array, or an object array of ``int | Dim`` for a symbolic shape computation."""

KNOWN_LIMIT = 256
"""Integer tensors up to this many elements are evaluated symbolically while types are inferred."""


@dataclass(frozen=True)
class Attrs:
    """Base of every kind's attributes; a kind without any uses this class itself."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Attrs:
        """The attributes from their values by name, as a step holds them. A step also holds ``arity``, which belongs to the kind,
        if there are stages."""
        return cls(**{name: value for name, value in given.items() if name != "arity"})


@dataclass(frozen=True)
class NestedAttrs(Attrs):
    """Attributes that include the attributes of other operators; a step holds their values among its own."""

    def plain(self) -> dict[str, Any]:
        """The attributes as a step holds them, with stages in plain form: the input of :meth:`read`."""
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


def renumbered(stages: Iterable[Stage], by: int) -> list[Stage]:
    """The stages, as they are behind ``by`` further ones: they read registers that come so much later, and the same operands."""
    return [replace(s, args=tuple(a if a is None or a >= 0 else a - by for a in s.args)) for s in stages]


@dataclass(frozen=True)
class ProductAttrs(Attrs):
    """Attributes of a kind that multiplies its operands.

    ``factors``: the type that fp32 operands may be rounded to before they are multiplied ("tf32"; "": no rounding), which only
    assign_precision decides; "fp16" if they are stored in fp16 in place of tf32 (half_factors); or "float" for an operand that is
    not a weight in the model and must not be quantized: the matrix of a Fourier transform.
    """

    factors: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class FusedAttrs(ProductAttrs):
    """Attributes of a kind that can hold stages. ``prologue`` transforms operand 0, ``epilogue`` the result.

    Operands of stages follow the kind's own operands, which number ``OpDef.arity``.
    """

    prologue: tuple[Stage, ...] = field(default=(), kw_only=True)
    epilogue: tuple[Stage, ...] = field(default=(), kw_only=True)


STAGE_FIELDS = frozenset(f.name for f in fields(FusedAttrs))
"""Fields that are not ONNX attributes."""


class Fresh(Protocol):
    """A function that makes the symbols of sizes that depend on data."""

    def __call__(self, hint: str, most: DimLike = INF, /) -> Dim:
        """A new symbol, named after ``hint``, of a size from 0 to ``most``."""


@dataclass(frozen=True)
class Call:
    """The input of ``OpDef.infer`` for one node.

    ``types[i]`` is None for an absent operand. ``values[i]`` is the known value of operand i (see :data:`Known`) or None.
    ``fresh(hint, most)`` makes a new symbol for a size that depends on data (NonZero), of at most ``most`` if given.
    """

    kind: str
    attrs: Any
    types: tuple[TensorType | None, ...]
    values: tuple[Known | None, ...]
    n_outputs: int
    fresh: Fresh

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
    """The result of ``OpDef.infer``: a type per output, and the value of each output that is known."""

    types: tuple[TensorType, ...]
    values: tuple[Known | None, ...] = ()


Infer: TypeAlias = Callable[[Call], Result]


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
PRODUCT_TOL = Tol(rtol=1e-5, atol=3e-6)
"""The tolerance of products of matrices and convolutions."""
STEPS_TOL = Tol(rtol=1e-4, atol=1e-5)
"""The tolerance of operators of several steps: an error of one step affects the later ones."""


@dataclass(frozen=True)
class Traits:
    """Facts about a kind, so that passes need not name kinds."""

    pointwise: bool = False
    """Each output element depends on the same (broadcast) element of each operand only."""
    commutative: bool = False
    monotone: bool = False
    """Non-decreasing in operand 0 (so it commutes with max pooling)."""
    movement: bool = False
    """Only moves data: every output element is some input element (or a constant)."""
    shape_only: bool = False
    """The result depends only on the operands' shapes."""
    own_precision: bool = False
    """The result depends on the exact types of the operands (bits, roundings), so it is never computed in wider types."""


NO_TRAITS = Traits()
MOVEMENT = Traits(movement=True)


class Body(ABC):
    """A subgraph as an attribute. Its inputs are the operator's own values, then the captured outer values."""

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @property
    @abstractmethod
    def plain(self) -> PlainGraph:
        """The form that NumPy kernels and engine files use."""


class Unsupported(Exception):
    """Raised by an import function for a node that it cannot import; the importer collects all of them in one message."""


def attrs_dict(attrs: Attrs) -> dict[str, Any]:
    """The attributes as keyword arguments (not recursive: stages stay :class:`Stage`)."""
    return {f.name: getattr(attrs, f.name) for f in fields(attrs)}


def same_type(call: Call) -> Result:
    """Inference of an operator with one output of operand 0's type."""
    return Result((call.type(0),))


def promote_types(types: Sequence[TensorType], kind: str) -> DType:
    """The common dtype of operands that ONNX requires to agree; raises ShapeError when they do not."""
    dtypes = {t.dtype for t in types}
    if len(dtypes) != 1:
        raise ShapeError(f"{kind} operands have different types: {', '.join(map(str, types))}")
    return dtypes.pop()


def known_array(values: Sequence[DimLike]) -> Known:
    """A known 1-D value: an int64 array if all are integers, otherwise an object array."""
    if any(isinstance(v, Dim) for v in values):
        out = np.empty(len(values), dtype=object)
        out[:] = list(values)
        return out
    return np.asarray(values, dtype=np.int64)
