"""Reductions over any axes, generated: a block sums in a fixed order, so results repeat bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import ints
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.pointwise import CPP, arithmetic, copy, literal
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.pool.window import load_channels
from optdnn.kernels.tactic import Tactic
from optdnn.ops.reduce import reduced_axes
from optdnn.types import is_float

THREADS = 256
"""Threads of a block where an output has few terms (then several outputs share it); with many it has four times as many."""

BATCH = 4
"""Terms that a thread loads before it adds up the first of them."""

# kind -> (start, element v -> term, how terms combine, total s -> result); {T} is the arithmetic type, {N} the count.
RULES: dict[str, tuple[str, str, str, str]] = {
    "ReduceSum": ("{T}(0)", "v", "a + b", "total"),
    "ReduceMean": ("{T}(0)", "v", "a + b", "total / {T}({N})"),
    "ReduceMax": ("{LOW}", "v", "max_nan(a, b)", "total"),
    "ReduceMin": ("{HIGH}", "v", "min_nan(a, b)", "total"),
    "ReduceProd": ("{T}(1)", "v", "a * b", "total"),
    "ReduceL1": ("{T}(0)", "(v < {T}(0) ? {T}(-v) : v)", "a + b", "total"),
    "ReduceL2": ("{T}(0)", "v * v", "a + b", "{T}(sqrt({F}(total)))"),
    "ReduceSumSquare": ("{T}(0)", "v * v", "a + b", "total"),
    "ReduceLogSum": ("{T}(0)", "v", "a + b", "{T}(log({F}(total)))"),
    "ReduceLogSumExp": ("{T}(0)", "exp(v - top)", "a + b", "(isinf(top) ? top : {T}(log(total)) + top)"),
}

OF_ELEMENTS = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"})
"""Kinds that do something to an element that is reduced with no other."""
REDUCTIONS = tuple(RULES)
"""Kinds of :class:`Reduction`."""


def limits(t: str) -> tuple[str, str]:
    """The least and the greatest value of an arithmetic type, as C++."""
    if t in ("float", "double"):
        return literal(-math.inf, t), literal(math.inf, t)
    if t == "bool":
        return "false", "true"
    bits = int(t[1:])
    low, high = (0, (1 << bits) - 1) if t.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return f"{t}({low}ULL)" if low >= 0 else f"{t}({t}({low + 1}LL) - 1)", f"{t}({high}ULL)"


def _together(x: TensorView, width: int, strides: Sequence[int]) -> int:
    """Neighbouring outputs whose terms are one access, where the others lie ``strides`` apart."""
    fits = (n for n in (8, 4, 2) if n * x.dtype.itemsize <= 16 and not any(k % n for k in (width, x.offset, *strides)))
    return next(fits, 1)


def _terms(runs: int, count: int) -> list[str]:
    """The numbers of the terms that a thread loads together. Beyond the last of ``count`` terms, the last is read again."""
    batch = max(1, min(BATCH, -(-count // runs)))
    if batch == 1:
        return ["i + 0u"]
    return [f"(i + {k * runs}u < {count}u ? i + {k * runs}u : {count - 1}u)" for k in range(batch)]


def _loop(loads: Sequence[tuple[str, str]], step: str, runs: int, count: int) -> str:
    """All terms of a thread. ``loads``: for each term of a batch, the way to it and its load; ``step``: for the one of number #."""
    before = "".join(f"i64 o{k} = base; {{ {way} }}\n        {load}\n        " for k, (way, load) in enumerate(loads))
    after = ""
    for k in range(len(loads)):
        guard = f"if (i + {k * runs}u < {count}u) " if len(loads) > 1 else ""
        after += f"{guard}{step.replace('#', str(k))}\n        "
    return f"for (u32 i = run; i < {count}u; i += {runs * len(loads)}) {{\n        {before}{after}}}"


