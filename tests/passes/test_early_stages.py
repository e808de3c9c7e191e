"""stage_before_reshape: activations and arithmetic with numbers move in front of a Reshape, to the product before it.

gate_before_reshape: so does the multiplication of heads by a gate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph
from optdnn.ops.index import BlockAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.hoist_views import HoistViews

H, D = 2, 4


def behind(*kinds: str, used: bool = False, source: str = "MatMul") -> Graph:
    """A product, a Reshape, and operators after it: "Add" and "Mul" with a number, "Div" of a number, "Rows" with a row."""
    n = Net(np.float64)
    x = n.input(6, 8)
    made = n.matmul(x, H * D) if source == "MatMul" else n.op(source, x)
    y = first = n.op("Reshape", made, n.ints(6, H, D), attrs=ReshapeAttrs())
    for kind in kinds:
        more = {"Add": (0.5,), "Mul": (0.25,), "Rows": (n.random(D),)}.get(kind, ())
        y = n.op("Mul" if kind == "Rows" else kind, *((2.0, y) if kind == "Div" else (y, *more)))
    return n.done(y, *([n.op("Exp", first)] if used else []))


@pytest.mark.parametrize("kinds", [("Tanh",), ("Mul", "Add", "Relu"), ("Div",)])
def test_they_move_to_the_product(kinds: tuple[str, ...]) -> None:
    rules = {"stage_before_reshape": len(kinds)}
    graph, _ = check_pass(HoistViews(), behind(*kinds), changes=len(kinds), rules=rules)
    (reshape,) = graph.of_kind("Reshape")
    assert [u.kind for u in graph.users(reshape.value)] == ["Output"]
    assert graph.kinds()["MatMul"] == 1


@pytest.mark.parametrize(
    "graph",
    [behind("Tanh", used=True), behind("Rows"), behind("Exp"), behind("Tanh", source="Sin")],
    ids=["the Reshape is read elsewhere", "a row is no number", "no stage", "no product"],
)
def test_others_stay(graph: Graph) -> None:
    check_untouched(HoistViews(), graph)


@pytest.mark.parametrize("bias", [False, True])
def test_they_move_before_several_reshapes(bias: bool) -> None:
    n = Net(np.float64)
    made = n.matmul(n.input(6, 8), H * D)
    y = n.op("Reshape", n.op("Add", made, n.random(H * D)) if bias else made, n.ints(6, H, D), attrs=ReshapeAttrs())
    y = n.op("Tanh", n.op("Reshape", y, n.ints(6, 1, 1, H * D), attrs=ReshapeAttrs()))
    graph, _ = check_pass(HoistViews(), n.done(y), changes=1, rules={"stage_before_reshape": 1})
    (before,) = graph.of_kind("Add" if bias else "MatMul")
    assert graph.of_kind("Tanh")[0].inputs[0] == before.value


def test_they_move_before_a_pixel_shuffle() -> None:
    n = Net(np.float64)
    y = n.op("DepthToSpace", n.conv(n.input(1, 8, 5, 6), 12), attrs=BlockAttrs(2, "CRD"))
    graph, _ = check_pass(HoistViews(), n.done(n.op("LeakyRelu", y)), changes=1, rules={"stage_before_reshape": 1})
    (conv,) = graph.of_kind("Conv")
    assert graph.of_kind("LeakyRelu")[0].inputs[0] == conv.value


def test_the_product_takes_them_in() -> None:
    n = Net()
    y = n.op("Reshape", n.matmul(n.input(32, 64), 64), n.ints(32, 4, 16), attrs=ReshapeAttrs())
    y = n.op("Sqrt", n.op("Add", n.op("Relu", y), 0.125))
    program = check_simulated(n.done(n.op("Softmax", y)))
    tactics = [str(s.params["tactic"]).split()[0] for s in program.steps]
    assert tactics == ["pointwise", "gemm_sm90", "rows_activated"], "a cast from fp32; the softmax stores fp32"


def gated(
    *,
    source: str = "MatMul",
    used: bool = False,
    shape: tuple[int, ...] = (6, H * D),
    one: bool = False,
    bias: str = "",
) -> Graph:
    """Heads, multiplied by a gate, and a Reshape. ``one``: one factor for each head. ``bias``: "constant" or "input"."""
    n = Net(np.float64)
    x, heads = n.input(6, 8), n.op("Exp", n.input(6, H, D))
    made = n.matmul(x, H if one else H * D) if source == "MatMul" else n.op(source, x)
    if bias:
        made = n.op("Add", made, n.random(H * D) if bias == "constant" else n.input(H * D, name="b"))
    made = n.op("Sigmoid", made)
    gate = n.op("Reshape", made, n.ints(6, H, 1 if one else D), attrs=ReshapeAttrs())
    y = n.op("Reshape", n.op("Mul", heads, gate), n.ints(*shape), attrs=ReshapeAttrs())
    return n.done(y, *([n.op("Exp", gate)] if used else []))


@pytest.mark.parametrize("bias", ["", "constant"])
def test_a_gate_moves_to_its_product(bias: str) -> None:
    graph, _ = check_pass(HoistViews(), gated(bias=bias), changes=1, rules={"gate_before_reshape": 1})
    (product,) = graph.of_kind("Mul")
    assert {graph.op(v).kind for v in product.inputs if v is not None} == {"Sigmoid", "Reshape"}
    assert [u.kind for u in graph.users(product.value)] == ["Output"]


@pytest.mark.parametrize(
    "graph",
    [gated(used=True), gated(source="Sin"), gated(shape=(3, 2, H * D)), gated(one=True), gated(bias="input")],
    ids=[
        "the gate is read elsewhere",
        "no product",
        "another shape than the product's",
        "a factor of each head",
        "a computed bias",
    ],
)
def test_other_gates_stay(graph: Graph) -> None:
    check_untouched(HoistViews(), graph)


def linear_attention(*, plain: bool = True, moved: bool = True, rows: int = 6) -> Graph:
    """Queries and keys with an activation, and values without (LoFTR: Sun et al., 2021). The product of keys and values reads the
    keys transposed if they are ``moved``."""
    n = Net(np.float64)
    x = n.input(rows, 8)
    q, k, v = (n.op("Reshape", n.matmul(x, H * D), n.ints(rows, H, D), attrs=ReshapeAttrs()) for _ in range(3))
    q, k = n.op("Elu", q), n.op("Elu", k)
    v = v if plain else n.op("Elu", v)
    if moved:
        k = n.op("Transpose", k, attrs=TransposeAttrs((1, 2, 0)))
    return n.done(n.op("Exp", q), n.op("Exp", k), n.op("Exp", v))


def test_products_without_the_activation_are_computed_together() -> None:
    because = "without it, one launch computes MatMul_1 and MatMul_5"
    report = check_refused(HoistViews(), linear_attention(), because=because, rule="stage_before_reshape")
    assert [r.rule for r in report.refused] == ["stage_before_reshape"] * 2


@pytest.mark.parametrize("options", [{"plain": False}, {"moved": False}, {"rows": LAUNCH_BYTES // (8 * H * D) + 1}])
def test_activations_of_all_products_or_that_cost_a_launch(options: dict[str, Any]) -> None:
    """All products have the activation, no launch moves its result, or activating the queries takes longer than a launch."""
    report = HoistViews()(linear_attention(**options), PassContext())
    assert {f.rule for f in report.fired} == {"stage_before_reshape"}
