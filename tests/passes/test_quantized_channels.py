"""fold_quantized: images with a scale per channel between a product and a depthwise convolution, as NNCF quantizes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.quantized_nets import QNet, folded, within

from optdnn.ops.base import Stage

STEPS = np.float32(0.03) * (1 + np.arange(16, dtype=np.float32) / 8)


@pytest.mark.parametrize(
    ("activation", "stages", "low"),
    [
        (None, ["bias"], -128.0),
        (Stage("Relu", (-1,)), ["bias"], 0.0),
        (Stage("HardSwish", (-1,)), ["bias", "hard_swish", "channel_mul"], -128.0),
    ],
)
def test_scales_of_channels_are_of_the_products_around_them(activation: Any, stages: list[str], low: float) -> None:
    n = QNet()
    x = n.fake(n.input(2, 16, 9, 7), 0.03)
    y = n.qconv(x, 16, 1, epilogue=() if activation is None else (activation,))
    graph, report = folded(n.done(n.fake(n.qconv(n.fake_channels(y, STEPS), 16, group=16), 0.04)))
    assert graph.kinds() == {"Pointwise": 2, "QuantizedConv": 2}
    assert report.changes == 4
    first, second = graph.of_kind("QuantizedConv")
    assert [s[0] for s in first.attrs.stages] == stages
    assert first.attrs.low == low
    assert graph.constant_value(first.inputs[2]).shape == (16, 3 if "channel_mul" in stages else 2)
    assert (second.attrs.group, second.inputs[0]) == (16, first.value)
    within(n.graph, graph, 0.0401)


@pytest.mark.parametrize(("dtype", "zero"), [(np.uint8, 90), (np.int8, -40)])
@pytest.mark.parametrize("channels", [16, 32])
def test_channels_may_share_a_zero_point(dtype: Any, zero: int, channels: int) -> None:
    n = QNet()
    x = n.fake_channels(n.input(2, 16, 9, 7), STEPS, zero, dtype=dtype)
    graph, _ = folded(n.done(n.fake(n.qconv(x, channels, group=16), 0.04)))
    (conv,) = graph.of_kind("QuantizedConv")
    assert conv.attrs.input_zero == zero
    within(n.graph, graph, 0.0401)


def test_a_shortcut_is_added_before_the_division() -> None:
    n = QNet()
    second = n.fake(n.input(2, 16, 9, 7, name="r"), 0.02)
    x = n.fake(n.input(2, 16, 9, 7), 0.03)
    y = n.qconv(x, 16, epilogue=(Stage("Add", (-1, 3)),), more=[second])
    graph, _ = folded(n.done(n.fake(n.qconv(n.fake_channels(y, STEPS), 16, group=16), 0.04)))
    assert [s[0] for s in graph.of_kind("QuantizedConv")[0].attrs.stages] == ["bias", "add", "channel_mul"]
    within(n.graph, graph, 0.0401)


REFUSED = {
    "several channels per result": lambda n, x: n.qconv(n.fake_channels(x, STEPS), 16),
    "zero points differ": lambda n, x: n.qconv(n.fake_channels(x, STEPS, np.arange(16, dtype=np.int8)), 16, group=16),
    "scales of rows": lambda n, x: n.qconv(n.fake_channels(x, STEPS[:9], axis=2), 16, group=16),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_images_stay_floats(case: str) -> None:
    n = QNet()
    graph, report = folded(n.done(n.fake(REFUSED[case](n, n.input(2, 16, 9, 7)), 0.04)))
    assert not graph.of_kind("QuantizedConv")
    assert [m.reason for m in report.refused] == ["its weights are quantized, but its input is not"]


STAGES = {
    "a factor": (
        [Stage("HardSwish", (-1,)), Stage("Mul", (-2, 3))],
        ["bias", "hard_swish", "channel_mul", "mul_const"],
        1,
    ),
    "a shift": ([Stage("Relu", (-1,)), Stage("Add", (-2, 3))], ["bias", "relu", "channel_add", "mul_const"], 1),
    "PReLU": ([Stage("PRelu", (-1, 3))], ["bias", "prelu"], 1),
    "both": ([Stage("Relu", (-1,)), Stage("Mul", (-2, 3)), Stage("Add", (-3, 4))], ["bias", "relu"], 2),
}


@pytest.mark.parametrize("case", STAGES)
@pytest.mark.parametrize("kept", [False, True])
def test_numbers_of_channels_are_a_stage(case: str, kept: bool) -> None:
    """SmoothQuant multiplies each channel before it quantizes data. A kernel has room for one number per channel."""
    n = QNet()
    stages, names, count = STAGES[case]
    numbers = [n.random(16, 1, 1) for _ in range(count)]
    y = n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 16, epilogue=tuple(stages), more=numbers)
    graph, _ = folded(n.done(y if kept else n.fake(y, 0.04)))
    (conv,) = graph.of_kind("QuantizedConv")
    assert [s[0] for s in conv.attrs.stages] == [name for name in names if not kept or name != "mul_const"]
    within(n.graph, graph, 1e-4 if kept else 0.0401)


def test_scales_of_channels_after_such_a_stage_are_not_folded() -> None:
    n = QNet()
    stages = (Stage("HardSwish", (-1,)), Stage("Mul", (-2, 3)))
    y = n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 16, epilogue=stages, more=[n.random(16, 1, 1)])
    graph, _ = folded(n.done(n.fake(n.qconv(n.fake_channels(y, STEPS), 16, group=16), 0.04)))
    first, _ = graph.of_kind("QuantizedConv")
    assert first.outputs[0].type.dtype == np.float32
    within(n.graph, graph, 0.0401)
