"""Splits and concatenations on the simulated GPU: parts that are apart, repeat, have reversed order, or are already in place."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered, results_of, simulate
from support.sweep import every

from optdnn.errors import ShapeError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.builder import TensorView, unmade
from optdnn.kernels.layout import copies
from optdnn.kernels.layout.moves import MOST_ELEMENTS, MOST_PARTS, joinable
from optdnn.kernels.layout.views import _joined as _joined_pairs
from optdnn.kernels.layout.views import _runs, reshaped
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import FP16, FP32

SAME = ConvAttrs(strides=(1, 1), pads=(1, 1, 1, 1), dilations=(1, 1))
"""A 3x3 convolution that keeps the size."""


def random_concats(seed: int) -> Graph:
    """Parts of a Split, some after an operator, in any order and repeated, concatenated; and a second concatenation of the
    result."""
    draw = random.Random(seed)
    n = Net(seed=seed)
    rank = draw.randint(1, 4)
    axis = draw.randrange(rank)
    part = draw.choice([1, 2, 8])
    shape = [draw.randint(1, 3) if k > axis or draw.random() < 0.3 else 1 for k in range(rank)]
    shape[axis] = 6 * part
    parts: list[Value] = n.op("Split", n.input(*shape), n.ints(*[part] * 6), attrs=SplitAttrs(axis), outputs=6)
    made = [v if draw.random() < 0.7 else n.op(draw.choice(["Relu", "Neg", "Identity"]), v) for v in parts]
    if draw.random() < 0.5:
        made = [draw.choice(made) for _ in range(draw.randint(2, 8))]
    first = _joined(n, made, axis)
    again = [*draw.sample(parts, draw.randint(1, 4)), first, n.op("Neg", first)]
    draw.shuffle(again)
    return n.done(first, _joined(n, again, axis))


def spatial_gate(*, keepdims: bool, third: str | None = None) -> Graph:
    """The gate of CBAM: a convolution of the means and the maxima over the channels of an image. ``third``: one more part."""
    n = Net()
    x = n.conv(n.input(2, 8, 9, 7), 16)
    reductions = ("ReduceMax", "ReduceMean", *(["ReduceSum"] if third == "ReduceSum" else []))
    parts = [n.op(kind, x, n.ints(1), attrs=ReduceAttrs(keepdims)) for kind in reductions]
    if not keepdims:
        parts = [n.op("Unsqueeze", part, n.ints(1)) for part in parts]
    if third == "Conv":
        parts.append(n.conv(x, 1))
    gate = n.op("Sigmoid", n.conv(_joined(n, parts, 1), 1, 7, pads=3))
    return n.done(n.conv(n.op("Mul", x, gate), 8))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("third", [None, "ReduceSum"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reductions_write_single_channels_in_place(keepdims: bool, third: str | None, precision: str) -> None:
    names = kinds(check_simulated(spatial_gate(keepdims=keepdims, third=third), precision))
    first = names.index("ReduceMax")
    count = 2 if third is None else 3
    assert sorted(names[first : first + count]) == ["ReduceMax", "ReduceMean", "ReduceSum"][:count]
    assert names[first + count] == "ImageConv"


def test_single_channels_of_other_operators_are_copied() -> None:
    names = kinds(check_simulated(spatial_gate(keepdims=True, third="Conv"), "fp16"))
    assert "Copy" in names[names.index("ReduceMean") :] or "Concat" in names


def _joined(n: Net, parts: list[Value], axis: int) -> Value:
    found: Value = n.op("Concat", *parts, attrs=ConcatAttrs(axis))
    return found


@pytest.mark.parametrize("first", every(4, range(0, 200, 20)))
def test_random_splits_and_concats_are_exact(first: int) -> None:
    for seed in range(first, first + 20):
        graph = random_concats(seed)
        feeds = feeds_of(graph, seed)
        want, got = evaluate(graph, feeds), simulate(lowered(graph, "fp32"), feeds)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=f"seed {seed}")


def pair_at(source: int, target: int) -> tuple[TensorView, TensorView]:
    """A part of 2 x 4 elements in a matrix of 16 columns, and its place in one of 32 columns."""
    return TensorView(0, source, (2, 4), (16, 1), FP32), TensorView(1, target, (2, 4), (32, 1), FP32)


def test_a_part_that_is_in_place_ends_a_run() -> None:
    """Concat(a, b, f(x), c), with parts of one Split. f writes its result in place."""
    a, b, c, d = pair_at(0, 0), pair_at(4, 4), pair_at(8, 16), pair_at(12, 20)
    assert _runs([a, b, c, d]) == [[a, b], [c, d]]
    assert _runs([a, b, pair_at(8, 8)]) == [[a, b, pair_at(8, 8)]]
    assert _runs([a, c]) == [[a, c]], "two parts always have one distance"
    assert _runs([a, pair_at(0, 4), pair_at(0, 8)]) == [[a, pair_at(0, 4), pair_at(0, 8)]], "a part may repeat"


def test_runs_of_runs_are_one_copy() -> None:
    """Swin merges patches: the quarters of an image's pixels are concatenated."""
    n = Net()
    x = n.op("Tanh", n.input(2, 6, 8, 4))
    quarters = [
        n.op("Slice", x, n.ints(i, j), n.ints(6, 8), n.ints(1, 2), n.ints(2, 2)) for j in (0, 1) for i in (0, 1)
    ]
    program = check_simulated(n.done(n.op("Softmax", _joined(n, quarters, 3))), "fp32")
    assert kinds(program).count("Copy") == 1
    assert len(_joined_pairs([pair_at(s, t) for s, t in ((0, 0), (4, 4), (40, 8), (44, 12))], 1)) == 1


