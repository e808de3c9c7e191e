"""ONNX Runtime's own operators against ONNX Runtime; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onenode import onnxruntime_run
from onnx import helper, numpy_helper

from optdnn.errors import OptdnnError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.types import Array

F = np.float32


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def integers(dtype: Any, *shape: int, seed: int = 0) -> Array:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


def one(
    op: str,
    operands: list[Any],
    n: int | tuple[str, ...] = 1,
    fed: int = 1,
    domain: str = "com.microsoft",
    **attrs: Any,
) -> Any:
    """A model of one node, whose first ``fed`` operands are inputs and the others constants; and its feeds."""
    arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(operands) if x is not None}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(operands)]
    outs = [f"y{i}" for i in range(n)] if isinstance(n, int) else list(n)
    node = helper.make_node(op, names, outs, name="n", domain=domain, **attrs)
    inputs = {k: v for i, (k, v) in enumerate(arrays.items()) if i < fed}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [onnx.ValueInfoProto(name=o) for o in outs if o],
        [numpy_helper.from_array(v, k) for k, v in arrays.items() if k not in inputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), inputs


def check(op: str, operands: list[Any], *, quanta: int = 0, tol: float = 2e-5, **more: Any) -> Graph:
    """The same results as ONNX Runtime's. ``quanta``: the allowed difference of quantized values (its integer paths round once
    less)."""
    m, feeds = one(op, operands, **more)
    graph = import_model(m)
    for a, b in zip(evaluate(graph, feeds).values(), onnxruntime_run(m, feeds), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "iu":
            assert np.abs(a.astype(int) - b.astype(int)).max() <= quanta
        else:
            np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
    return graph


# ---------------------------------------------------------------- products and activations


@pytest.mark.parametrize(("ta", "tb"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_fused_matmul(ta: int, tb: int) -> None:
    a, b = normal(2, 4, 5), normal(2, 5, 3, seed=1)
    operands = [a.swapaxes(1, 2) if ta else a, b.swapaxes(1, 2) if tb else b]
    check("FusedMatMul", [np.ascontiguousarray(x) for x in operands], transA=ta, transB=tb, alpha=0.5)


def test_gelus() -> None:
    assert check("BiasGelu", [normal(2, 3, 8), normal(8, seed=1)]).kinds() == {"Add": 1, "Gelu": 1}
    check("FastGelu", [normal(2, 3, 8), normal(8, seed=1)])
    check("FastGelu", [normal(2, 3, 8)])
    check("QuickGelu", [normal(2, 3, 8)], alpha=1.5)
    check("Gelu", [normal(2, 3, 8)])


@pytest.mark.parametrize(
    ("activation", "params"),
    [
        ("Relu", None),
        ("Tanh", None),
        ("Sigmoid", None),
        ("LeakyRelu", [0.2]),
        ("Clip", [-0.5, 0.5]),
        ("HardSigmoid", [0.3, 0.4]),
    ],
)
def test_fused_convolution(activation: str, params: list[float] | None) -> None:
    attrs: dict[str, Any] = {"activation": activation, "pads": [1, 1, 1, 1]}
    attrs |= {} if params is None else {"activation_params": params}
    x, w, b = normal(1, 3, 6, 6), normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
    check("FusedConv", [x, w, b], **attrs)
    check("FusedConv", [x, w, b, normal(1, 4, 6, 6, seed=3)], **attrs)


def test_fused_gemm() -> None:
    attrs = {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1}
    check("FusedGemm", [normal(3, 4), normal(5, 4, seed=1), normal(5, seed=2)], **attrs)


# ---------------------------------------------------------------- normalization


def test_simplified_layer_normalization_in_either_domain() -> None:
    assert check(
        "SimplifiedLayerNormalization", [normal(2, 3, 8), normal(8, seed=1)], domain="", epsilon=1e-3
    ).kinds() == {"RMSNormalization": 1}


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [("y",), ("y", "", "", "total")])
def test_skip_layer_normalization(beta: bool, bias: bool, outputs: tuple[str, ...]) -> None:
    x, skip, gamma = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8, seed=2)
    more = [normal(8, seed=3) if beta else None, normal(8, seed=4) if bias else None]
    check("SkipLayerNormalization", [x, skip, gamma, *more], n=outputs, fed=2, epsilon=1e-3)
    if not beta:
        check("SkipSimplifiedLayerNormalization", [x, skip, gamma, more[1]], n=outputs, fed=2, epsilon=1e-3)


@pytest.mark.parametrize("kind", ["", "Simplified"])
def test_statistics_of_skip_layer_normalization(kind: str) -> None:
    """onnxscript's fusions name these outputs; ONNX Runtime's own kernel leaves them empty."""
    x, skip, gamma = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8, seed=2)
    names = ("y", "mean", "inverse", "total")
    model, feeds = one(f"Skip{kind}LayerNormalization", [x, skip, gamma], n=names, fed=2, epsilon=1e-3)
    got, total = evaluate(import_model(model), feeds), x + skip
    mean = total.mean(-1, keepdims=True)
    apart = total if kind else total - mean
    inverse = 1 / np.sqrt((apart**2).mean(-1, keepdims=True) + 1e-3)
    for name, want in zip(names, (apart * inverse * gamma, mean, inverse, total), strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("mask", [None, "lengths", "bounds", "raw"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("sizes", [None, [8, 8, 12]])
def test_attention(mask: str | None, causal: int, sizes: list[int] | None) -> None:
    width = sum(sizes or [8, 8, 8])
    masks = {
        None: None,
        "lengths": np.array([5, 3], np.int32),
        "bounds": np.array([5, 4, 2, 0], np.int32),
        "raw": np.array([[1, 1, 1, 0, 1], [1, 1, 0, 0, 0]], np.int32),
    }
    attrs: dict[str, Any] = {"num_heads": 4, "unidirectional": causal}
    attrs |= {} if sizes is None else {"qkv_hidden_sizes": sizes}
    operands = [normal(2, 5, 6), normal(6, width, seed=1), normal(width, seed=2), masks[mask]]
    assert check("Attention", operands, **attrs).kinds()["Attention"] == 1


@pytest.mark.parametrize("past", [False, True])
def test_attention_with_lengths_of_sequences_of_unknown_size(past: bool) -> None:
    """As ONNX Runtime's optimizer writes BERT with dynamic axes."""
    operands = [normal(2, 5, 6), np.array([5, 3], np.int32), normal(6, 24, seed=1), normal(24, seed=2)]
    cache = [normal(2, 2, 4, 3, 2, seed=3)] if past else []
    m, feeds = one("Attention", [*operands, *cache], n=2 if past else 1, fed=2, num_heads=4)
    m.graph.node[0].input[:] = ["x0", "x2", "x3", "x1", *(["x4"] if past else [])]
    if past:
        m.graph.input.append(helper.make_tensor_value_info("x4", 1, [2, None, 4, "past", 2]))
        del m.graph.initializer[-1]
        feeds["x4"] = cache[0]
    for value in m.graph.input[:2]:
        for k, name in enumerate(("batch", "length")[: len(value.type.tensor_type.shape.dim)]):
            value.type.tensor_type.shape.dim[k].dim_param = name
    for got, due in zip(evaluate(import_model(m), feeds).values(), onnxruntime_run(m, feeds), strict=True):
        np.testing.assert_allclose(got, due, rtol=2e-5, atol=2e-5)


