"""Convolutions over three axes on 8-bit numbers: chains stay in 8 bits, with as many launches as in 16 bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from kernels.conv.test_volumes import NETS, block, volume  # type: ignore[import-not-found]
from support.net import Net, built
from support.simulated import calibrated, feeds_of, kinds, simulate
from support.sweep import sweep

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.runtime.cuda.compile.render import INEXACT
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions


def classifier(n: Net) -> Value:
    """A 3-D ResNet with its head."""
    x = volume(n, n.input(1, 3, 5, 22, 18), 16, (3, 7, 7), (1, 2, 2))
    x = n.op("GlobalAveragePool", block(n, block(n, x, 16, 1), 32, 2))
    return n.gemm(n.op("Flatten", x), 10)


def channelwise(n: Net) -> Value:
    """A block of X3D with a filter for each channel, which a float kernel computes over three axes."""
    x = volume(n, n.input(1, 16, 5, 9, 8), 32, (1, 1, 1), pads=(0,) * 6)
    x = volume(n, x, 32, (3, 3, 3), group=32)
    return volume(n, x, 16, (1, 1, 1), pads=(0,) * 6)


def shifted(n: Net) -> Value:
    """A convolution that is padded along depth only; its input has a zero point other than 0."""
    x = n.op("Tanh", volume(n, n.input(2, 16, 5, 6, 7), 24, (1, 1, 1), pads=(0,) * 6))
    x = n.op("Add", x, n.const(-0.3))
    return volume(n, x, 16, (3, 3, 3), pads=(1, 0, 0, 1, 0, 0))


CASES = {
    **NETS,
    "classifier": classifier,
    "channelwise": channelwise,
    "shifted": shifted,
    "eight groups": lambda n: volume(n, volume(n, n.input(1, 16, 5, 7, 6), 128, (1, 1, 1), pads=(0,) * 6), 128, (3, 3, 3), group=8),
}  # fmt: skip


def swept(integers: str, floats: str) -> list[Any]:
    """Every network in integers and in fp8. The quick cases are a few in integers and one in fp8."""
    quick = [*((name, integers) for name in ("classifier", "channelwise", "shifted")), ("shifted", floats)]
    return sweep([(name, p) for name in CASES for p in (integers, floats)], *quick)


@cache
def made(name: str, precision: str, target: str = "simulate") -> tuple[Graph, Graph, Program]:
    """The network, the network after the passes, and its program."""
    graph = built(CASES[name])
    return graph, *calibrated(graph, precision, target)


@pytest.mark.parametrize(("name", "precision"), swept("int8", "fp8"))
def test_programs_compute_the_quantized_network(name: str, precision: str) -> None:
    graph, quantized, program = made(name, precision)
    assert "QuantizedConv" in kinds(program)
    feeds = feeds_of(graph)
    got = simulate(program, feeds)
    for output, want in evaluate(quantized, feeds).items():
        # One 8-bit step of an inner value would be a hundred times this bound.
        np.testing.assert_allclose(got[output], want, rtol=0, atol=2e-5 * np.abs(want).max())
        plain, other = evaluate(graph, feeds)[output], evaluate(graph, feeds_of(graph, 2))[output]
        assert np.abs(want - plain).mean() < 0.5 * np.abs(other - plain).mean()


def test_launches_of_a_network() -> None:
    """As in 16 bits, but the downsampling convolution is no second source, since its result has its own scale."""
    _, _, program = made("classifier", "int8+fp16")
    one = ["Frames", "QuantizedConv"]
    assert kinds(program) == [
        "Pointwise", *one * 3, "Frames", "Copy", "QuantizedConv", "QuantizedConv", *one, "QuantizedMean", "QuantizedConv", "Pointwise",
    ]  # fmt: skip
    between = {program.buffers[i].dtype.itemsize for s in program.steps[:-2] for i in s.outputs}
    assert between == {1}


@pytest.mark.parametrize(("name", "precision"), swept("int8+fp16", "fp8+fp16"))
def test_no_more_launches_than_in_16_bits(name: str, precision: str) -> None:
    _, _, halves = made(name, "fp16")
    _, _, program = made(name, precision)
    more = {"a 3-D ResNet": 2, "classifier": 2, "frames, then depth": 1, "channelwise": 2}.get(name, 0)
    more += 2 * (precision.startswith("fp8") and name == "classifier")  # there is no mean of fp8
    more += kinds(halves)[0] in (
        "Copies",
        "JointPointwise",
    )  # the conversion of the input and the change of its layout, in one launch
    more += 2 * (kinds(halves)[0] == "ImageConv")  # neither a conversion nor a copy of frames in front of it
    more += kinds(program).count("Frames")  # 16-bit convolutions read the frames where they are
    more += 2 * (name == "a U-Net")  # in 16 bits, the two transposed convolutions write beside the encoder's volume
    assert len(program.steps) <= len(halves.steps) + more, (kinds(halves), kinds(program))
    assert "Pad" not in kinds(program)


def test_depth_is_padded_with_the_zero_point() -> None:
    _, _, program = made("shifted", "int8")
    (step,) = (s for s in program.steps if s.params["op"]["kind"] == "Frames")
    assert program.buffers[step.outputs[0]].dtype == np.uint8
    assert step.params["op"]["attrs"]["fill"] > 0


def test_pixels_of_frames_are_whole_16_bytes() -> None:
    _, _, program = made("a 3-D ResNet", "int8")
    first = next(s for s in program.steps if s.params["op"]["kind"] == "Frames")
    (write,) = first.params["writes"]
    assert write[2][-1] == 3  # with nine channels, three under each tap
    assert 16 in write[3]


@pytest.mark.nvrtc
def test_kernels_compile() -> None:
    assert made("classifier", "int8+fp16", "cuda:sm_90a")[2].kernels


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["int8+fp16", "fp8+fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu_agree_with_their_meaning(name: str, precision: str) -> None:
    graph, _, program = made(name, precision, "cuda:sm_90a")
    context: Any = CudaRunner(program, LoadOptions()).context()
    for e in check_steps(context, feeds_of(graph)):
        narrow = {program.buffers[i].dtype.name for i in program.steps[e.step].outputs} & {"int8", "uint8"}
        stages = {str(stage[0]) for stage in program.steps[e.step].params["op"]["attrs"].get("stages", ())}
        if (precision.startswith("int8") and narrow) or e.kind in ("Frames", "Copy"):
            assert e.error <= (1e-2 if stages & INEXACT else 0), (
                e
            )  # after a hyperbolic tangent, a share is off by one step
        elif program.buffers[program.steps[e.step].outputs[0]].dtype.itemsize > 1:
            assert e.error < 4e-3, e
