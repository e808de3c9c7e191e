"""Operators that move, order or count elements, each a few lines over coordinates (see :mod:`optdnn.kernels.index.index_kernel`).

Scatters are in :mod:`optdnn.kernels.index.scatters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import (
    THREADS,
    VISITS_LIMIT,
    IndexKernel,
    coordinates,
    emit_index_kernel,
    needed,
    operand_at,
    operands_of,
    shape_at,
)
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.types import is_float, normalize_axis

WARP = 32
FEW_LINES = 1 << 13
"""With fewer lines than this, a running sum takes a warp per line: 128 loads of one thread, one after another, take 9 us on an H200."""

LONG_LINE, MOST_BLOCKS = 1024, 512
"""Lines from this length, if there are no more of them than this, have a block each: a warp goes through 24,000 elements in 750 steps of
0.15 us, one after another."""
BATCH = 8
"""Elements of a tile per thread."""


def _number(name: str, placed: TensorView | None) -> str:
    """C++ of the single element of a tensor as a 64-bit integer; 0 if it is absent."""
    return "0" if placed is None else f"i64(widen(p.{name}[0]))"


# ---------------------------------------------------------------- the operators


def _trilu(b: Builder, op: Op) -> None:
    x, k, out = needed(b, op, 0), operand_at(b, op, 1), b.target(op.value)
    r = len(out.shape)
    kept = ">=" if op.attrs.upper else "<="
    lines = f"""const bool kept = o{r - 1} - o{r - 2} {kept} {_number("k", k)};
        p.y[at_y({coordinates(r)})] = kept ? p.x[at_x({coordinates(r)})] : narrow<{CPP[x.dtype]}>({arithmetic(x.dtype)}(0));"""
    emit_index_kernel(b, op, out.shape, {"x": x, "k": k}, {"y": out}, lines, reads=operands_of(b, op))


def _shared_by_warps(x: TensorView, axis: int) -> bool:
    """Whether each line has a warp: if the elements of a line are contiguous, or if few lines would leave the GPU idle."""
    length = x.shape[axis]
    return length >= WARP // 2 and (x.strides[axis] == 1 or math.prod(x.shape) // length < FEW_LINES)


def _scanned(op: Op, rank: int, axis: int, number: str, element: str) -> str:
    """C++ of a warp's prefix sum of a line, 32 elements at a time, by shuffles."""
    a, combine, first = op.attrs, *(("+", "0") if op.kind == "CumSum" else ("*", "1"))
    at = coordinates(rank, {axis: "j"})
    return f"""const i64 lane = o{rank}, n = p.n_x[{axis}];
        {number} before = {number}({first});
        for (i64 t = lane; t - lane < n; t += {WARP}) {{
            const i64 j = {"n - 1 - t" if a.reverse else "t"};
            {number} sum = {number}({first});
            if (t < n) sum = widen(p.x[at_x({at})]);
            #pragma unroll
            for (int step = 1; step < {WARP}; step *= 2) {{
                const {number} other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum = sum {combine} other;
            }}
            const {number} left = __shfl_up_sync(0xffffffffu, sum, 1);
            const {number} own = {"lane ? left : " + number + "(" + first + ")" if a.exclusive else "sum"};
            if (t < n) p.y[at_y({at})] = narrow<{element}>(before {combine} own);
            before = before {combine} __shfl_sync(0xffffffffu, sum, {WARP - 1});
        }}"""


def _has_blocks(x: TensorView, axis: int) -> bool:
    """Whether each line has a block: if lines are long and few."""
    length = x.shape[axis]
    return length >= LONG_LINE and math.prod(x.shape) // length <= MOST_BLOCKS


