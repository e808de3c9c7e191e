"""fold_quantized: products of dynamically quantized data, and products of the same data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import agree
from support.quantized_nets import QNet, folded, within

from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.rules import quantized_results
from optdnn.types import UINT8


class RunNet(QNet):
    """Adds dynamically quantized data."""

    def rounded(self, x: Value) -> tuple[Value, Value, Value]:
        scale, zero = self.op("DynamicRange", x, outputs=2)
        return self.op("QuantizeLinear", x, scale, zero, attrs=QuantizeAttrs(UINT8, 0)), scale, zero

    def own(self, x: Value) -> Value:
        """Rounded by its own range, and back."""
        return self.op("DequantizeLinear", *self.rounded(x), attrs=DequantizeAttrs(0))

    @staticmethod
    def bias_relu(relu: bool = True) -> MatMulAttrs:
        """Stages: the addition of operand 2, and a ReLU."""
        more = [Stage("Relu", (-2,))] if relu else []
        return MatMulAttrs(epilogue=(Stage("Add", (-1, 2)), *more))


# ---------------------------------------------------------------- data that are quantized in the run


def test_a_product_reads_the_scale_of_its_data() -> None:
    n = RunNet()
    y = n.op("MatMul", n.own(n.input(3, 20, 64)), n.weights(64, 48, axis=1), n.random(48), attrs=n.bias_relu())
    graph = n.done(y)
    made, report = folded(graph)
    assert made.kinds() == {"DynamicRange": 1, "Pointwise": 1, "QuantizedMatMul": 1}
    (product,) = made.of_kind("QuantizedMatMul")
    (found,) = made.of_kind("DynamicRange")
    assert product.inputs[5:] == (Value(found.id, 0), Value(found.id, 1))
    channel, weights = (made.constant_value(product.inputs[k]) for k in (2, 1))
    assert channel is not None
    assert weights is not None
    np.testing.assert_array_equal(channel[:, 2], weights.astype(np.int64).sum(1))
    assert "quantized_product" in {f.rule for f in report.fired}
    agree(graph, made)


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 1)])
@pytest.mark.parametrize("group", [1, 4])
def test_padding_is_the_zero_point_of_the_run(pads: tuple[int, ...], group: int) -> None:
    n = RunNet()
    w = n.weights(16, 8 // group, 3, 3)
    graph = n.done(n.op("Conv", n.own(n.input(2, 8, 7, 6)), w, attrs=ConvAttrs((1, 1), pads, (1, 1), group)))
    made, _ = folded(graph)
    assert made.kinds().get("Pad", 0) == (1 if any(pads) else 0)
    (product,) = made.of_kind("QuantizedConv")
    assert not any(product.attrs.pads)
    agree(graph, made)


def test_a_zero_point_of_0_needs_no_padding() -> None:
    n = RunNet()
    x = n.op("Relu", n.input(2, 8, 7, 6))
    parameters = [n.op("DynamicRange", x, outputs=2)[0], n.const(np.zeros((), np.uint8), np.uint8)]
    data = n.op(
        "DequantizeLinear",
        n.op("QuantizeLinear", x, *parameters, attrs=QuantizeAttrs(UINT8, 0)),
        *parameters,
        attrs=DequantizeAttrs(0),
    )
    graph = n.done(n.op("Conv", data, n.weights(16, 8, 3, 3), attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))))
    made, _ = folded(graph)
    assert "Pad" not in made.kinds()
    (product,) = made.of_kind("QuantizedConv")
    assert product.attrs.pads == (1, 1, 1, 1)
    agree(graph, made)


def test_convolutions_with_the_same_padding_share_it() -> None:
    n = RunNet()
    x = n.own(n.input(2, 8, 7, 6))
    attrs = ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    made, _ = folded(n.done(*(n.op("Conv", x, n.weights(width, 8, 3, 3), attrs=attrs) for width in (16, 15))))
    assert made.kinds() == {"DynamicRange": 1, "Pad": 1, "Pointwise": 1, "QuantizedConv": 2}


def test_a_data_type_without_a_zero_point() -> None:
    n = RunNet()
    x, scale = n.input(4, 32), n.op("ReduceMax", n.op("Abs", n.input(4, 32, name="s")), attrs=ReduceAttrs(False, False))
    stored = n.op("QuantizeLinear", x, scale, attrs=QuantizeAttrs(np.dtype(np.int8), 0))
    y = n.op("MatMul", n.op("DequantizeLinear", stored, scale, attrs=DequantizeAttrs(0)), n.weights(32, 16, axis=1))
    graph = n.done(y)
    made, _ = folded(graph)
    (product,) = made.of_kind("QuantizedMatMul")
    zero = made.constant_value(product.inputs[6])
    assert zero is not None
    assert zero.dtype == np.int8
    assert not zero.any()
    agree(graph, made)


def test_padding_of_data_that_come_in_as_integers_is_refused() -> None:
    n = RunNet()
    x, zero = n.input(1, 8, 6, 6, dtype=np.uint8), n.input(name="z", dtype=np.uint8)
    data = n.op("DequantizeLinear", x, n.input(name="s"), zero, attrs=DequantizeAttrs(0))
    conv = n.op("Conv", data, n.weights(8, 8, 3, 3), attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1)))
    made, report = folded(n.done(conv))
    assert "QuantizedConv" not in made.kinds()
    assert any("it pads with a computed zero point" in r.reason for r in report.refused)


def test_scales_of_rows_stay() -> None:
    n = RunNet()
    rounded = n.op("QuantizeLinear", n.input(4, 32), n.input(4, name="s"), attrs=QuantizeAttrs(np.dtype(np.int8), 0))
    made, report = folded(n.done(rounded))
    assert made.kinds() == {"QuantizeLinear": 1}
    assert any("several scales or zero points, which are computed" in r.reason for r in report.refused)


def test_two_computed_operands_are_rounded_and_multiplied_as_floats() -> None:
    n = RunNet()
    a, b = n.own(n.input(2, 6, 8)), n.own(n.input(2, 8, 5, name="u"))
    graph = n.done(n.op("MatMul", a, b, attrs=MatMulAttrs()))
    made, report = folded(graph)
    assert made.kinds() == {"DynamicRange": 2, "MatMul": 1, "Pointwise": 2}
    assert any("there is no kernel that multiplies computed integers" in r.reason for r in report.refused)
    agree(graph, made)


# ---------------------------------------------------------------- products of the same data


def siblings(n: RunNet, *widths: int, relu: int = 0) -> Graph:
    x = n.own(n.input(3, 20, 64))
    outs = [
        n.op("MatMul", x, n.weights(64, w, axis=1), n.random(w), attrs=n.bias_relu(k < relu))
        for k, w in enumerate(widths)
    ]
    return n.done(*outs)


def test_products_of_the_same_data_are_one() -> None:
    graph = siblings(RunNet(), 48, 32, 16)
    made, report = folded(graph)
    assert made.kinds() == {"DynamicRange": 1, "Pointwise": 1, "QuantizedMatMul": 1, "Split": 1}
    assert [f.rule for f in report.fired].count("quantized_siblings") == 1
    agree(graph, made)


def test_only_equal_stages_are_joined() -> None:
    made, _ = folded(siblings(RunNet(), 48, 32, 16, relu=1))
    assert made.kinds()["QuantizedMatMul"] == 2


@pytest.mark.parametrize(
    ("widths", "relu", "because"),
    [((48, 32), 1, "has the same stages"), ((48, 30), 0, "would have to be copied")],
)
def test_siblings_that_stay(widths: tuple[int, ...], relu: int, because: str) -> None:
    made, report = folded(siblings(RunNet(), *widths, relu=relu))
    assert made.kinds()["QuantizedMatMul"] == 2
    assert any(because in r.reason for r in report.refused if r.rule == "quantized_siblings")


def test_parts_that_a_concat_joins_stay() -> None:
    n = RunNet()
    x = n.own(n.input(20, 64))
    y = n.op(
        "Concat",
        *(n.op("MatMul", x, n.weights(64, 32, axis=1), attrs=MatMulAttrs()) for _ in range(2)),
        attrs=ConcatAttrs(1),
    )
    made, report = folded(n.done(y))
    assert made.kinds()["QuantizedMatMul"] == 2
    assert any("a Concat joins the results" in r.reason for r in report.refused)


def test_siblings_that_add_tensors_stay() -> None:
    n = RunNet()
    x = n.own(n.input(20, 64))
    outs = [
        n.op("MatMul", x, n.weights(64, 32, axis=1), n.input(20, 32, name=f"r{k}"), attrs=n.bias_relu(False))
        for k in range(2)
    ]
    made, report = folded(n.done(*outs))
    assert made.kinds()["QuantizedMatMul"] == 2
    assert any("one of the products adds a tensor of its own" in r.reason for r in report.refused)


def branches(*, scales: tuple[float, float] = (0.02, 0.03), activation: str = "Relu", **options: Any) -> Graph:
    """Two rounded convolutions of the same image."""
    n = QNet()
    x = n.fake(n.input(2, 16, 7, 6), 0.03)
    outs = []
    for k, scale in enumerate(scales):
        stages = (Stage(activation, (-1,)),) if activation else ()
        width, kernel = options.get("widths", (32, 16))[k], options.get("kernels", (3, 3))[k]
        y = n.qconv(x, width, kernel, group=options.get("group", 1), epilogue=stages)
        outs.append(n.q(y, scale, *options.get("zeros", (None, None))[k : k + 1]))
    return n.done(*outs)


@pytest.mark.parametrize("scales", [(0.02, 0.03), (0.02, 0.02)])
@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", ""])
def test_convolutions_of_the_same_image_are_one(scales: tuple[float, float], activation: str) -> None:
    """Each channel gets its own last factor, if the scales of the results differ."""
    graph = branches(scales=scales, activation=activation)
    made, _ = folded(graph)
    (conv,) = made.of_kind("QuantizedConv")
    assert made.type(conv.value).static_shape == (2, 48, 7, 6)
    own = activation == "Sigmoid" and len(set(scales)) > 1
    assert (("channel_mul",) in conv.attrs.stages) == own
    within(graph, made, 1.01)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"kernels": (3, 1)}, "has the same stages"),
        ({"zeros": (3, 4)}, "has the same stages"),
        ({"group": 2}, "reads only its own channels"),
        ({"widths": (32, 8)}, "would have to be copied"),
        ({"launch": 100}, "would take longer than is saved"),
    ],
)
def test_convolutions_that_stay(options: dict[str, Any], because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_results, "LAUNCH_BYTES", options.get("launch", quantized_results.LAUNCH_BYTES))
    made, report = folded(branches(**options))
    assert len(made.of_kind("QuantizedConv")) == 2
    assert any(because in r.reason for r in report.refused if r.rule == "quantized_siblings")
