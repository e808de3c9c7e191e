"""Norms that read or write transposed, and repeated addends, on a GPU: each launch agrees with its meaning, and writes nothing
else."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.norm.test_across import mixer, normalized, normalized_across  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import across as across_tactic
from optdnn.kernels.norm import across_kernel as across
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


def check(graph: Graph, precision: str, kind: str = "AddNorm") -> None:
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert kind in {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(
    "config", [across.Config(r, t) for r, t in ((8, 128), (8, 256), (16, 128), (16, 512), (32, 256), (32, 512))]
)
@pytest.mark.parametrize(
    ("tokens", "kind"),
    [(20, "LayerNormalization"), (24, "RMSNormalization"), (196, "LayerNormalization"), (7, "LayerNormalization")],
)
def test_tokens(tokens: int, kind: str, config: across.Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_tactic, "_offers", lambda problem, gpu: (Offer(config, 1e-6),))
    n = Net()
    check(n.done(mixer(n, tokens, kind)), precision)
    n = Net()
    check(n.done(normalized_across(n, tokens, kind)), precision, kind)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 6, 48), (6, 48), (48,)])
def test_addends_that_repeat(shape: tuple[int, ...], precision: str) -> None:
    n = Net()
    total = n.op("Add", n.random(*shape), n.op("Softmax", n.matmul(n.input(3, 6, 32), 48)))
    check(n.done(n.op("Softmax", normalized(n, total)), n.op("Softmax", total)), precision)
