"""Whole blocks of transformers, as exporters write them, through the GPU's pipeline: the operators left, by count."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.shared import needs_shared_graphs, shared_network

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote, random_feeds
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.pipelines import PIPELINE

TARGET = "cuda:sm_90a"
KERAS = """<ir_version: 8, opset_import: ["" : 17]>
block (float[2,5,12] x, float[2,7,12] m, bool[2,5,7] seen) => (float[2,5,12] y)
<float scale={0.5}, float one={1}, float big={-1e9}, float[12,3,4] wq, float[12,3,4] wk, float[12,3,4] wv, float[3,4] bq,
 float[3,4] bk, float[3,4] bv, float[3,4,12] wo, float[12] bo> {
    q0 = Einsum<equation="abc,cde->abde">(x, wq)  q1 = Add(q0, bq)  q = Mul(q1, scale)
    k0 = Einsum<equation="abc,cde->abde">(m, wk)  k = Add(k0, bk)
    v0 = Einsum<equation="abc,cde->abde">(m, wv)  v = Add(v0, bv)
    s = Einsum<equation="aecd,abcd->acbe">(k, q)
    f = Cast<to=1>(seen)  ax = Constant<value_ints=[1]>()  f1 = Unsqueeze(f, ax)  n = Sub(one, f1)  h = Mul(n, big)
    t = Add(s, h)  p = Softmax<axis=-1>(t)  o = Einsum<equation="acbe,aecd->abcd">(p, v)
    z = Einsum<equation="abcd,cde->abe">(o, wo)  y = Add(z, bo)
}"""
BERT = """<ir_version: 8, opset_import: ["" : 17]>
block (float[2,5,12] x, float[2,1,1,5] mask) => (float[2,5,12] y)
<int64[2] flat={10,12}, int64[4] heads={2,5,3,4}, float one={1}, float big={-10000}, float scale={0.5}, float third={3},
 float half={0.5}, float root={0.7978846}, float cubic={0.044715}, float eps={1e-12}, int64[3] back={2,5,12}, int64[1] last={-1},
 float[12,12] wq, float[12,12] wk, float[12,12] wv, float[12,12] wo, float[12,24] w1, float[24,12] w2, float[12] bq, float[12] bk,
 float[12] bv, float[12] bo, float[24] b1, float[12] b2, float[12] g1, float[12] h1> {
    x2 = Reshape(x, flat)
    q0 = MatMul(x2, wq)  q1 = Add(q0, bq)  q2 = Reshape(q1, heads)  q = Transpose<perm=[0,2,1,3]>(q2)
    k0 = MatMul(x2, wk)  k1 = Add(k0, bk)  k2 = Reshape(k1, heads)  k = Transpose<perm=[0,2,3,1]>(k2)
    v0 = MatMul(x2, wv)  v1 = Add(v0, bv)  v2 = Reshape(v1, heads)  v = Transpose<perm=[0,2,1,3]>(v2)
    s0 = MatMul(q, k)  s = Mul(s0, scale)  n = Sub(one, mask)  h = Mul(n, big)  t = Add(s, h)  p = Softmax<axis=-1>(t)
    c = MatMul(p, v)  c1 = Transpose<perm=[0,2,1,3]>(c)  c2 = Reshape(c1, flat)
    o0 = MatMul(c2, wo)  o1 = Add(o0, bo)  r = Add(o1, x2)
    mean = ReduceMean<axes=[-1], keepdims=1>(r)  d = Sub(r, mean)  dd = Mul(d, d)  var = ReduceMean<axes=[-1], keepdims=1>(dd)
    ve = Add(var, eps)  sd = Sqrt(ve)  inv = Reciprocal(sd)  ig = Mul(inv, g1)  rg = Mul(r, ig)  mg = Mul(mean, ig)
    sh = Sub(h1, mg)  ln = Add(rg, sh)
    f0 = MatMul(ln, w1)  f = Add(f0, b1)
    f3 = Pow(f, third)  fc = Mul(f3, cubic)  fi = Add(f, fc)  fr = Mul(fi, root)  ft = Tanh(fr)  fo = Add(ft, one)
    fh = Mul(fo, half)  gelu = Mul(f, fh)
    e0 = MatMul(gelu, w2)  e1 = Add(e0, b2)  e = Add(e1, ln)  y = Reshape(e, back)
}"""
"""TensorFlow's, by tf2onnx: Keras's MultiHeadAttention as Einsum products (here cross attention), and BERT's block."""


