"""Images, sequences and volumes as the images that the depthwise kernels read and write."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.problem import Depth
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.types import Array


def image_of(x: TensorView, columns: int = 1) -> TensorView:
    """An image, or a sequence as an image of one column, so that a thread loads each element once for any number of taps. The frames
    of volumes become images, as if volumes followed one another in memory (:func:`gap_of`). ``columns``: columns of the image that
    become channels (:func:`columns_of`)."""
    if len(x.shape) == 3:
        (n, c, length), (sn, sc, step) = x.shape, x.strides
        return x.view((n, c, length, 1), (sn, sc, step, step))
    if len(x.shape) == 5:
        (n, c, d, h, w), (sn, sc, sd, sh, sw) = x.shape, x.strides
        return x.view((n * d, c, h, w), (sd if d > 1 else sn, sc, sh, sw))
    if columns == 1:
        return x
    n, c, h, w = x.shape
    sn, _, sh, sw = x.strides
    return x.view((n, c * w, h, 1), (sn, sw, sh, sh))


def columns_of(b: Builder, op: Op) -> int:
    """Columns of an image that become channels, each with its channel's filter: all of them, or 1 if none does.

    The filter must have one column. In memory, the rows of the image, and of the result's place if it has one, must
    hold the columns of one channel, then those of the next (heads of tokens)."""
    kernel, a, x = b.weights(op).shape[2:], op.attrs, b.source(op.inputs[0])
    if len(kernel) != 2 or kernel[1] != 1 or a.strides[1] != 1 or a.pads[1] or a.pads[3]:
        return 1
    columns, out = x.shape[3], b.place.get(op.value, b.reserved.get(op.value))
    placed = [x] if out is None else [x, out]
    return columns if all((v.strides[1], v.strides[3]) == (columns, 1) for v in placed) else 1


def joined(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Strides of an image whose rows hold the columns of one channel, then those of the next."""
    _, c, h, w = shape
    return h * c * w, w, c * w, 1


def as_launched(x: TensorView, columns: int) -> TensorView:
    """The tensor as the launch's meaning reads or writes it: a volume as it is, others as of :func:`image_of`."""
    return x if len(x.shape) == 5 else image_of(x, columns)


Walked = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Strides, pads and dilations of all spatial axes."""


def walk(a: ConvAttrs | ConvTransposeAttrs) -> Walked:
    """Strides, pads and dilations of the convolution of :func:`as_launched`."""
    if len(a.strides) > 1:
        return a.strides, a.pads, a.dilations
    return (*a.strides, 1), (a.pads[0], 0, a.pads[1], 0), (*a.dilations, 1)


def geometry(a: ConvAttrs) -> tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int]]:
    """Strides, pads and dilations of the convolution of :func:`image_of`; those of the frames of volumes."""
    return of_images(walk(a))


def of_images(found: Walked) -> tuple[tuple[int, int], tuple[int, int, int, int], tuple[int, int]]:
    (sh, sw), pads, (dh, dw) = found[0][-2:], found[1], found[2][-2:]
    (top, left), (bottom, right) = pads[: len(pads) // 2][-2:], pads[-2:]
    return (sh, sw), (top, left, bottom, right), (dh, dw)


def depth_of(x: TensorView, out: TensorView, taps: int, found: Walked) -> Depth | None:
    """How the filter walks along the depth of volumes; None if they are none. The result has the frames of ``out``."""
    if len(x.shape) != 5:
        return None
    (stride, *_), (begin, *_), (dilation, *_) = found
    return Depth(x.shape[2], out.shape[2], taps, stride, -begin, dilation)


def gap_of(x: TensorView | None) -> int:
    """Elements from the end of a volume's last frame to the next volume; 0 for other tensors."""
    if x is None or len(x.shape) != 5 or 1 in (x.shape[0], x.shape[2]):
        return 0
    return x.strides[0] - x.shape[2] * x.strides[2]


def unit_of(*images: TensorView, gaps: Sequence[int] = ()) -> int:
    """8 or 4 if all pixels begin at multiples of this many elements; else 0. ``gaps``: of volumes (:func:`gap_of`)."""
    units = (n for n in (8, 4) if not any(gap % n for gap in gaps))
    return next((n for n in units if all(conv_maps.image_places(x, n) is not None for x in images)), 0)


def misplaced(x: TensorView, out: TensorView, columns: int) -> str | None:
    """Why the kernels cannot read or write a tensor in place, or None. ``columns``: as of :func:`image_of`."""
    for name, tensor in (("input", x), ("result", out)):
        image = image_of(tensor, columns)
        if image.shape[1] > 1 and image.strides[1] != 1:
            return f"its {name} is not channels-last"
        if unit_of(image, gaps=(gap_of(tensor),)) == 0:
            return f"the pixels of its {name} do not begin at multiples of 8 bytes, one after another"
    return None


def read_densely(b: Builder, op: Op, x: TensorView, name: str) -> TensorView:
    """An image as the kernels of 8-bit images read it: in place, or as a copy."""
    strides = channels_last(x.shape, x.shape[1])
    return x if x.is_like(strides) and x.byte_offset % 16 == 0 else copied(b, op, x, name, strides)


def taps_of(weight: Array) -> tuple[int, ...]:
    """Taps along the axes of :func:`as_launched`."""
    taps = weight.shape[2:]
    return taps if len(taps) > 1 else (*taps, 1)
