"""Networks for ``python -m benchmarks sanitize`` that no test of a kernel has. ``tests`` must be on the path."""

from __future__ import annotations

from typing import Any

from support.decoder import decoder


def quantized(n: Any) -> Any:
    """8-bit convolutions (a stem, both kernels, depthwise, with a residual), pools, and a product."""
    from optdnn.ops.base import Stage

    x = n.fake(n.qconv(n.fake(n.input(2, 3, 64, 64), 0.03), 32, 7, stride=2, epilogue=(Stage("Relu", (-1,)),)), 0.03)
    x = n.fake(n.pool(x), 0.03)
    y = n.fake(n.qconv(x, 64, 3, epilogue=(Stage("Relu", (-1,)),)), 0.03)
    y = n.fake(n.qconv(n.fake(n.qconv(y, 64, 5, stride=2, group=64), 0.03), 32, 1), 0.03)
    z = n.fake(n.qconv(y, 32, 1, epilogue=(Stage("Add", (-1, 3)), Stage("Relu", (-2,))), more=[y]), 0.04)
    pooled = n.fake(n.op("GlobalAveragePool", z), 0.02)
    return n.qconv(pooled, 16, 1)


def chained_8bit(n: Any) -> Any:
    """Two 1x1 convolutions, the first with a residual; its result has another reader."""
    from optdnn.ops.base import Stage
    from optdnn.ops.index import ConcatAttrs

    x = n.fake(n.qconv(n.fake(n.input(2, 16, 13, 11), 0.03), 160, 3), 0.03)
    y = n.fake(n.qconv(x, 48, 3), 0.03)
    y = n.fake(n.qconv(y, 160, 1, epilogue=(Stage("Add", (-1, 3)), Stage("Relu", (-2,))), more=[x]), 0.04)
    z = n.fake(n.qconv(y, 48, 1), 0.03)
    return n.qconv(n.fake(n.op("Concat", y, z, attrs=ConcatAttrs(1)), 0.04), 16, 3)


def far_strides(n: Any) -> Any:
    """Strides that TMA does not support: the general tensor-core kernel, odd channels, a residual."""
    y = n.conv(n.input(2, 21, 60, 50), 37, 3, strides=9, bias=True)
    return n.op("Relu", n.op("Add", y, n.conv(n.input(2, 16, 60, 50, name="w"), 37, 3, strides=9)))


def far_strides_8bit(n: Any) -> Any:
    """The same on integers, with a zero point, also in groups."""
    x = n.fake(n.qconv(n.fake(n.input(2, 21, 60, 50), 0.03, 3), 36, stride=9), 0.04)
    return n.fake(n.qconv(x, 72, stride=9, group=6), 0.04)


def convolutional(n: Any) -> Any:
    """A stem, both kernels, a split, depthwise by both kernels, groups, a pool, a product."""
    x = n.op("Relu", n.conv(n.input(2, 3, 64, 64), 32, 7, pads=3, strides=2, bias=True))
    x = n.op("Relu", n.conv(n.op("Relu", n.conv(n.max_pool(x, pads=1), 64, bias=True)), 64, group=64, bias=True))
    y = n.conv(n.op("Relu", n.conv(x, 64, 5, pads=2, strides=2, group=64, bias=True)), 512, 1, pads=0)
    y = n.op("Add", n.conv(n.op("Relu", y), 64, bias=True), n.conv(y, 64, 3, group=8))
    return n.gemm(n.op("Flatten", n.op("GlobalAveragePool", y)), 24)


def tiles(n: Any) -> Any:
    """Convolutions of sizes for which the cost model takes different tiles: a split, patches, persistent blocks, a residual."""
    small = n.conv(n.input(1, 512, 7, 7), 64, 3, bias=True)
    wide = n.input(6, 64, 40, 40, name="w")
    y = n.op("Relu", n.op("Add", n.conv(n.op("Relu", n.conv(wide, 128, 1, pads=0)), 64, 3, bias=True), wide))
    down = n.op("Relu", n.conv(y, 128, 3, strides=2))
    up = n.conv_transpose(down, 32, 2, strides=2, bias=True)
    return small, n.op("GlobalAveragePool", up), n.op("GlobalMaxPool", down)


