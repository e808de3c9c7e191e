"""Rows and columns of small matrices divided by their sums in turn, in one launch: the matrices stay in registers.

A lane holds a column. The lanes of a matrix are a power of two, so a warp has several small matrices: hyper-connections have one of
4 x 4 for each token. Sums of rows are shuffles among the lanes of a matrix.
"""

from __future__ import annotations

import math

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.index.index_kernel import IndexKernel, coordinates, emit_index_kernel, needed, operands_of, shape_at
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, literal
from optdnn.ops.sinkhorn import MOST_LINES, SinkhornAttrs

LAUNCH_S, ROW_S, SHUFFLE_S = 1.5e-6, 8e-9, 3e-9
"""Seconds of a launch, and, in a division by sums, of each row and of each shuffle of it (13 timings on an H100)."""
THREADS_AT_ONCE = 132 * 256
"""Threads that run side by side at full speed on a GPU of 132 multiprocessors."""


def _lanes(columns: int) -> int:
    """Lanes of a matrix."""
    return 1 << (columns - 1).bit_length()


def _divisions(rows: int, lanes: int, full: bool, t: str, a: SinkhornAttrs) -> tuple[str, str]:
    """The division by sums of rows, and by sums of columns. Lanes without a column hold zeros. ``t``: the arithmetic type.

    ``full``: no warp has fewer than 32 threads. The mask of a shuffle is then a constant.
    """
    mask = "0xffffffffu" if full else f"{hex((1 << lanes) - 1)}u << (threadIdx.x % 32 / {lanes} * {lanes})"
    steps = [1 << k for k in range(lanes.bit_length() - 1)]
    shuffles = " ".join(f"sum += __shfl_xor_sync(mask, sum, {s});" for s in steps)
    divisor = f"sum + {literal(a.epsilon, t)}"
    if a.floor:
        divisor = f"max_nan({divisor}, {literal(a.floor, t)})"
    # The exact reciprocal of fp32 is ten times as slow: a subroutine, with a slow path for zeros.
    factor = f"__fdividef(1.0f, {divisor})" if t == "float" else f"1 / ({divisor})"
    of_rows = f"""
            const u32 mask = {mask};
            #pragma unroll
            for (int a = 0; a < {rows}; a++) {{
                {t} sum = m[a];
                {shuffles}
                const {t} factor = {factor};
                m[a] *= holds ? factor : 0;
            }}"""
    of_columns = f"""
            {t} sum = 0;
            #pragma unroll
            for (int a = 0; a < {rows}; a++) sum += m[a];
            const {t} factor = {factor};
            #pragma unroll
            for (int a = 0; a < {rows}; a++) m[a] *= factor;"""
    return of_rows, of_columns


def _sinkhorn(b: Builder, op: Op) -> None:
    x, out, a = needed(b, op, 0), b.target(op.value), op.attrs
    r, t = len(out.shape), arithmetic(x.dtype)
    *outer, rows, columns = out.shape
    lanes = _lanes(columns)
    full = math.prod(outer) * lanes % 32 == 0
    of_rows, of_columns = _divisions(rows, lanes, full, t, a)
    at = coordinates(r, {r - 2: "a"})
    holds = "true" if lanes == columns else f"o{r - 1} < {columns}"
    lines = f"""const bool holds = {holds};
        {t} m[{rows}];
        #pragma unroll
        for (int a = 0; a < {rows}; a++) {{
            m[a] = 0;
            if (holds) m[a] = widen(p.x[at_x({at})]);
        }}
        for (int k = 0; k < {a.count}; k++) {{
            if (k % 2 == {0 if a.axis == -1 else 1}) {{{of_rows}
            }} else if (holds) {{{of_columns}
            }}
        }}
        #pragma unroll
        for (int a = 0; a < {rows}; a++) {{
            if (holds) p.y[at_y({at})] = narrow<{CPP[out.dtype]}>(m[a]);
        }}"""
    emit_index_kernel(b, op, [*outer, 1, lanes], {"x": x}, {"y": out}, lines, reads=operands_of(b, op))


def _limits(b: Builder, op: Op) -> str | None:
    rows, columns = shape_at(b, op, 0)[-2:]
    over = max(rows, columns) > MOST_LINES
    return f"its matrices are {rows} x {columns}, over {MOST_LINES} x {MOST_LINES}" if over else None


class SinkhornKernel(IndexKernel):
    """One launch for all divisions."""

    def seconds(self, b: Builder, op: Op) -> float | None:
        *outer, rows, columns = shape_at(b, op, 0)
        lanes = _lanes(columns)
        waves = -(-math.prod(outer) * lanes // THREADS_AT_ONCE)
        shuffles = (lanes.bit_length() - 1) / 2  # every second division is by sums of rows
        divisions: int = op.attrs.count
        return LAUNCH_S + waves * divisions * rows * (ROW_S + shuffles * SHUFFLE_S)


TACTIC = SinkhornKernel({"Sinkhorn": _sinkhorn}, _limits)
