"""Sums, means and norms over the pixels of channels-last 16-bit images, by clusters of blocks (``means.cu``) on Hopper.

Images have any number of axes: tokens have one, videos have three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import ClassVar

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.conv.maps import pitch_of
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.pointwise.strides import merge
from optdnn.kernels.quantized.quantized_store import QuantizedStore, narrow_kind, no_conversion
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, quantizer_of
from optdnn.kernels.reduce import parts
from optdnn.kernels.reduce.grid import LAUNCH_S as GENERAL_LAUNCH_S
from optdnn.kernels.reduce.grid import Grid, space_of
from optdnn.kernels.reduce.reduce import RULES, Reduced, Reduction, reduction_of
from optdnn.kernels.reduce.staged import StagedReduction
from optdnn.kernels.tactic import Offer, Region, TakesAfter
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16

AHEAD = 8
"""Loads of a thread that are in flight at once."""
CLUSTERS, THREADS, WIDTHS = (1, 2, 4, 8), (256, 512, 1024), (32, 64, 128)
"""Blocks of a cluster, threads and channels of a block."""
# Fitted to 591 timings of 19 images on an H200, within 10 % on average near the best. The first choices are 4 % behind the best.
LAUNCH_S, START_S, MEET_S, BATCH_S, LOAD_S = 0.92e-6, 0.22e-6, 0.51e-6, 0.1e-6, 0.184e-6
"""Seconds of a dependent launch, of the start of each of :data:`TOGETHER` blocks of a multiprocessor, of a cluster barrier, of a batch of
loads, and of each load of a thread."""
MEMORY_S, OVERLAP = 3.6e12, 1.76
"""Bytes per second of images that fill more than a third of L2, and the exponent of the norm that combines this time and that of loads."""
LARGER_S = {256: 0.0, 512: 0.36e-6, 1024: 0.87e-6}
"""Threads of a block -> additional seconds of larger blocks."""
WIDER_S = {32: 0.0, 64: 0.0, 128: 0.07e-6}
"""Channels of a block -> additional seconds of wider blocks."""
TOGETHER = 13.5
"""Blocks of a multiprocessor that start before any of them works; later blocks start while others work."""
GENERAL_S, GENERAL_BYTES_S, GENERAL_THREAD_S, L2_S = 1e-6, 3.0e12, 8.2e-12, 5.5e12
"""Lower bounds for the general kernel: seconds of a launch, bytes per second, seconds per thread, and bytes of L2 per second. From
17 images of 10 to 200 MB on an H200."""


@dataclass(frozen=True)
class Problem:
    """Sums of ``channels`` channels over the ``pixels`` pixels of ``images`` images. ``pitch``: elements from a pixel to the next.
    ``row``: elements from the results of an image to those of the next (0: as many as channels). ``squares``: the squares are summed.
    ``root``: the result is the square root. ``narrow``: the 8-bit type of the result ("": it has 16 bits)."""

    images: int
    pixels: int
    channels: int
    pitch: int
    dtype: str = "float16"
    squares: bool = False
    root: bool = False
    narrow: str = ""
    row: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the images."""
        return 2 * self.images * self.pixels * self.channels


