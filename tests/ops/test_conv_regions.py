"""Kinds around a convolution that only lowered programs have: shapes and meaning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.region_cases import infer, random, results

from optdnn.errors import ShapeError
from optdnn.ops.base import Call, Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.conv_regions import (
    BlocksToSpaceAttrs,
    ConvBlocksAttrs,
    ConvSqueezeAttrs,
    ConvSumAttrs,
    ExcitationGateAttrs,
    ImageConvAttrs,
    PairedConvAttrs,
    QuantizedBlocksAttrs,
    SeparableConvAttrs,
    SpaceToDepthImageAttrs,
    SqueezeFinishAttrs,
)
from optdnn.ops.fused import plain_attrs
from optdnn.ops.quantized import QuantizedConvAttrs, QuantizedMeanAttrs
from optdnn.ops.table import OPDEFS
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP32, INT8, Array, TensorType

RELU = (Stage("Relu", (~0,)),)
SAME = ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), epilogue=RELU)
POINT = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), epilogue=RELU)


def conv(attrs: ConvAttrs, *operands: Array | None) -> Array:
    return run_kernel("Conv", operands, plain_attrs(OPDEFS["Conv"], attrs))[0]


def test_space_to_depth_image() -> None:
    x = random(2, 3, 5, 6)
    attrs = SpaceToDepthImageAttrs(block=2, lanes=16, factors=(2.0, 3.0, 4.0), shifts=(1.0, 0.0, 0.0))
    (y,) = results("SpaceToDepthImage", attrs, [x])
    for dy, dx, c in ((0, 0, 0), (0, 1, 2), (1, 0, 1)):
        places = y[:, (dy * 2 + dx) * 3 + c]
        wanted = x[:, c, dy::2, dx::2] * np.float32((2, 3, 4)[c]) + np.float32(c == 0)
        assert np.array_equal(places[:, : wanted.shape[1]], wanted)
    assert not y[:, 12:].any()
    assert not y[:, 6:12, 2].any(), "below the image"
    with pytest.raises(ShapeError, match="more than 8 lanes"):
        infer("SpaceToDepthImage", replace(attrs, lanes=8), [x])
    with pytest.raises(ShapeError, match="factors do not fit"):
        infer("SpaceToDepthImage", replace(attrs, factors=(1.0,)), [x])


@pytest.mark.parametrize("zero", [0, 9])
def test_quantized_blocks(zero: int) -> None:
    x = random(1, 3, 4, 4)
    attrs = QuantizedBlocksAttrs(block=2, lanes=16, before=1, width=4, scale=0.05, zero=zero)
    (y,) = results("QuantizedBlocks", attrs, [x])
    steps = np.clip(np.rint(x / np.float32(0.05)), -128 - zero, 127 - zero)
    (blocks,) = run_kernel("SpaceToDepthImage", [steps], {"block": 2, "lanes": 16})
    assert np.array_equal(y[..., 1:3], blocks + zero)
    assert (y[..., [0, 3]] == zero).all()
    (short,) = results("QuantizedBlocks", replace(attrs, width=2), [x])
    assert np.array_equal(short, y[..., :2])


BLOCKS = {"blocks": (2, 2), "crops": (1, 0), "sizes": (5, 6), "channels": 3}


def test_blocks_to_space() -> None:
    """The parts of SpaceToDepthImage are put together again; stages come last."""
    image, added = random(2, 3, 6, 6), random(1, 3, 1, 1)
    (blocks,) = run_kernel("SpaceToDepthImage", [image], {"block": 2, "lanes": 12})
    attrs = BlocksToSpaceAttrs(**BLOCKS, epilogue=(Stage("Add", (~0, 1)),))  # type: ignore[arg-type]
    (y,) = results("BlocksToSpace", attrs, [blocks, added])
    assert np.array_equal(y, image[:, :, 1:, :] + added)
    line = BlocksToSpaceAttrs((1, 2), (0, 1), (5,), 3)
    (blocks,) = run_kernel("SpaceToDepthImage", [image[:, :, :2]], {"block": 2, "lanes": 12})
    (y,) = results("BlocksToSpace", line, [blocks[:, :6]])
    assert np.array_equal(y, image[:, :, 0, 1:]), "one pixel is cut off"
    with pytest.raises(ShapeError, match="the blocks differ"):
        infer("BlocksToSpace", replace(attrs, channels=2), [blocks, added])
    with pytest.raises(ShapeError, match="one or two"):
        infer("BlocksToSpace", replace(attrs, sizes=(1, 2, 3)), [blocks, added])


def test_conv_blocks() -> None:
    x, w, bias = random(2, 4, 3, 3), random(12, 4, 3, 3), random(12)
    attrs = ConvBlocksAttrs((1, 1), (1, 1, 1, 1), (1, 1), epilogue=RELU, **BLOCKS)  # type: ignore[arg-type]
    (y,) = results("ConvBlocks", attrs, [x, w, bias])
    (want,) = run_kernel("BlocksToSpace", [conv(SAME, x, w, bias)], BLOCKS)
    assert np.array_equal(y, want)


def test_conv_sum() -> None:
    x, w, thin, w2, bias = (
        random(1, 4, 6, 6),
        random(8, 4, 3, 3),
        random(1, 2, 12, 12),
        random(8, 2, 1, 1),
        random(1, 8, 1, 1),
    )
    sources = (((1, 1), (1, 1, 1, 1), (1, 1)), ((2, 2), (0, 0, 0, 0), (1, 1)))
    attrs = ConvSumAttrs(sources, (Stage("Add", (~0, 1)), Stage("Relu", (~1,))))
    (y,) = results("ConvSum", attrs, [x, w, thin, w2, bias])
    plain = [ConvAttrs(*source) for source in sources]
    assert np.allclose(y, np.maximum(conv(plain[0], x, w) + conv(plain[1], thin, w2) + bias, 0), atol=1e-5)
    with pytest.raises(ShapeError, match="ConvSum adds"):
        infer("ConvSum", attrs, [x, w, thin[..., :6], w2, bias])
    with pytest.raises(ShapeError, match="sources"):
        infer("ConvSum", replace(attrs, sources=sources[:1]), [x, w, thin, w2, bias])


def test_paired_conv() -> None:
    """tanh(conv(x) + conv(m)) times sigmoid(conv'(x) + conv'(m)), including biases."""
    x, m = random(1, 4, 6, 6), random(1, 2, 6, 6)
    (w, v), (w2, v2), (b, c) = ([random(*dims) for _ in range(2)] for dims in ((8, 4, 3, 3), (8, 2, 1, 1), (8,)))
    sources = (((1, 1), (1, 1, 1, 1), (1, 1)), ((1, 1), (0, 0, 0, 0), (1, 1)))
    attrs = PairedConvAttrs(sources, (Stage("Tanh", (~0,)), Stage("Mul", (~1, 1))), (Stage("Sigmoid", (~0,)),))
    eights = [a.reshape(1, 8, *a.shape[1:]) for a in (w, v, w2, v2)]
    operands = [x, *eights[:2], b, c, m, *eights[2:]]
    (y,) = results("PairedConv", attrs, operands)
    plain = [ConvAttrs(*source) for source in sources]
    one, other = (
        conv(plain[0], x, own) + conv(plain[1], m, more) + bias[:, None, None]
        for own, more, bias in ((w, w2, b), (v, v2, c))
    )
    assert np.allclose(y, np.tanh(one) / (1 + np.exp(-other)), atol=1e-5)
    with pytest.raises(ShapeError, match="PairedConv adds"):
        infer("PairedConv", attrs, [*operands[:5], m[..., :5], *operands[6:]])
    with pytest.raises(ShapeError, match="PairedConv weights"):
        infer("PairedConv", attrs, [x, eights[0], eights[1][..., :2], *operands[3:]])
    with pytest.raises(ShapeError, match="operands"):
        infer("PairedConv", attrs, operands[:5])


def test_image_conv() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 8, 8)).astype(np.uint8)
    w, bias = random(8, 3, 3, 3), random(8)
    attrs = ImageConvAttrs(
        SAME.strides, SAME.pads, SAME.dilations, factors=(0.1, 0.2, 0.3), shifts=(-1.0, 0.0, 1.0), epilogue=RELU
    )
    (y,) = results("ImageConv", attrs, [image, w, bias])
    scaled = (
        image * np.array([0.1, 0.2, 0.3], np.float32)[:, None, None] + np.array([-1, 0, 1], np.float32)[:, None, None]
    )
    assert np.array_equal(y, conv(SAME, scaled.astype(np.float16).astype(np.float32), w, bias))


def test_pooled_conv() -> None:
    x, w, bias = random(1, 4, 7, 6), random(8, 4, 3, 3), random(8)
    (y,) = results("PooledConv", SAME, [x, w, bias])
    pool = {"kernel_shape": (2, 2), "strides": (2, 2), "pads": (0,) * 4, "dilations": (1, 1), "ceil_mode": False}
    assert np.array_equal(y, run_kernel("MaxPool", [conv(SAME, x, w, bias)], pool)[0])
    types = tuple(TensorType(FP32, a.shape) for a in (x, w, bias))
    call = Call("PooledConv", SAME, types, (None,) * 3, 1, None)  # type: ignore[arg-type]
    definition = OPDEFS["PooledConv"]
    assert definition.cost is not None
    flops = definition.cost(call, definition.infer(call)).flops
    assert flops == 2 * 8 * (3 * 3 * 4) * 36, "all four results of each that is stored"


def test_mean_product() -> None:
    x, w, bias = random(2, 4, 5, 5), random(8, 4, 1, 1), random(8)
    (y,) = results("MeanProduct", POINT, [x, w, bias])
    assert np.array_equal(y, conv(POINT, x.mean((2, 3), keepdims=True, dtype=np.float32), w, bias))


def test_separable_conv() -> None:
    x, filters, first_bias, w, bias = random(1, 8, 6, 6), random(8, 1, 3, 3), random(8), random(16, 8, 1, 1), random(16)
    first = replace(SAME, group=8)
    attrs = SeparableConvAttrs(first, POINT, "float16")
    (y,) = results("SeparableConv", attrs, [x, filters, first_bias, w, bias])
    between = conv(first, x, filters, first_bias).astype(np.float16).astype(np.float32)
    assert np.array_equal(y, conv(POINT, between, w, bias))


def test_chained_conv() -> None:
    x, w, first_bias, second, bias = random(2, 4, 6, 5), random(16, 4, 1, 1), random(16), random(8, 16, 1, 1), random(8)
    attrs = SeparableConvAttrs(POINT, POINT, "float16")
    middle, y = results("ChainedConv", attrs, [x, w, first_bias, second, bias], outputs=2)
    want = conv(POINT, x, w, first_bias).astype(np.float16).astype(np.float32)
    assert np.array_equal(middle, want)
    assert np.array_equal(y, conv(POINT, want, second, bias))
    call = Call(
        "ChainedConv",
        attrs,
        tuple(TensorType(FP32, a.shape) for a in (x, w, first_bias, second, bias)),
        (None,) * 5,
        2,
        None,
    )  # type: ignore[arg-type]
    definition = OPDEFS["ChainedConv"]
    assert definition.cost is not None
    assert definition.cost(call, definition.infer(call)).flops == 2 * 60 * (4 * 16 + 16 * 8)


def test_excitation_gate() -> None:
    x, w, first_bias, second, bias = random(2, 5, 8), random(4, 8, 1, 1), random(4), random(16, 4, 1, 1), random(16)
    exact = x.sum(1, dtype=np.float32)[:, :, None, None] / np.float32(42)
    attrs = ExcitationGateAttrs(POINT, POINT, "float16", pixels=42)
    (y,) = results("ExcitationGate", attrs, [x, w, first_bias, second, bias])
    means = exact.astype(np.float16).astype(np.float32)
    between = conv(POINT, means, w, first_bias).astype(np.float16).astype(np.float32)
    assert np.array_equal(y, conv(POINT, between, second, bias))


@pytest.mark.parametrize("tile", [(), (4, 3)])
def test_conv_squeeze(tile: tuple[int, ...]) -> None:
    x, w, bias = random(2, 8, 7, 6), random(8, 1, 3, 3), random(8)
    own = replace(SAME, group=8)
    y, more = results("ConvSqueeze", ConvSqueezeAttrs("Conv", own, tile), [x, w, bias], outputs=2)
    want = conv(own, x, w, bias)
    assert np.array_equal(y, want)
    if tile:
        assert more.shape == (2, 4, 8)
        assert np.allclose(more[:, 1], want[:, :, :4, 3:].sum((2, 3)), atol=1e-4)
        (more,) = results("SqueezeFinish", SqueezeFinishAttrs(42), [more])
    assert np.allclose(more, want.mean((2, 3), keepdims=True), atol=1e-5)


def test_conv_squeeze_of_integers() -> None:
    """Means of 8-bit images, computed from sums of tiles, equal QuantizedMean's to the bit."""
    rng = np.random.default_rng(3)
    x, w = rng.integers(-128, 128, (1, 4, 6, 6)).astype(INT8), rng.integers(-128, 128, (4, 1, 3, 3)).astype(INT8)
    channel = np.stack([np.full(4, 1e-3), np.zeros(4)], 1).astype(np.float32)
    own = QuantizedConvAttrs(pads=(1, 1, 1, 1), group=4, zero=5)
    mean = QuantizedMeanAttrs(factor=0.1, input_zero=5, zero=-3)
    y, sums = results("ConvSqueeze", ConvSqueezeAttrs("QuantizedConv", own, (4, 4), mean), [x, w, channel], outputs=2)
    (means,) = results("SqueezeFinish", SqueezeFinishAttrs(36, mean), [sums])
    (want,) = run_kernel("QuantizedMean", [y], plain_attrs(OPDEFS["QuantizedMean"], mean))
    assert np.array_equal(means, want)
    assert want.any()
    whole, again = results("ConvSqueeze", ConvSqueezeAttrs("QuantizedConv", own, (), mean), [x, w, channel], outputs=2)
    assert np.array_equal(whole, y)
    assert np.array_equal(again, want)


def test_a_wrong_operand_of_the_inner_convolution_is_named() -> None:
    with pytest.raises(ShapeError, match="Conv input has 3 channels"):
        infer("PooledConv", SAME, [random(1, 3, 7, 6), random(8, 4, 3, 3), random(8)])
