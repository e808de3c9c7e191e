"""The problem of the Hopper convolution kernels: its sources (NHWC tensors, and how filters walk over them) and what is
computed from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optdnn.errors import InternalError
from optdnn.ir.activations import keeps_zeros
from optdnn.kernels.conv.row_forms import MOMENT_CHANNELS, MOMENT_ROWS, HeadTurn, RowNorm
from optdnn.kernels.problem import WithEpilogue
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array

ROWS, IM2COL, VOLUME = 0, 1, 2
FILLED = 1.2
"""A volume uses wider blocks of channels if they need at most this many times the products of narrower ones."""
ITEM = {"float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float32": 4, "tfloat32": 4}
"""Bytes of an element; only results can be fp32."""


@dataclass(frozen=True)
class Depth:
    """How a filter of ``taps`` frames walks along the depth of a volume of ``size`` frames.

    Tap ``t`` of frame ``i`` of the result reads frame ``first + t * dilation + i * stride``, or zeros outside of the
    volume; the result has ``out`` frames.
    """

    size: int
    out: int
    taps: int
    stride: int = 1
    first: int = 0
    dilation: int = 1
    together: int = 1
    """Neighboring frames of the result that form one image of a launch. They share a tile of 64 channels; one frame
    alone has few channels and would leave most of the tile idle. The weights of a frame are zero at the taps of the
    other frames."""

    @property
    def images(self) -> int:
        """Images of a launch per volume."""
        return self.out // self.together

    @property
    def all_taps(self) -> int:
        """Frames that the taps of one image read."""
        return self.taps + (self.together - 1) * self.stride

    @property
    def pads(self) -> tuple[int, int]:
        """Frames of zeros before and after the volume."""
        last = self.first + (self.taps - 1) * self.dilation + (self.out - 1) * self.stride
        return -self.first, max(0, last + 1 - self.size)

    @property
    def is_convolution(self) -> bool:
        """Whether the result has exactly the frames of a convolution with these pads."""
        begin, end = self.pads
        reach = (self.taps - 1) * self.dilation
        return begin >= 0 and (self.size + begin + end - reach - 1) // self.stride + 1 == self.out


@dataclass(frozen=True)
class Source:
    """One activation tensor that the convolution reads: NHWC ``height`` x ``width`` x ``channels``, and how the filter
    walks over it.

    ``padding`` is (top, left, bottom, right).
    """

    height: int
    width: int
    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    pitch: int = 0
    """Elements from a pixel to the next; 0: ``channels``. Less than ``channels``: pixels overlap (see :mod:`.quantized`)."""
    depth: Depth | None = None
    """The walk along the depth of a volume, whose frames are images. The images of the problem are the frames of the result."""

    @property
    def mode(self) -> int:
        """How TMA reads the source: ROWS, IM2COL or VOLUME."""
        if self.depth is not None:
            return VOLUME
        pointwise = self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0, 0, 0)
        return ROWS if pointwise else IM2COL

    def output(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self._output

    @cached_property
    def _output(self) -> tuple[int, int]:
        top, left, bottom, right = self.padding
        h = (self.height + top + bottom - (self.kernel[0] - 1) * self.dilation[0] - 1) // self.stride[0] + 1
        w = (self.width + left + right - (self.kernel[1] - 1) * self.dilation[1] - 1) // self.stride[1] + 1
        return h, w

    def patch(self, tile: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that the windows of so many rows and columns of results cover."""
        (high, wide), (down, right), (rows, columns), (apart_h, apart_w) = tile, self.stride, self.kernel, self.dilation
        return (high - 1) * down + (rows - 1) * apart_h + 1, (wide - 1) * right + (columns - 1) * apart_w + 1


class OneSource(WithEpilogue):
    """Base of the problems of kernels with one source and one epilogue."""

    source: Source

    @cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self.source.output()


def banded(weight: Array, groups: int, together: int) -> Array:
    """OIHW weights of a grouped convolution -> those of ``groups / together`` bands: ``[O, together * I, H, W]``, zero between
    groups. Keeps the dtype."""
    channels, inside = weight.shape[0] // groups, weight.shape[1]
    made = np.zeros((weight.shape[0], together * inside, *weight.shape[2:]), weight.dtype)
    for group in range(groups):
        rows = slice(group * channels, (group + 1) * channels)
        at = group % together * inside
        made[rows, at : at + inside] = weight[rows]
    return made


