"""fuse_conv_bn: where scales and shifts per channel stay as they are, and why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.norm import EpsilonAttrs
from optdnn.passes.fuse_conv_bn import BnToScaleShift, FuseConvBn

FUSE = FuseConvBn()


def test_refused_where_the_result_has_other_uses() -> None:
    n = Net()
    c = n.conv(n.input(2, 3, 6, 6), 4)
    check_refused(FUSE, n.done(n.bn(c), n.op("Relu", c)), because="result of Conv_1 is used 2 times", rule="conv_bn")


def test_refused_where_the_result_is_an_output() -> None:
    n = Net()
    c = n.conv(n.input(2, 3, 6, 6), 4)
    check_refused(FUSE, n.done(c, n.bn(c)), because="Conv_1 is an output of the network")


def test_the_chain_ends_at_an_output() -> None:
    n = Net()
    first = n.op("Mul", n.conv(n.input(2, 3, 6, 6), 4), n.random(4, 1, 1))
    graph = n.done(first, n.bn(first))
    check_pass(FUSE, graph, changes=1, kinds={"Conv": 1, "BatchNormalization": 1})


def test_refused_for_weights_that_are_not_constant() -> None:
    n = Net()
    x, w = n.input(2, 3, 6, 6), n.input(4, 3, 3, 3, name="w")
    y = n.bn(n.op("Conv", x, w, attrs=ConvAttrs((1, 1), (1,) * 4, (1, 1))))
    check_refused(FUSE, n.done(y), because="weights of Conv_1 are not constant")


def test_refused_for_a_bias_that_is_not_constant() -> None:
    n = Net()
    x, b = n.input(2, 3, 6, 6), n.input(4, name="b")
    y = n.bn(n.op("Conv", x, n.random(4, 3, 3, 3), b, attrs=ConvAttrs((1, 1), (1,) * 4, (1, 1))))
    check_refused(FUSE, n.done(y), because="bias of Conv_1 is not constant")


def test_refused_for_statistics_that_are_not_constant() -> None:
    n = Net()
    mean = n.input(4, name="mean")
    c = n.conv(n.input(2, 3, 6, 6), 4)
    y = n.op("BatchNormalization", c, n.random(4), n.random(4), mean, n.positive(4), attrs=EpsilonAttrs())
    for bn_pass in (FUSE, BnToScaleShift()):
        check_refused(bn_pass, n.done(y), because="statistics of BatchNormalization_2 are not constant")


@pytest.mark.parametrize("shape", [(1, 1, 6), (6, 6), (2, 1, 1, 1), (4, 6, 1)])
def test_refused_for_a_constant_that_is_not_per_channel(shape: tuple[int, ...]) -> None:
    n = Net()
    y = n.op("Mul", n.conv(n.input(2, 3, 6, 6), 4), n.random(*shape))
    check_refused(FUSE, n.done(y), because="is not one value per channel", rule="conv_scale_shift")


def test_refused_for_a_constant_that_enlarges_the_result() -> None:
    n = Net()
    y = n.op("Mul", n.conv(n.input(2, 3, 6, 6), 1), n.random(4, 1, 1))
    check_refused(FUSE, n.done(y), because="enlarges its operand")
    n = Net()
    y = n.conv(n.op("Mul", n.input(2, 1, 6, 6), n.random(4, 1, 1)), 4)
    check_refused(FUSE, n.done(y), because="enlarges its operand")


def test_refused_for_a_division_by_zero() -> None:
    n = Net()
    y = n.op("Div", n.conv(n.input(2, 3, 6, 6), 2), n.const([[[1.0]], [[0.0]]]))
    check_refused(FUSE, n.done(y), because="divides by zero")


def test_refused_where_half_precision_would_overflow() -> None:
    n = Net(np.float16)
    y = n.op("Mul", n.op("Mul", n.conv(n.input(2, 3, 6, 6), 4), 6e4), 6e4)
    check_refused(FUSE, n.done(y), because="weights of Conv_1 would overflow float16")


def test_refused_before_a_padded_convolution() -> None:
    n = Net()
    check_refused(FUSE, n.done(n.conv(n.bn(n.input(2, 3, 6, 6)), 4)), because="pads with zeros", rule="bn_conv")
    n = Net()
    y = n.conv(n.bn(n.input(2, 3, symbol("h"), 6)), 4, pads=0, auto_pad="SAME_UPPER")
    check_refused(FUSE, n.done(y), because="pads with zeros")


@pytest.mark.parametrize("matrices", [1, 3])
def test_a_shift_is_refused_before_a_stack_of_matrices(matrices: int) -> None:
    n = Net()
    w = n.random(matrices, 4, 5)
    y = n.op("MatMul", n.op("Add", n.input(3, 6, 4), n.random(4)), w, attrs=MatMulAttrs())
    check_refused(FUSE, n.done(y), because="has a stack of matrices", rule="scale_shift_conv")


def test_a_scale_goes_into_each_of_a_stack_of_matrices() -> None:
    n = Net()
    y = n.op("MatMul", n.op("Mul", n.input(3, 6, 4), n.random(4)), n.random(3, 4, 5), attrs=MatMulAttrs())
    check_pass(FUSE, n.done(y), changes=1, kinds={"MatMul": 1})


def test_refused_before_a_transposed_convolution() -> None:
    n = Net()
    check_refused(FUSE, n.done(n.conv_transpose(n.bn(n.input(2, 3, 6, 6)), 4)), because="near the border")


def test_a_batch_norm_that_linear_ops_share_goes_into_each() -> None:
    n = Net()
    b = n.bn(n.input(2, 3, 6, 6))
    graph = n.done(n.conv(b, 4, pads=0), n.conv(b, 5, pads=0))
    check_pass(FUSE, graph, changes=2, rules={"bn_conv": 2}, kinds={"Conv": 2})


@pytest.mark.parametrize(
    "other",
    [
        lambda n, b: n.op("Relu", b),
        lambda n, b: n.conv(b, 4, pads=1),  # pads with zeros, which a shift would change
        lambda n, b: n.op("Conv", n.input(2, 4, 6, 6, name="y"), b, attrs=ConvAttrs((1, 1), (0,) * 4, (1, 1))),
    ],
    ids=["no linear op", "padded", "as weights"],
)
def test_refused_before_a_convolution_where_another_reads_it(other: Callable[[Net, Value], Value]) -> None:
    n = Net()
    b = n.bn(n.input(2, 4, 3, 3))
    graph = n.done(n.conv(b, 4, 1, pads=0), other(n, b))
    check_refused(FUSE, graph, because="BatchNormalization_1 is used 2 times", rule="bn_conv")


def test_a_scale_and_shift_before_batched_matmuls_become_weights_and_an_addition() -> None:
    n = Net()
    x = n.op("Add", n.op("Mul", n.input(2, 5, 6), n.random(6)), n.random(6))
    graph = n.done(*(n.op("Add", n.matmul(x, size), n.random(size)) for size in (4, 3, 4)))
    check_pass(FUSE, graph, changes=3, rules={"scale_shift_conv": 3}, kinds={"MatMul": 3, "Add": 6})


def test_refused_for_a_shift_that_a_batched_matmul_has_no_bias_for() -> None:
    n = Net()
    y = n.op("Add", n.matmul(n.input(2, 5, 6), 4), n.random(4))
    check_refused(FUSE, n.done(y), because="no bias operand")


def test_refused_for_a_batch_norm_over_another_axis() -> None:
    n = Net()
    y = n.bn(n.matmul(n.input(2, 5, 6), 4))
    check_refused(FUSE, n.done(y), because="normalizes axis 1, the channels are on axis 2")


def test_refused_after_stages() -> None:
    n = Net()
    x = n.input(2, 3, 6, 6)
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1), epilogue=(Stage("Relu", (-1,)),))
    y = n.op("Conv", x, n.random(4, 3, 3, 3), attrs=attrs)
    check_refused(FUSE, n.done(n.bn(y)), because="Conv_1 already has the epilogue Relu")
    n = Net()
    x = n.input(2, 3, 6, 6)
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1), prologue=(Stage("Relu", (-1,)),))
    y = n.op("Conv", n.bn(x), n.random(4, 3, 3, 3), attrs=attrs)
    check_refused(FUSE, n.done(y), because="Conv_2 already has the prologue Relu")


def test_arithmetic_with_values_that_are_not_constant_is_no_candidate() -> None:
    n = Net()
    c = n.conv(n.input(2, 3, 6, 6), 4)
    check_untouched(FUSE, n.done(n.op("Add", c, n.input(2, 4, 6, 6, name="r"))))


def test_matmul_by_a_vector_is_no_candidate() -> None:
    n = Net()
    y = n.op("MatMul", n.input(2, 6), n.random(6), attrs=MatMulAttrs())
    check_untouched(FUSE, n.done(n.op("Mul", y, 2.0)))
