"""computed_weights: convolutions whose filters are computed are products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph
from optdnn.ops.conv import ConvAttrs
from optdnn.passes import computed_weights
from optdnn.passes.computed_weights import ComputedWeights


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass without a least size of convolutions."""
    monkeypatch.setattr(computed_weights, "LEAST", 0)


def conv(x: tuple[int, ...], w: tuple[int, ...], *, bias: bool = False, **attrs: Any) -> Graph:
    """A Conv whose weights are an input."""
    n, rank = Net(), len(w) - 2
    given = {"strides": (1,) * rank, "pads": (0,) * 2 * rank, "dilations": (1,) * rank} | attrs
    more = [n.input(w[0], name="b")] if bias else []
    return n.done(n.op("Conv", n.input(*x), n.input(*w, name="w"), *more, attrs=ConvAttrs(**given)))


@pytest.mark.parametrize(
    "graph",
    [
        conv((2, 4, 6, 7), (3, 4, 3, 3)),
        conv((2, 4, 6, 7), (3, 4, 3, 2), bias=True, pads=(1, 0, 1, 1), strides=(2, 1)),
        conv((2, 6, 6, 7), (4, 3, 3, 3), group=2, dilations=(1, 2), pads=(1, 2, 1, 2)),
        conv((1, 4, 9), (3, 4, 4), strides=(3,)),
        conv((2, 3, 4, 5, 6), (2, 3, 2, 2, 3), bias=True, pads=(0, 1, 1, 0, 1, 1)),
        conv((2, 4, 6, 7), (3, 4, 1, 1)),
    ],
)
def test_convolutions(graph: Graph) -> None:
    check_pass(ComputedWeights(), graph, changes=1, rules={"conv_of_computed_weights": 1})


def test_refusals() -> None:
    check_refused(
        ComputedWeights(), conv((1, 2, 9, 9), (2, 2, 9, 9), pads=(4,) * 4), because="have 81 taps, more than 64"
    )
    for graph in (conv((1, 4, 6, 6), (4, 1, 3, 3), group=4), conv((1, 4, 6, 6), (1, 4, 3, 3))):
        check_refused(ComputedWeights(), graph, because="a group has a single filter or channel")


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed_weights, "LEAST", 1 << 20)
    check_untouched(ComputedWeights(), conv((2, 4, 6, 7), (3, 4, 3, 3)))


def test_constant_and_quantized_weights_stay() -> None:
    n = Net()
    attrs = ConvAttrs(strides=(1, 1), pads=(0,) * 4, dilations=(1, 1))
    w = n.const(np.ones((3, 4, 3, 3), np.float32))
    check_untouched(ComputedWeights(), n.done(n.op("Conv", n.input(2, 4, 6, 7), w, attrs=attrs)))
    n = Net()
    w = n.op("DequantizeLinear", n.const(np.ones((3, 4, 3, 3), np.int8)), 0.5)
    check_untouched(ComputedWeights(), n.done(n.op("Conv", n.input(2, 4, 6, 7), w, attrs=attrs)))


def test_they_run_on_tensor_cores() -> None:
    program = check_simulated(conv((2, 16, 9, 9), (16, 16, 3, 3), pads=(1,) * 4), "fp16")
    tactics = {str(s.params.get("tactic", "")).split(" ")[0] for s in program.steps}
    assert "conv_direct" not in tactics
    assert "matmul_sm90" in tactics
