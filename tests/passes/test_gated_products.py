"""gated_products: gated linear units as two products."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched, stages
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.index import SplitAttrs
from optdnn.passes import gated_products
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.gated_products import GatedProducts

PASS = GatedProducts()
ROWS, INNER, OUTER = 12, 16, 24


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small units count, too."""
    monkeypatch.setattr(gated_products, "LEAST", ROWS * OUTER)


def unit(
    *, split: bool = True, act: str = "Gelu", first: bool = False, bias: bool = True, gemm: bool = False, turn: bool = False,
    readers: int = 1, cut: int = OUTER, known: bool = True, rows: int = ROWS,
) -> Graph:  # fmt: skip
    """A gated linear unit. ``split``: by Split, else by two Slices; ``first``: the first half is the gate; ``turn``: the gate is
    the first factor; ``cut``: where the parts meet."""
    n = Net()
    x = n.input(rows, INNER)
    if gemm:
        whole = n.gemm(x, 2 * OUTER)
    else:
        w = n.random(INNER, 2 * OUTER) if known else n.input(INNER, 2 * OUTER, name="w")
        whole = n.op("MatMul", x, w)
        whole = n.op("Add", whole, n.random(2 * OUTER)) if bias else whole
    if split:
        parts = n.op("Split", whole, n.ints(OUTER, OUTER), attrs=SplitAttrs(axis=1), outputs=2)
    else:
        ends = ((0, OUTER), (cut, cut + OUTER))
        parts = [n.op("Slice", whole, *(n.ints(v) for v in (*span, 1))) for span in ends]
    plain, gate = parts[::-1] if first else parts
    gate = n.op(act, gate)
    return n.done(
        n.op("Mul", *((gate, plain) if turn else (plain, gate))), *(n.op("Neg", whole) for _ in range(readers - 1))
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": False},
        {"first": True},
        {"act": "Sigmoid", "turn": True},
        {"bias": False},
        {"gemm": True, "act": "Swish"},
    ],
)
def test_two_products(options: dict[str, Any]) -> None:
    graph, _ = check_pass(PASS, unit(**options), changes=1, rules={"gated_product": 1})
    act = options.get("act", "Gelu")
    added = 2 if options.get("bias", True) else 0
    assert {k: n for k, n in graph.kinds().items() if k not in ("Constant", "Input", "Output")} == {
        k: n for k, n in {"Add": added, act: 1, "MatMul": 2, "Mul": 1}.items() if n
    }
    FuseEpilogue()(graph)
    bias = ("Add",) * (added // 2)
    assert sorted(stages(graph)) == sorted([("<MatMul>", *bias), ("<MatMul>", *bias, act, "Mul")])
    assert not graph.of_kind("Mul", act, "Add")


def test_no_launch_is_pointwise() -> None:
    program = check_simulated(unit())
    assert [k for k in kinds(program) if k != "Pointwise"] == ["Conv", "Conv"]
    assert kinds(program).count("Pointwise") == 2  # casts of the network's input and output


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"readers": 2}, "something else reads columns"),
        ({"split": False, "cut": OUTER - 4}, "not the halves"),
        ({"rows": ROWS - 1}, "too small"),
    ],
)
def test_refused(options: dict[str, Any], because: str) -> None:
    check_refused(PASS, unit(**options), because=because, rule="gated_product")


def test_computed_weights_stay() -> None:
    check_untouched(PASS, unit(known=False))


def test_a_gate_of_another_product_stays() -> None:
    n = Net()
    x = n.input(ROWS, INNER)
    wholes = [n.op("MatMul", x, n.random(INNER, 2 * OUTER)) for _ in range(2)]
    sizes, halves = n.ints(OUTER, OUTER), SplitAttrs(axis=1)
    first, second = (n.op("Split", whole, sizes, attrs=halves, outputs=2) for whole in wholes)
    check_untouched(PASS, n.done(n.op("Mul", first[0], n.op("Gelu", second[1])), first[1], second[0]))
