"""One launch for several small pointwise operators and copies: each block computes elements of one of them.

A small operator takes the time of a launch. Detection heads compute each coordinate of their boxes, and have dozens of small outputs;
encoders derive masks from lengths; a decoder joins and converts the keys and the values of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView, up
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.pointwise.byte_table import BYTES
from optdnn.kernels.pointwise.expressions import CPP, EXPRESSIONS, arithmetic, body
from optdnn.kernels.pointwise.strides import broadcast, merge, offset_type
from optdnn.ops.base import Stage
from optdnn.types import FP32, TensorType

THREADS = 256
MOST_ELEMENTS = 1 << 16
"""Most elements of a result that is small: the operator takes about the time of a launch."""
MOST_PARAMETERS = 4000
"""Most bytes of a launch's parameters."""
MOST_AXES = 8
"""Most axes of an operator after merging."""


@dataclass(frozen=True)
class Part:
    """``target = stages(operands)``. Register 0 is operand 0. Operands broadcast to the target's shape. Without stages it is a copy,
    which converts to the target's type."""

    operands: tuple[TensorView | None, ...]
    stages: tuple[Stage, ...]
    target: TensorView

    @property
    def present(self) -> list[tuple[int, TensorView]]:
        """The operands that are not absent, with their numbers."""
        return [(i, x) for i, x in enumerate(self.operands) if x is not None]

    @property
    def space(self) -> tuple[list[int], list[list[int]]]:
        """The merged axes, and the strides of the target and of the present operands."""
        shape = self.target.shape
        return merge(shape, [self.target.strides, *(broadcast(x, shape) for _, x in self.present)])

    @property
    def nbytes(self) -> int:
        """Its bytes among the parameters of a launch: an address for each tensor, two numbers, and sizes and strides for each axis."""
        tensors = 1 + len(self.present)
        return up(8 * tensors + 8 + 4 * len(self.space[0]) * (3 + tensors), 8)


def refuse(part: Part) -> str | None:
    """Why a pointwise operator cannot share a launch with others; None if it can."""
    if not 0 < math.prod(part.target.shape) <= MOST_ELEMENTS:
        return "it is large enough for a launch of its own"
    tensors = [part.target, *(x for _, x in part.present)]
    if not {s.kind for s in part.stages} <= EXPRESSIONS.keys() or not {x.dtype for x in tensors} <= CPP.keys():
        return "there is no expression for its stages"
    if len(part.space[0]) > MOST_AXES or part.nbytes > MOST_PARAMETERS:
        return "its axes cannot be merged"
    if offset_type(tensors) != "i32":
        return "its elements are too far apart"
    return None


def batches(parts: Sequence[Part]) -> list[list[int]]:
    """The parts (by number) in launches whose parameters are not too large."""
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
    """The launch. Part ``k`` reads the operands ``x<k>_<i>`` and writes ``y<k>``."""
    parameters, fields, blocks, end = Parameters(), [], [], 0
    for k, part in enumerate(parts):
        dims, (to, *of) = part.space
        count, rank = math.prod(dims), len(dims)
        first = f"p.end{k - 1}" if k else "0"
        end += -(-count // THREADS)
        names = [f"x{k}_{i}" for i, _ in part.present]
        pointers = [f"const {CPP[x.dtype]}* {name};" for name, (_, x) in zip(names, part.present, strict=True)]
        strides = ", ".join(f"of{name}[{rank}]" for name in names)
        fields.append(
            f"{CPP[part.target.dtype]}* y{k}; {' '.join(pointers)} u32 end{k}, count{k}; Size n{k}[{rank}]; i32 to{k}[{rank}], {strides};"
        )
        parameters.pointer(f"y{k}", *names).u32(end, count).sizes(*dims).i32(*to, *(s for each in of for s in each))
        blocks.append(f"""if (blockIdx.x < p.end{k}) {{
        rest = (blockIdx.x - {first}) * {THREADS} + threadIdx.x;
        if (rest < p.count{k}) {{
            {_element(k, part, of, rank)}
        }}
        return;
    }}""")  # fmt: skip
    newline = "\n    "
    text = f"""struct Params {{
    {newline.join(fields)}
}};

extern "C" __global__ void __launch_bounds__({THREADS}) joint(const __grid_constant__ Params p) {{
    launch_dependents();
    u32 rest, c;
    int y = 0;
    {newline.join(blocks)}
}}
"""
    # As in launches of one operator: products before an addition are rounded, if 8-bit integers are computed.
    exact = any(part.stages and part.target.dtype in BYTES for part in parts)
    options = (*GENERAL, "--fmad=false") if exact else GENERAL
    return parameters.generated(arch, text, "joint", end, THREADS, options=options)


def _element(k: int, part: Part, of: Sequence[Sequence[int]], rank: int) -> str:
    """The statements that compute element ``rest`` of part ``k``, whose operands have the strides ``of``."""
    moving = [i for (i, _), strides in zip(part.present, of, strict=True) if any(strides)]
    lines = [f"int {', '.join(f'o{i} = 0' for i in moving)};"] if moving else []
    for d in reversed(range(rank)):
        steps = [f"y += c * p.to{k}[{d}];", *(f"o{i} += c * p.ofx{k}_{i}[{d}];" for i in moving)]
        lines.append(f"c = rest % p.n{k}[{d}]; rest /= p.n{k}[{d}]; {' '.join(steps)}")
    lines.append("wait_for_predecessor();")
    out = CPP[part.target.dtype]
    source = part.operands[0]
    if not part.stages and source is not None and source.dtype == part.target.dtype:
        return "\n            ".join([*lines, f"p.y{k}[y] = p.x{k}_0[{'o0' if 0 in moving else '0'}];"])
    for i, x in part.present:
        lines.append(f"const {arithmetic(x.dtype)} v{i} = widen(p.x{k}_{i}[{f'o{i}' if i in moving else '0'}]);")
    types = [TensorType(FP32, ()) if x is None else TensorType(x.dtype, x.shape) for x in part.operands]
    statements, result, _ = body(part.stages, types)
    return "\n            ".join([*lines, *statements, f"p.y{k}[y] = narrow<{out}>({result});"])
