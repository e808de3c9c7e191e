"""fuse_prologue: left-over batch norms and channel gates become stages in front of a convolution."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched, stages
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.fuse_conv_bn import BnToScaleShift, FuseConvBn
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.fuse_prologue import FusePrologue

FUSE = FusePrologue()


def scale_shift(n: Net, x: Value, c: int = 4) -> Value:
    return n.op("Add", n.op("Mul", x, n.random(c, 1, 1)), n.random(c, 1, 1))


def gated(n: Net, kernel: int = 1, group: int = 1) -> Graph:
    x, gate = n.input(2, 4, 6, 6), n.input(2, 4, 1, 1, name="gate")
    return n.done(n.conv(n.op("Mul", x, n.op("Sigmoid", gate)), 4, kernel, pads=kernel // 2, group=group))


@pytest.mark.parametrize("kernel", [1, 3])
def test_batch_norm_and_activation_in_front_of_a_convolution(kernel: int) -> None:
    n = Net()
    y = n.conv(n.op("Relu", scale_shift(n, n.input(2, 4, 6, 6))), 5, kernel, pads=kernel // 2, bias=True)
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1}, rules={"prologue_scale_shift": 1})
    assert stages(graph) == [("Mul", "Add", "Relu", "<Conv>")]
    assert graph.of_kind("Conv")[0].src == {"Mul_1", "Add_2", "Relu_3", "Conv_4"}


def test_a_shift_that_padding_keeps_out_of_the_weights() -> None:
    n = Net()
    check_pass(FUSE, n.done(n.conv(scale_shift(n, n.input(2, 4, 6, 6)), 5)), changes=1, kinds={"Conv": 1})


def test_products_have_no_prologue() -> None:
    """Tanh normalization in front of a product (DyT: Zhu et al., 2025): the product keeps its fast kernels."""
    n = Net()
    y = n.matmul(n.op("Tanh", n.op("Mul", n.input(2, 5, 4), n.random(4))), 3)
    check_untouched(FUSE, n.done(y))


def test_after_an_epilogue_that_is_there_already() -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    attrs = ConvAttrs((1, 1), (1,) * 4, (1, 1), epilogue=(Stage("Add", (-1, 3)), Stage("Relu", (-2,))))
    y = n.op("Conv", n.op("Relu", scale_shift(n, x)), n.random(4, 4, 3, 3), None, x, attrs=attrs)
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1})
    assert stages(graph) == [("Mul", "Add", "Relu", "<Conv>", "Add", "Relu")]


@pytest.mark.parametrize("gate", [False, True])
def test_gpus_compute_them_in_the_pointwise_launch_before(gate: bool) -> None:
    n = Net(np.float64)
    x = n.op("Sigmoid", n.input(2, 4, 6, 6))
    y = n.op("Mul", x, n.input(2, 4, 1, 1, name="gate")) if gate else scale_shift(n, x)
    graph = n.done(n.conv(n.op("Relu", y), 5, 1, pads=0))
    context = PassContext(target="cuda:sm_90a")
    check_refused(FUSE, graph, because="joins the launch of the pointwise operator Sigmoid_1", context=context)
    check_pass(FUSE, graph, changes=1, kinds={"Conv": 1, "Sigmoid": 1})


def test_converted_pictures_are_normalized_in_the_convolution() -> None:
    n = Net()
    x = n.op("Cast", n.input(2, 4, 6, 6, dtype=np.dtype(np.uint8)), attrs=CastAttrs(np.dtype(np.float32)))
    graph = n.done(n.conv(scale_shift(n, x), 5))
    check_pass(FUSE, graph, changes=1, kinds={"Cast": 1, "Conv": 1}, context=PassContext(target="cuda:sm_90a"))


def test_a_pointwise_operator_with_other_readers_does_not_compute_them() -> None:
    n = Net(np.float64)
    x = n.op("Sigmoid", n.input(2, 4, 6, 6))
    graph = n.done(n.conv(scale_shift(n, x), 5), x)
    check_pass(FUSE, graph, changes=1, context=PassContext(target="cuda:sm_90a"))


def test_the_gate_of_squeeze_and_excitation() -> None:
    graph, _ = check_pass(FUSE, gated(Net()), changes=1, kinds={"Conv": 1, "Sigmoid": 1}, rules={"prologue_gate": 1})
    assert stages(graph) == [("Mul", "<Conv>")]


def test_symbolic_batch_and_image() -> None:
    n = Net()
    x, gate = n.input(symbol("n"), 4, symbol("h"), 6), n.input(symbol("n"), 4, 1, 1, name="gate")
    y = n.conv(n.op("Mul", gate, x), 4, 1, pads=0)
    check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1}, sizes={"n": 2, "h": 3})


def test_the_part_of_a_chain_above_the_scale_stays_outside() -> None:
    n = Net()
    y = n.conv(n.op("Relu", scale_shift(n, n.op("Tanh", n.input(2, 4, 6, 6)))), 4)
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1, "Tanh": 1})
    assert stages(graph) == [("Mul", "Add", "Relu", "<Conv>")]


def test_densenet_layers_are_two_nodes() -> None:
    """[BN, ReLU, conv 1x1, BN, ReLU, conv 3x3] on a concat that is shared: one BN folds, the other becomes a prologue."""
    n = Net()
    x = n.input(2, 4, 6, 6)
    for _ in range(2):
        y = n.conv(n.op("Relu", n.bn(x)), 8, 1, pads=0)
        y = n.conv(n.op("Relu", n.bn(y)), 4)
        x = n.op("Concat", x, y, attrs=_concat(1))
    graph = n.done(x)
    passes = (FuseConvBn(), BnToScaleShift(), FuseEpilogue(), FusePrologue())
    reports = run_pipeline(graph, passes, verify=True)
    assert [r.changes for r in reports] == [2, 2, 2, 2]
    assert stages(graph) == [("Mul", "Add", "Relu", "<Conv>", "Relu"), ("<Conv>",)] * 2
    assert graph.kinds() == {"Concat": 2, "Conv": 4}


def _concat(axis: int):  # type: ignore[no-untyped-def]
    from optdnn.ops.table import OPDEFS

    return OPDEFS["Concat"].attrs(axis=axis)


# ---------------------------------------------------------------- refusals


def test_an_activation_alone_is_no_candidate() -> None:
    n = Net()
    check_untouched(FUSE, n.done(n.conv(n.op("Relu", n.input(2, 4, 6, 6)), 4)))


def test_refused_where_the_chain_is_shared() -> None:
    n = Net()
    r = n.op("Relu", scale_shift(n, n.input(2, 4, 6, 6)))
    check_refused(FUSE, n.done(n.conv(r, 4), n.conv(r, 4)), because="result of Relu_3 is used 2 times")
    n = Net()
    s = scale_shift(n, n.input(2, 4, 6, 6))
    check_refused(FUSE, n.done(n.conv(n.op("Relu", s), 4), s), because="result of Add_2 is used 2 times")


def test_stages_after_the_gate_are_included() -> None:
    n = Net()
    x, gate = n.input(2, 4, 6, 6), n.input(2, 4, 1, 1, name="gate")
    y = n.op("Mul", n.op("Mul", x, n.op("Sigmoid", gate)), n.const(2.0))
    graph = n.done(n.conv(n.op("Swish", y), 4, 1, pads=0))
    after, _ = check_pass(FUSE, graph, changes=1, kinds={"Conv": 1, "Sigmoid": 1}, rules={"prologue_gate": 1})
    (conv,) = after.of_kind("Conv")
    assert [stage.kind for stage in conv.attrs.prologue] == ["Mul", "Mul", "Swish"]


def test_refused_for_a_gate_in_front_of_a_larger_kernel() -> None:
    check_refused(FUSE, gated(Net(), kernel=3), because="kernel of 3x3", rule="prologue_gate")


def test_refused_for_a_gate_in_front_of_groups() -> None:
    check_refused(FUSE, gated(Net(), group=4), because="Conv_3 has 4 groups")


def test_a_scale_that_enlarges_its_operand_is_no_candidate() -> None:
    n = Net()
    x = n.op("Mul", n.input(2, 1, 6, 6), n.random(4, 1, 1))
    check_untouched(FUSE, n.done(n.conv(n.op("Relu", x), 4)))


def test_one_prologue_at_a_time() -> None:
    n = Net()
    x = n.input(2, 4, 6, 6)
    attrs = ConvAttrs((1, 1), (1,) * 4, (1, 1), prologue=(Stage("Relu", (-1,)),))
    check_untouched(FUSE, n.done(n.op("Conv", scale_shift(n, x), n.random(4, 4, 3, 3), attrs=attrs)))
