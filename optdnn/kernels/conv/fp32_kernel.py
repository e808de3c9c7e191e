"""Plans of the true-fp32 convolution kernel (``conv_fp32.cu``): implicit GEMM on scalar units, from sm_80 on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from optdnn.kernels.conv.parameters import Scatter
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.problem import WithEpilogue
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

STEP = 32
"""K is padded to a multiple of this."""
LARGEST = 1 << 31
"""Number of elements that 32-bit offsets can count."""


@dataclass(frozen=True)
class Strides:
    """Elements from an image, a row and a column of a feature map to the next."""

    image: int
    row: int
    column: int


@dataclass(frozen=True)
class Problem(WithEpilogue):
    """A convolution of ``batch`` images of ``height`` x ``width`` x ``in_channels`` (fp32), into ``channels``.

    ``padding`` is (top, left, bottom, right). Channels are those of all ``groups``. ``plane`` is the stride of the
    input's channels (1: channels-last); the result's channels are contiguous. ``residual_at``: strides of the residual,
    if the epilogue reads one. ``aligned``: result and residual begin at multiples of 16 bytes. With ``scatter``,
    channels are blocks of an image's pixels, and ``out_at`` are the strides of that image.
    """

    batch: int
    height: int
    width: int
    in_channels: int
    channels: int
    kernel: tuple[int, int]
    at: Strides
    out_at: Strides
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    plane: int = 1
    residual_at: Strides | None = None
    aligned: bool = True
    scatter: Scatter | None = None

    @cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the result."""
        top, left, bottom, right = self.padding
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return (
            (self.height + top + bottom - reach[0]) // self.stride[0] + 1,
            (self.width + left + right - reach[1]) // self.stride[1] + 1,
        )

    @cached_property
    def pixels(self) -> int:
        """Output pixels over the batch."""
        return self.batch * math.prod(self.out_size)

    @cached_property
    def depth(self) -> int:
        """Products of each result."""
        return self.in_channels // self.groups * math.prod(self.kernel)

    @property
    def planar(self) -> bool:
        """Whether K runs over the taps of a channel first, so that neighbors along K are contiguous in memory although
        channels are not."""
        return self.plane != 1

    @property
    def whole(self) -> bool:
        """Whether every eight neighbors along K are channels of one tap."""
        return not self.planar and self.in_channels // self.groups % 8 == 0

    @property
    def vector(self) -> bool:
        """Whether four channels of the result, and of the residual, are one access."""
        places = [self.out_at, *([self.residual_at] if self.residual_at is not None else [])]
        strides = [s for p in places for s in (p.image, p.row, p.column)]
        channels = self.channels // self.groups if self.scatter is None else self.scatter.channels
        return self.aligned and channels % 4 == 0 and all(s % 4 == 0 for s in strides)


@dataclass(frozen=True, order=True)
class Config:
    """A block computes ``bm`` pixels x ``bn`` channels, and a thread ``tm`` x ``tn`` of them. The ring has ``stages`` K
    steps of ``depth`` products. ``split``: blocks of a cluster that share the K steps of a tile."""

    bm: int
    bn: int
    tm: int = 8
    tn: int = 8
    depth: int = 16
    stages: int = 3
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.bm // self.tm * (self.bn // self.tn)

    def __str__(self) -> str:
        share = f"k{self.split}" if self.split > 1 else ""
        return f"ffma{self.bm}x{self.bn}t{self.tm}x{self.tn}d{self.depth}s{self.stages}{share}"

    @classmethod
    def read(cls, name: str) -> Config | None:
        """The configuration of this name, or None if there is none."""
        found = re.fullmatch(r"ffma(\d+)x(\d+)t(\d+)x(\d+)d(\d+)s(\d+)(?:k(\d+))?", name)
        if found is None:
            return None
        made = cls(*(int(n or 1) for n in found.groups()))
        return made if str(made) == name else None


