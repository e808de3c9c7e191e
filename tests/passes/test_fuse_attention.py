"""fuse_attention: each form in which exporters write attention becomes one op; other graphs stay, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, from_text
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_attention import FuseAttention

B, H, L, D = 2, 3, 5, 4
HEADS_OUT = TransposeAttrs((2, 0, 1, 3))
ONE = {"Attention": 1}
CUDA = PassContext("cuda:sm_90a")


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


def net(
    *, mask: Callable[[Net, Value], Value] | None = None, shared: int = H, batch: Any = B, length: Any = L, extra: bool = False
) -> Graph:  # fmt: skip
    """softmax(mask(q k^T / 2)) v over inputs; ``shared`` key heads repeated by Expand."""
    n = Net(np.float64)
    q = n.input(batch, H, length, D, name="q")
    k, v = (n.input(batch, shared, length, D, name=name) for name in "kv")
    if shared != H:
        k, v = (repeated(n, x, H // shared) for x in (k, v))
    kt = n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))
    s = n.op("Mul", n.op("MatMul", q, kt), 0.5)
    p = n.op("Softmax", s if mask is None else mask(n, s))
    y = n.op("MatMul", p, v)
    return n.done(y, *([p] if extra else []))


def repeated(n: Net, x: Value, times: int) -> Value:
    b, g, s, d = n.dims(x)
    wide = n.op("Expand", n.op("Unsqueeze", x, n.ints(2)), n.ints(1, 1, times, 1, 1))
    return n.op("Reshape", wide, n.ints(b, g * times, s, d))  # type: ignore[arg-type, operator]


def attention(graph: Graph) -> Op:
    (op,) = graph.of_kind("Attention")
    return op


def added(array: Any) -> Callable[[Net, Value], Value]:
    return lambda n, s: n.op("Add", s, n.const(array))


def triangle(low: float) -> Any:
    return np.triu(np.full((L, L), low), 1)


@pytest.mark.parametrize("low", [-np.inf, -3.4e38, -1e9])
def test_a_constant_mask_of_later_keys_is_causal_order(low: float) -> None:
    graph, _ = check_pass(FuseAttention(), net(mask=added(triangle(low))), changes=1, kinds=ONE)
    assert attention(graph).attrs.is_causal


def band(left: int, right: int, low: float = -np.inf) -> Any:
    """Hides keys that lie more than ``left`` before or ``right`` after a query."""
    behind = np.arange(L)[:, None] - np.arange(L)
    return np.where((behind <= left) & (-behind <= right), 0.0, low)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (band(1, 2), (False, 1, 2)),
        (band(2, 0), (True, 2, -1)),
        (band(0, L - 1), (False, 0, -1)),
        (band(L - 1, 1), (False, -1, 1)),
        (np.stack([band(1, 1, -1e9)] * H)[None], (False, 1, 1)),
    ],
)
def test_a_constant_mask_of_keys_outside_of_a_window_is_a_window(array: Any, expected: tuple[bool, int, int]) -> None:
    """As in ModernBERT's local layers. Kernels skip the hidden keys, and read no mask."""
    graph, _ = check_pass(FuseAttention(), net(mask=added(array)), changes=1, kinds=ONE)
    a = attention(graph).attrs
    assert (a.is_causal, a.left_window_size, a.right_window_size) == expected


def holed() -> Any:
    array = band(2, 2)
    array[3, 2] = -np.inf
    return array


@pytest.mark.parametrize(
    "array",
    [
        triangle(-4.0),
        triangle(-1e9) + 0.5,
        holed(),
        np.tril(np.full((L, L), -1e9)) * (1 - np.eye(L, k=1 - L)),
        np.stack([band(1, 1), *[band(2, 2)] * (H - 1)])[None],
    ],
    ids=["finite", "lifted", "a hole", "queries that do not see themselves", "heads of their own"],
)
def test_other_triangles_stay_masks(array: Any) -> None:
    graph, _ = check_pass(FuseAttention(), net(mask=added(array)), changes=1)
    a = attention(graph).attrs
    assert (a.is_causal, a.left_window_size, a.right_window_size) == (False, -1, -1)
    assert len(attention(graph).inputs) == 4


