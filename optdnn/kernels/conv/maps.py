"""Channels-last tensors for TMA: which ones it can read and write, and the tensor maps of the Hopper convolution kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.kernels.builder import (
    CHANNEL_ALIGN,
    NOWHERE,
    Builder,
    TensorView,
    channels_last,
    map_dtype,
    physical_shape,
    up,
)
from optdnn.kernels.conv import implicit_gemm as hopper
from optdnn.kernels.conv import patch_kernel as patch
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.launch import tensor_map
from optdnn.runtime.cuda.launches.plan import TensorMap
from optdnn.types import FP32, Array

Geometry = tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int]]
"""Strides, pads (top, left, bottom, right), dilations."""
POINTWISE: Geometry = ((1, 1), (0, 0, 0, 0), (1, 1))
"""The geometry of a product of rows with a matrix: a convolution of 1 x 1 images."""


@dataclass(frozen=True)
class Feed:
    """One source of the implicit GEMM: a channels-last tensor (logical NCHW), its OIHW weights, and how they are combined.

    With ``depth``, tensor and weights have three axes (NCDHW, OIDHW); strides, pads and dilations concern the last two.
    """

    x: TensorView
    weight: Array
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    dilations: tuple[int, int]
    overlapped: conv_problem.Source | None = None
    """The source in which neighboring pixels are read as one (see :func:`optdnn.kernels.quantized.stem.overlapped`), or None."""
    bands: int = 1
    """Equal parts of the output channels, each of which reads its own part of the input channels (see ``Problem.bands``)."""
    together: int = 1
    """Neighboring groups of the weights that form a band. :meth:`made` adds the zeros between them."""
    depth: conv_problem.Depth | None = None

    def made(self, b: Builder) -> Feed:
        """The feed with its tensor made and its weights in bands."""
        weight = self.weight
        if self.together > 1:
            weight = conv_problem.banded(weight, self.bands * self.together, self.together)
        return replace(self, x=b.made(self.x), weight=weight, together=1)

    @property
    def geometry(self) -> Geometry:
        """How the weights walk over the tensor."""
        return self.strides, self.pads, self.dilations

    @property
    def seen(self) -> TensorView:
        """The tensor as the weights see it: with overlapping pixels, a pixel has all channels that are read as one."""
        if self.overlapped is None:
            return self.x
        o = self.overlapped
        return self.x.view((self.x.shape[0], o.channels, o.height, o.width), self.x.strides)

    @property
    def source(self) -> conv_problem.Source:
        if self.overlapped is not None:
            return self.overlapped
        c, h, w = self.x.shape[1], *self.x.shape[-2:]
        lanes = up(c // self.bands, aligned(self.x))
        return conv_problem.Source(
            h, w, lanes, self.weight.shape[-2:], self.strides, self.pads, self.dilations, depth=self.depth
        )


def aligned(x: TensorView) -> int:
    """Elements in 16 bytes, TMA's address granularity."""
    return 16 // x.dtype.itemsize


def pitch_of(x: TensorView, unit: int = 0) -> int | None:
    """Elements from a pixel to the next of a channels-last NCHW tensor that TMA can read; None for any other tensor. ``unit``:
    pixels begin at multiples of this many elements (0: of 16 bytes)."""
    n, c, h, w = x.shape
    unit = unit or aligned(x)
    pitch = (
        x.strides[3] if w > 1 else x.strides[2] if h > 1 else x.strides[0] if n > 1 else up(c, max(unit, CHANNEL_ALIGN))
    )
    pitch = max(pitch, c)
    fits = pitch % unit == 0 and x.offset % unit == 0 and x.is_like(channels_last(x.shape, pitch))
    return pitch if fits else None


def image_places(x: TensorView, unit: int) -> tuple[int, int] | None:
    """Elements from a pixel to the next, and from an image to the next, of channels-last NCHW images, each as of :func:`pitch_of`.
    There may be gaps between images. None for any other tensor."""
    n, c, h, w = x.shape
    pitch = pitch_of(x.view((1, c, h, w), x.strides), unit)
    if pitch is None:
        return None
    apart = x.strides[0] if n > 1 else h * w * pitch
    fits = apart % (unit or aligned(x)) == 0 and apart >= (h * w - 1) * pitch + c
    return (pitch, apart) if fits else None


