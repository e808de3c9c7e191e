"""ordered_columns: alternating parts of a product's columns become a Split of a product with reordered columns."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.passes.hoist_views import HoistViews

K, H, D = 8, 2, 4


def heads(
    *,
    bias: bool = False,
    used: bool = False,
    taken: int = 3,
    flat: bool = False,
    computed: bool = False,
    gemm: bool = False,
) -> Graph:
    """Queries, keys and values head by head (GPT-NeoX, Bloom)."""
    n = Net(np.float64)
    x = n.input(6, K) if flat or gemm else n.input(2, 3, K)
    w = n.input(K, 3 * H * D, name="w") if computed else n.random(K, 3 * H * D)
    y = n.op("Gemm", x, w, n.random(3 * H * D)) if gemm else n.op("MatMul", x, w)
    y = n.op("Add", y, n.random(3 * H * D)) if bias else y
    y = n.op("Reshape", y, n.ints(2, 3, H, 3, D))
    parts = [n.op("Tanh", n.op("Gather", y, n.const(k, np.int64), attrs=GatherAttrs(3))) for k in range(taken)]
    return n.done(*parts, *([n.op("Relu", y)] if used else []))


def devices(axis: int = 3) -> Graph:
    """Groups of heads, each with its part of queries, values and keys (CodeGen)."""
    n = Net(np.float64)
    y = n.op("Reshape", n.op("MatMul", n.input(2, 3, K), n.random(K, 36)), n.ints(2, 3, 4, 9))
    parts = n.op(
        "Split", y, n.ints(*((2, 3, 4) if axis == 3 else (1, 3))), attrs=SplitAttrs(axis), outputs=3 if axis == 3 else 2
    )
    return n.done(*(n.op("Tanh", p) for p in parts))


FORMS = {
    "heads": heads, "bias": lambda: heads(bias=True), "rows of all tokens": lambda: heads(flat=True),
    "gemm": lambda: heads(gemm=True), "devices": devices,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_columns_follow_one_another(form: str) -> None:
    graph, _ = check_pass(HoistViews(), FORMS[form](), changes=1, rules={"ordered_columns": 1})
    (split,) = graph.of_kind("Split")
    assert {u.kind for k in range(3) for u in graph.users(Value(split.id, k))} == {"Reshape"}
    assert not graph.of_kind("Gather")


def test_operators_that_are_no_product_stay() -> None:
    check_refused(
        HoistViews(),
        heads(computed=True),
        because="its operand is not a product with a constant matrix that only it reads",
    )


@pytest.mark.parametrize(
    "graph",
    [heads(used=True), heads(taken=2), devices(axis=2)],
    ids=["another reader", "a part that is not read", "columns in order"],
)
def test_other_parts_stay(graph: Graph) -> None:
    check_untouched(HoistViews(), graph)
