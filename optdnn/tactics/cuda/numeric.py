"""Operators of arithmetic over coordinates (see :mod:`optdnn.tactics.cuda.each`): sampling, quantization, sums of products.

They are the general ways: a thread per result that sums in one order. What is common enough has kernels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.ops.base import attrs_dict
from optdnn.ops.gemm import einsum_terms
from optdnn.ops.quant import QuantizeAttrs
from optdnn.tactics.cuda.builder import Builder, Placed
from optdnn.tactics.cuda.each import POINTS_LIMIT, coordinates, emit_each
from optdnn.tactics.cuda.pointwise import CPP, FP8_LARGEST, arithmetic, literal
from optdnn.tactics.cuda.positions import VISITS_LIMIT, _in, _needed, _reads, _shape
from optdnn.tactics.cuda.reduce import emit_reduce, limits
from optdnn.tactics.cuda.tactic import OwnTactic
from optdnn.types import FP32, FP64, UINT8, DType, is_float, normalize_axis

SUMS_LIMIT = VISITS_LIMIT * 16
"""Most products of a kernel that sums them in a thread per result."""


def _wide(*dtypes: DType) -> str:
    """The type to compute in: double where an operand is, else float."""
    return "double" if FP64 in dtypes else "float"


# ---------------------------------------------------------------- sampling

_REFLECT = """
template <typename T> DEVICE T reflected(T at, T low, T high) {
    const T span = high - low;
    if (span == 0) return low;
    T away = fmod(at - low, 2 * span);
    away += away < 0 ? 2 * span : T(0);
    return low + (away > span ? 2 * span - away : away);
}
"""


def _grid_sample(b: Builder, op: Op) -> None:
    x, grid, out, a = _needed(b, op, 0), _needed(b, op, 1), b.target(op.value), op.attrs
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
        lines.append(_weights(k, a.mode, t))
        index = (
            f"rint(reflected(double(f{k} + t{k}), {low}, {high}))" if a.padding_mode == "reflection" else f"f{k} + t{k}"
        )
        outside = f"if (i{k} < 0 || i{k} >= {size}) continue;" if a.padding_mode == "zeros" else ""
        loops.append(
            f"for (int t{k} = 0; t{k} < {taps}; t{k}++) {{ i64 i{k} = i64({index}); {outside} "
            f"i{k} = i{k} < 0 ? 0 : i{k} >= {size} ? {size - 1} : i{k};"
        )
        closing += "}"
    weight = " * ".join(f"w{k}[t{k}]" for k in range(rank))
    at = ", ".join(["o0", "o1", *(f"i{k}" for k in range(rank))])
    loops.append(f"acc += {t}(widen(p.x[at_x({at})])) * ({weight});")
    text = " ".join([*lines, f"{t} acc = 0;", *loops, closing])
    text += f" p.y[at_y({coordinates('o', rank + 2)})] = narrow<{CPP[x.dtype]}>(acc);"
    emit_each(b, op, out.shape, {"x": x, "g": grid}, {"y": out}, text, reads=_reads(b, op), helpers=_REFLECT)


def _weights(k: int, mode: str, t: str) -> str:
    """The first tap along axis ``k`` and the taps' weights."""
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
    theta, out = _needed(b, op, 0), b.target(op.value)
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
    lines.append(f"p.y[at_y({coordinates('o', len(out.shape))})] = narrow<{CPP[out.dtype]}>(v);")
    emit_each(b, op, out.shape, {"t": theta}, {"y": out}, " ".join(lines), reads=_reads(b, op))


# ---------------------------------------------------------------- quantization


def _parameter(name: str, placed: Placed | None, axis: int, rank: int, block: int) -> str:
    """The element of a scale or zero point that meets a point: one in all, one per entry of ``axis``, or one per block."""
    if placed is None:
        return ""
    if len(placed.shape) <= 1 and math.prod(placed.shape) == 1:
        return f"p.{name}[0]"
    if block:
        return f"p.{name}[at_{name}({coordinates('o', rank, {axis: f'o{axis} / {block}'})})]"
    return f"p.{name}[at_{name}(o{axis})]"


def _axis(op: Op, rank: int) -> int:
    return normalize_axis(op.attrs.axis, rank) if rank and -rank <= op.attrs.axis < rank else 0


def rounded(value: str, zero: str, out: DType) -> str:
    """C++ statements that round ``value`` (floating-point) half to even, shift and saturate it into the double ``q``."""
    low, high = (limits(CPP[out])[i] for i in (0, 1))
    return (
        f"double q = rint(double({value})); q = q != q ? 0 : q; {f'q += double(widen({zero}));' if zero else ''} "
        f"q = q < double({low}) ? double({low}) : q > double({high}) ? double({high}) : q;"
    )


