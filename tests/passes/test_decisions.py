"""Decisions stay fp32 in a 16-bit network: operators that rank, suppress or compute indices, back to the features."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text
from support.simulated import lowered, simulate

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP16, FP32

DETECTOR = """<ir_version: 9, opset_import: ["": 17]>
g (float[8,4] x, float[8,2] s) => (int64[kept,3] places)
<float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, int64[1] most = {8}, float[1] overlap = {0.5}, float[1] least = {0.01},
 float[8,1] class = {29000, 29000, 29000, 29000, 58000, 58000, 58000, 58000}, int64[3] one = {1, 8, 4}, int64[1] zero = {0}>
{ features = MatMul(x, w) boxes = Add(features, class) three = Reshape(boxes, one)
  p = Softmax<axis = 1>(s) t = Transpose<perm = [1, 0]>(p) scores = Unsqueeze(t, zero)
  places = NonMaxSuppression(three, scores, most, overlap, least) }"""
RANKED = """<ir_version: 9, opset_import: ["": 17]>
g (float[1,2,8,8] x) => (float[1,16] y, int64[1,16] at, float[1,3,8,8] z)
<float[3,2,1,1] w = {1.0, 0.5, 0.25, 2.0, 0.3, 0.7}, int64[1] k = {16}, int64[2] flat = {1, 192}>
{ f = Conv(x, w) z = Tanh(f) s = Sigmoid(f) r = Reshape(s, flat) y, at = TopK(r, k) }"""
BRANCH = """<ir_version: 9, opset_import: ["": 17]>
g (bool c, float[4] x) => (float[4] y) {
  v = Exp(x)
  y = If(c) <then_branch = t () => (float[4] a) { BODY },
             else_branch = e () => (float[4] b) { b = Identity(v) }>
}"""


def assigned(text: str, plan: PrecisionPlan) -> tuple[Graph, PassReport]:
    graph = from_text(text)
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=plan))
    verify(graph)
    return graph, report


def types(graph: Graph) -> dict[str, str]:
    """The type of each kind's first result (of casts: none)."""
    shown = {FP16: "fp16", FP32: "fp32"}
    return {
        o.kind: shown.get(o.outputs[0].type.dtype, "int") for o in graph.order() if o.kind not in ("Cast", "Constant")
    }


def test_boxes_that_suppress_one_another() -> None:
    graph, report = assigned(DETECTOR, PrecisionPlan.of_option("fp16"))
    found = types(graph)
    assert found["MatMul"] == "fp16", "features are made at the network's precision"
    assert {found[k] for k in ("Add", "Reshape", "Softmax", "Transpose", "Unsqueeze")} == {"fp32"}
    (nms,) = graph.of_kind("NonMaxSuppression")
    reasons = {r.reason for r in report.refused}
    assert f"Softmax stays fp32: NonMaxSuppression {min(nms.src)} decides by it" in reasons


def test_the_boxes_that_are_kept_are_the_same() -> None:
    """At 29,000 the next fp16 number is 16 away: all of these boxes would be one."""
    corners = np.array([[0, 0, 6, 6], [8, 8, 14, 14], [0, 8, 6, 14], [8, 0, 14, 6]], np.float32)
    rng = np.random.default_rng(0)
    feeds = {"x": np.concatenate([corners, corners]), "s": rng.standard_normal((8, 2)).astype(np.float32)}
    graph = from_text(DETECTOR)
    (want,) = evaluate(graph, feeds).values()
    assert len(want) == 16
    (got,) = simulate(lowered(graph, "fp16"), feeds).values()
    np.testing.assert_array_equal(got, want)


def test_scores_that_are_ranked() -> None:
    graph, _ = assigned(RANKED, PrecisionPlan.of_option("fp16"))
    found = types(graph)
    assert found["Conv"] == found["Tanh"] == "fp16"
    assert {found[k] for k in ("Sigmoid", "Reshape", "TopK")} == {"fp32"}
    again = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan.of_option("fp16")))
    assert again.changes == 0


