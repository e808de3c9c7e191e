"""Norms and softmaxes of rows with gaps between them, and reductions of many terms, on a GPU: each launch agrees with its
meaning."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.norm.test_rows_once import ACTIVATIONS, activated, cropped, post_norm  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 4e-6}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


def check(graph: Graph, precision: str) -> None:
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    assert not [e for e in check_steps(context, feeds) if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)


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
