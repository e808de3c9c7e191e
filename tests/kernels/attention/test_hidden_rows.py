"""Attention whose computed mask hides every key of a query: its result is 0 if the weights are masked again (Keras)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_attention import FuseAttention
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine
from optdnn.types import FP16

B, H, L, D = 2, 4, 80, 64


def network() -> tuple[Graph, dict[str, Any]]:
    """The weights are masked before and after the softmax. The last queries of the first sample see no key; those of the second
    see all."""
    n = Net(FP16)
    q, k, v = (n.input(B, H, L, D, name=name) for name in "qkv")
    shown = n.op("Greater", n.input(B, 1, L, L, name="m"), 0.0)
    scores = n.op("Mul", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))), 0.125)
    p = n.op("Softmax", n.op("Where", shown, scores, -np.inf))
    graph = n.done(n.op("MatMul", n.op("Where", shown, p, 0.0), v))
    assert FuseAttention()(graph).changes == 1
    feeds = feeds_of(graph)
    feeds["m"] = np.ones_like(feeds["m"])
    feeds["m"][0, :, 50:] = -1
    feeds["m"][1, :, :, 70:] = -1
    return graph, feeds


def test_hidden_rows_are_zeros() -> None:
    graph, feeds = network()
    (y,) = Engine(lowered(graph, "fp16", target="simulate")).run(feeds).values()
    assert np.isfinite(y).all()
    assert not y[0, :, 50:].any()
    assert y[0, :, :50].any()


@pytest.mark.hopper
def test_hidden_rows_are_zeros_on_a_gpu() -> None:
    graph, feeds = network()
    engine = Engine(lowered(graph, "fp16", target="cuda:sm_90a"))
    assert not [e for e in check_steps(engine.context(), feeds) if e.error > 2e-3]
    (y,) = engine.run(feeds).values()
    assert not y[0, :, 50:].any()
