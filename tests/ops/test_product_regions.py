"""Regions around products of rows: shapes and meaning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.region_cases import infer, random, results

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.product_regions import NormedProductAttrs, PairedProductAttrs, RowProductAttrs
from optdnn.ops.regions import (
    RowMomentsAttrs,
)
from optdnn.runtime.reference.run import run_kernel


def test_row_moments_and_the_product_of_normalized_rows() -> None:
    x, w, rows = random(5, 8, 1, 1), random(128, 8, 1, 1, seed=1), random(24, 128, seed=2)
    own = ConvAttrs((1, 1), (0,) * 4, (1, 1), 1)
    y, moments = results("RowMoments", RowMomentsAttrs("Conv", own, 64), [x, w, random(128)], outputs=2)
    parts = y.reshape(5, 2, 64)
    np.testing.assert_allclose(moments[..., 0].T, parts.mean(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moments[..., 1].T, 64 * parts.var(2), rtol=1e-5)
    with pytest.raises(ShapeError, match="whole groups of 48"):
        infer("RowMoments", RowMomentsAttrs("Conv", own, 48), [x, w], outputs=2)
    one, (left, right) = MatMulAttrs(), (random(2, 3, 4), random(2, 4, 64, seed=1))
    y, moments = results("RowMoments", RowMomentsAttrs("MatMul", one, 64, axis=2), [left, right], outputs=2)
    np.testing.assert_allclose(moments[0, :, 0], y.reshape(6, 64).mean(1), rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="no channels along axis 3"):
        infer("RowMoments", RowMomentsAttrs("MatMul", one, 64, axis=3), [left, right], outputs=2)
    y, moments = results("RowMoments", RowMomentsAttrs("Conv", own, 64), [x, w, random(128)], outputs=2)
    stream, bias = y.reshape(5, 128), random(24, seed=3)
    for mean, kind in ((True, "LayerNormalization"), (False, "RMSNormalization")):
        attrs = NormedProductAttrs(mean, 1e-5)
        (got,) = results("NormedProduct", attrs, [stream, moments, rows, rows.sum(1), bias])
        (normed, *_) = run_kernel(kind, [stream, np.ones(128, np.float32)], {"axis": -1, "epsilon": 1e-5})
        np.testing.assert_allclose(got, normed @ rows.T + bias, rtol=1e-4, atol=1e-4)
        times = replace(attrs, epilogue=(Stage("Mul", (-1, 1)),), beside=(Stage("Relu", (-1,)),))
        paired = [stream, moments, *([rows.reshape(3, 8, 128), rows.sum(1), bias] * 2)]
        np.testing.assert_allclose(
            results("NormedProduct", times, paired)[0], got * np.maximum(got, 0), rtol=1e-5, atol=1e-5
        )
        with pytest.raises(ShapeError, match="differ"):
            infer("NormedProduct", times, [*paired[:5], rows.reshape(4, 6, 128), *paired[6:]])
    with pytest.raises(ShapeError, match="are not of rows"):
        infer("NormedProduct", attrs, [stream[:4], moments, rows, rows.sum(1), bias])


def test_paired_product() -> None:
    x, w, v = random(5, 6), random(3, 8, 6), random(3, 8, 6)
    b, c = random(24), random(24)
    attrs = PairedProductAttrs((Stage("Mul", (~0, 1)),), (Stage("Relu", (~0,)),))
    (y,) = results("PairedProduct", attrs, [x, w, b, v, c])
    first, second = x @ w.reshape(24, 6).T + b, x @ v.reshape(24, 6).T + c
    np.testing.assert_allclose(y, first * np.maximum(second, 0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="do not fit rows"):
        infer("PairedProduct", attrs, [x[:, :5], w, b, v, c])
    with pytest.raises(ShapeError, match="differ"):
        infer("PairedProduct", attrs, [x, w, b, v[:2], c])


def test_selected_product() -> None:
    x, w, index = random(3, 6), random(4, 5, 6), np.array([[2, 1], [-1, 0], [0, 2]])
    (y,) = results("SelectedProduct", Attrs(), [x, w, index])
    np.testing.assert_allclose(y, np.einsum("mtnk,mk->mtn", w[index], x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="do not fit rows"):
        infer("SelectedProduct", Attrs(), [x[:, :5], w, index])
    with pytest.raises(ShapeError, match="not some for each row"):
        infer("SelectedProduct", Attrs(), [x, w, index[:2]])


def test_row_product() -> None:
    x, scale, w, v, b, c, r = (random(*s) for s in ((5, 6), (6,), (24, 6), (24, 6), (24,), (24,), (5, 24)))
    (y,) = results("RowProduct", RowProductAttrs((Stage("Add", (~0, 1)),)), [x, None, w, b, None, None, r])
    np.testing.assert_allclose(y, x @ w.T + b + r, rtol=1e-5, atol=1e-5)
    attrs = RowProductAttrs((Stage("Mul", (~0, 1)),), (Stage("Relu", (~0,)),), 1e-3)
    (y,) = results("RowProduct", attrs, [x, scale, w, b, v, c])
    rows = run_kernel("RMSNormalization", [x, scale], {"axis": -1, "epsilon": 1e-3})[0]
    np.testing.assert_allclose(y, (rows @ w.T + b) * np.maximum(rows @ v.T + c, 0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="do not fit rows"):
        infer("RowProduct", attrs, [x[:, :5], None, w, b])
    with pytest.raises(ShapeError, match="differ"):
        infer("RowProduct", attrs, [x, scale, w, b, v[:2], c])
