"""Tactics of pools: sliding windows of any rank and memory order, alone or with the pointwise operator after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.pointwise.before import exchanged, moved, pointwise_before, stages_of
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.pool.window import (
    Rendered,
    Window,
    channel_vector_width,
    emit_window,
    load_channels,
    pads_of,
    pool_attrs,
)
from optdnn.kernels.quantized.quantizer import dequantization
from optdnn.kernels.reduce.reduce import limits
from optdnn.kernels.tactic import Region, Tactic, TakesBefore
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import FP32, INT8, UINT8, DType, is_float


class WindowPool(Tactic):
    """Max, average and Lp pooling of any rank, padding, dilation and order."""

    name = "window_pool"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if len(op.outputs) > 1:
            return "it does not give indices"
        if len(op.attrs.kernel_shape) > 3:
            return f"it has {len(op.attrs.kernel_shape)} spatial axes"
        dtype = op.outputs[0].type.dtype
        return None if is_float(dtype) or op.kind == "MaxPool" else f"it does not average {dtype.name}"

    def variant(self, b: Builder, op: Op) -> str:
        """The channels per thread, as ``x4``."""
        return f"x{channel_vector_width([b.source(op.inputs[0]), b.result(op.value)])}"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        emit_pool(b, op, op, b.target(op.value))


def emit_pool(
    b: Builder,
    covers: Op,
    op: Op,
    out: TensorView,
    stages: Sequence[Stage] = (),
    operands: Sequence[TensorView | None] = (),
    before: Op | None = None,
) -> None:
    """Add the launch of a pool. ``stages`` apply to its result and read ``operands`` by slot. ``covers``: the operator
    with the nodes of all that the launch computes. ``before``: the Pointwise that dequantizes the pool's operand, if the launch
    reads the integers."""
    a, dtype = op.attrs, b.graph.type(op.inputs[0]).dtype  # type: ignore[arg-type]
    x = b.operand(op.inputs[0] if before is None else before.inputs[0])
    window = Window.make(a.kernel_shape, a.strides, pads_of(op, x.shape, a.kernel_shape), a.dilations)
    vec = channel_vector_width([x, out])
    t, element = arithmetic(dtype), _element(b, before, dtype)
    counted = ""
    if op.kind == "MaxPool":
        step, start, result = f"acc[j] = max_nan(acc[j], {element});", limits(t)[0], "acc[j]"
    elif op.kind == "LpPool":
        power = f"{t}({a.p})"
        value = f"fabs({element})" if a.p == 1 else f"pow(fabs({element}), {power})"
        step, start = f"acc[j] += {value};", f"{t}(0)"
        result = "acc[j]" if a.p == 1 else f"pow(acc[j], {t}(1) / {power})"
    else:
        step, start, result = f"acc[j] += {element};", f"{t}(0)", f"acc[j] * ({t}(1) / counted)"
        counted = _counted(window, a.count_include_pad, t)
    load = load_channels(CPP[x.dtype], vec, "at + c * p.xs[1]", "v")

    def apart(tap: int, at: str) -> tuple[str, str]:
        each = f"for (int j = 0; j < {vec}; j++) {step.replace('v.lane', f'v{tap}.lane')}"
        return load_channels(CPP[x.dtype], vec, f"{at} + c * p.xs[1]", f"v{tap}"), each

    if (
        out.dtype in (INT8, UINT8) and dtype.itemsize == 2
    ):  # rounded as the stored result would be: both have the same bits
        result = f"widen(narrow<{CPP[dtype]}>({result}))"
    parts = Rendered(
        f"{t} acc[{vec}]; for (int j = 0; j < {vec}; j++) acc[j] = {start}; {counted}",
        f"{load} for (int j = 0; j < {vec}; j++) {step}",
        f"const {t} value = {result};",
        apart=apart,
        combined=f"acc[j] = max_nan(acc[j], {t}(other));" if op.kind == "MaxPool" else "acc[j] += other;",
    )
    attrs = pool_attrs(op, x.shape)
    attrs |= {"count_include_pad": a.count_include_pad} if op.kind == "AveragePool" else {}
    attrs |= {"p": a.p} if op.kind == "LpPool" else {}
    given = [] if before is None else [b.operand(v) for v in before.inputs[1:]]
    attrs |= {"prologue": plain_stages(stages_of(before))} if before is not None else {}
    attrs |= {"epilogue": plain_stages(moved(stages, len(given))), "arity": 1} if stages else {}
    emit_window(
        b, covers, window, x, out, parts, vec=vec, kind=op.kind, attrs=attrs, reads=[x, *given, *operands[1:]],
        stages=stages, operands=operands, computed=dtype,
    )  # fmt: skip


def _element(b: Builder, before: Op | None, dtype: DType) -> str:
    """C++ of an element under the window, from the loaded ``v.lane[j]``. ``dtype``: the type of the pool's operand."""
    found = None if before is None else dequantization(b.graph, before)
    if found is None:
        return "widen(v.lane[j])"
    _, given = found
    value = f"(float(v.lane[j]) - {literal(given.zero, 'float')}) * {literal(given.scale, 'float')}"
    return f"({value})" if dtype == FP32 else f"widen(narrow<{CPP[dtype]}>({value}))"


