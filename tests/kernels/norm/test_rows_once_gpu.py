"""Norms and softmax of rows that lie apart, and reductions of many terms, on a GPU: each launch does what its step means."""

from __future__ import annotations

import pytest
from kernels.norm.test_rows_once import ACTIVATIONS, activated, cropped, post_norm  # type: ignore[import-not-found]
from support.net import Net
from support.on_gpu import checked_launches

from optdnn.ir.graph import Graph

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 4e-6}

pytestmark = pytest.mark.hopper


def check(graph: Graph, precision: str) -> None:
    checked_launches(graph, precision, TOLERANCE[precision])


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization", "Softmax"])
def test_rows_of_a_part_of_an_image(kind: str, precision: str) -> None:
    check(cropped(kind), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_padded_rows(kind: str, windows: bool, precision: str) -> None:
    check(post_norm(kind, windows), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_activations(kind: str, activation: str, precision: str) -> None:
    check(activated(kind, activation, 300), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("size", [3, 14, 15, 33, 65])
@pytest.mark.parametrize("kind", ["ReduceL2", "ReduceMean", "ReduceMax", "ReduceLogSumExp"])
def test_reductions_over_pixels(kind: str, size: int, precision: str) -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, size, size), 24, 1, pads=0, bias=True))
    check(n.done(n.op(kind, x, n.ints(2, 3)), n.op(kind, x, n.ints(1)), n.op(kind, x, n.ints(1, 2, 3))), precision)
