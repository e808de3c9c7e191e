"""Sliding windows: the elements under several taps are loaded before the first of them is added."""

from __future__ import annotations

import re

import pytest
from support.net import Net
from support.simulated import check_simulated

from optdnn.runtime.program import Program


def text_of(program: Program) -> str:
    (text,) = (text for k in program.kernels for text in k.generated.values() if " window(" in text)
    return text


@pytest.mark.parametrize(("kernel", "loads"), [(3, [9]), (5, [5] * 5), (7, [7] * 7)])
def test_loads_are_together(kernel: int, loads: list[int]) -> None:
    n = Net()
    program = check_simulated(
        n.done(n.average_pool(n.op("Relu", n.input(2, 16, 12, 11)), kernel, pads=kernel // 2)), "fp16"
    )
    text = text_of(program)
    found = re.findall(r" v\d+\(|\} v\d+;|if \(od", text)
    runs = "".join("a" if "if" in x else "l" for x in found)
    assert [len(run) for run in re.findall("l+", runs)] == loads
    assert "continue" not in text


@pytest.mark.parametrize("kernel", [8, 10])
def test_many_taps_are_a_loop(kernel: int) -> None:
    """More lines than 49 taps have would not be faster."""
    n = Net()
    program = check_simulated(n.done(n.max_pool(n.op("Tanh", n.input(1, 16, 12, 12)), kernel, strides=1)), "fp16")
    assert "continue" in text_of(program)