class StagedPool(TakesBefore):
    """A pool and the pointwise operator that is its only reader: token mixing (PoolFormer: Yu et al., 2022), the peaks of
    a heat map, which are the elements that equal the largest one around them (CenterNet: Zhou et al., 2019), and quantization.
    If the pool's operand was dequantized for it alone, the launch reads the integers. It is emitted at that operator."""

    name = "window_pool_staged"

    def refuse(self, b: Builder, op: Op) -> str | None:
        slot, t = _slot(b.graph, op), op.outputs[0].type
        value = None if slot is None else op.inputs[slot]
        if value is None:
            return "none of its operands is a pool"
        if value in b.reserved or op.inputs.count(value) > 1 or b.graph.sole_user(value) is None:
            return "the pool's own result is read elsewhere"
        pooled = b.graph.type(value)
        if pooled.dims != t.dims or any(not is_float(b.graph.type(v).dtype) for v in op.inputs if v is not None):
            return "it changes the shape of the pool's result, or does not compute floats"
        if arithmetic(pooled.dtype) != arithmetic(t.dtype) and t.dtype not in (INT8, UINT8):
            return "it does not compute in the pool's type"
        return WindowPool().refuse(b, b.graph.op(value)) or Elementwise().refuse(b, op)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operator that computes the pool's operand, and the pool."""
        slot = _slot(graph, op)
        value = None if slot is None else op.inputs[slot]
        if value is None:
            return []
        pool = graph.op(value)
        return [*([] if pool.inputs[0] is None else [graph.op(pool.inputs[0])]), pool]

    def region(self, b: Builder, op: Op) -> Region:
        """The dequantization before the pool, the pool and the operator."""
        pool, before = self._found(b, op)
        return Region(op, before=(pool,) if before is None else (before, pool))

    def _found(self, b: Builder, op: Op) -> tuple[Op, Op | None]:
        """The pool, and the Pointwise that dequantizes 8-bit integers for it alone."""
        pool = self.neighbors(b.graph, op)[-1]
        before = pointwise_before(b, pool)
        integers = not isinstance(before, str) and dequantization(b.graph, before) is not None
        return pool, before if integers and not isinstance(before, str) else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        (pool, before), slot, region = self._found(b, op), _slot(b.graph, op), self.region(b, op)
        assert slot is not None
        operands = [None if v is None or k == slot else b.operand(v) for k, v in enumerate(op.inputs)]
        operands[0], operands[slot] = operands[slot], operands[0]
        stages = exchanged(stages_of(op), slot)
        emit_pool(b, replace(op, src=region.src), pool, b.target(op.value), stages, operands, before)


def _slot(graph: Graph, op: Op) -> int | None:
    """The first operand that is a pool's result."""
    return next((k for k, v in enumerate(op.inputs) if v is not None and graph.op(v).kind in STAGED), None)


STAGED = ("AveragePool", "MaxPool", "LpPool")
"""Kinds of pools that compute the pointwise operator after them."""


def _counted(window: Window, padding: bool, t: str) -> str:
    """C++ that counts the elements under the window of this position; ``padding``: with those of the padding."""
    lines = [f"{t} counted = 1;"]
    for i, x in enumerate("dhw"):
        k, stride, pad, dilation = window.kernel[i], window.strides[i], window.pads[i], window.dilations[i]
        low = -pad if padding else 0
        high = f"p.size_{x} + {window.pads[3 + i]}" if padding else f"p.size_{x}"
        at = f"const int at = {x} * {stride} - {pad} + k * {dilation};"
        loop = f"for (int k = 0; k < {k}; k++) {{ {at} some += at >= {low} && at < {high}; }}"
        lines.append(f"{{ int some = 0; {loop} counted *= some; }}")
    return " ".join(lines)
