"""The distribution of a reduction over blocks and threads, and its predicted time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise.strides import merge
from optdnn.runtime.cuda.gpu_facts import GpuFacts

THREADS = 256
"""Threads of a block if an output has few terms (several outputs then share the block). With many terms, a block has four times as many."""
FEW = 256
"""Up to this number of terms, a block of THREADS threads loads the terms of neighboring outputs in one batch."""
SOME = 32
"""Up to this number of terms, a thread adds four of them, also where neighboring threads have neighboring outputs."""
BATCH = 4
"""Terms that a thread loads before it adds the first of them."""
WIDTH = 32
"""Neighboring outputs of a block."""
LAUNCH_S, BATCH_S = 2.5e-6, 0.9e-6
"""Seconds of a dependent launch, and of a batch of loads."""
RATE = 32e9
"""Bytes per second that a multiprocessor reads."""


def _together(x: TensorView, width: int, strides: Sequence[int]) -> int:
    """Number of neighboring elements of an access to ``x``. ``width``: elements along the axis. ``strides``: those of the other axes."""
    fits = (n for n in (8, 4, 2) if n * x.dtype.itemsize <= 16 and not any(k % n for k in (width, x.offset, *strides)))
    return next(fits, 1)


def _neighbors(xs: Sequence[TensorView], width: int, sx: Sequence[Sequence[int]], rx: Sequence[Sequence[int]]) -> int:
    """Number of neighboring terms of an output that are one access in each tensor, except tensors with one element for all terms."""
    if not width or any(r[-1] not in (0, 1) for r in rx):
        return 1
    moving = [(x, [*s, *r[:-1]]) for x, s, r in zip(xs, sx, rx, strict=True) if r[-1]]
    return min((_together(x, width, strides) for x, strides in moving), default=1)


@dataclass(frozen=True)
class Grid:
    """The distribution of a reduction: ``outputs`` outputs of ``count`` terms each. A block of ``threads`` threads has ``lanes`` groups of
    ``vec`` neighboring outputs; ``runs`` threads share a group. ``across``: neighboring threads have neighboring outputs. An access has
    ``wide`` neighboring terms of an output. A thread may have ``ahead`` accesses in flight."""

    outputs: int
    count: int
    threads: int
    vec: int
    runs: int
    across: bool
    ahead: int = BATCH
    wide: int = 1
    bytes: int = 0
    """Bytes of all terms."""

    @property
    def lanes(self) -> int:
        return self.threads // self.runs

    @property
    def accesses(self) -> int:
        """Number of groups of ``vec`` outputs."""
        return self.outputs // self.vec

    @property
    def blocks(self) -> int:
        """Blocks for all outputs (for each part of their terms)."""
        return -(-self.accesses // self.lanes)

    @property
    def reads(self) -> int:
        """Accesses to the terms of an output."""
        return self.count // self.wide

    @property
    def sums(self) -> int:
        """Partial results of a thread: one for each element of an access."""
        return max(self.vec, self.wide)

    @property
    def batch(self) -> int:
        """Accesses of a thread that are in flight together."""
        return max(1, min(self.ahead, -(-self.reads // self.runs)))

    def seconds(self, parts: int, gpu: GpuFacts) -> float:
        """Predicted seconds of a dependent launch with ``parts`` blocks per output."""
        waves = math.ceil(self.blocks * parts / (gpu.multiprocessors * (2048 // self.threads)))
        batches = waves * math.ceil(self.reads / parts / (self.runs * BATCH)) * BATCH_S
        return LAUNCH_S + max(batches, self.bytes / min(self.blocks * parts, gpu.multiprocessors) / RATE)


@dataclass(frozen=True)
class Space:
    """The merged axes of a reduction: axes of the outputs (``dims``, with strides ``so`` of the result and ``sx`` of each input), and axes
    of the terms (``inner``, with strides ``rx`` of each input)."""

    dims: list[int]
    so: list[int]
    sx: list[list[int]]
    inner: list[int]
    rx: list[list[int]]
    grid: Grid


def space_of(xs: Sequence[TensorView], axes: Sequence[int], out: TensorView) -> Space:
    """The space of a reduction of ``xs`` over ``axes``. The tensors have one shape; the first one is the largest in memory."""
    x = xs[0]
    kept = [i for i in range(len(x.shape)) if i not in axes]
    out_strides = out.strides if len(out.shape) == len(kept) else [out.strides[i] for i in kept]
    own = [[x.strides[i] for i in kept] for x in xs]
    shape = [x.shape[i] for i in kept]
    if all(
        s != 0 or n == 1 for s, n in zip(own[0], shape, strict=True)
    ):  # loads of the larger tensor coalesce, not stores
        dims, (first, so, *others) = merge(shape, [own[0], out_strides, *own[1:]])
        sx = [first, *others]
    else:
        dims, (so, *sx) = merge(shape, [out_strides, *own])
    inner, rx = merge([x.shape[i] for i in axes], [[x.strides[i] for i in axes] for x in xs])
    count = math.prod(inner)
    # Outputs that are neighbors in memory share a block, so that loads coalesce; a thread takes up to 16 bytes of them.
    across = sx[0][-1] == 1 and dims[-1] >= 8 and rx[0][-1] != 1
    wide = 1 if across else _neighbors(xs, inner[-1], sx, rx)
    reads = count // wide
    threads = 4 * THREADS if reads > (FEW if across else 4 * THREADS - 1) else THREADS
    moving = [(x, [*s[:-1], *r]) for x, s, r in zip(xs, sx, rx, strict=True) if s[-1] == 1]
    together = across and all(s[-1] in (0, 1) or not any(r) for s, r in zip(sx, rx, strict=True))
    vec = min(_together(x, dims[-1], strides) for x, strides in moving) if together else 1
    # Otherwise neighboring threads have neighboring terms, and outputs of few terms share a block.
    most = threads * vec // WIDTH if across else threads
    each = 1 if across and reads > SOME else 4
    runs = min(most, 1 << max((-(-reads // each) - 1).bit_length(), 0)) if vec > 1 or not across else most
    ahead = max(1, min(BATCH, (2 if wide > 1 else 1) * BATCH // len(xs)))
    grid = Grid(math.prod(dims), count, threads, vec, runs, across, ahead, wide, x.size * x.dtype.itemsize)
    return Space(dims, so, sx, inner, rx, grid)
