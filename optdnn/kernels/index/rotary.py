"""Rotary position embeddings in vectors (``kernels/rotary.cu``): a thread turns as many pairs as an access of 16 bytes holds features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import POINTS_LIMIT
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.pointwise.pointwise import merge
from optdnn.kernels.tactic import OwnTactic
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, FP32

THREADS = 128
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Turn:
    """What a launch turns: ``x`` to ``out``, both (batch, heads, length, size), by ``cos`` and ``sin`` (batch or 1, length, half).

    The first ``turned`` features of a head make pairs, the others are copied. A pair is a feature and the one ``turned / 2``
    further, or with ``interleaved`` two neighbours.
    """

    x: TensorView
    cos: TensorView
    sin: TensorView
    out: TensorView
    turned: int
    interleaved: bool = False

    @property
    def lanes(self) -> int:
        """Features in an access to x and to the result; 1 where they do not come in aligned vectors."""
        lanes = VECTOR_BYTES // self.x.dtype.itemsize
        parts = (self.turned // 2, self.x.shape[-1] - self.turned)
        while lanes > 1 and (any(n % lanes for n in parts) or not all(aligned(t, lanes) for t in (self.x, self.out))):
            lanes //= 2
        return lanes

    @property
    def vectors(self) -> tuple[int, int]:
        """Threads of a head's row: those that turn a vector of pairs, and those that copy a vector."""
        return self.turned // 2 // self.lanes, (self.x.shape[-1] - self.turned) // self.lanes

    @property
    def count(self) -> int:
        """Threads of all rows."""
        return math.prod(self.x.shape[:-1]) * sum(self.vectors)

    def refuse(self) -> str | None:
        """Why there is no launch for it, or None."""
        if self.x.dtype not in (FP16, BF16, FP32):
            return "it is for floats of 16 and of 32 bits"
        if self.lanes == 1:
            return "its features do not come in aligned vectors"
        return "it has more vectors than a kernel counts" if self.count >= POINTS_LIMIT else None


def aligned(t: TensorView, lanes: int) -> bool:
    """Whether each row of the last axis is made of aligned vectors of ``lanes`` elements."""
    rows = (s for n, s in zip(t.shape[:-1], t.strides[:-1], strict=True) if n > 1)
    return t.strides[-1] == 1 and t.offset % lanes == 0 and all(s % lanes == 0 for s in rows)


def recipe(turn: Turn, rank: int, early: bool, arch: str) -> Recipe:
    """What to compile for rows of ``rank`` axes. ``early``: the angles are constant. Sizes of rows and strides are parameters."""
    turning, copying = turn.vectors
    defines = {
        "LANES": turn.lanes, "WIDE": turn.x.dtype == FP32, "BFLOAT": turn.x.dtype == BF16, "RANK": rank, "TURNING": turning,
        "COPYING": copying, "INTERLEAVED": turn.interleaved, "EARLY": early,
        "COSINE_VECTORS": aligned(turn.cos, turn.lanes), "SINE_VECTORS": aligned(turn.sin, turn.lanes),
    }  # fmt: skip
    text = render.constants({name: int(value) for name, value in defines.items()})
    return Recipe("rotary.cu", arch, {"generated.cuh": f"{text}\n"}, GENERAL)


def launch(turn: Turn, early: bool, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``x``, ``cosines``, ``sines``, ``output``."""
    rows = [(t.strides[0] if t.shape[0] > 1 else 0, 0, t.strides[1]) for t in (turn.cos, turn.sin)]
    sizes, strides = merge(turn.x.shape[:-1], [turn.out.strides[:-1], turn.x.strides[:-1], *rows])
    of_output, *of_operands = strides
    parameters = Parameters().pointer("x", "cosines", "sines", "output").u32(turn.count, *sizes)
    for each in (*of_operands, of_output):
        parameters.i64(*each)
    parameters.i64(turn.cos.strides[-1], turn.sin.strides[-1])
    grid = -(-turn.count // THREADS)
    return parameters.launch(recipe(turn, len(sizes), early, gpu.arch), "rotary", grid, THREADS)


class Rotary(OwnTactic):
    """RotaryEmbedding of heads whose features lie in vectors, wherever the heads lie."""

    name = "rotary"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return turn_of(op, [b.source(v) for v in op.inputs], b.result(op.value)).refuse()

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        reads = [b.operand(v) for v in op.inputs]
        turn = turn_of(op, reads, b.target(op.value))
        if not turn.count:
            return
        operands = {"x": turn.x, "cosines": turn.cos, "sines": turn.sin, "output": turn.out}
        early = all(b.graph.constant_value(v) is not None for v in op.inputs[1:])
        attrs = plain_attrs(op.definition, op.attrs)
        b.emit(op, launch(turn, early, b.gpu), operands, op.kind, attrs, reads, [turn.out])


def turn_of(op: Op, reads: Sequence[TensorView], out: TensorView) -> Turn:
    """What the launch of a RotaryEmbedding turns."""
    x, cos, sin = reads
    return Turn(x, cos, sin, out, op.attrs.rotary_embedding_dim or x.shape[-1], op.attrs.interleaved)
