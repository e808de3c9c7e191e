"""fuse_siblings: operators on one input that are merged, the parts of their result, and the reasons why others are not merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.index import BlockAttrs, ConcatAttrs, SplitAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.ops.unary import LeakyReluAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import FuseSiblings

CUDA = PassContext(target="cuda:sm_90a")


def conv(n: Net, x: Value, out: int, *extra: Any, k: int = 1, bias: bool = True, **attrs: Any) -> Value:
    """A convolution of 8 channels; ``extra`` are the operands of its epilogue."""
    w = n.random(out, 8 // attrs.get("group", 1), k, k)
    b = n.random(out) if bias else None
    fields = {"strides": (1, 1), "pads": (k // 2,) * 4, "dilations": (1, 1), **attrs}
    operands = [x, w, b, *extra]
    while operands[-1] is None:
        operands.pop()
    return n.op("Conv", *operands, attrs=ConvAttrs(**fields))


def test_branches_of_an_inception_block() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    a, b, c = (conv(n, x, out) for out in (3, 5, 4))
    deep = conv(n, x, 4, k=3)
    graph = n.done(a, n.op("Relu", b), n.op("Relu", c), deep)
    after, report = check_pass(FuseSiblings(), graph, changes=1, kinds={"Conv": 2, "Relu": 2, "Split": 1}, context=CUDA)
    split = after.of_kind("Split")[0]
    assert [o.type.shape for o in split.outputs] == [(1, 3, 6, 6), (1, 5, 6, 6), (1, 4, 6, 6)]
    assert report.fired[0].nodes == ("Conv_1", "Conv_2", "Conv_3")
    assert "no other Conv on x has the same geometry" in report.refused[0].reason


def test_parts_that_begin_inside_of_a_vector_come_last() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(*(n.op(kind, conv(n, x, out)) for kind, out in (("Exp", 3), ("Tanh", 16), ("Sin", 8))))
    after, _ = check_pass(FuseSiblings(), graph, changes=1, context=CUDA)
    assert [o.type.dims[1] for o in after.of_kind("Split")[0].outputs] == [16, 8, 3]


@pytest.mark.parametrize("zeros", [False, True])
def test_products_with_packed_weights(zeros: bool) -> None:
    n = Net(np.float64)
    x = n.input(3, 32)

    def product(width: int, block: int = 16, own: bool = zeros) -> Value:
        shape = (width, 32 // block)
        packed = n.const(n.rng.integers(0, 256, (width, 16)), np.uint8)
        zero = n.const(n.rng.integers(0, 16, shape), np.uint8) if own else None
        attrs = PackedMatMulAttrs("uint4", 32, block, epilogue=(Stage("Relu", (-1,)),))
        return n.op("PackedMatMul", x, packed, n.random(*shape), zero, attrs=attrs)

    graph = n.done(product(8), product(16), product(8, 32), product(8, own=not zeros))
    after, report = check_pass(FuseSiblings(), graph, changes=1, kinds={"PackedMatMul": 3, "Split": 1}, context=CUDA)
    assert [o.type.shape for o in after.of_kind("Split")[0].outputs] == [(3, 8), (3, 16)]
    assert len(report.fired[0].nodes) == 2


def test_products_that_round_rows_are_merged_among_themselves() -> None:
    n = Net()
    x = n.input(3, 32)

    def product(width: int, rounded: bool) -> Value:
        packed = n.const(n.rng.integers(0, 256, (width, 16)), np.uint8)
        attrs = PackedMatMulAttrs("uint4", 32, 16, rounded_rows=rounded)
        return n.op("PackedMatMul", x, packed, n.random(width, 2), attrs=attrs)

    graph = n.done(product(8, True), product(8, False), product(16, True))
    after, report = check_pass(FuseSiblings(), graph, changes=1, kinds={"PackedMatMul": 2, "Split": 1}, context=CUDA)
    rounded = {op.outputs[0].type.shape: op.attrs.rounded_rows for op in after.of_kind("PackedMatMul")}
    assert rounded == {(3, 24): True, (3, 8): False}
    assert "no other PackedMatMul on x" in report.refused[0].reason


def test_a_missing_bias_is_zero() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    check_pass(
        FuseSiblings(),
        n.done(conv(n, x, 3), conv(n, x, 5, bias=False)),
        changes=1,
        kinds={"Conv": 1, "Split": 1},
        context=CUDA,
    )


def test_no_bias_at_all() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(conv(n, x, 3, bias=False), conv(n, x, 5, bias=False))
    after, _ = check_pass(FuseSiblings(), graph, changes=1, kinds={"Conv": 1, "Split": 1}, context=CUDA)
    assert len(after.of_kind("Conv")[0].inputs) == 2


def test_equal_activations_are_kept() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    stages = (Stage("LeakyRelu", (-1,), LeakyReluAttrs(0.1)),)
    graph = n.done(conv(n, x, 3, epilogue=stages), conv(n, x, 5, epilogue=stages))
    after, _ = check_pass(FuseSiblings(), graph, changes=1, kinds={"Conv": 1, "Split": 1}, context=CUDA)
    assert after.of_kind("Conv")[0].attrs.epilogue == stages


def test_constants_for_each_channel_are_joined() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    stages = (Stage("Mul", (-1, 3)), Stage("Clip", (-2, 4, 5)))
    graph = n.done(
        conv(n, x, 3, n.random(3, 1, 1), -1.0, 1.0, epilogue=stages),
        conv(n, x, 5, n.random(1, 5, 1, 1), -1.0, 1.0, bias=False, epilogue=stages),
    )
    after, _ = check_pass(FuseSiblings(), graph, changes=1, kinds={"Conv": 1, "Split": 1}, context=CUDA)
    shapes = [after.type(v).shape for v in after.of_kind("Conv")[0].inputs if v is not None]
    assert shapes[2:] == [(8,), (8, 1, 1), (), ()]


def test_different_activations_are_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(conv(n, x, 3, epilogue=(Stage("Relu", (-1,)),)), conv(n, x, 5))
    check_refused(FuseSiblings(), graph, because="same geometry, type and activation", context=CUDA)


def test_different_bounds_are_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    stages = (Stage("Clip", (-1, 3, 4)),)
    graph = n.done(conv(n, x, 3, 0.0, 1.0, epilogue=stages), conv(n, x, 5, 0.0, 6.0, epilogue=stages))
    check_refused(FuseSiblings(), graph, because="same geometry, type and activation", context=CUDA)


@pytest.mark.parametrize("change", [{"strides": (2, 2)}, {"pads": (1, 1, 1, 1)}, {"dilations": (2, 2)}, {"k": 3}])
def test_different_geometry_is_not_merged(change: dict[str, Any]) -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(conv(n, x, 3), conv(n, x, 5, **change))
    check_refused(FuseSiblings(), graph, because="no other Conv on x has the same geometry", context=CUDA)


def test_grouped_convolutions_are_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(conv(n, x, 4, group=2), conv(n, x, 6, group=2))
    check_refused(FuseSiblings(), graph, because="a grouped convolution reads only its own channels", context=CUDA)


def test_computed_weights_are_not_merged() -> None:
    n = Net(np.float64)
    x, w = n.input(1, 8, 6, 6), n.input(3, 8, 1, 1, name="w")
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1))
    graph = n.done(n.op("Conv", x, w, attrs=attrs), n.op("Conv", x, w, attrs=attrs))
    check_refused(FuseSiblings(), graph, because="its weights are not constant", context=CUDA)


def test_a_residual_in_the_epilogue_is_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    a = conv(n, x, 5)
    b = conv(n, x, 5, a, epilogue=(Stage("Add", (-1, 3)),))  # depends on its sibling: merging would make a cycle
    check_refused(FuseSiblings(), n.done(a, b), because="not a constant for each output channel", context=CUDA)


def test_a_prologue_is_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(*(conv(n, x, out, prologue=(Stage("Relu", (-1,)),)) for out in (3, 5)))
    check_refused(FuseSiblings(), graph, because="it has its own prologue", context=CUDA)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cpu"])
def test_residuals_of_convolutions_are_not_merged_on_gpus(target: str) -> None:
    """One launch sums both convolutions there."""
    n = Net(np.float64)
    x, m = n.input(1, 8, 4, 4), n.input(1, 8, 4, 4, name="m")
    sums = []
    for _ in range(2):
        x = conv(n, x, 8, conv(n, m, 8), epilogue=(Stage("Add", (-1, 3)), Stage("Relu", (-2,))), k=3)
        sums.append(x)
    graph = n.done(*sums)
    context = PassContext(target=target)
    if target == "cpu":
        check_refused(FuseSiblings(), graph, because="on cpu the Split's copy", context=context)
    else:
        check_refused(FuseSiblings(), graph, because="one launch sums it and the convolution Conv_2", context=context)


def test_upsamplers_are_not_merged_on_gpus() -> None:
    """One launch computes each of them and shuffles its pixels."""
    n = Net(np.float64)
    x = n.input(1, 8, 4, 4)
    graph = n.done(*(n.op("DepthToSpace", conv(n, x, 16), attrs=BlockAttrs(2, "DCR")) for _ in range(2)))
    because = "one launch computes it and shuffles its pixels"
    check_refused(FuseSiblings(), graph, because=because, context=CUDA)


def test_a_big_split_does_not_pay() -> None:
    n = Net(np.float32)
    x = n.input(1, 8, 512, 512)
    graph = n.done(conv(n, x, 64), conv(n, x, 64))
    check_refused(FuseSiblings(), graph, because="the Split would copy 268.4 MB to save 12.6 MB", context=CUDA)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_split_does_not_pay_on_cpu(target: str) -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    graph = n.done(conv(n, x, 3), conv(n, x, 5))
    check_refused(
        FuseSiblings(), graph, because=f"on {target} the Split's copy costs", context=PassContext(target=target)
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_concat_of_all_siblings_goes_away(order: tuple[int, ...]) -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    parts = [conv(n, x, out) for out in (3, 5, 4)]
    y = n.op("Concat", *(parts[i] for i in order), attrs=ConcatAttrs(1))
    check_pass(FuseSiblings(), n.done(y), changes=1, kinds={"Conv": 1}, context=PassContext(target="cpu"))


def test_a_concat_with_neighbors_takes_the_merged_value() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    parts = [n.op("Exp", x), conv(n, x, 3), conv(n, x, 5), n.op("Tanh", x)]
    y = n.op("Concat", *parts, attrs=ConcatAttrs(-3))
    after, _ = check_pass(FuseSiblings(), n.done(y), changes=1, kinds={"Concat": 1, "Conv": 1, "Exp": 1, "Tanh": 1})
    assert len(after.of_kind("Concat")[0].inputs) == 3


def test_siblings_apart_in_a_concat_need_a_split() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    y = n.op("Concat", conv(n, x, 3), n.op("Exp", x), conv(n, x, 5), attrs=ConcatAttrs(1))
    kinds = {"Concat": 1, "Conv": 1, "Exp": 1, "Split": 1}
    check_pass(FuseSiblings(), n.done(y), changes=1, kinds=kinds, context=CUDA)


def test_a_concat_along_another_axis_needs_a_split() -> None:
    n = Net(np.float64)
    x = n.input(1, 8, 6, 6)
    y = n.op("Concat", conv(n, x, 5), conv(n, x, 5), attrs=ConcatAttrs(2))
    check_pass(FuseSiblings(), n.done(y), changes=1, kinds={"Concat": 1, "Conv": 1, "Split": 1}, context=CUDA)


@pytest.mark.parametrize("bias", [False, True])
def test_query_key_and_value(bias: bool) -> None:
    n = Net(np.float64)
    x = n.input(symbol("N"), 7, 8)
    stages = (Stage("Add", (-1, 2)),) if bias else ()
    outs = [
        n.op(
            "MatMul",
            x,
            n.random(8, 4),
            *([n.random(4)] if bias else []),
            attrs=MatMulAttrs(epilogue=stages),
        )
        for i in range(3)
    ]
    after, _ = check_pass(FuseSiblings(), n.done(*outs), changes=1, kinds={"MatMul": 1, "Split": 1}, context=CUDA)
    assert after.of_kind("Split")[0].attrs.axis == 2


@pytest.mark.parametrize("relu", [False, True])
def test_a_product_without_a_bias_gets_zeros(relu: bool) -> None:
    """Whisper's keys have no bias. Another stage than a bias keeps them apart."""
    n = Net(np.float64)
    x = n.input(symbol("N"), 7, 8)
    more = (Stage("Relu", (-2,)),) if relu else ()
    attrs = MatMulAttrs(epilogue=(Stage("Add", (-1, 2)), *more))
    q, v = (n.op("MatMul", x, n.random(8, 4), n.random(4), attrs=attrs) for _ in range(2))
    graph = n.done(q, n.op("MatMul", x, n.random(8, 6), attrs=MatMulAttrs()), v)
    left = {"MatMul": 2 if relu else 1, "Split": 1}
    after, _ = check_pass(FuseSiblings(), graph, changes=1, kinds=left, context=CUDA)
    widths = [o.type.dims[-1] for o in after.of_kind("Split")[0].outputs]
    assert sorted(widths) == ([4, 4] if relu else [4, 4, 6])