def test_attention_bias() -> None:
    operands = [normal(2, 5, 6), normal(6, 24, seed=1), normal(24, seed=2), None, None, normal(1, 4, 5, 5, seed=3)]
    check("Attention", operands, num_heads=4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_multi_head_attention(bias: bool, mask: bool) -> None:
    q, k, v = normal(2, 5, 8), normal(2, 7, 8, seed=1), normal(2, 7, 12, seed=2)
    keep = np.array([[1] * 7, [1, 1, 1, 0, 0, 0, 0]], np.int32) if mask else None
    check("MultiHeadAttention", [q, k, v, normal(28, seed=3) if bias else None, keep], fed=3, num_heads=4)


def test_multi_head_attention_with_a_cache() -> None:
    q, k, v = (normal(2, 5, 8, seed=i) for i in range(3))
    past = [normal(2, 4, 3, 2, seed=4), normal(2, 4, 3, 2, seed=5)]
    check("MultiHeadAttention", [q, k, v, None, None, None, *past], n=3, fed=5, num_heads=4)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize(("rows", "keys"), [(1, 7), (3, 7), (7, 3)])
def test_unidirectional_attention_over_another_number_of_keys(rows: int, keys: int, past: int) -> None:
    """The last query sees all keys."""
    q, k, v = normal(2, rows, 8), normal(2, keys, 8, seed=1), normal(2, keys, 8, seed=2)
    added = normal(2, 4, rows, keys, seed=3) if not past else None
    former = [normal(2, 4, past, 2, seed=4), normal(2, 4, past, 2, seed=5)] if past else [None, None]
    operands = [q, k, v, None, None, added, *former]
    fed = 5 if past else 4
    check("MultiHeadAttention", operands, n=3 if past else 1, fed=fed, num_heads=4, unidirectional=1)


def test_packed_operands() -> None:
    """The same as with separate operands (ONNX Runtime supports packed ones only on GPUs)."""

    def run(operands: list[Any], **attrs: Any) -> Any:
        m, feeds = one("MultiHeadAttention", operands, **attrs)
        return evaluate(import_model(m), feeds)["y0"]

    qkv, q = normal(2, 5, 2, 3, 4), normal(2, 3, 8, seed=1)
    parts = [np.ascontiguousarray(qkv[:, :, :, i]).reshape(2, 5, 8) for i in range(3)]
    np.testing.assert_array_equal(run([qkv], num_heads=2), run(parts, fed=3, num_heads=2))
    packed = np.ascontiguousarray(qkv[:, :, :, 1:])
    np.testing.assert_array_equal(run([q, packed], fed=2, num_heads=2), run([q, *parts[1:]], fed=3, num_heads=2))


@pytest.mark.parametrize("capacity", [5, 6, 9])
@pytest.mark.parametrize("calls", [(3, 1, 1, 1, 1, 1, 1), (9, 1, 2, 1), (1, 1, 4, 6, 1), (12, 1, 3)])
def test_a_cache_that_holds_the_last_positions(calls: tuple[int, ...], capacity: int) -> None:
    """As onnxruntime-genai's builder exports layers with sliding windows: calls with one token or several."""
    angles = np.random.default_rng(5).uniform(-3, 3, (24, 8))
    cache, total = [np.zeros((1, 2, capacity, 16), F)] * 2, 0
    attrs = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 5, "sliding_window_cache": 1}
    for k, length in enumerate(calls):
        total += length
        new = [normal(1, length, 64, seed=k), normal(1, length, 32, seed=10 + k), normal(1, length, 32, seed=20 + k)]
        ends = [np.array([total - 1], np.int32), np.array(total, np.int32)]
        m, feeds = one(
            "GroupQueryAttention",
            [*new, *cache, *ends, np.cos(angles).astype(F), np.sin(angles).astype(F)],
            3,
            7,
            **attrs,
        )
        got, want = list(evaluate(import_model(m), feeds).values()), onnxruntime_run(m, feeds)
        np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-5)
        dropped = capacity - 4
        held = total - dropped * -(-max(total - capacity, 0) // dropped)
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(mine[:, :, :held], theirs[:, :, :held], rtol=2e-5, atol=2e-5)
        cache = got[1:]


def test_caches_of_the_last_positions_of_several_sequences() -> None:
    """Each sequence has its own number of positions: the rows that leave the cache differ."""
    cache = [normal(2, 2, 5, 16, seed=3), normal(2, 2, 5, 16, seed=4)]
    new = [normal(2, 1, 64), normal(2, 1, 32, seed=1), normal(2, 1, 32, seed=2)]
    ends = [np.array([8, 2], np.int32), np.array(9, np.int32)]
    attrs = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 5, "sliding_window_cache": 1}
    m, feeds = one("GroupQueryAttention", [*new, *cache, *ends], 3, 7, **attrs)
    got, want = list(evaluate(import_model(m), feeds).values()), onnxruntime_run(m, feeds)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-5)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1, :, :3], theirs[1, :, :3])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("packed", "rotary"), [(False, 0), (True, 1)])