def readable_volume(x: TensorView) -> bool:
    """Whether TMA can read a volume (logical NCDHW) in place: channels innermost, all other strides multiples of 16 bytes."""
    unit = aligned(x)
    return (
        (x.shape[1] == 1 or x.strides[1] == 1)
        and x.offset % unit == 0
        and not any(s % unit or s <= 0 for s in _outer(x))
    )


def _outer(x: TensorView) -> tuple[int, ...]:
    """Strides of a volume's width, height, depth and batch; axes of size 1 get any positive stride."""
    least, found = up(x.shape[1], aligned(x)), []
    for axis in (4, 3, 2, 0):
        step = x.strides[axis] if x.shape[axis] > 1 else least
        found.append(step)
        least = max(least, step * x.shape[axis])
    return tuple(found)


def _volume_shape(x: TensorView) -> tuple[int, ...]:
    n, c, d, h, w = x.shape
    return c, w, h, d, n


def elements_around(b: Builder, x: TensorView) -> int:
    """Elements of the tensor's buffer, or of the buffer that it will get for itself."""
    shape = physical_shape(x.shape, x.strides) if x.buffer == NOWHERE else b.buffers[x.buffer].shape
    return math.prod(n for n in shape or () if isinstance(n, int))


def storable(b: Builder, x: TensorView) -> bool:
    """Whether a launch can write this channels-last NCHW tensor, or read it as a residual.

    If pixels follow one another without gaps, the launch touches all channels up to the next multiple of CHANNEL_ALIGN, in the
    last pixel too. With gaps, fp32, which goes to and from registers, needs whole multiples: it would overwrite what follows.
    """
    pitch, wide = pitch_of(x), up(x.shape[1], CHANNEL_ALIGN)
    if pitch is None or (x.dtype == FP32 and pitch != wide and x.shape[1] != wide):
        return False
    if pitch != wide or x.shape[1] == wide:
        return True
    pixels, elements = x.size // x.shape[1], elements_around(b, x)
    fits = x.offset + (pixels - 1) * pitch + wide <= elements
    return fits and not _is_followed(b, x, pitch if pixels > 1 else elements)


def _is_followed(b: Builder, x: TensorView, pitch: int) -> bool:
    """Whether the channels of another part of a concatenation follow those of ``x``. ``pitch``: elements from a pixel to the next."""
    end = x.offset % pitch + x.shape[1]
    for whole in b.reserved.values():
        if whole.buffer == x.buffer and x.buffer != NOWHERE:
            channels = max((n for n, s in zip(whole.shape, whole.strides, strict=True) if s == 1), default=1)
            if whole.offset % pitch < end < whole.offset % pitch + channels:
                return True
    return False


def storable_whole(b: Builder, x: TensorView) -> bool:
    """Whether a launch can write 8 channels at a time: their number is a multiple of 8, or the padding belongs to the tensor."""
    return storable(b, x) and (x.shape[1] % 8 == 0 or pitch_of(x) == up(x.shape[1], 8))


def _weights_map(problem: conv_problem.Problem, weights: TensorView, rows: int) -> TensorMap[str]:
    depth, item = problem.k_steps * problem.block, weights.dtype.itemsize
    shape, strides = (depth, weights.shape[0]), (depth * item,)
    return tensor_map("weights", map_dtype(weights.dtype), shape, strides, (problem.block, rows), problem.block * item)