def _frames_read(source: Source, batch: int) -> int:
    """Images of a source that ``batch`` images of the result read."""
    if source.depth is None:
        return batch
    touched = min(source.depth.size, source.depth.out * source.depth.taps)
    return batch // source.depth.images * touched


GATED_ROWS = 8
"""Neighboring rows that belong to one image if each image has factors of its own."""


@dataclass(frozen=True)
class Problem(WithEpilogue):
    """A convolution: ``batch`` images, ``channels`` output channels, one or two sources of equal output size, and the stages of
    its epilogue. Derived values are cached, since thousands of configurations are evaluated for one problem."""

    batch: int
    channels: int
    sources: tuple[Source, ...]
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    out: str = ""
    """Element type of the result; "": ``dtype``."""
    residual_dtype: str = ""
    """Element type of the residual, of the result's size; "": the result's."""
    zero_point: bool = False
    """Whether an integer result has a zero point other than 0."""
    prologue: tuple[render.Stage, ...] = ()
    """Stages on the pixels before they are multiplied (see :func:`.render.prologue`). They run for each tap of a filter."""
    scatter: bool = False
    """Whether channels are blocks of pixels, which the launch scatters into a larger image (``conv_scatter.cuh``)."""
    pooled: bool = False
    """Whether only the maximum of each 2 x 2 pixels is stored (max pooling with stride 2, without padding)."""
    stack: tuple[int, int] | None = None
    """Sizes (inner, outer) of a stack of products. Each product has ``batch`` rows and its own weights, which are a
    computed tensor."""
    across: bool = False
    """Whether a stack's weights are [K, channels] in memory, instead of [channels, K]."""
    one_matrix: bool = False
    """Whether all products of a stack read the same constant matrix of pixels."""
    row_bias: bool = False
    """Whether each row of a product has a bias, from which its accumulators start."""
    row_scale: bool = False
    """Whether int8 sums are multiplied by a scale per row. The weights are then computed by another launch."""
    dynamic: bool = False
    """Whether another launch computes scale and zero point of the integer pixels."""
    edged: bool = False
    """Whether the pixels are padded by a zero point other than 0, from which accumulators start (``conv_edges.cuh``)."""
    beside: tuple[render.Stage, ...] | None = None
    """Stages of every second channel. ``epilogue`` of the channel before it reads their value in place of a residual,
    so that two channels give one result, and a channel counts as half of the result's bytes. None: each channel is a
    result."""
    bands: int = 1
    """Equal parts of the output channels, each of which reads its own part of the input channels. A source's
    ``channels`` count one band."""
    dense: bool = True
    """Whether stores from registers can reach result and residual."""
    pitches: tuple[int, int] = (0, 0)
    """Elements from a pixel to the next of the result and of the residual, for stores from registers; 0: ``channels``."""
    image_rows: int = 0
    """Rows of an image, which has a computed factor per channel (the stage ``image_scale``); 0: there are no factors."""
    moments: bool = False
    """Whether the launch also writes the moments of each row of the result."""
    moment_rows: int = 1
    """Rows that share moments: 1 or :data:`MOMENT_ROWS`."""
    norm: RowNorm | None = None
    """The norm of the rows that the product reads."""
    residual_norm: RowNorm | None = None
    """The norm of the residual's rows. The launch reads its scale; its shift is part of the bias."""
    turn: HeadTurn | None = None
    """Rotary position embedding of heads of the result."""
    equalized: bool = False
    """Whether input channels have scales, which bring their weights to one size (:func:`.parts_kernel.input_shifts`)."""
    selective: bool = False
    """Whether channels of fp32 in parts ignore some inputs, however large these are (:func:`.parts_kernel.selective`)."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= 2 or len({source.output() for source in self.sources}) != 1:
            raise InternalError("a convolution has one or two sources with the same output size")
        if self.dtype not in render.WGMMA_KINDS or self.out_dtype not in ITEM:
            raise InternalError(f"no kernel turns {self.dtype} into {self.out_dtype}")
        if any(source.channels * self.item % 16 for source in self.sources) or self.channels * self.out_item % 16:
            raise InternalError("TMA addresses 16 bytes: pad the channels to multiples of 8 (of 8-bit elements: 16)")
        if self.item == 2 and self.out_dtype not in (self.dtype, "float32"):
            raise InternalError(f"no kernel turns {self.dtype} into {self.out_dtype}")
        if self.item == 4 and self.out_dtype != "float32":
            raise InternalError(f"no kernel turns {self.dtype} into {self.out_dtype}")
        if self.stack and (self.item != 2 or self.out_item != 2 or len(self.sources) > 1 or self.out_size != (1, 1)):
            raise InternalError("a stack is of products of 16-bit matrices")
        if self.across and not self.stack:
            raise InternalError("packed weights lie along K")
        if (self.one_matrix or self.row_bias) and not self.stack:
            raise InternalError("only stacks of products have one matrix of rows, or a bias per row")
        if self.row_scale and (self.dtype != "int8" or self.out_item != 2 or not self.rows_alone):
            raise InternalError("only products of int8 with 16-bit results have a scale per row")
        if self.dynamic and (self.dtype not in ("int8", "uint8") or self.row_scale):
            raise InternalError("only 8-bit integers without scales per row have a computed scale")
        if self.edged and (self.dtype not in ("int8", "uint8") or len(self.sources) > 1 or self.volume):
            raise InternalError("only 8-bit integers of one image are padded by a zero point")
        changed = self.stack or self.bands > 1 or self.prologue or self.scatter or self.pooled or self.volume
        if self.beside is not None and (self.item < 2 or ITEM[self.out_dtype] != self.item or changed):
            raise InternalError("only images or rows of floats without other changes have pairs of channels")
        if self.bands > 1 and (self.channels % self.bands or len(self.sources) > 1 or self.stack or self.prologue):
            raise InternalError("bands are equal parts of the channels of one source, without a prologue")
        once = [s.mode for s in self.sources] == [ROWS]
        padded = [s.mode for s in self.sources] == [IM2COL] and keeps_zeros(self.prologue)
        if self.prologue and not (once if self.parts else self.item == 2 and (once or padded)):
            raise InternalError(
                "a prologue needs one source of 16-bit pixels, or rows of fp32, and keeps the zeros of padding"
            )

        own = self.moments or self.residual_norm is not None
        counts = [n for n, on in ((self.channels, own), (self.sources[0].channels, self.norm is not None)) if on]
        rows = self.rows_alone or (self.stack is not None and self.row_norm is None)
        if counts and (not rows or self.item != 2 or (own and self.out_item != 2)):
            raise InternalError("moments need rows of 16-bit values")
        if any(n % MOMENT_CHANNELS for n in counts):
            raise InternalError(f"moments cover {MOMENT_CHANNELS} channels each")
        whole = self.norm if self.norm is not None and self.norm.image else None
        fits = whole is None or (whole.mean and whole.image % MOMENT_ROWS == self.pixels % whole.image == 0)
        if not fits or self.pixels % self.moment_rows:
            raise InternalError(f"moments of images cover {MOMENT_ROWS} rows each")
        if self.norm is not None and self.residual:
            raise InternalError("rows that are normalized after their products take no residual")
        if self.turn is not None and (
            self.turn.refuse() is not None or not self.rows_alone or self.out_item != 2 or self.moments or self.residual
        ):
            raise InternalError("rotated heads need a product of 16-bit rows without a residual")
        whole_images = self.image_rows in (0, self.pixels) or self.image_rows % GATED_ROWS == 0
        plain = self.rows_alone and self.item == self.out_item == 2 and self.row_norm is None and self.beside is None
        if self.image_scale != bool(self.image_rows) or (self.image_scale and not (plain and whole_images)):
            raise InternalError(
                f"factors per image are of 16-bit rows, and of {GATED_ROWS} rows of one image at a time"
            )
        if self.residual_norm is not None and not self.residual:
            raise InternalError("there is no residual to normalize")

    @cached_property
    def rows_alone(self) -> bool:
        """Whether it is a product of rows with one matrix, and nothing else."""
        apart = self.stack or self.bands > 1 or self.prologue or self.scatter or self.pooled
        return [s.mode for s in self.sources] == [ROWS] and not apart

    @cached_property
    def image_scale(self) -> bool:
        """Whether each image has a computed factor per channel."""
        return render.IMAGE_SCALE in self.epilogue

    @property
    def gated(self) -> bool:
        """Whether the prologue reads a factor per image and channel."""
        return any(stage[0] == "gate" for stage in self.prologue)

    @cached_property
    def count(self) -> int:
        """Products of the stack; 1 without a stack."""
        return math.prod(self.stack or (1,))

    @property
    def parts(self) -> bool:
        """Whether fp32 is multiplied in parts of fp16, which is what tensor cores take."""
        return self.dtype == "float32"

    @cached_property
    def helpers(self) -> int:
        """Threads of a block beyond the configuration's: four warps that apply the prologue; or two of the three warps that compute the
        factors of a norm from moments."""
        return 128 if self.prologue and not self.parts else 64 if self.row_norm is not None else 0

    @cached_property
    def row_norm(self) -> RowNorm | None:
        """The norm of the rows that the product reads, or of the residual's rows."""
        return self.norm or self.residual_norm

    @cached_property
    def volume(self) -> bool:
        """Whether a source is a volume."""
        return any(source.depth is not None for source in self.sources)

    @property
    def band_channels(self) -> int:
        """Output channels of a band, which read the same input channels."""
        return self.channels // self.bands

    @cached_property
    def out_dtype(self) -> str:
        """Element type of the result."""
        return self.out or self.dtype

    @cached_property
    def item(self) -> int:
        """Bytes of an operand's element."""
        return ITEM[self.dtype]

    @cached_property
    def out_item(self) -> int:
        """Bytes of the result (and of the residual) per channel."""
        return ITEM[self.out_dtype] // (1 if self.beside is None else 2)

    @property
    def from_registers(self) -> bool:
        """Whether results are always stored from registers: TMA stores only 16-bit and 8-bit results."""
        return ITEM[self.out_dtype] == 4

    @cached_property
    def out_span(self) -> int:
        """Bytes of 64 channels of a result, which is the span of its swizzle (fp32, which TMA does not store, has none)."""
        return 64 * self.out_item if self.out_item < 4 else 0

    @cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.sources[0].output()

    @cached_property
    def pixels(self) -> int:
        """Output pixels over the batch, before pooling; of a stack, those of one product."""
        return self.batch * math.prod(self.out_size)

    @cached_property
    def stored_size(self) -> tuple[int, int]:
        """Height and width of the stored result."""
        h, w = self.out_size
        return (h // 2, w // 2) if self.pooled else (h, w)

    @cached_property
    def block(self) -> int:
        """BK: channels per K step."""
        if self.stack:
            return 128 // self.item
        widest = max(source.channels for source in self.sources) * self.item
        whole = (32 if widest <= 32 and not self.parts else 64 if widest <= 64 else 128) // self.item
        if not self.volume:
            return whole
        # Each tap along depth pads its last block with zeros: 96 channels take 128.
        padded = {b: sum(-(-s.channels // b) * b for s in self.sources) for b in (whole, 64 // self.item) if b <= whole}
        return min(padded, key=lambda b: (padded[b] > FILLED * min(padded.values()), -b))

    @cached_property
    def span(self) -> int:
        """Bytes of a row of a K step: 32, 64 or 128, also the swizzle's span."""
        return self.block * self.item

    @cached_property
    def together(self) -> int:
        """Frames of a volume that form one image of the launch."""
        return max(1 if source.depth is None else source.depth.together for source in self.sources)

    def blocks(self, source: Source) -> int:
        """Blocks of channels of one source; of a volume, over all frames that its taps read."""
        taps = 1 if source.depth is None else source.depth.all_taps
        return taps * -(-source.channels // self.block)

    def steps(self, source: Source) -> int:
        """K steps of one source."""
        return math.prod(source.kernel) * self.blocks(source)

    @cached_property
    def k_steps(self) -> int:
        """K steps over all sources."""
        return sum(self.steps(source) for source in self.sources)

    @cached_property
    def gathered(self) -> float:
        """Fraction of the K steps whose pixels TMA gathers in im2col mode."""
        return sum(self.steps(source) for source in self.sources if source.mode != ROWS) / self.k_steps

    @cached_property
    def flops(self) -> int:
        """Multiply-adds counted as two, without padding."""
        depth = sum(
            math.prod(s.kernel) * s.channels * (1 if s.depth is None else s.depth.all_taps) for s in self.sources
        )
        return 2 * self.count * self.pixels * self.channels * depth

    @cached_property
    def bytes(self) -> int:
        """Least global traffic: each tensor once."""
        read = sum(s.height * s.width * (s.pitch or s.channels) // math.prod(s.stride if s.kernel == (1, 1) else (1, 1))
                   * _frames_read(s, self.batch) for s in self.sources) * self.bands  # fmt: skip
        weights = self.k_steps * self.block * self.channels
        written = self.batch * math.prod(self.stored_size) * self.channels * self.out_item
        written += self.pixels * self.channels * self.out_item if self.residual else 0
        matrices = 1 if self.one_matrix else self.count
        return self.item * (matrices * read + self.count * weights) + self.count * written
