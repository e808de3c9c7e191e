"""Sliding-window geometry of convolutions and pools, for integers and symbolic dimensions alike.

Shape inference and the kernels share it, so they cannot disagree; the tests compare both with ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.dim import DimLike, bounds, dim_min, floordiv
from optdnn.errors import ShapeError


def span(kernel: DimLike, dilation: int) -> DimLike:
    """Number of input elements between the first and the last tap of a dilated kernel, both included."""
    return (kernel - 1) * dilation + 1


def ceildiv(a: DimLike, b: int) -> DimLike:
    return floordiv(a + (b - 1), b)


def window_count(
    size: DimLike, kernel: DimLike, stride: int, dilation: int, begin: int, end: int, ceil: bool
) -> DimLike:
    """Number of windows over an axis of ``size`` elements padded by ``begin`` and ``end``.

    With ``ceil`` a last partial window counts, too, unless it starts in the end padding (ONNX MaxPool-22).
    Raises ShapeError if not even one window fits.
    """
    room = size + begin + end - span(kernel, dilation)
    whole = floordiv(room, stride) + 1
    count = dim_min(ceildiv(room, stride) + 1, ceildiv(size + begin, stride)) if ceil else whole
    if bounds(count)[1] <= 0 and size != 0:
        raise ShapeError(
            f"a window of {span(kernel, dilation)} elements does not fit into {size} elements"
            f" padded by {begin} and {end}"
        )
    return count if bounds(count)[1] > 0 else 0


def same_pads(size: int, kernel: int, stride: int, dilation: int, upper: bool) -> tuple[int, int]:
    """Padding (begin, end) under SAME_UPPER (the odd element at the end) or SAME_LOWER (at the beginning)."""
    total = max(0, (-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)


def resolve_pads(
    auto_pad: str,
    pads: Sequence[int],
    spatial: Sequence[DimLike],
    kernel: Sequence[DimLike],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...] | None:
    """Explicit pads (begins then ends), or None if ``auto_pad`` depends on a symbolic size."""
    if auto_pad == "NOTSET":
        return tuple(pads)
    each = []
    for size, k, s, d in zip(spatial, kernel, strides, dilations, strict=True):
        if s == 1:
            size = 1  # the padding of stride 1 is the kernel's span minus one for any size
        if not isinstance(size, int) or not isinstance(k, int):
            return None
        each.append(same_pads(size, k, s, d, auto_pad == "SAME_UPPER"))
    return tuple(p for p, _ in each) + tuple(p for _, p in each)


def output_sizes(
    auto_pad: str,
    pads: Sequence[int],
    spatial: Sequence[DimLike],
    kernel: Sequence[DimLike],
    strides: Sequence[int],
    dilations: Sequence[int],
    ceil: bool = False,
) -> tuple[DimLike, ...]:
    """Output size of each spatial axis of a convolution or pool."""
    if auto_pad != "NOTSET":
        return tuple(ceildiv(size, s) for size, s in zip(spatial, strides, strict=True))
    n = len(spatial)
    return tuple(
        window_count(spatial[i], kernel[i], strides[i], dilations[i], pads[i], pads[n + i], ceil) for i in range(n)
    )


def static_window(
    auto_pad: str,
    pads: Sequence[int],
    spatial: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    ceil: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The explicit pads and the output sizes, for plain integers."""
    explicit = resolve_pads(auto_pad, pads, spatial, kernel, strides, dilations)
    assert explicit is not None  # no size is symbolic
    sizes = output_sizes("NOTSET", explicit, spatial, kernel, strides, dilations, ceil)
    return explicit, tuple(d for d in sizes if isinstance(d, int))
