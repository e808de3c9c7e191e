"""image_tokens: images become tokens, and tokens become images, by a transposition on the image's side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated
from support.simulated import kinds as computed

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.norm import GroupNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.image_tokens import ImageTokens

SWAP = TransposeAttrs((0, 2, 1))


def to_tokens(n: Net, image: Value, channels: int) -> Value:
    return n.op("Transpose", n.op("Reshape", image, n.ints(0, channels, -1)), attrs=SWAP)


def to_image(n: Net, tokens: Value, *shape: int) -> Value:
    return n.op("Reshape", n.op("Transpose", tokens, attrs=SWAP), n.ints(*shape))


def mixed(n: Net, batch: Any = 2, activation: str = "Gelu") -> Graph:
    """A layer as in SegFormer: tokens, a depthwise convolution of their image, its activation as tokens, a product."""
    x = n.op("MatMul", n.input(batch, 20, 8), n.random(8, 16))
    y = to_tokens(n, n.conv(to_image(n, x, 0, 16, 4, 5), 16, group=16, bias=True), 16)
    return n.done(n.op("MatMul", n.op(activation, y), n.random(16, 8)))


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.order() if op.kind not in ("Constant", "Input", "Output")]


@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
def test_the_transposes_are_on_the_images_side_and_the_activation_after_the_convolution(batch: Any) -> None:
    graph = mixed(Net(np.float64), batch)
    rules = {"tokens_to_image": 1, "image_to_tokens": 1, "activate_image": 1}
    done, _ = check_pass(ImageTokens(), graph, changes=3, rules=rules, sizes={"N": 3} if batch != 2 else None)
    assert kinds(done) == ["MatMul", "Reshape", "Transpose", "Conv", "Transpose", "Gelu", "Reshape", "MatMul"]


def test_convolutions_of_one_image_are_alike_without_the_activation() -> None:
    """A detector's classes have a sigmoid and its boxes none; a Concat moves both."""
    n = Net(np.float64)
    image = n.input(2, 8, 4, 5)
    classes, boxes = (
        n.op("Reshape", n.op("Transpose", n.conv(image, 6), attrs=TransposeAttrs((0, 2, 3, 1))), n.ints(0, 20, 6))
        for _ in range(2)
    )
    graph = n.done(n.op("Concat", n.op("Sigmoid", classes), boxes, attrs=ConcatAttrs(2)))
    because = "without the activation, one launch computes Conv_1 and Conv_4"
    check_refused(ImageTokens(), graph, because=because, rule="activate_image")


def test_a_pooled_image_that_becomes_tokens() -> None:
    n = Net(np.float64)
    y = n.max_pool(n.conv(n.input(2, 3, 8, 12), 6), 2)
    left = {"Conv": 1, "MaxPool": 1, "Relu": 1, "Transpose": 1, "Reshape": 1}
    check_pass(ImageTokens(), n.done(to_tokens(n, n.op("Relu", y), 6)), changes=1, kinds=left)


def test_tokens_of_an_image_of_tokens() -> None:
    n = Net(np.float64)
    image = n.op(
        "Transpose", n.op("Reshape", n.input(2, 20, 8), n.ints(0, 4, 5, 8)), attrs=TransposeAttrs((0, 3, 1, 2))
    )
    check_pass(ImageTokens(), n.done(to_tokens(n, image, 8)), changes=1, kinds={"Transpose": 2, "Reshape": 2})


def attended(n: Net) -> Graph:
    """A layer as in an autoencoder: tokens of a normalized image, a product, and the image is added to their image."""
    image = n.conv(n.input(2, 8, 6, 5), 16)
    attrs = GroupNormAttrs(4, 1e-3)
    x = to_tokens(n, n.op("GroupNormalization", image, n.positive(16), n.random(16), attrs=attrs), 16)
    total = n.op("Add", to_image(n, n.op("MatMul", x, n.random(16, 16)), 0, 16, 6, 5), image)
    return n.done(n.conv(n.op("GroupNormalization", total, n.positive(16), n.random(16), attrs=attrs), 8))


def test_norms_of_images_stand_between() -> None:
    done, _ = check_pass(ImageTokens(), attended(Net(np.float64)), changes=2)
    norm, turn = done.of_kind("GroupNormalization")[0], done.of_kind("Transpose")[0]
    assert turn.inputs[0] == norm.value


