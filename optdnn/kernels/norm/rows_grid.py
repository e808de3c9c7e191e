"""Few, long rows of any strides in one cooperative launch: the operators of :mod:`.rows`, with each row split into parts for many blocks.

Each block computes the statistics of its parts. After a grid barrier, it merges the statistics of its rows in a fixed order and writes
its parts of the result. The statistics are computed in the order of the input's memory, the result in the order of its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import SECTOR, Parameters
from optdnn.kernels.layout.walks import batched, walk
from optdnn.kernels.norm.row_forms import whole_rows_seconds
from optdnn.kernels.norm.rows import RowPlan, Rows, row_plan
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.pointwise.strides import merge, vector
from optdnn.kernels.pool.window import load_channels
from optdnn.kernels.reduce.reduce import limits
from optdnn.kernels.tactic import Offer, ProblemTactic
from optdnn.ops.base import attrs_dict
from optdnn.runtime.cuda.gpu_facts import GpuFacts, on_every_gpu
from optdnn.runtime.cuda.launches.plan import GRID
from optdnn.types import FP32, FP64, INT32

THREADS = 512
AHEAD = 4
"""Loads of a thread that are in flight at once."""
LAUNCH_S, MEET_S = 4.0e-6, 3.0e-6
"""Seconds of a dependent cooperative launch, and of the grid barrier with the statistics around it."""
BATCH_S, SUM_S = 0.9e-6, 0.4e-6
"""Seconds of a batch of loads and of a sum over a block."""
L2_RATE = 4e12
"""Bytes per second if elements are read and written in memory order."""


@dataclass(frozen=True)
class Problem:
    """``rows`` rows of ``length`` elements of ``itemsize`` bytes, with ``statistics`` statistics. ``lanes``: elements of an access in each of
    the two passes."""

    rows: int
    length: int
    itemsize: int
    statistics: int
    lanes: tuple[int, int] = (1, 1)


@dataclass(frozen=True, order=True)
class Config:
    """A row has ``parts`` parts."""

    parts: int

    def __str__(self) -> str:
        return f"rg{self.parts}"


def blocks(problem: Problem, config: Config, gpu: GpuFacts) -> int:
    """Blocks of the grid: all run at once, each on its own multiprocessor."""
    return min(problem.rows * config.parts, on_every_gpu(gpu))


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of a dependent launch."""
    turns = math.ceil(problem.rows * config.parts / blocks(problem, config, gpu))
    first, second = (
        math.ceil(problem.length / config.parts / (THREADS * lanes * AHEAD)) * BATCH_S for lanes in problem.lanes
    )
    seconds = turns * (problem.statistics * (first + 2 * SUM_S) + second)
    scattered = SECTOR / problem.itemsize if problem.lanes[1] == 1 else 1
    moved = problem.rows * problem.length * problem.itemsize
    return LAUNCH_S + MEET_S + max(seconds, (problem.statistics + 1 + scattered) * moved / L2_RATE)


def _fitting(problem: Problem, parts: int) -> int:
    """The largest number of parts, up to ``parts``, that leaves no part empty."""
    vectors = problem.length // problem.lanes[0]
    return -(-vectors // -(-vectors // max(1, min(parts, vectors))))


def candidates(problem: Problem, gpu: GpuFacts, limit: int = 4) -> list[Config]:
    """The configurations to time, best predicted first."""
    room = on_every_gpu(gpu)
    asked = {max(1, turns * room // problem.rows) for turns in (1, 2, 4)} | {1}
    found = {Config(_fitting(problem, parts)) for parts in asked}
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), c))[:limit]


def _lanes(plan: RowPlan) -> tuple[int, int]:
    """Elements of an access in the pass over the input, and in the pass that writes the result."""
    kept, axes, shape = plan.kept, plan.axes, plan.source.shape
    outer = plan.strides(kept)
    sums, (steps,) = merge([shape[i] for i in axes], [plan.strides(axes)[1]])
    inner, every = merge([shape[i] for i in axes], plan.strides(axes))
    first = vector([plan.source], sums, [[*outer[1], *steps]])
    tensors = [plan.target, plan.source, *plan.extras]
    return first, vector(tensors, inner, [[*o, *s] for o, s in zip(outer, every, strict=True)])