def test_a_mask_of_zeros_goes() -> None:
    graph, _ = check_pass(FuseAttention(), net(mask=added(np.zeros((B, 1, L, L)))), changes=1)
    assert len(attention(graph).inputs) == 3


def test_biases_add_up_and_equal_ones_of_a_batch_are_one() -> None:
    bias = np.random.default_rng(0).standard_normal((1, H, L, L))

    def two(n: Net, s: Value) -> Value:
        return n.op("Add", n.const(np.full((B, 1, L, L), 1.5)), n.op("Add", s, n.const(bias)))

    graph, _ = check_pass(FuseAttention(), net(mask=two), changes=1)
    mask = graph.constant_value(attention(graph).inputs[3])
    assert mask is not None
    np.testing.assert_allclose(mask, bias + 1.5)


def test_a_scale_after_the_mask_holds_for_the_mask_too() -> None:
    check_pass(
        FuseAttention(),
        net(mask=lambda n, s: n.op("Div", n.op("Add", s, n.input(B, 1, L, L, name="m")), 0.8)),
        changes=1,
    )


def test_swin_adds_its_mask_in_five_dimensions() -> None:
    def mask(n: Net, s: Value) -> Value:
        wide = n.op("Reshape", n.op("Add", s, n.random(1, H, L, L)), n.ints(1, B, H, L, L))
        return n.op("Reshape", n.op("Add", wide, n.random(1, B, 1, L, L)), n.ints(B, H, L, L))

    graph, _ = check_pass(FuseAttention(), net(mask=mask), changes=1)
    assert graph.type(attention(graph).inputs[3]).shape == (B, H, L, L)  # type: ignore[arg-type]


def test_swin_adds_its_mask_in_five_dimensions_to_a_symbolic_batch() -> None:
    """Four windows an image: the mask is repeated for as many images as come."""

    def mask(n: Net, s: Value) -> Value:
        n.input(symbol("N", 1), 3, name="pictures")
        wide = n.op("Reshape", n.op("Add", s, n.random(1, H, L, L)), n.ints(-1, 4, H, L, L))
        return n.op("Reshape", n.op("Add", wide, n.random(1, 4, 1, L, L)), n.ints(-1, H, L, L))

    graph, _ = check_pass(FuseAttention(), net(mask=mask, batch=4 * symbol("N", 1)), changes=1, sizes={"N": 3})
    assert graph.kinds()["Expand"] == 1


def test_a_mask_in_five_dimensions_that_is_not_constant() -> None:
    def mask(n: Net, s: Value) -> Value:
        wide = n.op("Reshape", s, n.ints(1, B, H, L, L))
        return n.op("Reshape", n.op("Add", wide, n.input(1, B, 1, L, L, name="m")), n.ints(B, H, L, L))

    check_pass(FuseAttention(), net(mask=mask), changes=1)


def hidden(low: float, keeps: bool = True) -> Callable[[Net, Value], Value]:
    def mask(n: Net, s: Value) -> Value:
        seen = n.op("Greater", n.input(B, 1, L, L, name="m"), -0.7)
        return n.op("Where", seen, *((s, low) if keeps else (low, s)))

    return mask


@pytest.mark.parametrize("keeps", [True, False])
def test_scores_hidden_by_where(keeps: bool) -> None:
    check_pass(FuseAttention(), net(mask=hidden(-1e38, keeps)), changes=1)


def test_scores_hidden_by_a_constant_where() -> None:
    def mask(n: Net, s: Value) -> Value:
        return n.op("Where", n.const(np.tril(np.ones((L, L), bool)), bool), s, -1e9)

    graph, _ = check_pass(FuseAttention(), net(mask=mask), changes=1)
    assert attention(graph).attrs.is_causal


