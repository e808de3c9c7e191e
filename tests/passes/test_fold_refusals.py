"""fold_quantized: products and means between DQ and Q that stay products and means of floats."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from support.quantized_nets import QNet, folded

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
AFTER_RELU = ConvAttrs((1, 1), (0,) * 4, (1, 1), prologue=(Stage("Relu", (-1,)),))

CASES: dict[str, Callable[[QNet], Value]] = {
    "no kernel multiplies float8_e4m3fn by int8": lambda n: n.op(
        "MatMul", n.fake(n.input(8, 16), 0.03, dtype=FP8), n.weights(16, 8, axis=1)
    ),
    "it has a prologue": lambda n: n.op(
        "Conv", n.fake(n.input(1, 8, 4, 4), 0.03), n.weights(8, 8, 1, 1), attrs=AFTER_RELU
    ),
    "its first operand is transposed": lambda n: n.op(
        "Gemm", n.fake(n.input(16, 8), 0.03), n.weights(16, 8, axis=1), attrs=GemmAttrs(transA=True)
    ),
    "its weights have 3 axes": lambda n: n.op("MatMul", n.fake(n.input(3, 4, 16), 0.03), n.weights(3, 16, 8, axis=2)),
    "its weights have scales along axis 0, not per output channel": lambda n: n.op(
        "MatMul", n.fake(n.input(8, 16), 0.03), n.weights(16, 8)
    ),
    "its size is not fixed": lambda n: n.op("MatMul", n.fake(n.input(symbol("N"), 16), 0.03), n.weights(16, 8, axis=1)),
    "there is no mean of fp8": lambda n: n.op("GlobalAveragePool", n.fake(n.input(1, 8, 4, 4), 0.03, dtype=FP8)),
    "the mean of integers needs a multiple of 4 channels": lambda n: n.op(
        "GlobalAveragePool", n.fake(n.input(1, 6, 4, 4), 0.03)
    ),
}


@pytest.mark.parametrize("because", CASES)
def test_what_is_not_folded(because: str) -> None:
    n = QNet()
    y = CASES[because](n)
    graph, report = folded(n.done(n.fake(y, 0.04)))
    assert because in {r.reason for r in report.refused}
    assert graph.of_kind(n.graph.op(y).kind)
