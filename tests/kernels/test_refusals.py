"""Refusals of tactics of small families: recurrent layers, pools, blocks of pixels, resizes, and operators over many axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.sequence_cases import recurrent
from support.simulated import check_not_taken, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder
from optdnn.kernels.gemm.hopper_matmul import HopperMatMul
from optdnn.kernels.layout.picture import ResizedPicture
from optdnn.kernels.libraries.collective import Collect
from optdnn.kernels.libraries.tactics import CublasLtBatched
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.collective import AllReduceAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.rnn import RNNAttrs
from optdnn.ops.unary import GeluAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP16, FP32


def blocks() -> Graph:
    n = Net()
    return n.done(n.conv(n.input(1, 16, 13, 12), 16, 4, strides=4, pads=0))


def padded_pool() -> Graph:
    n = Net()
    attrs = MaxPoolAttrs((2, 2), (2, 2), (2, 2, 2, 2), (1, 1))
    return n.done(n.op("MaxPool", n.conv(n.input(2, 8, 9, 9), 16), attrs=attrs))


def given_weights(hidden: int, dtype: Any = np.float32) -> Graph:
    n = Net(dtype)
    x, w, r = n.input(2, 1, 4), n.input(1, hidden, 4, name="w"), n.input(1, hidden, hidden, name="r")
    attrs = RNNAttrs(hidden_size=hidden, activations=("Tanh",))
    return n.done(n.op("RNN", x, w, r, attrs=attrs, outputs=2)[0])


def over_four_axes(group: int) -> Graph:
    n = Net()
    return n.done(n.conv(n.input(1, 4, 3, 3, 3, 3), 4, 1, pads=0, group=group))


def pool_over_four_axes() -> Graph:
    n = Net()
    return n.done(n.max_pool(n.input(1, 2, 4, 4, 4, 4), 2))


def given_region() -> Graph:
    n = Net()
    attrs = ResizeAttrs("linear", coordinate_transformation_mode="tf_crop_and_resize")
    return n.done(n.op("Resize", n.input(1, 2, 4, 4), n.input(8, name="roi"), None, n.ints(1, 2, 6, 6), attrs=attrs))


def half_factors() -> Graph:
    """Products in tf32 whose factors are fp16. The last stages read a register twice, so that a later launch computes them."""
    n = Net()
    stages = [Stage("Cast", (-1,), CastAttrs(FP32)), Stage("Gelu", (-2,), GeluAttrs()), Stage("Tanh", (-2,), Attrs())]
    stages += [Stage("Mul", (-3, -4), Attrs()), Stage("Cast", (-5,), CastAttrs(FP16))]
    x, w = n.op("Cast", n.input(2, 8, 8), attrs=CastAttrs(FP16)), n.graph.add_constant(np.ones((8, 8), np.float16), "w")
    return n.done(n.op("MatMul", w, x, attrs=MatMulAttrs(epilogue=tuple(stages), factors="fp16")))


@pytest.mark.parametrize(
    ("build", "tactic", "reason", "options"),
    [
        (blocks, "blocks_sm90", "its windows do not cover the image", {}),
        (padded_pool, "max_pool_tiled", "a window lies wholly in the padding", {}),
        (lambda: given_weights(8, np.float64), "rnn_resident", "it is for floats of 16 and 32 bits", {}),
        (lambda: recurrent("LSTM"), "rnn_sm90", "it needs Hopper's clusters", {"target": "cuda:sm_80"}),
        (
            lambda: recurrent("LSTM", activations=("Sigmoid", "Sigmoid", "Tanh")),
            "rnn_sm90",
            "it supports the default activations only, not Sigmoid, Sigmoid, Tanh",
            {},
        ),
    ],
)
def test_others_run_it(build: Callable[[], Graph], tactic: str, reason: str, options: dict[str, Any]) -> None:
    check_not_taken(build(), tactic, reason, no_cubins=True, **options)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: given_weights(26000), "rnn: 26000 hidden units do not fit the shared memory of a block"),
        (lambda: recurrent("RNN", steps=0), "rnn: it has no steps"),
        (lambda: over_four_axes(1), "conv_direct: it has 4 spatial axes"),
        (lambda: over_four_axes(4), "depthwise: it has 4 spatial axes"),
        (pool_over_four_axes, "window_pool: it has 4 spatial axes"),
        (given_region, "taps: its scales or sizes are not known when the engine is built"),
    ],
)
def test_the_host_runs_it(build: Callable[[], Graph], reason: str) -> None:
    (row,) = lowered(build()).meta["host"]["operators"]
    assert reason in row["why"]


def reduced() -> Graph:
    n = Net(np.float64)
    return n.done(n.op("AllReduce", n.input(4, 4), attrs=AllReduceAttrs(2)))


def product_of_stages() -> Graph:
    n = Net()
    attrs = MatMulAttrs(prologue=(Stage("Relu", (-1,), Attrs()),))
    return n.done(n.op("MatMul", n.input(2, 4, 8), n.input(2, 8, 4, name="b"), attrs=attrs))


def picture_of_a_region() -> Graph:
    n = Net()
    x = n.op("Cast", n.input(1, 3, 8, 8, dtype=np.uint8), attrs=CastAttrs(FP32))
    attrs = ResizeAttrs("linear", coordinate_transformation_mode="tf_crop_and_resize")
    return n.done(n.op("Resize", x, n.input(8, name="roi"), None, n.ints(1, 3, 6, 6), attrs=attrs))


@pytest.mark.parametrize(
    ("build", "kind", "tactic", "reason"),
    [
        (reduced, "AllReduce", Collect(), "it is for fp16, bf16 and fp32"),
        (product_of_stages, "MatMul", CublasLtBatched(), "it has a prologue"),
        (half_factors, "MatMul", CublasLtBatched(), "it would store its sums in fp16"),
        (half_factors, "MatMul", HopperMatMul(), "a later launch would read its sums in fp16"),
        (picture_of_a_region, "Cast", ResizedPicture(), "sizes of the resize or the crop are not known"),
    ],
)
def test_refused(build: Callable[[], Graph], kind: str, tactic: Tactic, reason: str) -> None:
    graph = build()
    (op,) = graph.of_kind(kind)
    assert reason in str(tactic.refuse(Builder(graph, of_arch("sm_90a")), op))
