"""Two 1x1 convolutions of 8-bit integers in one launch: where it is used, refusals with their reasons, and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernels.quantized.test_quantized import built  # type: ignore[import-not-found]
from support.quantized_nets import ADDED, FP8, QNet
from support.simulated import check_exact, kinds, refusals

from optdnn.ir.graph import Value
from optdnn.kernels.conv import chained
from optdnn.ops.base import Stage

RELU = (Stage("Relu", (-1,)),)
UNSIGNED = (0, np.uint8)
Build = Callable[[QNet], tuple[Value, ...]]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(chained, "_slower", lambda problem, gpu: None)


def inside(n: QNet, channels: int, *numbers: Any, batch: int = 2) -> Value:
    return n.fake(n.qconv(n.fake(n.input(batch, 16, 9, 7), 0.03), channels), 0.04, *numbers)


def mixed(n: QNet, x: Value, channels: int, scale: float = 0.04, numbers: Any = (), **more: Any) -> Value:
    return n.fake(n.qconv(x, channels, 1, **more), scale, *numbers)


def bottlenecks(n: QNet, wide: int = 64, narrow: int = 16, numbers: Any = UNSIGNED) -> tuple[Value, ...]:
    """ResNet's bottleneck block."""
    x = inside(n, wide, *numbers)
    for _ in range(3):
        y = mixed(n, x, narrow, epilogue=RELU)
        y = n.fake(n.qconv(y, narrow, epilogue=RELU), 0.03, *UNSIGNED)
        x = mixed(n, y, wide, 0.05, numbers, epilogue=ADDED, more=[x])
    return (n.fake(n.qconv(x, 16), 0.03),)


def perceptron(n: QNet) -> tuple[Value, ...]:
    """The wide result has no other reader."""
    x = inside(n, 48)
    y = mixed(n, mixed(n, x, 160, epilogue=RELU, numbers=UNSIGNED), 48, epilogue=ADDED, more=[x])
    return (n.fake(n.qconv(y, 16), 0.03),)


NETS: dict[str, tuple[Build, int]] = {
    "bottlenecks": (bottlenecks, 2),
    "zero points": (lambda n: bottlenecks(n, 128, 32, (117, np.uint8)), 2),
    "a perceptron": (perceptron, 1),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str) -> None:
    build, count = NETS[name]
    n = QNet()
    graph, program = built(n.done(*build(n)))
    assert kinds(program).count("ChainedQuantized") == count
    check_exact(program, graph)
    for step in program.steps:
        if step.params["op"]["kind"] == "ChainedQuantized":
            assert sum(node.startswith("Conv") for node in step.src) == 2, "both convolutions are named"


def strided(n: QNet) -> tuple[Value, ...]:
    return (mixed(n, mixed(n, inside(n, 32), 64), 16, stride=2),)


def widening(n: QNet) -> tuple[Value, ...]:
    return (mixed(n, mixed(n, inside(n, 32), 16), 64),)


def later(n: QNet) -> tuple[Value, ...]:
    """The second convolution adds the first one's result."""
    y = mixed(n, inside(n, 32), 64)
    return (mixed(n, y, 64, epilogue=ADDED, more=[y]),)


def odd(n: QNet) -> tuple[Value, ...]:
    return (mixed(n, mixed(n, inside(n, 32), 72), 16),)


def to_float(n: QNet) -> tuple[Value, ...]:
    return (n.qconv(mixed(n, inside(n, 32), 64), 16, 1),)


def of_fp8(n: QNet) -> tuple[Value, ...]:
    x = n.fake(n.input(2, 32, 9, 7), 0.03, None, FP8)
    y = n.fake(n.qconv(x, 64, 1, dtype=FP8), 0.04, None, FP8)
    return (n.fake(n.qconv(y, 16, 1, dtype=FP8), 0.04, None, FP8),)


REFUSED: dict[str, tuple[Build, str]] = {
    "no 1x1 after it": (lambda n: (n.qconv(mixed(n, inside(n, 32), 64), 16),), "exactly one other 1x1 convolution"),
    "a stride after it": (strided, "exactly one other 1x1 convolution"),
    "widening": (widening, "little is saved"),
    "added later": (later, "is computed later"),
    "odd channels": (odd, "multiple of 16"),
    "a float result": (to_float, "it is for 8-bit integers"),
    "fp8": (of_fp8, "it is for 8-bit integers"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    n = QNet()
    _, program = built(n.done(*build(n)))
    assert "ChainedQuantized" not in kinds(program)
    found = refusals(program, "chained_sm90_8bit")
    assert any(reason in why for why in found), found
