"""One launch for several small copies: each block copies (and converts) elements of one of them.

A small copy takes the time of a launch. Detection heads have dozens of small outputs, and a decoder joins and converts the keys and
the values of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView, up
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.pointwise.pointwise import CPP
from optdnn.kernels.pointwise.strides import merge
from optdnn.types import BF16, FP16, FP32

THREADS = 256
MOST_ELEMENTS = 1 << 17
"""Most elements of a copy that is small: it takes about the time of a launch."""
MOST_PARAMETERS = 4000
"""Most bytes of a launch's parameters."""
MOST_AXES = 8
"""Most axes of a copy after merging."""
_FLOATS = frozenset((FP32, FP16, BF16))


@dataclass(frozen=True)
class Part:
    """A copy of ``source`` to ``target``, which have the same shape."""

    source: TensorView
    target: TensorView

    @property
    def space(self) -> tuple[list[int], list[list[int]]]:
        """The merged axes, and the strides of the target and of the source."""
        return merge(self.target.shape, [self.target.strides, self.source.strides])

    @property
    def nbytes(self) -> int:
        """Its bytes among the parameters of a launch: two addresses, two numbers, and three for each axis."""
        return up(16 + 8 + 12 * len(self.space[0]), 8)


def refuse(part: Part) -> str | None:
    """Why a copy cannot share a launch with others; None if it can."""
    x, y = part.source, part.target
    if not 0 < math.prod(y.shape) <= MOST_ELEMENTS:
        return "it is large enough for a launch of its own"
    if x.shape != y.shape or len(part.space[0]) > MOST_AXES:
        return "its axes cannot be merged"
    if any(sum((n - 1) * abs(s) for n, s in zip(v.shape, v.strides, strict=True)) >= 1 << 31 for v in (x, y)):
        return "its elements are too far apart"
    return None if converts(part) is not None else f"no launch converts {x.dtype} to {y.dtype} beside others"


def converts(part: Part) -> bool | None:
    """Whether a copy converts floats; None for other conversions."""
    x, y = part.source.dtype, part.target.dtype
    return x != y if (x == y and x in CPP) or {x, y} <= _FLOATS else None


def batches(parts: Sequence[Part]) -> list[list[int]]:
    """The copies (by number) in launches whose parameters are not too large."""
    found: list[list[int]] = []
    room = 0
    for k, part in enumerate(parts):
        if part.nbytes > room:
            found.append([])
            room = MOST_PARAMETERS
        found[-1].append(k)
        room -= part.nbytes
    return found


def launch(arch: str, parts: Sequence[Part]) -> Launch:
    """The launch. Copy ``k`` reads the operand ``x<k>`` and writes ``y<k>``."""
    parameters, fields, lines, end = Parameters(), [], [], 0
    for k, part in enumerate(parts):
        x, y = CPP[part.source.dtype], CPP[part.target.dtype]
        dims, (to, of) = part.space
        count, rank = math.prod(dims), len(dims)
        begin, end = end, end + -(-count // THREADS)
        fields.append(
            f"const {x}* x{k}; {y}* y{k}; u32 end{k}, count{k}; u32 n{k}[{rank}]; i32 to{k}[{rank}], of{k}[{rank}];"
        )
        parameters.pointer(f"x{k}", f"y{k}").u32(end, count, *dims).i32(*to, *of)
        walk = [
            f"c = rest % p.n{k}[{d}]; rest /= p.n{k}[{d}]; y += c * p.to{k}[{d}]; x += c * p.of{k}[{d}];"
            for d in reversed(range(rank))
        ]
        first = f"p.end{k - 1}" if begin else "0"
        value = f"p.x{k}[x]" if x == y else f"narrow<{y}>(widen(p.x{k}[x]))"
        lines.append(f"""if (blockIdx.x < p.end{k}) {{
        rest = (blockIdx.x - {first}) * {THREADS} + threadIdx.x;
        if (rest < p.count{k}) {{
            {" ".join(walk)}
            wait_for_predecessor();
            p.y{k}[y] = {value};
        }}
        return;
    }}""")  # fmt: skip
    newline = "\n    "
    text = f"""struct Params {{
    {newline.join(fields)}
}};

extern "C" __global__ void __launch_bounds__({THREADS}) copies(const __grid_constant__ Params p) {{
    launch_dependents();
    u32 rest, c;
    int x = 0, y = 0;
    {newline.join(lines)}
}}
"""
    return parameters.generated(arch, text, "copies", end, THREADS)