def test_on_a_gpu_nothing_moves_between_a_normalized_image_and_tokens() -> None:
    program = check_simulated(attended(Net()), "fp16")
    assert "Copy" not in [s.params["op"]["kind"] for s in program.steps][1:]


def test_refused() -> None:
    n = Net(np.float64)
    image = to_image(n, n.input(2, 20, 8), 0, 8, 4, 5)
    check_refused(ImageTokens(), n.done(n.op("Relu", image)), because="no operator on images reads it")
    n = Net(np.float64)
    y = n.op("Transpose", n.conv(n.input(2, 3, 4, 5), 6), attrs=TransposeAttrs((0, 2, 3, 1)))
    slopes = n.op("PRelu", n.op("Reshape", y, n.ints(0, -1, 6)), n.random(6))
    check_refused(ImageTokens(), n.done(slopes), because="more than the tokens and scalars")
    n = Net(np.float64)
    x = n.input(2, 20, 8)
    image = n.op("Reshape", n.op("Transpose", x, attrs=SWAP), n.ints(0, 8, 4, 5))
    check_untouched(
        ImageTokens(), n.done(n.conv(image, 4), n.op("Relu", n.graph.op(image).inputs[0]))
    )  # read as it is, too


def test_others_are_no_candidates() -> None:
    n = Net(np.float64)
    check_untouched(
        ImageTokens(), n.done(to_tokens(n, n.op("Relu", n.input(2, 6, 4, 5)), 6))
    )  # not made by a convolution
    n = Net(np.float64)
    flat = n.op("Reshape", n.conv(n.input(2, 3, 4, 5), 6), n.ints(0, 6, -1))
    check_untouched(ImageTokens(), n.done(n.op("Transpose", flat, attrs=SWAP), flat))  # read in the other order, too
    n = Net(np.float64)
    heads = n.op("Reshape", n.conv(n.input(2, 3, 4, 5), 6), n.ints(0, 3, -1))  # splits the channels
    check_untouched(ImageTokens(), n.done(n.op("Transpose", heads, attrs=SWAP)))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_a_gpu_nothing_moves_between_tokens_and_image(precision: str) -> None:
    program = check_simulated(mixed(Net()), precision)
    casts = ["Pointwise"] if precision == "fp16" else []  # of the network's input
    assert computed(program) == [*casts, *["Conv"] * 3]


