"""Launches of the 8-bit pooling and layout kernels (``pool_int8.cu``)."""

from __future__ import annotations

from optdnn.errors import InternalError
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.quantized.stem import overlapped, row_padding
from optdnn.ops.requantize import BOUNDS, QuantParams
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe

MEAN_THREADS = 1024
"""Threads of a block of global_average_pool, as in ``pool_int8.cu``."""


def recipe(
    dtype: str,
    arch: str,
    *,
    kernel: tuple[int, int] = (3, 3),
    channels: int = 3,
    block: int = 2,
    image: str = "float32",
) -> Recipe:
    """The recipe of all kernels of this file. ``kernel``: window of max_pool. ``channels``, ``block`` and ``image`` (element type): of
    pack_image."""
    defines = {
        "KERNEL_H": kernel[0], "KERNEL_W": kernel[1], "UNSIGNED": int(dtype == "uint8"), "CHANNELS": channels, "BLOCK": block,
        "IMAGE_HALF": int(image == "float16"),
    }  # fmt: skip
    return Recipe("pool_int8.cu", arch, {"generated.cuh": render.constants(defines) + "\n"}, ("--std=c++17",))


def max_pool(
    dtype: str, arch: str, nhwc: tuple[int, int, int, int], kernel: tuple[int, int], stride: tuple[int, int],
    padding: tuple[int, int, int, int],
) -> Launch:  # fmt: skip
    """Max pooling of a dense NHWC tensor "input" to "output". Padding (top, left, bottom, right) never wins. The number of channels is a
    multiple of 16."""
    n, h, w, c = nhwc
    out_h = (h + padding[0] + padding[2] - kernel[0]) // stride[0] + 1
    out_w = (w + padding[1] + padding[3] - kernel[1]) // stride[1] + 1
    outside = padding[0] >= kernel[0] or padding[1] >= kernel[1]
    if outside or (out_h - 1) * stride[0] - padding[0] >= h or (out_w - 1) * stride[1] - padding[1] >= w:
        raise InternalError("max_pool: a window lies wholly in the padding")
    parameters = Parameters().pointer("input", "output").i32(n, h, w, c // 16, out_h, out_w, *stride, *padding[:2])
    blocks = -(-n * out_h * out_w * c // 16 // 128)
    return parameters.launch(recipe(dtype, arch, kernel=kernel), "max_pool", blocks, 128)


def global_average_pool(
    dtype: str, arch: str, nhwc: tuple[int, int, int, int], input_zero: int, factor: float, bounds: tuple[float, float], zero: int,
    pitches: tuple[int, int] | None = None,
) -> Launch:  # fmt: skip
    """Mean over height and width: NHWC "input" -> ``[n, c]`` "output". Zero points are subtracted from the sums; the sums are multiplied by
    ``factor``, clipped to ``bounds``, rounded, and ``zero`` is added. The number of channels is a multiple of 4. ``pitches``: bytes from
    a pixel of the input to the next, and from a row of the output to the next (None: ``c``)."""
    n, h, w, c = nhwc
    read, written = pitches or (c, c)
    if c % 4 or read % 4 or written % 4 or min(read, written) < c:
        raise InternalError(
            f"global_average_pool: {c} channels, {read} and {written} bytes apart, are not multiples of 4"
        )
    parameters = (
        Parameters().pointer("input", "output").i32(h * w, c // 4, read // 4, written // 4, -h * w * input_zero)
    )
    parameters.f32(factor, *bounds).i32(zero)
    return parameters.launch(recipe(dtype, arch), "global_average_pool", (-(-c // 128), n, 1), MEAN_THREADS)


def pack_image(batch: int, source: Source, together: int, image: str, target: QuantParams, arch: str) -> Launch:
    """NCHW "input" of element type ``image``, for the strided few-channel ``source`` -> the quantized image that
    ``overlapped(source, together)`` reads."""
    made, (before, _, width) = overlapped(source, together), row_padding(source, together)
    low, high = (bound - target.zero for bound in BOUNDS[target.dtype])
    parameters = Parameters().pointer("input", "output").i32(source.height, source.width, made.height, width, before)
    parameters.f32(target.scale, low, high).i32(target.zero)
    module = recipe(target.dtype, arch, channels=source.channels, block=source.stride[0], image=image)
    return parameters.launch(module, "pack_image", (-(-made.height * width // 128), batch, 1), 128)
