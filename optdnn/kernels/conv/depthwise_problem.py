"""A depthwise convolution as plain data, the tiles of its kernels, and the inputs under a tile.

Images, or the frames of volumes, are NHWC: floats or 8-bit integers. ``out[n, y, x, c] = epilogue(sum over taps of in[n, y*sh - ph + r*dh,
x*sw - pw + s*dw, c] * w[r, s, c])``; or the transposed convolution of floats. Optionally also the mean over all pixels of each image (or
volume) and channel (the squeeze of squeeze-and-excitation), summed in a fixed order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from optdnn.kernels.conv.problem import ITEM, OneSource, Source
from optdnn.runtime.cuda.compile import render

FEW_TAPS = 9
"""Most taps whose weights a thread keeps in registers."""
MAX_PIXELS = 1 << 16
"""Most pixels of an image whose 8-bit values fp32 sums exactly."""


@dataclass(frozen=True)
class Problem(OneSource):
    """``batch`` images of ``source`` (whose ``channels`` are also the output's). ``squeeze``: also write the channel means."""

    batch: int
    source: Source
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    squeeze: bool = False
    out: str = ""
    """Element type of the result; "": ``dtype``."""
    residual_dtype: str = ""
    """Element type of the residual; "": the result's."""
    zero_point: bool = False
    """Whether an 8-bit result has a zero point other than 0."""
    outside: int = 0
    """Value of the padding of 8-bit images: their zero point."""
    pitches: tuple[int, int, int] = (0, 0, 0)
    """Elements from a pixel to the next of the input, of the result and of the residual; 0: their channels."""
    images_apart: tuple[int, int, int] = (0, 0, 0)
    """Elements from an image to the next of the same; 0: images follow one another without gaps."""
    gaps: tuple[int, int, int] = (0, 0, 0)
    """Elements from the end of a volume's last frame to the next volume, of the same. They may be negative: volumes may be interleaved."""
    unit: int = 8
    """4 or 8: pixels of all images begin at multiples of this many elements."""
    relu: bool = False
    """Whether a ReLU is applied to the (float) input before the filter."""
    summed: bool = False
    """Whether the launch that reads a squeeze's means adds up the sums of tiles itself."""
    beside: tuple[render.Stage, ...] | None = None
    """Stages of a second convolution of the same form, whose result ``epilogue`` reads in place of a residual; None:
    there is none."""
    second_places: tuple[int, int] = (0, 0)
    """Elements from a pixel to the next, and from an image to the next, of the second convolution's images; 0: without gaps."""
    grown: tuple[int, int] | None = None
    """Height and width of the result of a transposed convolution; None: the convolution is an ordinary one."""

    band: int = 0
    """Rows of the filter that a thread adds at a time; 0: all."""

    @cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self.grown or self.source.output()

    @property
    def images(self) -> int:
        """Images that the convolution reads. Of volumes, the result may have more frames or fewer."""
        depth = self.source.depth
        return self.batch if depth is None else self.batch // depth.out * depth.size

    @property
    def frames(self) -> int:
        """Frames that a frame of the result reads; 1 if images are not frames of volumes."""
        depth = self.source.depth
        return 1 if depth is None else -(-depth.taps // (depth.stride if self.grown else 1))

    @property
    def unrolled(self) -> tuple[int, int]:
        """Rows and columns of the filter that a thread adds at a time."""
        high, wide = self.source.kernel
        return self.band or high, wide

    @property
    def bands(self) -> int:
        """Bands of rows of the filter."""
        return -(-self.source.kernel[0] // self.unrolled[0])

    @property
    def steps(self) -> int:
        """Steps in which a result is computed: frames, and bands of each."""
        return self.frames * self.bands

    @property
    def averaged(self) -> tuple[int, int]:
        """Images or volumes with means of their own, and images of each."""
        depth = self.source.depth
        return (self.batch, 1) if depth is None else (self.batch // depth.out, depth.out)

    @property
    def taps(self) -> int:
        """Taps of the filter."""
        depth = self.source.depth
        return math.prod(self.source.kernel) * (1 if depth is None else depth.taps)

    @property
    def weights_in_shared(self) -> bool:
        """Whether weights are read from shared memory, not from registers or, those of several steps, from L1."""
        return self.source.depth is None and self.bands == 1 and self.taps > FEW_TAPS

    @property
    def out_dtype(self) -> str:
        """Element type of the result."""
        return self.out or self.dtype

    @property
    def item(self) -> int:
        """Bytes of an element of the input."""
        return ITEM[self.dtype]

    @property
    def out_item(self) -> int:
        """Bytes of an element of the result."""
        return ITEM[self.out_dtype]

    @property
    def channels(self) -> int:
        """Channels of input and output."""
        return self.source.channels

    @property
    def pitch(self) -> tuple[int, int, int]:
        """Elements from a pixel to the next of the input, of the result and of the residual."""
        read, written, added = self.pitches
        return read or self.channels, written or self.channels, added or self.channels

    @property
    def apart(self) -> tuple[int, int, int]:
        """Elements from an image to the next of the same."""
        s, out = self.source, math.prod(self.out_size)
        dense = (n * pitch for n, pitch in zip((s.height * s.width, out, out), self.pitch, strict=True))
        read, written, added = (own or n for own, n in zip(self.images_apart, dense, strict=True))
        return read, written, added

    @property
    def second(self) -> tuple[int, int]:
        """Elements from a pixel to the next, and from an image to the next, of the second convolution's images."""
        pitch, apart = self.second_places
        pitch = pitch or self.channels
        return pitch, apart or self.source.height * self.source.width * pitch

    @cached_property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        s = self.source
        out = math.prod(self.out_size) * self.out_item * (2 if self.residual else 1)
        read = self.images * s.height * s.width * self.item + weight_item(self) * self.taps
        return self.channels * (self.matrices * read + self.batch * out)


@dataclass(frozen=True, order=True)
class Strips:
    """A thread's ``tile_h`` x ``tile_w`` output pixels of ``lanes`` (4 or 8) channels; a block's ``vectors`` (of ``lanes``) x
    ``strips_x`` x ``strips_y`` threads."""

    tile_h: int
    tile_w: int
    vectors: int
    strips_x: int
    strips_y: int
    lanes: int = 8

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block's results."""
        return self.tile_h * self.strips_y, self.tile_w * self.strips_x


@dataclass(frozen=True, order=True)
class Config(Strips):
    """``blocks`` per multiprocessor that registers must allow. ``sharers`` threads share the frames under a filter."""

    blocks: int = 1
    sharers: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.vectors * self.strips_x * self.strips_y * self.sharers

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.tile_h * self.tile_w * self.lanes

    def __str__(self) -> str:
        strips = f"{self.strips_x}x{self.strips_y}" + (f"f{self.sharers}" if self.sharers > 1 else "")
        return f"dw{self.tile_h}x{self.tile_w}l{self.lanes}v{self.vectors}s{strips}b{self.blocks}"


def tiles(problem: Problem, config: Strips) -> tuple[int, int, int]:
    """Slabs of channel vectors, and tiles along columns and rows."""
    (out_h, out_w), (high, wide) = problem.out_size, config.tile
    return -(-problem.channels // config.lanes // config.vectors), -(-out_w // wide), -(-out_h // high)


def met(problem: Problem) -> int:
    """Taps of a step with which a result is computed."""
    strides = problem.source.stride if problem.grown else (1, 1)
    return math.prod(-(-k // stride) for k, stride in zip(problem.unrolled, strides, strict=True))


def reach(problem: Problem, results: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the input that a step reads for so many rows and columns of results: ``Axis`` of ``depthwise_core.cuh``."""
    s = problem.source
    if problem.grown is None:
        first, second = (
            (n - 1) * stride + (k - 1) * dilation + 1
            for n, k, stride, dilation in zip(results, problem.unrolled, s.stride, s.dilation, strict=True)
        )
        return first, second
    axes = zip(results, s.kernel, s.stride, s.padding[:2], strict=True)
    first, second = ((n - 1 + p % stride) // stride - _first(k, stride, p) + 1 for n, k, stride, p in axes)
    return first, second


def _first(kernel: int, stride: int, pad: int) -> int:
    """The first input under a tile at the first result of a transposed convolution, without whole strides of the pads."""
    return -(max(0, kernel - 1 - pad % stride) // stride)


def begins(problem: Problem) -> tuple[int, int]:
    """Rows and columns by which the first tile's input begins before the image."""
    s = problem.source
    if problem.grown is None:
        return s.padding[:2]
    first, second = (
        -(p // stride + _first(k, stride, p)) for k, stride, p in zip(s.kernel, s.stride, s.padding[:2], strict=True)
    )
    return first, second


def no_kernel(problem: Problem) -> str | None:
    """Why neither depthwise kernel has these element types, or None."""
    quantized = problem.dtype in ("int8", "uint8")
    results = ("int8", "uint8", "float16", "bfloat16", "float32") if quantized else (problem.dtype,)
    exact = problem.out_item == 1 and math.prod(problem.out_size) <= MAX_PIXELS
    if (
        problem.out_dtype not in results
        or (quantized and problem.squeeze and not exact)
        or problem.dtype == "float8_e4m3fn"
    ):
        return f"no kernel turns {problem.dtype} into {problem.out_dtype}"
    if problem.beside is not None and (quantized or problem.relu):
        return "pairs of convolutions are for floats without a ReLU before them"
    if problem.source.depth is not None or problem.grown or problem.band:
        if quantized or problem.beside is not None:
            return "volumes, transposed convolutions and filters in bands are of floats, alone"
        if problem.grown and (problem.squeeze or problem.band):
            return "transposed convolutions are without means, and add whole filters at a time"
    return None


def weight_item(problem: Problem) -> int:
    """Bytes of a weight; 8-bit weights are held in 16 bits."""
    return max(2, problem.item)


def squeeze_mode(problem: Problem, config: Strips) -> int:
    """0: no squeeze; 1: partial sums per block, which :func:`launch_squeeze` finishes; 2: one block sees a whole image."""
    if not problem.squeeze or problem.source.depth is not None:
        return int(problem.squeeze)
    return 2 if tiles(problem, config)[1:] == (1, 1) else 1