def test_runs_end_where_copies_have_no_more_axes() -> None:
    shape = (*(1,) * (STRIDES_LIMIT - 1), 4)
    pairs = [
        tuple(TensorView(k, 4 * at, shape, (8,) * (STRIDES_LIMIT - 1) + (1,), FP32) for k in (0, 1)) for at in range(3)
    ]
    assert len(_joined_pairs(pairs, 1)) == 3  # type: ignore[arg-type]


def test_a_chain_of_growing_concats_shares_one_buffer() -> None:
    """Keras's DenseNet: each concatenation is a part of the next one, and no result of a convolution is copied."""
    n = Net()
    x = n.op("Conv", n.input(1, 16, 8, 8), n.random(16, 16, 3, 3, scale=0.05), attrs=SAME)
    for width in (16, 32, 48):
        y = n.op("Conv", x, n.random(16, width, 3, 3, scale=0.05), attrs=SAME)
        x = n.op("Concat", x, y, attrs=ConcatAttrs(1))
    one = ConvAttrs(strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1))
    graph = n.done(n.op("Conv", x, n.random(8, 64, 1, 1, scale=0.05), attrs=one))
    program = lowered(graph, "fp16")
    assert kinds(program).count("Conv") == 5
    assert kinds(program).count("Copy") == 1, "the channels of the input come last; no part is copied"
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05 * np.abs(want).max())


@pytest.mark.parametrize("axis", [0, 1])
def test_only_parts_of_channels_have_the_place_of_the_whole(axis: int) -> None:
    """A convolution of all frames, and its part of the last frames beside other channels (a convolutional LSTM)."""
    n = Net(seed=3)
    x = n.conv(n.input(4, 16, 8, 8), 16, 3, pads=1, bias=True)
    rest, last = n.op("Split", x, n.ints(2, 2) if axis == 0 else n.ints(8, 8), attrs=SplitAttrs(axis), outputs=2)
    state = n.conv(n.input(4 - 2 * (axis == 0), 8, 8, 8, name="h"), 8)
    joined = n.op("Concat", last, state, attrs=ConcatAttrs(1))
    graph = n.done(n.conv(joined, 16, 3, pads=1), n.op("Tanh", rest))
    check_simulated(graph, "fp16", tolerance=0.01)


