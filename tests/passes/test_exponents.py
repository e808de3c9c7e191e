"""Running sums stay in fp32 up to their exponentials; other exponentials do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.check import from_text

import optdnn
from optdnn.passes.support.exponents import exponents

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
SCAN = (
    HEAD
    + """g (float[1,256,4] c, float[1,256,4] v) => (float[1,256,4] y) <int64 one = {1}>
{ a = CumSum(c, one) b = Sub(v, a) e = Exp(b) s = CumSum(e, one) l = Log(s) h = Add(a, l) y = Exp(h) }"""
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (SCAN, {"a", "b", "e", "s", "l", "h", "y"}),
        (HEAD + "g (float[1,9] x, float[9,9] w) => (float[1,9] y) <int64 one = {1}> "
         "{ m = MatMul(x, w) n = Neg(m) a = CumSum(n, one) y = Exp(a) }", {"n", "a", "y"}),
        (HEAD + "g (float[1,9] x) => (float[1,9] y) <int64 one = {1}> { e = Exp(x) y = CumSum(e, one) }", set()),
        (HEAD + "g (float[1,9] x) => (float[1,9] y) { y = Exp(x) }", set()),
    ],
    ids=["a scan of logarithms", "decays", "a sum of exponentials", "no sum"],
)  # fmt: skip
def test_what_computes_exponents(text: str, kept: set[str]) -> None:
    graph = from_text(text)
    assert {graph.op(i).outputs[0].name for i in exponents(graph)} == kept


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scans_of_logarithms_are_right(precision: str) -> None:
    rng = np.random.default_rng(0)
    feeds = {"c": -rng.uniform(0.1, 0.4, (1, 256, 4)), "v": rng.uniform(-2, 0, (1, 256, 4))}
    feeds = {k: v.astype(np.float16).astype(np.float32) for k, v in feeds.items()}
    sums = np.cumsum(feeds["c"].astype(np.float64), 1)
    want = np.exp(sums) * np.cumsum(np.exp(feeds["v"] - sums), 1)
    found = optdnn.build(onnx.parser.parse_model(SCAN), target="simulate", precision=precision).run(feeds)["y"]
    np.testing.assert_allclose(found, want, rtol=1e-2)