TILES = (
    (128, 128, 8, 8),
    (128, 64, 8, 8),
    (64, 128, 8, 8),
    (64, 64, 8, 8),
    (64, 64, 4, 8),
    (32, 64, 4, 8),
    (32, 32, 4, 4),
)
"""Tiles of blocks and threads to try: (bm, bn, tm, tn)."""
SPLITS = (1, 2, 3, 4, 6, 8)
SHALLOW = tuple(Config(*tile, 16, 3 if tile[2:] == (8, 8) else 4, split) for tile in TILES for split in SPLITS)
DEEP = tuple(Config(*tile, 32, 2, split) for tile in TILES[4:] for split in (12, 16))
"""K steps of 32, which hide the barrier behind products, for problems whose few pixels many blocks share. With smaller
splits, such steps gain almost nothing: in ResNet-50's layers at batch 1, steps of 32 with all splits gain 4.4 %, and
these configurations alone 3.6 %."""
CONFIGS = (*SHALLOW, *DEEP)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: the ring, or later the partial sums that a cluster exchanges."""
    ring = config.stages * config.depth * (config.bm + 4 + config.bn)
    exchanged = config.split * -(-config.bm // config.split) * (config.bn + 4) if config.split > 1 else 0
    return 4 * max(ring, exchanged)


def _blocks_wanted(config: Config) -> int:
    """Blocks per multiprocessor that registers must allow: 512 threads of 128 registers if a thread has 64
    accumulators, more threads with fewer accumulators, and fewer threads if a thread holds more operands at a time."""
    if config.depth == 16:
        return max(1, (512 if config.tm * config.tn == 64 else 768) // config.threads)
    most = 640 if config.tm * config.tn < 64 else 512 if config.split == 1 or config.bn > 64 else 384
    return max(1, most // config.threads)


def steps(problem: Problem, config: Config) -> int:
    """K steps of a tile."""
    return -(-problem.depth // config.depth)


def refuse(problem: Problem, config: Config, arch: str = "sm_90a", *, shared: int = 101376) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``: bytes that a block can have (99 KB on sm_86)."""
    if (why := no_kernel(problem)) is not None:
        return why
    fits = config.bm % (4 * config.tm) == 0 and config.bn % (8 * config.tn) == 0
    if {config.tm, config.tn} - {4, 8} or not fits or config.stages < 2 or not 32 <= config.threads <= 256:
        return "not a tile of this kernel"
    if config.depth not in (16, 32):
        return "steps of other depths have not been measured"
    if (
        config.depth * config.bn % (4 * config.threads)
        or config.bm * 8 % config.threads
        or config.threads % (config.bn // 4)
    ):
        return "its threads do not share the copies evenly"
    if config.split > 1 and not arch.startswith("sm_90"):
        return f"clusters that share K steps need sm_90, not {arch}"
    if not 1 <= config.split <= 16 or (config.split > 1 and steps(problem, config) < 2 * config.split):
        return f"{steps(problem, config)} K steps are too few for {config.split} blocks"
    if (needed := shared_bytes(config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def no_kernel(problem: Problem) -> str | None:
    """Why no configuration runs the problem, or None."""
    if problem.channels % problem.groups or problem.in_channels % problem.groups:
        return f"{problem.groups} groups do not divide the channels"
    if problem.groups > 1 and problem.channels // problem.groups % 4:
        return f"a group has {problem.channels // problem.groups} filters, not a multiple of 4"
    scatter = problem.scatter
    if scatter is not None and (problem.groups > 1 or problem.residual or scatter.channels % 4):
        return "blocks of pixels need a multiple of 4 channels, one group, and no addition"
    reach = [(k - 1) * d for k, d in zip(problem.kernel, problem.dilation, strict=True)]
    if max(problem.height, problem.width, *reach, *problem.padding) >= 1 << 14:
        return "an image or a filter is larger than 16384 pixels"
    out_h, out_w = problem.out_size
    if min(out_h, out_w) < 1 or not problem.depth or not problem.channels or not problem.batch:
        return "it is empty"
    out_h, out_w = (out_h, out_w) if scatter is None else scatter.size
    spans = [
        (problem.batch - 1) * at.image + (h - 1) * at.row + (w - 1) * at.column + last
        for at, h, w, last in (
            (problem.at, problem.height, problem.width, (problem.in_channels - 1) * problem.plane),
            (problem.out_at, out_h, out_w, problem.channels),
            (problem.residual_at or problem.out_at, out_h, out_w, problem.channels),
        )
    ]
    if max(spans) >= LARGEST or problem.groups > 65535:
        return "its tensors have more elements than 32-bit offsets can address"
    return None


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks: (tiles of pixels x tiles of channels x ``split``, 1, groups). The tiles of one range of pixels are neighbors."""
    wide = -(-problem.channels // problem.groups // config.bn)
    return (-(-problem.pixels // config.bm) * wide * config.split, 1, problem.groups)


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. All shapes are parameters."""
    defines = {
        "BM": config.bm, "BN": config.bn, "TM": config.tm, "TN": config.tn, "BK": config.depth, "EARLY": int(config.depth > 16),
        "STAGES": config.stages,
        "SPLIT": config.split, "WHOLE": int(problem.whole), "PLANAR": int(problem.planar), "VECTOR": int(problem.vector),
        "HAS_RESIDUAL": int(problem.residual), "SCATTER": int(problem.scatter is not None), "MIN_BLOCKS": _blocks_wanted(config),
    }  # fmt: skip
    text = "\n".join([render.constants(defines), render.epilogue(problem.epilogue, exact=True), ""])
    return Recipe("conv_fp32.cu", arch, {"generated.cuh": text}, ("--std=c++17",))


def launch(problem: Problem, config: Config, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``pixels``, ``weights`` (by :func:`pack_weights`), ``bias`` (fp32, per channel), ``residual``,
    ``output``."""
    parameters = Parameters().pointer("pixels", "weights", "bias", "residual" if problem.residual else None, "output")
    other = problem.residual_at or Strides(0, 0, 0)
    at, out = problem.at, problem.out_at
    parameters.i32(at.image, at.row, at.column, problem.plane, out.image, out.row, out.column)
    parameters.i32(other.image, other.row, other.column)
    parameters.i32(problem.height, problem.width, *problem.out_size, problem.pixels)
    parameters.i32(*problem.kernel, *problem.stride, *problem.padding[:2], *problem.dilation)
    channels = problem.channels // problem.groups
    parameters.i32(problem.in_channels // problem.groups, channels, weight_pitch(problem.channels))
    parameters.i32(-(-channels // config.bn), steps(problem, config))
    parameters.i32(*(problem.scatter.numbers if problem.scatter is not None else [0] * 10))
    return parameters.launch(
        recipe(problem, config, gpu.arch), "conv_fp32", grid(problem, config), config.threads, shared=shared_bytes(config),
        cluster=config.split,
    )  # fmt: skip


def weight_pitch(channels: int) -> int:
    """Elements of a row of the packed weights."""
    return -(-channels // 4) * 4


def pack_weights(weight: Array, *, planar: bool) -> Array:
    """OIHW (I: input channels of one group) -> fp32 ``[K padded to a multiple of STEP, O padded to a multiple of 4]``,
    with K in the order (H, W, I), or (I, H, W) if ``planar``."""
    out = weight.shape[0]
    order = (1, 2, 3, 0) if planar else (2, 3, 1, 0)
    rows = weight.transpose(order).reshape(-1, out)
    packed = np.zeros((-(-len(rows) // STEP) * STEP, weight_pitch(out)), np.float32)
    packed[: len(rows), :out] = rows
    return packed


# ---------------------------------------------------------------- cost

CLOCK = 1.755e9  # Hz
MEMORY = 4.2e12  # bytes/s
LATENCY = 0.86e-6  # s: launch, first copies, last stores of a dependent kernel
BLOCK, EXCHANGE = 1550, 2400  # cycles of a block besides its products, and until a cluster has exchanged sums
EXCHANGED, STORED = 0.21, 0.12  # cycles of a block per result that a cluster exchanges, and per stored result
SHARE = {64: 0.935, 32: 0.915, 16: 0.75}
"""Accumulators of a thread -> fraction of the cycles that issue instructions when warps hide one another's latency."""
COPY, SCATTERED, COPY_16 = 8.5, 21.0, 5.5
"""Issue slots of a copy of a pixel, of one that computes its filter tap, and of a copy of 16 bytes of weights."""
BUSY = ((0, 0.0), (2, 0.43), (4, 0.58), (8, 0.635), (12, 0.825), (16, 1.0))
"""(Warps of a multiprocessor, fraction of the time in which one of them can issue)."""


def _share(problem: Problem, config: Config) -> float:
    """Fraction of the cycles that are multiply-adds, from the other instructions of a thread per eight products along K."""
    sums = config.tm * config.tn
    copies = config.bm * 8 / config.threads * (COPY if problem.whole else SCATTERED)
    copies += 2 * config.bn / config.threads * COPY_16
    return SHARE[sums] * 8 * sums / (8 * sums + 2 * (config.tm + config.tn) + copies)


def _busy(warps: float) -> float:
    for (fewer, low), (more, high) in pairwise(BUSY):
        if warps <= more:
            return low + (high - low) * (warps - fewer) / (more - fewer)
    return 1.0


def estimate(problem: Problem, config: Config, device: GpuFacts) -> float:
    """Predicted seconds of one dependent launch. The figures are fitted to an H200."""
    x, _, z = grid(problem, config)
    registers = 128 if config.tm * config.tn == 64 else 96
    memory = shared_bytes(config) + 1024 + 16 * config.bm
    resident = max(1, min(device.shared_per_multiprocessor // memory, 65536 // (registers * config.threads), 32))
    whole, rest = divmod(-(-x * z // device.multiprocessors), resident)
    results = config.bm * config.bn
    each = -(-steps(problem, config) // config.split) * config.depth * results / 128 / _share(problem, config)
    fixed = BLOCK + STORED * results + (EXCHANGE + EXCHANGED * results if config.split > 1 else 0.0)
    cycles = whole * (resident * each / _busy(resident * config.threads / 32) + fixed)
    cycles += rest * each / _busy(rest * config.threads / 32) + fixed if rest else 0.0
    pixels = problem.batch * problem.height * problem.width * problem.in_channels
    stored = problem.pixels * problem.channels * (2 if problem.residual else 1)
    return max(cycles / CLOCK, 4 * (pixels + stored + problem.depth * problem.channels) / MEMORY) + LATENCY


def candidates(problem: Problem, device: GpuFacts, configs: Sequence[Config] = CONFIGS) -> list[Config]:
    """The configurations that can run the problem, the best predicted first."""
    found = {c: estimate(problem, c, device) for c in configs if refuse(problem, c, device.arch) is None}
    return sorted(found, key=lambda c: (found[c], c.split, -c.bm * c.bn))