def windows(n: Net, image: Value, *, grid: bool = False) -> Value:
    """MaxViT's windows of 2 x 2 positions, as rows; ``grid``: the positions of a window are far apart."""
    channels, height, width = (int(str(d)) for d in n.dims(image)[1:])
    shape = (0, channels, 2, height // 2, 2, width // 2) if grid else (0, channels, height // 2, 2, width // 2, 2)
    perm = (0, 3, 5, 2, 4, 1) if grid else (0, 2, 4, 3, 5, 1)
    turned = n.op("Transpose", n.op("Reshape", image, n.ints(*shape)), attrs=TransposeAttrs(perm))
    return n.op("Reshape", turned, n.ints(0, -1, 4, channels))


def departed(n: Net, rows: Value, *shape: int) -> Value:
    """The image that windows of 2 x 2 positions came from."""
    channels, height, width = shape
    split = n.op("Reshape", rows, n.ints(0, height // 2, width // 2, 2, 2, channels))
    turned = n.op("Transpose", split, attrs=TransposeAttrs((0, 5, 1, 3, 2, 4)))
    return n.op("Reshape", turned, n.ints(0, *shape))


@pytest.mark.parametrize("grid", [False, True])
def test_windows_are_ordered_after_the_transpose_of_the_image(grid: bool) -> None:
    n = Net(np.float64)
    graph = n.done(windows(n, n.conv(n.input(2, 3, 4, 6), 5), grid=grid))
    done, _ = check_pass(ImageTokens(), graph, changes=1, rules={"image_to_tokens": 1})
    assert kinds(done) == ["Conv", "Transpose", "Reshape", "Transpose", "Reshape"]
    first, second = done.of_kind("Transpose")
    assert first.attrs.perm == (0, 2, 3, 1)
    assert second.attrs.perm == ((0, 2, 4, 1, 3, 5) if grid else (0, 1, 3, 2, 4, 5))


@pytest.mark.parametrize("again", [False, True])
def test_windows_become_an_image_by_one_transpose_of_channels(again: bool) -> None:
    """``again``: the image is cut into windows again, as between MaxViT's two attentions."""
    n = Net(np.float64)
    image = departed(n, n.op("Gelu", n.input(2, 6, 4, 5)), 5, 4, 6)
    graph = n.done(windows(n, image, grid=True) if again else n.conv(image, 3))
    rules = {"tokens_to_image": 1, "image_to_tokens": 1} if again else {"tokens_to_image": 1}
    done, _ = check_pass(ImageTokens(), graph, changes=len(rules), rules=rules)
    perms = [op.attrs.perm for op in done.of_kind("Transpose")]
    assert perms[:2] == [(0, 1, 3, 2, 4, 5), (0, 3, 1, 2)]
    assert perms[2:] == ([(0, 2, 3, 1), (0, 2, 4, 1, 3, 5)] if again else [])


def test_other_orders_of_windows_stay() -> None:
    n = Net(np.float64)
    split = n.op("Reshape", n.conv(n.input(2, 3, 4, 6), 5), n.ints(0, 5, 2, 2, 3, 2))
    turns = [n.op("Transpose", split, attrs=TransposeAttrs(perm)) for perm in ((2, 0, 4, 3, 5, 1), (0, 1, 2, 4, 3, 5))]
    check_untouched(ImageTokens(), n.done(turns[0]))  # the batch is not first
    check_untouched(ImageTokens(), n.done(turns[1]))  # channels stay second


def heads(n: Net, image: Value, count: int, size: int, *, batch: bool = True) -> Value:
    """Tokens of each head from an image of count * size channels; without ``batch``, of one head and without the axis of 1."""
    shape, perm = ((0, count, size, -1), (0, 1, 3, 2)) if batch else ((size, -1), (1, 0))
    return n.op("Transpose", n.op("Reshape", image, n.ints(*shape)), attrs=TransposeAttrs(perm))


def cascaded(n: Net, batch: int) -> Graph:
    """Attention as in EfficientViT: heads are parts of an image's channels, and their results are joined again."""
    parts = n.op("Split", n.conv(n.input(batch, 8, 4, 5), 48), n.ints(16, 16, 16), outputs=3, attrs=SplitAttrs(axis=1))
    q, k, v = (heads(n, part, 2, 8) for part in parts)
    scores = n.op("Softmax", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))))
    mixed = n.op("Transpose", n.op("MatMul", scores, v), attrs=TransposeAttrs((0, 1, 3, 2)))
    image = n.op("Reshape", mixed, n.ints(batch, 16, 4, 5))
    return n.done(n.conv(n.op("Concat", image, n.conv(n.input(batch, 8, 4, 5), 16), attrs=ConcatAttrs(1)), 8))


def test_on_a_gpu_parts_of_heads_are_views() -> None:
    """Attention as in LeViT: queries, keys and values of a head are consecutive channels of an image."""
    n, turn = Net(), TransposeAttrs((0, 1, 3, 2))
    flat = n.op("Reshape", n.conv(n.input(2, 8, 4, 5), 64), n.ints(0, 2, 32, -1))
    parts = n.op("Split", flat, n.ints(8, 8, 16), outputs=3, attrs=SplitAttrs(2))
    q, k, v = (n.op("Transpose", part, attrs=turn) for part in parts)
    scores = n.op("Softmax", n.op("MatMul", q, n.op("Transpose", k, attrs=turn)))
    image = n.op("Reshape", n.op("Transpose", n.op("MatMul", scores, v), attrs=turn), n.ints(2, 32, 4, 5))
    program = check_simulated(n.done(n.conv(n.op("HardSwish", image), 8)), "fp16")
    steps = [s.params["op"]["kind"] for s in program.steps]
    assert steps[-4:] == ["Attention", "Pointwise", "Conv", "Pointwise"]
    assert steps.count("Copy") == 1  # of the network's input


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_are_split_from_channels_that_were_moved_last(batch: int) -> None:
    rules = {"image_to_tokens": 3, "tokens_to_image": 1}
    check_pass(ImageTokens(), cascaded(Net(np.float64), batch), changes=4, rules=rules)


