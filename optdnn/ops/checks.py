"""Helpers shared by operator definitions: checks of shapes, and sizes for costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from optdnn.dim import Dim, DimLike, bounds
from optdnn.errors import ShapeError
from optdnn.ops.base import Call, Cost, Result
from optdnn.ops.exchange import Emit, NodeSpec, Ref
from optdnn.types import TensorType, is_float, show_shape

_AGREED: ContextVar[list[tuple[DimLike, DimLike]] | None] = ContextVar("agreed", default=None)


@contextmanager
def agreements() -> Iterator[list[tuple[DimLike, DimLike]]]:
    """Collect the pairs of sizes that inference takes as equal although their difference is not known to be 0."""
    pairs: list[tuple[DimLike, DimLike]] = []
    token = _AGREED.set(pairs)
    try:
        yield pairs
    finally:
        _AGREED.reset(token)


def agree(a: DimLike, b: DimLike, what: str) -> DimLike:
    """The common value of two sizes that must be equal; the known one if the other is symbolic.

    Raises ShapeError if they can never be equal; its message starts with ``what``.
    """
    low, high = bounds(a - b)
    if low > 0 or high < 0:
        raise ShapeError(f"{what}: {a} against {b}")
    if low != high and (pairs := _AGREED.get()) is not None:
        pairs.append((a, b))
    return b if isinstance(a, Dim) and isinstance(b, int) else a


def agree_all(found: Sequence[DimLike], wanted: Sequence[DimLike], what: str) -> None:
    """:func:`agree` for all sizes of two shapes, which must be as many."""
    if len(found) != len(wanted):
        raise ShapeError(f"{what}: {show_shape(found)} against {show_shape(wanted)}")
    for a, b in zip(found, wanted, strict=True):
        agree(a, b, what)


def require_rank(t: TensorType, rank: int, what: str) -> None:
    """Raise ShapeError unless ``t`` has ``rank`` dimensions."""
    if len(t.dims) != rank:
        raise ShapeError(f"{what} must have {rank} dimensions and has shape {show_shape(t.shape)}")


def require_length(values: Sequence[Any], n: int, what: str) -> None:
    """Raise ShapeError unless ``values`` has ``n`` entries."""
    if len(values) != n:
        raise ShapeError(f"{what} has {len(values)} entries, {n} are needed")


def extent(*dims: DimLike) -> float:
    """Product of sizes as a float, for costs; a symbolic size counts as its lowest value (at least 1)."""
    total = 1.0
    for d in dims:
        total *= d if isinstance(d, int) else max(1, bounds(d)[0])
    return total


def elements(t: TensorType) -> float:
    """Number of elements, for costs; see :func:`extent`. An unknown rank counts as one element."""
    return extent(*(t.shape or ()))


def free(call: Call, result: Result) -> Cost:
    """Cost of an operator that computes nothing."""
    return Cost(0.0)


def per_element(flops: float) -> Callable[[Call, Result], Cost]:
    """Cost of an operator that does ``flops`` operations per element of operand 0."""
    return lambda call, result: Cost(flops * elements(call.type(0)))


def per_output(flops: float) -> Callable[[Call, Result], Cost]:
    """Cost of an operator that does ``flops`` operations per element of its result."""
    return lambda call, result: Cost(flops * elements(result.types[0]))


def floating(call: Call) -> TensorType:
    """The type of operand 0. Raises ShapeError unless it is floating-point."""
    x = call.type(0)
    if not is_float(x.dtype):
        raise ShapeError(f"{call.kind} of {x}; it must be floating-point")
    return x


def emit(e: Emit, kind: str, *inputs: Any, **attrs: Any) -> Ref:
    """Add one op of any kind with attributes by name; returns its output."""
    return e.op(kind, inputs, e.definition(kind).attrs(**attrs))[0]


def needs(node: NodeSpec, *slots: int) -> list[Ref]:
    """The operands in these slots. Raises ShapeError if one is absent."""
    missing = [i for i in slots if node.input(i) is None]
    if missing:
        raise ShapeError(f"{node.op_type} needs operand {missing[0]}")
    return [node.inputs[i] for i in slots]


def required(node: NodeSpec, name: str) -> Any:
    """A required attribute; raises ShapeError when the node has none."""
    value = node.get(name)
    if value is None:
        raise ShapeError(f"{node.op_type} needs attribute {name!r}")
    return value