class RowsGrid(ProblemTactic):
    """Few, long rows: one block per row would leave most of the GPU idle."""

    name = "rows_grid"
    row_invariant: ClassVar[bool] = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := Rows().refuse(b, op)) is not None:
            return why
        if 0 in op.outputs[0].type.static_shape:
            return "it has no elements"
        problem = self.problem(b, op)
        one = whole_rows_seconds(problem.rows, problem.length, problem.statistics, b.gpu)
        best = self.offers(problem, b.gpu)[0]
        if best.seconds is None or one <= best.seconds:
            return "one block per row is predicted to be as fast"
        return None

    def problem(self, b: Builder, op: Op) -> Problem:
        plan = row_plan(b, op, b.result(op.value))
        length, size = plan.length, plan.source.dtype.itemsize
        return Problem(plan.source.size // length, length, size, len(plan.statistics), _lanes(plan))

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return [Offer(c, estimate(problem, c, gpu), False) for c in candidates(problem, gpu)]

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        plan = row_plan(b, op, b.target(op.value))
        problem = self.problem(b, op)
        config = Config(_fitting(problem, config.parts))  # a recorded choice may assume narrower accesses
        t = arithmetic(plan.source.dtype)
        shape = (problem.rows, config.parts, problem.statistics)
        name = op.outputs[0].name
        parts = b.new(f"{name}.parts", FP64 if t == "double" else FP32, shape)
        rounds = b.new(f"{name}.rounds", INT32, (2,))
        tensors = [plan.target, plan.source, *plan.extras]
        text, parameters = _kernel(plan, problem, config)
        grid = blocks(problem, config, b.gpu)
        launch = parameters.generated(b.arch, text, "rows_grid", grid, THREADS, waits=GRID)
        operands = dict(zip(_names(plan), tensors, strict=True)) | {"parts": parts, "rounds": rounds}
        b.emit(
            op, launch, operands, op.kind, attrs_dict(op.attrs), plan.reads, [plan.writes], scratch=[parts], kept=[rounds]
        )  # fmt: skip


# ---------------------------------------------------------------- the kernel


def _names(plan: RowPlan) -> list[str]:
    return ["y", "x", *(f"e{i}" for i in range(len(plan.extras)))]


def _kernel(plan: RowPlan, problem: Problem, config: Config) -> tuple[str, Parameters]:
    """The kernel's text, and its parameters."""
    kept, axes, shape, names = plan.kept, plan.axes, plan.source.shape, _names(plan)
    tensors: list[TensorView] = [plan.target, plan.source, *plan.extras]
    rows, outer = merge([shape[i] for i in kept], plan.strides(kept))
    sums, (steps,) = merge([shape[i] for i in axes], [plan.strides(axes)[1]])
    inner, every = merge([shape[i] for i in axes], plan.strides(axes))
    step = [s[-1] for s in every]  # stride between the elements of an access
    sums, steps = _in_vectors(sums, [steps], problem.lanes[0])[0], _in_vectors(sums, [steps], problem.lanes[0])[1][0]
    inner, every = _in_vectors(inner, every, problem.lanes[1])
    t = arithmetic(plan.source.dtype)
    fields = [f"{'' if n == 'y' else 'const '}{CPP[p.dtype]}* {n};" for n, p in zip(names, tensors, strict=True)]
    fields += [f"{t}* parts; u32* rounds; u32 dims[{len(rows)}], sums[{len(sums)}], inner[{len(inner)}];"]
    fields += [f"i64 sx[{len(sums)}];", *(f"i64 o{n}[{len(rows)}], i{n}[{len(inner)}];" for n in names)]
    items, chunk = problem.rows * config.parts, -(-math.prod(sums) // config.parts)
    per_part = f"{{ const u32 item_row = item / {config.parts}u, part = item % {config.parts}u;"
    text = f"""struct Params {{ {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({THREADS}) rows_grid(const __grid_constant__ Params p) {{
    __shared__ {t} partial[{THREADS}];
    const u32 lane = threadIdx.x;
    for (u32 item = blockIdx.x; item < {items}u; item += gridDim.x) {per_part}
        {_span(chunk, math.prod(sums))}
        const {t} n = {t}((end - begin) * {problem.lanes[0]}u);
        i64 bx = 0;
        {walk("q", "item_row", "dims", len(rows), [("bx", "ox")])}
        {_statistics(plan, problem, len(sums))}
    }}
    meet(p.rounds);
    for (u32 item = blockIdx.x; item < {items}u; item += gridDim.x) {per_part}
        {_merged(plan, problem, config, chunk, math.prod(sums))}
        {_span(-(-math.prod(inner) // config.parts), math.prod(inner))}
        {" ".join(f"i64 b{n} = 0;" for n in names)}
        {walk("q", "item_row", "dims", len(rows), [("b" + n, "o" + n) for n in names])}
        {_applied(plan, problem, len(inner), step)}
    }}
}}
"""
    parameters = Parameters().pointer(*names, "parts", "rounds").u32(*rows, *sums, *inner).i64(*steps)
    for o, i in zip(outer, every, strict=True):
        parameters.i64(*o, *i)
    return text, parameters


def _in_vectors(dims: Sequence[int], strides: Sequence[Sequence[int]], lanes: int) -> tuple[list[int], list[list[int]]]:
    """The iteration space of accesses of ``lanes`` elements."""
    return [*dims[:-1], dims[-1] // lanes], [[*s[:-1], s[-1] * lanes] for s in strides]


def _span(chunk: int, count: int) -> str:
    """C++ that defines the range of a part's accesses."""
    return f"const u32 begin = part * {chunk}u, end = begin + {chunk}u < {count}u ? begin + {chunk}u : {count}u;"


def _sum(t: str, combine: str) -> str:
    """C++ that combines ``s`` over all threads."""
    return (
        f"__syncthreads(); partial[lane] = s; __syncthreads();\n"
        f"        for (int half = {THREADS // 2}; half; half /= 2) {{ if (lane < half) {{ const {t} a = partial[lane], "
        f"b = partial[lane + half]; partial[lane] = {combine}; }} __syncthreads(); }}\n"
        f"        s = partial[0];"
    )


def _statistics(plan: RowPlan, problem: Problem, rank: int) -> str:
    """C++ that computes the statistics of a part of a row and stores them in ``parts``."""
    t, lines = arithmetic(plan.source.dtype), []
    lanes, last = problem.lanes[0], len(plan.statistics) - 1
    low = limits(t)[0]
    for k, s in enumerate(plan.statistics):
        start, term, combine, post = (
            z.format(T=t, N="n", LOW=low) for z in (s.start, s.term, s.combine, s.post)
        )  # fmt: skip

        def load(at: str, j: int) -> str:
            way = walk("r", at, "sums", rank, [(f"o{j}", "sx")])
            return (
                f"i64 o{j} = bx; {{ {way} }} {load_channels(CPP[plan.source.dtype], lanes, f'p.x + o{j}', f'found{j}')}"
            )

        def use(j: int, term: str = term, combine: str = combine) -> str:
            return (
                f"for (int j = 0; j < {lanes}; j++) {{ const {t} v = widen(found{j}.lane[j]); "
                f"const {t} a = s, b = {t}({term}); s = {combine}; }}"
            )

        lines.append(
            f"{t} t{k}; {{ {t} s = {start};\n        {batched(THREADS, AHEAD, load, use)}\n"
            f"        {_sum(t, combine)}\n"
            f"        if (lane == 0) p.parts[item * {len(plan.statistics)}u + {k}u] = s;\n"
            f"        t{k} = {post if k < last else 's'}; }}"
        )
    return "\n        ".join(lines)


def _merged(plan: RowPlan, problem: Problem, config: Config, chunk: int, count: int) -> str:
    """C++ that merges the statistics of a row's parts."""
    t, lines = arithmetic(plan.source.dtype), []
    for k, s in enumerate(plan.statistics):
        start, term, combine, post = (
            z.format(T=t, N=problem.length, LOW=limits(t)[0]) for z in (s.start, s.merged, s.combine, s.post)
        )  # fmt: skip
        loads = " ".join(f"const {t} u{i} = p.parts[at + {i}u];" for i in range(k + 1))
        lines.append(
            f"{t} t{k}; {{ {t} s = {start};\n        for (u32 k = lane; k < {config.parts}u; k += {THREADS}) {{ "
            f"const u32 at = (item_row * {config.parts}u + k) * {len(plan.statistics)}u; {loads} "
            f"const {t} n = {t}((k + 1 < {config.parts}u ? {chunk}u : {count}u - k * {chunk}u) * {problem.lanes[0]}u); "
            f"const {t} a = s, b = {t}({term}); s = {combine}; }}\n"
            f"        {_sum(t, combine)}\n        t{k} = {post}; }}"
        )
    return "\n        ".join(lines)


def _applied(plan: RowPlan, problem: Problem, rank: int, step: Sequence[int]) -> str:
    """C++ of the loop over a part's elements that writes the result. ``step``: stride between elements of an access, for each tensor."""
    t, lanes, names = arithmetic(plan.source.dtype), problem.lanes[1], _names(plan)
    to = CPP[plan.target.dtype]
    result = plan.result.format(T=t, N=problem.length)

    def load(at: str, j: int) -> str:
        begin = " ".join(f"i64 at_{n}{j} = b{n};" for n in names)
        way = walk("r", at, "inner", rank, [(f"at_{n}{j}", f"i{n}") for n in names])
        found = load_channels(CPP[plan.source.dtype], lanes, f"p.x + at_x{j}", f"found{j}")
        return f"{begin} {{ {way} }} {found}"

    def use(j: int) -> str:
        extras = " ".join(
            f"const {arithmetic(e.dtype)} e{i} = widen(p.e{i}[at_e{i}{j} + j * {step[2 + i]}]);"
            for i, e in enumerate(plan.extras)
        )
        value = f"const {t} v = widen(found{j}.lane[j]); {extras}"
        if lanes == 1:
            return f"{{ const int j = 0; {value} p.y[at_y{j}] = narrow<{to}>({t}({result})); }}"
        each = f"for (int j = 0; j < {lanes}; j++) {{ {value} y.lane[j] = narrow<{to}>({t}({result})); }}"
        return f"{{ Pack<{to}, {lanes}> y; {each} y.store(p.y + at_y{j}); }}"

    return batched(THREADS, AHEAD, load, use)