def test_a_batch_of_one_may_be_gone_from_the_tokens() -> None:
    n = Net(np.float64)
    graph = n.done(heads(n, n.conv(n.input(1, 3, 4, 5), 6), 1, 6, batch=False))
    done, _ = check_pass(ImageTokens(), graph, changes=1)
    assert kinds(done) == ["Conv", "Transpose", "Reshape"]


def test_rows_become_an_image_after_an_activation_and_a_concatenation() -> None:
    n = Net(np.float64)
    parts = [n.op("Relu", to_image(n, n.input(2, 20, 8), 0, 8, 4, 5)) for _ in range(2)]
    both = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    check_pass(ImageTokens(), n.done(n.conv(both, 4)), changes=2, rules={"tokens_to_image": 2})


def test_on_a_gpu_heads_of_a_batch_become_an_image_in_place() -> None:
    """BoTNet's heads are a part of the batch, and its pixels the last axis in front of the image."""
    n = Net()
    q, k, v = (n.op("Reshape", n.conv(n.input(1, 32, 4, 4, name=x), 32, 1, pads=0), n.ints(4, 8, 16)) for x in "qkv")
    turned = [n.op("Transpose", x, attrs=SWAP) for x in (q, v)]
    y = n.op("MatMul", n.op("Softmax", n.op("MatMul", turned[0], k), attrs=SoftmaxAttrs(-1)), turned[1])
    image = n.op("Reshape", n.op("Transpose", y, attrs=SWAP), n.ints(1, 32, 4, 4))
    program = check_simulated(n.done(n.conv(n.op("Relu", image), 16, 1, pads=0)), "fp16")
    names = [s.params["op"]["kind"] for s in program.steps]
    assert "Copy" not in names[names.index("Attention") :][:-1]


def test_rows_become_an_image_after_a_scale_and_a_shift_per_channel() -> None:
    n = Net(np.float64)
    image = to_image(n, n.input(2, 20, 8), 0, 8, 4, 5)
    y = n.op("Add", n.op("Mul", image, n.random(8, 1, 1)), n.random(8, 1, 1))
    rules = {"tokens_to_image": 1}
    check_pass(ImageTokens(), n.done(n.conv(n.op("Relu", y), 4)), changes=1, rules=rules)
    n = Net(np.float64)
    image = to_image(n, n.input(2, 20, 8), 0, 8, 4, 5)
    y = n.op("Mul", image, n.input(2, 8, 4, 5, name="gate"))
    check_refused(ImageTokens(), n.done(n.conv(y, 4)), because="no operator on images reads it")


def test_on_a_gpu_heads_of_an_image_are_views() -> None:
    program = check_simulated(cascaded(Net(), 2), "fp16")
    last = ["Conv", "Pointwise"]  # all parts of the Concat are written in place
    assert [s.params["op"]["kind"] for s in program.steps] == ["Copies", "Conv", "Conv", "Attention", *last]


def test_channels_that_are_not_whole_stay() -> None:
    n = Net(np.float64)
    across = n.op("Reshape", n.conv(n.input(1, 3, 4, 5), 6), n.ints(4, 30))  # parts hold channels and positions
    check_untouched(ImageTokens(), n.done(n.op("Transpose", across, attrs=TransposeAttrs((1, 0)))))
    n = Net(np.float64)
    first = n.op("Reshape", n.conv(n.input(2, 3, 4, 5), 6), n.ints(0, 2, 3, -1))
    check_untouched(ImageTokens(), n.done(n.op("Transpose", first, attrs=TransposeAttrs((0, 2, 3, 1)))))  # heads last


def test_heads_that_become_an_image_are_no_tokens() -> None:
    """YOLO12's attention over areas: its result (B, heads, features, positions) is transposed as if it were channels-last, and
    its positions split as if they were channels. Two rules rewrote each other's results without end."""
    n = Net(np.float64)
    turned = n.op("Transpose", n.input(1, 4, 3, 20), attrs=TransposeAttrs((0, 3, 1, 2)))
    image = n.op("Reshape", turned, n.ints(1, 4, 5, 12))
    graph = n.done(n.conv(n.op("Transpose", image, attrs=TransposeAttrs((0, 3, 1, 2))), 6))
    check_refused(ImageTokens(), graph, because="its result is an image already")