@pytest.mark.parametrize("trans_b", [False, True])
def test_gemms(trans_b: bool) -> None:
    n = Net(np.float64)
    x = n.input(3, 8)
    attrs = GemmAttrs(alpha=0.5, beta=2.0, transB=trans_b)
    shapes = [(4, 8), (6, 8)] if trans_b else [(8, 4), (8, 6)]
    a = n.op("Gemm", x, n.random(*shapes[0]), n.random(1, 4), attrs=attrs)
    b = n.op("Gemm", x, n.random(*shapes[1]), 0.25, attrs=attrs)
    check_pass(FuseSiblings(), n.done(a, b), changes=1, kinds={"Gemm": 1, "Split": 1}, context=CUDA)


def test_a_gemm_with_a_bias_for_each_row_is_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(3, 8)
    graph = n.done(*(n.op("Gemm", x, n.random(8, 3), n.random(3, 1), attrs=GemmAttrs()) for _ in range(2)))
    check_refused(FuseSiblings(), graph, because="its bias is not a constant for each output channel", context=CUDA)


def test_matrix_products_of_a_batch_of_weights_are_not_merged() -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 8)
    graph = n.done(*(n.op("MatMul", x, n.random(2, 8, 4), attrs=MatMulAttrs()) for _ in range(2)))
    check_refused(FuseSiblings(), graph, because="its weights have rank 3, not 2", context=CUDA)


