"""fuse_conv_bn: scales and shifts per channel go into weights and bias, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import passed

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.norm import EpsilonAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_conv_bn import FuseConvBn

FUSE = FuseConvBn()
Make = Callable[[Net, Value], Value]

IMAGES: dict[str, Make] = {
    "conv": lambda n, x: n.conv(x, 4),
    "conv with bias": lambda n, x: n.conv(x, 4, bias=True),
    "conv 1x1": lambda n, x: n.conv(x, 5, 1, pads=0),
    "grouped conv": lambda n, x: n.conv(x, 8, group=2, bias=True),
    "depthwise conv": lambda n, x: n.conv(x, 6, group=6),
    "dilated, strided conv": lambda n, x: n.conv(x, 4, dilations=2, strides=2, pads=2),
    "conv transpose": lambda n, x: n.conv_transpose(x, 4),
    "grouped conv transpose": lambda n, x: n.conv_transpose(x, 4, group=2, bias=True),
}
ROWS: dict[str, Make] = {
    "gemm": lambda n, x: n.gemm(x, 4),
    "gemm, no bias": lambda n, x: n.gemm(x, 4, bias=False),
    "gemm, transposed weights": lambda n, x: n.gemm(x, 4, trans_b=True),
    "gemm, alpha and beta": lambda n, x: n.gemm(x, 4, alpha=0.5, beta=-2.0),
}


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES.keys())
def test_batch_norm_after_a_convolution(make: Make) -> None:
    n = Net()
    y = n.bn(make(n, n.input(2, 6, 9, 9)))
    kind = n.graph.op(n.graph.op(y).inputs[0]).kind
    graph, report = check_pass(FUSE, n.done(y), changes=1, kinds={kind: 1}, rules={"conv_bn": 1})
    (op,) = graph.of_kind(kind)
    assert op.src == {f"{kind}_1", "BatchNormalization_2"}
    assert op.outputs[0].name == "BatchNormalization_2"
    assert report.fired[0].nodes == ("BatchNormalization_2", f"{kind}_1")


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS.keys())
def test_batch_norm_after_a_matrix_product(make: Make) -> None:
    n = Net()
    check_pass(FUSE, n.done(n.bn(make(n, n.input(2, 6)))), changes=1, kinds={"Gemm": 1})


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES.keys())
def test_a_layer_that_is_subtracted(make: Make) -> None:
    n = Net()
    y = make(n, n.input(2, 6, 9, 9))
    x = n.op("Tanh", n.input(*n.dims(y), name="t"))
    graph, _ = check_pass(
        FUSE, n.done(n.op("Sub", x, y)), changes=2, rules={"subtracted_linear": 1, "conv_scale_shift": 1}
    )
    assert graph.kinds() == {**graph.kinds(), "Add": 1, n.graph.op(y).kind: 1}
    assert not {"Sub", "Mul"} & graph.kinds().keys()


def test_a_layer_and_its_bias_that_are_subtracted() -> None:
    n = Net()
    y = n.op("Add", n.matmul(n.input(2, 5, 8), 8), n.random(8))
    graph, _ = check_pass(FUSE, n.done(n.op("Sub", n.input(2, 5, 8, name="t"), y)), changes=2)
    assert graph.kinds() == {**graph.kinds(), "MatMul": 1, "Add": 2}
    assert not {"Sub", "Mul"} & graph.kinds().keys()


def test_a_subtracted_sum_with_a_mask_stays() -> None:
    n = Net()
    y = n.op("Add", n.matmul(n.input(2, 5, 8), 8), n.random(5, 1))
    check_refused(FUSE, n.done(n.op("Sub", n.input(2, 5, 8, name="t"), y)), because="not one value per channel")


def test_other_subtractions_stay() -> None:
    n = Net()
    x, t = n.input(2, 5, 8), n.input(2, 5, 8, name="t")
    y = n.matmul(x, 8)
    check_untouched(FUSE, n.done(n.op("Sub", t, y), n.op("Tanh", y)))  # read elsewhere
    n = Net()
    y = n.matmul(n.input(2, 5, 8), 8)
    check_untouched(FUSE, n.done(n.op("Sub", n.input(4, 1, 1, 8, name="t"), y)))  # enlarged
    n = Net()
    y = n.op("Sub", n.random(2, 5, 8), n.matmul(n.input(2, 5, 8), 8))
    check_refused(FUSE, n.done(y), because="not one value per channel")


def test_a_product_of_computed_tensors_that_is_subtracted() -> None:
    n = Net()
    y = n.op("MatMul", n.input(2, 5, 8), n.input(2, 8, 8, name="w"))
    check_refused(FUSE, n.done(n.op("Sub", n.input(2, 5, 8, name="t"), y)), because="are not constant")


def rows_of_tokens(*, known: bool = True, channels: int = 8, readers: int = 1, back: bool = True) -> Net:
    """A product of tokens, flattened, normalized and unflattened, as LeViT has it."""
    n = Net()
    x = n.input(2, 5, 6)
    y = n.op("MatMul", x, n.random(6, 8)) if known else n.op("MatMul", x, n.input(2, 6, 8, name="w"))
    flat = n.op("Reshape", y, n.ints(-1, channels))
    z = n.bn(flat)
    z = n.op("Reshape", z, n.ints(2, 5, 8)) if back else z
    n.done(n.op("Relu", z), *(n.op("Neg", flat) for _ in range(readers - 1)))
    return n


@pytest.mark.parametrize("back", [True, False])
def test_batch_norm_of_flattened_rows(back: bool) -> None:
    graph, _ = check_pass(
        FUSE, rows_of_tokens(back=back).graph, changes=2, rules={"bn_of_rows": 1, "conv_scale_shift": 1}
    )
    assert not graph.of_kind("BatchNormalization", "Mul")
    (product,), (shift,) = graph.of_kind("MatMul"), graph.of_kind("Add")
    assert shift.inputs[0] == product.value


@pytest.mark.parametrize("options", [{"known": False}, {"channels": 4}, {"readers": 2}])
def test_batch_norm_of_other_rows_stays(options: dict[str, Any]) -> None:
    check_untouched(FUSE, rows_of_tokens(**options).graph)


def test_a_scale_of_rows_that_overflows_stays() -> None:
    n = Net(np.float16)
    flat = n.op("Reshape", n.op("MatMul", n.input(2, 5, 6), n.random(6, 8)), n.ints(-1, 8))
    statistics = [n.const(np.full(8, v)) for v in (6e4, 0.0, 0.0, 1e-4)]
    y = n.op("BatchNormalization", flat, *statistics, attrs=EpsilonAttrs(1e-5))
    check_refused(FUSE, n.done(y), because="would overflow", rule="bn_of_rows")


def test_batch_norm_after_a_matmul_makes_a_gemm_with_a_bias() -> None:
    n = Net()
    graph, _ = check_pass(FUSE, n.done(n.bn(n.matmul(n.input(2, 6), 4))), changes=1, kinds={"Gemm": 1})
    assert graph.of_kind("Gemm")[0].attrs == GemmAttrs()


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    n = Net()
    check_pass(FUSE, n.done(n.bn(n.conv(n.input(2, 3, *(6,) * rank), 4))), changes=1, kinds={"Conv": 1})


def test_symbolic_batch_and_image_size() -> None:
    n = Net()
    x = n.input(symbol("n"), 3, symbol("h"), symbol("w"))
    check_pass(FUSE, n.done(n.bn(n.conv(x, 4))), changes=1, kinds={"Conv": 1}, sizes={"n": 2, "h": 6, "w": 5})


def test_a_chain_is_one_rewrite_rounded_once() -> None:
    n = Net()
    y = n.bn(n.conv(n.input(2, 3, 6, 6), 4, bias=True))
    y = n.op("Add", n.op("Mul", n.random(1, 4, 1, 1), y), n.random(4, 1, 1))
    y = n.op("Sub", 1.0, n.op("Div", n.op("Sub", y, 0.25), n.positive(4, 1, 1)))
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1}, rules={"conv_bn": 1})
    (conv,) = graph.of_kind("Conv")
    assert len(conv.src) == 7
    before = n.graph
    wide = before.constant_value(before.of_kind("Conv")[0].inputs[1]).astype(np.float64)
    stats = [before.constant_value(v).astype(np.float64) for v in before.of_kind("BatchNormalization")[0].inputs[1:]]
    mul = before.constant_value(before.of_kind("Mul")[0].inputs[0]).astype(np.float64).reshape(-1)
    div = before.constant_value(before.of_kind("Div")[0].inputs[1]).astype(np.float64).reshape(-1)
    scale = -stats[0] / np.sqrt(stats[3] + 1e-3) * mul / div
    expected = (wide * scale.reshape(-1, 1, 1, 1)).astype(np.float32)
    assert np.array_equal(graph.constant_value(conv.inputs[1]), expected)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Mul", (4, 1, 1)),
        ("Mul", ()),
        ("Mul", (1,)),
        ("Add", (1, 4, 1, 1)),
        ("Add", ()),
        ("Sub", (4, 1, 1)),
        ("Div", (4, 1, 1)),
    ],
)
def test_a_scale_or_shift_without_batch_norm(kind: str, shape: tuple[int, ...]) -> None:
    n = Net()
    y = n.op(kind, n.conv(n.input(2, 3, 6, 6), 4), n.positive(*shape))
    check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1}, rules={"conv_scale_shift": 1})


def test_a_shift_alone_leaves_the_weights_as_they_are() -> None:
    n = Net()
    x, w = n.input(2, 3, 6, 6), n.input(4, 3, 3, 3, name="w")
    y = n.op("Add", n.op("Conv", x, w, attrs=ConvAttrs((1, 1), (1,) * 4, (1, 1))), n.random(4, 1, 1))
    graph, _ = check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1})
    assert graph.constant_value(graph.of_kind("Conv")[0].inputs[2]).shape == (4,)


def test_a_bias_after_a_matmul_of_rank_2_makes_a_gemm() -> None:
    n = Net()
    check_pass(FUSE, n.done(n.op("Add", n.matmul(n.input(2, 6), 4), n.random(4))), changes=1, kinds={"Gemm": 1})


def test_a_scale_after_a_batched_matmul() -> None:
    n = Net()
    y = n.op("Mul", n.matmul(n.input(2, 5, 6), 4), n.random(4))
    check_pass(FUSE, n.done(y), changes=1, kinds={"MatMul": 1})


def test_a_gemm_whose_bias_is_a_matrix() -> None:
    n = Net()
    x = n.input(3, 6)
    y = n.op("Gemm", x, n.random(6, 4), n.random(3, 1), attrs=GemmAttrs(beta=0.5))
    check_pass(FUSE, n.done(n.bn(y)), changes=1, kinds={"Gemm": 1})


def test_half_precision_folds_in_float64() -> None:
    n = Net(np.float16)
    graph, _ = check_pass(FUSE, n.done(n.bn(n.conv(n.input(2, 3, 6, 6), 4))), changes=1)
    assert graph.constant_value(graph.of_kind("Conv")[0].inputs[1]).dtype == np.float16


# ---------------------------------------------------------------- before a linear op


@pytest.mark.parametrize("group", [1, 2, 6])
def test_batch_norm_before_a_convolution_without_padding(group: int) -> None:
    n = Net()
    y = n.conv(n.bn(n.input(2, 6, 7, 7)), 6, pads=0, group=group, bias=True)
    check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 1}, rules={"bn_conv": 1})


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS.keys())
def test_batch_norm_before_a_matrix_product(make: Make) -> None:
    n = Net()
    check_pass(FUSE, n.done(make(n, n.bn(n.input(2, 6)))), changes=1, kinds={"Gemm": 1}, rules={"bn_conv": 1})


def test_batch_norm_before_a_matmul() -> None:
    n = Net()
    check_pass(FUSE, n.done(n.matmul(n.bn(n.input(2, 6)), 4)), changes=1, kinds={"Gemm": 1})


@pytest.mark.parametrize("make", [IMAGES["grouped conv"], IMAGES["grouped conv transpose"]])
def test_a_scale_before_a_convolution_may_be_padded(make: Make) -> None:
    n = Net()
    y = make(n, n.op("Mul", n.input(2, 6, 7, 7), n.random(6, 1, 1)))
    check_pass(FUSE, n.done(y), changes=1, rules={"scale_shift_conv": 1})


def test_a_scale_before_a_batched_matmul() -> None:
    n = Net()
    y = n.matmul(n.op("Div", n.input(2, 5, 6), n.positive(6)), 4)
    check_pass(FUSE, n.done(y), changes=1, kinds={"MatMul": 1})


def test_image_normalization_goes_into_the_first_convolution() -> None:
    n = Net()
    x = n.op("Div", n.op("Sub", n.op("Mul", n.input(2, 3, 7, 7), 1 / 255), n.random(3, 1, 1)), n.positive(3, 1, 1))
    check_pass(FUSE, n.done(n.conv(x, 4, pads=0)), changes=1, kinds={"Conv": 1}, rules={"scale_shift_conv": 1})


def test_the_fold_backwards_is_preferred() -> None:
    n = Net()
    y = n.conv(n.bn(n.conv(n.input(2, 3, 7, 7), 4, pads=0)), 4, pads=0)
    check_pass(FUSE, n.done(y), changes=1, kinds={"Conv": 2}, rules={"conv_bn": 1})


def test_the_fold_forwards_where_backwards_is_refused() -> None:
    n = Net()
    c = n.conv(n.input(2, 3, 7, 7), 4, pads=0)
    graph = n.done(n.conv(n.bn(c), 4, pads=0), n.op("Relu", c))
    check_pass(FUSE, graph, changes=1, kinds={"Conv": 2, "Relu": 1}, rules={"bn_conv": 1})


def test_a_scale_after_views_of_rows_is_folded_when_the_views_are_gone() -> None:
    """LayerScale after the projection of attention, as jax2onnx writes it (DINOv3)."""
    n = Net()
    x = n.input(2, 5, 16)
    rows = n.op("Transpose", n.op("Softmax", x), attrs=TransposeAttrs((1, 0, 2)))
    y = n.gemm(n.op("Reshape", rows, n.ints(10, 16)), 16)
    y = n.op("Transpose", n.op("Reshape", y, n.ints(5, 2, 16)), attrs=TransposeAttrs((1, 0, 2)))
    graph, _ = passed(n.done(n.op("Add", x, n.op("Mul", y, n.random(1, 1, 16)))), "fp16")
    (product,) = graph.of_kind("MatMul")
    assert [stage.kind for stage in product.attrs.epilogue] == ["Add", "Add"], "the bias, and the addition of x"
