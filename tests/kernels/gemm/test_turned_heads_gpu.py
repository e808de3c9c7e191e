"""Products that turn heads on a GPU: each kind of configuration does what its step means, and writes nothing outside."""

from __future__ import annotations

import pytest
from kernels.gemm.test_turned_heads import NETS, layer  # type: ignore[import-not-found]
from support.on_gpu import checked_launches
from support.one_config import only

from optdnn.kernels.conv.implicit_gemm import Config

CONFIGS = (
    Config(1, 1, 1, 40, 3), Config(2, 1, 1, 64, 2, out_buffers=2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 104, 3, alternate=True),
    Config(1, 2, 1, 32, 2), Config(1, 1, 1, 128, 2, share=(1, 2)), Config(1, 1, 2, 152, 2, alternate=True), Config(2, 1, 1, 224, 2),
    Config(1, 1, 1, 64, 3, blocks=2), Config(2, 1, 2, 128, 2),
)  # fmt: skip
ALL = {
    **NETS,
    "large": lambda: layer(14, 2, length=1501, width=512),
    "large far": lambda: layer(8, 2, 128, length=1501, width=512),
}

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, config)
    graph = ALL[name]()
    found = checked_launches(graph, precision)
    assert "TurnedHeads" in {e.kind for e in found}
