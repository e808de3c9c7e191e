"""Weights whose rounding errors compensate for each other on data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from support.net import Net

from optdnn.calibration import second_moments
from optdnn.errors import InputError
from optdnn.ir.evaluate import random_feeds, values
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.block_rounding import in_blocks, packed_floats, rounded_blocks
from optdnn.passes.support.compensated_rounding import DAMPING, compensated_floats
from optdnn.passes.support.packed import PackedArrays
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.runtime.reference.packed import dequantized
from optdnn.types import FP16, FP32, Array

K, N = 192, 48


def floats(made: PackedArrays) -> Array:
    return dequantized(made.weights, made.scales, made.zeros, code=made.code, K=made.K, block_size=made.block_size)


def drawn(seed: int = 0, rows: int = 4096) -> tuple[Array, Array]:
    """Weights [N, K], and rows of data [rows, K] that depend on each other; two of their numbers are always 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, K // 4)) @ rng.standard_normal((K // 4, K)) + 0.3 * rng.standard_normal((rows, K))
    x[:, 5:7] = 0.0
    return (0.05 * rng.standard_normal((N, K))).astype(np.float32), x.astype(np.float32)


def test_independent_data_round_to_the_nearest() -> None:
    weights, _ = drawn()
    for bits in (4, 8):
        near, made = packed_floats(weights, bits, FP16), compensated_floats(weights, np.eye(K), bits, FP16)
        for a, b in ((near.weights, made.weights), (near.scales, made.scales), (near.zeros, made.zeros)):
            np.testing.assert_array_equal(a, b)
        assert (near.code, near.K, near.block_size) == (made.code, made.K, made.block_size)


def test_no_row_is_worse_and_most_are_better() -> None:
    weights, every = drawn()
    x, unseen = every[:3584], every[3584:]
    near, made = (
        floats(f) for f in (packed_floats(weights, 4, FP16), compensated_floats(weights, x.T @ x / len(x), 4, FP16))
    )
    errors = [np.square(x.astype(np.float64) @ (w - weights).T).mean(axis=0) for w in (near, made)]
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all()
    assert errors[1].sum() < 0.4 * errors[0].sum()
    assert np.square(unseen @ (made - weights).T).mean() < 0.4 * np.square(unseen @ (near - weights).T).mean()


def test_each_step_is_the_optimal_one() -> None:
    """By the formula of Optimal Brain Surgeon: the remaining weights change by ``-e / [H^-1]_kk * [H^-1]_k``, then k leaves H."""
    width = 32
    weights, x = drawn(1)
    weights, x = weights[:6, :width], x[:, 10 : 10 + width]
    moments = x.T @ x / len(x)
    rounded = rounded_blocks(in_blocks(weights, width), 8, FP32)
    scales, zeros = (a[:, 0, 0].astype(np.float64) for a in (rounded.scales, rounded.zeros))
    inverse = np.linalg.inv(moments.astype(np.float64) + DAMPING * np.diag(moments).mean() * np.eye(width))
    left, wanted = weights.astype(np.float64), np.empty_like(weights)
    for k in range(width):
        wanted[:, k] = (np.clip(np.rint(left[:, k] / scales) + zeros, 0, 255) - zeros) * scales
        off = (left[:, k] - wanted[:, k]) / inverse[k, k]
        left -= np.outer(off, inverse[k])
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    made = floats(compensated_floats(weights, moments, 8, FP32))
    near = floats(packed_floats(weights, 8, FP32))
    assert (made != near).any(axis=1).all()
    np.testing.assert_allclose(made, wanted, atol=1e-6)


# ---------------------------------------------------------------- graphs and data


def network() -> Graph:
    """Two products of one value, which a prologue changes for the second."""
    n = Net()
    x = n.input(3, K)
    y = n.op("MatMul", x, n.random(K, N))
    z = n.op("MatMul", x, n.random(K, N), attrs=MatMulAttrs(prologue=(Stage("Relu", (-1,)),)))
    return n.done(y, z)


def test_second_moments() -> None:
    graph = network()
    feeds = [random_feeds(graph, seed) for seed in (1, 2, 3)]
    (value,) = {op.inputs[0] for op in graph.of_kind("MatMul") if op.inputs[0] is not None}
    rows = np.concatenate([values(graph, f, [value])[0] for f in feeds]).astype(np.float64)
    ((found, moments),) = second_moments(graph, feeds, [value])
    assert found == value
    np.testing.assert_allclose(moments, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    broken = {name: np.where(a > 2, 1e30, a).astype(a.dtype) for name, a in feeds[0].items()}
    with pytest.raises(InputError, match="too large"):
        list(second_moments(graph, [feeds[1], broken], [value]))


def test_matrices_that_do_not_fit_take_further_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network()
    feeds = [random_feeds(graph, seed) for seed in (1, 2)]
    wanted = [op.value for op in graph.of_kind("MatMul")]
    together = dict(second_moments(graph, feeds, wanted))
    monkeypatch.setattr("optdnn.calibration.run.MOMENTS_BYTES", 1)
    reported: list[str] = []
    alone = dict(second_moments(graph, feeds, wanted, progress=reported.append))
    assert len(reported) == 4
    for v in wanted:
        np.testing.assert_array_equal(together[v], alone[v])


@pytest.mark.slow
def test_products_use_moments_of_their_operands() -> None:
    graph, log, asked = network(), PrecisionLog(), list[str]()
    exact = graph.copy()
    feeds = [random_feeds(graph, seed) for seed in range(60)]

    def moments(given: Graph, wanted: Sequence[Value]) -> Iterator[tuple[Value, Array]]:
        asked.extend(given.op(v).kind for v in wanted)
        return second_moments(given, feeds, wanted)

    AssignPrecision()(graph, PassContext(target="cpu", plan=PrecisionPlan("w4"), moments=moments, precision_log=log))
    assert asked == ["Input", "Pointwise"]
    assert log.calibrated == {"weights": "gptq"}
    rows = np.concatenate([f["x"] for f in feeds])
    for op, before, x in zip(
        graph.of_kind("PackedMatMul"), exact.of_kind("MatMul"), (rows, np.maximum(rows, 0)), strict=True
    ):
        weights, *held = (exact.constant_value(before.inputs[1]), *(graph.constant_value(v) for v in op.inputs[1:4]))
        assert weights is not None
        made = compensated_floats(weights.T, x.T @ x / len(x), 4, FP32)
        found = PackedArrays(*held, "uint4", K, op.attrs.block_size)  # type: ignore[arg-type]
        same = np.isclose(floats(found), floats(made), rtol=1e-4, atol=1e-6)
        assert same.mean() > 0.98  # moments differ in their last bits