def _scanned_by_blocks(op: Op, rank: int, axis: int, number: str, element: str) -> str:
    """C++ of a block's prefix sum of a line, tile by tile. A thread has BATCH consecutive elements of a tile; it loads those of the next
    tile before it sums its own. ``before``: the sum of all tiles before this one."""
    a, combine, first = op.attrs, *(("+", "0") if op.kind == "CumSum" else ("*", "1"))
    at, tile = coordinates(rank, {axis: "j"}), THREADS * BATCH
    add, store = f"sum = sum {combine} v[k];", f"p.y[at_y({at})] = narrow<{element}>(sum);"

    def each(begin: str, line: str) -> str:
        return f"""#pragma unroll
            for (int k = 0; k < {BATCH}; k++) {{
                const i64 t = {begin} + k, j = {"n - 1 - t" if a.reverse else "t"};
                {line}
            }}"""

    def load(into: str, begin: str) -> str:
        return each(begin, f"{into}[k] = t < n ? {number}(widen(p.x[at_x({at})])) : {number}({first});")

    return f"""const int lane = threadIdx.x % {WARP}, warp = threadIdx.x / {WARP};
        const i64 n = p.n_x[{axis}];
        __shared__ {number} totals[{THREADS // WARP}];
        {number} before = {number}({first}), v[{BATCH}], next[{BATCH}];
        {load("v", f"o{rank} * {BATCH}")}
        for (i64 from = 0; from < n; from += {tile}) {{
            const i64 own = from + o{rank} * {BATCH};
            {load("next", f"own + {tile}")}
            {number} sum = {number}({first});
            #pragma unroll
            for (int k = 0; k < {BATCH}; k++) {add}
            #pragma unroll
            for (int step = 1; step < {WARP}; step *= 2) {{
                const {number} other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum = sum {combine} other;
            }}
            __syncthreads();  // the totals of the tile before are read
            if (lane == {WARP - 1}) totals[warp] = sum;
            __syncthreads();
            sum = __shfl_up_sync(0xffffffffu, sum, 1);
            if (lane == 0) sum = {number}({first});
            {number} lower = before;
            #pragma unroll
            for (int w = 0; w < {THREADS // WARP}; w++) {{
                if (w < warp) lower = lower {combine} totals[w];
                before = before {combine} totals[w];
            }}
            sum = lower {combine} sum;
            {each("own", f"if (t < n) {{ {f'{store} {add}' if a.exclusive else f'{add} {store}'} }}")}
            #pragma unroll
            for (int k = 0; k < {BATCH}; k++) v[k] = next[k];
        }}"""


def _cumulate(b: Builder, op: Op) -> None:
    x, axis, out = needed(b, op, 0), needed(b, op, 1), b.target(op.value)
    a, r, t = op.attrs, len(out.shape), arithmetic(x.dtype)
    combine, first = ("acc + v", "0") if op.kind == "CumSum" else ("acc * v", "1")
    known = b.graph.known(op.input(1))
    along = None if known is None else normalize_axis(int(known.reshape(-1)[0]), r)
    if along is not None and _has_blocks(x, along):
        space = [*(1 if k == along else n for k, n in enumerate(out.shape)), THREADS]
        lines = _scanned_by_blocks(op, r, along, t, CPP[out.dtype])
    elif along is not None and _shared_by_warps(x, along):
        space = [*(1 if k == along else n for k, n in enumerate(out.shape)), WARP]
        lines = _scanned(op, r, along, t, CPP[out.dtype])
    elif along is not None:  # a thread walks a line
        space = [1 if k == along else n for k, n in enumerate(out.shape)]
        at = coordinates(r, {along: "j"})
        before, after = ("store(at_y({0}), acc);", "") if a.exclusive else ("", "store(at_y({0}), acc);")
        lines = f"""{t} acc = {t}({first});
        auto store = [&](i64 to, {t} value) {{ p.y[to] = narrow<{CPP[out.dtype]}>(value); }};
        for (i64 t = 0; t < p.n_x[{along}]; t++) {{
            const i64 j = {f"p.n_x[{along}] - 1 - t" if a.reverse else "t"};
            const {t} v = widen(p.x[at_x({at})]);
            {before.format(at)} acc = {combine}; {after.format(at)}
        }}"""
    else:  # each element sums the elements before it
        space = list(out.shape)
        lines = f"""const i64 c[] = {{{coordinates(r)}}};
        i64 a = {_number("axis", axis)};
        a += a < 0 ? {r} : 0;
        if (a < 0 || a >= {r}) continue;
        {t} acc = {t}({first});
        for (i64 t = 0; t < p.n_x[a]; t++) {{
            const i64 j = {"p.n_x[a] - 1 - t" if a.reverse else "t"};
            if ({str(a.exclusive).lower()} && j == c[a]) break;
            const {t} v = widen(p.x[at_x({coordinates(r)}) + (j - c[a]) * p.s_x[a]]);
            acc = {combine};
            if (j == c[a]) break;
        }}
        p.y[at_y({coordinates(r)})] = narrow<{CPP[out.dtype]}>(acc);"""
    emit_index_kernel(b, op, space, {"x": x, "axis": axis}, {"y": out}, lines, reads=operands_of(b, op))


def _one_hot(b: Builder, op: Op) -> None:
    index, values, out = needed(b, op, 0), needed(b, op, 2), b.target(op.value)
    r = len(out.shape)
    axis = normalize_axis(op.attrs.axis, r)
    at = ", ".join(f"o{k}" for k in range(r) if k != axis)
    t = "double" if is_float(index.dtype) else "i64"
    lines = f"""const {t} v = {t}(widen(p.i[at_i({at})]));
        const bool hit = v == {t}(o{axis}) || v + {t}({out.shape[axis]}) == {t}(o{axis});
        p.y[at_y({coordinates(r)})] = p.v[at_v(hit ? 1 : 0)];"""
    emit_index_kernel(b, op, out.shape, {"i": index, "v": values}, {"y": out}, lines, reads=operands_of(b, op))