def depthwise(n: Any, batch: int, size: int, kernel: int) -> Any:
    """A squeeze-and-excitation block."""
    x = n.op("Relu", n.conv(n.input(batch, 32, size, size), 64, 1, pads=0, bias=True))
    x = n.op("Relu", n.conv(x, 64, kernel, pads=kernel // 2, group=64, bias=True))
    s = n.op("Sigmoid", n.conv(n.op("Relu", n.conv(n.op("GlobalAveragePool", x), 16, 1, pads=0)), 64, 1, pads=0))
    return n.conv(n.op("Mul", x, s), 24, 1, pads=0, bias=True)


def scalar_tiles(n: Any) -> Any:
    """True fp32: a stem that reads planes, a split over a cluster, odd channels, groups, a residual; a product of odd rows."""
    x = n.op("Relu", n.conv(n.input(2, 3, 30, 34), 24, 7, pads=3, strides=2, bias=True))
    y = n.op("Relu", n.op("Add", n.conv(n.conv(x, 21), 24, 1, pads=0, bias=True), x))
    small = n.conv(n.input(1, 256, 7, 7, name="s"), 64, 3, bias=True)
    return n.conv(y, 48, group=3, dilations=2, pads=2), small, n.gemm(n.op("Flatten", small), 21)


def transposed(n: Any) -> Any:
    """Transposed convolutions: cropped, with gaps between windows, of stride 1, with a residual."""
    x = n.input(2, 16, 9, 7)
    y = n.op("Relu", n.op("Add", n.conv_transpose(x, 24, 4, pads=1, bias=True), n.conv_transpose(x, 24, 2)))
    return n.conv_transpose(y, 3, 3, strides=4), n.conv_transpose(y, 8, 3, pads=1, strides=1)


def stems(n: Any) -> Any:
    """Images in the order of the input: planes of floats with several tiles per block, normalized channels-last bytes, a
    residual."""
    from optdnn.ops.binary import CastAttrs
    from optdnn.ops.shape import TransposeAttrs

    planes = n.op("Relu", n.conv(n.input(48, 3, 64, 64), 64, 7, pads=3, strides=2, bias=True))
    x = n.op("Transpose", n.input(2, 45, 39, 3, name="b", dtype="uint8"), attrs=TransposeAttrs((0, 3, 1, 2)))
    x = n.op("Mul", n.op("Cast", x, attrs=CastAttrs(n.dtype)), n.positive(1, 3, 1, 1))
    x = n.conv(x, 40, 3, pads=1, strides=2, bias=True)
    y = n.conv(n.input(2, 4, 20, 24, name="y"), 24, 3, bias=True)
    y = n.op("Add", y, n.input(2, 24, 20, 24, name="r"))
    return tuple(n.op("GlobalAveragePool", v) for v in (planes, x, y))


def bottlenecks(n: Any) -> Any:
    """1x1 convolutions in one launch, with a residual and the wide result stored; more tiles than multiprocessors."""
    x = n.op("Relu", n.conv(n.input(4, 8, 56, 56), 320, 3, bias=True))
    for _ in range(2):
        y = n.op("Relu", n.conv(x, 64, 1, pads=0, bias=True))
        y = n.op("Relu", n.conv(y, 64, 3, pads=1, bias=True))
        x = n.op("Relu", n.op("Add", n.conv(y, 320, 1, pads=0, bias=True), x))
    return n.conv(x, 8, 3)


def perceptron(n: Any) -> Any:
    """Two products in one launch."""
    x = n.op("Relu", n.input(1000, 96))
    y = n.op("Gelu", n.op("Add", n.op("MatMul", x, n.random(96, 384, scale=0.1)), n.random(384)))
    return n.op("Add", n.op("Add", n.op("MatMul", y, n.random(384, 96, scale=0.05)), n.random(96)), x)


def wide_results(n: Any) -> Any:
    """16-bit products whose results are fp32: of one row, and of small and large tiles; and a norm."""
    from optdnn.ops.norm import LayerNormAttrs

    x = n.op("Relu", n.gemm(n.input(1030, 64), 96))
    few, normed = n.op("Relu", n.input(1, 1024, name="few")), [n.random(96), n.random(96)]
    return (
        *(n.gemm(x, columns) for columns in (104, 4000)),
        n.gemm(few, 1000),
        n.op("LayerNormalization", n.op("Sigmoid", x), *normed, attrs=LayerNormAttrs()),
    )


def stem_and_pool(n: Any) -> Any:
    """A first convolution and its max pool in one launch; bands of an image."""
    return n.max_pool(n.op("Relu", n.conv(n.input(4, 3, 112, 112), 64, 7, pads=3, strides=2, bias=True)), 3, pads=1)


def expanded(n: Any) -> Any:
    """1x1 and depthwise convolutions in one launch, with sums of tiles; persistent blocks."""
    y = n.op("Swish", n.conv(n.op("Relu", n.conv(n.input(4, 8, 112, 112), 16, 3, bias=True)), 96, 1, pads=0, bias=True))
    y = n.op("Swish", n.conv(y, 96, group=96, strides=2, bias=True))
    return n.conv(y, 8, 3), n.op("GlobalAveragePool", y)


def separable(n: Any) -> Any:
    """Depthwise and 1x1 convolutions in one launch: persistent blocks with a residual, and blocks that share K."""
    x = n.conv(n.input(4, 8, 56, 56), 24, 1, pads=0, bias=True)
    y = n.op("Relu", n.conv(x, 48, 1, pads=0, bias=True))
    y = n.conv(n.op("Relu", n.conv(y, 48, group=48, bias=True)), 24, 1, pads=0, bias=True)
    y = n.op("Relu", n.op("Add", y, x))
    z = n.op("Relu", n.conv(n.input(1, 8, 56, 56, name="z"), 144, 1, pads=0, bias=True))
    z = n.conv(n.op("Relu", n.conv(z, 144, group=144, bias=True)), 24, 1, pads=0, bias=True)
    return n.conv(y, 8, 1, pads=0), n.conv(z, 8, 1, pads=0)


def few_rows(n: Any) -> Any:
    """A fully connected layer at batch 1."""
    return n.gemm(n.op("Relu", n.gemm(n.input(1, 1024), 1024)), 1000)


def layers() -> Any:
    """Two layers of a decoder, for one token."""
    from optdnn.importers.onnx import import_model

    return import_model(decoder(heads=16, groups=4, size=64))


def stream_k() -> Any:
    """A 3x3 convolution with a residual, a strided one and a batched product, all by spans of K steps."""
    from kernels.conv import test_stream_k

    return test_stream_k.network()
