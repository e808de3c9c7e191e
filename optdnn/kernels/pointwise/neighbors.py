"""The text of kernels whose threads compute neighboring elements, from operands that each kernel finds in its own way."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, body
from optdnn.ops.base import Stage
from optdnn.types import DType, TensorType

THREADS = 256


def walk(dims: Sequence[int], wide: int) -> list[str]:
    """C++ of the coordinates ``o<d>`` of thread ``index``: the first of ``wide`` neighbors along the last of ``dims``."""
    lines = ["u32 rest = index;"]
    for d in reversed(range(len(dims))):
        size, times = (dims[d] // wide, f" * {wide}") if d == len(dims) - 1 else (dims[d], "")
        lines.append(f"const int o{d} = rest % {size}u{times}; rest /= {size}u;")
    return lines


def load(slot: int, x: TensorView, at: str, wide: int, together: bool) -> tuple[str, str]:
    """C++ that loads operand ``slot`` at ``at``, and that gives element j of it. ``together``: all neighbors with one load."""
    t, kind = CPP[x.dtype], f"Pack<{CPP[x.dtype]}, {wide}>"
    loads = f"const {kind} l{slot}(p.x{slot} + {at});" if together else f"const {t} l{slot} = p.x{slot}[{at}];"
    return loads, f"const {arithmetic(x.dtype)} v{slot} = widen(l{slot}{'.lane[j]' if together else ''});"


def kernel(
    name: str, fields: Sequence[str], before: Sequence[str], loads: Sequence[str], values: Sequence[str],
    stages: Sequence[Stage], types: Sequence[TensorType], dtype: DType, rank: int, wide: int,
) -> str:  # fmt: skip
    """The kernel: ``before`` finds the thread's element, ``loads`` wait for the previous launch, ``values`` are those of a neighbor.

    ``types``: of the operands of ``stages``. ``dtype`` and ``rank``: of the result ``y``."""
    lines, result, _ = body(stages, types)
    out, newline, inner = CPP[dtype], "\n    ", "\n        "
    return f"""struct Params {{ {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({THREADS}) {name}(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * {THREADS} + threadIdx.x;
    {newline.join(before)}
    wait_for_predecessor();
    if (index >= p.count) return;
    {newline.join(loads)}
    Pack<{out}, {wide}> y;
    #pragma unroll
    for (int j = 0; j < {wide}; j++) {{
        {inner.join([*values, *lines])}
        y.lane[j] = narrow<{out}>({result});
    }}
    y.store(p.y + {place("sy", rank)});
}}
"""


def place(strides: str, rank: int, name: str = "o") -> str:
    """C++ of the place of the coordinates ``<name><d>`` with the parameters ``strides``."""
    return " + ".join(f"i64({name}{d}) * p.{strides}[{d}]" for d in range(rank))
