"""fold_quantized: results that are stored as floats, and rounded values that several launches read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import agree
from support.quantized_nets import QNet, folded

from optdnn.ir.graph import Graph, Value
from optdnn.ops import requantize
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.quantized import RequantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.unary import FakeQuantizeAttrs
from optdnn.passes.rules import quantized_results
from optdnn.types import FP16, FP32

# ---------------------------------------------------------------- fp32 results


def stored(n: QNet, *, residual: bool = False, width: int = 16, to: Any = FP32) -> Graph:
    """A product whose 16-bit result becomes fp32."""
    channel = np.stack([np.full(width, 0.01), np.zeros(width)], 1).astype(np.float32)
    attrs = RequantizeAttrs((("bias",), *([("add",)] if residual else [])), low=-1e38, high=1e38, output_dtype=FP16)
    operands = [n.input(4, 32, dtype=np.int8), n.const(n.rng.integers(-9, 9, (width, 32)), np.int8), n.const(channel)]
    operands += [n.input(4, width, name="r", dtype=np.float16)] if residual else []
    # the graph needs a quantized tensor for the pass to run
    return n.done(
        n.op("Cast", n.op("QuantizedMatMul", *operands, attrs=attrs), attrs=CastAttrs(to)),
        n.q(n.input(3, 3, name="u"), 0.1),
    )


def test_results_are_stored_as_fp32() -> None:
    graph = stored(QNet())
    made, report = folded(graph)
    assert "wide_result" in {f.rule for f in report.fired}
    assert "Cast" not in made.kinds()
    agree(graph, made, 1e-3)


def test_results_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = folded(stored(QNet(), residual=True))
    assert any("the tensor that it adds is not fp32" in r.reason for r in report.refused)
    _, report = folded(stored(QNet(), width=10))
    assert any("do not begin at multiples of 16 bytes" in r.reason for r in report.refused)
    made, _ = folded(stored(QNet(), to=np.dtype(np.float64)))
    assert made.kinds()["Cast"] == 1
    monkeypatch.setattr(quantized_results, "LAUNCH_BYTES", 100)
    made, report = folded(stored(QNet()))
    assert made.kinds()["Cast"] == 1
    assert any("would take longer than a launch for the Cast" in r.reason for r in report.refused)


# ---------------------------------------------------------------- results that are only dequantized


def heads(
    n: QNet,
    *,
    scales: tuple[float, float] = (0.04, 0.04),
    to: Any = FP16,
    reader: str = "MatMul",
    kept: bool = False,
) -> Graph:
    """Queries and keys: the parts of a quantized product's result, dequantized for a product of both."""
    y = n.q(n.qmatmul(n.fake(n.input(12, 32), 0.03), 64), 0.04, 5)
    parts = n.op("Split", n.op("Reshape", y, n.ints(12, 2, 32)), n.ints(1, 1), attrs=SplitAttrs(1), outputs=2)
    first, second = (
        n.op("Cast", n.dq(n.op("Reshape", part, n.ints(3, 4, 32)), scale, 5), attrs=CastAttrs(to))
        for part, scale in zip(parts, scales, strict=True)
    )
    if reader == "MatMul":
        second = n.op("Transpose", second, attrs=TransposeAttrs((0, 2, 1)))
    return n.done(n.op(reader, first, second), *([y] if kept else []))


def test_a_result_that_is_only_dequantized_is_stored_as_floats() -> None:
    graph = heads(QNet())
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("dequantized_result") == 1
    (product,) = made.of_kind("QuantizedMatMul")
    assert product.outputs[0].type.dtype == FP16
    assert [s[0] for s in product.attrs.stages] == ["bias", "round", "clip", "mul_const"]
    assert made.kinds() == {"Pointwise": 1, "QuantizedMatMul": 1, "Reshape": 3, "Split": 1, "Transpose": 1, "MatMul": 1}
    agree(graph, made, 1e-3)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"scales": (0.04, 0.05)}, "its readers have other scales or zero points"),
        ({"reader": "Mul"}, "a pointwise operator dequantizes it on its way"),
        ({"to": FP32}, ""),
        ({"kept": True}, ""),
    ],
)
def test_results_that_stay_integers(options: dict[str, Any], because: str) -> None:
    graph = heads(QNet(), **options)
    made, report = folded(graph)
    assert made.of_kind("QuantizedMatMul")[0].outputs[0].type.dtype == np.int8
    assert not because or any(because in r.reason for r in report.refused if r.rule == "dequantized_result")
    agree(graph, made, 1e-3)


def test_constants_of_one_more_rounding_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantize, "MAX_CONSTANTS", 2)
    _, report = folded(heads(QNet()))
    assert any("do not hold the constants of one more rounding" in r.reason for r in report.refused)


