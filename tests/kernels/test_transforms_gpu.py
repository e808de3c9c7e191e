"""On a GPU, networks with Fourier transforms agree with the meanings of their steps, and with the transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import TOLERANCE, feeds_of, lowered, simulate

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.signal import DFTAttrs, STFTAttrs


def fnet(batch: int) -> Graph:
    """FNet's mixing (Lee-Thorp et al., 2021), and the residual after it."""
    n = Net()
    x = n.input(batch, 64, 96)
    spectrum = n.op("DFT", n.op("Unsqueeze", x, n.ints(3)), attrs=DFTAttrs(2))
    spectrum = n.op("DFT", spectrum, attrs=DFTAttrs(1))
    return n.done(n.op("Add", n.op("Gather", spectrum, n.const(0, np.int64), attrs=GatherAttrs(3)), x))


def there_and_back() -> Graph:
    n = Net()
    spectrum = n.op("DFT", n.input(3, 14, 12, 32, 1), attrs=DFTAttrs(2, onesided=True))
    spectrum = n.op("Mul", n.op("DFT", spectrum, attrs=DFTAttrs(1)), n.random(14, 7, 32, 2))
    spectrum = n.op("DFT", spectrum, attrs=DFTAttrs(1, inverse=True))
    return n.done(n.op("DFT", spectrum, n.const(12, np.int64), attrs=DFTAttrs(2, inverse=True, onesided=True)))


def frames() -> Graph:
    n = Net()
    operands = (n.const(160, np.int64), n.positive(400), n.const(400, np.int64))
    spectrum = n.op("STFT", n.input(2, 4000, 1), *operands, attrs=STFTAttrs())
    return n.done(n.op("ReduceL2", spectrum, n.ints(-1)))


NETS: dict[str, Callable[[], Graph]] = {
    "fnet": lambda: fnet(1),
    "fnet_batch": lambda: fnet(4),
    "there_and_back": there_and_back,
    "frames": frames,
}


def compare(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    for name, value in want.items():
        assert float(np.abs(got[name] - value).max()) <= tolerance * float(np.abs(value).max()), name


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", NETS)
def test_simulated(name: str, precision: str) -> None:
    graph = NETS[name]()
    feeds, program = feeds_of(graph), lowered(graph, precision)
    assert not {"DFT", "STFT"} & {s.params.get("op", {}).get("kind") for s in program.steps}
    compare(simulate(program, feeds), evaluate(graph, feeds), TOLERANCE[precision])


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", NETS)
def test_on_a_gpu(name: str, precision: str) -> None:
    checked_launches(NETS[name](), precision)
