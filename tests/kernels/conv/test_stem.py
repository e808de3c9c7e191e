"""The layout change before a strided convolution of few channels, run on the processor: whole blocks, odd sizes, and the
normalization of an image of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import WHY_NOT, needs_compiler
from support.net import Net
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv.stem import StemConv
from optdnn.ops.binary import CastAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import FP32


@pytest.fixture(autouse=True)
def _in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the kernel that reads images itself."""
    monkeypatch.setattr(StemConv, "refuse", lambda self, b, op: "it is left out")


@needs_compiler
@pytest.mark.parametrize(("size", "block"), [((22, 18), 2), ((21, 18), 2), ((22, 17), 2), ((24, 20), 4), ((24, 22), 4)])
def test_space_to_depth(size: tuple[int, int], block: int, tmp_path: Path) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(3, 3, *size), 16, 5, strides=block, pads=2))
    program = lowered(graph)
    kinds = {s.params["op"]["kind"]: s for s in program.steps}
    step = kinds["SpaceToDepthImage"]
    whole = "Pack<f32, " in program.kernels[step.params["launch"]["kernel"]].generated["generated.cuh"]
    assert whole == (size[1] % block == 0), "whole rows of a block are read at once"
    assert compare_steps(program, feeds_of(graph), 1e-6, tmp_path)


def picture(n: Net, size: tuple[int, int], channels_last: bool = False) -> Value:
    """Bytes in the layouts of cameras and PIL, converted to fp32."""
    x = n.input(2, *((*size, 3) if channels_last else (3, *size)), dtype=np.uint8)
    x = n.op("Transpose", x, attrs=TransposeAttrs((0, 3, 1, 2))) if channels_last else x
    return n.op("Cast", x, attrs=CastAttrs(FP32))


def normalized(n: Net, x: Value) -> Value:
    """torchvision's Normalize."""
    mean, std = (n.const(np.array(v).reshape(1, 3, 1, 1)) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return n.op("Div", n.op("Sub", n.op("Div", x, 255.0), mean), std)


def stem(x: Callable[[Net], Value]) -> Graph:
    n = Net(seed=3)
    return n.done(n.conv(n.op("Relu", n.conv(x(n), 16, 5, strides=2, pads=2, bias=True)), 8, 1, pads=0))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [(22, 18), (21, 17)])
def test_bytes_are_normalized_on_their_way(size: tuple[int, int], channels_last: bool, tmp_path: Path) -> None:
    graph = stem(lambda n: normalized(n, picture(n, size, channels_last)))
    program = check_simulated(graph)
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds == ["SpaceToDepthImage", "Conv", "Conv", "Pointwise"], "neither a cast nor a normalization of its own"
    step = program.steps[0]
    assert program.buffers[step.inputs[0]].dtype == np.uint8
    assert len(step.params["op"]["attrs"]["factors"]) == len(step.params["op"]["attrs"]["shifts"]) == 3
    assert any(name.startswith("Sub") for name in step.src)
    if WHY_NOT is None:
        rng = np.random.default_rng(0)
        feeds: dict[str, Any] = {s.name: rng.integers(0, 256, s.shape).astype(s.dtype) for s, _ in program.inputs}
        assert compare_steps(program, feeds, 1e-3, tmp_path)


def test_another_prologue_stays_a_kernel_of_its_own() -> None:
    program = check_simulated(stem(lambda n: n.op("Tanh", n.op("Mul", picture(n, (22, 18)), 0.01))))
    assert [s.params["op"]["kind"] for s in program.steps] == ["Pointwise", "Pointwise", "Conv", "Conv", "Pointwise"]