@pytest.mark.parametrize(
    ("length", "past", "lengths", "total"),
    [(4, 0, [3, 3], 4), (1, 6, [6, 6], 7), (1, 8, [3, 5], 6), (1, 8, [3, 7], 8), (3, 8, [5], 6), (4, 0, [3, 1], 4)],
)
def test_group_query_attention(
    packed: bool, rotary: int, length: int, past: int, lengths: list[int], total: int, known: bool
) -> None:
    """A first call, growing caches, caches with free room, rows of different lengths."""
    n = len(lengths)
    q, k, v = normal(n, length, 64), normal(n, length, 32, seed=1), normal(n, length, 32, seed=2)
    cache = [normal(n, 2, past, 16, seed=3), normal(n, 2, past, 16, seed=4)] if past else [None, None]
    angles = np.random.default_rng(5).uniform(-3, 3, (16, 8))
    tables = [np.cos(angles).astype(F), np.sin(angles).astype(F)] if rotary else [None, None]
    given = [np.concatenate([q, k, v], axis=2), None, None] if packed else [q, k, v]
    operands = [*given, *cache, np.array(lengths, np.int32), np.array(total, np.int32), *tables]
    fed = sum(x is not None for x in operands[:6]) if known else 9  # the total is a constant, or an input
    m, feeds = one(
        "GroupQueryAttention", operands, n=3, fed=fed, num_heads=4, kv_num_heads=2, do_rotary=rotary,
        local_window_size=5,
    )  # fmt: skip
    graph = import_model(m)
    got, want = list(evaluate(graph, feeds).values()), onnxruntime_run(m, feeds)
    if known and past >= total:  # the cache has room for all: only the new rows are written
        assert [graph.op(op.inputs[0]).kind for op in graph.of_kind("TensorScatter")] == ["Input", "Input"]
        assert not graph.of_kind("Concat")
    for b, end in enumerate(lengths):
        rows = min(length, end + 1)  # rows after the end of a sequence are undefined
        np.testing.assert_allclose(got[0][b, :rows], want[0][b, :rows], rtol=2e-5, atol=2e-5)
        for a, w in zip(got[1:], want[1:], strict=True):
            assert a.shape == w.shape
            np.testing.assert_allclose(a[b, :, : end + 1], w[b, :, : end + 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "past", "lengths", "total"), [(4, 0, [3, 3], 4), (1, 6, [6, 6], 7), (1, 8, [3, 5], 6), (3, 8, [5], 6)]
)
@pytest.mark.parametrize(
    "options", [{}, {"smooth_softmax": 1}, {"local_window_size": 3}, {"softcap": 2.0, "scale": 0.4}]
)
def test_attention_with_sinks(length: int, past: int, lengths: list[int], total: int, options: dict[str, Any]) -> None:
    """A further logit for each head (gpt-oss), or 0 for all heads (``smooth_softmax``)."""
    n, smooth = len(lengths), "smooth_softmax" in options
    q, k, v = normal(n, length, 64), normal(n, length, 32, seed=1), normal(n, length, 32, seed=2)
    cache = [normal(n, 2, past, 16, seed=3), normal(n, 2, past, 16, seed=4)] if past else [None, None]
    given = [q, k, v, *cache, np.array(lengths, np.int32), np.array(total, np.int32)]
    sinks = [] if smooth else [None] * 4 + [2 * normal(4, seed=5)]
    m, feeds = one("GroupQueryAttention", [*given, *sinks], n=3, fed=7, num_heads=4, kv_num_heads=2, **options)
    plain, _ = one("GroupQueryAttention", given, n=3, fed=7, num_heads=4, kv_num_heads=2,
                   **{k: v for k, v in options.items() if k != "smooth_softmax"})  # fmt: skip
    graph = import_model(m)
    (attention,) = graph.of_kind("Attention")
    assert attention.input(7) is not None
    assert not graph.of_kind("Softmax")
    got, want = list(evaluate(graph, feeds).values()), onnxruntime_run(m, feeds)
    others = list(evaluate(import_model(plain), {k: v for k, v in feeds.items() if k != "x11"}).values())
    for b, end in enumerate(lengths):
        rows = min(length, end + 1)
        np.testing.assert_allclose(got[0][b, :rows], want[0][b, :rows], rtol=2e-5, atol=2e-5)
        assert np.abs(others[0][b, :rows] - want[0][b, :rows]).max() > 1e-2, "the sinks matter"
        for a, w in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(a[b, :, : end + 1], w[b, :, : end + 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("flat", [0, 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_rotary_embedding(interleaved: int, flat: int, offset: int) -> None:
    x = normal(2, 5, 24) if flat else normal(2, 3, 5, 8)
    ids = np.array([4]) if offset else np.random.default_rng(3).integers(0, 12, (2, 5))
    angles = np.random.default_rng(4).uniform(0, 6, (12, 4))
    check("RotaryEmbedding", [x, ids, np.cos(angles).astype(F), np.sin(angles).astype(F)], interleaved=interleaved)


# ---------------------------------------------------------------- quantized


def q(dtype: Any, *shape: int, seed: int = 0) -> list[Any]:
    return [
        integers(dtype, *shape, seed=seed),
        F(0.03 + seed / 100),
        np.asarray(integers(dtype, seed=seed + 1)) // dtype(4),
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_operators_between_quantized_tensors(dtype: Any) -> None:
    y = [F(0.05), dtype(7)]
    check("QLinearAdd", [*q(dtype, 2, 3, 4), *q(dtype, 3, 4, seed=1), *y], quanta=1)
    check("QLinearMul", [*q(dtype, 2, 3, 4), *q(dtype, 3, 4, seed=1), *y], quanta=1)
    check("QLinearSigmoid", [*q(dtype, 2, 3, 4), F(1 / 256), dtype(0)], quanta=1)
    check("QLinearLeakyRelu", [*q(dtype, 2, 3, 4), *y], quanta=1, alpha=0.2)
    check("QLinearGlobalAveragePool", [*q(dtype, 2, 3, 4, 5), *y], quanta=1)
    check("QLinearAveragePool", [*q(dtype, 2, 3, 4, 5), *y], quanta=1, kernel_shape=[2, 2], strides=[1, 2])
    check("QLinearConcat", [*y, *q(dtype, 2, 3), *q(dtype, 2, 4, seed=1)], quanta=1, axis=1, fed=0)


@pytest.mark.parametrize("axis", [-1, 1])
def test_quantized_softmax(axis: int) -> None:
    x = [integers(np.uint8, 2, 3, 8), F(0.05), np.uint8(120)]
    check("QLinearSoftmax", [*x, F(1 / 256), np.uint8(0)], quanta=1, axis=axis, opset=13)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_quantized_gemm(trans_b: int, columns: bool) -> None:
    a = [integers(np.uint8, 3, 6), F(0.04), np.uint8(100)]
    scale = np.random.default_rng(2).uniform(0.01, 0.03, 5).astype(F) if columns else F(0.02)
    small = (
        integers(np.int8, *((5, 6) if trans_b else (6, 5)), seed=1) // 2
    )  # ONNX Runtime's sums of larger ones may saturate
    b = [small, scale, np.zeros(np.shape(scale), np.int8)]
    bias = np.random.default_rng(5).integers(-3000, 3000, 5).astype(np.int32)
    check("QGemm", [*a, *b, bias, F(0.3), np.uint8(128)], quanta=1, transB=trans_b)
    check("QGemm", [*a, *b, bias], transB=trans_b)


def test_quantize_and_dequantize() -> None:
    check("QuantizeLinear", [normal(3, 4) * F(20), F(0.2), np.uint8(9)])
    check("DequantizeLinear", [integers(np.uint8, 3, 4), F(0.2), np.uint8(9)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_integer_products_of_floats(bias: bool, columns: bool) -> None:
    scale = np.random.default_rng(2).uniform(0.01, 0.1, 5 if columns else ()).astype(F)
    zero = integers(np.uint8, *scale.shape, seed=3)
    b, extra = integers(np.uint8, 6, 5, seed=1), normal(5, seed=4) if bias else None
    check("DynamicQuantizeMatMul", [normal(4, 6), b, scale, zero, extra], tol=1e-4)
    a = integers(np.uint8, 4, 6)
    check("MatMulIntegerToFloat", [a, b, F(0.05), scale, np.uint8(8), zero, extra], tol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["", "packed", "floats"])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (80, 32), (300, 256)])
def test_weights_of_few_bits(bits: int, zeros: str, k: int, block: int) -> None:
    n, blocks = 5, -(-k // block)
    rng = np.random.default_rng(2)
    packed = integers(np.uint8, n, blocks, block * bits // 8, seed=1)
    scales = rng.uniform(-0.1, 0.1, n * blocks if zeros else (n, blocks)).astype(F)
    zero = {
        "": None,
        "packed": integers(np.uint8, n * (-(-blocks * bits // 8)), seed=3),
        "floats": rng.integers(0, 2 << (bits - 1), (n, blocks)).astype(F),
    }[zeros]
    operands = [normal(3, k), packed, scales, zero, None, normal(n, seed=5)]
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    if (bits, zeros) == (8, "floats"):  # ONNX Runtime has no kernel for it
        m, _ = one("MatMulNBits", operands, **attrs)
        assert import_model(m).of_kind("PackedMatMul")
        return
    graph = check("MatMulNBits", operands, tol=1e-3, **attrs)
    assert graph.of_kind("PackedMatMul")[0].attrs == PackedMatMulAttrs(f"uint{bits}", k, block)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("k", "block", "zeros"), [(64, 16, False), (80, 32, False), (80, 32, True)])
def test_weights_in_the_order_of_activations(bits: int, k: int, block: int, zeros: bool) -> None:
    """Each number of K names its block. ONNX Runtime ignores zero points beside g_idx, so the expected values are computed here."""
    rng, n, blocks = np.random.default_rng(2), 5, -(-k // block)
    groups = rng.permutation(np.arange(k) // block).astype(np.int32)
    numbers = rng.integers(0, 1 << bits, (n, blocks * block))
    zero = rng.integers(0, 1 << bits, (n, blocks)) if zeros else np.full((n, blocks), 1 << (bits - 1))
    scales, x = rng.uniform(-0.1, 0.1, (n, blocks)).astype(F), normal(3, k)
    given = zero.astype(F) if zeros else None  # as floats
    packed = _bytes(numbers, bits).reshape(n, blocks, -1)
    operands = [x, packed, scales, given, groups]
    m, feeds = one("MatMulNBits", operands, K=k, N=n, bits=bits, block_size=block)
    graph = import_model(m)
    assert graph.kinds()["Gather"] == 1
    (got,) = evaluate(graph, feeds).values()
    weights = (numbers[:, :k] - zero[:, groups]) * scales[:, groups]
    np.testing.assert_allclose(got, x @ weights.T.astype(F), rtol=0, atol=1e-4)


def _bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits as bytes, the first one in the lowest bits."""
    parts = numbers.reshape(-1, 8 // bits) << (np.arange(8 // bits) * bits)
    return parts.sum(-1).astype(np.uint8)


def test_blocks_that_lie_in_order_need_no_gather() -> None:
    operands = [normal(3, 64), integers(np.uint8, 5, 2, 16, seed=1), np.full((5, 2), 0.05, F), None]
    groups = (np.arange(64) // 32).astype(np.int32)
    graph = check("MatMulNBits", [*operands, groups], K=64, N=5, bits=4, block_size=32, tol=1e-3)
    assert "Gather" not in graph.kinds()


@pytest.mark.parametrize(("level", "rounded"), [(0, False), (1, False), (3, False), (4, True)])
def test_an_accuracy_level_lets_rows_be_rounded(level: int, rounded: bool) -> None:
    operands = [normal(3, 64), integers(np.uint8, 5, 2, 16, seed=1), np.full((5, 2), 0.05, F)]
    attrs = {"K": 64, "N": 5, "bits": 4, "block_size": 32, "accuracy_level": level}
    graph = check("MatMulNBits", operands, tol=0.02, **attrs)
    assert graph.of_kind("PackedMatMul")[0].attrs.rounded_rows is rounded


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "block"), [(64, 16), (80, 32)])
def test_rows_of_a_packed_table(bits: int, zeros: bool, k: int, block: int) -> None:
    rows, blocks = 9, -(-k // block)
    table = integers(np.uint8, rows, k * bits // 8, seed=1)
    scales = np.random.default_rng(2).uniform(-0.1, 0.1, (rows, blocks)).astype(F)
    zero = integers(np.uint8, rows, -(-blocks * bits // 8), seed=3) if zeros else None
    m, _ = one("GatherBlockQuantized", [np.array([[8, 0, 3]]), table, scales, zero], bits=bits, block_size=block)
    node = m.graph.node[0]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    feeds = {"x0": np.array([[8, 0, 3]])}
    (actual,) = evaluate(import_model(m), feeds).values()
    np.testing.assert_allclose(actual, onnxruntime_run(m, feeds)[0], rtol=1e-6)


# ---------------------------------------------------------------- refusals


PACKED = [normal(2, 16), np.zeros((1, 1, 8), np.uint8), np.ones(1, F)]
BLOCKS = {"K": 16, "N": 1, "bits": 4, "block_size": 16}


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "error", "message"),
    [
        ("FusedConv", [normal(1, 1, 3, 3), normal(1, 1, 1, 1)], {"activation": "Elu"}, UnsupportedError, "activation Elu"),
        ("Attention", [normal(1, 2, 4), normal(4, 13)], {"num_heads": 2}, ShapeError, "do not make query"),
        ("Attention", [normal(1, 2, 4), normal(4, 12)], {}, ShapeError, "num_heads"),
        ("MultiHeadAttention", [normal(1, 2, 4)], {"num_heads": 2}, ShapeError, "packed query, key and value must have 5"),
        ("GroupQueryAttention", [normal(1, 2, 9), None, None, None, None, np.array([1], np.int32), np.array(2, np.int32)],
         {"num_heads": 2, "kv_num_heads": 1}, ShapeError, "does not hold 2 heads of queries"),
        ("GroupQueryAttention", [normal(1, 2, 4), normal(1, 2, 4), normal(1, 2, 4), None, None, np.zeros(1, np.int32), np.int32(2)],
         {"num_heads": 1, "kv_num_heads": 1, "sliding_window_cache": 1, "local_window_size": 4}, ShapeError, "needs past_key"),
        ("GroupQueryAttention",
         [*[normal(1, 2, 4)] * 3, *[normal(1, 1, 3, 4)] * 2, np.zeros(1, np.int32), np.int32(2)],
         {"num_heads": 1, "kv_num_heads": 1, "sliding_window_cache": 1, "local_window_size": 4}, ShapeError,
         "a cache of 3 positions for a window of 4"),
        ("GroupQueryAttention", [normal(1, 2, 4)], {"num_heads": 1, "kv_num_heads": 1, "k_quant_type": "PER_TENSOR"},
         UnsupportedError, "k_quant_type=PER_TENSOR"),
        ("RotaryEmbedding", [normal(1, 2, 4)], {}, ShapeError, "needs operand 1"),
        ("SkipLayerNormalization", [normal(1, 2, 4), normal(1, 2, 4)], {}, ShapeError, "needs operand 2"),
        ("QLinearConcat", [F(1), np.uint8(0), np.zeros(3, np.uint8)], {"axis": 0}, ShapeError, "1 operands after"),
        ("MatMulNBits", [normal(2, 16), np.zeros((1, 1, 6), np.uint8), np.ones(1, F)],
         {"K": 16, "N": 1, "bits": 3, "block_size": 16}, UnsupportedError, "3 bits"),
        ("MatMulNBits", [*PACKED, None, np.arange(16, dtype=np.int32)], BLOCKS, UnsupportedError,
         "n: .*g_idx whose blocks do not have 16 numbers each"),
        ("MatMulNBits", [*PACKED, None, np.zeros(8, np.int32)], BLOCKS, ShapeError,
         "n.*: .*it must name the block of each of 16 numbers"),
        ("MatMulNBits", [PACKED[0], np.zeros((1, 1, 9), np.uint8), PACKED[2]], BLOCKS, ShapeError,
         r"n.*: MatMulNBits weights of 4 bits uint8\[1, 1, 9\] must hold \[1, 8\]"),
        ("MatMulNBits", [*PACKED[:2], np.ones(2, F)], BLOCKS, ShapeError, r"n.*: .*scales fp32\[2\] must hold \[1, 1\]"),
        ("MatMulNBits", [*PACKED, np.ones(2, np.uint8)], BLOCKS, ShapeError, r"n.*: .*packed zero points uint8\[2\] must hold"),
        ("MatMulNBits", [*PACKED, np.ones(1, np.int32)], BLOCKS, ShapeError, "n.*: .*zero points are int32"),
        ("MatMulNBits", PACKED, {**BLOCKS, "block_size": 24}, ShapeError, "n.*: .*a block must be a power of two"),
        ("MatMulNBits", PACKED, {**BLOCKS, "block_size": 8}, ShapeError, "n.*: .*and at least 16"),
        ("GatherBlockQuantized", [PACKED[1][0], np.zeros(1, np.int64), np.ones((1, 2), F)], {"block_size": 16}, ShapeError,
         "n.*: .*do not fit data"),
        ("GatherBlockQuantized", [PACKED[1][0], np.zeros(1, np.int64), np.ones((1, 1), F)],
         {"gather_axis": 1}, UnsupportedError, "axes other than the first"),
        ("GroupQueryAttention", [normal(1, 2, 4)], {"num_heads": 1, "kv_num_heads": 1}, ShapeError, "needs query, seqlens_k"),
        ("SparseAttention", [normal(1, 2, 4)], {}, UnsupportedError, "unknown"),
    ],
)  # fmt: skip
def test_refusals(op: str, operands: list[Any], attrs: dict[str, Any], error: type[OptdnnError], message: str) -> None:
    m, _ = one(op, operands, **attrs)
    with pytest.raises(error, match=message):
        import_model(m)
