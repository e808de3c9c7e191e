"""The shift of a result's mean by rounded weights: the operator, applied to the means and the rounding errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net

from optdnn.ir.evaluate import evaluate
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.passes.support.rounding_shift import rounding_shift


@pytest.mark.parametrize(
    ("shape", "kernel", "given"),
    [
        ((2, 4, 6, 5), (3, 3), {"pads": (1, 1, 1, 1)}),
        (
            (1, 4, 1, 1),
            (3, 2),
            {"pads": (3, 0, 3, 2), "strides": (2, 2), "dilations": (2, 2)},
        ),  # some taps see padding alone
        ((1, 4, 7, 4), (3, 3), {"auto_pad": "SAME_UPPER", "pads": (0,) * 4, "strides": (2, 1), "group": 2}),
        ((1, 4, 3, 4, 5), (3, 1, 2), {"pads": (1, 0, 0, 1, 0, 1), "strides": (1,) * 3, "dilations": (1,) * 3}),
    ],
)
def test_a_convolution_of_the_means(shape: tuple[int, ...], kernel: tuple[int, ...], given: dict[str, Any]) -> None:
    n = Net(dtype=np.float64)
    group = given.get("group", 1)
    error = n.rng.standard_normal((6, 4 // group, *kernel))
    means = n.rng.standard_normal(4)
    attrs = ConvAttrs(**{"strides": (1, 1), "dilations": (1, 1), **given})
    graph = n.done(n.op("Conv", n.input(*shape), n.const(error), attrs=attrs))
    image = np.broadcast_to(means.reshape(1, 4, *[1] * len(kernel)), shape)
    (want,) = evaluate(graph, {"x": image}).values()
    (conv,) = graph.of_kind("Conv")
    found = rounding_shift(conv, error, means, shape)
    np.testing.assert_allclose(found, want.mean(axis=(0, *range(2, want.ndim))), atol=1e-12)
    assert rounding_shift(conv, error, means[1:], shape) is None
    assert rounding_shift(conv, error, means, (*shape[:2], *["n"] * len(kernel))) is None


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "transposed"])
def test_a_product_of_the_means(kind: str) -> None:
    n = Net(dtype=np.float64)
    error, means = n.rng.standard_normal((5, 5)), n.rng.standard_normal(5)
    attrs = MatMulAttrs() if kind == "MatMul" else GemmAttrs(transB=kind == "transposed")
    graph = n.done(n.op(kind.replace("transposed", "Gemm"), n.input(1, 5), n.const(error), attrs=attrs))
    (op,) = [op for op in graph.order() if op.kind in ("MatMul", "Gemm")]
    (want,) = evaluate(graph, {"x": means[None]}).values()
    np.testing.assert_allclose(rounding_shift(op, error, means, (1, 5)), want[0], atol=1e-12)
    assert rounding_shift(op, error, means[1:], (1, 4)) is None
    assert rounding_shift(op, error[None], means, (1, 5)) is None