def test_one_operator_alone_is_no_candidate() -> None:
    n = Net(np.float64)
    check_untouched(FuseSiblings(), n.done(conv(n, n.input(1, 8, 6, 6), 3)), context=CUDA)


def test_the_same_matrix_as_right_operand_is_no_sibling() -> None:
    n = Net(np.float64)
    x = n.input(8, 8)
    graph = n.done(
        n.op("MatMul", x, n.random(8, 8), attrs=MatMulAttrs()), n.op("MatMul", n.random(8, 8), x, attrs=MatMulAttrs())
    )
    check_untouched(FuseSiblings(), graph, context=CUDA)


# ---------------------------------------------------------------- groups

HALF = PassContext(target="cuda:sm_90a", precision="fp16")


def parts_of(n: Net, count: int, size: int = 6) -> list[Value]:
    """Equal parts, of 8 channels each, of an image."""
    x = n.input(2, 8 * count, size, size)
    split: list[Value] = n.op("Split", x, n.ints(*[8] * count), attrs=SplitAttrs(1), outputs=count)
    return split


def test_convolutions_of_parts_become_groups() -> None:
    n = Net(np.float64)
    widths = (2, 3, 1, 3)
    ys = [conv(n, x, out, k=3, bias=out != 1) for x, out in zip(parts_of(n, 4), widths, strict=True)]
    after, report = check_pass(
        FuseSiblings(), n.done(*ys), changes=1, kinds={"Conv": 1, "Split": 1}, context=HALF,
        rules={"grouped_siblings": 1},
    )  # fmt: skip
    (merged,) = after.of_kind("Conv")
    assert merged.attrs.group == 4
    assert merged.outputs[0].type.shape == (2, 12, 6, 6)
    sizes = [o.type.shape[1] for o in after.of_kind("Split")[0].outputs]  # type: ignore[index]
    assert sizes == [2, 1, 3, 1, 2, 3], "the widest have no channels of zeros"
    assert report.fired[0].nodes == ("Conv_2", "Conv_3", "Conv_4", "Conv_5", "Split_1")


