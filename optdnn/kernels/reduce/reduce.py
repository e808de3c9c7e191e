"""Generated kernels of reductions over any axes: a block sums in a fixed order, so results repeat bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import ints
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.pool.window import load_channels
from optdnn.kernels.reduce.grid import BATCH, Grid, Space, space_of
from optdnn.kernels.reduce.windows import WINDOWS, refuse_windows, windows
from optdnn.kernels.tactic import Tactic
from optdnn.ops.reduce import reduced_axes
from optdnn.types import INT32, DType, is_float

MOST_ELEMENTS = 1 << 31
"""Bound of the elements: a 32-bit index plus the step of the last thread must not overflow."""
WARP = 32
LONG = 16
"""From this number of batches per thread on, the batches of a thread set the time, and not the work of all blocks."""

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
"""Kinds that change an element even if it is reduced alone."""
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


@dataclass(frozen=True)
class Terms:
    """The terms of a thread: from ``first`` on, before ``stop``, in steps of ``runs``, ``batch`` at a time. ``last`` is the last term of
    all (the fields are C++)."""

    first: str
    stop: str
    last: str
    runs: int
    batch: int

    @property
    def places(self) -> list[str]:
        """C++ of the numbers of a batch's terms. Beyond the last term, the last one is read again."""
        if self.batch == 1:
            return ["i + 0u"]
        near = [f"i + {k * self.runs}u" for k in range(self.batch)]
        return [f"({at} < {self.stop} ? {at} : {self.last})" for at in near]

    def loop(self, loads: Sequence[tuple[str, str]], step: str) -> str:
        """C++ of the loop over a thread's terms. ``loads``: for each term of a batch, the code of its offsets and of its loads. ``step``:
        the code for term number #."""
        before = "".join(f"{way}\n        {load}\n        " for way, load in loads)
        after = ""
        for k in range(self.batch):
            guard = f"if (i + {k * self.runs}u < {self.stop}) " if self.batch > 1 else ""
            after += f"{guard}{step.replace('#', str(k))}\n        "
        head = f"for (u32 i = {self.first}; i < {self.stop}; i += {self.runs * self.batch})"
        return f"{head} {{\n        {before}{after}}}"


@dataclass(frozen=True)
class Source:
    """The elements that are reduced. ``value``: C++ that computes an element ``v`` of the arithmetic type ``t`` from the elements ``x0``,
    ``x1``, … of ``tensors``. The tensors have one shape (by strides of 0, if necessary); the first one is the largest in memory."""

    tensors: Sequence[TensorView]
    t: str
    value: str

    def names(self, stem: str) -> list[str]:
        """A name with this stem for each tensor."""
        return [stem] if len(self.tensors) == 1 else [f"{stem}_{k}" for k in range(len(self.tensors))]


def plain_source(x: TensorView) -> Source:
    """The elements of a tensor without a computation before the reduction."""
    return Source([x], arithmetic(x.dtype), "")


