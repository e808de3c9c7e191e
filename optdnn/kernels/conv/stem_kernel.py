"""Plans of the convolution of an image in its given layout (``conv_stem.cu``): one to four channels, in any memory
order and element type.

``out[n, y, x, o] = epilogue(sum over taps of round(image[n, c, y*sh - top + r*dh, x*sw - left + s*dw] * factor[c] + shift[c]) *
w[o, c, r, s])``, channels-last, in 16 bits or fp32. The padding is zeros, added after normalization. mma.sync, from sm_80 on. With
fp32, a product is three tf32 products, nearly as exact, or one of factors rounded to tf32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from optdnn.errors import InternalError
from optdnn.kernels.conv.problem import OneSource, Source
from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

CHANNELS = 4
"""Most channels of an image."""
MAX_STEPS = 32
"""Most K steps (of 32 bytes of factors): they are unrolled."""
KEPT_REGISTERS = 48
"""Most registers of a thread for weights that stay in registers."""
SHARED = 101376
"""Bytes of shared memory that a block has on every GPU from sm_80 on."""
KINDS = {"float32": (0, 4), "tfloat32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2), "uint8": (3, 1), "int8": (4, 1)}
"""Element type of an image or of factors -> (its number in the kernel, bytes of an element)."""


@dataclass(frozen=True)
class Problem(OneSource):
    """``batch`` images of ``source`` -> ``channels`` (a multiple of 8). ``dtype``: the type of the factors of products; results
    have it, too (fp32 for ``tfloat32``).

    ``strides``: elements between images, channels, rows and columns of the image; ``image``: its element type; ``offset``: its
    first element (only the alignment to 16 elements matters). ``normalize``: each channel is multiplied by a factor, and a
    shift is added.
    """

    batch: int
    source: Source
    channels: int
    strides: tuple[int, int, int, int]
    image: str = "float32"
    offset: int = 0
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    normalize: bool = False
    frame: int = 0
    """For a volume: elements between frames. The channels of the source are those of all frames under the taps.
    ``batch`` counts frames of the result."""

    @property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        s = self.source
        out = self.batch * math.prod(self.out_size) * self.channels * self.item
        return (
            self.batch * s.height * s.width * s.channels * KINDS[self.image][1]
            + out * (2 if self.residual else 1)
            + self.channels * self.layout.steps * 32
        )

    @property
    def item(self) -> int:
        """Bytes of a factor, and of a result."""
        return KINDS[self.dtype][1]

    @property
    def copied(self) -> bool:
        """Whether pixels are copied to shared memory without passing through registers."""
        same = KINDS[self.image] == KINDS[self.dtype]
        return same and not self.normalize and self.layout.planes and self.vector > 1

    @cached_property
    def vector(self) -> int:
        """Columns per load: as many as fit 16 bytes and divide the width and all offsets of rows."""
        _, c, row, column = self.strides
        item, s = KINDS[self.image][1], self.source
        outer = [x for x, n in ((self.strides[0], self.batch), (c, s.channels), (row, s.height)) if n > 1]
        outer += [self.frame]
        if column != 1 and s.width > 1:
            return 1
        found = 8 if self.layout.planes else 4
        while found > 1 and (
            found * item > 16 or s.width % found or self.offset % found or any(x % found for x in outer)
        ):
            found //= 2
        return found

    @cached_property
    def phase(self) -> int:
        """Columns from the first one that a tile reads to its first window."""
        return -self.source.padding[1] % max(self.vector, 2)

    @cached_property
    def layout(self) -> Layout:
        """The layout of pixels in shared memory, and the order of K."""
        s = self.source
        if self.item == 4:
            return Layout(True, s.channels, *s.kernel, 0, each=8)
        # With an even stride, two neighboring taps of a row are one word. A window that begins at an odd column gets one more tap.
        lead = s.padding[1] % 2
        planes = Layout(True, s.channels, s.kernel[0], (s.kernel[1] + lead + 1) // 2 * 2, lead)
        together = Layout(False, 2 if s.channels <= 2 else 4, *s.kernel, 0)
        few = s.channels <= CHANNELS
        return planes if not few or (self.even and planes.steps <= together.steps) else together

    @property
    def even(self) -> bool:
        """Whether windows begin at even columns, padding aside, and their columns are contiguous."""
        s = self.source
        return s.stride[1] % 2 == 0 and s.dilation[1] == 1 and self.strides[3] == 1


@dataclass(frozen=True)
class Layout:
    """``planes``: each channel is a plane, and a filter row has ``columns`` taps (an even number for 16-bit factors), with
    ``lead`` taps of weight 0 in front; ``together`` is the number of planes. Else ``together`` (2 or 4) channels of a pixel
    are neighbors. ``by_rows``: with planes, K runs over the channels of a filter row, instead of over the rows of a
    channel. ``each``: products of a K step."""

    planes: bool
    together: int
    rows: int
    columns: int
    lead: int
    by_rows: bool = False
    each: int = 16

    @property
    def depth(self) -> int:
        """Products of a sum, with those of padding."""
        return self.together * self.rows * self.columns

    @property
    def steps(self) -> int:
        """K steps."""
        return -(-self.depth // self.each)


@dataclass(frozen=True, order=True)
class Config:
    """A block computes ``tile_h`` x ``tile_w`` output pixels x ``columns`` tiles of 8 channels. A warp computes ``m``
    tiles of 16 pixels x ``n`` tiles of 8 channels. ``ahead``: the pixels of the next tile are loaded during the
    products of this one."""

    tile_h: int
    tile_w: int
    m: int
    n: int
    columns: int
    ahead: bool = False

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along pixels, and along channels."""
        return self.tile_h * self.tile_w // 16 // self.m, self.columns // self.n

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * math.prod(self.warps)

    def __str__(self) -> str:
        return f"stem{self.tile_h}x{self.tile_w}m{self.m}n{self.n}c{self.columns}{'a' if self.ahead else ''}"


