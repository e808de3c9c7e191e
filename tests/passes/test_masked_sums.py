"""masked_sums: graph networks with the edges that a mask selects, and a self-loop for each node."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.simulated import check_simulated

from optdnn.ir.evaluate import evaluate
from optdnn.passes.base import PassContext
from optdnn.passes.dce import DeadCode
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.support import selected_rows

GPU = PassContext(target="cuda:sm_90a")
EDGES = """<ir_version: 10, opset_import: ["": 18]>
g (float[6,4] x, int64[2,10] edges) => (float[OUT] y)
<int64 zero = {0}, int64 one = {1}, int64[1] flat = {-1}, int64[2] column = {-1, 1}, int64[2] wide = {1, 4},
 int64[2,6] loops = {0,1,2,3,4,5, 0,1,2,3,4,5}, float[6,4] none = {0,0,0,0, 0,0,0,0, 0,0,0,0, 0,0,0,0, 0,0,0,0, 0,0,0,0},
 int64[1] first = {0}, int64[1] last = {1}>
{ from = Gather(edges, zero) to = Gather(edges, one) same = Equal(from, to) mask = Not(same) chosen = NonZero(mask)
  i = Reshape(chosen, flat) kept = Gather<axis = 1>(edges, i) all = Concat<axis = 1>(kept, loops)
  source = Gather<axis = 0>(all, zero) target = Gather<axis = 0>(all, one) rows = Gather(x, source) message = Exp(rows)
  at1 = Reshape(target, column) at = Expand(at1, wide) REST }"""
SCATTER = 'y = ScatterElements<axis = 0, reduction = "add">(none, at, message)'


def edges(rest: str = SCATTER, out: str = "6,4") -> str:
    """A layer over the edges between different nodes, and a self-loop for each node."""
    return EDGES.replace("REST", rest).replace("OUT", out)


def check_values(text: str) -> None:
    """Equal results if none, some or all of the edges are self-loops."""
    graph = from_text(text)
    DeadCode()(graph)
    after = graph.copy()
    assert MaskedRows()(after, GPU).fired[0].rule == "masked_sums"
    assert all(op.outputs[0].type.is_static for op in after.ops())
    rng = np.random.default_rng(0)
    for loops in (0, 4, 10):
        ends = rng.integers(0, 6, 10)
        pairs = np.stack([ends, np.where(np.arange(10) < loops, ends, (ends + 1) % 6)])
        feeds = {"x": rng.standard_normal((6, 4)).astype(np.float32), "edges": pairs}
        np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], rtol=1e-6)


def test_a_sum_over_edges() -> None:
    done, _ = check_pass(MaskedRows(), edges(), changes=1, rules={"masked_sums": 1}, context=GPU)
    assert "NonZero" not in done.kinds()
    check_values(edges())


@pytest.mark.parametrize("reduction", ["max", "min", "mul"])
def test_other_reductions(reduction: str) -> None:
    check_values(edges(SCATTER.replace('"add"', f'"{reduction}"')))


@pytest.mark.parametrize(("kind", "out"), [("ReduceMin", "4"), ("ReduceMax", "4"), ("ReduceSum", "4")])
def test_reductions_over_the_edges(kind: str, out: str) -> None:
    check_values(edges(f"y = {kind}<keepdims = 0>(message, first)", out))


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_integers_scattered_by_their_numbers(reduction: str) -> None:
    rest = f"""big = Cast<to = 7>(message) base = Cast<to = 7>(none) z = ScatterND<reduction = "{reduction}">(base, at1, big)
      y = Cast<to = 1>(z)"""
    check_values(edges(rest))


def test_no_edge_runs_on_the_cpu() -> None:
    program = check_simulated(from_text(edges()), "fp32")
    assert {s.executor for s in program.steps} <= {"cuda", "view"}


def test_edges_without_loops_by_a_mask_of_numbers() -> None:
    text = edges().replace("all = Concat<axis = 1>(kept, loops)", "all = Identity(kept)").replace(
        "mask = Not(same)", "kind = Not(same) mask = Cast<to = 7>(kind)"
    )  # fmt: skip
    check_values(text)


def test_rows_that_are_looked_up_by_gather_nd() -> None:
    """As PyTorch's newer exporter writes them."""
    check_values(
        edges()
        .replace("Gather(x, source)", "GatherND(x, source1)")
        .replace("rows =", "source1 = Unsqueeze(source, last) rows =", 1)
    )


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = edges('sums = CumSum(message, zero) y = ScatterElements<axis = 0, reduction = "add">(none, at, sums)')
    check_refused(
        MaskedRows(), text, because="does not compute each row from a row that the mask selected", context=GPU
    )
    again = "at2 = Unsqueeze(target, last) again = GatherND(message, at2) y ="
    text = edges(SCATTER.replace("y =", again).replace("at, message", "at, again"))
    check_refused(MaskedRows(), text, because="GatherND.* does not compute each row", context=GPU)
    turned = "other = Concat<axis = 1>(loops, kept) begin = Gather<axis = 0>(other, zero) rows = Gather(x, begin)"
    text = edges().replace("rows = Gather(x, source)", turned)
    check_refused(MaskedRows(), text, because="holds other rows than a value of the same size", context=GPU)
    monkeypatch.setattr(selected_rows, "MOST_ELEMENTS", 63)
    check_refused(MaskedRows(), edges(), because="results for all rows would be too large", context=GPU)


def test_other_reductions_are_no_candidates() -> None:
    check_untouched(
        MaskedRows(), edges("y = ReduceSum(message, first)", "1,4").replace("Gather(x, source)", "Gather(x, to)"), GPU
    )
