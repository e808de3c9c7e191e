"""Transposes that cancel, compose, and meet across operators."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.quantized_nets import QNet
from test_canonicalize import CANON, shape_of

from optdnn.dim import symbol
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.quant import QuantizeAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs

N, M = symbol("n"), symbol("m")
NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)

# ---------------------------------------------------------------- transposes


def test_transposes_that_cancel() -> None:
    n = Net()
    y = n.transposed(n.transposed(n.op("Exp", n.input(2, 3, 4, 5)), 0, 2, 3, 1), 0, 3, 1, 2)
    check_pass(CANON, n.done(y), changes=1, kinds={"Exp": 1}, rules={"transpose_chain": 1})


def test_transposes_that_compose() -> None:
    n = Net()
    y = n.transposed(n.transposed(n.input(2, 3, 4, 5), 1, 2, 3, 0), 2, 0, 1, 3)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Transpose": 1})
    assert graph.of_kind("Transpose")[0].attrs.perm == (3, 1, 2, 0)


def test_a_transpose_that_moves_single_points_is_a_reshape() -> None:
    n = Net()
    y = n.transposed(n.input(N, 3, 1, 1), 0, 2, 3, 1)
    check_pass(CANON, n.done(y), changes=1, kinds={"Reshape": 1}, rules={"transpose_is_reshape": 1}, sizes={"n": 2})


def test_a_transpose_that_moves_more_is_not() -> None:
    n = Net()
    check_untouched(CANON, n.done(n.transposed(n.input(2, 3, 4, 1), 0, 2, 3, 1)))


def test_a_transpose_that_moves_two_symbols_past_single_points_is_refused() -> None:
    n = Net()
    check_refused(CANON, n.done(n.transposed(n.input(1, N, M), 1, 2, 0)), because="more than one symbolic dimension")


def test_transposes_meet_across_pointwise_ops() -> None:
    """What TensorFlow writes around a bias and an activation: there and back again."""
    n = Net()
    x = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    y = n.op("Relu", n.op("Add", n.op("Mul", x, n.random(4, 1, 3)), n.random(3)))
    y = n.op("Clip", n.op("PRelu", y, n.positive(3)), -0.5, 6.0)
    graph, _ = check_pass(
        CANON,
        n.done(n.transposed(y, *NCHW)),
        changes=6,
        kinds={"Mul": 1, "Add": 1, "Relu": 1, "PRelu": 1, "Clip": 1},
        rules={"sink_transpose": 5, "transpose_chain": 1},
    )
    (mul,) = graph.of_kind("Mul")
    assert graph.type(mul.inputs[1]).dims == (1, 3, 4, 1)
    assert mul.src == {"Mul_2"}
    assert "Transpose_1" in graph.of_kind("Clip")[0].src


def test_transposes_meet_across_a_residual() -> None:
    n = Net()
    a, b = n.transposed(n.input(2, 3, 4, 5), *NHWC), n.transposed(n.input(2, 3, 4, 5, name="b"), *NHWC)
    y = n.transposed(n.op("Relu", n.op("Add", a, b)), *NCHW)
    check_pass(CANON, n.done(y), changes=3, kinds={"Add": 1, "Relu": 1})


def test_two_transposes_become_one_where_values_join() -> None:
    n = Net()
    a, b = n.transposed(n.input(2, 3, 4), 0, 2, 1), n.transposed(n.input(2, 3, 4, name="b"), 0, 2, 1)
    check_pass(CANON, n.done(n.op("Mul", a, b)), changes=1, kinds={"Mul": 1, "Transpose": 1})


def test_positions_that_follow_from_sizes_keep_their_transpose() -> None:
    """At given sizes they are a constant, and one Transpose stays either way. Behind the addition it would part it from a norm."""
    n = Net()
    x = n.input(2, 3, N)
    places = n.op("CumSum", n.op("Expand", n.const([1.0]), n.op("Shape", x)), n.const(2, np.int64))
    waves = n.op("Sin", places)
    y = n.op("Add", n.transposed(x, 0, 2, 1), n.transposed(waves, 0, 2, 1))
    check_refused(CANON, n.done(y), because="reaches no other transpose", rule="sink_transpose")


def test_transposes_meet_across_a_concat_a_pad_and_a_softmax() -> None:
    n = Net()
    a, b = n.transposed(n.input(2, 3, 4, 5), *NHWC), n.transposed(n.input(2, 2, 4, 5, name="b"), *NHWC)
    y = n.op("Concat", a, b, attrs=ConcatAttrs(-1))
    y = n.op("Pad", y, shape_of(0, 1, 2, 0, 0, 1, 0, 0), 0.5, attrs=PadAttrs())
    y = n.op("Softmax", y, attrs=SoftmaxAttrs(-1))
    y = n.op("Pad", y, shape_of(1, 2), None, shape_of(-1), attrs=PadAttrs("reflect"))
    graph, _ = check_pass(CANON, n.done(n.transposed(y, *NCHW)), changes=5, kinds={"Concat": 1, "Pad": 2, "Softmax": 1})
    assert graph.of_kind("Concat")[0].attrs.axis == 1
    assert graph.of_kind("Softmax")[0].attrs.axis == 1


@pytest.mark.parametrize(("axes", "keepdims"), [((1, 2), False), ((1, 2), True), ((-1,), True), ((), True)])
def test_a_transpose_before_a_reduction(axes: tuple[int, ...], keepdims: bool) -> None:
    n = Net()
    x = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    y = n.op("ReduceMean", x, *([shape_of(*axes)] if axes else []), attrs=ReduceAttrs(keepdims=keepdims))
    if keepdims:
        y = n.transposed(y, *NCHW)
    check_pass(CANON, n.done(y), changes=2 if keepdims else 1, kinds={"ReduceMean": 1})


@pytest.mark.parametrize("points", [False, True])
def test_squeeze_and_excitation_of_images_with_channels_last(points: bool) -> None:
    """Keras: the factors come back to the image by a Transpose that only moves axes of size 1, which is a Reshape. ``points``: by
    vectors that are no image."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 3, 6, 6), 8))
    image = n.transposed(x, *NHWC)
    means = n.op("ReduceMean", image, shape_of(1, 2), attrs=ReduceAttrs(keepdims=not points))
    if points:
        gate = n.op("Reshape", n.matmul(means, 8), n.ints(2, 1, 1, 8))
    else:
        gate = n.transposed(n.conv(n.transposed(means, *NCHW), 8, 1, pads=0), *NHWC)
    y = n.transposed(n.op("Mul", image, n.op("Sigmoid", gate)), *NCHW)
    graph = check_pass(CANON, n.done(n.conv(y, 4)), changes=3 if points else 6)[0]
    assert "Transpose" not in graph.kinds()
    (mean,) = graph.of_kind("ReduceMean")
    assert mean.inputs[0] == graph.of_kind("Relu")[0].value