def test_images_of_one_channel_are_not_copied() -> None:
    """The mean and the maximum over channels are written in place, and the factor of the image is read without a copy (CBAM:
    Woo et al., 2018)."""
    n = Net()
    x = n.op("Conv", n.input(1, 16, 8, 8), n.random(16, 16, 3, 3, scale=0.05), attrs=SAME)
    parts = [n.op(kind, x, n.ints(1), attrs=ReduceAttrs()) for kind in ("ReduceMean", "ReduceMax")]
    rows = n.op("Reshape", n.op("Concat", *parts, attrs=ConcatAttrs(1)), n.ints(2, 64))
    mixed = n.op("Reshape", n.op("MatMul", rows, n.random(64, 64, scale=0.1)), n.ints(1, 2, 8, 8))
    gate = n.op("Conv", mixed, n.random(1, 2, 3, 3), attrs=SAME)
    wide = n.op("Resize", gate, None, n.const([1.0, 1.0, 2.0, 2.0], np.float32), attrs=ResizeAttrs(mode="nearest"))
    back = n.op("MaxPool", wide, attrs=MaxPoolAttrs((2, 2), (2, 2), (0,) * 4, (1, 1)))
    y = n.op("Conv", n.op("Mul", x, back), n.random(8, 16, 3, 3, scale=0.05), attrs=SAME)
    graph = n.done(y)
    program = lowered(graph, "fp16")
    copied = [s for s in program.steps if "copy" in str(s.params.get("tactic", "")) or s.executor == "copy"]
    assert len(copied) == 1, "the network's input changes its order"
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05 * np.abs(want).max())


def test_the_mean_of_one_channel_is_read_with_gaps() -> None:
    """LPIPS: the mean over a map of distances."""
    n = Net()
    graph = n.done(n.op("GlobalAveragePool", n.conv(n.conv(n.input(1, 8, 8, 16), 16), 1)))
    tactics = [s.params["tactic"].split()[0] for s in check_simulated(graph, "fp16").steps]
    assert "copy" not in tactics[tactics.index("conv_sm90") :], tactics


def test_rows_of_one_channel_are_read_without_gaps() -> None:
    """A softmax over rows with gaps between them took longer than a copy."""
    n = Net()
    x = n.conv(n.input(1, 8, 8, 16), 1)
    graph = n.done(n.conv(n.op("Mul", n.conv(x, 16), n.op("Softmax", x)), 8))
    program = lowered(graph, "fp16")
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "Softmax"]
    assert step.params["reads"][0][3][2:] == [16, 1]


def tables(axis: int, last: str = "Gather", width: int = 8, product: bool = True) -> Graph:
    """Rows of three tables and of a product, concatenated (DeepFM, DLRM), and the product that reads them."""
    n = Net()
    bags = 2 if last == "ReduceSum" else 1
    parts = []
    for k in range(3):
        index = n.input(6, bags, name=f"i{k}", dtype=np.int64)
        rows = n.op("Gather", n.random(20, width), index, attrs=GatherAttrs(0))
        parts.append(n.op(last, rows, n.ints(1), attrs=ReduceAttrs()) if bags > 1 else rows)
    x = n.input(6, 1, 8)
    parts.append(n.matmul(x, width) if product else x)
    if axis == 2:
        parts = [n.op("Reshape", v, n.ints(6, 1, width)) for v in parts]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(axis))
    return n.done(n.matmul(joined, 16), n.op("Neg", parts[-1]))


@pytest.mark.parametrize("last", ["Gather", "ReduceSum"])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("product", [False, True])
def test_rows_of_tables_are_written_in_place(last: str, axis: int, product: bool) -> None:
    """So is the cast of the network's input to 16 bits."""
    graph = tables(axis, last, product=product)
    program = lowered(graph, "fp16")
    assert sum(kinds(program).count(kind) for kind in ("Copy", "Copies")) == 0
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05 * np.abs(want).max())


