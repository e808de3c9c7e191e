"""NormalizedLinearAttention: results, inference and its errors, cost, and export as products."""

from __future__ import annotations

import numpy as np
import pytest
from support import region_cases
from support.check import check_export
from support.net import Net

from optdnn.errors import ShapeError
from optdnn.ops.base import Call
from optdnn.ops.held import LinearSumsAttrs
from optdnn.ops.normalized_attention import NormalizedAttentionAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import FP32, INT64, TensorType

KIND = "NormalizedLinearAttention"


def test_each_query_takes_a_weighted_mean_of_the_values() -> None:
    q = np.array([[1.0, 0.0], [1.0, 2.0], [-1.0, 1.0], [0.0, 0.0]]).reshape(1, 1, 4, 2)
    k = np.array([[1.0, -1.0], [3.0, 1.0]]).reshape(1, 1, 2, 2)
    v = np.array([[4.0, 0.0, 1.0], [0.0, 8.0, 1.0]]).reshape(1, 1, 2, 3)
    (y,) = OPDEFS[KIND].kernel(q, k, v, rectified=True, epsilon=1e-3)
    weights = np.array([[1.0, 3.0], [1.0, 5.0], [0.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(y[0, 0], weights @ v[0, 0] / (weights.sum(1, keepdims=True) + 1e-3))
    (y,) = OPDEFS[KIND].kernel(np.abs(q) + 1, np.abs(k), v, scale=-2.0)
    np.testing.assert_allclose(y[..., 2], -2.0)


@pytest.mark.parametrize("attrs", [NormalizedAttentionAttrs(), NormalizedAttentionAttrs(0.5, 3.0, rectified=True)])
def test_export(attrs: NormalizedAttentionAttrs) -> None:
    n = Net()
    q, k = (n.op("Sigmoid", n.input(2, 3, 5, 4, name=name)) for name in "qk")
    check_export(n.done(n.op(KIND, q, k, n.input(2, 3, 5, 6, name="v"), attrs=attrs)), rtol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "attrs", "because"),
    [
        (((1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4)), NormalizedAttentionAttrs(), "values"),
        (((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 6, 4)), NormalizedAttentionAttrs(), "values"),
        (((1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4)), NormalizedAttentionAttrs(), "queries"),
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), NormalizedAttentionAttrs(), "queries"),
        (((1, 2, 3, 4),) * 3, NormalizedAttentionAttrs(-1.0), "an epsilon of -1"),
    ],
)
def test_errors(shapes: tuple[tuple[int, ...], ...], attrs: NormalizedAttentionAttrs, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        region_cases.infer(KIND, attrs, [np.zeros(shape, np.float32) for shape in shapes])


def test_it_takes_floats() -> None:
    with pytest.raises(ShapeError, match="int64"):
        region_cases.infer(KIND, NormalizedAttentionAttrs(), [np.zeros((1, 2, 3, 4), INT64)] * 3)


def test_cost_grows_with_the_tokens() -> None:
    def cost(tokens: int) -> float:
        n = Net()
        (op,) = n.done(n.op(KIND, *(n.input(1, 2, tokens, 8, name=x) for x in "qkv"))).of_kind(KIND)
        t = TensorType(FP32, (1, 2, tokens, 8))
        call = Call(KIND, op.attrs, (t, t, t), (None,) * 3, 1, n.graph.fresh_symbol)
        assert op.definition.cost is not None
        return op.definition.cost(call, op.definition.infer(call)).flops

    assert cost(100) == 2 * cost(50) > 4 * 8 * 8 * 2 * 100


@pytest.mark.parametrize("rectified", [False, True])
def test_parts(rectified: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.uniform(-1 if rectified else 0.1, 1, (3, 2, 3, 11, 4)).astype(np.float32)
    (sums,) = region_cases.results("LinearSums", LinearSumsAttrs(5, rectified), [k, v])
    assert sums.shape == (2, 3, 3, 6, 4)
    attrs = NormalizedAttentionAttrs(0.25, 2.0, rectified)
    (y,) = region_cases.results("LinearResults", attrs, [sums, q])
    (want,) = region_cases.results(KIND, attrs, [q, k, v])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="not of the keys"):
        region_cases.infer("LinearSums", LinearSumsAttrs(5), [k, v[:, :, :7]])
    with pytest.raises(ShapeError, match="LinearResults parts"):
        region_cases.infer("LinearResults", attrs, [sums, q[..., :3]])
