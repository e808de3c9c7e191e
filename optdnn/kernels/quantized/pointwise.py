"""Quantization over coordinates (see :mod:`optdnn.kernels.index.index_kernel`): QuantizeLinear and its relatives, products of integers.

These kernels are general and exact in every type. Tensor-core kernels are in :mod:`optdnn.kernels.quantized.hopper`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import coordinates, emit_index_kernel, needed, operand_at, operands_of, wide
from optdnn.kernels.pointwise.expressions import CPP, LARGEST, arithmetic, literal
from optdnn.kernels.quantized.dynamic_range import best, emit_range
from optdnn.ops.base import attrs_dict
from optdnn.ops.quant import QuantizeAttrs
from optdnn.runtime.reference.window import resolve_pads
from optdnn.types import FP32, UINT8, DType, is_float, normalize_axis


def _parameter(name: str, placed: TensorView | None, axis: int, rank: int, block: int) -> str:
    """C++ of the scale or zero point of an element: one for the tensor, one per entry of ``axis``, or one per block."""
    if placed is None:
        return ""
    if len(placed.shape) <= 1 and math.prod(placed.shape) == 1:
        return f"p.{name}[0]"
    if block:
        return f"p.{name}[at_{name}({coordinates(rank, {axis: f'o{axis} / {block}'})})]"
    return f"p.{name}[at_{name}(o{axis})]"


def _axis(op: Op, rank: int) -> int:
    return normalize_axis(op.attrs.axis, rank) if rank and -rank <= op.attrs.axis < rank else 0


def rounded(value: str, zero: str, out: DType) -> str:
    """C++ statements that round ``value`` (floating-point) half to even, add the zero point and saturate, into the double ``q``."""
    info = ml_dtypes.iinfo(out)  # type: ignore[no-untyped-call]
    low, high = info.min, info.max
    return (
        f"double q = rint(double({value})); q = q != q ? 0 : q; {f'q += double(widen({zero}));' if zero else ''} "
        f"q = q < double({low}) ? double({low}) : q > double({high}) ? double({high}) : q;"
    )


def _quantize(b: Builder, op: Op) -> None:
    x, scale, zero, out = needed(b, op, 0), needed(b, op, 1), operand_at(b, op, 2), b.target(op.value)
    a, r = op.attrs, len(out.shape)
    axis, at, t = _axis(op, r), coordinates(r), CPP[a.precision or scale.dtype]
    s, z = (_parameter(n, p, axis, r, a.block_size) for n, p in (("s", scale), ("z", zero)))
    # The quotient has the scale's type, and is rounded to it.
    lines = f"""const auto v = widen(narrow<{t}>(widen(narrow<{t}>(widen(p.x[at_x({at})]))) / widen(narrow<{t}>(widen({s})))));"""
    if is_float(out.dtype):
        top = LARGEST.get(out.dtype, math.inf) if a.saturate else math.inf
        w = arithmetic(a.precision or scale.dtype)
        bounded = f"min_nan(max_nan(v, {literal(-top, w)}), {literal(top, w)})" if math.isfinite(top) else "v"
        lines += f" p.y[at_y({at})] = narrow<{CPP[out.dtype]}>({bounded});"
    else:
        lines += f" {rounded('v', z, out.dtype)} p.y[at_y({at})] = narrow<{CPP[out.dtype]}>(i64(q));"
    tensors = {"x": x, "s": scale, "z": zero if not is_float(out.dtype) else None}
    emit_index_kernel(b, op, out.shape, tensors, {"y": out}, lines, reads=operands_of(b, op))


def _dynamic_quantize(b: Builder, op: Op) -> None:
    """Emits the range of all elements with its scale and zero point, then the quantized elements."""
    x = needed(b, op, 0)
    name, rank = op.outputs[0].name, len(x.shape)
    scale, zero = (
        b.target(Value(op.id, i)) if i < len(op.outputs) else b.new(f"{name}.{i}", d, ())
        for i, d in ((1, FP32), (2, UINT8))
    )
    emit_range(b, op, x, scale, zero, best(x, b.gpu))
    out, at = b.target(op.value), coordinates(rank)
    quotient = f"float(widen(p.x[at_x({at})])) / p.s[0]"
    lines = f"{rounded(quotient, 'p.z[0]', UINT8)} p.y[at_y({at})] = u8(q);"
    attrs = attrs_dict(QuantizeAttrs(UINT8))
    emit_index_kernel(
        b, op, out.shape, {"x": x, "s": scale, "z": zero}, {"y": out}, lines, reads=[x, scale, zero],
        meaning=("QuantizeLinear", attrs),
    )  # fmt: skip


def _dequantize(b: Builder, op: Op) -> None:
    x, scale, zero, out = needed(b, op, 0), needed(b, op, 1), operand_at(b, op, 2), b.target(op.value)
    r, t = len(out.shape), wide(scale.dtype, out.dtype)
    axis, at = _axis(op, r), coordinates(r)
    zero = None if is_float(x.dtype) else zero
    s, z = (_parameter(n, p, axis, r, op.attrs.block_size) for n, p in (("s", scale), ("z", zero)))
    value = f"{t}(i64(widen(p.x[at_x({at})])) - i64(widen({z})))" if z else f"{t}(widen(p.x[at_x({at})]))"
    lines = f"p.y[at_y({at})] = narrow<{CPP[out.dtype]}>({value} * {t}(widen({s})));"
    emit_index_kernel(b, op, out.shape, {"x": x, "s": scale, "z": zero}, {"y": out}, lines, reads=operands_of(b, op))


def _integer_product(b: Builder, op: Op) -> None:
    """MatMulInteger and QLinearMatMul: exact integer sums, then scales."""
    linear = op.kind == "QLinearMatMul"
    slots = (
        {"a": 0, "s": 1, "z": 2, "c": 3, "u": 4, "v": 5, "w": 6, "q": 7} if linear else {"a": 0, "c": 1, "z": 2, "v": 3}
    )
    placed = {n: p for n, i in slots.items() if (p := operand_at(b, op, i)) is not None}
    left, right, out = placed["a"], placed["c"], b.target(op.value)
    r, k = len(out.shape), left.shape[-1]
    batch = r - (len(left.shape) > 1) - (len(right.shape) > 1)
    row = f"o{batch}" if len(left.shape) > 1 else ""
    column = f"o{r - 1}" if len(right.shape) > 1 else ""

    def lead(p: TensorView) -> list[str]:
        n = max(len(p.shape) - 2, 0)
        return ["0" if p.shape[i] == 1 else f"o{batch - n + i}" for i in range(n)]

    at_a = ", ".join([*lead(left), *([row] if row else []), "k"])
    at_c = ", ".join([*lead(right), "k", *([column] if column else [])])

    def entry(name: str, of_row: bool) -> str:
        """C++ of a scalar, or of the entry for a row of A or a column of B."""
        p = placed.get(name)
        if p is None:
            return ""
        if math.prod(p.shape) == 1:
            return f"p.{name}[0]"
        of = left if of_row else right
        if len(p.shape) == len(of.shape) and len(p.shape) > 1:
            last = [row, "0"] if of_row else ["0", column]
            return f"p.{name}[at_{name}({', '.join([*lead(p), *last])})]"
        return f"p.{name}[at_{name}({row if of_row else column})]"

    shift = {n: f" - i64(widen({e}))" if (e := entry(n, row)) else "" for n, row in (("z", True), ("v", False))}
    lines = f"""i64 acc = 0;
        for (i64 k = 0; k < {k}; k++) acc += (i64(p.a[at_a({at_a})]){shift["z"]}) * (i64(p.c[at_c({at_c})]){shift["v"]});
        const int total = int(acc);"""
    at = coordinates(r)
    if linear:
        t = wide(placed["s"].dtype)
        factor = f"{t}(widen({entry('s', True)})) * {t}(widen({entry('u', False)})) / {t}(widen(p.w[0]))"
        lines += f" const {t} scaled = {t}(total) * ({factor}); {rounded('scaled', 'p.q[0]', out.dtype)}"
        lines += f" p.y[at_y({at})] = {CPP[out.dtype]}(q);"
    else:
        lines += f" p.y[at_y({at})] = total;"
    emit_index_kernel(b, op, out.shape, placed, {"y": out}, lines, reads=operands_of(b, op))


def _integer_convolution(b: Builder, op: Op) -> None:
    """ConvInteger and QLinearConv with any groups and axes: exact integer sums over the taps inside the image, then scales."""
    linear, a = op.kind == "QLinearConv", op.attrs
    slots = (
        {"x": 0, "s": 1, "z": 2, "w": 3, "u": 4, "v": 5, "t": 6, "q": 7, "b": 8}
        if linear
        else {"x": 0, "w": 1, "z": 2, "v": 3}
    )
    placed = {n: p for n, i in slots.items() if (p := operand_at(b, op, i)) is not None}
    x, w, out = placed["x"], placed["w"], b.target(op.value)
    axes = range(len(out.shape) - 2)
    pads = resolve_pads(a.auto_pad, a.pads, x.shape[2:], w.shape[2:], a.strides, a.dilations)
    assert pads is not None

    def entry(name: str) -> str:
        """C++ of a scalar, or of the entry for an output channel."""
        p = placed.get(name)
        return "" if p is None else f"p.{name}[0]" if math.prod(p.shape) == 1 else f"p.{name}[at_{name}(o1)]"

    z, v = (f" - i64({e})" if (e := entry(n)) else "" for n in ("z", "v"))
    walk = [f"for (i64 c = 0; c < {w.shape[1]}; c++)"]
    for k in axes:
        walk += [
            f"for (i64 t{k} = 0; t{k} < {w.shape[2 + k]}; t{k}++) {{",
            f"const i64 i{k} = o{k + 2} * {a.strides[k]} - {pads[k]} + t{k} * {a.dilations[k]};",
            f"if (i{k} < 0 || i{k} >= {x.shape[2 + k]}) continue;",
        ]
    at_x = ", ".join(["o0", "first + c", *(f"i{k}" for k in axes)])
    at_w = ", ".join(["o1", "c", *(f"t{k}" for k in axes)])
    lines = f"""const i64 first = o1 / {max(w.shape[0] // a.group, 1)} * {w.shape[1]};
        i64 acc = 0;
        {" ".join(walk)}
        acc += (i64(p.x[at_x({at_x})]){z}) * (i64(p.w[at_w({at_w})]){v});
        {"}" * len(axes)}"""
    at = coordinates(len(out.shape))
    if linear:
        t = wide(placed["s"].dtype)
        bias = f" acc += i64({entry('b')});" if "b" in placed else ""
        factor = f"{t}(widen(p.s[0])) * {t}(widen({entry('u')})) / {t}(widen(p.t[0]))"
        lines += f"{bias} const {t} scaled = {t}(int(acc)) * ({factor}); {rounded('scaled', 'p.q[0]', out.dtype)}"
        lines += f" p.y[at_y({at})] = {CPP[out.dtype]}(q);"
    else:
        lines += f" p.y[at_y({at})] = int(acc);"
    emit_index_kernel(b, op, out.shape, placed, {"y": out}, lines, reads=operands_of(b, op))


QUANTIZED: dict[str, Callable[[Builder, Op], None]] = {
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "DynamicQuantizeLinear": _dynamic_quantize,
    "MatMulInteger": _integer_product, "QLinearMatMul": _integer_product,
    "ConvInteger": _integer_convolution, "QLinearConv": _integer_convolution,
}  # fmt: skip
"""Kind -> the function that emits it."""
