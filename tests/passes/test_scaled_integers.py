"""fuse_conv_bn: quantized weights absorb the scales after them. Quantizers of PyTorch leave BatchNormalizations."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.net import Net
from support.quantized_nets import FP8, QNet
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.quant import DequantizeAttrs
from optdnn.passes.fuse_conv_bn import FuseConvBn
from optdnn.passes.support.scaled_integers import ScaledIntegers

FUSE = FuseConvBn()


def normalized(n: Net, y: Value, scale: Any = None) -> Value:
    """A BatchNormalization; ``scale``: its factors (None: positive ones)."""
    c = n.dims(y)[1]
    assert isinstance(c, int)
    return n.op(
        "BatchNormalization",
        y,
        n.positive(c) if scale is None else n.const(scale),
        n.random(c),
        n.random(c),
        n.positive(c),
    )


def weights(
    n: QNet, *shape: int, axis: int = 0, dtype: Any = np.int8, zero: Any = None, low: int = -7, scale: Any = None
) -> Value:
    array = n.rng.integers(low, 8, shape).astype(dtype)
    scale = n.rng.uniform(0.02, 0.05, shape[axis]).astype(np.float32) if scale is None else np.float32(scale)
    more = [] if zero is None else [n.const(zero, dtype)]
    return n.op(
        "DequantizeLinear", n.const(array, dtype), n.const(scale, np.float32), *more, attrs=DequantizeAttrs(axis)
    )


def product(kind: str, **given: Any) -> Graph:
    n = QNet()
    signs = given.pop("signs", None)
    x = n.fake(n.input(*((3, 8) if kind in ("Gemm", "MatMul") else (2, 8, 5, 5))), 0.03)
    if kind == "Conv":
        w = weights(n, 6, 8, 3, 3, **given)
        y = n.op("Conv", x, w, n.random(6), attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1)))
    elif kind == "ConvTranspose":
        y = n.op(
            kind,
            x,
            weights(n, 8, 6, 2, 2, axis=1, **given),
            attrs=ConvTransposeAttrs((2, 2), (0,) * 4, (1, 1), (0, 0), 1),
        )
    elif kind == "Gemm":
        y = n.qgemm(x, 6, **given)
    else:
        y = n.op("MatMul", x, weights(n, 8, 6, axis=1, **given))
    return n.done(n.op("Relu", normalized(n, y, signs)))


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "Gemm", "MatMul"])
def test_factors_go_into_the_scales(kind: str) -> None:
    graph = product(kind)
    made, _ = check_pass(FUSE, graph, changes=1, rules={"conv_bn": 1})
    (before,) = (op for op in made.of_kind("DequantizeLinear") if made.constant_value(op.inputs[0]) is not None)
    (given,) = (op for op in graph.of_kind("DequantizeLinear") if graph.constant_value(op.inputs[0]) is not None)
    np.testing.assert_array_equal(made.constant_value(before.inputs[0]), graph.constant_value(given.inputs[0]))
    assert not made.of_kind("BatchNormalization")


SIGNS = np.array([0.5, -2.0, 0.0, 1.5, -0.25, 1.0], np.float32)


@pytest.mark.parametrize(
    "given", [{}, {"dtype": ml_dtypes.int4}, {"dtype": FP8}, {"scale": 0.03}], ids=["int8", "int4", "fp8", "one scale"]
)
def test_negative_factors_change_the_signs_of_integers(given: dict[str, Any]) -> None:
    made, _ = check_pass(FUSE, product("Conv", signs=SIGNS, **given), changes=1, rules={"conv_bn": 1})
    (before,) = (op for op in made.of_kind("DequantizeLinear") if made.constant_value(op.inputs[0]) is not None)
    assert (made.constant_value(before.inputs[1]) > 0).all()  # type: ignore[operator]


def test_zero_points_stay() -> None:
    graph = product("Conv", signs=np.abs(SIGNS), zero=[1, 2, 3, 0, -1, 5])
    check_pass(FUSE, graph, changes=1, rules={"conv_bn": 1})


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"signs": SIGNS, "zero": [0, 3, 0, 0, 0, 0]}, "its integers cannot change their signs"),
        ({"signs": SIGNS, "dtype": ml_dtypes.int4, "low": -8}, "its integers cannot change their signs"),
        ({"signs": np.full(6, 1e-38, np.float32)}, "its scales would be no positive normal numbers"),
    ],
    ids=["zero point", "smallest integer", "small"],
)
def test_refusals(given: dict[str, Any], because: str) -> None:
    check_refused(FUSE, product("Conv", **given), because=because, rule="conv_bn")


@pytest.mark.parametrize("attrs", [DequantizeAttrs(0), DequantizeAttrs(1, block_size=4)], ids=["other axis", "blocks"])
def test_other_scales_stay(attrs: DequantizeAttrs) -> None:
    n = QNet()
    shape = (8, 2) if attrs.block_size else (8,)
    operands = [n.const(n.rng.integers(-7, 8, (8, 8)), np.int8), n.const(n.rng.uniform(0.02, 0.05, shape), np.float32)]
    w = n.op("DequantizeLinear", *operands, attrs=attrs)
    graph = n.done(normalized(n, n.op("MatMul", n.fake(n.input(3, 8), 0.03), w)))
    check_refused(FUSE, graph, because="are not constant", rule="conv_bn")


def test_computed_zero_points_are_no_constants() -> None:
    n = QNet()
    w = n.op(
        "DequantizeLinear",
        n.const(np.ones((4, 4)), np.int8),
        n.const(0.1),
        n.input(dtype=np.int8, name="zero"),
        attrs=DequantizeAttrs(0),
    )
    graph = n.done(w)
    assert ScaledIntegers.of(graph, w, 0) is None


def test_a_block_of_pytorch_is_one_launch_for_each_convolution() -> None:
    """As NVIDIA's toolkits quantize it: the data of each convolution, and its weights, but not what is between."""
    n = QNet()
    y = n.op("Relu", normalized(n, n.qconv(n.fake(n.input(2, 16, 8, 8), 0.03), 16, bias=False)))
    y = normalized(n, n.qconv(n.fake(y, 0.02), 16, bias=False), np.linspace(-1, 1, 16, dtype=np.float32))
    program = check_simulated(n.done(n.qconv(n.fake(n.op("Relu", y), 0.02), 16)), "fp16")
    assert kinds(program).count("QuantizedConv") == 3
    assert len(program.steps) <= 5