def test_peaks_that_are_ranked() -> None:
    """An element is a peak if it equals the largest one around it: both have one rounding (SuperPoint)."""
    text = RANKED.replace(
        "r = Reshape(s, flat)",
        "b = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(s) e = Equal(s, b) c = CastLike(e, s) p = Mul(s, c) "
        "r = Reshape(p, flat)",
    )
    found = types(assigned(text, PrecisionPlan.of_option("fp16"))[0])
    assert found["Conv"] == "fp16"
    assert {found[k] for k in ("Sigmoid", "MaxPool", "Mul", "TopK")} == {"fp32"}
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype(np.float32)}
    graph = from_text(text)
    want = evaluate(graph, feeds)["y"]
    assert np.count_nonzero(want) > 8
    np.testing.assert_allclose(simulate(lowered(graph, "fp16"), feeds)["y"], want, rtol=0.01)


LARGEST = """<ir_version: 9, opset_import: ["": 18]>
g (float[4,64] a, float[4,64] b) => (float[4,64] y) <int64[1] last = {1}>
{ m = Mul(a, b) h = Exp(m) p = ReduceMax(h, last) e = Equal(h, p) c = CastLike(e, h) y = Mul(c, h) }"""


@pytest.mark.parametrize(
    ("p", "e"),
    [
        ("ReduceMax(h, last)", "Equal(h, p)"),
        ("ReduceMax(h, last)", "GreaterOrEqual(h, p)"),
        ("ReduceMax(h, last)", "LessOrEqual(p, h)"),
        ("ReduceMax(h, last)", "l = Less(h, p) e = Not(l)"),
        ("ReduceMax(h, last)", "l = Greater(p, h) e = Not(l)"),
        ("i = ArgMax<axis = 1>(h) p = GatherElements<axis = 1>(h, i)", "GreaterOrEqual(h, p)"),
    ],
)
def test_elements_that_equal_the_largest_one(p: str, e: str) -> None:
    """The reduction and the comparison compute the elements twice, in registers."""
    text = LARGEST.replace("p = ReduceMax(h, last)", p if " = " in p else f"p = {p}")
    text = text.replace("e = Equal(h, p)", e if " = " in e else f"e = {e}")
    graph = from_text(text)
    rng = np.random.default_rng(0)
    feeds = {k: rng.standard_normal((4, 64)).astype(np.float32) for k in ("a", "b")}
    got = simulate(lowered(graph, "fp16"), feeds)["y"]
    assert np.count_nonzero(got) == 4
    np.testing.assert_allclose(got, evaluate(graph, feeds)["y"], rtol=0.01)
    found = types(assigned(text, PrecisionPlan.of_option("fp16"))[0])
    assert found["Exp"] == "fp32"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h = Exp(m)", "h = Softmax(m)"),  # a layer stores its result once
        ("e = Equal(h, p)", "q = Constant<value = float {0.5}>() e = Equal(h, q)"),
        ("e = Equal(h, p)", "q = ReduceMean(h, last) e = Less(h, q)"),
        ("e = Equal(h, p)", "i = Cast<to = 9>(h) j = Cast<to = 9>(p) e = Equal(i, j)"),
    ],
)
def test_comparisons_that_do_not_decide(old: str, new: str) -> None:
    found = types(assigned(LARGEST.replace(old, new), PrecisionPlan.of_option("fp16"))[0])
    assert found["ReduceMax"] == "fp16"


def test_a_plan_that_names_it_has_its_way() -> None:
    graph, _ = assigned(RANKED, PrecisionPlan("fp16", {"*": "fp16"}, "fp16"))
    assert {types(graph)[k] for k in ("Sigmoid", "TopK")} == {"fp16"}


def test_numbers_that_become_integers() -> None:
    text = RANKED.replace(
        "r = Reshape(s, flat) y, at = TopK(r, k)", "q = Floor(s) i = Cast<to = 7>(q) at = Reshape(i, flat)"
    )
    text = text.replace("float[1,16] y, int64[1,16] at", "int64[1,192] at").replace("int64[1] k = {16}, ", "")
    found = types(assigned(text, PrecisionPlan.of_option("fp16"))[0])
    assert found["Conv"] == "fp16"
    assert found["Floor"] == found["Sigmoid"] == "fp32"


@pytest.mark.parametrize(
    ("body", "kept"),
    [("k = Constant<value = int64[1] {4}>() a, i = TopK(v, k)", "fp32"), ("a = Neg(v)", "fp16")],
)
def test_a_branch_in_which_something_decides(body: str, kept: str) -> None:
    graph, _ = assigned(BRANCH.replace("BODY", body), PrecisionPlan.of_option("fp16"))
    assert types(graph)["Exp"] == kept
