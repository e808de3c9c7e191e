"""Arithmetic operators over coordinates (see :mod:`optdnn.kernels.index.index_kernel`): sampling, sums of products, statistics.

These are the general kernels: one thread per result sums in a fixed order. Common cases have their own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import (
    VISITS_LIMIT,
    IndexKernel,
    coordinates,
    emit_index_kernel,
    needed,
    operand_at,
    operands_of,
    shape_at,
    wide,
)
from optdnn.kernels.index.packed_rows import packed_rows
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.quantized.pointwise import QUANTIZED
from optdnn.ops.gemm import einsum_terms
from optdnn.types import normalize_axis

SUMS_LIMIT = VISITS_LIMIT * 16
"""Most products of a kernel with one thread per result."""


# ---------------------------------------------------------------- sampling

REFLECTED = """
template <typename T> DEVICE T reflected(T at, T low, T high) {
    const T span = high - low;
    if (span == 0) return low;
    T away = fmod(at - low, 2 * span);
    away += away < 0 ? 2 * span : T(0);
    return low + (away > span ? 2 * span - away : away);
}

DEVICE i64 reflected_tap(i64 at, i64 size, bool centers) {
    const i64 period = 2 * (centers ? size - 1 : size);
    if (period == 0) return 0;
    i64 away = at % period;
    away += away < 0 ? period : 0;
    return away < size ? away : centers ? period - away : period - 1 - away;
}
"""
"""``reflected``: a place, reflected between ``low`` and ``high``. ``reflected_tap``: the same for the index of an element, between the
centers of the first and the last element, or their edges. (As floats, the taps of a cubic sample took NVRTC 11 s.)"""


def tap_index(attrs: Any, tap: str, size: int) -> str:
    """C++ of the index of a tap along an axis of ``size`` elements: reflected where the GridSample reflects."""
    return (
        f"reflected_tap({tap}, {size}, {str(bool(attrs.align_corners)).lower()})"
        if attrs.padding_mode == "reflection"
        else tap
    )


def _grid_sample(b: Builder, op: Op) -> None:
    x, grid, out, a = needed(b, op, 0), needed(b, op, 1), b.target(op.value), op.attrs
    t, rank = arithmetic(x.dtype), len(x.shape) - 2
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[a.mode]
    lines, loops, closing = [], [], ""
    for k in range(rank):
        size = x.shape[2 + k]
        low, high = (0.0, size - 1.0) if a.align_corners else (-0.5, size - 0.5)
        span = f"{t}({low}), {t}({high})"
        at = ", ".join(["o0", *(f"o{2 + i}" for i in range(rank)), str(rank - 1 - k)])
        scaled = f"(g{k} + 1) / 2 * {t}({size - 1})" if a.align_corners else f"((g{k} + 1) * {t}({size}) - 1) / 2"
        lines.append(f"const {t} g{k} = {t}(widen(p.g[at_g({at})])); {t} a{k} = {scaled};")
        if a.mode == "nearest":
            lines.append(f"a{k} = rint(a{k});")
        if a.padding_mode == "border" and a.mode != "cubic":
            lines.append(f"a{k} = a{k} < 0 ? {t}(0) : a{k} > {t}({size - 1}) ? {t}({size - 1}) : a{k};")
        elif a.padding_mode == "reflection":
            lines.append(f"if (a{k} < {t}({low}) || a{k} > {t}({high})) a{k} = reflected(a{k}, {span});")
        lines.append(first_tap(k, a.mode, t))
        index = tap_index(a, f"f{k} + t{k}", size)
        outside = f"if (i{k} < 0 || i{k} >= {size}) continue;" if a.padding_mode == "zeros" else ""
        loops.append(
            f"for (int t{k} = 0; t{k} < {taps}; t{k}++) {{ i64 i{k} = {index}; {outside} "
            f"i{k} = i{k} < 0 ? 0 : i{k} >= {size} ? {size - 1} : i{k};"
        )
        closing += "}"
    weight = " * ".join(f"w{k}[t{k}]" for k in range(rank))
    at = ", ".join(["o0", "o1", *(f"i{k}" for k in range(rank))])
    loops.append(f"acc += {t}(widen(p.x[at_x({at})])) * ({weight});")
    text = " ".join([*lines, f"{t} acc = 0;", *loops, closing])
    text += f" p.y[at_y({coordinates(rank + 2)})] = narrow<{CPP[x.dtype]}>(acc);"
    emit_index_kernel(
        b, op, out.shape, {"x": x, "g": grid}, {"y": out}, text, reads=operands_of(b, op), helpers=REFLECTED
    )


def first_tap(k: int, mode: str, t: str) -> str:
    """C++ of the first tap along axis ``k`` and the weights of the taps."""
    if mode == "nearest":
        return f"const i64 f{k} = i64(rint(a{k})); const {t} w{k}[] = {{{t}(1)}};"
    low = f"const {t} l{k} = floor(a{k}), d{k} = a{k} - l{k};"
    if mode == "linear":
        return f"{low} const i64 f{k} = i64(l{k}); const {t} w{k}[] = {{1 - d{k}, d{k}}};"
    c = literal(-0.75, t)
    near, far = (
        "(({c} + 2) * {d} - ({c} + 3)) * {d} * {d} + 1",
        "(({c} * {d} - 5 * {c}) * {d} + 8 * {c}) * {d} - 4 * {c}",
    )
    terms = [far.format(c=c, d=f"(d{k} + 1)"), near.format(c=c, d=f"d{k}"), near.format(c=c, d=f"(1 - d{k})"),
             far.format(c=c, d=f"(2 - d{k})")]  # fmt: skip
    return f"{low} const i64 f{k} = i64(l{k}) - 1; const {t} w{k}[] = {{{', '.join(terms)}}};"


def _affine_grid(b: Builder, op: Op) -> None:
    theta, out = needed(b, op, 0), b.target(op.value)
    t, rank = arithmetic(theta.dtype), len(out.shape) - 2
    lines = []
    for k in range(rank):  # the last spatial axis is the first coordinate
        size, place = out.shape[1 + k], f"{t}(o{1 + k})"
        scaled = (
            f"2 * {place} / {max(size - 1, 1)} - {int(size > 1)}"
            if op.attrs.align_corners
            else f"(2 * {place} + 1) / {size} - 1"
        )
        lines.append(f"const {t} c{k} = {scaled};")
    last = len(out.shape) - 1
    terms = [f"{t}(widen(p.t[at_t(o0, o{last}, {rank - 1 - k})])) * c{k}" for k in reversed(range(rank))]
    lines.append(f"const {t} v = {' + '.join(terms)} + {t}(widen(p.t[at_t(o0, o{last}, {rank})]));")
    lines.append(f"p.y[at_y({coordinates(len(out.shape))})] = narrow<{CPP[out.dtype]}>(v);")
    emit_index_kernel(b, op, out.shape, {"t": theta}, {"y": out}, " ".join(lines), reads=operands_of(b, op))


# ---------------------------------------------------------------- sums of products


def _einsum(b: Builder, op: Op) -> None:
    out = b.target(op.value)
    operands = [b.operand(v) for v in op.inputs if v is not None]
    terms, result = einsum_terms(op.attrs.equation, [len(p.shape) for p in operands])
    sizes: dict[str, int] = {}
    for labels, p in zip(terms, operands, strict=True):
        for label, n in zip(labels, p.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), n) if n else 0
    where = {label: f"o{i}" for i, label in enumerate(result)}
    summed = [label for label in sizes if label not in where]
    where |= {label: f"s{i}" for i, label in enumerate(summed)}
    t = arithmetic(out.dtype)
    product = " * ".join(
        f"{t}(widen(p.x{k}[at_x{k}({', '.join('0' if n == 1 else where[x] for x, n in zip(labels, p.shape, strict=True))})]))"
        for k, (labels, p) in enumerate(zip(terms, operands, strict=True))
    )
    loops = " ".join(f"for (i64 s{i} = 0; s{i} < {sizes[x]}; s{i}++)" for i, x in enumerate(summed))
    lines = (
        f"{t} acc = 0; {loops} acc += {product}; p.y[at_y({coordinates(len(result))})] = narrow<{CPP[out.dtype]}>(acc);"
    )
    tensors: dict[str, TensorView | None] = {f"x{k}": p for k, p in enumerate(operands)}
    emit_index_kernel(b, op, out.shape, tensors, {"y": out}, lines, reads=operands_of(b, op))


def _einsum_products(b: Builder, op: Op) -> float:
    shapes = [shape_at(b, op, i) for i in range(len(op.inputs))]
    terms, _ = einsum_terms(op.attrs.equation, [len(s) for s in shapes])
    sizes: dict[str, int] = {}
    for labels, s in zip(terms, shapes, strict=True):
        for label, n in zip(labels, s, strict=True):
            sizes[label] = max(sizes.get(label, 1), n)
    return math.prod(sizes.values())


def _dft(b: Builder, op: Op) -> None:
    x, out, a = needed(b, op, 0), b.target(op.value), op.attrs
    r = len(out.shape)
    axis = _dft_axis(b, op)
    assert axis is not None
    spectrum = a.inverse and a.onesided  # the operand is the one-sided spectrum of a real signal
    length = out.shape[axis] if not a.onesided or spectrum else _dft_length(b, op, x.shape[axis])
    taken = min(x.shape[axis], length // 2 + 1 if spectrum else length)
    at = coordinates(r - 1, {axis: "j"})
    imaginary = f"double(widen(p.x[at_x({at}, 1)]))" if x.shape[-1] == 2 else "0.0"
    sign = "" if a.inverse else "-"
    double = f"(j == 0 || 2 * j == {length} ? 1.0 : 2.0)" if spectrum else "1.0"
    scale = f" / {length}.0" if a.inverse else ""
    stores = [f"p.y[at_y({coordinates(r - 1)}, {i})] = narrow<{CPP[out.dtype]}>({n}{scale});" for i, n in
              zip(range(out.shape[-1]), ("re", "im"), strict=False)]  # fmt: skip
    lines = f"""double re = 0, im = 0;
        for (i64 j = 0; j < {taken}; j++) {{
            const double angle = {sign}6.283185307179586476925 * double((j * o{axis}) % {length}) / {length};
            const double c = cos(angle), s = sin(angle), weight = {double};
            const double u = weight * double(widen(p.x[at_x({at}, 0)])), v = weight * {imaginary};
            re += u * c - v * s; im += u * s + v * c;
        }}
        {" ".join(stores)}"""
    space = [*out.shape[:-1], 1]
    emit_index_kernel(b, op, space, {"x": x}, {"y": out}, lines, reads=operands_of(b, op))


def _dft_axis(b: Builder, op: Op) -> int | None:
    axis = op.attrs.axis
    if op.input(2) is not None:
        known = b.graph.known(op.input(2))
        if known is None or known.dtype == object:
            return None
        axis = int(known.reshape(-1)[0])
    return normalize_axis(axis, len(op.outputs[0].type.static_shape))


def _dft_length(b: Builder, op: Op, size: int) -> int:
    known = None if op.input(1) is None else b.graph.known(op.input(1))
    return size if known is None else int(known.reshape(-1)[0])


# ---------------------------------------------------------------- normalizations, positions


def _batch_norm(b: Builder, op: Op) -> None:
    x, out = needed(b, op, 0), b.target(op.value)
    scale, bias, mean, var = (needed(b, op, i) for i in range(1, 5))
    t = wide(x.dtype, scale.dtype, mean.dtype)
    at = coordinates(len(out.shape))

    def entry(name: str) -> str:
        return f"{t}(widen(p.{name}[at_{name}(o1)]))"

    lines = f"""const {t} factor = {entry("s")} / sqrt({entry("v")} + {literal(op.attrs.epsilon, t)});
        p.y[at_y({at})] = narrow<{CPP[out.dtype]}>(({t}(widen(p.x[at_x({at})])) - {entry("m")}) * factor + {entry("b")});"""
    tensors: dict[str, TensorView | None] = {"x": x, "s": scale, "b": bias, "m": mean, "v": var}
    emit_index_kernel(b, op, out.shape, tensors, {"y": out}, lines, reads=operands_of(b, op))


def _layer_norm(b: Builder, op: Op) -> None:
    """Emits a LayerNormalization with its statistics as results: a thread per row."""
    x, scale, bias = needed(b, op, 0), needed(b, op, 1), operand_at(b, op, 2)
    results = [b.target(v) for v in op.values]
    r, t = len(x.shape), wide(x.dtype)
    axis = normalize_axis(op.attrs.axis, r)
    count = math.prod(x.shape[axis:])
    at = coordinates(r, {k: f"i{k}" for k in range(axis, r)})
    loops = " ".join(f"for (i64 i{k} = 0; i{k} < {x.shape[k]}; i{k}++)" for k in range(axis, r))
    row = coordinates(r, dict.fromkeys(range(axis, r), "0"))

    def entry(name: str, p: TensorView) -> str:
        rank = len(p.shape)
        where = ", ".join(
            "0" if p.shape[i] == 1 else f"{'i' if r - rank + i >= axis else 'o'}{r - rank + i}" for i in range(rank)
        )
        return f"{t}(widen(p.{name}[at_{name}({where})]))"

    shift = f" + {entry('b', bias)}" if bias is not None else ""
    names = ("y", "m", "d")[: len(results)]
    kept = {"m": "mean", "d": "inverse"}
    stores = " ".join(
        f"p.{n}[at_{n}({row})] = narrow<{CPP[p.dtype]}>({kept[n]});"
        for n, p in zip(names, results, strict=True)
        if n != "y"
    )
    lines = f"""{t} mean = 0, var = 0;
        {loops} mean += {t}(widen(p.x[at_x({at})]));
        mean /= {count};
        {loops} {{ const {t} v = {t}(widen(p.x[at_x({at})])) - mean; var += v * v; }}
        const {t} inverse = 1 / sqrt(var / {count} + {literal(op.attrs.epsilon, t)});
        {loops} p.y[at_y({at})] = narrow<{CPP[results[0].dtype]}>(({t}(widen(p.x[at_x({at})])) - mean) * inverse * {entry("s", scale)}{shift});
        {stores}"""
    space = [n if k < axis else 1 for k, n in enumerate(x.shape)]
    emit_index_kernel(
        b,
        op,
        space,
        {"x": x, "s": scale, "b": bias},
        dict(zip(names, results, strict=True)),
        lines,
        reads=operands_of(b, op),
    )


def _rotary(b: Builder, op: Op) -> None:
    x, cos, sin, out, a = needed(b, op, 0), needed(b, op, 1), needed(b, op, 2), b.target(op.value), op.attrs
    t, size = arithmetic(x.dtype), a.rotary_embedding_dim or x.shape[-1]
    half = size // a.parts // 2
    pair, first, other = (
        ("o3 / 2", "o3 % 2 == 0", "first ? o3 + 1 : o3 - 1") if a.interleaved else
        (f"o3 / {2 * half} * {half} + o3 % {half}", f"o3 / {half} % 2 == 0", f"first ? o3 + {half} : o3 - {half}")
    )  # fmt: skip
    pair = "o3" if a.own_angles else pair
    lines = f"""{t} v = widen(p.x[at_x(o0, o1, o2, o3)]);
        if (o3 < {size}) {{
            const bool first = {first};
            const {t} c = widen(p.c[at_c(o0, o2, {pair})]), s = widen(p.s[at_s(o0, o2, {pair})]), w = widen(p.x[at_x(o0, o1, o2, {other})]);
            v = first ? c * v - s * w : s * w + c * v;
        }}
        p.y[at_y(o0, o1, o2, o3)] = narrow<{CPP[out.dtype]}>(v);"""
    emit_index_kernel(b, op, out.shape, {"x": x, "c": cos, "s": sin}, {"y": out}, lines, reads=operands_of(b, op))


# ---------------------------------------------------------------- refusals


def _work(b: Builder, op: Op) -> float:
    """Number of products that all threads sum together."""
    out = math.prod(op.outputs[0].type.static_shape)
    if op.kind == "Einsum":
        return _einsum_products(b, op)
    if op.kind in ("MatMulInteger", "QLinearMatMul"):
        return out * shape_at(b, op, 0)[-1]
    if op.kind in ("ConvInteger", "QLinearConv"):
        return out * math.prod(shape_at(b, op, 1 if op.kind == "ConvInteger" else 3)[1:])
    if op.kind == "DFT":
        axis = _dft_axis(b, op)
        return 0.0 if axis is None else out * shape_at(b, op, 0)[axis]
    return 0.0


def _limits(b: Builder, op: Op) -> str | None:
    if op.kind == "DFT" and _dft_axis(b, op) is None:
        return "its axis is not known when the engine is built"
    if op.kind == "DynamicQuantizeLinear" and 0 in shape_at(b, op, 0):
        return "it has no elements"
    work = _work(b, op)
    return f"threads that sum {work:.0f} products one by one are too slow" if work > SUMS_LIMIT else None


NUMERIC: dict[str, Callable[[Builder, Op], None]] = {
    **QUANTIZED, "GridSample": _grid_sample, "AffineGrid": _affine_grid, "Einsum": _einsum, "DFT": _dft,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm, "PackedGather": packed_rows, "RotaryEmbedding": _rotary,
}  # fmt: skip
"""Kind -> the function that emits it."""

LAUNCH_S, PRODUCT_S, PRODUCTS_RATE = 1.5e-6, 20e-9, 1e12
"""Seconds of a launch; seconds per product of a thread, which sums products one after another; products per second of all threads."""


class NumericKernel(IndexKernel):
    """The tactic with a cost model of scalar products: tensor cores would be much faster."""

    def seconds(self, b: Builder, op: Op) -> float | None:
        work = _work(b, op)
        depth = work / max(1, math.prod(op.outputs[0].type.static_shape))
        return LAUNCH_S + max(depth * PRODUCT_S, work / PRODUCTS_RATE) if work else None


TACTIC = NumericKernel(NUMERIC, _limits)