def test_a_factor_of_other_axes_keeps_the_transpose() -> None:
    n = Net()
    image = n.transposed(n.op("Relu", n.conv(n.input(2, 3, 6, 6), 8)), *NHWC)
    y = n.op("Mul", image, n.op("Sigmoid", n.input(2, 6, 1, 8, name="g")))
    check_untouched(CANON, n.done(n.transposed(y, *NCHW)))


def test_a_reduction_that_leaves_axes_in_another_order() -> None:
    n = Net()
    x = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    y = n.op("ReduceMax", x, shape_of(1), attrs=ReduceAttrs(keepdims=False))
    check_pass(CANON, n.done(n.transposed(y, 0, 2, 1)), changes=2, kinds={"ReduceMax": 1})


def test_a_transpose_with_two_uses_that_both_pay() -> None:
    n = Net()
    t = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    graph = n.done(n.transposed(n.op("Relu", t), *NCHW), n.transposed(n.op("Exp", t), *NCHW))
    check_pass(CANON, graph, changes=4, kinds={"Exp": 1, "Relu": 1})


def test_an_activation_after_a_transposed_convolution_result_becomes_adjacent() -> None:
    n = Net()
    y = n.op("Relu", n.transposed(n.conv(n.input(2, 3, 6, 6), 4), *NHWC))
    graph, _ = check_pass(CANON, n.done(y), changes=1, rules={"sink_transpose": 1})
    assert graph.op(graph.of_kind("Relu")[0].inputs[0]).kind == "Conv"