def _quantize(b: Builder, op: Op) -> None:
    x, scale, zero, out = _needed(b, op, 0), _needed(b, op, 1), _in(b, op, 2), b.target(op.value)
    a, r = op.attrs, len(out.shape)
    axis, at, t = _axis(op, r), coordinates("o", r), CPP[a.precision or scale.dtype]
    s, z = (_parameter(n, p, axis, r, a.block_size) for n, p in (("s", scale), ("z", zero)))
    # The quotient has the scale's type, and its roundings.
    lines = f"""const auto v = widen(narrow<{t}>(widen(narrow<{t}>(widen(p.x[at_x({at})]))) / widen(narrow<{t}>(widen({s})))));"""
    if is_float(out.dtype):
        top = FP8_LARGEST.get(out.dtype, math.inf) if a.saturate else math.inf
        w = arithmetic(a.precision or scale.dtype)
        bounded = f"min_nan(max_nan(v, {literal(-top, w)}), {literal(top, w)})" if math.isfinite(top) else "v"
        lines += f" p.y[at_y({at})] = narrow<{CPP[out.dtype]}>({bounded});"
    else:
        lines += f" {rounded('v', z, out.dtype)} p.y[at_y({at})] = {CPP[out.dtype]}(q);"
    tensors = {"x": x, "s": scale, "z": zero if not is_float(out.dtype) else None}
    emit_each(b, op, out.shape, tensors, {"y": out}, lines, reads=_reads(b, op))


def _dynamic_quantize(b: Builder, op: Op) -> None:
    """The range of all elements, the scale and zero point that it gives, and the elements in them."""
    x = _needed(b, op, 0)
    name, rank = op.outputs[0].name, len(x.shape)
    axes = b.constant(np.arange(rank), "axes")
    whole = {"keepdims": False, "noop_with_empty_axes": False}
    bounds = []
    for kind in ("ReduceMin", "ReduceMax"):
        bounds.append(b.new(f"{name}.{kind}", x.dtype, ()))
        emit_reduce(b, op, kind, x, range(rank), bounds[-1], kind=kind, attrs=whole, reads=[x, axes])
    scale, zero = (
        b.target(Value(op.id, i)) if i < len(op.outputs) else b.new(f"{name}.{i}", d, ())
        for i, d in ((1, FP32), (2, UINT8))
    )
    t = arithmetic(x.dtype)
    lines = f"""const {t} low = min_nan({t}(widen(p.l[0])), {t}(0)), high = max_nan({t}(widen(p.h[0])), {t}(0));
        {t} scale = (high - low) / {t}(255);
        scale = scale > 0 ? scale : {t}(1);
        const {t} zero = rint(min_nan(max_nan(-low / scale, {t}(0)), {t}(255)));
        p.s[0] = float(scale);
        p.z[0] = u8(zero);"""
    emit_each(
        b,
        op,
        (1,),
        {"l": bounds[0], "h": bounds[1]},
        {"s": scale, "z": zero},
        lines,
        reads=bounds,
        meaning=("DynamicScale", {}),
    )
    out, at = b.target(op.value), coordinates("o", rank)
    quotient = f"float(widen(p.x[at_x({at})])) / p.s[0]"
    lines = f"{rounded(quotient, 'p.z[0]', UINT8)} p.y[at_y({at})] = u8(q);"
    attrs = attrs_dict(QuantizeAttrs(UINT8))
    emit_each(
        b, op, out.shape, {"x": x, "s": scale, "z": zero}, {"y": out}, lines, reads=[x, scale, zero],
        meaning=("QuantizeLinear", attrs),
    )  # fmt: skip


def _dequantize(b: Builder, op: Op) -> None:
    x, scale, zero, out = _needed(b, op, 0), _needed(b, op, 1), _in(b, op, 2), b.target(op.value)
    r, t = len(out.shape), _wide(scale.dtype, out.dtype)
    axis, at = _axis(op, r), coordinates("o", r)
    zero = None if is_float(x.dtype) else zero
    s, z = (_parameter(n, p, axis, r, op.attrs.block_size) for n, p in (("s", scale), ("z", zero)))
    value = f"{t}(i64(widen(p.x[at_x({at})])) - i64(widen({z})))" if z else f"{t}(widen(p.x[at_x({at})]))"
    lines = f"p.y[at_y({at})] = narrow<{CPP[out.dtype]}>({value} * {t}(widen({s})));"
    emit_each(b, op, out.shape, {"x": x, "s": scale, "z": zero}, {"y": out}, lines, reads=_reads(b, op))


