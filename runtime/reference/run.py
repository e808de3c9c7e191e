"""Run one operator in NumPy, fused stages and half precisions included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from optdnn.errors import InternalError, RunError
from optdnn.limits import LOOP_TRIPS
from optdnn.runtime.reference.base import Kernel, picked
from optdnn.runtime.reference.table import COMPOSED, KERNELS
from optdnn.types import BF16, FP16, FP32, NARROW_FLOATS, Array, DType

_WIDENED = dict.fromkeys((FP16, BF16, *NARROW_FLOATS), FP32)
_KEEPS_NARROW = frozenset(
    {
        *("BitCast", "Cast", "DequantizeLinear", "Identity", "If", "Layout", "Loop", "QuantizeLinear", "Scan"),
        *("QuantizedConv", "QuantizedMatMul", "QuantizedMean"),
        *("Copies", "Copy", "Frames", "StackedRNN"),
    }
)


_STAGED = frozenset({"prologue", "epilogue", "arity"})


class PlainStage(NamedTuple):
    """A fused stage as plain data; see ``optdnn.ops.base.Stage`` for the meaning of ``args``."""

    kind: str
    args: tuple[int | None, ...]
    attrs: Mapping[str, Any]


def run_stages(value: Array, stages: Sequence[PlainStage], operands: Sequence[Array | None]) -> Array:
    """Apply a chain (or small DAG) of pointwise stages to ``value``; returns the last register.

    As on a GPU, a stage that converts to a narrow float rounds, but the stages after it compute in fp32. If it is the last one,
    the result has its type."""
    registers, last = [value], value
    for stage in stages:
        last = _kernel(stage.kind)(*picked(stage.args, registers, operands), **stage.attrs)[0]
        registers.append(last.astype(_WIDENED[last.dtype]) if stage.kind == "Cast" and last.dtype in _WIDENED else last)
    return last


def _narrow(kind: str, operands: Sequence[Array | None]) -> DType | None:
    """The type of the first operand that an operator of this kind computes in fp32; None if there is no such operand."""
    if kind in _KEEPS_NARROW:
        return None
    for a in operands:
        if a is not None and a.dtype in _WIDENED:
            return a.dtype
    return None


def _widened(operands: Sequence[Array | None]) -> list[Array | None]:
    return [a.astype(_WIDENED[a.dtype]) if a is not None and a.dtype in _WIDENED else a for a in operands]


def run_kernel(
    kind: str,
    operands: Sequence[Array | None],
    attrs: Mapping[str, Any],
    dtypes: Sequence[DType] | None = None,
    *,
    most_trips: int | None = None,
) -> tuple[Array, ...]:
    """Evaluate one op.

    ``attrs`` may contain ``prologue`` and ``epilogue`` (sequences of :class:`PlainStage`) and, with them, ``arity``: the number of
    the kernel's own operands (a composed kind applies its stages itself). fp16, bf16 and fp8 operands are computed in fp32
    and results are rounded once, to ``dtypes`` (the results' types) if given, otherwise to the type of the first narrow
    operand. Floating-point exceptions are silent, as in ONNX. Raises RunError if the values of operands contradict (an index
    out of range), and if loops, including nested ones, have more than ``most_trips`` iterations in total
    (:data:`optdnn.limits.LOOP_TRIPS`).
    """
    with np.errstate(all="ignore"):
        return _run_inner(kind, operands, attrs, dtypes, _Inner(most_trips) if kind in COMPOSED else None)


def _run_inner(
    kind: str,
    operands: Sequence[Array | None],
    attrs: Mapping[str, Any],
    dtypes: Sequence[DType] | None,
    inner: _Inner | None,
) -> tuple[Array, ...]:
    """The same for callers that have already silenced floating-point exceptions: bodies of loops have thousands of small
    operators."""
    try:
        return _run(kind, operands, attrs, dtypes, inner)
    except (ValueError, IndexError, ArithmeticError) as error:
        shown = ", ".join("-" if a is None else f"{a.dtype}{list(a.shape)}" for a in operands)
        raise RunError(f"{kind} of {shown}: {error}") from error


class _Inner:
    """The ``run`` of a composed kernel, and of the kernels inside of its bodies: one object per call of :func:`run_kernel`."""

    def __init__(self, most_trips: int | None) -> None:
        self._trips, self._most = 0, LOOP_TRIPS.value if most_trips is None else most_trips

    def trip(self) -> None:
        if self._trips == self._most:
            raise ValueError(f"the loop has run {self._most} times; its condition does not end it; {LOOP_TRIPS.hint}")
        self._trips += 1

    def __call__(
        self,
        kind: str,
        operands: Sequence[Array | None],
        attrs: Mapping[str, Any],
        dtypes: Sequence[DType] | None = None,
        /,
    ) -> tuple[Array, ...]:
        return _run_inner(kind, operands, attrs, dtypes, self)

    def bare(self, kind: str, attrs: Mapping[str, Any], dtypes: Sequence[DType | None], /) -> Kernel | None:
        if kind in COMPOSED or not attrs.keys().isdisjoint(_STAGED) or any(t in _WIDENED for t in dtypes):
            return None
        return partial(_kernel(kind), **attrs)


def _run(
    kind: str,
    operands: Sequence[Array | None],
    attrs: Mapping[str, Any],
    dtypes: Sequence[DType] | None,
    inner: _Inner | None,
) -> tuple[Array, ...]:
    narrow = _narrow(kind, operands)
    if narrow is not None:
        operands = _widened(operands)
    composed = COMPOSED.get(kind)
    results = composed(inner or _Inner(None), *operands, **attrs) if composed else _with_stages(kind, operands, attrs)
    if narrow is not None or (dtypes is not None and not attrs.keys().isdisjoint(_STAGED)):
        wanted = dtypes if dtypes is not None else [narrow] * len(results)
        results = tuple(
            r.astype(t) if r.dtype == np.float32 and t in _WIDENED else r for r, t in zip(results, wanted, strict=False)
        )
    return tuple([np.ascontiguousarray(r) if r.ndim else r for r in map(np.asarray, results)])


def _with_stages(kind: str, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> tuple[Array, ...]:
    """The kernel of a kind between its prologue and its epilogue."""
    if attrs.keys().isdisjoint(_STAGED):
        return _kernel(kind)(*operands, **attrs)
    own_attrs = dict(attrs)
    prologue, epilogue, arity = (
        own_attrs.pop("prologue", ()),
        own_attrs.pop("epilogue", ()),
        own_attrs.pop("arity", None),
    )
    own = list(operands if arity is None else operands[:arity])
    if prologue:
        if own[0] is None:
            raise InternalError(f"{kind} has a prologue but no operand 0")
        own[0] = run_stages(own[0], prologue, operands)
    results = _kernel(kind)(*own, **own_attrs)
    return (run_stages(results[0], epilogue, operands), *results[1:]) if epilogue else results


def _kernel(kind: str) -> Kernel:
    try:
        return KERNELS[kind]
    except KeyError:
        raise InternalError(f"there is no NumPy kernel for {kind}") from None