def refuse(problem: Problem, config: Config, shared: int = SHARED, threads: int = 256) -> str | None:
    """Why the configuration cannot run the problem, or None. ``shared``, ``threads``: bytes and threads that a block can have."""
    if (why := no_kernel(problem)) is not None:
        return why
    if config.tile_w % 8 or config.tile_h * config.tile_w % (16 * config.m) or config.columns % config.n:
        return "not a tile of this kernel"
    if not 32 <= config.threads <= threads:
        return f"{config.threads} threads are not a block of this kernel"
    if config.m * config.n > 32:
        return "more than 128 accumulators per thread"
    if registers(problem, config) + _addresses(problem, config) > min(255, 65536 // (-(-config.threads // 128) * 128)):
        return "its accumulators and inputs do not fit the registers of a thread"
    if (needed := shared_bytes(problem, config)) > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    return None


def no_kernel(problem: Problem) -> str | None:
    """Why no configuration can run the problem, or None."""
    s = problem.source
    apart = s.channels if s.depth is None or not problem.even else s.channels // s.depth.taps
    if apart > CHANNELS:
        return f"it is for images of up to {CHANNELS} channels, not {apart}"
    if s.depth is not None and problem.item == 4:
        return "the factors of volumes are 16-bit floats"
    if s.depth is not None and (problem.normalize or problem.residual):
        return "volumes take no normalization and no residual"
    if problem.epilogue[:1] != (("bias",),):
        return "its epilogue does not begin with the bias"
    if problem.image not in KINDS:
        return f"it does not read images of {problem.image}"
    if problem.channels % 8 or min(problem.out_size) < 1:
        return "its number of channels is not a multiple of 8, or there are no pixels"
    if problem.layout.steps > MAX_STEPS:
        return f"sums of {problem.layout.depth} products are longer than {MAX_STEPS * problem.layout.each}"
    frames = 0 if s.depth is None else s.depth.taps * s.depth.dilation
    if max(sum(abs(x) * n for x, n in zip((*problem.strides[1:], problem.frame), (s.channels, s.height, s.width, frames), strict=True)),
           math.prod(problem.out_size)) >= 1 << 30:  # fmt: skip
        return "an image has more elements than the kernel addresses"
    return None


def halo(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows and columns of pixels that a tile reads, with the columns rounded up to whole vectors."""
    s, layout = problem.source, problem.layout
    rows = (config.tile_h - 1) * s.stride[0] + (s.kernel[0] - 1) * s.dilation[0] + 1
    columns = (config.tile_w - 1) * s.stride[1] + problem.phase - layout.lead
    columns += layout.columns if layout.planes and problem.item == 2 else (s.kernel[1] - 1) * s.dilation[1] + 1
    return rows, -(-columns // problem.vector) * problem.vector


def _words(problem: Problem, rows: int, pitch: int) -> list[int]:
    """Offsets of the words along K, in words from the first word of a window. A word is two neighboring taps or channels, or one
    tap of fp32."""
    s, layout = problem.source, problem.layout
    if problem.item == 4:
        found = [
            (c * rows + r * s.dilation[0]) * pitch + q * s.dilation[1]
            for c in range(s.channels)
            for r in range(s.kernel[0])
            for q in range(s.kernel[1])
        ]
    elif layout.planes:
        found = [
            (c * rows + r * s.dilation[0]) * pitch // 2 + j
            for c in range(s.channels)
            for r in range(s.kernel[0])
            for j in range(layout.columns // 2)
        ]
    else:
        each = layout.together // 2
        found = [
            (r * s.dilation[0] * pitch + q * s.dilation[1]) * each + j
            for r in range(s.kernel[0])
            for q in range(s.kernel[1])
            for j in range(each)
        ]
    return found + [found[-1]] * (layout.steps * 8 - len(found))


def _pitch(problem: Problem, config: Config) -> int:
    """Columns from row to row in shared memory: those of the halo, and padding that lets fragments read different banks."""
    return _pitch_of(problem, *halo(problem, config))


@lru_cache(maxsize=4096)
def _pitch_of(problem: Problem, rows: int, columns: int) -> int:
    layout = problem.layout
    step = 16 // problem.item // (1 if layout.planes else layout.together)  # 16 bytes
    least = -(-columns // step) * step
    lane = problem.source.stride[1] * (1 if layout.planes else layout.together) * problem.item // 4

    def turns(pitch: int) -> int:
        words, total = _words(problem, rows, pitch), 0
        for k in range(0, len(words), 4):
            seen: dict[int, set[int]] = {}
            for at in {g * lane + words[k + t] for g in range(8) for t in range(4)}:
                seen.setdefault(at % 32, set()).add(at)
            total += max(map(len, seen.values()))
        return total

    return min((turns(pitch), pitch) for pitch in range(least, least + 4 * step + 1, step))[1]


def shared_bytes(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a block: weights, biases, pixels."""
    layout, columns = problem.layout, config.columns * 8
    return (
        columns * (layout.steps * 32 + 16)
        + columns * 4
        + _image_bytes(problem, config) * (1 + buffered(problem, config))
    )


def buffered(problem: Problem, config: Config) -> bool:
    """Whether shared memory holds the pixels of two tiles."""
    return config.ahead and problem.copied


def _image_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a tile's pixels."""
    planes = problem.source.channels if problem.layout.planes else problem.layout.together
    return -(-halo(problem, config)[0] * _pitch(problem, config) * planes * problem.item // 16) * 16


def keeps(problem: Problem, config: Config) -> bool:
    """Whether the weights of a warp stay in registers. Both parts of fp32 weights would not fit."""
    return problem.dtype != "float32" and 2 * problem.layout.steps * config.n <= KEPT_REGISTERS


def registers(problem: Problem, config: Config) -> int:
    """Estimated registers of a thread."""
    steps, vector = problem.layout.steps, problem.vector
    kept = 2 * steps * config.n
    weights = kept if keeps(problem, config) else 4 * config.n
    table = 0 if problem.item == 2 and problem.layout.planes and problem.layout.columns == 8 else 2 * steps
    rows, columns = halo(problem, config)
    chunks = rows * columns // vector * (problem.source.channels if problem.layout.planes else 1)
    rounds = -(-chunks // config.threads)
    vectors = (
        rounds * -(-vector * KINDS[problem.image][1] // 4) * (1 if problem.layout.planes else problem.source.channels)
    )
    held = (rounds if buffered(problem, config) else vectors) + 3 * max(0, rounds - 4)  # and the addresses of chunks
    sums = 4 * config.m * config.n + (24 if problem.item == 4 and steps > 8 else 0)
    if problem.dtype == "float32":  # and those of eight K steps, of products with a rest, and rests
        sums = sums * (2 if steps <= 8 else 3) + 4 * config.n
        sums += 6 * max(0, config.m * config.n - 8) - 16 if steps <= 8 else 0
    return 40 + table + weights + (sums + held + 8 * config.m if config.ahead else max(sums + 8 * config.m, held))


def _addresses(problem: Problem, config: Config) -> int:
    """Registers for addresses, where a warp has many tiles of pixels, and a table has many taps of an fp32 image (6x6, 3 channels)."""
    scattered = problem.layout.planes and problem.layout.columns != 8 and problem.layout.steps > 6
    return 3 * config.m if scattered and KINDS[problem.image][1] == 4 and config.m > 4 else 0


def recipe(problem: Problem, config: Config, arch: str = "sm_90a") -> Recipe:
    """What to compile. Sizes of images and tensors are parameters."""
    return recipe_with(problem, config, "conv_stem.cu", arch, {})


def recipe_with(problem: Problem, config: Config, template: str, arch: str, more: Mapping[str, int]) -> Recipe:
    """The recipe of a template on ``stem.cuh``, with ``more`` constants."""
    s, layout = problem.source, problem.layout
    rows, columns = halo(problem, config)
    pitch, (kind, item) = _pitch(problem, config), KINDS[problem.image]
    together = 1 if layout.planes else layout.together
    first = (problem.phase - layout.lead if layout.planes else problem.phase * together) * problem.item // 4
    defines = {
        "CHANNELS": s.channels, "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1], "TILE_H": config.tile_h, "TILE_W": config.tile_w,
        "WARPS_M": config.warps[0], "WARPS_N": config.warps[1], "M_TILES": config.m, "N_TILES": config.n,
        "MIN_BLOCKS": blocks_by_registers(problem, config), "AHEAD": int(config.ahead), "PLANES": int(layout.planes),
        "TOGETHER": together, "HALO_H": rows, "ROW_CHUNKS": columns // problem.vector, "VEC": problem.vector, "PITCH": pitch,
        "ROW_STEP": pitch * together, "COLUMN_STEP": together, "FIRST_WORD": first, "K_STEPS": layout.steps,
        "KEPT_REGISTERS": KEPT_REGISTERS, "IMAGE_KIND": kind, "IMAGE_ITEM": item, "NORMALIZE": int(problem.normalize),
        "HAS_RESIDUAL": int(problem.residual), "FACTOR_KIND": KINDS[problem.dtype][0], "FACTOR_ITEM": problem.item,
        "PRODUCTS": 3 if problem.dtype == "float32" else 1,
        "BUFFERED": int(buffered(problem, config)), "IMAGE_BYTES": _image_bytes(problem, config),
        "FINAL_RELU": int(problem.item == 2 and problem.epilogue[-1] == ("relu",)), **({} if s.depth is None else {"FRAMES": s.depth.taps}),
        **more,
    }  # fmt: skip
    # The accumulators start from the bias, and the rounding of results applies a final ReLU.
    stages = problem.epilogue[1 : -1 if defines["FINAL_RELU"] else None]
    exact = problem.dtype == "float32"
    finish = render.paired_epilogue(stages) if problem.item == 2 else render.epilogue(stages, exact=exact)
    text = "\n".join([render.constants(defines), _table(_words(problem, rows, pitch)), finish, ""])
    return Recipe(template, arch, {"generated.cuh": text}, template_options(problem.dtype, fast=not exact))


def _table(words: Sequence[int]) -> str:
    """C++ of ``word_offset(k, t)``: the offset of word t of half K step k, minus t. It is a constant if the four words
    are neighbors."""
    lines = ["DEVICE int word_offset(int k, int t) {", "    switch (k) {"]
    for k in range(0, len(words), 4):
        a, b, c, d = (w - t for t, w in enumerate(words[k : k + 4]))
        text = str(a) if a == b == c == d else f"t == 0 ? {a} : t == 1 ? {b} : t == 2 ? {c} : {d}"
        lines.append(f"    case {k // 4}: return {text};")
    return "\n".join([*lines, "    }", "    return 0;", "}"])


def pack_weights(problem: Problem, weight: Array) -> Array:
    """OIHW weights -> ``[channels, K]`` in the kernel's K order, padded with zeros. Keeps the dtype."""
    o, c, kh, kw = weight.shape
    layout, s = problem.layout, problem.source
    if (c, kh, kw) != (s.channels, *s.kernel) or o > problem.channels:
        raise InternalError("the weights are of another convolution")
    packed = np.zeros((problem.channels, layout.steps * layout.each), weight.dtype)
    part = packed[:o, : layout.depth]
    if layout.planes:
        order = (0, 2, 1, 3) if layout.by_rows else (0, 1, 2, 3)
        taps = part.reshape(o, *((kh, c) if layout.by_rows else (c, kh)), layout.columns).transpose(order)
        taps[..., layout.lead : layout.lead + kw] = weight
    else:
        part.reshape(o, kh, kw, layout.together)[..., :c] = weight.transpose(0, 2, 3, 1)
    return packed


def weight_view(problem: Problem) -> tuple[tuple[int, ...], int]:
    """Strides and offset of the OIHW weights (OIDHW for a volume) in the packed ones."""
    layout, row, depth = problem.layout, problem.layout.steps * problem.layout.each, problem.source.depth
    if layout.by_rows:
        channel, pixel, lead = layout.columns, (layout.together * layout.columns, 1), layout.lead
    elif layout.planes:
        channel, pixel, lead = layout.rows * layout.columns, (layout.columns, 1), layout.lead
    else:
        channel, pixel, lead = 1, (layout.columns * layout.together, layout.together), 0
    tap = () if depth is None else (problem.source.channels // depth.taps * channel,)
    return (row, channel, *tap, *pixel), lead


def tiles(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles along columns and along rows of an image."""
    out_h, out_w = problem.out_size
    return -(-out_w // config.tile_w), -(-out_h // config.tile_h)


def resident(problem: Problem, config: Config, device: GpuFacts) -> int:
    """Blocks per multiprocessor, limited by shared memory and registers."""
    shared = device.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(shared, blocks_by_registers(problem, config)))


def blocks_by_registers(problem: Problem, config: Config) -> int:
    """Blocks per multiprocessor that registers allow, which are allocated to warps in fours. The compiler gets this number."""
    each = -(-min(255, registers(problem, config) + 6) // 8) * 8
    return max(1, min(65536 // (32 * each) // 4 * 4 // math.prod(config.warps), 1536 // config.threads, 8))


def launch(
    problem: Problem, config: Config, gpu: GpuFacts, pitch: int, residual_pitch: int = 0,
    normalization: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Launch:  # fmt: skip
    """The launch. Operands: ``image``, ``weights`` (packed), ``bias`` (fp32 [channels]), ``residual``, ``output``; ``pitch``:
    elements from pixel to pixel of the result; ``normalization``: factors and shifts of the channels (empty: 1, 0)."""
    across, down = tiles(problem, config)
    count = problem.batch * across * down
    blocks = min(count, gpu.multiprocessors * resident(problem, config, gpu))
    steps = (blocks % across, blocks // across % down, blocks // across // down)
    made = parameters(problem, (across, down, problem.batch), steps, pitch, residual_pitch, normalization)
    grid, shared = (blocks, -(-problem.channels // (config.columns * 8)), 1), shared_bytes(problem, config)
    return made.launch(recipe(problem, config, gpu.arch), "conv_stem", grid, config.threads, shared=shared)


def parameters(
    problem: Problem, tiles_: tuple[int, int, int], steps: tuple[int, int, int], pitch: int, residual_pitch: int,
    normalization: tuple[Sequence[float], Sequence[float]], skipped_rows: int = 0,
) -> Parameters:  # fmt: skip
    """The parameter block of ``stem.cuh``. ``tiles_``: along columns, rows and images; ``steps``: from a block's tile
    to its next one; ``skipped_rows``: rows of the image before the first window of the first tile."""
    s, (out_h, out_w), (factors, shifts) = problem.source, problem.out_size, normalization
    residual = "residual" if problem.residual else None
    made = Parameters().pointer("image", "weights", residual, "bias", "output").i64(problem.strides[0])
    made.i32(*problem.strides[1:], s.height, s.width, out_h, out_w, *tiles_, *steps)
    made.i32(skipped_rows - s.padding[0], -(s.padding[1] + problem.phase), problem.channels, pitch, residual_pitch)
    made.f32(*[*factors, *[1.0] * CHANNELS][:CHANNELS], *[*shifts, *[0.0] * CHANNELS][:CHANNELS])
    if s.depth is not None:
        d = s.depth
        made.i32(problem.frame, d.size, d.out, d.stride, d.first, d.dilation)
    return made