@pytest.mark.parametrize("shared", [1])
def test_grouped_queries(shared: int) -> None:
    graph, _ = check_pass(FuseAttention(), net(shared=shared), changes=1)
    assert "Expand" not in graph.kinds()
    assert graph.type(attention(graph).inputs[1]).shape == (B, shared, L, D)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "shared"), [(B, 1), (B, 2), (1, 2)])
@pytest.mark.parametrize("kind", ["Expand", "Concat"])
def test_heads_repeated_before_they_come_first(batch: int, shared: int, kind: str) -> None:
    """Keras and JAX repeat the heads of (batch, sequence, heads, features)."""
    n = Net(np.float64)
    heads, q = 2 * shared, n.input(batch, L, 2 * shared, D, name="q")

    def first(x: Value) -> Value:
        return n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3)))

    def again(x: Value) -> Value:
        alone = n.op("Unsqueeze", x, n.ints(3))
        if kind == "Expand":
            wide = n.op("Expand", alone, n.ints(1, 1, 1, 2, 1))
        else:
            wide = n.op("Concat", alone, alone, attrs=ConcatAttrs(3))
        return first(n.op("Reshape", wide, n.ints(batch, L, heads, D)))

    k, v = (again(n.input(batch, L, shared, D, name=name)) for name in "kv")
    scores = n.op("MatMul", first(q), n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", n.op("Softmax", scores), v)), changes=1)
    assert not graph.kinds().keys() & {"Expand", "Concat"}
    assert graph.type(attention(graph).inputs[1]).shape == (batch, shared, L, D)  # type: ignore[arg-type]


def test_values_alone_are_repeated() -> None:
    """Falcon rotates its keys after it repeats their heads: the values have as many heads as the keys."""
    n = Net(np.float64)
    q = n.input(B, 4, L, D, name="q")
    k, v = (repeated(n, n.input(B, 2, L, D, name=name), 2) for name in "kv")
    k = n.op("Transpose", n.op("Sin", k), attrs=TransposeAttrs((0, 1, 3, 2)))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", n.op("Softmax", n.op("MatMul", q, k)), v)), changes=1)
    assert graph.type(attention(graph).inputs[1]).shape == graph.type(attention(graph).inputs[2]).shape


def test_one_head_of_keys_for_other_heads_of_values() -> None:
    n = Net(np.float64)
    q, k = n.input(B, 4, L, D, name="q"), n.input(B, 1, D, L, name="k")
    v = repeated(n, n.input(B, 2, L, D, name="v"), 2)
    y = n.op("MatMul", n.op("Softmax", n.op("MatMul", q, k)), v)
    check_refused(FuseAttention(), n.done(y), because="keys and values have different heads")


def test_heads_in_another_order_are_not_shared() -> None:
    """All heads once, and then all heads again: no head is read twice in a row."""
    n = Net(np.float64)
    q = n.input(B, 4, L, D, name="q")
    k, v = (n.op("Unsqueeze", n.input(B, L, 2, D, name=name), n.ints(2)) for name in "kv")
    k, v = (n.op("Reshape", n.op("Expand", x, n.ints(1, 1, 2, 1, 1)), n.ints(B, L, 4, D)) for x in (k, v))
    k, v = (
        n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 3, 1))),
        n.op("Transpose", v, attrs=TransposeAttrs((0, 2, 1, 3))),
    )
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", n.op("Softmax", n.op("MatMul", q, k)), v)), changes=1)
    assert graph.kinds()["Expand"] == 2


GROUPS, PER_GROUP = 2, 3


