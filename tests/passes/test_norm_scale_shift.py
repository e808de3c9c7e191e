"""fuse_conv_bn: factors and shifts after a normalization go into its scale and bias."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.ops.norm import LayerNormAttrs
from optdnn.passes.fuse_conv_bn import FuseConvBn

FUSE = FuseConvBn()


def norm(n: Net, x: Value, kind: str = "LayerNormalization", *, bias: bool = True) -> Value:
    size = n.dims(x)[-1]
    more = [n.random(size)] if bias and kind == "LayerNormalization" else []
    return n.op(kind, x, n.positive(size), *more, attrs=LayerNormAttrs())


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("factor", ["per channel", "one number"])
def test_a_factor(kind: str, factor: str) -> None:
    n = Net()
    y = norm(n, n.input(2, 5, 8), kind)
    y = n.op("Mul", y, n.random(8) if factor == "per channel" else n.const(np.float32(3.0), np.float32))
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={kind: 1}, rules={"norm_scale_shift": 1})
    (op,) = graph.of_kind(kind)
    assert op.src == {f"{kind}_1", "Mul_2"}
    assert len(op.inputs) == (3 if kind == "LayerNormalization" else 2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_factor_and_a_shift(bias: bool) -> None:
    n = Net()
    y = n.op("Add", n.op("Mul", norm(n, n.input(2, 5, 8), bias=bias), n.random(8)), n.random(8))
    check_pass(FUSE, n.done(y), changes=2, kinds={"LayerNormalization": 1}, rules={"norm_scale_shift": 2})


def test_a_shift_after_a_norm_without_bias() -> None:
    n = Net()
    y = n.op("Add", norm(n, n.input(2, 5, 8), "RMSNormalization"), n.random(8))
    check_refused(FUSE, n.done(y), because="it has no bias for the shift")


def test_a_computed_scale() -> None:
    n = Net()
    y = n.op("LayerNormalization", n.input(2, 5, 8), n.input(8, name="s"), attrs=LayerNormAttrs())
    check_refused(
        FUSE, n.done(n.op("Mul", y, n.random(8))), because="its scale or bias is not one constant per channel"
    )


def test_other_arithmetic_stays() -> None:
    n = Net()
    y = norm(n, n.input(2, 5, 8))
    check_untouched(FUSE, n.done(n.op("Add", y, n.random(5, 8))))
    n = Net()
    y = norm(n, n.input(2, 5, 8))
    check_untouched(FUSE, n.done(n.op("Mul", y, n.random(8)), n.op("Relu", y)))
