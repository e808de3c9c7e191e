"""fuse_attention: the forms in which exporters write attention, as ONNX text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.attention_nets import L
from support.check import check_pass, check_refused, from_text

from optdnn.passes.fuse_attention import FuseAttention


def exported(body: str, keys: int = L) -> str:
    """An ONNX model in text form: q, k, v of (2, 3, L, 4) in ``body``, which makes y (2, 3, L, 4)."""
    return f"""<ir_version: 10, opset_import: ["" : 21]>
    attention (float[2,3,5,4] q, float[2,3,{keys},4] k, float[2,3,{keys},4] v, float[2,1,1,{keys}] pad) => (float[2,3,5,4] y)
    <float scale = {{0.5}}, float root = {{0.7071067811865476}}, float one = {{1.0}}, {POSITIONS}>
    {{ {body} }}"""


def tensor(array: Any) -> str:
    return ", ".join(map(str, np.asarray(array).reshape(-1).tolist()))


POSITIONS = (
    f"float[1,1,4,9] positions = {{{tensor(np.random.default_rng(3).standard_normal(36))}}}, "
    f"int64[2,3,5,5] distance = {{{tensor(np.broadcast_to(np.arange(5)[:, None] - np.arange(5) + 4, (2, 3, 5, 5)))}}}"
)


TEXTS = {
    # HuggingFace: scores divided, padding mask added
    "bert": "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) r = Div(s, one) m = Add(r, pad) p = Softmax(m) y = MatMul(p, v)",
    # XLNet, Transformer-XL: the mask is subtracted, from scaled scores or before they are scaled
    "subtracted": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Sub(s, pad) r = Mul(m, scale) p = Softmax(r)
        y = MatMul(p, v)""",
    # torch.nn.functional.scaled_dot_product_attention: the root of the scale on both
    "sdpa": """kt = Transpose<perm=[0,1,3,2]>(k) qs = Mul(q, root) ks = Mul(kt, root) s = MatMul(qs, ks) p = Softmax(s)
        y = MatMul(p, v)""",
    # with its guard against rows without keys
    "guarded": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m = Add(pad, s) p = Softmax(m) nan = IsNaN(p)
        zero = Constant<value_float=0.0>() g = Where(nan, zero, p) y = MatMul(g, v)""",
    # ViT and Swin: the scale on q
    "scaled q": "kt = Transpose<perm=[0,1,3,2]>(k) qs = Mul(q, scale) s = MatMul(qs, kt) p = Softmax(s) y = MatMul(p, v)",
    # k scaled before it is transposed
    "scaled k": "ks = Mul(scale, k) kt = Transpose<perm=[0,1,3,2]>(ks) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)",
    # TensorFlow, and torch's bmm: heads merged with the batch
    "merged": """three = Constant<value_ints=[6,5,4]>() four = Constant<value_ints=[2,3,5,4]>() q3 = Reshape(q, three)
        k3 = Reshape(k, three) v3 = Reshape(v, three) kt = Transpose<perm=[0,2,1]>(k3) s = MatMul(q3, kt) r = Mul(s, scale)
        p = Softmax(r) y3 = MatMul(p, v3) y = Reshape(y3, four)""",
    # the same with its mask added to four dimensions (BART, OPT)
    "merged, masked": """three = Constant<value_ints=[6,5,4]>() square = Constant<value_ints=[6,5,5]>()
        wide = Constant<value_ints=[2,3,5,5]>() four = Constant<value_ints=[2,3,5,4]>() q3 = Reshape(q, three)
        k3 = Reshape(k, three) v3 = Reshape(v, three) kt = Transpose<perm=[0,2,1]>(k3) s = MatMul(q3, kt) w = Reshape(s, wide)
        m = Add(w, pad) n = Reshape(m, square) p = Softmax(n) y3 = MatMul(p, v3) y = Reshape(y3, four)""",
    # DeBERTa: content to position, gathered by distance
    "disentangled": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) c = MatMul(q, positions)
        g = GatherElements<axis=3>(c, distance) b = Add(s, g) d = Div(b, one) m = Add(d, pad) p = Softmax(m) y = MatMul(p, v)""",
    # Swin V2, XCiT: scores times a number for each head
    "scaled heads": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Constant<value_floats=[2.0,-0.5,3.0]>()
        three = Constant<value_ints=[3,1,1]>() h = Reshape(t, three) r = Mul(h, s) m = Add(r, pad) p = Softmax(m)
        y = MatMul(p, v)""",
    # or over one for each query
    "scaled queries": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) last = Constant<value_ints=[-1]>()
        c = ReduceL2<keepdims=1>(q, last) r = Div(s, c) p = Softmax(r) y = MatMul(p, v)""",
    "scaled heads, merged": """three = Constant<value_ints=[6,5,4]>() square = Constant<value_ints=[6,5,5]>()
        wide = Constant<value_ints=[2,3,5,5]>() four = Constant<value_ints=[2,3,5,4]>() q3 = Reshape(q, three)
        k3 = Reshape(k, three) v3 = Reshape(v, three) kt = Transpose<perm=[0,2,1]>(k3) s = MatMul(q3, kt) w = Reshape(s, wide)
        t = Constant<value_floats=[2.0,0.5,3.0]>() heads = Constant<value_ints=[3,1,1]>() h = Reshape(t, heads) r = Mul(w, h)
        n = Reshape(r, square) p = Softmax(n) y3 = MatMul(p, v3) y = Reshape(y3, four)""",
    # Keras: keys times queries, transposed; the weights masked again after the softmax
    "keys first": """qs = Mul(q, scale) qt = Transpose<perm=[0,1,3,2]>(qs) t = MatMul(k, qt) s = Transpose<perm=[0,1,3,2]>(t)
        m = Add(s, pad) p = Softmax(m) y = MatMul(p, v)""",
    "masked again": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) no = Constant<value_float=0.0>()
        low = Constant<value_float=-1000000000.0>() c = Greater(pad, no) m = Where(c, s, low) p = Softmax(m)
        w = Where(c, p, no) y = MatMul(w, v)""",
    "masked again, the other way": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) no = Constant<value_float=0.0>()
        low = Constant<value_float=-1000000000.0>() c = Greater(pad, no) m = Where(c, low, s) p = Softmax(m)
        w = Where(c, no, p) y = MatMul(w, v)""",
    # Gemma 2
    "softcap": """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) c = Constant<value_float=3.0>() d = Div(s, c) t = Tanh(d)
        e = Mul(t, c) m = Add(e, pad) p = Softmax(m) y = MatMul(p, v)""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_exported_forms(name: str) -> None:
    graph, _ = check_pass(FuseAttention(), exported(TEXTS[name]), changes=1)
    assert graph.kinds()["Attention"] == 1
    assert "Softmax" not in graph.kinds()
    assert graph.kinds().get("MatMul", 0) == (name == "disentangled")  # the product with positions


def keys_without_batch(batch: int) -> str:
    """Keys without the axis of the batch: torch.export's DETR, after its Reshapes around a product are gone."""
    return f"""<ir_version: 10, opset_import: ["" : 21]>
    attention (float[{batch},3,5,4] q, float[3,5,4] k, float[{batch},3,5,4] v) => (float[{batch},3,5,4] y) {{
        kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v) }}"""