def grouped(mask: Callable[[Net, Value], Value] | None = None, *, inside: bool = False) -> Graph:
    """Grouped queries as JAX's einsums give them: the heads of a group are rows of one matrix in both products.

    ``inside``: a bias is added to the rows of that matrix."""
    n = Net(np.float64)
    q = n.input(B, GROUPS, PER_GROUP, L, D, name="q")
    k, v = (n.input(B, GROUPS, L, D, name=name) for name in "kv")
    rows = n.op("Reshape", q, n.ints(B, GROUPS, PER_GROUP * L, D))
    s = n.op("MatMul", rows, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    s = n.op("Add", s, n.random(PER_GROUP * L, L)) if inside else s
    s = n.op("Mul", n.op("Reshape", s, n.ints(B, GROUPS, PER_GROUP, L, L)), 0.5)
    p = n.op("Softmax", s if mask is None else mask(n, s))
    p = n.op("Reshape", p, n.ints(B, GROUPS, PER_GROUP * L, L))
    return n.done(n.op("Reshape", n.op("MatMul", p, v), n.ints(B, GROUPS, PER_GROUP, L, D)))


@pytest.mark.parametrize(
    ("mask", "more"),
    [
        (None, 0),
        (added(np.random.default_rng(3).standard_normal((GROUPS, PER_GROUP, L, L))), 1),
        (added(np.random.default_rng(3).standard_normal((L, L))), 1),
        (lambda n, s: n.op("Add", s, n.input(B, 1, 1, L, L, name="mask")), 1),
        (lambda n, s: n.op("Where", n.const(np.tril(np.ones((L, L), bool)), bool), s, -1e9), 0),
    ],
)
def test_grouped_queries_that_are_rows_of_one_matrix(mask: Any, more: int) -> None:
    graph, _ = check_pass(FuseAttention(), grouped(mask), changes=1)
    op = attention(graph)
    assert [graph.type(v).shape for v in op.inputs[:3] if v is not None] == [
        (B, GROUPS * PER_GROUP, L, D),
        *[(B, GROUPS, L, D)] * 2,
    ]
    assert len(op.inputs) == 3 + more
    assert "MatMul" not in graph.kinds()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, B])
def test_one_head_of_keys_for_all_queries(batch: int, masked: bool) -> None:
    """Multi-query attention as ``einsum("b h i d, b j d -> b h i j")`` gives it: keys and values without an axis of heads."""
    n = Net(np.float64)
    q, (k, v) = n.input(batch, H, L, D, name="q"), (n.input(batch, L, D, name=name) for name in "kv")
    s = n.op(
        "MatMul", n.op("Reshape", q, n.ints(batch, H * L, D)), n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1)))
    )
    s = n.op("Mul", n.op("Reshape", s, n.ints(batch, H, L, L)), 0.5)
    if masked:
        s = n.op("Add", s, n.input(1, H, L, L, name="mask"))
    p = n.op("Reshape", n.op("Softmax", s), n.ints(batch, H * L, L))
    graph, _ = check_pass(
        FuseAttention(), n.done(n.op("Reshape", n.op("MatMul", p, v), n.ints(batch, H, L, D))), changes=1
    )
    op = attention(graph)
    assert [graph.type(v).shape for v in op.inputs[1:3] if v is not None] == [(batch, 1, L, D)] * 2
    assert "MatMul" not in graph.kinds()


def test_rows_of_one_matrix_with_a_bias_are_no_grouped_queries() -> None:
    check_refused(FuseAttention(), grouped(inside=True), because="does not read only a product of queries and keys")


