"""Signatures of sites: their size is bounded, however many paths lead back through a network's shortcuts."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import from_text
from support.net import Net
from support.simulated import lowered, tactics

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
    program = lowered(post_norm(), precision)
    assert len(program.steps) >= LAYERS
    assert visits >= len(program.steps)


def test_alike_sites_have_one_signature() -> None:
    program = lowered(post_norm(3), "fp16")
    again = lowered(post_norm(3), "fp16")
    found, same = ([t["signature"] for t in p.meta["tactics"]] for p in (program, again))
    assert found == same
    assert len(set(found)) > 1


def test_the_steps_of_a_loop_share_signatures() -> None:
    """Each step multiplies the result of the one before it, and adds it: a path through all steps."""
    n = Net()
    x, w = n.input(4, 64), n.random(64, 64)
    for _ in range(2 * choose.DEPTH + 6):
        x = n.op("Add", n.op("Tanh", n.op("MatMul", x, w)), x)
    found = [t["signature"] for t in lowered(n.done(x), "fp16").meta["tactics"] if t["kind"] == "MatMul"]
    assert len(found) == 2 * choose.DEPTH + 6
    assert len(set(found)) <= choose.DEPTH + 3


def test_an_operator_whose_size_depends_on_data_has_no_neighbors() -> None:
    """The host multiplies the rows of a Loop, however many there are; the product after their sum runs on the GPU."""
    graph = from_text("""<ir_version: 8, opset_import: ["": 15]> g (float[4] x, int64 trips) => (float[1,3] y)
        <bool yes = {1}, int64[1] zero = {0}, float[5] bias = {1, 2, 3, 4, 5}, int64[2] first = {4, 5},
         int64[2] second = {5, 3}> {
        last, rows = Loop(trips, yes, x) <body = b (int64 i, bool go, float[4] given) => (bool on, float[4] s, float[4] row)
            { on = Identity(go) s = Tanh(given) row = Identity(s) }>
        w = ConstantOfShape<value = float[1] {0.5}>(first) product = MatMul(rows, w) biased = Add(product, bias)
        half = Mul(biased, biased) sum = ReduceSum(half, zero)
        v = ConstantOfShape<value = float[1] {0.25}>(second) y = MatMul(sum, v) }""")
    program = lowered(graph, "fp32")
    assert len(tactics(program, "MatMul")) == 1