def _integer_product(b: Builder, op: Op) -> None:
    """MatMulInteger and QLinearMatMul: exact sums, then scales."""
    linear = op.kind == "QLinearMatMul"
    slots = (
        {"a": 0, "s": 1, "z": 2, "c": 3, "u": 4, "v": 5, "w": 6, "q": 7} if linear else {"a": 0, "c": 1, "z": 2, "v": 3}
    )
    placed = {n: p for n, i in slots.items() if (p := _in(b, op, i)) is not None}
    left, right, out = placed["a"], placed["c"], b.target(op.value)
    r, k = len(out.shape), left.shape[-1]
    batch = r - (len(left.shape) > 1) - (len(right.shape) > 1)
    row = f"o{batch}" if len(left.shape) > 1 else ""
    column = f"o{r - 1}" if len(right.shape) > 1 else ""

    def lead(p: Placed) -> list[str]:
        n = max(len(p.shape) - 2, 0)
        return ["0" if p.shape[i] == 1 else f"o{batch - n + i}" for i in range(n)]

    at_a = ", ".join([*lead(left), *([row] if row else []), "k"])
    at_c = ", ".join([*lead(right), "k", *([column] if column else [])])

    def entry(name: str, of_row: bool) -> str:
        """A scalar, or the entry of a row of A or of a column of B."""
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
    at = coordinates("o", r)
    if linear:
        t = _wide(placed["s"].dtype)
        factor = f"{t}(widen({entry('s', True)})) * {t}(widen({entry('u', False)})) / {t}(widen(p.w[0]))"
        lines += f" const {t} scaled = {t}(total) * ({factor}); {rounded('scaled', 'p.q[0]', out.dtype)}"
        lines += f" p.y[at_y({at})] = {CPP[out.dtype]}(q);"
    else:
        lines += f" p.y[at_y({at})] = total;"
    emit_each(b, op, out.shape, placed, {"y": out}, lines, reads=_reads(b, op))


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
    lines = f"{t} acc = 0; {loops} acc += {product}; p.y[at_y({coordinates('o', len(result))})] = narrow<{CPP[out.dtype]}>(acc);"
    tensors: dict[str, Placed | None] = {f"x{k}": p for k, p in enumerate(operands)}
    emit_each(b, op, out.shape, tensors, {"y": out}, lines, reads=_reads(b, op))


def _einsum_products(b: Builder, op: Op) -> float:
    shapes = [_shape(b, op, i) for i in range(len(op.inputs))]
    terms, _ = einsum_terms(op.attrs.equation, [len(s) for s in shapes])
    sizes: dict[str, int] = {}
    for labels, s in zip(terms, shapes, strict=True):
        for label, n in zip(labels, s, strict=True):
            sizes[label] = max(sizes.get(label, 1), n)
    return math.prod(sizes.values())


