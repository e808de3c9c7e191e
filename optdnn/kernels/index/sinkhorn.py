"""Rows and columns of small matrices divided by their sums in turn, in one launch: the matrices stay in registers.

A thread holds a matrix of few elements: Sinkhorn's iterations of hyper-connections have one of 4 x 4 for each token. A warp holds
a larger one, each lane a column: sums of rows are shuffles.
"""

from __future__ import annotations

import math

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.index.index_kernel import IndexKernel, coordinates, emit_index_kernel, needed, operands_of, shape_at
from optdnn.kernels.pointwise.pointwise import CPP, arithmetic, literal
from optdnn.ops.sinkhorn import MOST_LINES

WARP = 32
THREAD_ELEMENTS = 32
"""Most elements of a matrix that a thread holds."""
LAUNCH_S, STEP_S, ELEMENT_S = 1.5e-6, 35e-9, 1.2e-9
"""Seconds of a launch, of one division by sums, and of each element in it that a thread holds."""
THREADS_AT_ONCE = 132 * 1024
"""Threads that run side by side on a GPU of 132 multiprocessors."""

_ROW_STEPS = (1, 2, 4, 8, 16)


def _steps(columns: int) -> list[int]:
    """Distances of the lanes whose values a warp adds to sum rows of so many columns."""
    return [s for s in _ROW_STEPS if s < columns]


def _factor(t: str, epsilon: str) -> str:
    """The reciprocal of a sum. The exact one of fp32 is ten times as slow: a subroutine, which zeros leave by a slow path."""
    return f"__fdividef(1.0f, sum + {epsilon})" if t == "float" else f"1 / (sum + {epsilon})"


def _by_thread(rows: int, columns: int, t: str, epsilon: str) -> tuple[str, str]:
    """The division by sums of rows, and by sums of columns."""

    def over(lines: int, length: int, at: str) -> str:
        return f"""
            #pragma unroll
            for (int a = 0; a < {lines}; a++) {{
                {t} sum = 0;
                #pragma unroll
                for (int b = 0; b < {length}; b++) sum += m[{at}];
                const {t} factor = {_factor(t, epsilon)};
                #pragma unroll
                for (int b = 0; b < {length}; b++) m[{at}] *= factor;
            }}"""

    return over(rows, columns, f"a * {columns} + b"), over(columns, rows, f"b * {columns} + a")


def _by_warp(rows: int, columns: int, t: str, epsilon: str) -> tuple[str, str]:
    """The same where a lane holds a column. Lanes without a column hold zeros, which they divide by one."""
    shuffles = " ".join(f"sum += __shfl_xor_sync(0xffffffffu, sum, {s});" for s in _steps(columns))
    of_rows = f"""
            #pragma unroll
            for (int a = 0; a < {rows}; a++) {{
                {t} sum = m[a];
                {shuffles}
                m[a] *= {_factor(t, epsilon)};
            }}"""
    of_columns = f"""
            {t} sum = lane < {columns} ? {t}(0) : {t}(1);
            #pragma unroll
            for (int a = 0; a < {rows}; a++) sum += m[a];
            const {t} factor = {_factor(t, epsilon)};
            #pragma unroll
            for (int a = 0; a < {rows}; a++) m[a] *= factor;"""
    return of_rows, of_columns


def _sinkhorn(b: Builder, op: Op) -> None:
    x, out, a = needed(b, op, 0), b.target(op.value), op.attrs
    r, t = len(out.shape), arithmetic(x.dtype)
    rows, columns = out.shape[-2:]
    alone = rows * columns <= THREAD_ELEMENTS
    by = _by_thread if alone else _by_warp
    of_rows, of_columns = by(rows, columns, t, literal(a.epsilon, t))
    if alone:
        held, begin, at = rows * columns, "", coordinates("o", r, {r - 2: f"i / {columns}", r - 1: f"i % {columns}"})
        taken = ""
    else:
        held, begin, at = rows, f"const i64 lane = o{r - 1};", coordinates("o", r, {r - 2: "i"})
        taken = f"if (lane < {columns}) "
    lines = f"""{begin}
        {t} m[{held}];
        #pragma unroll
        for (int i = 0; i < {held}; i++) {{
            m[i] = 0;
            {taken}m[i] = widen(p.x[at_x({at})]);
        }}
        for (int k = 0; k < {a.count}; k++) {{
            if (k % 2 == {0 if a.axis == -1 else 1}) {{{of_rows}
            }} else {{{of_columns}
            }}
        }}
        #pragma unroll
        for (int i = 0; i < {held}; i++) {{
            {taken}p.y[at_y({at})] = narrow<{CPP[out.dtype]}>(m[i]);
        }}"""
    space = [*out.shape[:-2], 1, 1 if alone else WARP]
    emit_index_kernel(b, op, space, {"x": x}, {"y": out}, lines, reads=operands_of(b, op))


def _limits(b: Builder, op: Op) -> str | None:
    rows, columns = shape_at(b, op, 0)[-2:]
    over = max(rows, columns) > MOST_LINES
    return f"its matrices are {rows} x {columns}, over {MOST_LINES} x {MOST_LINES}" if over else None


class SinkhornKernel(IndexKernel):
    """One launch for all divisions."""

    def seconds(self, b: Builder, op: Op) -> float | None:
        *outer, rows, columns = shape_at(b, op, 0)
        alone = rows * columns <= THREAD_ELEMENTS
        held = rows * columns if alone else rows * len(_steps(columns))
        waves = -(-math.prod(outer) * (1 if alone else WARP) // THREADS_AT_ONCE)
        divisions: int = op.attrs.count
        return LAUNCH_S + waves * divisions * (STEP_S + held * ELEMENT_S)


TACTIC = SinkhornKernel({"Sinkhorn": _sinkhorn}, _limits)