def test_a_result_with_an_added_tensor_stays() -> None:
    n = QNet()
    x = n.fake(n.input(2, 16, 4, 4), 0.03)
    y = n.q(n.qconv(x, 16, 1, epilogue=(Stage("Add", (-1, 3)),), more=[x]), 0.04, 5)
    half = n.op("Cast", n.dq(y, 0.04, 5), attrs=CastAttrs(FP16))
    _, report = folded(n.done(n.op("MatMul", half, n.input(4, 8, name="w", dtype=np.float16))))
    assert any("the tensor that it adds has 8 bits" in r.reason for r in report.refused)


# ---------------------------------------------------------------- rounded values that stay floats


def scores(
    n: QNet, *, reader: str = "Softmax", scales: tuple[float, float] = (0.1, 0.1), kept: bool = False, to: Any = FP16
) -> Graph:
    """The product of two tensors, rounded to 8 bits, transposed, dequantized, and read."""
    n = QNet(np.float16)
    y = n.op("Relu", n.op("MatMul", n.input(3, 16, 8), n.input(3, 8, 16, name="b")))
    q = n.op("Transpose", n.q(y, scales[0], 5), attrs=TransposeAttrs((0, 2, 1)))
    back = n.op("Cast", n.dq(q, scales[1], 5), attrs=CastAttrs(to))
    return n.done(n.op(reader, back), *([n.op("Softmax", y)] if kept else []))


def test_a_rounded_product_stays_a_float() -> None:
    graph = scores(QNet())
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("fake_quantize") == 1
    assert made.kinds() == {"MatMul": 1, "Pointwise": 1, "Transpose": 1, "Softmax": 1}
    (rounded,) = made.of_kind("Pointwise")
    assert [s.kind for s in rounded.attrs.epilogue][-1] == "FakeQuantize"
    agree(graph, made, 1e-3)


def test_a_product_rounds_in_its_epilogue() -> None:
    n = QNet(np.float16)
    y = n.op("MatMul", n.input(3, 16, 8), n.input(3, 8, 16, name="b"))
    graph = n.done(n.op("Softmax", n.op("Cast", n.dq(n.q(y, 0.1, 5), 0.1, 5), attrs=CastAttrs(FP16))))
    made, _ = folded(graph)
    assert made.kinds() == {"MatMul": 1, "Softmax": 1}
    (product,) = made.of_kind("MatMul")
    assert product.attrs.epilogue == (Stage("FakeQuantize", (-1,), FakeQuantizeAttrs(np.float32(0.1), -133.0, 122.0)),)
    agree(graph, made, 1e-3)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"scales": (0.1, 0.2)}, "its readers have other scales or zero points"),
        ({"to": FP32}, "its readers take another type of floats than it rounds"),
        ({"kept": True}, "other operators read the value before it is rounded"),
    ],
)
def test_rounded_values_that_become_integers(options: dict[str, Any], because: str) -> None:
    graph = scores(QNet(), **options)
    made, report = folded(graph)
    assert because in {r.reason for r in report.refused if r.rule == "fake_quantize"}
    agree(graph, made, 2e-2)


WIDE = np.dtype(np.uint16)


def wide(n: QNet, x: Value) -> Value:
    """Rounded to 16 bits, and back to the type of the network's floats."""
    back = n.dq(n.q(x, 1e-4, 30000, WIDE), 1e-4, 30000)
    return n.op("Cast", back, attrs=CastAttrs(FP16))


def test_values_of_16_bits_stay_floats() -> None:
    """A product of rounded values adds another one and rounds in its epilogue, and a pool of them rounds nothing."""
    n = QNet(np.float16)
    x = wide(n, n.input(2, 16, 8, 8))
    y = wide(n, n.conv(x, 16, 3, pads=1, bias=False))
    y = wide(n, n.op("Add", y, x))
    y = wide(n, n.op("MaxPool", y, attrs=MaxPoolAttrs((2, 2), (2, 2), (0, 0, 0, 0), (1, 1))))
    graph = n.done(y)
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("fake_quantize") == 4
    assert made.kinds() == {"Conv": 1, "MaxPool": 1, "FakeQuantize": 1}
    (conv,) = made.of_kind("Conv")
    assert [s.kind for s in conv.attrs.epilogue] == ["FakeQuantize", "Add", "FakeQuantize"]
    assert conv.attrs.epilogue[0].attrs == FakeQuantizeAttrs(np.float32(1e-4), -30000.0, 35535.0)
    agree(graph, made, 4e-3)


def test_a_norm_of_16_bits_stays_a_float_for_a_pointwise_operator() -> None:
    n = QNet(np.float16)
    graph = n.done(n.op("Relu", wide(n, n.norm(n.input(4, 32)))))
    made, _ = folded(graph)
    (rounded,) = made.of_kind("Pointwise")
    assert [s.kind for s in rounded.attrs.epilogue] == ["FakeQuantize", "Relu"]
    agree(graph, made, 4e-3)


