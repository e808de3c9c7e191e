"""Networks of grouped convolutions (ResNeXt, ShuffleNet, RegNet) from floats to 8 bits: tactics and numbers of launches."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.net import Net, built
from support.simulated import calibrated, feeds_of, kinds, simulate
from support.sweep import sweep

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions


def layer(n: Net, x: Value, filters: int, kernel: int, group: int = 1, strides: int = 1, *, relu: bool = True) -> Value:
    y = n.bn(n.conv(x, filters, kernel, pads=kernel // 2, group=group, strides=strides))
    return n.op("Relu", y) if relu else y


def head(n: Net, x: Value) -> Value:
    return n.gemm(n.op("Flatten", n.op("GlobalAveragePool", x)), 10)


def resnext(n: Net, width: int) -> Value:
    """A block with 32 groups of ``width`` channels."""
    x = layer(n, n.input(2, 3, 32, 32), 64, 7, strides=2)
    wide = 32 * width
    for strides in (1, 2):
        y = layer(n, layer(n, x, wide, 1), wide, 3, 32, strides)
        y = layer(n, y, 256, 1, relu=False)
        x = n.op("Relu", n.op("Add", y, layer(n, x, 256, 1, strides=strides, relu=False)))
    return head(n, x)


def shuffled(n: Net, x: Value, groups: int) -> Value:
    images, c, h, w = (int(d) for d in n.dims(x))  # type: ignore[call-overload]
    y = n.op("Reshape", x, n.ints(images, groups, c // groups, h, w))
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3, 4)))
    return n.op("Reshape", y, n.ints(images, c, h, w))  # type: ignore[no-any-return]


def shufflenet(n: Net) -> Value:
    """A block with 3 groups, of 80 and of 20 channels."""
    x = layer(n, layer(n, n.input(2, 3, 32, 32), 24, 3, strides=2), 240, 1)
    y = shuffled(n, layer(n, x, 60, 1, 3), 3)
    y = layer(n, layer(n, y, 60, 3, 60, relu=False), 240, 1, 3, relu=False)
    return head(n, n.op("Relu", n.op("Add", y, x)))


def regnet(n: Net, width: int) -> Value:
    """A block with groups of ``width`` channels, and squeeze-and-excitation."""
    x = layer(n, n.input(2, 3, 32, 32), 32, 3, strides=2)
    for channels in (3 * width, 7 * width):
        y = layer(n, layer(n, x, channels, 1), channels, 3, channels // width, 2)
        gate = n.op("Relu", n.conv(n.op("GlobalAveragePool", y), 16, 1, pads=0, bias=True))
        y = n.op("Mul", y, n.op("Sigmoid", n.conv(gate, channels, 1, pads=0, bias=True)))
        y = layer(n, y, channels, 1, relu=False)
        x = n.op("Relu", n.op("Add", y, layer(n, x, channels, 1, strides=2, relu=False)))
    return head(n, x)


NETS: dict[str, Any] = {
    "ResNeXt, 32 x 4": (lambda n: resnext(n, 4), 3),
    "ResNeXt, 32 x 8": (lambda n: resnext(n, 8), 3),
    "ShuffleNet, 3 groups": (shufflenet, 4),
    "RegNet, groups of 16": (lambda n: regnet(n, 16), 7),
    "RegNet, groups of 24": (lambda n: regnet(n, 24), 7),
}
"""A function that builds the network, and the additional launches of int8 over fp16: second sources of a sum, a stem of bytes,
gates in a prologue, gates that compute means, shuffled channels that cannot be folded into integer weights."""


@cache
def made(name: str, precision: str, target: str = "simulate") -> tuple[Graph, Graph, Program]:
    """The network, the network after the passes, and its program."""
    graph = built(NETS[name][0])
    return graph, *calibrated(graph, precision, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    sweep(
        [(name, p) for name in NETS for p in ("int8+fp16", "fp8+fp16")],
        ("ResNeXt, 32 x 4", "int8+fp16"), ("ShuffleNet, 3 groups", "int8+fp16"), ("RegNet, groups of 24", "fp8+fp16"),
    ),
)  # fmt: skip
def test_programs_compute_the_quantized_network(name: str, precision: str) -> None:
    graph, quantized, program = made(name, precision)
    feeds = feeds_of(graph)
    got, plain, other = simulate(program, feeds), evaluate(graph, feeds), evaluate(graph, feeds_of(graph, 2))
    for output, want in evaluate(quantized, feeds).items():
        np.testing.assert_allclose(got[output], want, rtol=0, atol=2e-4 * np.abs(want).max())
        moved = np.abs(other[output] - plain[output]).mean()
        assert np.abs(want - plain[output]).mean() < (0.2 if precision.startswith("int8") else 0.9) * moved
    floats = {p for t in program.meta["tactics"] if t["kind"] == "Conv" for p in t["nodes"]}
    assert not floats, "all convolutions are of 8 bits"


@pytest.mark.parametrize("name", NETS)
def test_launches(name: str) -> None:
    _, _, halves = made(name, "fp16")
    _, _, program = made(name, "int8+fp16")
    more = NETS[name][1]
    assert len(program.steps) <= len(halves.steps) + more, (Counter(kinds(halves)), Counter(kinds(program)))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["int8+fp16", "fp8+fp16"])
@pytest.mark.parametrize("name", NETS)
def test_launches_on_a_gpu_agree_with_their_meaning(name: str, precision: str) -> None:
    graph, _, program = made(name, precision, "cuda:sm_90a")
    context: Any = CudaRunner(program, LoadOptions()).context()
    for e in check_steps(context, feeds_of(graph)):
        narrow = {program.buffers[i].dtype.name for i in program.steps[e.step].outputs} & {"int8", "uint8"}
        if e.kind == "Copy" or (precision.startswith("int8") and narrow and e.kind != "Pointwise"):
            assert e.error == 0, e
        elif program.buffers[program.steps[e.step].outputs[0]].dtype.itemsize > 1:
            assert e.error < 4e-3, e