def model(text: str) -> onnx.ModelProto:
    """The model, with random weights for what the text declares without values."""
    proto, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    for v in proto.graph.value_info:
        dims = [d.dim_value for d in v.type.tensor_type.shape.dim]
        if v.name[0] in "wbgh" and len(v.name) == 2 and not any(v.name in n.output for n in proto.graph.node):
            weight = (rng.standard_normal(dims) * 0.3).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, v.name))
    return proto


@pytest.mark.parametrize(
    ("text", "kinds", "stages"),
    [
        # queries apart, keys and values of one product; the products add the biases
        (KERAS, {"Attention": 1, "Gemm": 2, "MatMul": 1, "Split": 1}, {"Add": 1}),
        # QKV of one product; bias and residual, bias and GELU, bias and residual
        (BERT, {"Attention": 1, "Gemm": 3, "LayerNormalization": 1, "MatMul": 1, "Split": 1}, {"Add": 3, "Gelu": 1}),
    ],
    ids=["keras", "bert"],
)
def test_tensorflow(text: str, kinds: dict[str, int], stages: dict[str, int]) -> None:
    graph = import_model(model(text))
    before = promote(graph)
    feeds = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in random_feeds(graph).items()}
    run_pipeline(graph, PIPELINE(3, TARGET), PassContext(TARGET), verify=True)
    assert computing(graph) == kinds
    assert staged(graph) == stages
    for name, want in evaluate(before, feeds).items():
        np.testing.assert_allclose(evaluate(promote(graph), feeds)[name], want, rtol=1e-6, atol=1e-6)


def computing(graph: Any) -> dict[str, int]:
    """The ops that are neither views nor parts of a mask."""
    aside = {"Reshape", "Transpose", "Unsqueeze", "Cast", "Pointwise", "Gather", "Add", "Slice"}
    return {k: n for k, n in graph.kinds().items() if k not in aside}


def staged(graph: Any) -> dict[str, int]:
    """The stages of products, by kind."""
    found: dict[str, int] = {}
    for op in graph.of_kind("MatMul", "Gemm"):
        for stage in op.attrs.epilogue:
            found[stage.kind] = found.get(stage.kind, 0) + 1
    return found


SHARED = {
    "bert.ts": ({"Attention": 4, "LayerNormalization": 9, "MatMul": 16, "Split": 4}, {"Add": 8, "Gelu": 4}),
    "bert.dyn": ({"Attention": 4, "LayerNormalization": 9, "MatMul": 16, "Split": 4}, {"Add": 8, "Gelu": 4}),
    "gpt2.dyn": ({"Attention": 3, "LayerNormalization": 7, "MatMul": 13, "Split": 3}, {"Add": 6, "Gelu": 3}),
    "llama.dyn": (
        {"Attention": 2, "MatMul": 11, "RMSNormalization": 5, "RotaryEmbedding": 4, "Split": 2},
        {"Add": 4, "Mul": 2, "Swish": 2},
    ),
}
"""Per layer: QKV of one product, one attention, residuals and GELU in the products (their biases are zero here), two norms."""


@pytest.mark.slow
@needs_shared_graphs
@pytest.mark.parametrize("name", SHARED)
def test_exports(name: str, tmp_path: Any) -> None:
    proto = shared_network(name, tmp_path)
    sizes = {v.name: (2, 24) for v in proto.graph.input}
    graph = import_model(proto, shapes=sizes)
    run_pipeline(graph, PIPELINE(3, TARGET), PassContext(TARGET))
    kinds, stages = SHARED[name]
    assert computing(graph) == kinds
    assert staged(graph) == stages