@dataclass(frozen=True, order=True)
class Config:
    """A cluster of ``cluster`` blocks of ``threads`` threads shares the pixels of ``channels`` channels of an image."""

    cluster: int
    threads: int = 256
    channels: int = 32

    def __str__(self) -> str:
        return f"means{self.cluster}t{self.threads}c{self.channels}"

    def share(self, problem: Problem) -> int:
        """Pixels of a block."""
        return -(-problem.pixels // self.cluster)

    def batches(self, problem: Problem) -> int:
        """Batches of loads of a thread."""
        return -(-self.lines(problem) // AHEAD)

    def lines(self, problem: Problem) -> int:
        """Pixels of a thread."""
        return -(-self.share(problem) // (self.threads // (self.channels // 8)))


def refuse(problem: Problem, config: Config) -> str | None:
    """Why the configuration cannot run the problem, or None."""
    if config.cluster not in CLUSTERS:
        return f"{config.cluster} blocks are not a cluster of this kernel"
    if config.threads not in THREADS:
        return f"{config.threads} threads are not a block of this kernel"
    if config.channels not in WIDTHS:
        return f"{config.channels} channels are not a block of this kernel"
    if config.channels > max(WIDTHS[0], 2 * problem.channels - 1):
        return f"half of a block of {config.channels} channels would be idle"
    if problem.channels % 8 or problem.pitch % 8:
        return "its number of channels is not a multiple of 8"
    if not (0 < problem.images < 1 << 16 and 0 < problem.pixels < 1 << 24):
        return "no images, or more images than the kernel can count"
    if (config.cluster - 1) * -(-problem.pixels // config.cluster) >= problem.pixels:
        return "a block would have no pixels"
    return None


def estimate(problem: Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds of a dependent launch."""
    blocks = config.cluster * -(-problem.channels // config.channels) * problem.images
    waves = math.ceil(blocks / (gpu.multiprocessors * (2048 // config.threads)))
    work = waves * (config.batches(problem) * BATCH_S + config.lines(problem) * LOAD_S)
    if 3 * problem.bytes > gpu.l2_bytes:
        memory = problem.bytes / MEMORY_S / min(1.0, blocks / gpu.multiprocessors)
        work = math.pow(work**OVERLAP + memory**OVERLAP, 1 / OVERLAP)
    started = LAUNCH_S + START_S * min(TOGETHER, blocks / gpu.multiprocessors)
    return (
        started + work + LARGER_S[config.threads] + WIDER_S[config.channels] + (MEET_S if config.cluster > 1 else 0.0)
    )


def general_seconds(problem: Problem, grid: Grid, gpu: GpuFacts) -> float:
    """Predicted seconds of the general kernels. Their own predictions leave out memory, and the start of blocks with few terms."""
    others = [parts.estimate(grid, n, gpu) for n in (1, *(c.parts for c in parts.candidates(grid, gpu)))]
    busy = max(problem.bytes / GENERAL_BYTES_S, grid.blocks * grid.threads * GENERAL_THREAD_S)
    return max(GENERAL_LAUNCH_S + problem.bytes / L2_S, GENERAL_S + busy, min(others))


def candidates(problem: Problem, gpu: GpuFacts) -> list[Config]:
    """The configurations to time, best predicted first."""
    found = [c for c in starmap(Config, product(CLUSTERS, THREADS, WIDTHS)) if refuse(problem, c) is None]
    return sorted(found, key=lambda c: (estimate(problem, c, gpu), c))


def launch(
    problem: Problem, config: Config, factor: float, gpu: GpuFacts, store: QuantizedStore | None = None
) -> Launch:
    """The launch. Operands: ``x``, and ``output`` [images, channels]. ``store``: how the 8-bit result is stored."""
    ahead = -(-config.lines(problem) // config.batches(problem))
    numbers = {"CLUSTER": config.cluster, "THREADS": config.threads, "CHANNELS": config.channels, "AHEAD": ahead}
    numbers |= {"SQUARES": int(problem.squares), "ROOT": int(problem.root), "NARROW": narrow_kind(problem.narrow)}
    text = render.constants(numbers)
    recipe = Recipe("means.cu", gpu.arch, {"generated.cuh": f"{text}\n"}, template_options(problem.dtype))
    parameters = (
        Parameters()
        .pointer("x", "output")
        .i32(problem.channels, problem.pixels, config.share(problem), problem.pitch, problem.row or problem.channels)
        .f32(factor)
    )
    (store or QuantizedStore()).put(parameters)
    grid = (config.cluster * -(-problem.channels // config.channels), problem.images, 1)
    return parameters.launch(recipe, "means", grid, config.threads, cluster=config.cluster)


KINDS = ("ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare")


class ImageMeans(Reduction):
    """Means, sums and norms over all pixels of images."""

    name = "means_sm90"
    row_invariant: ClassVar[bool] = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        if not b.arch.startswith("sm_90"):
            return "it needs clusters of blocks"
        t, made = op.outputs[0].type, reduction_of(b, op)
        if t.dtype not in (FP16, BF16) or made is None or made.how not in KINDS:
            return "it is for means, sums and norms of 16-bit floats"
        if 0 in made.x.shape or _channel_axis(made) is None:
            return "it is not over the pixels of images"
        problem, out = self._problem(made), b.result(self._stored(b, op))
        if problem is None or out.offset % 8 or not out.is_like(_rows(out)):
            return "the image or its means are not channels-last at multiples of 16 bytes"
        found = candidates(problem, b.gpu)
        if not found:
            return refuse(problem, Config(1))
        grid = space_of([made.x], made.axes, out).grid
        if estimate(problem, found[0], b.gpu) > general_seconds(problem, grid, b.gpu):
            return "the general kernels are predicted to be as fast"
        return None

    def _stored(self, b: Builder, op: Op) -> Value:
        """The value that the launch stores."""
        return op.value

    @staticmethod
    def _problem(made: Reduced) -> Problem | None:
        axis, x = _channel_axis(made), made.x
        pixels, (steps,) = merge([x.shape[i] for i in made.axes], [[x.strides[i] for i in made.axes]])
        if axis is None or len(pixels) > 1:
            return None
        x = x.view(
            (x.shape[0], x.shape[axis], 1, pixels[0]), (x.strides[0], x.strides[axis], pixels[0] * steps[0], steps[0])
        )
        pitch = pitch_of(x)
        if pitch is None or x.offset % 8:
            return None
        squares, root = made.how in ("ReduceL2", "ReduceSumSquare"), made.how == "ReduceL2"
        return Problem(x.shape[0], math.prod(x.shape[2:]), x.shape[1], pitch, map_dtype(x.dtype), squares, root)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        made = reduction_of(b, op)
        problem = None if made is None else self._problem(made)
        assert problem is not None
        return [Offer(c, estimate(problem, c, b.gpu), False) for c in candidates(problem, b.gpu)]

    def emit(self, b: Builder, op: Op, config: Config) -> None:
        out, made = b.target(op.value), reduction_of(b, op)
        problem = None if made is None else self._problem(made)
        assert made is not None
        assert problem is not None
        launched = launch(replace(problem, row=out.strides[0]), config, _factor(problem, made), b.gpu)
        b.emit(op, launched, {"x": made.x, "output": out}, op.kind, made.attrs, _reads(b, op, made), [out])


class QuantizedMeans(TakesAfter, ImageMeans):
    """Means, sums and norms over all pixels of images with the quantization of the result (squeeze-and-excitation before a
    quantized convolution)."""

    name = "means_quantized"

    def refuse(self, b: Builder, op: Op) -> str | None:
        to = quantizer_of(b, op.value)
        if to is None or b.graph.sole_user(op.value) is None or op.value in b.reserved:
            return "nothing quantizes its result, or it has other readers"
        if StagedReduction().refuse(b, op) is None:
            return "the operator before it is computed in its launch, which saves more bytes"
        return no_conversion(to.to.dtype, b.arch) or super().refuse(b, op)

    @staticmethod
    def _quantizer(b: Builder, op: Op) -> Quantizer:
        to = quantizer_of(b, op.value)
        assert to is not None
        return to

    def _stored(self, b: Builder, op: Op) -> Value:
        return self._quantizer(b, op).op.value

    def region(self, b: Builder, op: Op) -> Region:
        """The reduction and the quantization."""
        return Region(op, after=(self._quantizer(b, op).op,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the 8-bit result."""
        b.target(self._stored(b, op))

    def emit(self, b: Builder, op: Op, config: Config) -> None:
        to, made = self._quantizer(b, op), reduction_of(b, op)
        problem = None if made is None else self._problem(made)
        assert made is not None
        assert problem is not None
        out = b.target(to.op.value)
        launched = launch(
            replace(problem, narrow=to.to.dtype, row=out.strides[0]),
            config,
            _factor(problem, made),
            b.gpu,
            QuantizedStore.of(to.to),
        )
        covers, attrs = replace(op, src=op.src | to.op.src), meaning(op, to, False, made.attrs)
        b.emit(covers, launched, {"x": made.x, "output": out}, "Quantized", attrs, _reads(b, op, made), [out])


def _reads(b: Builder, op: Op, made: Reduced) -> list[TensorView]:
    """The operands of the meaning: the image, and the axes of a reduction."""
    axes = [b.constant(np.array(made.named, np.int64), "axes")] if op.kind in RULES else []
    return [b.operand(op.inputs[0]), *axes]


def _factor(problem: Problem, made: Reduced) -> float:
    """The factor of the sum."""
    return 1.0 / problem.pixels if made.how == "ReduceMean" else 1.0


def _channel_axis(made: Reduced) -> int | None:
    """The axis of the channels, if all other axes but the first one are reduced: the second or the last one; else None."""
    rank = len(made.x.shape)
    return {tuple(range(2, rank)): 1, tuple(range(1, rank - 1)): rank - 1}.get(made.axes) if rank > 2 else None


def _rows(out: TensorView) -> tuple[int, ...]:
    """Strides of results that are contiguous for each image."""
    return tuple(out.strides[0] if k == 0 else 1 for k in range(len(out.shape)))
