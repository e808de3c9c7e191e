"""Networks whose first convolution and max pool run in one launch on Hopper's wgmma: results and the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernels.conv.test_stem import normalized, picture
from support.net import Net
from support.simulated import check_simulated, kinds, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import stem_pool
from optdnn.runtime.program import Program


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the kernel run wherever it can."""
    monkeypatch.setattr(stem_pool, "_offers", stem_pool.wgmma_offers)
    monkeypatch.setattr(stem_pool.PooledStem, "_slower", lambda *given: None)


def first(n: Net, channels: int = 16, kernel: int = 7, **more: Any) -> Value:
    given = {"pads": kernel // 2, "strides": 2, "bias": True, **more}
    return n.op("Relu", n.conv(n.input(2, 3, 34, 30), channels, kernel, **given))


def of_bytes(n: Net) -> Value:
    return n.op("Relu", n.conv(normalized(n, picture(n, (22, 18))), 16, 5, strides=2, pads=2))


NETS: dict[str, Callable[[Net], Value]] = {
    "7x7": lambda n: n.max_pool(first(n, 20), 3, pads=1),
    "3x3": lambda n: n.max_pool(first(n, 16, 3), 2),
    "bytes": lambda n: n.max_pool(of_bytes(n), 3, pads=1),
}


def of(build: Callable[[Net], Value]) -> Graph:
    n = Net()
    return n.done(n.conv(build(n), 8, 3))


def configs(program: Program) -> list[str]:
    return [str(t["config"]) for t in program.meta["tactics"] if t["tactic"] == "conv_stem_pool"]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("only")
def test_networks_compute_the_same(name: str) -> None:
    program = check_simulated(of(NETS[name]))
    assert kinds(program).count("PooledImageConv") == 1
    assert [c.startswith("stem_wgmma") for c in configs(program)] == [True]
    assert any(k.template == "conv_stem_pool_sm90.cu" for k in program.kernels)


@pytest.mark.parametrize(("batch", "wgmma"), [(1, False), (128, True)])
def test_the_cost_model_chooses(batch: int, wgmma: bool) -> None:
    """ResNet's first convolution: for many images, Hopper's kernel."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 3, 224, 224), 64, 7, pads=3, strides=2, bias=True))
    program = lowered(n.done(n.conv(n.max_pool(x, 3, pads=1), 8, 1, pads=0)))
    assert [c.startswith("stem_wgmma") for c in configs(program)] == [wgmma]
