"""Regions around a normalization: shapes and meaning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.region_cases import infer, random, results

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.norm import GroupNormAttrs, LayerNormAttrs
from optdnn.ops.norm_regions import (
    ActivatedNormAttrs,
    GroupApplyAttrs,
    GroupMomentsAttrs,
    HeldNormAttrs,
    NormAddNormAttrs,
    NormedResidualAttrs,
    NormPairAttrs,
    RotaryNormPairAttrs,
)
from optdnn.runtime.reference.run import run_kernel


def test_the_product_that_normalizes_its_residual() -> None:
    x, w, rows, scale, bias = (
        random(5, 24),
        random(128, 24, seed=1),
        random(5, 128, seed=2),
        random(128),
        random(128, seed=3),
    )
    parts = rows.reshape(5, 2, 64)
    moments = np.stack([parts.mean(2).T, 64 * parts.var(2).T], 2).astype(np.float32)
    stages = (Stage("Add", (-1, 1)), Stage("Relu", (-2,)))
    for mean, kind in ((True, "LayerNormalization"), (False, "RMSNormalization")):
        attrs = NormedResidualAttrs(mean, 1e-5, stages)
        (got,) = results("NormedResidual", attrs, [x, w, bias, rows, moments, scale])
        (normed, *_) = run_kernel(kind, [rows, scale], {"axis": -1, "epsilon": 1e-5})
        np.testing.assert_allclose(got, np.maximum(x @ w.T + bias + normed, 0), rtol=1e-4, atol=1e-4)
    for wrong, because in (
        ([x[:, :16], w, bias, rows, moments, scale], "do not fit rows"),
        ([x, w, bias, rows[:, :64], moments, scale], "does not fit rows"),
        ([x, w, bias, rows, moments[:, :4], scale], "are not of rows"),
    ):
        with pytest.raises(ShapeError, match=because):
            infer("NormedResidual", attrs, wrong)


def test_norm_pair() -> None:
    x, y, scale, factor = random(2, 3, 8), random(2, 5, 8), random(8), random(3, 1)
    attrs = NormPairAttrs("RMSNormalization", LayerNormAttrs(epsilon=1e-3), 4, (Stage("Mul", (-1, 3)),))
    found = results("NormPair", attrs, [x, scale, None, factor, y, scale, None], outputs=2)
    wanted = [run_kernel("RMSNormalization", [z, scale], {"epsilon": 1e-3})[0] for z in (x, y)]
    np.testing.assert_allclose(found[0], wanted[0] * factor, rtol=1e-6)
    np.testing.assert_array_equal(found[1], wanted[1])
    with pytest.raises(ShapeError):
        infer("NormPair", attrs, [x, scale, None, factor, y, scale[1:], None], outputs=2)


def test_softmax_mean() -> None:
    x, w = random(2, 3, 8), random(8, 1)
    (found,) = results("SoftmaxMean", Attrs(), [x, w])
    weights = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, (weights * w[:, 0]).sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    for wrong in (w[:4], np.repeat(w, 2, 1), w[:, 0]):
        with pytest.raises(ShapeError, match="SoftmaxMean weights"):
            infer("SoftmaxMean", Attrs(), [x, wrong])


@pytest.mark.parametrize("tokens", [False, True])
def test_rotary_norm_pair(tokens: bool) -> None:
    x, y, cos, sin = random(2, 3, 5, 8), random(2, 1, 5, 8), random(1, 5, 4), random(1, 5, 4)
    scales, bias = [random(24), random(8)] if tokens else [random(8), random(8)], random(8)
    attrs = RotaryNormPairAttrs("LayerNormalization", 1e-3, tokens)
    operands = [cos, sin, x, scales[0], None, y, scales[1], bias]
    found = results("RotaryNormPair", attrs, operands, outputs=2)
    for z, scale, shift, made in zip((x, y), scales, (None, bias), found, strict=True):
        rows = z.swapaxes(1, 2).reshape(2, 5, 1, -1) if tokens else z.swapaxes(1, 2)
        centered = rows - rows.mean(-1, keepdims=True)
        normal = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * scale + (
            0 if shift is None else shift
        )
        heads = normal.reshape(2, 5, -1, 8).swapaxes(1, 2)
        np.testing.assert_allclose(made, run_kernel("RotaryEmbedding", [heads, cos, sin], {})[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="is not of"):
        infer("RotaryNormPair", attrs, [cos, sin, x, scales[0][1:], None, y, scales[1], None], outputs=2)


@pytest.mark.parametrize("norm", ["LayerNormalization", "RMSNormalization"])
def test_add_norm(norm: str) -> None:
    a, b, scale = random(2, 3, 8), random(2, 3, 8, seed=1), random(8, seed=2)
    own = LayerNormAttrs(-1, 1e-3)
    total, y = results("AddNorm", HeldNormAttrs(norm, own), [a, b, scale], outputs=2)
    assert np.array_equal(total, a + b)
    assert np.array_equal(y, run_kernel(norm, [a + b, scale], {"axis": -1, "epsilon": 1e-3})[0])
    with pytest.raises(ShapeError, match="broadcast"):
        infer("AddNorm", HeldNormAttrs(norm, own), [a, random(2, 3, 7), scale], outputs=2)


@pytest.mark.parametrize("norm", ["LayerNormalization", "RMSNormalization"])
def test_norm_add_norm(norm: str) -> None:
    a, b, scale, first = random(2, 3, 8), random(2, 3, 8, seed=1), random(8, seed=2), random(8, seed=3)
    own, attrs = LayerNormAttrs(-1, 1e-3), {"axis": -1, "epsilon": 1e-3}
    both = NormAddNormAttrs(norm, own, HeldNormAttrs("RMSNormalization", own))
    assert NormAddNormAttrs.read(both.plain()) == both
    total, y = results("NormAddNorm", both, [a, b, scale, None, first, None], outputs=2)
    expected = run_kernel("RMSNormalization", [a, first], attrs)[0] + b
    assert np.array_equal(total, expected)
    assert np.array_equal(y, run_kernel(norm, [expected, scale], attrs)[0])
    with pytest.raises(ShapeError, match="broadcast"):
        infer("NormAddNorm", both, [a, random(2, 3, 7), scale, None, first, None], outputs=2)


def test_norm_of_a_norm() -> None:
    x, scale, first = random(2, 3, 8), random(8, seed=2), random(8, seed=3)
    own, attrs = LayerNormAttrs(-1, 1e-3), {"axis": -1, "epsilon": 1e-3}
    both = NormAddNormAttrs("LayerNormalization", own, HeldNormAttrs("RMSNormalization", own))
    rows, y = results("NormAddNorm", both, [x, None, scale, None, first, None], outputs=2)
    expected = run_kernel("RMSNormalization", [x, first], attrs)[0]
    assert np.array_equal(rows, expected)
    assert np.array_equal(y, run_kernel("LayerNormalization", [expected, scale], attrs)[0])


def test_activated_norm() -> None:
    x, scale, bias = random(2, 6, 5), random(6, seed=1), random(6, seed=2)
    own = GroupNormAttrs(3, 1e-3)
    stages = (Stage("Relu", (-1,)), Stage("Clip", (-2, 4, 5)))
    bounds = [np.float32(0.1), np.float32(0.9)]
    attrs = ActivatedNormAttrs("GroupNormalization", own, stages)
    (y,) = results("ActivatedNorm", attrs, [x, scale, bias, None, *map(np.asarray, bounds)])
    (plain,) = run_kernel("GroupNormalization", [x, scale, bias], {"num_groups": 3, "epsilon": 1e-3})
    assert np.array_equal(y, np.clip(plain, *bounds))
    with pytest.raises(ShapeError, match="do not divide"):
        infer("ActivatedNorm", replace(attrs, own=GroupNormAttrs(4)), [x, scale, bias])


def test_norms_of_sums_that_a_prologue_adds() -> None:
    x, vectors, scale, bias = random(2, 6, 5, 7), random(2, 6, 1, 1, seed=3), random(6, seed=1), random(6, seed=2)
    own = GroupNormAttrs(3, 1e-3)
    (wanted,) = run_kernel("GroupNormalization", [x + vectors, scale, bias], {"num_groups": 3, "epsilon": 1e-3})
    attrs = ActivatedNormAttrs("GroupNormalization", own, (), (Stage("Add", (-1, 3)),))
    assert np.array_equal(results("ActivatedNorm", attrs, [x, scale, bias, vectors])[0], wanted)
    added = GroupMomentsAttrs(3, 5, (Stage("Add", (-1, 1)),))
    (moments,) = results("GroupMoments", added, [x, vectors])
    assert np.array_equal(moments, results("GroupMoments", GroupMomentsAttrs(3, 5), [x + vectors])[0])
    apply = GroupApplyAttrs(35, 1e-3, (), (Stage("Add", (-1, 4)),))
    assert np.allclose(results("GroupApply", apply, [x, scale, bias, moments, vectors])[0], wanted, atol=1e-5)


@pytest.mark.parametrize("tiles", [1, 3, 35])
def test_moments_of_tiles_normalize_groups(tiles: int) -> None:
    x, scale, bias = random(2, 6, 5, 7) + 3, random(6, seed=1), random(6, seed=2)
    (moments,) = results("GroupMoments", GroupMomentsAttrs(3, tiles), [x])
    assert np.allclose(moments[1, 2, 0], [x[1, 4:].reshape(2, -1)[:, : -(-35 // tiles)].mean(),
                                          x[1, 4:].reshape(2, -1)[:, : -(-35 // tiles)].var()], atol=1e-5)  # fmt: skip
    attrs = GroupApplyAttrs(35, 1e-3, (Stage("Relu", (-1,)),))
    (y,) = results("GroupApply", attrs, [x, scale, bias, moments])
    (plain,) = run_kernel("GroupNormalization", [x, scale, bias], {"num_groups": 3, "epsilon": 1e-3})
    assert np.allclose(y, np.maximum(plain, 0), atol=1e-5)
    with pytest.raises(ShapeError, match="do not divide"):
        infer("GroupMoments", GroupMomentsAttrs(4, tiles), [x])
    with pytest.raises(ShapeError, match="are not of"):
        infer("GroupApply", attrs, [x, scale, bias, moments[:1]])
    with pytest.raises(ShapeError, match="do not divide"):
        infer("GroupApply", attrs, [x[:, :4], scale, bias, moments])