def test_a_scale_after_a_transposed_matrix_product_becomes_adjacent() -> None:
    """ConvNeXt's layer scale: product, bias, back to NCHW, scale."""
    n = Net()
    y = n.op("Add", n.random(4), n.matmul(n.input(2, 5, 6, 3), 4))
    y = n.op("Mul", n.transposed(y, *NCHW), n.random(4, 1, 1))
    graph, _ = check_pass(CANON, n.done(y), changes=1, rules={"sink_transpose": 1})
    assert graph.op(graph.of_kind("Mul")[0].inputs[0]).kind == "Add"


def test_a_scale_after_a_transposed_value_that_others_read_stays() -> None:
    n = Net()
    c = n.op("Add", n.conv(n.input(2, 3, 6, 6), 4), n.random(4, 1, 1))
    graph = n.done(n.op("Mul", n.transposed(c, *NHWC), 2.0), n.op("Exp", c))
    check_refused(CANON, graph, because="reaches no other transpose")


def test_a_transpose_that_meets_no_other_stays() -> None:
    n = Net()
    y = n.op("Relu", n.transposed(n.input(2, 3, 4), 0, 2, 1))
    check_refused(CANON, n.done(y), because="reaches no other transpose", rule="sink_transpose")
    n = Net()
    t = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    graph = n.done(n.transposed(n.op("Relu", t), *NCHW), n.op("Exp", t))
    check_refused(CANON, graph, because="reaches no other transpose")


@pytest.mark.parametrize("kind", ["MatMul", "Add"])
def test_ops_that_a_transpose_cannot_pass(kind: str) -> None:
    n = Net()
    x = n.transposed(n.input(2, 3, 4), 0, 2, 1)
    other = n.input(2, 3, 3, name="o") if kind == "MatMul" else n.input(2, 4, 3, name="o")
    check_untouched(CANON, n.done(n.transposed(n.op(kind, x, other), 0, 2, 1)))


def test_values_transposed_in_different_ways_do_not_join() -> None:
    n = Net()
    a, b = n.transposed(n.input(3, 3, 3), 0, 2, 1), n.transposed(n.input(3, 3, 3, name="b"), 1, 0, 2)
    check_untouched(CANON, n.done(n.op("Mul", a, b)))


# ---------------------------------------------------------------- between quantized operators


def test_transposes_meet_across_an_activation_between_roundings() -> None:
    """A TFLite network after tf2onnx: the image is rounded in front of each Transpose."""
    n = QNet()
    y = n.dq(n.transposed(n.q(n.input(2, 3, 4, 5), 0.05), *NHWC), 0.05)
    y = n.dq(n.transposed(n.q(n.op("HardSwish", y), 0.03, -100), *NCHW), 0.03, -100)
    left = {"QuantizeLinear": 2, "DequantizeLinear": 2, "HardSwish": 1}
    # promoted to float64, a QuantizeLinear has a Cast, too
    rules = {"sink_transpose": 3, "transpose_chain": 1}
    check_pass(CANON, n.done(y), changes=4, kinds=left, rules=rules, promoted_changes=5)


def test_scales_per_channel_move_with_their_axis() -> None:
    n = QNet()
    y = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    left = {"QuantizeLinear": 1, "DequantizeLinear": 1}
    y = n.transposed(n.fake_channels(y, [0.01, 0.02, 0.03], axis=-1), *NCHW)
    graph, _ = check_pass(CANON, n.done(y), changes=3, kinds=left, promoted_changes=4)
    assert {op.attrs.axis for kind in left for op in graph.of_kind(kind)} == {1}


def test_transposes_stay_where_blocks_have_scales() -> None:
    n = QNet()
    scales = n.const(np.full((2, 4, 5, 2), 0.01, np.float32), np.float32)
    y = n.transposed(n.input(2, 4, 4, 5), *NHWC)
    rounded = n.op("QuantizeLinear", y, scales, attrs=QuantizeAttrs(np.dtype(np.int8), 3, block_size=2))
    check_untouched(CANON, n.done(n.transposed(rounded, *NCHW)))


def test_transposes_meet_across_rounded_residuals() -> None:
    """Each Transpose waits for the other one, which reaches the addition through a DequantizeLinear."""
    n = QNet()
    a, b = (n.dq(n.transposed(n.q(n.input(2, 3, 4, 5, name=v), 0.05), *NHWC), 0.05) for v in "ab")
    y = n.transposed(n.q(n.op("Add", a, b), 0.07), *NCHW)
    left = {"QuantizeLinear": 3, "DequantizeLinear": 2, "Add": 1}
    rules = {"sink_transpose": 4, "transpose_chain": 1}
    check_pass(CANON, n.done(y), changes=5, kinds=left, rules=rules, promoted_changes=6)