@pytest.mark.parametrize("norm", ["LayerNormalization", "RMSNormalization"])
def test_normalized_pixels_are_written_beside_other_channels(norm: str) -> None:
    """The first dense block of RDNet (Kim et al., 2024): a normalized image is a part of all concatenations after it."""
    n = Net()
    rows = n.op("Transpose", n.conv(n.input(2, 16, 8, 8), 16), attrs=TransposeAttrs((0, 2, 3, 1)))
    x = n.op("Transpose", n.op(norm, rows, n.random(16, offset=1.0)), attrs=TransposeAttrs((0, 3, 1, 2)))
    y = n.conv(x, 24)
    first = _joined(n, [x, y], 1)
    second = _joined(n, [x, y, n.conv(first, 8)], 1)
    launches = kinds(check_simulated(n.done(n.conv(second, 16)), "fp16"))
    assert not {"Copy", "Copies", "Concat"} & set(launches[1:]), launches


def single_block(reader: str) -> Graph:
    """Heads and hidden features side by side, as FLUX's single blocks have them; ``reader``: what reads them."""
    n = Net()
    x = n.input(1, 24, 64)
    q, k, v = (
        n.op(
            "Transpose",
            n.op("Reshape", n.matmul(x, 64), n.ints(1, 24, 4, 16)),
            attrs=TransposeAttrs((0, 2, 1, 3)),
        )
        for _ in range(3)
    )
    heads = n.op("Transpose", n.op("Attention", q, k, v, attrs=AttentionAttrs()), attrs=TransposeAttrs((0, 2, 1, 3)))
    rows = [n.op("Reshape", heads, n.ints(1, 24, 64)), n.op("Gelu", n.matmul(x, 128))]
    joined = n.op("Concat", *rows, attrs=ConcatAttrs(2))
    return n.done(n.matmul(joined, 64) if reader == "product" else n.op("Tanh", joined))


@pytest.mark.parametrize(("reader", "number"), [("product", 0), ("another", 1)])
def test_heads_beside_other_features_are_written_in_place(reader: str, number: int) -> None:
    launches = kinds(check_simulated(single_block(reader), "fp16"))
    assert sum(launches.count(kind) for kind in ("Copy", "Copies", "Concat")) == number, launches


def test_inputs_between_other_rows_are_copied() -> None:
    n = Net()
    parts = [n.input(3, 4, 16, name=f"x{k}") for k in range(2)]
    program = check_simulated(n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))), "fp32")
    assert kinds(program) == ["Concat"]


def test_rows_that_are_not_at_multiples_of_eight_are_copied() -> None:
    (joined,) = [s for s in lowered(tables(2, width=4), "fp16").steps if s.params["op"]["kind"] == "JointPointwise"]
    assert len(joined.inputs) == 4, "together with Neg"


def two_streams(norm: str, width: int = 64, heads: int = 3) -> Graph:
    """Keys of two kinds of tokens, each normalized, concatenated for one attention (SD3: Esser et al., 2024)."""
    n = Net()
    parts = []
    for k, tokens in enumerate((5, 9)):
        x = n.op(
            "Reshape", n.matmul(n.input(1, tokens, 32, name=f"x{k}"), heads * width), n.ints(1, tokens, heads, width)
        )
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3)))
        scale = [] if norm == "LpNormalization" else [n.random(width, offset=1.0)]
        parts.append(n.op(norm, x, *scale))
    return n.done(n.op("Tanh", _joined(n, parts, 2)))


@pytest.mark.parametrize("norm", ["RMSNormalization", "LpNormalization", "LayerNormalization"])
@pytest.mark.parametrize(("width", "heads"), [(64, 3), (96, 3)])
def test_normalized_heads_are_written_in_place(norm: str, width: int, heads: int) -> None:
    """Also heads with a number of features that no power of two of lanes divides."""
    program = check_simulated(two_streams(norm, width, heads))
    assert not {"Copy", "Concat"} & set(kinds(program))


