"""Operands and results of attention: places of keys and values, and the order of axes that the reader of the result wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.epilogue import RESIDUAL
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import NOWHERE, Builder, TensorView, row_major
from optdnn.kernels.layout.views import order_read, settle
from optdnn.kernels.pointwise.pointwise import copied, copied_later, copy
from optdnn.ops.attention import SINKS

KEYS, VALUES, WEIGHTS = 1, 2, 3
"""Ports of the results after the first."""


def is_used(b: Builder, op: Op, port: int) -> bool:
    return port < len(op.outputs) and bool(b.graph.uses(Value(op.id, port)))


def several_types(b: Builder, op: Op) -> str | None:
    """Why a kernel of one element type cannot run an Attention: keys, values or past differ in type from the queries; or None."""
    found = {b.graph.type(x).dtype for slot in (0, 1, 2, 4, 5) if (x := op.input(slot)) is not None}
    return "queries, keys and values are of several types" if len(found) > 1 else None


def sinks_of(b: Builder, op: Op) -> TensorView | None:
    """The sinks, contiguous, or None."""
    value = op.input(SINKS)
    if value is None:
        return None
    sinks = b.operand(value)
    return sinks if sinks.strides[0] == 1 else copied(b, op, sinks, "sinks")


def place_keys_and_values(b: Builder, op: Op) -> None:
    """Place the keys and values that are results. Without a past, they stay in the place of their operand."""
    for port, slot in ((KEYS, 1), (VALUES, 2)):
        if not is_used(b, op, port):
            continue
        if op.input(slot + 3) is None:
            settle(b, op, port, b.operand(op.inputs[slot]))
        else:
            b.target(Value(op.id, port))


def keys_and_values(b: Builder, op: Op) -> tuple[TensorView, TensorView, int]:
    """All keys and all values (placed, or still to be made), and the number of past ones. The new ones are appended to the past."""
    past = 0 if op.input(4) is None else b.graph.type(op.inputs[4]).static_shape[2]  # type: ignore[arg-type]
    return appended(b, op, KEYS, 1, past), appended(b, op, VALUES, 2, past), past


def appended(b: Builder, op: Op, port: int, slot: int, past: int) -> TensorView:
    """All keys, or all values: those of the past, then operand ``slot``."""
    new, before = b.source(op.inputs[slot]), op.input(slot + 3)
    if before is None:
        return new
    name = op.outputs[port].name if port < len(op.outputs) else f"{op.outputs[0].name}.{('keys', 'values')[port - 1]}"
    shape = (*new.shape[:2], past + new.shape[2], new.shape[3])
    place = b.result(Value(op.id, port)) if is_used(b, op, port) else b.later(name, new.dtype, shape)

    def make() -> int:
        old, whole = b.operand(before), b.made(place)
        copy(b, op, old, whole.view(old.shape, whole.strides))
        copy(b, op, b.made(new), whole.view(new.shape, whole.strides, past * whole.strides[2]))
        return whole.buffer

    return replace(place, buffer=NOWHERE, make=make)


def with_four_axes(x: TensorView) -> TensorView:
    """A mask with leading axes of length 1, four axes in all."""
    missing = 4 - len(x.shape)
    return x.view((*(1,) * missing, *x.shape), (*(0,) * missing, *x.strides))


def fits_tma(x: TensorView) -> bool:
    """Whether features are contiguous, and the offset and all other strides are multiples of 16 bytes."""
    outer = [s for n, s in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1]
    unit = 16 // x.dtype.itemsize
    return x.strides[3] == 1 and x.offset % unit == 0 and all(s > 0 and s % unit == 0 for s in outer)


def for_tma(b: Builder, op: Op, x: TensorView, name: str) -> TensorView:
    """``x`` if TMA can read it, else a copy that is still to be made."""
    return x if fits_tma(x) else copied_later(b, op, x, name)


def order_wanted(b: Builder, op: Op) -> Sequence[int] | None:
    """Strides of the result that make the Transpose after it a view; None if there is no such Transpose.

    The Transpose may follow a convolution that adds the attention's result to its own. If Reshapes come before the Transpose (the
    windows of Hiera), the strides make all of them views."""
    user, shape = b.graph.sole_user(op.value), op.outputs[0].type.static_shape
    if user is not None and user.kind == "Conv" and op.value in user.inputs[RESIDUAL:]:
        user = b.graph.sole_user(user.value)
    if user is None or user.kind != "Transpose":
        read = order_read(b, op.value)
        return read if read is not None and read[-1] == 1 else None
    strides = [0] * len(shape)
    for p, s in zip(user.attrs.perm, row_major([shape[p] for p in user.attrs.perm]), strict=True):
        strides[p] = s
    return strides if strides[3] == 1 else None


def result_of(b: Builder, op: Op) -> TensorView:
    """The result's view: placed, or still to be made."""
    return b.result(op.value, order_wanted(b, op))


def target_of(b: Builder, op: Op) -> TensorView:
    """Place the result, dense in the order of axes that its reader wants."""
    return b.target(op.value, order_wanted(b, op))
