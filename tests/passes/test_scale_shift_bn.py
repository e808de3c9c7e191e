"""bn_to_scale_shift and scale_shift_to_bn: batch norms that no linear op absorbs, as arithmetic and back."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ops.norm import EpsilonAttrs
from optdnn.passes.fuse_conv_bn import BnToScaleShift, ScaleShiftToBn

LEFT_OVER, BACK = BnToScaleShift(), ScaleShiftToBn()


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 5), (2, 4, 5, 6)])
def test_a_batch_norm_that_is_left_over_becomes_a_scale_and_a_shift(shape: tuple[int, ...]) -> None:
    n = Net()
    graph, _ = check_pass(
        LEFT_OVER, n.done(n.bn(n.input(*shape))), changes=1, kinds={"Mul": 1, "Add": 1}, rules={"bn_scale_shift": 1}
    )
    (mul,) = graph.of_kind("Mul")
    assert graph.type(mul.inputs[1]).dims == (4, *(1,) * (len(shape) - 2))
    assert mul.src == {"BatchNormalization_1"}


def test_a_batch_norm_that_would_overflow_is_left_alone() -> None:
    n = Net(np.float16)
    stats = (n.const([6e4]), n.const([0.0]), n.const([0.0]), n.const([1e-4]))
    y = n.op("BatchNormalization", n.input(2, 1, 3), *stats, attrs=EpsilonAttrs(0.0))
    check_refused(LEFT_OVER, n.done(y), because="would overflow float16")


# ---------------------------------------------------------------- and back, for libraries


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shapes", [((4, 1, 1), (4, 1, 1)), ((4, 1, 1), ()), ((), (1, 4, 1, 1))])
def test_a_scale_and_a_shift_become_a_batch_norm(shapes: tuple[tuple[int, ...], ...], flip: bool) -> None:
    n = Net()
    x, scale, shift = n.input(symbol("n"), 4, 5, symbol("w")), n.random(*shapes[0]), n.random(*shapes[1])
    y = n.op("Add", shift, n.op("Mul", scale, x)) if flip else n.op("Add", n.op("Mul", x, scale), shift)
    graph, _ = check_pass(
        BACK, n.done(y), changes=1, kinds={"BatchNormalization": 1}, rules={"scale_shift_bn": 1}, sizes={"n": 2, "w": 3}
    )
    (op,) = graph.of_kind("BatchNormalization")
    assert [graph.type(v).dims for v in op.inputs[1:]] == [(4,)] * 4


def test_arithmetic_that_is_not_per_channel_becomes_no_batch_norm() -> None:
    for shape, constants in [
        ((2, 4), ((4,), (4,))),
        ((2, 4, 5), ((), ())),
        ((2, 4, 5), ((5,), (4, 1))),
        ((2, 4, 5), ((4, 1), (2, 1, 1))),
        ((2, 1, 5), ((4, 1), (4, 1))),
    ]:
        n = Net()
        y = n.op("Add", n.op("Mul", n.input(*shape), n.random(*constants[0])), n.random(*constants[1]))
        check_untouched(BACK, n.done(y))
    n = Net()
    check_untouched(BACK, n.done(n.op("Add", n.op("Mul", n.input(2, 4, 5), n.random(4, 1)), n.input(4, 1, name="s"))))


def test_a_scale_that_others_read_becomes_no_batch_norm() -> None:
    n = Net()
    m = n.op("Mul", n.input(2, 4, 5), n.random(4, 1))
    graph = n.done(n.op("Add", m, n.random(4, 1)), n.op("Exp", m))
    check_refused(BACK, graph, because="result of Mul_1 is used 2 times", rule="scale_shift_bn")
