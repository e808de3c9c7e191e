"""Kinds that only lowered programs have: shapes and meaning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.region_cases import infer, random, results

from optdnn.errors import ShapeError
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs
from optdnn.ops.base import Attrs, Stage, Unsupported
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.fused import plain_attrs
from optdnn.ops.held import NO_ONNX, CachedAttentionAttrs, ChannelAttentionAttrs, ChannelSumsAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.pointwise_regions import JointPointwiseAttrs, PointwiseOfRowsAttrs
from optdnn.ops.regions import (
    EdgePaddedAttrs,
    FramesAttrs,
    QuantizedAttrs,
    RecurrenceAttrs,
    StackedRNNAttrs,
    TurnedHeadsAttrs,
    ZerosAttrs,
)
from optdnn.ops.rnn import GRUAttrs, LSTMAttrs
from optdnn.ops.table import FAMILIES, IMPORTERS, OPDEFS
from optdnn.runtime.reference.arithmetic import MOVES, PRODUCTS, products_of
from optdnn.runtime.reference.attention import rotary_embedding
from optdnn.runtime.reference.packed_rnn import pack_matrix
from optdnn.runtime.reference.run import run_kernel
from optdnn.runtime.reference.table import KINDS
from optdnn.types import BF16, FP16, FP32, INT32

REGIONS = {d.kind for d in FAMILIES["regions of lowered programs (our own)"]}


def test_every_kind_has_a_definition_and_a_kernel() -> None:
    assert set(OPDEFS) == KINDS
    assert len(REGIONS) == 61


def test_regions_are_neither_imported_nor_exported() -> None:
    assert not REGIONS & set(IMPORTERS)
    assert {OPDEFS[kind].to_onnx for kind in REGIONS} == {NO_ONNX}
    with pytest.raises(Unsupported, match="no ONNX form"):
        NO_ONNX(None, (), 1, None)  # type: ignore[arg-type]


def test_the_tables_of_arithmetic_hold_known_kinds() -> None:
    assert set(PRODUCTS) < set(OPDEFS)
    assert {kind for kind in MOVES if not OPDEFS[kind].traits.movement} == {"Zeros"}
    assert not MOVES & set(PRODUCTS)


def test_heads_of_a_result_turn() -> None:
    x, w, turn = random(6, 8, 1, 1), random(96, 8, 1, 1, seed=1), random(3, 1, 2, 8, seed=2)
    own = ConvAttrs((1, 1), (0,) * 4, (1, 1), 1)
    for interleaved in (False, True):
        (y,) = results("TurnedHeads", TurnedHeadsAttrs("Conv", own, 64, 32, 16, interleaved), [x, w, turn])
        (plain,) = run_kernel("Conv", [x, w], plain_attrs(OPDEFS["Conv"], own))
        heads = plain[:, :64].reshape(2, 3, 2, 32).transpose(0, 2, 1, 3)
        (want,) = rotary_embedding(
            heads, *(turn[None, :, 0, k] for k in range(2)), interleaved=interleaved, rotary_embedding_dim=16
        )
        np.testing.assert_allclose(y[:, :64, 0, 0], want.transpose(0, 2, 1, 3).reshape(6, 64), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(y[:, 64:], plain[:, 64:])
    attrs = TurnedHeadsAttrs("Conv", own, 64, 32, 16, False)
    for angles, because in (
        (random(4, 1, 2, 8), "do not cover all positions"),
        (random(3, 2, 2, 8), "do not fit 16 features"),
    ):
        with pytest.raises(ShapeError, match=because):
            infer("TurnedHeads", attrs, [x, w, angles])


def test_heads_of_a_result_take_turns() -> None:
    """Heads of 16 features with the angles of two parts alternately equal heads of 32 features with two parts."""
    x, w, turn = random(6, 8, 1, 1), random(96, 8, 1, 1, seed=1), random(3, 2, 2, 8, seed=2)
    own = ConvAttrs((1, 1), (0,) * 4, (1, 1), 1)
    (y,) = results("TurnedHeads", TurnedHeadsAttrs("Conv", own, 64, 16, 16, False, 2), [x, w, turn])
    (plain,) = run_kernel("Conv", [x, w], plain_attrs(OPDEFS["Conv"], own))
    heads = plain[:, :64].reshape(2, 3, 2, 32).transpose(0, 2, 1, 3)
    (want,) = rotary_embedding(heads, *(turn[:, :, k].reshape(1, 3, 16) for k in range(2)), parts=2)
    np.testing.assert_allclose(y[:, :64, 0, 0], want.transpose(0, 2, 1, 3).reshape(6, 64), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[:, 64:], plain[:, 64:])


def test_copy_keeps_bits() -> None:
    x = random(2, 3).astype(BF16)
    x[0, 0] = np.nan
    (y,) = results("Copy", Attrs(), [x])
    assert y.tobytes() == x.tobytes()


def test_joint_pointwise() -> None:
    x, y, z = random(2, 3), random(3, seed=1).astype(FP16), random(2, 3, seed=2)
    double = (Stage("Mul", (0, 1)), Stage("Cast", (-2,), CastAttrs(FP16)))
    attrs = JointPointwiseAttrs((2, 1, 1), (double, (), (Stage("Less", (0, -1)),)))
    found = results("JointPointwise", attrs, [x, x, y, z], outputs=3)
    np.testing.assert_array_equal(found[0], (x * x).astype(FP16))
    assert found[1].tobytes() == y.tobytes()
    assert found[2].dtype == bool
    for counts, because in (((2, 1), "chains of stages"), ((2, 1, 2), "operands"), ((3, 0, 1), "without operands")):
        with pytest.raises(ShapeError, match=because):
            infer("JointPointwise", replace(attrs, counts=counts), [x, x, y, z], outputs=3)


def test_pointwise_of_rows() -> None:
    words, places, added = random(9, 4).astype(FP16), random(5, 4, seed=1).astype(FP16), random(4, seed=2).astype(FP16)
    at, place = np.array([[3, -1, 8], [0, 2, 2]]), np.array([[4, 0, 1]], np.int32)
    stages = (Stage("Add", (-1, 2)), Stage("Mul", (-2, 1)))
    attrs = PointwiseOfRowsAttrs((0, 2), stages)
    (y,) = results("PointwiseOfRows", attrs, [words, added, places, at, place])
    wide = [x.astype(np.float32) for x in (words, places, added)]
    np.testing.assert_array_equal(y, ((wide[0][at] + wide[1][place]) * wide[2]).astype(FP16))
    with pytest.raises(ShapeError, match=r"tables at \(0, 3\)"):
        infer("PointwiseOfRows", replace(attrs, rows=(0, 3)), [words, added, places, at, place])
    with pytest.raises(ShapeError, match="table"):
        infer("PointwiseOfRows", replace(attrs, rows=(0, 1)), [words, added, places, at, place])


def test_frames() -> None:
    x = np.arange(1, 11, dtype=np.float32).reshape(2, 5)
    attrs = FramesAttrs(axis=1, first=-1, distance=2, step=1, count=3, taps=3, along=0, fill=7)
    (y,) = results("Frames", attrs, [x])
    assert y[:, 0].tolist() == [[7, 1, 2], [2, 3, 4], [4, 5, 7]]
    with pytest.raises(ShapeError, match="along axis 2"):
        infer("Frames", replace(attrs, axis=2), [x])


def test_zeros() -> None:
    (y,) = results("Zeros", ZerosAttrs((2, 3)), [])
    assert y.dtype == INT32
    assert not y.any()


def test_rotary_pair() -> None:
    x, y, cos, sin = random(2, 3, 5, 8), random(2, 1, 5, 8), random(1, 5, 4), random(1, 5, 4)
    attrs = RotaryAttrs()
    found = results("RotaryPair", attrs, [x, cos, sin, y], outputs=2)
    for z, turned in zip((x, y), found, strict=True):
        np.testing.assert_array_equal(turned, run_kernel("RotaryEmbedding", [z, cos, sin], {})[0])
    with pytest.raises(ShapeError, match="does not fit the length"):
        infer("RotaryPair", attrs, [x, cos, sin, y[:, :, :3]], outputs=2)


def test_attention_with_a_bias_of_two_factors() -> None:
    q, k, v = random(2, 3, 12, 8), random(2, 3, 20, 8, seed=1), random(2, 3, 20, 8, seed=2)
    rows, columns = random(2, 3, 3, 4, 4, seed=3), random(2, 3, 3, 4, 5, seed=4)
    (y,) = results("FactoredAttention", AttentionAttrs(), [q, k, v, rows, columns])
    bias = (rows[..., None] + columns[..., None, :]).reshape(2, 3, 12, 20)
    assert np.array_equal(y, run_kernel("Attention", [q, k, v, bias], {})[0])
    for wrong, reason in (
        ([rows[..., :2], columns], "not of the keys"),
        ([rows[:, :, :2], columns], "not of the queries"),
    ):
        with pytest.raises(ShapeError, match=reason):
            infer("FactoredAttention", AttentionAttrs(), [q, k, v, *wrong])


def test_masked_softmax() -> None:
    x = random(3, 4)
    x[1] = -np.inf
    (y,) = results("MaskedSoftmax", Attrs(), [x])
    assert not y[1].any()
    assert np.allclose(y[[0, 2]], run_kernel("Softmax", [x[[0, 2]]], {"axis": -1})[0])


def test_periodic_attention() -> None:
    q, k, v = (random(4, 2, 3, 8, seed=s) for s in range(3))
    mask = random(2, 1, 3, 3)
    (y,) = results("PeriodicAttention", AttentionAttrs(), [q, k, v, mask])
    (want,) = run_kernel("Attention", [q, k, v, np.concatenate([mask, mask])], {})[:1]
    assert np.array_equal(y, want)
    with pytest.raises(ShapeError, match="do not repeat"):
        infer("PeriodicAttention", AttentionAttrs(), [q[:3], k[:3], v[:3], mask])


@pytest.mark.parametrize("sinks", [False, True])
def test_cached_attention(sinks: bool) -> None:
    q, k, v = (random(2, heads, 1, 8, seed=s) for s, heads in enumerate((4, 2, 2)))
    keys, values = (random(2, 2, 5, 8, seed=s) for s in (3, 4))
    angles, starts, lengths = [random(2, 1, 4, seed=s) for s in (5, 6)], np.array([1, 4]), np.array([2, 5])
    more = [random(4, seed=7) + 2] if sinks else []
    operands = [q, k, v, *angles, starts, lengths, keys, values, *more]
    found = results("CachedAttention", CachedAttentionAttrs(0.5, left_window_size=2), operands, outputs=3)
    turned = [run_kernel("RotaryEmbedding", [x, *angles], {})[0] for x in (q, k)]
    caches = [run_kernel("TensorScatter", [c, x, starts], {"axis": 2})[0] for c, x in ((keys, turned[1]), (values, v))]
    attrs = {"scale": 0.5, "is_causal": True, "left_window_size": 2}
    (want,) = run_kernel("Attention", [turned[0], *caches, None, None, None, lengths, *more], attrs)[:1]
    for got, w in zip(found, (want, *caches), strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-6)
    with pytest.raises(ShapeError, match="do not take"):
        infer("CachedAttention", CachedAttentionAttrs(), [q, k[..., :4], *operands[2:]])
    with pytest.raises(ShapeError, match="sinks are one number per head"):
        infer("CachedAttention", CachedAttentionAttrs(), [*operands[:9], random(3)])


def test_channel_attention() -> None:
    q, k, v = (random(2, 3, 4, 8, seed=s) for s in range(3))
    factors = np.array([0.5, 1.0, 2.0], np.float32)
    (y,) = results("ChannelAttention", ChannelAttentionAttrs((1e-12, 1e-12)), [q, k, v, factors])
    lengths = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
    (want,) = run_kernel("Attention", [q / lengths[0] * factors[:, None, None], k / lengths[1], v], {"scale": 1.0})[:1]
    assert np.allclose(y, want, atol=1e-6)
    (plain,) = results("ChannelAttention", ChannelAttentionAttrs(), [q, k, v, factors])
    (want,) = run_kernel("Attention", [q * factors[:, None, None], k, v], {"scale": 1.0})[:1]
    assert np.allclose(plain, want, atol=1e-6)
    with pytest.raises(ShapeError, match="are not of the heads"):
        infer("ChannelAttention", ChannelAttentionAttrs(), [q, k, v, factors[:2]])


@pytest.mark.parametrize("least", [(), (1e-12, 1e-12)])
def test_channel_attention_in_parts(least: tuple[float, ...]) -> None:
    q, k, v = (random(2, 3, 4, 11, seed=s) for s in range(3))
    q[0, 1, 2] = 0.0
    factors = np.array([0.5, 1.0, 2.0], np.float32)
    (sums,) = results("ChannelSums", ChannelSumsAttrs(5), [q, k])
    assert sums.shape == (2, 3, 3, 6, 4)
    np.testing.assert_allclose(sums[:, :, 2, 1], np.square(k[..., 10:]).sum(3), rtol=1e-6)
    (y,) = results("ChannelResults", ChannelAttentionAttrs(least), [sums, v, factors])
    (want,) = results("ChannelAttention", ChannelAttentionAttrs(least), [q, k, v, factors])
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="are not of the queries"):
        infer("ChannelSums", ChannelSumsAttrs(5), [q, k[..., :7]])
    with pytest.raises(ShapeError, match="are not of the values"):
        infer("ChannelResults", ChannelAttentionAttrs(), [sums, v[:, :, :3], factors])


LSTM = LSTMAttrs(hidden_size=4)


GRU = GRUAttrs(hidden_size=4, direction="reverse", linear_before_reset=True)


@pytest.mark.parametrize(("cell", "own"), [("LSTM", LSTM), ("GRU", GRU)])
def test_recurrence(cell: str, own: LSTMAttrs | GRUAttrs) -> None:
    gates = {"LSTM": 4, "GRU": 3}[cell] * 4
    x, w, r, bias = random(5, 2, 3), random(1, gates, 3), random(1, gates, 4), random(gates, seed=1)
    both = np.concatenate([np.zeros(gates, np.float32), bias])[None]
    attrs = RecurrenceAttrs(cell, own)
    found = results("Recurrence", attrs, [x @ w[0].T, r[0], bias, None, None, None, None], outputs=3)
    y, *states = run_kernel(cell, [x, w, r, both], plain_attrs(OPDEFS[cell], own))
    assert np.allclose(found[0], y[:, 0], atol=1e-6)
    for got, want in zip(found[1:], states, strict=True):
        assert np.allclose(got, want[0], atol=1e-6)
    with pytest.raises(ShapeError, match="do not fit"):
        infer("Recurrence", attrs, [x, r[0]])


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_stacked_rnn(cell: str) -> None:
    """Two stacked layers of 32 cells with packed weights equal two layers of the cell."""
    hidden, gates = 32, {"LSTM": 4, "GRU": 3}[cell]
    x = random(4, 2, 8)
    sizes = (8, hidden)
    ws = [random(gates * hidden, n, seed=n) * 0.2 for n in sizes]
    rs = [random(gates * hidden, hidden, seed=9 + n) * 0.2 for n in sizes]
    bias = random(2, hidden, 4)
    packed = np.concatenate([pack_matrix(m, hidden).reshape(-1) for w, r in zip(ws, rs, strict=True) for m in (w, r)])
    initial = [random(2, 2, hidden, seed=s) for s in range(2 if cell == "LSTM" else 1)]
    attrs = StackedRNNAttrs(cell, layers=2, hidden=hidden, inputs=8)
    y, *states = results("StackedRNN", attrs, [x, packed, bias, *initial], outputs=4)
    own = LSTMAttrs(hidden) if cell == "LSTM" else GRUAttrs(hidden, linear_before_reset=True)
    for layer in range(2):
        recurrent = np.zeros((gates, hidden), np.float32)
        if cell == "GRU":
            recurrent[2] = bias[layer, :, 3]
        both = np.concatenate([bias[layer].T[:gates], recurrent]).reshape(1, -1)
        begin = [s[layer : layer + 1] for s in initial]
        operands = [x, ws[layer][None], rs[layer][None], both, None, *begin]
        z, *last = run_kernel(cell, operands, plain_attrs(OPDEFS[cell], own))
        x = z[:, 0]
        for got, want in zip(states, last, strict=False):
            assert np.allclose(got[layer], want[0], atol=1e-5)
        if layer == 0:
            assert np.allclose(states[-1][0], x, atol=1e-5), "what the inner layer gives"
    assert np.allclose(y, x, atol=1e-5)
    with pytest.raises(ShapeError, match="RNN cells"):
        infer("StackedRNN", replace(attrs, cell="RNN"), [x[..., :8], packed, bias])


@pytest.mark.parametrize("kept", [False, True])
def test_quantized(kept: bool) -> None:
    x, scale = random(3, 8) * 4, np.ones(8, np.float32)
    norm = LayerNormAttrs()
    attrs = QuantizedAttrs("LayerNormalization", norm, FP16, factor=20.0, low=-118.0, high=137.0, zero=10, kept=kept)
    *wide, q = results("Quantized", attrs, [x, scale], outputs=1 + kept)
    rounded = run_kernel("LayerNormalization", [x, scale], {})[0].astype(FP16)
    assert not kept or np.array_equal(wide[0], rounded)
    assert np.array_equal(q, np.clip(np.rint(rounded.astype(FP32) * 20) + 10, -128, 127).astype(np.int8))


def test_products_count_as_the_operators_that_a_region_computes() -> None:
    """A layer of a stack equals its cell, the recurrent part uses the recurrent weights, and a quantized operator equals the
    operator."""
    length, batch, inputs, hidden = 5, 2, 32, 64
    x, y = (length, batch, inputs), (length, 1, batch, hidden)
    w, r = (1, 4 * hidden, inputs), (1, 4 * hidden, hidden)
    stack = {"cell": "LSTM", "layers": 1, "hidden": hidden}
    whole = products_of("LSTM", [x, w, r], y, {})
    assert whole == 2 * length * batch * 4 * hidden * (inputs + hidden)
    assert products_of("StackedRNN", [x], y, stack) == whole
    second = products_of("LSTM", [(length, batch, hidden), r, r], y, {})
    assert products_of("StackedRNN", [x], y, {**stack, "layers": 2}) == whole + second
    gates = (length, batch, 4 * hidden)
    assert products_of("Recurrence", [gates, r[1:]], y, {}) == 2 * length * batch * 4 * hidden * hidden
    q = (2, 3, 7, 16)
    attention = products_of("Attention", [q, q, q], q, {})
    assert attention == 2 * (2 * 3 * 7 * 7) * (16 + 16)
    assert products_of("Quantized", [q, q, q], q, {"of": "PeriodicAttention"}) == attention
    assert products_of("QuantizedConv", [(1, 8, 4, 4), (2, 8, 2, 8, 3, 3)], (1, 32, 4, 4), {}) == 2 * 32 * 16 * 8 * 9
    assert products_of("Softmax", [q], q, {}) == 0


def test_edge_padded() -> None:
    """A convolution of a tensor with repeated edges."""
    x, w = random(2, 3, 7), random(3, 1, 4)
    own = ConvAttrs((2,), (0, 0), (1,), 3)
    (y,) = results("EdgePadded", EdgePaddedAttrs("Conv", own, (2, 3)), [x, w])
    (want,) = results("Conv", own, [np.pad(x, [(0, 0), (0, 0), (2, 3)], mode="edge"), w])
    np.testing.assert_array_equal(y, want)
    for edges in ((2,), (2, -1)):
        with pytest.raises(ShapeError, match="EdgePadded"):
            infer("EdgePadded", EdgePaddedAttrs("Conv", own, edges), [x, w])