@pytest.mark.parametrize("rounded", [False, True])
def test_transposes_pass_paths_that_meet_again(rounded: bool) -> None:
    """SiLU, with and without a rounding of its sigmoid; squeeze-and-excitation between two images is another such path."""
    n = QNet()
    x = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    gate = n.op("Sigmoid", x)
    y = n.op("Mul", x, n.fake(gate, 0.004, -128) if rounded else gate)
    means = n.op("Exp", n.op("ReduceMean", y, shape_of(1, 2), attrs=ReduceAttrs()))
    graph = n.done(n.transposed(n.op("Mul", y, means), *NCHW))
    left = {"Sigmoid": 1, "Mul": 2, "ReduceMean": 1, "Exp": 1}
    left |= {"QuantizeLinear": 1, "DequantizeLinear": 1} if rounded else {}
    check_pass(CANON, graph, changes=8 if rounded else 6, kinds=left, promoted_changes=9 if rounded else 6)


def test_a_path_that_leaves_the_meeting_ones_is_refused() -> None:
    n = QNet()
    x = n.transposed(n.input(2, 3, 4, 5), *NHWC)
    gate = n.op("Sigmoid", x)
    graph = n.done(n.transposed(n.op("Mul", x, gate), *NCHW), n.op("Exp", gate))
    check_refused(CANON, graph, because="reaches no other transpose")


def test_paths_that_meet_again_lead_to_a_transpose_that_undoes_the_first_one() -> None:
    """The keys of cosine attention are normalized in the same order as the queries."""
    n = QNet()
    x = n.transposed(n.input(2, 3, 4, 5), 0, 2, 1, 3)
    y = n.op("Div", x, n.op("Exp", n.op("ReduceL2", x, shape_of(3), attrs=ReduceAttrs())))
    check_refused(CANON, n.done(n.transposed(y, 0, 1, 3, 2)), because="reaches no other transpose")


def test_rows_of_products_are_turned_once() -> None:
    """A feed-forward part with positions in front of the batch, inside a network with the batch first."""
    n = Net()
    x = n.input(3, 5, 8)
    y = n.op("Relu", n.op("Add", n.matmul(n.transposed(x, 1, 0, 2), 16), n.random(16)))
    y = n.transposed(n.op("Add", n.matmul(y, 8), n.random(8)), 1, 0, 2)
    graph, _ = check_pass(CANON, n.done(n.op("Add", x, y)), changes=6, kinds={"MatMul": 2, "Add": 3, "Relu": 1})
    assert all(graph.type(op.value).dims[:2] == (3, 5) for op in graph.of_kind("MatMul"))


def test_features_are_split_before_rows_are_turned() -> None:
    """Queries, keys and values of several heads: the Transpose in front of their product merges with the one behind it."""
    n = Net()
    y = n.op("Reshape", n.matmul(n.transposed(n.input(3, 5, 8), 1, 0, 2), 24), n.ints(1, 5, 3, 3, 8))
    graph = n.done(n.transposed(y, 3, 2, 0, 1, 4))
    graph, _ = check_pass(CANON, graph, changes=3, kinds={"MatMul": 1, "Reshape": 1, "Transpose": 1})
    assert graph.type(graph.of_kind("Reshape")[0].value).dims == (1, 3, 5, 3, 8)


def test_rows_of_several_matrices_and_turned_features_stay() -> None:
    n = Net()
    product = n.op("MatMul", n.transposed(n.input(3, 5, 8), 1, 0, 2), n.random(5, 8, 4))
    check_untouched(CANON, n.done(n.transposed(product, 1, 0, 2)))
    n = Net()
    check_untouched(CANON, n.done(n.transposed(n.matmul(n.transposed(n.input(3, 5, 8), 0, 2, 1), 4), 0, 2, 1)))


def test_a_reshape_that_joins_turned_axes_stays() -> None:
    n = Net()
    y = n.op("Reshape", n.transposed(n.input(3, 5, 8), 1, 0, 2), n.ints(15, 2, 4))
    check_untouched(CANON, n.done(n.transposed(y, 1, 0, 2)))
