"""Norms that read or write transposed, and addends that repeat, on a GPU: each launch does what its step means, and no more."""

from __future__ import annotations

import pytest
from kernels.norm.test_across import mixer, normalized, normalized_across  # type: ignore[import-not-found]
from support.net import Net
from support.on_gpu import checked_launches

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import across as across_tactic
from optdnn.kernels.norm import across_kernel as across
from optdnn.kernels.tactic import Offer

pytestmark = pytest.mark.hopper


def check(graph: Graph, precision: str, kind: str = "AddNorm") -> None:
    found = checked_launches(graph, precision)
    assert kind in {e.kind for e in found}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
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


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 6, 48), (6, 48), (48,)])
def test_addends_that_repeat(shape: tuple[int, ...], precision: str) -> None:
    n = Net()
    total = n.op("Add", n.random(*shape), n.op("Softmax", n.matmul(n.input(3, 6, 32), 48)))
    check(n.done(n.op("Softmax", normalized(n, total)), n.op("Softmax", total)), precision)
