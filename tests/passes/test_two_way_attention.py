"""two_way_attention: attention in both directions with one matrix of scores becomes two attentions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.fuse_attention import FuseAttention
from optdnn.passes.two_way_attention import TwoWayAttention

B, H, L, S, D = 2, 4, 6, 10, 8
EXCHANGE = TransposeAttrs((0, 1, 3, 2))


def both_directions(
    *,
    scale: str = "",
    used: bool = False,
    axis: int = 2,
    constant: bool = False,
    offset: bool = False,
    float_type: type = np.float64,
) -> Graph:
    """Points of two images that attend to each other, with the same scores. With ``used``, others read the second weights."""
    n = Net(float_type)
    q, v, w = n.input(B, H, L, D, name="q"), n.input(B, H, S, D, name="v"), n.input(B, H, L, D, name="w")
    if constant:
        scores = n.op("MatMul", q, n.random(B, H, D, S))
    else:
        scores = n.op("MatMul", q, n.op("Transpose", n.input(B, H, S, D, name="k"), attrs=EXCHANGE))
    if scale:
        scores = n.op(scale, scores, 0.5)
    columns = n.op("Add", scores, n.input(1, name="b")) if offset else scores
    back = n.op("Transpose", n.op("Softmax", columns, attrs=SoftmaxAttrs(axis)), attrs=EXCHANGE)
    there = n.op("MatMul", n.op("Softmax", scores, attrs=SoftmaxAttrs(3)), v)
    results = [there, n.op("MatMul", back, w)]
    return n.done(*results, n.op("Relu", back)) if used else n.done(*results)


@pytest.mark.parametrize("scale", ["", "Mul", "Div"])
def test_both_directions_are_attentions(scale: str) -> None:
    graph, _ = check_pass(TwoWayAttention(), both_directions(scale=scale), changes=1)
    graph, _ = check_pass(FuseAttention(), graph, changes=2)
    assert [graph.type(op.value).static_shape for op in graph.of_kind("Attention")] == [(B, H, L, D), (B, H, S, D)]
    assert not list(graph.of_kind("MatMul", "Softmax"))


def test_refusals() -> None:
    check_refused(TwoWayAttention(), both_directions(used=True), because="an inner value is used elsewhere")
    check_refused(TwoWayAttention(), both_directions(constant=True), because="a factor of its scores is constant")


@pytest.mark.parametrize("form", [{"axis": 1}, {"axis": 3}, {"offset": True}])
def test_other_weights_stay(form: dict[str, Any]) -> None:
    check_untouched(TwoWayAttention(), both_directions(**form))


def test_a_network_on_the_gpu() -> None:
    program = check_simulated(both_directions(float_type=np.float32))
    assert kinds(program).count("Attention") == 2