def test_keys_without_the_axis_of_one_image() -> None:
    check_pass(FuseAttention(), keys_without_batch(1), changes=1, kinds={"Attention": 1, "Reshape": 1})


def test_keys_that_all_images_share_are_refused() -> None:
    check_refused(
        FuseAttention(), keys_without_batch(2), because="the keys .* do not have the leading axes of the scores"
    )


@pytest.mark.parametrize("name", ["masked again", "masked again, the other way"])
def test_smaller_numbers_hide_scores_whose_weights_are_masked_again(name: str) -> None:
    """NeMo and FunASR: -10000, and zero after the softmax."""
    body = TEXTS[name].replace("-1000000000.0", "-10000.0")
    graph, _ = check_pass(FuseAttention(), exported(body), changes=1)
    assert graph.kinds()["Attention"] == 1
    once = body.replace("y = MatMul(w, v)", "y = MatMul(p, v)")
    check_refused(FuseAttention(), exported(once), because="scores of -10000 may not hide their keys")
    low = body.replace("-10000.0", "-100.0")
    check_refused(FuseAttention(), exported(low), because="a product of queries and keys with scales and masks")


def test_queries_without_keys_give_zeros_where_the_weights_are_masked_again() -> None:
    """A constant mask that hides all keys of the first query."""
    body = TEXTS["masked again"].replace(
        "c = Greater(pad, no)",
        "line = Constant<value_ints=[0,0,0,0,0,1,1,1,0,1,1,1,1,0,1,1,0,1,1,1,1,1,1,1,0]>() five = Constant<value_ints=[5,5]>() "
        "square = Reshape(line, five) c = Cast<to=9>(square)",
    )
    graph, _ = check_pass(FuseAttention(), exported(body), changes=1)
    assert graph.kinds()["Attention"] == 1


VALUES_FIRST = """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) r = Mul(s, scale) p = Softmax(r)
    pt = Transpose<perm=[0,1,3,2]>(p) vt = Transpose<perm=[0,1,3,2]>(v) t = MatMul(vt, pt) y = Transpose<perm=[0,1,3,2]>(t)"""


def test_weights_after_the_values() -> None:
    graph, _ = check_pass(FuseAttention(), exported(VALUES_FIRST, keys=7), changes=2)
    assert graph.kinds()["Attention"] == 1
    assert not {"Softmax", "MatMul"} & graph.kinds().keys()


def test_weights_after_the_values_that_are_used_elsewhere_stay() -> None:
    body = VALUES_FIRST.replace(
        "y = Transpose<perm=[0,1,3,2]>(t)", "u = Transpose<perm=[0,1,3,2]>(t) w = ReduceSum(p) y = Add(u, w)"
    )
    check_refused(FuseAttention(), from_text(exported(body)), because="an inner value is used elsewhere")


def test_cross_attention_of_other_lengths() -> None:
    graph, _ = check_pass(FuseAttention(), exported(TEXTS["bert"], keys=7), changes=1)
    (op,) = graph.of_kind("Attention")
    assert [str(graph.type(v)) for v in op.inputs if v is not None][1:3] == ["fp32[2, 3, 7, 4]"] * 2