def gemm_maps(
    problem: conv_problem.Problem, config: hopper.Config | PartsConfig, feeds: Sequence[Feed], weights: TensorView
) -> list[TensorMap[str]]:
    """Tensor maps of the implicit GEMM's weights and two sources: operands ``weights``, ``pixels0`` and ``pixels1``."""
    sharers = config.share[1] if isinstance(config, hopper.Config) else 1
    maps = [_weights_map(problem, weights, config.tile[0] // sharers)]
    maps += [_source_map(f"pixels{i}", f, problem, config.box) for i, f in enumerate(feeds)]
    return maps if len(maps) == 3 else [*maps, maps[1]]


def patch_maps(
    problem: conv_problem.Problem, config: patch.PatchConfig, feed: Feed, weights: TensorView
) -> list[TensorMap[str]]:
    """Tensor maps of the patch kernel's weights and two sources, which are the same image."""
    height, width = patch.patch_size(problem, config)
    box = (problem.block, width, height)
    if feed.overlapped is not None:
        n, _, h, _ = feed.x.shape
        pitch, row = feed.overlapped.pitch * problem.item, feed.x.strides[2] * problem.item
        shape = (feed.overlapped.channels, feed.overlapped.width, h, n)
        source = tensor_map("pixels0", problem.dtype, shape, (pitch, row, h * row), (*box, 1), problem.span)
    elif feed.depth is not None:
        steps = tuple(s * problem.item for s in _outer(feed.x))
        source = tensor_map("pixels0", problem.dtype, _volume_shape(feed.x), steps, (*box, 1, 1), problem.span)
    else:
        at = pitch_of(feed.x)
        assert at is not None
        source = replace(image_map("pixels0", feed.x, feed.x.shape[1], at, box, problem.span), dtype=problem.dtype)
    return [_weights_map(problem, weights, config.wgm * 64), source, source]


def rows_map(
    name: str, x: TensorView, pitch: int, channels: int, problem: conv_problem.Problem, config: hopper.Config
) -> TensorMap[str]:
    """Tensor map of a result (or residual) as rows of channels, one per pixel."""
    shape, strides = (channels, problem.pixels), (pitch * x.dtype.itemsize,)
    return tensor_map(name, map_dtype(x.dtype), shape, strides, (64, config.bn), problem.out_span)


def image_map(
    name: str, x: TensorView, channels: int, pitch: int, box: tuple[int, int, int], span: int
) -> TensorMap[str]:
    """Tensor map of a channels-last feature map."""
    n, _, h, w = x.shape
    step = pitch * x.dtype.itemsize
    shape, strides = (channels, w, h, n), (step, w * step, h * w * step)
    return tensor_map(name, map_dtype(x.dtype), shape, strides, (*box, 1), span)


def _source_map(name: str, feed: Feed, problem: conv_problem.Problem, pixels: int) -> TensorMap[str]:
    """Tensor map of a source of the implicit GEMM: rows of a matrix, or im2col. TMA loads ``pixels`` at a time, and rounds tf32."""
    if feed.depth is not None:
        return _volume_map(name, feed, feed.depth, problem, pixels)
    n, c, h, w = feed.x.shape
    pitch = pitch_of(feed.x)
    assert pitch is not None
    step, span, dtype = pitch * problem.item, problem.span, problem.dtype
    box = (problem.block, pixels)
    if feed.source.mode == conv_problem.ROWS:
        return tensor_map(name, dtype, (c, n * h * w), (step,), box, span)
    (left, top), (right, bottom) = _corners(feed)
    strides, steps = (step, w * step, h * w * step), (1, feed.strides[1], feed.strides[0], 1)
    corners = (left, top, right, bottom)
    return tensor_map(name, dtype, (c, w, h, n), strides, box, span, corners=corners, steps=steps)


def _corners(feed: Feed) -> tuple[tuple[int, int], tuple[int, int]]:
    """The corners of the box over which the first tap walks: (left, top) and (right, bottom), relative to the image's
    corners."""
    top, left, bottom, right = feed.pads
    reach = [(k - 1) * d for k, d in zip(feed.weight.shape[-2:], feed.dilations, strict=True)]
    return (-left, -top), (right - reach[1], bottom - reach[0])


def _volume_map(
    name: str, feed: Feed, depth: conv_problem.Depth, problem: conv_problem.Problem, pixels: int
) -> TensorMap[str]:
    """Tensor map of a volume in im2col mode."""
    lower, upper = _corners(feed)
    behind = depth.first + (depth.out - 1) * depth.stride + 1 - depth.size
    return tensor_map(
        name, problem.dtype, _volume_shape(feed.x), tuple(s * problem.item for s in _outer(feed.x)),
        (problem.block, pixels), problem.span, corners=(*lower, depth.first, *upper, behind),
        steps=(1, feed.strides[1], feed.strides[0], depth.stride, 1),
    )  # fmt: skip


def frames_of(feeds: Sequence[Feed]) -> int:
    """Frames of the result of volumes."""
    return next(f.depth.out for f in feeds if f.depth is not None)


def volume_view(x: TensorView, frames: int) -> TensorView:
    """Images NCHW as NCDHW, with ``frames`` images per volume."""
    (n, c, h, w), (sn, sc, sh, sw) = x.shape, x.strides
    return x.view((n // frames, c, frames, h, w), (frames * sn, sc, sn, sh, sw))


def over_depth(
    views: Sequence[tuple[TensorView, TensorView]], feeds: Sequence[Feed]
) -> list[tuple[TensorView, TensorView]]:
    """Tensors and weights of the sources with three spatial axes. In a source of images, each image is a frame."""
    frames, made = frames_of(feeds), []
    for (x, w), feed in zip(views, feeds, strict=True):
        if feed.depth is None:
            (o, i, r, s), (so, si, sr, ss) = w.shape, w.strides
            x, w = volume_view(x, frames), w.view((o, i, 1, r, s), (so, si, 0, sr, ss))
        made.append((x, w))
    return made


def depth_geometry(
    depth: conv_problem.Depth | None, geometry: Geometry
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Strides, pads and dilations over three axes. ``depth`` None: the source has images, each of which is a frame."""
    strides, (top, left, bottom, right), dilations = geometry
    if depth is None:
        return (1, *strides), (0, top, left, 0, bottom, right), (1, *dilations)
    begin, end = depth.pads
    return (depth.stride, *strides), (begin, top, left, end, bottom, right), (depth.dilation, *dilations)


LEAST_CORNER, LARGEST_CORNER, LARGEST_REACH = -16, 15, 31
"""Limits of TMA's im2col mode for tensors of five axes."""


def unfit_volume(feed: Feed) -> str | None:
    """Why TMA cannot walk over a volume, or None."""
    depth = feed.depth
    assert depth is not None
    lower, upper = _corners(feed)
    reach = [(k - 1) * d for k, d in zip(feed.weight.shape[-2:], feed.dilations, strict=True)]
    behind = depth.first + (depth.out - 1) * depth.stride + 1 - depth.size
    corners = (*lower, *upper, depth.first, behind)
    if min(corners) < LEAST_CORNER or max(corners) > LARGEST_CORNER:
        return f"the corners of a volume's box are not within {LEAST_CORNER} to {LARGEST_CORNER} of the volume's own"
    if max(*reach, (depth.taps - 1) * depth.dilation) > LARGEST_REACH:
        return f"taps of a volume lie at most {LARGEST_REACH} pixels apart"
    if depth.dilation < 0 or depth.stride > 8:
        return "TMA walks forwards along depth, in steps of at most 8"
    return None


def weight_views(packed: TensorView, problem: conv_problem.Problem, feeds: Sequence[Feed]) -> list[TensorView]:
    """Views of each source's logical weights in the packed ones: OIHW, or ``[O / 16, 8, 2, I, H, W]`` if rows are permuted."""
    depth, at, views = problem.k_steps * problem.block, 0, []
    for source, feed in zip(problem.sources, feeds, strict=True):
        o, i, *taps, r, s = feed.weight.shape
        lane = up(source.channels, problem.block)
        pixel, frame = lane * (1 if feed.depth is None else feed.depth.all_taps), [lane] * len(taps)
        rows, steps = (
            ((o,), (depth,)) if problem.out_item > 1 else ((up(o, 16) // 16, 8, 2), (16 * depth, depth, 8 * depth))
        )
        views.append(packed.view((*rows, i, *taps, r, s), (*steps, 1, *frame, s * pixel, pixel), at))
        at += math.prod(source.kernel) * pixel
    return views
