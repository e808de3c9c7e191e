"""Launches of the pooling and layout kernels (``kernels/pool.cu``)."""

from __future__ import annotations

import struct

from optdnn.errors import InternalError
from optdnn.runtime.cuda import render
from optdnn.runtime.cuda.conv_problem import Source, space_to_depth
from optdnn.runtime.cuda.device import Function, Launch
from optdnn.runtime.cuda.nvrtc import KernelCache, Recipe


def recipe(
    dtype: str, arch: str, *, kernel: tuple[int, int] = (3, 3), channels: int = 3, block: int = 2, lanes: int = 16
) -> Recipe:
    """The module of all kernels of this file: ``kernel`` of max_pool; ``channels``, ``block``, ``lanes`` of space_to_depth."""
    defines = {"KERNEL_H": kernel[0], "KERNEL_W": kernel[1], "CHANNELS": channels, "BLOCK": block, "LANES": lanes}
    options = ("--std=c++17", "--use_fast_math", *(("-DDTYPE_BF16",) if dtype == "bfloat16" else ()))
    return Recipe("pool.cu", arch, {"generated.cuh": render.constants(defines) + "\n"}, options)


def max_pool(
    cache: KernelCache, arch: str, dtype: str, nhwc: tuple[int, int, int, int], kernel: tuple[int, int], stride: tuple[int, int],
    padding: tuple[int, int, int, int], source: int, target: int,
) -> Launch:  # fmt: skip
    """Max pooling of an NHWC tensor; padding (top, left, bottom, right) never wins, NaN does. Channels are a multiple of 8."""
    n, h, w, c = nhwc
    if c % 8:
        raise InternalError(f"max_pool: {c} channels are not a multiple of 8")
    out_h = (h + padding[0] + padding[2] - kernel[0]) // stride[0] + 1
    out_w = (w + padding[1] + padding[3] - kernel[1]) // stride[1] + 1
    outside = padding[0] >= kernel[0] or padding[1] >= kernel[1]
    if outside or (out_h - 1) * stride[0] - padding[0] >= h or (out_w - 1) * stride[1] - padding[1] >= w:
        raise InternalError("max_pool: a window lies wholly in the padding")
    params = struct.pack("QQ10i", source, target, n, h, w, c // 8, out_h, out_w, *stride, *padding[:2])
    function = Function(cache.get(recipe(dtype, arch, kernel=kernel)), "max_pool")
    return Launch(function, (-(-n * out_h * out_w * c // 8 // 128), 1, 1), 128, [params], label="max_pool")


def global_average_pool(
    cache: KernelCache, arch: str, dtype: str, nhwc: tuple[int, int, int, int], source: int, target: int
) -> Launch:
    """Mean over height and width: NHWC -> [n, c], fp32 sums in a fixed order. Channels are even."""
    n, h, w, c = nhwc
    if c % 2:
        raise InternalError(f"global_average_pool: {c} channels are not a multiple of 2")
    params = struct.pack("QQiif", source, target, h * w, c // 2, 1.0 / (h * w))
    function = Function(cache.get(recipe(dtype, arch)), "global_average_pool")
    return Launch(function, (-(-c // 64), n, 1), 256, [params], label="global_average_pool")


def image_to_depth(
    cache: KernelCache, arch: str, dtype: str, batch: int, source: Source, image: int, target: int
) -> Launch:
    """16-bit NCHW image -> the NHWC layout of :func:`space_to_depth`'s source."""
    made, block = space_to_depth(source), source.stride[0]
    params = struct.pack("QQ4i", image, target, source.height, source.width, made.height, made.width)
    function = Function(
        cache.get(recipe(dtype, arch, channels=source.channels, block=block, lanes=made.channels)), "space_to_depth"
    )
    return Launch(function, (-(-made.height * made.width // 128), batch, 1), 128, [params], label="space_to_depth")
