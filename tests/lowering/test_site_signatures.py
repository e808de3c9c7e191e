"""Signatures of sites: their size is bounded, however many paths lead back through a network's shortcuts."""

from __future__ import annotations

from typing import Any

import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.ir.graph import Graph
from optdnn.lowering import choose
from optdnn.ops.norm import LayerNormAttrs

LAYERS = 14


def post_norm(layers: int = LAYERS) -> Graph:
    """Each layer reads the one before it twice: a product, and a shortcut (BERT's form)."""
    n = Net()
    x = n.input(8, 64)
    for _ in range(layers):
        total = n.op("Add", n.matmul(x, 64), x)
        x = n.op("LayerNormalization", total, n.random(64), n.random(64), attrs=LayerNormAttrs(-1, 1e-5))
    return n.done(x)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_shared_operators_are_described_once(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    visits = 0
    facts = choose._facts

    def counted(*args: Any) -> Any:
        nonlocal visits
        visits += 1
        assert visits < 100 * LAYERS**2, "paths are walked, not operators"
        return facts(*args)

    monkeypatch.setattr(choose, "_facts", counted)
    program = lowered(post_norm(), precision, no_cubins=True)
    assert len(program.steps) >= LAYERS
    assert visits >= len(program.steps)


def test_alike_sites_have_one_signature() -> None:
    program = lowered(post_norm(3), "fp16", no_cubins=True)
    again = lowered(post_norm(3), "fp16", no_cubins=True)
    found, same = ([t["signature"] for t in p.meta["tactics"]] for p in (program, again))
    assert found == same
    assert len(set(found)) > 1