def emit_reduce(
    b: Builder, op: Op, how: str, x: TensorView, axes: Sequence[int], out: TensorView, *, kind: str, attrs: dict[str, Any],
    reads: Sequence[TensorView | None],
) -> None:  # fmt: skip
    """``out = how(x over axes)``; ``out`` has x's shape with the axes reduced to 1, or dropped."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    shape = [x.shape[i] for i in kept]
    out_strides = out.strides if len(out.shape) == len(kept) else [out.strides[i] for i in kept]
    dims, (so, sx) = merge(shape, [out_strides, [x.strides[i] for i in kept]])
    inner, (rx, _) = merge([x.shape[i] for i in axes], [[x.strides[i] for i in axes]] * 2)
    count, outputs = math.prod(inner), math.prod(dims)
    if 0 in out.shape:
        return
    t = arithmetic(x.dtype)
    low, high = limits(t)
    start, term, combine, result = (
        s.format(T=t, N=max(count, 1), LOW=low, HIGH=high, F="double" if t != "float" else "float") for s in RULES[how]
    )
    # Neighbouring outputs that are neighbours in memory share a block, so that loads coalesce; a thread takes 16 bytes of them.
    threads = 1024 if count >= 1024 else THREADS
    across = sx[-1] == 1 and dims[-1] >= 8 and rx[-1] != 1
    vec = _together(x, dims[-1], [*sx[:-1], *rx]) if across else 1
    # Else neighbouring terms are neighbouring threads', and outputs of few terms share a block.
    most = threads * vec // 32 if across else threads
    runs = min(most, 1 << max((count - 1).bit_length() - (0 if across else 2), 0)) if vec > 1 or not across else most
    lanes, step = threads // runs, so[-1]
    dims, so, sx = [*dims[:-1], dims[-1] // vec], [*so[:-1], so[-1] * vec], [*sx[:-1], sx[-1] * vec]
    fast, slow = f"threadIdx.x % {lanes if across else runs}", f"threadIdx.x / {lanes if across else runs}"
    lane, run = (fast, slow) if across else (slow, fast)

    def sum_of(run: Any, lane: Any = "lane") -> str:
        return f"partial[j][{run}][{lane}]" if across else f"partial[j][{lane}][{run}]"

    tx, ty = CPP[x.dtype], CPP[out.dtype]
    each = f"for (int j = 0; j < {vec}; j++)"

    def loop(step: str) -> str:
        loads = [
            (
                walk("r", term, "inner", len(inner), [(f"o{k}", "rx")]),
                load_channels(tx, vec, f"p.x + o{k}", f"found{k}"),
            )
            for k, term in enumerate(_terms(runs, count))
        ]
        return _loop(loads, f"{each} {{ const {t} v = widen(found#.lane[j]); {step} }}", runs, count)

    tree = f"""{each} {sum_of("run")} = s[j];
    __syncthreads();
    for (int half = {runs // 2}; half; half /= 2) {{
        if (run < half) {each} {{ const {t} a = {sum_of("run")}, b = {sum_of("run + half")}; {sum_of("run")} = COMBINE; }}
        __syncthreads();
    }}
    {each} s[j] = {sum_of(0)};"""
    top, tree = tree.replace("COMBINE", "max_nan(a, b)"), tree.replace("COMBINE", combine)
    of_top, first = "", f"{t} s[{vec}]; {each} s[j] = {start};"
    if how == "ReduceLogSumExp":
        of_top = f"const {t} top = tops[j];"
        first = f"""{t} s[{vec}], tops[{vec}]; {each} s[j] = {low};
    if (live) {loop("s[j] = max_nan(s[j], v);")}
    {top}
    __syncthreads();
    {each} {{ tops[j] = s[j]; s[j] = {start}; }}"""
    text = f"""struct Params {{ const {tx}* x; {ty}* y; u32 count, dims[{len(dims)}], inner[{len(inner)}]; i64 so[{len(dims)}], sx[{len(dims)}], rx[{len(inner)}]; }};

extern "C" __global__ void __launch_bounds__({threads}) reduce(const __grid_constant__ Params p) {{
    __shared__ {t} {sum_of(runs, lanes).replace("j", str(vec), 1)};
    launch_dependents();
    wait_for_predecessor();
    const u32 lane = {lane}, run = {run}, index = blockIdx.x * {lanes} + lane;
    const bool live = index < p.count;
    i64 base = 0, to = 0;
    if (live) {{ {walk("q", "index", "dims", len(dims), [("base", "sx"), ("to", "so")])} }}
    {first}
    if (live) {loop(f"{of_top} const {t} a = s[j], b = {t}({term}); s[j] = {combine};")}
    {tree}
    if (run == 0 && live) {each} {{ {of_top} const {t} total = s[j]; p.y[to + j * {step}] = narrow<{ty}>({result}); }}
}}
"""
    outputs //= vec
    parameters = Parameters().pointer("x", "y").u32(outputs, *dims, *inner).i64(*so, *sx, *rx)
    launch = parameters.generated(b.arch, text, "reduce", -(-outputs // lanes), threads)
    b.emit(op, launch, {"x": x, "y": out}, kind, attrs, reads, [out])


class Reduction(Tactic):
    """Every ONNX reduction."""

    name = "reduce"

    def refuse(self, b: Builder, op: Op) -> str | None:
        dtype = op.outputs[0].type.dtype
        if op.kind == "ReduceLogSumExp" and not is_float(dtype):
            return f"it takes no exponentials of {dtype.name}"
        if op.kind == "ReduceL2" and not is_float(dtype):
            return f"it adds no squares of {dtype.name}, which overflow"
        return None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x, out = b.operand(op.inputs[0]), b.target(op.value)
        axes = reduced_axes(op.attrs, ints(b, op, 1), len(x.shape), op.kind)
        if not axes and op.kind not in OF_ELEMENTS:
            copy(b, op, x, out)
            return
        attrs = {"keepdims": op.attrs.keepdims, "noop_with_empty_axes": not axes}
        named = b.constant(np.array(axes, np.int64), "axes")
        if not axes:  # over an axis of one element, then
            x, axes = x.view((*x.shape, 1), (*x.strides, 1)), (len(x.shape),)
        emit_reduce(b, op, op.kind, x, axes, out, kind=op.kind, attrs=attrs, reads=[b.operand(op.inputs[0]), named])