def test_rows_of_one_matrix_in_one_product_are_no_grouped_queries() -> None:
    n = Net(np.float64)
    q = n.input(B, GROUPS, PER_GROUP, L, D, name="q")
    k, v = n.input(B, GROUPS, L, D, name="k"), n.input(B, GROUPS, PER_GROUP, L, D, name="v")
    rows = n.op("Reshape", q, n.ints(B, GROUPS, PER_GROUP * L, D))
    s = n.op("MatMul", rows, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    p = n.op("Softmax", n.op("Reshape", s, n.ints(B, GROUPS, PER_GROUP, L, L)))
    check_refused(
        FuseAttention(), n.done(n.op("MatMul", p, v)), because="rows of its two products belong to different heads"
    )


def test_keys_that_broadcast_over_heads_are_shared() -> None:
    n = Net(np.float64)
    q, kt, v = n.input(B, H, L, D, name="q"), n.input(B, 1, D, L, name="k"), n.input(B, 1, L, D, name="v")
    p = n.op("Softmax", n.op("MatMul", q, kt))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", p, v)), changes=1)
    assert graph.type(attention(graph).inputs[1]).shape == (B, 1, L, D)  # type: ignore[arg-type]


def test_symbolic_batch_and_length() -> None:
    graph = net(batch=symbol("N", 1), length=symbol("S", 1))
    check_pass(FuseAttention(), graph, changes=1, sizes={"N": 2, "S": 6})


def test_half_precision_with_a_softmax_in_single() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    attention (float16[2,3,5,4] q, float16[2,3,4,5] kt, float16[2,3,5,4] v) => (float16[2,3,5,4] y)
    { s = MatMul(q, kt) w = Cast<to=1>(s) p = Softmax(w) h = Cast<to=10>(p) y = MatMul(h, v) }"""
    graph = from_text(text)
    report = FuseAttention()(graph, CUDA)
    assert report.changes == 1
    assert attention(graph).attrs.softmax_precision == np.float32


def test_two_dimensions_are_one_head() -> None:
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(L, D, name="q"), n.input(D, 7, name="k")))
    graph, _ = check_pass(FuseAttention(), n.done(n.op("MatMul", p, n.input(7, D, name="v"))), changes=1)
    assert graph.type(attention(graph).inputs[0]).shape == (1, 1, L, D)  # type: ignore[arg-type]


def test_heads_in_front_of_the_batch() -> None:
    """Set Transformer's pooling: constant queries, and heads of keys and values joined along the batch."""
    n = Net(np.float64)
    q = n.random(H * B, L, D)
    x = n.input(B, 7, H * D, name="x")
    k, v = (
        n.op("Reshape", n.op("Transpose", n.op("Reshape", y, n.ints(B, 7, H, D)), attrs=HEADS_OUT), n.ints(H * B, 7, D))
        for y in (x, n.op("Exp", x))
    )
    kt = n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1)))
    y = n.op("MatMul", n.op("Softmax", n.op("MatMul", q, kt)), v)
    graph, _ = check_pass(FuseAttention(), n.done(y), changes=1)
    assert [graph.type(operand).dims[:2] for operand in attention(graph).inputs[:3] if operand] == [(H, B)] * 3


# ---------------------------------------------------------------- what is refused


def refused() -> dict[str, tuple[Graph, str]]:
    def column(n: Net, s: Value) -> Value:
        return n.op("Add", s, n.input(B, H, L, 1, name="m"))

    def gated(n: Net, s: Value) -> Value:
        return n.op("Mul", s, n.input(B, H, L, L, name="m"))

    def scaled(n: Net, s: Value) -> Value:
        return n.op("Mul", s, n.input(H, 1, 1, name="heads"))

    def biased(n: Net, s: Value) -> Value:
        return scaled(n, n.op("Add", s, n.input(L, L, name="m")))

    def capped(n: Net, s: Value) -> Value:
        return n.op("Mul", n.op("Tanh", scaled(n, s)), 1.0)

    def from_mask(n: Net, s: Value) -> Value:
        return n.op("Sub", n.input(B, 1, 1, L, name="m"), s)

    no_product = "does not read only a product of queries and keys with scales and masks"
    cases = {
        "bias scaled by heads": (net(mask=biased), no_product),
        "taken from the mask": (net(mask=from_mask), no_product),
        "heads scaled in a softcap": (net(mask=capped), no_product),
        "used twice": (net(extra=True), "is an output of the network"),
        "negative": (net(mask=lambda n, s: n.op("Mul", s, -2.0)), "a scale is positive"),
        "column": (net(mask=column), "does not have a number for each key"),
        "gated": (net(mask=gated), no_product),
        "weak where": (net(mask=hidden(-1e9)), "a query without keys gets equal weights"),
    }
    n = Net(np.float64)
    s = n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k"))
    p = n.op("Softmax", s)
    cases["inner use"] = n.done(n.op("MatMul", p, n.input(B, H, L, D, name="v")), n.op("Relu", s)), "is used elsewhere"
    n = Net(np.float64)
    s = n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k"))
    p = n.op("Softmax", s, attrs=SoftmaxAttrs(2))
    cases["axis"] = n.done(n.op("MatMul", p, n.input(B, H, L, D, name="v"))), "not over the last axis"
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k")))
    masked = n.op("Where", n.op("Greater", n.input(B, 1, L, L, name="m"), 0.0), p, 0.0)
    again = "masked again after the softmax"
    cases["masked again"] = n.done(n.op("MatMul", masked, n.input(B, H, L, D, name="v"))), f"{again}, by something else"
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k")))
    masked = n.op("Where", n.op("Greater", n.input(B, 1, L, L, name="m"), 0.0), p, 0.5)
    cases["masked by a half"] = n.done(n.op("MatMul", masked, n.input(B, H, L, D, name="v"))), again
    return cases


