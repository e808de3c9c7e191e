"""Products that rotate heads on a GPU: each kind of configuration agrees with its meaning, and writes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.gemm.test_turned_heads import NETS, layer  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.one_config import only
from support.simulated import feeds_of, lowered

from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, config)
    graph = ALL[name]()
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert "TurnedHeads" in {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