def test_layers_of_heads_become_groups_one_after_the_other() -> None:
    """The heads of CenterPoint: siblings, and a second convolution of each."""
    n = Net(np.float64)
    x = n.input(2, 8, 6, 6)
    scale = n.random(3, 1, 1)
    ys = [
        conv(n, conv(n, x, 8, k=3, epilogue=(Stage("Relu", (-1,)),)), 3, scale, epilogue=(Stage("Mul", (-1, 3)),))
        for _ in range(3)
    ]
    after, _ = check_pass(
        FuseSiblings(), n.done(n.op("Concat", *ys, attrs=ConcatAttrs(1))), changes=2, kinds={"Conv": 2}, context=HALF
    )
    assert [op.attrs.group for op in after.of_kind("Conv")] == [1, 3]


def test_results_that_are_joined_in_another_order_are_split() -> None:
    n = Net(np.float64)
    a, b, c = (conv(n, x, 3) for x in parts_of(n, 3))
    graph = n.done(n.op("Concat", c, a, b, attrs=ConcatAttrs(1)))
    check_pass(FuseSiblings(), graph, changes=1, kinds={"Conv": 1, "Split": 1, "Concat": 1}, context=HALF)


@pytest.mark.parametrize(
    ("count", "because", "options"),
    [
        (2, "two convolutions run side by side", {}),
        (3, "differ in geometry, type or activation", {"k": (1, 3, 3)}),
        (3, "a grouped convolution reads only its own channels", {"group": 2}),
        (3, "large enough for a launch of its own", {"width": 64, "k": (3,) * 3, "size": 192}),
        (8, "would multiply many zeros", {"widths": (256, *[1] * 7), "size": 112}),
    ],
)
def test_convolutions_of_parts_that_stay(count: int, because: str, options: dict[str, Any]) -> None:
    n = Net(np.float32)
    kernels = options.get("k", (1,) * count)
    widths = options.get("widths", (options.get("width", 4),) * count)
    xs = parts_of(n, count, options.get("size", 6))
    ys = [conv(n, x, w, k=k, group=options.get("group", 1)) for x, k, w in zip(xs, kernels, widths, strict=True)]
    check_refused(FuseSiblings(), n.done(*ys), because=because, context=HALF)


def test_parts_are_grouped_only_for_16_bit_images() -> None:
    n = Net(np.float64)
    graph = n.done(*(conv(n, x, 2) for x in parts_of(n, 3)))
    check_refused(FuseSiblings(), graph, because="only kernels of 16-bit images", context=CUDA)
    check_untouched(FuseSiblings(), graph, context=PassContext(target="cpu"))


def test_parts_with_other_readers_are_not_grouped() -> None:
    n = Net(np.float64)
    a, b, c = parts_of(n, 3)
    check_untouched(FuseSiblings(), n.done(conv(n, a, 2), conv(n, b, 2), conv(n, c, 2), n.op("Relu", c)), context=HALF)


def test_parts_of_images_of_unknown_size_are_not_grouped() -> None:
    n = Net(np.float64)
    x = n.input(symbol("batch"), 24, 6, 6)
    xs = n.op("Split", x, n.ints(8, 8, 8), attrs=SplitAttrs(1), outputs=3)
    check_refused(FuseSiblings(), n.done(*(conv(n, p, 2) for p in xs)), because="is not known", context=HALF)