def _hardmax(b: Builder, op: Op) -> None:
    x, out = needed(b, op, 0), b.target(op.value)
    r, t, ty = len(out.shape), arithmetic(x.dtype), CPP[x.dtype]
    axis = normalize_axis(op.attrs.axis, r)
    space = [1 if k == axis else n for k, n in enumerate(out.shape)]
    at = coordinates(r, {axis: "j"})
    lines = f"""{t} best = {t}(0);
        i64 found = 0;
        for (i64 j = 0; j < p.n_x[{axis}]; j++) {{
            const {t} v = widen(p.x[at_x({at})]);
            if (!j || (best == best && (v > best || v != v))) {{ best = v; found = j; }}
        }}
        for (i64 j = 0; j < p.n_x[{axis}]; j++) p.y[at_y({at})] = narrow<{ty}>({t}(j == found));"""
    emit_index_kernel(b, op, space, {"x": x}, {"y": out}, lines, reads=operands_of(b, op))


def _reverse_sequence(b: Builder, op: Op) -> None:
    x, lengths, out = needed(b, op, 0), needed(b, op, 1), b.target(op.value)
    r = len(out.shape)
    batch, time = normalize_axis(op.attrs.batch_axis, r), normalize_axis(op.attrs.time_axis, r)
    lines = f"""const i64 length = i64(widen(p.l[at_l(o{batch})]));
        i64 t = o{time} < length ? length - 1 - o{time} : o{time};
        t = t < 0 ? 0 : t < p.n_x[{time}] ? t : p.n_x[{time}] - 1;
        p.y[at_y({coordinates(r)})] = p.x[at_x({coordinates(r, {time: "t"})})];"""
    emit_index_kernel(b, op, out.shape, {"x": x, "l": lengths}, {"y": out}, lines, reads=operands_of(b, op))


def _top_k(b: Builder, op: Op) -> None:
    x = needed(b, op, 0)
    writes = {name: b.target(v) for v, name in zip(op.values, ("y", "i"), strict=False)}
    r, t = len(x.shape), arithmetic(x.dtype)
    axis = normalize_axis(op.attrs.axis, r)
    index = f"p.i[at_i({coordinates(r, {axis: 'rank'})})] = o{axis};" if "i" in writes else ""
    before = "w > v || (w != w && v == v)" if op.attrs.largest else "w < v || (v != v && w == w)"
    lines = f"""const {t} v = widen(p.x[at_x({coordinates(r)})]);
        i64 rank = 0;
        for (i64 j = 0; j < p.n_x[{axis}]; j++) {{
            const {t} w = widen(p.x[at_x({coordinates(r, {axis: "j"})})]);
            const bool equal = w == v || (w != w && v != v);
            rank += {before} || (equal && j < o{axis});
        }}
        if (rank < p.n_y[{axis}]) {{
            p.y[at_y({coordinates(r, {axis: "rank"})})] = narrow<{CPP[x.dtype]}>(v);
            {index}
        }}"""
    emit_index_kernel(b, op, x.shape, {"x": x}, writes, lines, reads=operands_of(b, op))


def _bit_cast(b: Builder, op: Op) -> None:
    x, out = needed(b, op, 0), b.target(op.value)
    at = coordinates(len(out.shape))
    lines = f"""union {{ {CPP[x.dtype]} from; {CPP[out.dtype]} to; }} bits;
        bits.from = p.x[at_x({at})];
        p.y[at_y({at})] = bits.to;"""
    emit_index_kernel(b, op, out.shape, {"x": x}, {"y": out}, lines, reads=operands_of(b, op))


# ---------------------------------------------------------------- refusals


def _lookups(b: Builder, op: Op) -> float:
    """Number of (result, candidate) pairs that a kernel visits."""
    x = shape_at(b, op, 0)
    if op.kind in ("CumSum", "CumProd"):
        return 0.0 if b.graph.known(op.input(1)) is not None else math.prod(x) * max(x, default=1)
    if op.kind == "TopK":
        # Only elements of one line are compared: they come from the caches, several at a time.
        return math.prod(x) * x[normalize_axis(op.attrs.axis, len(x))] / 16
    return 0.0


def _limits(b: Builder, op: Op) -> str | None:
    visits = _lookups(b, op)
    return f"its results would compare {visits:.0f} candidates in all" if visits > VISITS_LIMIT else None


POSITIONS: dict[str, Callable[[Builder, Op], None]] = {
    "Trilu": _trilu, "CumSum": _cumulate, "CumProd": _cumulate, "OneHot": _one_hot, "Hardmax": _hardmax,
    "ReverseSequence": _reverse_sequence, "TopK": _top_k, "BitCast": _bit_cast,
}  # fmt: skip
"""Kind -> the function that emits it."""

TACTIC = IndexKernel(POSITIONS, _limits)