def test_another_grid_after_a_pool_is_rounded_again() -> None:
    n = QNet(np.float16)
    x = wide(n, n.input(2, 16, 8, 8))
    y = n.op("MaxPool", x, attrs=MaxPoolAttrs((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)))
    back = n.op("Cast", n.dq(n.q(y, 2e-4, 30000, WIDE), 2e-4, 30000), attrs=CastAttrs(FP16))
    made, _ = folded(n.done(back))
    assert made.kinds() == {"MaxPool": 1, "FakeQuantize": 2}


def test_a_norm_stores_integers_for_a_pointwise_operator() -> None:
    n = QNet(np.float16)
    y = n.dq(n.q(n.norm(n.input(4, 32)), 0.02), 0.02)
    _, report = folded(n.done(n.op("Relu", n.op("Cast", y, attrs=CastAttrs(FP16)))))
    assert "a pointwise operator dequantizes it on its way" in {r.reason for r in report.refused}


# ---------------------------------------------------------------- activations of rounded results


def gated(n: QNet, *, means: bool = True, rounds: bool = False, added: bool = False, to: Any = FP16) -> Graph:
    """A rounded convolution and its activation, which means and a multiplication read (PyTorch's XNNPACK quantizer)."""
    x = n.fake(n.input(2, 16, 8, 8), 0.03)
    more: dict[str, Any] = {"epilogue": (Stage("Add", (-1, 3)),), "more": [x]} if added else {}
    y = n.op("Cast", n.fake(n.qconv(x, 16, 1, **more), 0.04, 5), attrs=CastAttrs(to))
    y = n.op("HardSwish", y)
    stored = n.q(y, 0.04)
    out = n.op("Mul", n.dq(stored, 0.04), n.const(np.float32(0.5), np.float32))
    mean = n.op("GlobalAveragePool" if means else "Neg", y)
    return n.done(out, mean, *([stored] if rounds else []))


def test_the_activation_of_a_rounded_result_is_stored_as_floats() -> None:
    graph = gated(QNet())
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("activated_result") == 1
    (conv,) = made.of_kind("QuantizedConv")
    assert [s[0] for s in conv.attrs.stages] == ["bias", "round", "clip", "mul_const", "hard_swish"]
    assert conv.outputs[0].type.dtype == FP16
    assert made.kinds() == {"Pointwise": 2, "QuantizedConv": 1, "GlobalAveragePool": 1}
    agree(graph, made, 0.0401)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"means": False}, ""),
        ({"to": FP32}, ""),
        ({"rounds": True}, "the launch of its activation rounds for other operators as well"),
        ({"added": True}, "the tensor that it adds has 8 bits"),
    ],
)
def test_activations_of_integers(options: dict[str, Any], because: str) -> None:
    graph = gated(QNet(), **options)
    made, report = folded(graph)
    assert made.of_kind("QuantizedConv")[0].outputs[0].type.dtype == np.int8
    assert not because or any(because in r.reason for r in report.refused if r.rule == "activated_result")
    agree(graph, made, 0.0401)


# ---------------------------------------------------------------- integers that several launches read


def parts_of_a_gate(n: QNet, *, apart: bool = True) -> Graph:
    """``x * sigmoid(x)``, rounded for a product of floats, and another function of x (``apart``)."""
    x = n.dq(n.input(4, 16, dtype=np.int8), 0.05)
    gate = n.op("Mul", x, n.fake(n.op("Sigmoid", x), 0.01))
    outputs = [n.op("MatMul", n.fake(gate, 0.05), n.random(16, 8))]
    return n.done(*outputs, *([n.op("Softmax", n.op("Tanh", x))] if apart else []))


def test_integers_are_dequantized_by_each_launch_that_reads_them() -> None:
    graph = parts_of_a_gate(QNet())
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("repeated_dequantize") == 1
    readers = [op for op in made.of_kind("Pointwise") if made.type(op.inputs[0]).dtype == np.int8]  # type: ignore[arg-type]
    assert sorted(op.outputs[0].type.dtype.name for op in readers) == ["float32", "float32"]
    assert {"Sigmoid", "Tanh"} <= {s.kind for op in readers for s in op.attrs.epilogue}
    agree(graph, made, 1e-5)


def test_dequantized_integers_may_be_an_output() -> None:
    n = QNet()
    x = n.dq(n.input(4, 16, dtype=np.int8), 0.05)
    gate = n.op("Mul", x, n.op("Mul", n.op("Sigmoid", x), n.op("Mul", x, x)))
    graph = n.done(n.op("Tanh", x), x, n.op("Softmax", x), gate)
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("repeated_dequantize") == 1
    assert len(made.of_kind("Pointwise")) == 3, "the output, and two chains"
    agree(graph, made, 1e-5)


def test_one_chain_reads_integers_once() -> None:
    graph = parts_of_a_gate(QNet(), apart=False)
    made, report = folded(graph)
    assert "repeated_dequantize" not in {f.rule for f in report.fired}
    agree(graph, made, 1e-5)