# ---- axes of one element


def recurrent(n: Net, x: Value) -> Value:
    """A line (1, C, T) as (T, 1, C) and back, as around PyTorch's LSTM."""
    rows = n.op("Transpose", x, attrs=TransposeAttrs((2, 0, 1)))
    y = n.op("Softmax", n.matmul(rows, 16))
    return n.op("Transpose", y, attrs=TransposeAttrs((1, 2, 0)))


def test_a_line_between_convolutions_is_rows_of_channels() -> None:
    n = Net(np.float64)
    y = n.conv(recurrent(n, n.conv(n.input(1, 8, 40), 16)), 8)
    graph, _ = check_pass(ImageTokens(), n.done(y), changes=2, rules={"turned_units": 2})
    assert sorted(op.attrs.perm for op in graph.of_kind("Transpose")) == [(0, 2, 1), (0, 2, 1)]


def test_a_cached_line_of_one_row() -> None:
    """FSMN (FunASR): rows become an image of one column for a depthwise convolution."""
    n = Net(np.float64)
    image = n.op("Transpose", n.op("Softmax", n.input(1, 1, 10, 16)), attrs=TransposeAttrs((0, 3, 2, 1)))
    y = n.conv(
        n.op("Concat", n.input(1, 16, 4, 1, name="cache"), image, attrs=ConcatAttrs(2)), 16, (5, 1), pads=0, group=16
    )
    rows = n.op("Transpose", y, attrs=TransposeAttrs((0, 3, 2, 1)))
    graph, _ = check_pass(ImageTokens(), n.done(n.matmul(rows, 8)), changes=2, rules={"turned_units": 2})
    assert sorted(op.attrs.perm for op in graph.of_kind("Transpose")) == [(0, 2, 3, 1), (0, 3, 1, 2)]


def test_rows_between_convolutions_are_not_copied() -> None:
    n = Net()
    program = check_simulated(n.done(n.conv(recurrent(n, n.conv(n.input(1, 8, 40), 16)), 8)), "fp16")
    found = [step.params["op"]["kind"] for step in program.steps]
    assert [kind for kind in found if kind in ("Copy", "Copies")] in (["Copies"], ["Copy"]), "of the input"


@pytest.mark.parametrize("batch", [1, 2])
def test_other_axes_of_one_element_stay(batch: int) -> None:
    n = Net(np.float64)
    x = n.op("Softmax", n.input(batch, 16, 40))
    rows = n.op("Transpose", x, attrs=TransposeAttrs((2, 0, 1)))
    check_untouched(ImageTokens(), n.done(n.op("Softmax", rows)))
    if batch > 1:
        check_untouched(ImageTokens(), n.done(n.conv(recurrent(n, n.conv(n.input(batch, 8, 40, name="y"), 16)), 8)))


def attended_line(n: Net, batch: int) -> Graph:
    """Attention whose queries, keys and values are convolutions of a line (SqueezeBERT; VITS's text encoder)."""
    x = n.conv(n.input(batch, 32, 12), 32, pads=1)
    heads = [n.op("Reshape", n.conv(x, 32, 1, pads=0), n.ints(0, 2, 16, 12)) for _ in range(3)]
    q, k, v = (n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 3, 2))) for y in heads)
    y = n.op("Transpose", n.op("Attention", q, k, v, attrs=AttentionAttrs()), attrs=TransposeAttrs((0, 1, 3, 2)))
    return n.done(n.conv(n.op("Reshape", y, n.ints(0, 32, 12)), 32, 1, pads=0))


@pytest.mark.parametrize("batch", [1, 2])
def test_lines_are_rows_of_heads(batch: int) -> None:
    graph = attended_line(Net(np.float64), batch)
    rules = {"image_to_tokens": 3, "tokens_to_image": 1}
    graph, _ = check_pass(ImageTokens(), graph, changes=4, rules=rules)
    assert [op.attrs.perm for op in graph.of_kind("Transpose")].count((0, 2, 1)) == 4


@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_gpu_heads_of_lines_are_views(batch: int) -> None:
    program = check_simulated(attended_line(Net(), batch), "fp16")
    found = [step.params["op"]["kind"] for step in program.steps]
    assert [kind for kind in found if kind not in ("Conv", "Attention")] == [found[0], found[-1]], "of input and output"