def _dft(b: Builder, op: Op) -> None:
    x, out, a = _needed(b, op, 0), b.target(op.value), op.attrs
    r = len(out.shape)
    axis = _dft_axis(b, op)
    assert axis is not None
    spectrum = a.inverse and a.onesided  # of a real signal
    length = out.shape[axis] if not a.onesided or spectrum else _dft_length(b, op, x.shape[axis])
    taken = min(x.shape[axis], length // 2 + 1 if spectrum else length)
    at = coordinates("o", r - 1, {axis: "j"})
    imaginary = f"double(widen(p.x[at_x({at}, 1)]))" if x.shape[-1] == 2 else "0.0"
    sign = "" if a.inverse else "-"
    double = f"(j == 0 || 2 * j == {length} ? 1.0 : 2.0)" if spectrum else "1.0"
    scale = f" / {length}.0" if a.inverse else ""
    stores = [f"p.y[at_y({coordinates('o', r - 1)}, {i})] = narrow<{CPP[out.dtype]}>({n}{scale});" for i, n in
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
    emit_each(b, op, space, {"x": x}, {"y": out}, lines, reads=_reads(b, op))


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
    x, out = _needed(b, op, 0), b.target(op.value)
    scale, bias, mean, var = (_needed(b, op, i) for i in range(1, 5))
    t = _wide(x.dtype, scale.dtype, mean.dtype)
    at = coordinates("o", len(out.shape))

    def entry(name: str) -> str:
        return f"{t}(widen(p.{name}[at_{name}(o1)]))"

    lines = f"""const {t} factor = {entry("s")} / sqrt({entry("v")} + {literal(op.attrs.epsilon, t)});
        p.y[at_y({at})] = narrow<{CPP[out.dtype]}>(({t}(widen(p.x[at_x({at})])) - {entry("m")}) * factor + {entry("b")});"""
    tensors: dict[str, Placed | None] = {"x": x, "s": scale, "b": bias, "m": mean, "v": var}
    emit_each(b, op, out.shape, tensors, {"y": out}, lines, reads=_reads(b, op))


def _layer_norm(b: Builder, op: Op) -> None:
    """With its statistics as results: a thread walks a row."""
    x, scale, bias = _needed(b, op, 0), _needed(b, op, 1), _in(b, op, 2)
    results = [b.target(Value(op.id, i)) for i in range(len(op.outputs))]
    r, t = len(x.shape), _wide(x.dtype)
    axis = normalize_axis(op.attrs.axis, r)
    count = math.prod(x.shape[axis:])
    at = coordinates("o", r, {k: f"i{k}" for k in range(axis, r)})
    loops = " ".join(f"for (i64 i{k} = 0; i{k} < {x.shape[k]}; i{k}++)" for k in range(axis, r))
    row = coordinates("o", r, dict.fromkeys(range(axis, r), "0"))

    def entry(name: str, p: Placed) -> str:
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
    emit_each(
        b,
        op,
        space,
        {"x": x, "s": scale, "b": bias},
        dict(zip(names, results, strict=True)),
        lines,
        reads=_reads(b, op),
    )


def _rotary(b: Builder, op: Op) -> None:
    x, cos, sin, out, a = _needed(b, op, 0), _needed(b, op, 1), _needed(b, op, 2), b.target(op.value), op.attrs
    t, size = arithmetic(x.dtype), a.rotary_embedding_dim or x.shape[-1]
    half = size // 2
    pair, first, other = (
        ("o3 / 2", "o3 % 2 == 0", "first ? o3 + 1 : o3 - 1") if a.interleaved else
        (f"o3 % {half}", f"o3 < {half}", f"first ? o3 + {half} : o3 - {half}")
    )  # fmt: skip
    lines = f"""{t} v = widen(p.x[at_x(o0, o1, o2, o3)]);
        if (o3 < {size}) {{
            const bool first = {first};
            const {t} c = widen(p.c[at_c(o0, o2, {pair})]), s = widen(p.s[at_s(o0, o2, {pair})]), w = widen(p.x[at_x(o0, o1, o2, {other})]);
            v = first ? c * v - s * w : s * w + c * v;
        }}
        p.y[at_y(o0, o1, o2, o3)] = narrow<{CPP[out.dtype]}>(v);"""
    emit_each(b, op, out.shape, {"x": x, "c": cos, "s": sin}, {"y": out}, lines, reads=_reads(b, op))


# ---------------------------------------------------------------- what they cannot do


def _work(b: Builder, op: Op) -> float:
    """Products that the threads sum in all."""
    out = math.prod(op.outputs[0].type.static_shape)
    if op.kind == "Einsum":
        return _einsum_products(b, op)
    if op.kind in ("MatMulInteger", "QLinearMatMul"):
        return out * _shape(b, op, 0)[-1]
    if op.kind == "DFT":
        axis = _dft_axis(b, op)
        return 0.0 if axis is None else out * _shape(b, op, 0)[axis]
    return 0.0


def _limits(b: Builder, op: Op) -> str | None:
    if op.kind == "DFT" and _dft_axis(b, op) is None:
        return "its axis is not known when the engine is built"
    if op.kind == "DynamicQuantizeLinear" and 0 in _shape(b, op, 0):
        return "it has no elements"
    if op.kind == "RotaryEmbedding" and len(_shape(b, op, 1)) != 3:
        return "its cosines are not given per position"
    if max(math.prod(o.type.static_shape) for o in op.outputs) >= POINTS_LIMIT:
        return "it has more elements than a kernel counts"
    work = _work(b, op)
    return f"threads that sum {work:.0f} products one by one are too slow" if work > SUMS_LIMIT else None


NUMERIC: dict[str, Callable[[Builder, Op], None]] = {
    "GridSample": _grid_sample, "AffineGrid": _affine_grid, "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "Einsum": _einsum, "DFT": _dft,
    "DynamicQuantizeLinear": _dynamic_quantize, "MatMulInteger": _integer_product, "QLinearMatMul": _integer_product, "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm, "RotaryEmbedding": _rotary,
}  # fmt: skip
"""Kind -> what emits it."""


class Numeric(OwnTactic):
    """A few lines of C++ per element, for the operators of :data:`NUMERIC`."""

    name = "each"

    def refuse(self, b: Builder, op: Op) -> str | None:
        types = [b.graph.type(v).dtype for v in op.inputs if v is not None] + [o.type.dtype for o in op.outputs]
        unknown = sorted({t.name for t in types} - {t.name for t in CPP})
        return f"there is no arithmetic on {', '.join(unknown)}" if unknown else _limits(b, op)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        NUMERIC[op.kind](b, op)
        return ""
