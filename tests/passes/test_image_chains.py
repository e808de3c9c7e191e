"""Views of images for attention, as in YOLO11 and YOLO12: reordered filters, one Transpose on each side, and no copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.support.parts_of_axes import chain_of
from optdnn.passes.view_chains import ViewChains

HEADS, KEY, VALUE, HIGH, WIDE = 2, 8, 16, 4, 6
PIXELS = HIGH * WIDE


def projected(n: Net, batch: int, areas: int, **conv: Any) -> tuple[Value, ...]:
    """Queries, keys and values (batch * areas, heads, features, pixels of an area) of a convolution's image."""
    channels = HEADS * (2 * KEY + VALUE)
    y = n.conv(n.conv(n.input(batch, 8, HIGH, WIDE), 16), channels, 1, pads=0, **conv)
    if areas > 1:
        y = n.transposed(n.reshaped(y, batch, channels, areas, PIXELS // areas), 0, 2, 1, 3)
    heads = n.reshaped(y, batch * areas, HEADS, channels // HEADS, PIXELS // areas)
    parts: tuple[Value, ...] = n.op("Split", heads, n.ints(KEY, KEY, VALUE), attrs=SplitAttrs(2), outputs=3)
    return parts


def back(n: Net, x: Value, batch: int, areas: int) -> Value:
    """Values (batch * areas, heads, features, pixels of an area) as an image."""
    if areas > 1:
        x = n.transposed(n.reshaped(x, batch, areas, HEADS * VALUE, PIXELS // areas), 0, 2, 1, 3)
    return n.reshaped(x, batch, HEADS * VALUE, HIGH, WIDE)


def attention(n: Net, batch: int, areas: int, **conv: Any) -> Graph:
    """Attention of the pixels of each area; a depthwise convolution of the values is added."""
    q, k, v = projected(n, batch, areas, **conv)
    scores = n.op("Softmax", n.op("MatMul", n.transposed(q, 0, 1, 3, 2), k), attrs=SoftmaxAttrs(-1))
    y = back(n, n.op("MatMul", v, n.transposed(scores, 0, 1, 3, 2)), batch, areas)
    place = n.conv(back(n, v, batch, areas), HEADS * VALUE, group=HEADS * VALUE)
    return n.done(n.conv(n.op("Add", y, place), 16, 1, pads=0))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("areas", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_the_parts_of_heads_become_images(batch: int, areas: int, bias: bool) -> None:
    n = Net(np.float64)
    q, k, v = projected(n, batch, areas, bias=bias)
    graph = n.done(*(n.transposed(x, 0, 1, 3, 2) for x in (q, k)), n.conv(back(n, v, batch, areas), 5))
    rules = {"ordered_channels": 1, "image_chain": 3 if areas > 1 else 1}
    done, _ = check_pass(ViewChains(), graph, changes=sum(rules.values()), rules=rules)
    (split,) = done.of_kind("Split")
    assert split.attrs.axis == 1
    assert done.op(split.inputs[0]).kind == "Conv"  # type: ignore[arg-type]
    assert [t.type.dims for t in split.outputs] == [(batch, HEADS * c, HIGH, WIDE) for c in (KEY, KEY, VALUE)]
    reader = next(op for op in done.of_kind("Conv") if op.outputs[0].type.dims[1] == 5)
    assert done.op(reader.inputs[0]).id == split.id  # type: ignore[arg-type]  # the values need no views


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("areas", [1, 2])
def test_attention_of_an_image_copies_nothing(batch: int, areas: int) -> None:
    program = check_simulated(attention(Net(), batch, areas, bias=True), "fp16")
    assert kinds(program) == ["Copy", "Conv", "Conv", "Attention", "Conv", "Conv", "Pointwise"]  # input, ..., output


def test_an_image_in_its_own_order_again() -> None:
    n = Net(np.float64)
    x = n.transposed(n.reshaped(n.conv(n.input(2, 3, 4, 6), 8), 2, 2, 4, 24), 0, 1, 3, 2)
    y = n.reshaped(n.transposed(x, 0, 1, 3, 2), 2, 8, 4, 6)
    check_pass(ViewChains(), n.done(n.conv(y, 5)), changes=1, rules={"image_chain": 1}, kinds={"Conv": 2})


def test_views_of_areas() -> None:
    n = Net(np.float64)
    x = n.transposed(n.reshaped(n.conv(n.input(2, 3, 6, 4), 8), 2, 8, 3, 8), 0, 2, 1, 3)
    y = n.op("Exp", n.transposed(n.reshaped(x, 6, 2, 4, 8), 0, 1, 3, 2))
    left = {"Conv": 1, "Transpose": 2, "Reshape": 1, "Exp": 1}
    done, _ = check_pass(ViewChains(), n.done(y), changes=1, rules={"image_chain": 1}, kinds=left)
    assert done.of_kind("Transpose")[0].attrs.perm == (0, 2, 3, 1)


def test_areas_become_an_image() -> None:
    n = Net(np.float64)
    x = n.transposed(n.transposed(n.op("Exp", n.input(3, 2, 8, 4)), 0, 1, 3, 2), 1, 2, 0, 3)
    left = {"Exp": 1, "Transpose": 2, "Reshape": 1, "Conv": 1}
    graph = n.done(n.conv(n.reshaped(x, 1, 8, 6, 4), 5))
    done, _ = check_pass(ViewChains(), graph, changes=1, rules={"chain_to_image": 1}, kinds=left)
    assert done.of_kind("Transpose")[-1].attrs.perm == (0, 3, 1, 2)


def test_channels_that_are_not_innermost_stay() -> None:
    n = Net(np.float64)
    x = n.transposed(n.reshaped(n.conv(n.input(2, 3, 6, 4), 8), 2, 8, 3, 8), 0, 2, 1, 3)
    y = n.op("Exp", n.transposed(n.reshaped(x, 2, 3, 2, 4, 8), 0, 2, 1, 3, 4))
    check_pass(ViewChains(), n.done(y), changes=1, rules={"view_chain": 1})
    n = Net(np.float64)
    x = n.transposed(n.transposed(n.op("Exp", n.input(3, 2, 4, 8)), 0, 1, 3, 2), 1, 3, 0, 2)
    check_untouched(ViewChains(), n.done(n.conv(n.reshaped(x, 1, 8, 6, 4), 5)))


def test_an_image_that_is_turned_already_stays() -> None:
    n = Net(np.float64)
    pixels = n.transposed(n.conv(n.input(2, 3, 6, 4), 8), 0, 2, 3, 1)
    y = n.transposed(n.reshaped(pixels, 6, 8, 2, 4), 0, 2, 1, 3)
    check_untouched(ViewChains(), n.done(n.op("Exp", y)))


def split(n: Net, conv: Callable[[Value], Value], shape: tuple[int, ...], axis: int, sizes: tuple[int, ...]) -> Graph:
    parts = n.op(
        "Split",
        n.reshaped(conv(n.input(2, 4, 3, 5)), *shape),
        n.ints(*sizes),
        attrs=SplitAttrs(axis),
        outputs=len(sizes),
    )
    return n.done(*(n.op("Exp", p) for p in parts))


@pytest.mark.parametrize(
    ("conv", "because"),
    [
        (lambda n, x: n.conv(x, 16, 1, pads=0, group=2), "its filters are not constant, or they are grouped"),
        (
            lambda n, x: n.op(
                "Conv", x, n.input(16, 4, 1, 1, name="w"), attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 1)
            ),
            "its filters are not constant, or they are grouped",
        ),
        (
            lambda n, x: n.op(
                "Conv",
                x,
                n.random(16, 4, 1, 1),
                n.input(16, name="b"),
                attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 1),
            ),
            "its filters are not constant, or they are grouped",
        ),
    ],
)
def test_other_convolutions_keep_their_order(conv: Callable[[Net, Value], Value], because: str) -> None:
    n = Net(np.float64)
    check_refused(ViewChains(), split(n, lambda x: conv(n, x), (2, 2, 8, 15), 2, (4, 4)), because=because)


@pytest.mark.parametrize(
    ("shape", "axis", "sizes"),
    [((2, 2, 8, 15), 1, (1, 1)), ((2, 16, 15), 1, (8, 8)), ((2, 2, 8, 15), 3, (7, 8)), ((2, 2, 8, 15), 0, (1, 1))],
    ids=["whole heads", "consecutive channels", "pixels", "batch"],
)
def test_other_splits_are_no_candidates(shape: tuple[int, ...], axis: int, sizes: tuple[int, ...]) -> None:
    n = Net(np.float64)
    check_untouched(ViewChains(), split(n, lambda x: n.conv(x, 16, 1, pads=0), shape, axis, sizes))


def test_a_convolution_with_other_readers_keeps_its_order() -> None:
    n = Net(np.float64)
    y = n.conv(n.input(2, 4, 3, 5), 16, 1, pads=0)
    parts = n.op("Split", n.reshaped(y, 2, 2, 8, 15), n.ints(4, 4), attrs=SplitAttrs(2), outputs=2)
    check_untouched(ViewChains(), n.done(*(n.op("Exp", p) for p in parts), n.op("Tanh", y)))


def test_the_parts_of_a_chain() -> None:
    n = Net()
    x = n.transposed(n.reshaped(n.op("Exp", n.input(1, 12, 4, 6)), 1, 12, 2, 12), 0, 2, 1, 3)
    y = n.reshaped(x, 2, 3, 4, 12)
    graph = n.done(n.op("Tanh", y))
    chain = chain_of(graph, y)
    assert chain is not None
    assert graph.op(chain.base).kind == "Exp"
    assert chain.moves == (None, (0, 2, 1, 3), None)
    assert chain.sizes == (3, 4, 2, 2, 6)
    assert chain.axes[0] == ((), (0, 1), (2, 3), (4,))
    assert chain.axes[-1] == ((2,), (0,), (1,), (3, 4))
    assert chain.shapes(chain.sizes)[-1] == (2, 3, 4, 12)
    n = Net()
    mixed = n.reshaped(n.transposed(n.reshaped(n.op("Exp", n.input(2, 9)), 3, 6), 1, 0), 9, 2)
    assert chain_of(n.done(n.op("Tanh", mixed)), mixed) is None  # 18 is no product of parts of both


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_join_the_batch(batch: int) -> None:
    """Blocks of 2 x 3 pixels for each head (HaloNet): the image is turned, and then the blocks."""
    n = Net(np.float64)
    x = n.reshaped(n.conv(n.input(batch, 3, 4, 6), 8), batch * 2, 4, 2, 2, 2, 3)
    y = n.op("Exp", n.reshaped(n.transposed(x, 0, 2, 4, 3, 5, 1), batch * 2, 4, 6, 4))
    left = {"Conv": 1, "Transpose": 2, "Reshape": 2, "Exp": 1}
    done, _ = check_pass(ViewChains(), n.done(y), changes=1, rules={"image_chain": 1}, kinds=left)
    assert done.of_kind("Transpose")[0].attrs.perm == (0, 2, 3, 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_leave_the_batch(batch: int) -> None:
    n = Net(np.float64)
    x = n.reshaped(n.op("Exp", n.input(batch * 2, 4, 6, 4)), batch * 2, 2, 2, 2, 3, 4)
    y = n.conv(n.reshaped(n.transposed(x, 0, 5, 1, 3, 2, 4), batch, 8, 4, 6), 5)
    left = {"Exp": 1, "Transpose": 2, "Reshape": 2, "Conv": 1}
    done, _ = check_pass(ViewChains(), n.done(y), changes=1, rules={"chain_to_image": 1}, kinds=left)
    assert done.of_kind("Transpose")[-1].attrs.perm == (0, 3, 1, 2)


def test_reshapes_of_one_view_share_its_copy() -> None:
    n = Net()
    x = n.transposed(n.input(2, 4, 6, 8), 0, 2, 1, 3)
    sums = n.op("Softmax", n.reshaped(x, 2, 192), attrs=SoftmaxAttrs(-1))
    program = check_simulated(n.done(n.op("MatMul", n.reshaped(x, 12, 32), n.random(32, 8)), sums), "fp32")
    assert kinds(program).count("Copy") == 1
