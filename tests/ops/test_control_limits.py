"""Loops that never end, and control flow that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onenode import onnxruntime_run
from test_control import BRANCHES, LOOP, F, model

import optdnn
from optdnn.errors import ModelError, RunError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate


def test_a_loop_that_never_ends_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_MAX_LOOP_TRIPS", "50")
    text = """g (float[3] x) => (float[3] y) {
      t = Constant<value = bool {1}>()
      y = Loop (, t, x) <body = b (int64 i, bool c, float[3] v) => (c2, w) { c2 = Identity(c)  w = Add(v, x) }>
    }"""
    graph = import_model(model(text))
    with pytest.raises(RunError, match=r"would run for ever, its body does not end it; .*OPTDNN_MAX_LOOP_TRIPS=N"):
        evaluate(graph, {"x": np.ones(3, F)})
    constant = "n = Constant<value = int64 {1000000000}>()"
    billion = text.replace("(, t, x)", "(n, t, x)").replace("t = ", f"{constant} t = ", 1)
    with pytest.raises(RunError, match="would run 1000000000 times"):
        evaluate(import_model(model(billion)), {"x": np.ones(3, F)})
    computed = import_model(model(ENDLESS))
    with pytest.raises(RunError, match="has run 50 times"):
        evaluate(computed, {"x": np.zeros(3, F), "top": np.array([100], F)})
    nested = import_model(model(WITHIN))
    assert evaluate(nested, {"n": np.array(24), "x": np.ones(3, F)})["y"].tolist() == [1, 1, 1]
    with pytest.raises(RunError, match="has run 50 times"):  # 2 and 2 * 25, together
        evaluate(nested, {"n": np.array(25), "x": np.ones(3, F)})


ENDLESS = """g (float[3] x, float[1] top) => (float[3] y, float[k, 3] rows) {
  yes = Constant<value = bool {1}>()
  y, rows = Loop (, yes, x) <body = b (int64 i, bool c, float[3] v) => (on, w, row) {
    w = Add(v, v)  row = Identity(w)  highest = ReduceMax<keepdims = 0>(w)  least = Squeeze(top)  on = Less(highest, least)
  }>
}"""
WITHIN = """g (int64 n, float[3] x) => (float[3] y) {
  two = Constant<value = int64 {2}>()  yes = Constant<value = bool {1}>()
  y = Loop (two, yes, x) <body = b (int64 i, bool c, float[3] v) => (c2, w) {
    c2 = Identity(c)
    w = Loop (n, c, v) <body = d (int64 j, bool e, float[3] a) => (e2, a2) { e2 = Identity(e)  a2 = Neg(a) }>
  }>
}"""


def test_onnxruntimes_loops_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_MAX_LOOP_TRIPS", "50")
    engine = optdnn.build(model(ENDLESS), target="cpu", threads=1, tactics="onnxruntime")
    assert [s.executor for s in engine.program.steps] == ["onnxruntime"]
    x, top = np.ones(3, F), np.array([100], F)
    feed = {"x": x, "top": top}
    for a, b in zip(engine.run(feed).values(), onnxruntime_run(model(ENDLESS), feed), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(RunError, match=r"Loop.* has run 50 times; its condition does not end it"):
        engine.run({"x": 0 * x, "top": top})
    inner = optdnn.build(model(WITHIN), target="cpu", threads=1)
    assert [s.executor for s in inner.program.steps] == [
        "reference"
    ]  # a library would be limited to 50 times 50 iterations
    for n in (0, 3, 24):  # all loops of a call count together
        np.testing.assert_array_equal(inner.run({"n": np.array(n), "x": x})["y"], x)
    with pytest.raises(RunError, match="would run 4611686018427387904 times"):
        inner.run({"n": np.array(2**62), "x": x})


def test_a_build_of_a_loop_that_never_ends_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_MAX_LOOP_TRIPS", "50")
    text = """g (float[3] x) => (float[3] y) {
      t = Constant<value = bool {1}>()
      y = Loop (, t, x) <body = b (int64 i, bool c, float[3] v) => (c2, w) { c2 = Identity(c)  w = Neg(v) }>
    }"""
    engine = optdnn.build(model(text), target="cpu", threads=1)  # it measures runs that fail
    with pytest.raises(RunError, match=r"Loop_\d has run 50 times"):
        engine.run({"x": np.ones(3, F)})


def test_unsupported_nodes_of_bodies_are_named_once() -> None:
    text = LOOP.replace("row = Mul(v2, v2)", "row = Multinomial(v2)")
    with pytest.raises(UnsupportedError) as error:
        import_model(model(text))
    (node,) = error.value.nodes
    assert node.op_type == "Multinomial"
    assert "Loop" in node.node


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (BRANCHES.replace("bool c", "float c"), (ShapeError, ModelError), "must be bool"),
        (BRANCHES.replace("p2 = Mul(r, r)", "h = Mul(r, r) p2 = Cast<to = 7>(h)"), ShapeError, "in one branch and"),
        (BRANCHES.replace("(r, z)", "(r, nothing)"), ModelError, "nothing"),
        (LOOP.replace("(going2, v2, row)", "(going2, i, row)"), ShapeError, "a carried value begins as"),
        (LOOP.replace("(n, t, x) <", "(n, t) <"), ShapeError, "2 and 0 carried ones are fed"),
        (LOOP.replace("int64 n", "int32 n"), ShapeError, "trip count"),
    ],
)
def test_contradictions(text: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        import_model(model(text))


SCAN_8 = """<ir_version: 3, opset_import: ["": 8]>
g (float[BATCH, 2] init, float[BATCH, 3, 2] x) => (float[BATCH, 2] last, float[BATCH, 3, 2] sums) {
    last, sums = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] v) => (float[2] t, float[2] out) {
        t = Add(s, v)
        out = Identity(t)
    }> (LENS, init, x)
}"""


def test_scan_of_opset_8_has_a_batch() -> None:
    model = onnx.parser.parse_model(SCAN_8.replace("BATCH", "2").replace("LENS", ""))
    init, x = np.ones((2, 2), np.float32), np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    got = evaluate(import_model(model), {"init": init, "x": x})
    np.testing.assert_array_equal(got["sums"], 1 + x.cumsum(1))
    np.testing.assert_array_equal(got["last"], 1 + x.sum(1))


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (SCAN_8.replace("BATCH", "n").replace("LENS", ""), "batch of n: 1 to 64 fixed rows"),
        (SCAN_8.replace("BATCH", "65").replace("LENS", ""), "batch of 65: 1 to 64 fixed rows"),
        (
            SCAN_8.replace("BATCH", "2").replace("LENS", "lens").replace("g (", "g (int64[2] lens, "),
            "with sequence_lens",
        ),
    ],
)
def test_scans_of_opset_8_that_are_refused(text: str, because: str) -> None:
    with pytest.raises(UnsupportedError, match=because):
        import_model(onnx.parser.parse_model(text))
