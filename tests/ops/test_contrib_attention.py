"""Operators of com.microsoft that attend, compared with ONNX Runtime, and rotary embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contribnode import F, check, one
from onenode import normal, onnxruntime_run
from onnx import helper

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate

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
