"""Known values during inference: the content of small tensors, symbolic shape computations included.

Exporters write shape arithmetic as ordinary operators (``Shape -> Gather -> Mul -> Concat -> Reshape``). Inference evaluates
these immediately: a known operand is either an ordinary array of its own dtype or an object array of
``int | Dim`` (:data:`optdnn.ops.base.Known`). Concrete operands go through the kind's NumPy kernel, symbolic ones through the
kind's *symbolic* function. For data movement, the symbolic function is the same kernel on object arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from optdnn.dim import Dim, DimLike, DimTooLarge, bounds, dim_max, floordiv
from optdnn.errors import RunError, ShapeError
from optdnn.ops.base import KNOWN_LIMIT, Call, Infer, Known, Result, attrs_dict
from optdnn.ops.exchange import Emit, Ref
from optdnn.types import Array, TensorType, is_int


class Undecided(Exception):
    """A symbolic result depends on the symbols' values (for example, the comparison of two unrelated sizes)."""


Values: TypeAlias = tuple[Known | None, ...]
Symbolic: TypeAlias = Callable[[Call, Values], Sequence[Any]]
"""``symbolic(call, operand_values)`` -> output values; at least one operand is an object array."""


def with_values(infer: Infer, symbolic: Symbolic | None = None) -> Infer:
    """``infer`` extended by the output values, if all operands are known and everything is small."""

    def run(call: Call) -> Result:
        result = infer(call)
        return result if result.values else Result(result.types, known_values(call, result.types, symbolic))

    return run


def known_values(call: Call, types: Sequence[TensorType], symbolic: Symbolic | None) -> Values:
    """The values of a call's outputs, or () if an operand is unknown, if something is larger than ``KNOWN_LIMIT``, or if a symbolic
    value would be too large an expression: it is then a separate symbol."""
    values = tuple(call.value(i) for i in range(len(call.types)))
    for t, v in zip(call.types, values, strict=True):
        if t is not None and (v is None or v.size > KNOWN_LIMIT):
            return ()
    if not all(t.is_static and t.size <= KNOWN_LIMIT for t in types):  # type: ignore[operator]
        return ()
    try:
        if any(v is not None and v.dtype == object for v in values):
            results = symbolic(call, values) if symbolic else ()
        else:
            from optdnn.runtime.reference.run import run_kernel

            results = run_kernel(call.kind, values, attrs_dict(call.attrs), [t.dtype for t in types])
    except (Undecided, RunError, DimTooLarge):
        return ()
    return tuple(settle(v, t) for v, t in zip(results, types, strict=False))


def settle(value: Any, type: TensorType) -> Known | None:
    """A computed value in its canonical form: an array of ``type`` if it is concrete, otherwise an object array."""
    if value is None:
        return None
    array: Array = np.asarray(value)
    if array.dtype == object:
        if any(isinstance(x, Dim) for x in array.reshape(-1)):
            return array if is_int(type.dtype) else None
        try:
            array = array.astype(type.dtype)
        except (OverflowError, TypeError):
            return None
    return array.astype(type.dtype, copy=False)


def elementwise(fn: Callable[..., DimLike]) -> Symbolic:
    """Symbolic evaluation of a pointwise kind from a function of ``int | Dim`` scalars (which may raise Undecided)."""

    def run(call: Call, values: Values) -> Sequence[Any]:
        given = [v.astype(object) for v in values if v is not None]
        return (np.asarray(np.frompyfunc(fn, len(given), 1)(*given), dtype=object),)

    return run


def folded(fn: Callable[[Any, Any], DimLike]) -> Symbolic:
    """Symbolic evaluation of a variadic kind by a binary function, from the left."""

    def run(call: Call, values: Values) -> Sequence[Any]:
        total: Any = None
        step = np.frompyfunc(fn, 2, 1)
        for v in values:
            if v is not None:
                total = v.astype(object) if total is None else step(total, v.astype(object))
        return (np.asarray(total, dtype=object),)

    return run


def moved(*data: int) -> Symbolic:
    """Symbolic evaluation of a kind that only moves its operands ``data`` (default: all operands): its kernel."""

    def run(call: Call, values: Values) -> Sequence[Any]:
        from optdnn.runtime.reference.table import KERNELS

        if data and any(v is not None and v.dtype == object and i not in data for i, v in enumerate(values)):
            return ()
        try:
            return KERNELS[call.kind](*values, **attrs_dict(call.attrs))
        except (ValueError, IndexError) as error:
            raise ShapeError(f"{call.kind}: {error}") from error

    return run


# ---------------------------------------------------------------- arithmetic with the meaning of ONNX integers


def trunc_div(a: DimLike, b: DimLike) -> DimLike:
    """Integer division rounding toward zero (ONNX Div). A symbolic divisor is a size, so it is taken as positive."""
    lo, hi = bounds(b)
    if hi < 0:
        a, b = -a, -b
    elif lo < 0 or b == 0:
        raise Undecided
    return floordiv(dim_max(a, 0), b) - floordiv(dim_max(-a, 0), b)


def less(a: DimLike, b: DimLike) -> bool:
    """``a < b``; raises Undecided if it depends on the symbols."""
    lo, hi = bounds(a - b)
    if hi < 0:
        return True
    if lo >= 0:
        return False
    raise Undecided


def equal(a: DimLike, b: DimLike) -> bool:
    """``a == b``; raises Undecided if it depends on the symbols."""
    lo, hi = bounds(a - b)
    if lo > 0 or hi < 0:
        return False
    if lo == hi == 0:
        return True
    raise Undecided


def truth(a: DimLike) -> bool:
    """``a != 0``; raises Undecided if it depends on the symbols."""
    return not equal(a, 0)


# ---------------------------------------------------------------- small helpers of inference


def require(condition: bool, call: Call, what: str, *types: TensorType) -> None:
    """Raise ShapeError "KIND needs WHAT, got TYPES" unless ``condition``."""
    if not condition:
        got = ", ".join(map(str, types or [t for t in call.types if t is not None]))
        raise ShapeError(f"{call.kind} needs {what}, got {got}")


def concrete_ints(call: Call, i: int) -> tuple[int, ...] | None:
    """The known value of an integer operand as plain integers; None if it is unknown or symbolic."""
    values = call.ints(i)
    if values is None or any(isinstance(v, Dim) for v in values):
        return None
    return tuple(int(v) for v in values if not isinstance(v, Dim))


def ceil_div(a: DimLike, b: int) -> DimLike:
    """``ceil(a / b)`` for positive ``b``."""
    return -floordiv(-a, b)


def require_ints(call: Call, i: int) -> None:
    """Raise ShapeError unless operand i holds integers."""
    require(is_int(call.type(i).dtype), call, f"integers as operand {i}", call.type(i))


def static_ints(e: Emit, ref: Ref | None) -> tuple[int, ...] | None:
    """During import: the plain integers of a value, or None if it is absent, unknown or symbolic."""
    value = None if ref is None else e.value(ref)
    if value is None or any(isinstance(v, Dim) for v in value.reshape(-1)):
        return None
    return tuple(int(v) for v in value.reshape(-1))
