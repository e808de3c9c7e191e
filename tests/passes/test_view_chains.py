"""view_chains: Transpose, Reshape, Transpose become one Transpose if the Reshape would copy the transposed tensor."""

from __future__ import annotations

import math
import random

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import PadAttrs
from optdnn.passes.support.facts import operand
from optdnn.passes.view_chains import ViewChains

PASS = ViewChains()
RULE = {"view_chain": 1}


def patches(n: Net, x: Value) -> Value:
    """MobileViT's patches of 2 x 2 pixels as rows (patch pixel, patch, channel)."""
    b, c, h, w = (int(d) for d in n.dims(x))  # type: ignore[call-overload]
    y = n.transposed(n.reshaped(x, b * c * h // 2, 2, w // 2, 2), 0, 2, 1, 3)
    return n.reshaped(n.transposed(n.reshaped(y, b, c, h * w // 4, 4), 0, 3, 2, 1), b * 4, h * w // 4, c)


def image(n: Net, x: Value, b: int, c: int, h: int, w: int) -> Value:
    """The way back."""
    y = n.transposed(n.reshaped(x, b, 4, h * w // 4, c), 0, 3, 2, 1)
    return n.reshaped(n.transposed(n.reshaped(y, b * c * h // 2, w // 2, 2, 2), 0, 2, 1, 3), b, c, h, w)


@pytest.mark.parametrize("batch", [1, 3])
def test_patches_of_an_image(batch: int) -> None:
    n = Net()
    graph = n.done(patches(n, n.op("Relu", n.input(batch, 5, 4, 6))))
    check_pass(PASS, graph, changes=1, rules=RULE, kinds={"Relu": 1, "Reshape": 2, "Transpose": 1})


@pytest.mark.parametrize("batch", [1, 3])
def test_the_image_of_patches(batch: int) -> None:
    n = Net()
    graph = n.done(image(n, n.op("Relu", n.input(batch * 4, 6, 5)), batch, 5, 4, 6))
    check_pass(PASS, graph, changes=1, rules=RULE, kinds={"Relu": 1, "Reshape": 2, "Transpose": 1})


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_gpu_patches_are_copied_once(batch: int, precision: str) -> None:
    n = Net()
    x = n.conv(n.input(batch, 8, 8, 12), 16)
    y = n.op("LayerNormalization", patches(n, x), n.positive(16), n.random(16))
    program = check_simulated(n.done(n.conv(image(n, n.matmul(y, 16), batch, 16, 8, 12), 8)), precision)
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert (
        kinds.count("Copy") <= 2 + 2
    )  # the network's input and output change their order, and the image and the patches


def chain(shape: tuple[int, ...], first: tuple[int, ...], between: tuple[int, ...], second: tuple[int, ...]) -> Graph:
    n = Net()
    x = n.op("Relu", n.input(*shape))
    return n.done(n.op("Exp", n.transposed(n.reshaped(n.transposed(x, *first), *between), *second)))


def test_random_chains() -> None:
    """Every chain of random views is the same after the pass, whether it fires or not."""
    draw, fired = random.Random(0), 0
    for _ in range(60):
        shape = tuple(draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(2, 4)))
        first = draw.sample(range(len(shape)), len(shape))
        moved = [shape[i] for i in first]
        at = draw.randrange(len(moved) - 1)
        between = (*moved[:at], math.prod(moved[at : at + 2]), *moved[at + 2 :])
        if draw.random() < 0.5 and between[-1] % 2 == 0:
            between = (*between[:-1], between[-1] // 2, 2)
        second = tuple(draw.sample(range(len(between)), len(between)))
        graph = chain(shape, tuple(first), between, second)
        result = graph.copy()
        changes = PASS(result).changes
        fired += changes
        if changes:
            check_pass(PASS, graph, changes=changes)
    assert fired > 10


@pytest.mark.parametrize("form", ["a view", "one transposition", "two readers", "no known size", "empty"])
def test_others_are_no_candidates(form: str) -> None:
    n = Net()
    if form == "a view":  # heads: the Reshape joins axes that are adjacent in memory
        graph = chain((2, 3, 4, 5), (2, 0, 1, 3), (4, 6, 5), (0, 2, 1))
    elif form == "one transposition":
        graph = n.done(n.reshaped(n.transposed(n.input(2, 3, 4), 1, 0, 2), 6, 4))
    elif form == "two readers":
        x = n.transposed(n.input(2, 3, 4), 1, 0, 2)
        graph = n.done(n.transposed(n.reshaped(x, 3, 8), 1, 0), n.op("Relu", x))
    elif form == "no known size":
        x = n.transposed(n.input(symbol("n"), 3, 4), 1, 0, 2)
        graph = n.done(n.transposed(n.op("Reshape", x, n.ints(-1, 4)), 1, 0))
    else:
        graph = n.done(n.transposed(n.reshaped(n.transposed(n.input(2, 4, 0), 1, 0, 2), 8, -1), 1, 0))
    check_untouched(PASS, graph)


def test_axes_that_lie_apart_are_not_joined_first() -> None:
    """Channels and rows of a patch stay separate: a cut image is not copied before the Transpose (TNT: Han et al., 2021)."""
    n = Net()
    x = n.op("Relu", n.input(1, 3, 2, 4, 2, 5))
    y = n.transposed(n.reshaped(n.transposed(x, 0, 1, 2, 4, 3, 5), 1, 12, 20), 0, 2, 1)
    result, _ = check_pass(PASS, n.done(n.op("Exp", y)), changes=1, rules=RULE)
    (one,) = result.of_kind("Transpose")
    assert result.type(operand(one)).dims == (1, 3, 2, 4, 2, 5)


def test_axes_that_are_split_unevenly_are_refused() -> None:
    graph = chain((4, 6, 5), (1, 0, 2), (8, 15), (1, 0))
    check_refused(PASS, graph, because="its Reshape have no common parts")


def windows(batch: int, width: int, *, turned_rows: bool = False, moves_batch: bool = False) -> Graph:
    """Windows of 3 by 3 pixels become a grid of 3 by 3, in two steps through the image (torchvision's MaxViT); ``turned_rows``: the
    grid's axes are exchanged."""
    n = Net()
    x = n.op("Relu", n.input(batch, 4, 9, width))
    y = n.transposed(n.reshaped(x, batch, 2, 2, 3, 3, width), 0, 5, 1, 3, 2, 4)
    y = n.reshaped(y, batch, width, 3, 2, 3, 2)
    y = n.transposed(y, 2, 4, 0, 3, 5, 1) if moves_batch else n.transposed(y, 0, 2, 4, 3, 5, 1)
    if turned_rows:
        y = n.transposed(n.reshaped(y, batch, 9, 4, width), 0, 2, 1, 3)
    return n.done(n.op("Exp", y))


@pytest.mark.parametrize("turned_rows", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_between_windows_and_a_grid_are_gathered(batch: int, turned_rows: bool) -> None:
    result, _ = check_pass(PASS, windows(batch, 16, turned_rows=turned_rows), changes=1, rules=RULE)
    assert len(result.of_kind("Gather")) == 1
    assert not result.of_kind("Transpose")


@pytest.mark.parametrize(("width", "moves_batch"), [(6, False), (16, True)])
def test_other_rows_between_windows_and_a_grid_stay(width: int, moves_batch: bool) -> None:
    check_refused(PASS, windows(2, width, moves_batch=moves_batch), because="its Reshape have no common parts")


def test_a_single_axis_that_is_split_unevenly_stays() -> None:
    n = Net()
    x = n.transposed(n.reshaped(n.op("Relu", n.input(120)), 4, 6, 5), 1, 0, 2)
    check_refused(PASS, n.done(n.transposed(n.reshaped(x, 8, 15), 1, 0)), because="its Reshape have no common parts")


def padded(n: Net, x: Value, *pads: int) -> Value:
    made: Value = n.op("Pad", x, n.ints(*pads))
    return made


def windows_of_heads(split: int = 6, axis: int = 3, mode: str = "constant") -> Graph:
    """Windows of 2 x 4 pixels as tokens, whose features are padded."""
    n = Net()
    y = n.transposed(
        n.reshaped(n.op("Relu", n.input(1, 4, 8, 12)), 1, 2, 2, 2, 4, 12 // split, split), 0, 1, 3, 5, 2, 4, 6
    )
    y = n.reshaped(y, 4, 12 // split, 8, split)
    pads = [0] * 8
    pads[4 + axis] = 2
    return n.done(n.op("Exp", n.op("Pad", y, n.ints(*pads), attrs=PadAttrs(mode))))


def test_a_pad_reads_what_a_reshape_would_copy() -> None:
    graph = windows_of_heads()
    after, _ = check_pass(PASS, graph, changes=1, rules={"pad_before_view": 1})
    pad, view = (
        op for op in after.order() if op.kind in ("Pad", "Reshape") and op.id > after.of_kind("Transpose")[0].id
    )
    assert (pad.kind, view.kind) == ("Pad", "Reshape")
    assert after.type(pad.value).static_shape == (1, 2, 2, 2, 2, 4, 8)
    before = [s.params["tactic"] for s in check_simulated(graph, "fp16").steps]
    assert not any(t.startswith("copy") for t in before), before


def test_a_pad_of_joined_axes_stays() -> None:
    check_refused(PASS, windows_of_heads(axis=2), because="does not keep the padded axis")


def test_pads_of_other_views_are_no_candidates() -> None:
    check_untouched(PASS, windows_of_heads(mode="edge"))
    n = Net()
    check_untouched(PASS, n.done(padded(n, n.reshaped(n.op("Relu", n.input(4, 6, 8)), 24, 8), 0, 0, 0, 8)))