def emit_reduce(
    b: Builder, op: Op, how: str, source: Source, axes: Sequence[int], out: TensorView, *, kind: str,
    attrs: dict[str, Any], reads: Sequence[TensorView | None], parts: int = 1,
) -> None:  # fmt: skip
    """Emits ``out = how(source over axes)``. ``out`` has the source's shape with the axes reduced to 1, or dropped. ``parts`` blocks share
    the terms of an output; the last one merges their results."""
    if 0 in out.shape:
        return
    space, t = space_of(source.tensors, axes, out), source.t
    text = _kernel(how, source, out, space, parts)
    grid, vec = space.grid, space.grid.vec
    dims = [*space.dims[:-1], space.dims[-1] // vec]
    names, scratch, kept = [*source.names("x"), "y"], [], []
    operands = dict(zip(names, [*source.tensors, out], strict=True))
    if parts > 1:
        values = 2 if how == "ReduceLogSumExp" else 1
        scratch = [b.new(f"{op.outputs[0].name}.parts", _of_arithmetic(t), (values, parts, grid.outputs))]
        kept = [b.new(f"{op.outputs[0].name}.arrived", INT32, (grid.blocks,))]
        operands |= {"parts": scratch[0], "arrived": kept[0]}
        names += ["parts", "arrived"]
    inner = [*space.inner[:-1], space.inner[-1] // grid.wide]
    parameters = Parameters().pointer(*names).u32(grid.accesses).sizes(*dims, *inner)
    for s in (space.so, *space.sx):
        parameters.i64(*s[:-1], s[-1] * vec)
    for r in space.rx:
        parameters.i64(*r[:-1], r[-1] * grid.wide)
    launch = parameters.generated(b.arch, text, "reduce", grid.blocks * parts, grid.threads)
    b.emit(op, launch, operands, kind, attrs, reads, [out], scratch=scratch, kept=kept)


def _of_arithmetic(t: str) -> DType:
    """The element type of partial results."""
    name = {"float": "f32", "double": "f64", "bool": "boolean", "int": "i32"}.get(t, t)
    return next(d for d, own in CPP.items() if own == name)


def _shared(grid: Grid, t: str) -> str:
    """C++ that declares the accumulators in shared memory."""
    if grid.across:
        return f"__shared__ {t} partial[{grid.vec}][{grid.runs}][{grid.lanes}];"
    return f"__shared__ {t} partial[{grid.lanes}][{grid.runs // WARP}];" if grid.runs > WARP else ""


def _tree(grid: Grid, t: str, combine: str) -> str:
    """C++ that combines the accumulators ``s`` of the threads of a run in pairs."""
    if not grid.across:
        return _warp_tree(grid, t, combine)
    each, own, other = _each(grid.vec), "partial[j][run][lane]", "partial[j][run + half][lane]"
    return f"""{each} {own} = s[j];
    __syncthreads();
    for (int half = {grid.runs // 2}; half; half /= 2) {{
        if (run < half) {each} {{ const {t} a = {own}, b = {other}; {own} = {combine}; }}
        __syncthreads();
    }}
    {each} s[j] = partial[j][0][lane];"""


def _warp_tree(grid: Grid, t: str, combine: str) -> str:
    """:func:`_tree` for runs of neighboring threads: shuffles within a warp, and shared memory between warps."""

    def over(count: int) -> str:
        found = f"const {t} a = s[0], b = __shfl_xor_sync(~0u, a, half); s[0] = {combine};"
        return f"for (int half = {count // 2}; half; half /= 2) {{ {found} }}"

    if grid.runs <= WARP:
        return over(grid.runs)
    warps = grid.runs // WARP
    return f"""{over(WARP)}
    if (run % {WARP} == 0) partial[lane][run / {WARP}] = s[0];
    __syncthreads();
    s[0] = partial[lane][run % {warps}];
    {over(warps)}"""


def _folded(grid: Grid, t: str, combine: str) -> str:
    """C++ that combines a thread's own accumulators of one output; empty if it has only one."""
    if grid.wide == 1:
        return ""
    return f"for (int j = 1; j < {grid.wide}; j++) {{ const {t} a = s[0], b = s[j]; s[0] = {combine}; }}\n    "


def _each(count: int) -> str:
    return f"for (int j = 0; j < {count}; j++)"


def _loop(space: Space, parts: int, source: Source, step: str) -> str:
    """C++ that runs ``step`` for each element ``v`` of a thread."""
    grid, count, t = space.grid, space.grid.reads, source.t
    moves = (s[-1] for s in (space.sx if grid.across else space.rx))
    widths = [grid.sums if m else 1 for m in moves]  # a broadcast tensor has one element for the whole access
    once = [grid.across and not any(r) for r in space.rx]
    terms = Terms("run", f"{count}u", f"{count - 1}u", grid.runs, grid.batch)
    if parts > 1:
        terms = Terms("begin + run", "end", "end - 1u", grid.runs, grid.batch)
    loads = []
    for k, term in enumerate(terms.places):
        ways = list(zip(source.names(f"o{k}"), source.names("base"), source.names("rx"), strict=True))
        begin = " ".join(f"i64 {at} = {base};" for at, base, _ in ways)
        way = walk("r", term, "inner", len(space.inner), [(at, strides) for at, _, strides in ways])
        tensors = zip(source.names("x"), source.names(f"o{k}"), source.names(f"found{k}"), strict=True)
        load = " ".join(
            load_channels(CPP[x.dtype], width, f"p.{name} + {at}", found)
            for x, width, held, (name, at, found) in zip(source.tensors, widths, once, tensors, strict=True)
            if not held
        )
        loads.append((f"{begin} {{ {way} }}", load))
    names = (h if held else f for f, h, held in zip(source.names("found#"), source.names("held"), once, strict=True))
    lanes = [f"widen({f}.lane[{'j' if n > 1 else 0}])" for f, n in zip(names, widths, strict=True)]
    value = f"const {t} v = {lanes[0]};"
    if source.value:
        known = (
            f"const {arithmetic(x.dtype)} x{i} = {lane};"
            for i, (x, lane) in enumerate(zip(source.tensors, lanes, strict=True))
        )
        value = f"{' '.join(known)} {source.value}"
    return f"{_held(space, source, once, widths)}{terms.loop(loads, f'{_each(grid.sums)} {{ {value} {step} }}')}"


def _held(space: Space, source: Source, once: Sequence[bool], widths: Sequence[int]) -> str:
    """C++ that loads the tensors with one element for all terms of an output, before the terms."""
    found = []
    ways = zip(source.tensors, source.names("x"), source.names("base"), source.names("held"), strict=True)
    for (x, name, base, held), only, strides, width in zip(ways, once, space.sx, widths, strict=True):
        if not only:
            continue
        t, step = CPP[x.dtype], strides[-1]
        if width > 1 and step > 1:
            load = f"{_each(width)} {held}.lane[j] = p.{name}[{base} + j * {step}];"
            found.append(f"struct {{ {t} lane[{width}]; }} {held}; {load} ")
        else:
            found.append(f"{load_channels(t, width, f'p.{name} + {base}', held)} ")
    return "".join(found)


def _kernel(how: str, source: Source, out: TensorView, space: Space, parts: int) -> str:
    """The kernel's text."""
    grid, inner = space.grid, space.inner
    count, runs, lanes = grid.count, grid.runs, grid.lanes
    ty, t = CPP[out.dtype], source.t
    low, high = limits(t)
    start, term, combine, result = (
        s.format(T=t, N=max(count, 1), LOW=low, HIGH=high, F="double" if t != "float" else "float") for s in RULES[how]
    )
    fast, slow = (f"threadIdx.x {sign} {lanes if grid.across else runs}" for sign in "%/")
    lane, run = (fast, slow) if grid.across else (slow, fast)
    each, loop = _each(grid.vec), partial(_loop, space, parts, source)
    top, tree = _tree(grid, t, "max_nan(a, b)"), _tree(grid, t, combine)
    of_top, first = "", f"{t} s[{grid.sums}]; {_each(grid.sums)} s[j] = {start};"
    if how == "ReduceLogSumExp":
        of_top = f"const {t} top = tops[{'j' if grid.across else 0}];"
        first = f"""{t} s[{grid.sums}], tops[{grid.vec}]; {_each(grid.sums)} s[j] = {low};
    if (live) {{ {loop("s[j] = max_nan(s[j], v);")} }}
    {_folded(grid, t, "max_nan(a, b)")}{top}
    __syncthreads();
    {each} tops[j] = s[j];
    {_each(grid.sums)} s[j] = {start};"""
    also, block, span, merged = "", "blockIdx.x", "", ""
    if parts > 1:
        also, block = f" {t}* parts; u32* arrived;", f"blockIdx.x / {parts}"
        chunk = -(-grid.reads // parts)
        span = (
            f"\n    const u32 part = blockIdx.x % {parts}, begin = part * {chunk}u, "
            f"end = begin + {chunk}u < {grid.reads}u ? begin + {chunk}u : {grid.reads}u;"
        )
        merged = _merged(how, t, grid, parts, start, combine, low, top, tree, each)
    pointers = " ".join(
        f"const {CPP[x.dtype]}* {name};" for x, name in zip(source.tensors, source.names("x"), strict=True)
    )
    strides = ", ".join(
        [
            *(f"{name}[{len(space.dims)}]" for name in ("so", *source.names("sx"))),
            *(f"{name}[{len(inner)}]" for name in source.names("rx")),
        ]
    )
    bases = list(zip(source.names("base"), source.names("sx"), strict=True))
    return f"""struct Params {{ {pointers} {ty}* y;{also} u32 count; Size dims[{len(space.dims)}], inner[{len(inner)}]; i64 {strides}; }};

extern "C" __global__ void __launch_bounds__({grid.threads}) reduce(const __grid_constant__ Params p) {{
    {_shared(grid, t)}
    launch_dependents();
    const u32 lane = {lane}, run = {run}, index = {block} * {lanes} + lane;{span}
    const bool live = index < p.count;
    i64 {" = 0, ".join(source.names("base"))} = 0, to = 0;
    if (live) {{ {walk("q", "index", "dims", len(space.dims), [*bases, ("to", "so")])} }}
    wait_for_predecessor();
    {first}
    if (live) {{ {loop(f"{of_top} const {t} a = s[j], b = {t}({term}); s[j] = {combine};")} }}
    {_folded(grid, t, combine)}{tree}{merged}
    if (run == 0 && live) {each} {{ {of_top} const {t} total = s[j]; p.y[to + j * {space.so[-1]}] = narrow<{ty}>({result}); }}
}}
"""


def _merged(
    how: str, t: str, grid: Grid, parts: int, start: str, combine: str, low: str, top: str, tree: str, each: str
) -> str:
    """C++ that stores the result of a block's part. Only the last block of an output continues, and merges all parts."""
    tops = how == "ReduceLogSumExp"
    place, also = f"at * {grid.vec}u + j", f"{parts * grid.outputs}u"
    store = f"p.parts[{place}] = s[j];" + (f" p.parts[{also} + {place}] = tops[j];" if tops else "")
    stored = f"p.parts[{place}]"

    def over(step: str) -> str:
        head = f"for (u32 k = run; k < {parts}u; k += {grid.runs})"
        return f"if (live) {head} {{ const u32 at = k * p.count + index; {each} {{ {step} }} }}"

    lines = [
        f"if (run == 0 && live) {{ const u32 at = part * p.count + index; {each} {{ {store} }} }}",
        f"if (!arrives_last(p.arrived + blockIdx.x / {parts}, {parts}u)) return;",
    ]
    value = stored
    if tops:
        lines += [
            f"{each} s[j] = {low};",
            over(f"s[j] = max_nan(s[j], p.parts[{also} + {place}]);"),
            top,
            "__syncthreads();",
        ]
        lines += [f"{each} tops[j] = s[j];"]
        value = f"(p.parts[{also} + {place}] == {low} ? {t}(0) : {stored} * exp(p.parts[{also} + {place}] - tops[j]))"
    lines += [f"{each} s[j] = {start};", over(f"const {t} a = s[j], b = {value}; s[j] = {combine};"), tree]
    return "".join("\n    " + line for line in lines)


class Reduction(Tactic):
    """Every ONNX reduction, pools over all positions, and pools over large windows that do not overlap."""

    name = "reduce"

    def refuse(self, b: Builder, op: Op) -> str | None:
        dtype, x = op.outputs[0].type.dtype, op.inputs[0]
        assert x is not None
        shape = b.graph.type(x).static_shape
        if math.prod(shape) >= MOST_ELEMENTS:
            return "it reads more elements than a kernel counts"
        if op.kind == "ReduceLogSumExp" and not is_float(dtype):
            return f"it does not compute exponentials of {dtype.name}"
        if op.kind == "ReduceL2" and not is_float(dtype):
            return f"it does not add squares of {dtype.name}: they overflow"
        return refuse_windows(op, shape) if op.kind in WINDOWS else None

    def seconds(self, b: Builder, op: Op) -> float | None:
        made = reduction_of(b, op)
        grid = None if made is None else space_of([made.x], made.axes, b.result(op.value)).grid
        return None if grid is None or grid.reads <= LONG * grid.runs * BATCH else grid.seconds(1, b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        out, made = b.target(op.value), reduction_of(b, op)
        if made is None:
            copy(b, op, b.operand(op.inputs[0]), out)
            return
        reads = [b.operand(op.inputs[0])]
        if op.kind in RULES:
            reads.append(b.constant(np.array(made.named, np.int64), "axes"))
        emit_reduce(
            b, op, made.how, plain_source(made.x), made.axes, out,
            kind=op.kind, attrs=made.attrs, reads=reads, parts=getattr(config, "parts", 1),
        )  # fmt: skip


@dataclass(frozen=True)
class Reduced:
    """A reduction of ``x`` over ``axes`` by the rule ``how``; ``named``: the axes in its meaning."""

    how: str
    x: TensorView
    axes: tuple[int, ...]
    attrs: dict[str, Any]
    named: tuple[int, ...] = ()


POOLS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}
"""Kinds of pools over all positions, and their rules."""


def reduction_of(b: Builder, op: Op) -> Reduced | None:
    """The reduction of an operator; None if it only copies."""
    x = b.operand(op.inputs[0])
    if op.kind in WINDOWS:
        return Reduced(WINDOWS[op.kind], *windows(op, x))
    if op.kind in POOLS:
        return Reduced(POOLS[op.kind], x, tuple(range(2, len(x.shape))), {})
    axes = tuple(reduced_axes(op.attrs, ints(b, op, 1), len(x.shape), op.kind))
    if not axes and op.kind not in OF_ELEMENTS:
        return None
    attrs = {"keepdims": op.attrs.keepdims, "noop_with_empty_axes": not axes}
    if not axes:  # a reduction over an additional axis of one element
        return Reduced(op.kind, x.view((*x.shape, 1), (*x.strides, 1)), (len(x.shape),), attrs)
    return Reduced(op.kind, x, axes, attrs, axes)