@pytest.mark.parametrize("name", refused())
def test_refused(name: str) -> None:
    graph, reason = refused()[name]
    check_refused(FuseAttention(), graph, because=reason)


def test_other_products_are_no_candidates() -> None:
    n = Net()
    check_untouched(FuseAttention(), n.done(n.matmul(n.op("Relu", n.matmul(n.input(2, 3, 4), 5)), 6)))
    n = Net()
    x = n.op("Reshape", n.op("Softmax", n.input(2, 3, 4)), n.ints(2, 12))
    check_untouched(FuseAttention(), n.done(n.op("MatMul", x, n.random(12, 3), attrs=MatMulAttrs())))


def blind(guarded: bool) -> Graph:
    """Attention under a constant mask that hides every key of the second query, with or without PyTorch's guard."""
    hidden = np.zeros((L, L))
    hidden[1] = -np.inf
    n = Net(np.float64)
    q, k, v = (n.input(B, H, L, D, name=name) for name in "qkv")
    s = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    p = n.op("Softmax", n.op("Add", s, n.const(hidden)))
    if guarded:
        p = n.op("Where", n.op("IsNaN", p), 0.0, p)
    return n.done(n.op("MatMul", p, v))


def test_a_query_that_a_constant_mask_leaves_no_key() -> None:
    check_refused(FuseAttention(), blind(guarded=False), because="hides every key of a query, which gives NaN")
    check_pass(FuseAttention(), blind(guarded=True), changes=1)


def normalized(axis: int, readers: int = 1) -> Graph:
    """Attention of keys that are normalized before they are transposed."""
    n = Net(np.float64)
    q, k, v = (
        n.op("Exp", n.input(2, 3, *shape, name=name))
        for name, shape in zip("qkv", ((4, 8), (8, 5), (5, 8)), strict=True)
    )
    k = n.op("LpNormalization", k, attrs=LpNormAttrs(axis, 2, 1e-6))
    turned = n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))
    y = n.op("Attention", q, turned, v, attrs=AttentionAttrs(scale=1.0))
    return n.done(y, *(n.op("Neg", k) for _ in range(readers - 1)))


def test_keys_are_transposed_before_they_are_normalized() -> None:
    graph = normalized(2)
    after, _ = check_pass(FuseAttention(), graph, changes=1, rules={"normalized_keys": 1}, kinds=graph.kinds())
    (norm,) = after.of_kind("LpNormalization")
    assert norm.attrs.axis == 3
    assert after.op(norm.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]
    assert after.of_kind("Attention")[0].inputs[1] == norm.value


@pytest.mark.parametrize(("axis", "readers"), [(3, 1), (2, 2)])
def test_keys_normalized_along_another_axis_or_read_elsewhere_stay(axis: int, readers: int) -> None:
    check_untouched(FuseAttention(), normalized(axis, readers))