def small(count: int, width: int = 3) -> Graph:
    """Concatenated columns of numbers, each from a launch of its own."""
    n = Net()
    parts = [n.op(("Softmax", "LogSoftmax")[k % 2], n.input(5, width, name=f"x{k}")) for k in range(count)]
    return n.done(_joined(n, parts, 1))


def joins(graph: Graph) -> list[int]:
    """The number of tensors that each launch of a concatenation or copy reads."""
    steps = lowered(graph, "fp32").steps
    return [len(s.inputs) for s in steps if s.params["op"]["kind"] in ("Concat", "Copy", "Copies")]


def test_small_tensors_are_concatenated_by_one_launch() -> None:
    assert joins(small(2)) == [2]
    assert joins(small(9)) == [9]
    assert joins(small(MOST_PARTS + 3)) == [MOST_PARTS + 3], "two concatenations that nothing waits for"


def test_many_elements_are_copied_by_separate_launches() -> None:
    assert joins(small(2, MOST_ELEMENTS // 10)) == [2]
    assert joins(small(2, copies.MOST_ELEMENTS // 5 + 1)) == [1, 1]


def test_frames_at_equal_distances_are_one_copy() -> None:
    n = Net()
    parts = n.op("Split", n.input(2, 3, 6), n.ints(*[1] * 6), attrs=SplitAttrs(2), outputs=6)
    assert joins(n.done(_joined(n, [parts[k] for k in (5, 3, 1)], 2))) == [1]


def test_tensors_that_one_launch_may_concatenate() -> None:
    one = TensorView(0, 0, (2, 3), (3, 1), FP32)
    assert joinable([one] * MOST_PARTS)
    assert not joinable([one] * (MOST_PARTS + 1))
    assert not joinable([one.view((2, MOST_ELEMENTS), (MOST_ELEMENTS, 1))])
    assert not joinable([replace(one, dtype=np.dtype(np.complex64))])
    assert not joinable([one, replace(one, dtype=FP16)])


def test_divided_positions_that_lie_apart_are_copied_once() -> None:
    """Columns of an image that become a sequence: the copy is channels-last, as the next convolution reads it."""
    n = Net(seed=2)
    x = n.conv(n.conv(n.input(2, 16, 12, 12), 16), 16)
    x = n.op("Slice", x, n.ints(2), n.ints(10), n.ints(3))
    graph = n.done(n.conv(n.op("Reshape", x, n.ints(2, 16, 96)), 16))
    program = check_simulated(graph, "fp16", tolerance=0.02)
    copied = [s.params["reads"][0][2] for s in program.steps if s.params["op"]["kind"] == "Copy"]
    assert copied.count([2, 16, 12, 8]) == 1
    assert [2, 16, 1, 96] not in copied


@pytest.mark.parametrize("rows", [4, 4096])
def test_norms_of_many_rows_are_turned_by_a_copy(rows: int) -> None:
    """The result of an image encoder (SAM), channels first: the norm's own stores would be far apart."""
    n = Net(dtype=np.float16)
    x = n.op("LayerNormalization", n.op("Tanh", n.input(1, rows, 64)), n.positive(64), attrs=LayerNormAttrs(axis=-1))
    graph = n.done(n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1))))
    assert kinds(check_simulated(graph)).count("Copy") == int(rows == 4096)


HEADS = ("rows", "pixels", "pixels in a row", "a concatenation")


@pytest.mark.parametrize("name", HEADS)
def test_a_value_is_written_to_the_output_that_is_its_view(name: str) -> None:
    n = Net(dtype=np.float16)
    match name:
        case "rows":
            y = n.op("Reshape", n.matmul(n.input(6, 32), 48), n.ints(2, 3, 6, 8))
        case "pixels":
            y = n.op("Transpose", n.conv(n.input(2, 16, 6, 5), 24), attrs=TransposeAttrs((0, 2, 3, 1)))
        case "pixels in a row":
            y = n.op("Transpose", n.conv(n.input(2, 16, 6, 5), 24), attrs=TransposeAttrs((0, 2, 3, 1)))
            y = n.op("Reshape", y, n.ints(2, 30, 24))
        case _:
            x = n.input(2, 3, 8)
            y = n.op("Reshape", _joined(n, [n.op("Tanh", x), n.op("Neg", x)], 1), n.ints(2, 48))
    graph = n.done(y)
    program = check_simulated(graph)
    outputs = {i for _, i in program.outputs}
    assert kinds(program)[-1] not in ("Copy", "Moves")
    assert outputs <= set(program.steps[-1].outputs)


def test_a_value_with_other_readers_or_odd_rows_is_copied_to_the_output() -> None:
    n = Net(dtype=np.float16)
    shared = n.matmul(n.input(6, 32), 48)
    odd = n.op("Reshape", n.matmul(n.input(6, 32, name="z"), 9), n.ints(2, 27))
    program = check_simulated(n.done(n.op("Reshape", shared, n.ints(2, 144)), n.op("Tanh", shared), odd))
    assert kinds(program) == ["Conv", "Conv", "JointPointwise"], "both copies and Tanh"


def test_a_view_has_the_elements_of_its_tensor() -> None:
    x = unmade(FP32, (2, 3, 4))
    assert reshaped(x, (6, 4)) == unmade(FP32, (6, 4))
    for shape in ((3, 4), (2, 3, 5), (0, 4)):
        with pytest.raises(ShapeError, match="another number of elements"):
            reshaped(x, shape)


def decoder(stride: int = 2, filters: int = 16, images: int = 1) -> Graph:
    """A level of a U-Net over volumes: volumes are enlarged and joined with those of the encoder."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(images, 8, 4, 6, 10), 24, bias=True))
    skip = n.op("Relu", n.conv(n.input(images, 8, *(stride * d for d in (4, 6, 10)), name="skip"), 24))
    up = n.conv_transpose(x, filters, stride, strides=stride, bias=True)
    return n.done(n.conv(n.op("Concat", up, skip, attrs=ConcatAttrs(1)), 16, bias=True))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("stride", "images"), [(2, 1), (3, 1), (2, 2)])
def test_enlarged_volumes_are_written_beside_those_of_the_encoder(stride: int, images: int, precision: str) -> None:
    program = check_simulated(decoder(stride, images=images), precision)
    blocks = [s.params for s in program.steps if s.params["op"]["kind"] == "ConvBlocks"]
    assert len(blocks) == stride, "a launch for each tap along depth"
    assert len({write[0] for p in blocks for write in p["writes"]}) == 1, "all in one buffer"
    last = max(k for k, s in enumerate(program.steps) if s.params["op"]["kind"] == "ConvBlocks")
    assert kinds(program)[last + 1] != "Copy"


def test_enlarged_volumes_of_odd_channels_are_copied() -> None:
    assert "ConvBlocks" not in kinds(check_simulated(decoder(filters=12), "fp16"))


def test_a_part_whose_number_of_elements_depends_on_data() -> None:
    """PyTorch's old exporter reshapes the elements that a mask selects to a known size (PointNet++)."""
    n = Net()
    x, z = (n.input(1, 4, 32, name=name, dtype=np.int64) for name in "xz")
    rows = n.op("Transpose", n.op("NonZero", x), attrs=TransposeAttrs((1, 0)))
    some = n.op("Reshape", n.op("GatherND", x, rows, attrs=GatherNDAttrs(0)), n.ints(1, 4, 16))
    rest = n.op("Slice", z, n.ints(0), n.ints(16), n.ints(2))
    graph = n.done(n.op("Concat", some, rest, attrs=ConcatAttrs(2)))
    feeds = {"x": np.arange(128).reshape(1, 4, 32) % 2 * 5, "z": np.ones((1, 4, 32), np.int64)}
    (y,) = simulate(lowered(graph), feeds).values()
    assert y.tolist() == [[[5] * 16 + [1] * 16] * 4]
