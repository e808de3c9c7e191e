"""conv3d_to_conv2d: convolutions over three axes become convolutions over two, with their epilogues and without their views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.conv3d_to_conv2d import Conv3dAsImages
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.support.facts import operand

PASS = Conv3dAsImages()
VIEWS = {"Conv": 1, "Reshape": 2, "Transpose": 4}
"""Of one convolution between the network's borders."""


def conv(
    n: Net, x: Value, filters: int, kernel: Sequence[int], *, strides: Sequence[int] = (1, 1, 1), pads: Sequence[int] = (0,) * 6,
    dilations: Sequence[int] = (1, 1, 1), group: int = 1, bias: bool = False, auto_pad: str = "NOTSET",
) -> Value:  # fmt: skip
    channels = n.dims(x)[1]
    assert isinstance(channels, int)
    w = n.random(filters, channels // group, *kernel, scale=0.3)
    more = [n.random(filters)] if bias else []
    attrs = ConvAttrs(tuple(strides), tuple(pads), tuple(dilations), group, auto_pad)
    return n.op("Conv", x, w, *more, attrs=attrs)  # type: ignore[no-any-return]


def alone(
    filters: int, kernel: Sequence[int], *, shape: Sequence[DimLike] = (2, 4, 7, 9, 8), **more: Any
) -> Graph:  # fmt: skip
    n = Net(np.float64)
    return n.done(conv(n, n.input(*shape), filters, kernel, **more))


def transposed(
    filters: int, kernel: Sequence[int], *, strides: Sequence[int], pads: Sequence[int] = (0,) * 6, group: int = 1,
    dilations: Sequence[int] = (1, 1, 1), output_padding: Sequence[int] = (0, 0, 0), bias: bool = False,
    shape: Sequence[DimLike] = (2, 4, 3, 5, 6), computed: str = "",
) -> Graph:  # fmt: skip
    n = Net(np.float64)
    x = n.input(*shape)
    sizes = (4, filters // group, *kernel)
    w = n.input(*sizes, name="w") if computed == "w" else n.random(*sizes, scale=0.3)
    more = [n.input(filters, name="b") if computed == "b" else n.random(filters)] if bias else []
    attrs = ConvTransposeAttrs(tuple(strides), tuple(pads), tuple(dilations), tuple(output_padding), group)
    return n.done(n.op("Relu", n.op("ConvTranspose", x, w, *more, attrs=attrs)))


def fused(graph: Graph) -> Graph:
    """With epilogues, as the pass finds it."""
    FuseEpilogue()(graph)
    return graph


FRAMES = {
    "frames alone": alone(6, (1, 3, 3), pads=(0, 1, 1, 0, 1, 1), bias=True),
    "pixels": alone(6, (1, 1, 1), bias=True),
    "strided images": alone(6, (1, 7, 5), strides=(1, 2, 3), pads=(0, 3, 1, 0, 2, 2), dilations=(1, 1, 2)),
    "groups": alone(6, (1, 3, 3), group=2),
    "one filter a channel": alone(4, (1, 3, 3), group=4),
    "one volume": alone(5, (1, 2, 3), shape=(1, 3, 4, 5, 6)),
    "a symbolic batch": alone(6, (1, 3, 3), shape=(symbol("N", 1), 4, 3, 5, 6)),
    "columns of depth": alone(6, (3, 1, 1), pads=(1, 0, 0, 1, 0, 0), bias=True),
    "strided depth": alone(6, (4, 1, 1), strides=(2, 1, 1), pads=(2, 0, 0, 0, 0, 0)),
    "dilated depth": alone(6, (3, 1, 1), dilations=(2, 1, 1), group=2),
    "all of the depth": alone(6, (7, 1, 1)),
    "one filter a channel, along depth": alone(4, (3, 1, 1), group=4, pads=(1, 0, 0, 1, 0, 0)),
    "depth of a symbolic batch": alone(6, (3, 1, 1), shape=(symbol("N", 1), 4, 5, 3, 6)),
}


@pytest.mark.parametrize("name", FRAMES)
def test_filters_of_one_frame_or_one_pixel_need_views_alone(name: str) -> None:
    sizes = {"N": 3} if "symbolic" in name else None
    check_pass(PASS, FRAMES[name], changes=1, kinds=VIEWS, rules={"conv3d_to_conv2d": 1}, sizes=sizes)


PAD, SLICE = {"Pad": 1}, {"Slice": 1}
TAPS: dict[str, tuple[Graph, dict[str, int]]] = {
    "three axes": (alone(6, (3, 3, 3), pads=(1,) * 6, bias=True), PAD | {"Slice": 3, "Concat": 1}),
    "without padding": (alone(6, (3, 3, 3)), {"Slice": 3, "Concat": 1}),
    "all of the volume": (alone(6, (7, 9, 8)), {"Slice": 7, "Concat": 1}),
    "all of the depth": (alone(6, (7, 3, 3), pads=(0, 1, 1, 0, 1, 1)), {"Slice": 7, "Concat": 1}),
    "strides": (alone(6, (3, 3, 3), strides=(2, 2, 2), pads=(1,) * 6), PAD | {"Slice": 3, "Concat": 1}),
    "odd strides": (alone(5, (2, 3, 3), strides=(3, 1, 2), pads=(0, 1, 0, 1, 1, 2)), PAD | {"Slice": 2, "Concat": 1}),
    "padding at one end": (alone(6, (3, 3, 3), pads=(2, 0, 1, 0, 2, 0)), PAD | {"Slice": 3, "Concat": 1}),
    "dilations": (alone(6, (3, 2, 2), dilations=(2, 3, 1), pads=(2, 0, 0, 2, 0, 0)), PAD | {"Slice": 3, "Concat": 1}),
    "groups": (
        alone(6, (3, 3, 3), group=2, pads=(1,) * 6),
        PAD | {"Slice": 3, "Concat": 1, "Reshape": 3},
    ),
    "one volume": (alone(5, (2, 2, 3), shape=(1, 3, 4, 5, 6)), {"Slice": 2, "Concat": 1}),
    "a symbolic batch": (
        alone(6, (3, 3, 3), shape=(symbol("N", 1), 4, 5, 5, 6), group=2),
        {"Slice": 3, "Concat": 1, "Reshape": 3},
    ),
    "auto_pad": (alone(6, (3, 4, 3), strides=(2, 1, 1), auto_pad="SAME_UPPER"), PAD | {"Slice": 3, "Concat": 1}),
    "every other frame": (alone(6, (1, 1, 1), strides=(2, 2, 2)), SLICE),
    "frames of nothing": (alone(6, (1, 3, 3), pads=(1, 0, 0, 2, 0, 0), strides=(2, 1, 1), bias=True), PAD | SLICE),
    "every other pixel along depth": (alone(6, (3, 1, 1), strides=(1, 2, 3)), {"Slice": 2}),
    "a border around one pixel": (alone(6, (3, 1, 1), pads=(0, 1, 0, 0, 0, 1), bias=True), {"Slice": 3, "Concat": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAPS)
def test_frames_under_the_taps_are_channels(name: str) -> None:
    graph, more = TAPS[name]
    check_pass(PASS, graph, changes=1, kinds=VIEWS | more, sizes={"N": 3} if "symbolic" in name else None)


GROWN = {
    "twice as large": transposed(6, (2, 2, 2), strides=(2, 2, 2), bias=True),
    "frames alone": transposed(6, (1, 2, 2), strides=(1, 2, 2)),
    "three frames of each": transposed(5, (3, 2, 4), strides=(3, 2, 2), pads=(0, 0, 1, 0, 0, 1)),
    "overlapping images": transposed(
        5, (2, 3, 3), strides=(2, 2, 1), output_padding=(0, 1, 0), pads=(0, 1, 1, 0, 1, 1)
    ),
    "a symbolic batch": transposed(6, (2, 2, 2), strides=(2, 2, 2), shape=(symbol("N", 1), 4, 3, 5, 6), bias=True),
}


@pytest.mark.parametrize("name", GROWN)
def test_frames_that_do_not_overlap_are_made_in_turn(name: str) -> None:
    """By one transposed convolution for each tap along depth."""
    taps = next(o for o in GROWN[name].ops() if o.kind == "ConvTranspose").attrs.strides[0]
    kinds = {"ConvTranspose": taps, "Relu": 1, "Reshape": 2 + taps * (taps > 1), "Transpose": 3 + taps}
    if taps > 1:
        kinds["Concat"] = 1
    sizes = {"N": 3} if "symbolic" in name else None
    result, _ = check_pass(PASS, GROWN[name], changes=1, rules={"transpose3d_to_transpose2d": 1}, sizes=sizes)
    assert {k: n for k, n in result.kinds().items() if k in kinds} == kinds
    assert all(result.type(o.value).rank == 4 for o in result.ops() if o.kind == "ConvTranspose")


GAPS = "its results overlap, are cut or have gaps along depth"
STAY = {
    "overlap": (transposed(6, (3, 2, 2), strides=(2, 2, 2)), GAPS),
    "gaps": (transposed(6, (2, 2, 2), strides=(3, 2, 2)), GAPS),
    "padding": (transposed(6, (2, 2, 2), strides=(2, 2, 2), pads=(1, 0, 0, 0, 0, 0)), GAPS),
    "dilation": (transposed(6, (2, 2, 2), strides=(2, 2, 2), dilations=(2, 1, 1)), GAPS),
    "a longer end": (transposed(6, (2, 2, 2), strides=(2, 2, 2), output_padding=(1, 0, 0)), GAPS),
    "groups": (transposed(6, (2, 2, 2), strides=(2, 2, 2), group=2), "its channels are in groups"),
    "computed weights": (transposed(6, (2, 2, 2), strides=(2, 2, 2), computed="w"), "its weights are not constant"),
    "a computed bias": (
        transposed(6, (2, 2, 2), strides=(2, 2, 2), bias=True, computed="b"),
        "its bias is not constant",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_transposed_convolutions_that_stay(name: str) -> None:
    graph, because = STAY[name]
    check_refused(PASS, graph, because=because)


def test_a_sum_after_a_transposed_convolution_keeps_it() -> None:
    n = Net(np.float64)
    attrs = ConvTransposeAttrs((2, 2, 2), (0,) * 6, (1, 1, 1), (0, 0, 0))
    y = n.op("ConvTranspose", n.input(2, 4, 3, 5, 6), n.random(4, 6, 2, 2, 2, scale=0.3), attrs=attrs)
    graph = fused(n.done(n.op("Add", y, n.input(2, 6, 6, 10, 12, name="r"))))
    check_refused(PASS, graph, because="it has a prologue, or an epilogue with operands")


def test_a_convolution_of_a_promoted_graph_is_as_exact_as_float64() -> None:
    result, _ = check_pass(PASS, TAPS["three axes"][0], changes=1)
    (op,) = (o for o in result.ops() if o.kind == "Conv")
    assert result.type(op.inputs[1]).shape == (6, 12, 3, 3)  # type: ignore[arg-type]
    assert (op.attrs.strides, op.attrs.pads, op.attrs.dilations) == ((1, 1), (1, 1, 1, 1), (1, 1))


def test_stages_and_their_operands_come_along() -> None:
    n = Net(np.float64)
    x = n.input(2, 4, 5, 6, 3)
    y = n.op("Relu", n.op("Add", conv(n, x, 4, (3, 3, 3), pads=(1,) * 6, bias=True), x))
    kinds = {"Concat": 1, "Conv": 1, "Pad": 1, "Reshape": 3, "Slice": 3, "Transpose": 6}
    result, _ = check_pass(PASS, fused(n.done(y)), changes=1, kinds=kinds)
    (op,) = (o for o in result.ops() if o.kind == "Conv")
    assert [s.kind for s in op.attrs.epilogue] == ["Add", "Relu"]


@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 3, 3)])
@pytest.mark.parametrize(
    "shape",
    [
        (), (1,), (4, 1, 1, 1), (1, 4, 1, 1, 1), (2, 4, 1, 1, 1), (2, 1, 5, 1, 1), (5, 1, 1), (1, 3), (6, 1), (6, 3),
        (2, 4, 5, 6, 3), (1, 1, 1, 1, 1), (2, 1, 1, 6, 3), (4, 5, 6, 3),
    ],
)  # fmt: skip
def test_operands_that_are_repeated(kernel: tuple[int, int, int], shape: tuple[int, ...]) -> None:
    """Constants, and values that are computed."""
    pads = tuple(k // 2 for k in kernel) * 2
    for computed in (False, True):
        n = Net(np.float64)
        y = conv(n, n.input(2, 4, 5, 6, 3), 4, kernel, pads=pads)
        other = n.input(*shape, name="other") if computed else n.random(*shape)
        graph = fused(n.done(n.op("Tanh", n.op("Mul", y, other))))
        assert graph.kinds()["Conv"] == 1
        result, report = check_pass(PASS, graph, changes=1)
        assert report.fired[0].nodes == ("Conv_1", "Mul_2", "Tanh_3")
        assert not {"Mul", "Tanh"} & set(result.kinds())


def test_nothing_is_left_between_two() -> None:
    n = Net(np.float64)
    x = n.input(2, 4, 5, 6, 7)
    y = n.op("Relu", conv(n, x, 8, (1, 3, 3), pads=(0, 1, 1, 0, 1, 1), bias=True))
    z = n.op("Relu", conv(n, y, 4, (1, 1, 1), bias=True))
    kinds = {"Conv": 2, "Reshape": 2, "Transpose": 4}
    rules = {"conv3d_to_conv2d": 2, "transpose_chain": 2, "reshape_chain": 1, "no_op": 1}
    result, _ = check_pass(PASS, fused(n.done(z)), changes=6, kinds=kinds, rules=rules)
    first, second = (o for o in result.order() if o.kind == "Conv")
    assert (first.src, second.src) == ({"Conv_1", "Relu_2"}, {"Conv_3", "Relu_4"}), "names stay with what they name"


def test_a_residual_block() -> None:
    """Between the first convolution and the others views are left that take depth apart; the residual has none."""
    n = Net(np.float64)
    x = n.op("Relu", conv(n, n.input(2, 3, 5, 6, 7), 4, (1, 3, 3), pads=(0, 1, 1, 0, 1, 1)))
    y = n.op("Relu", conv(n, x, 4, (3, 3, 3), pads=(1,) * 6, bias=True))
    z = n.op("Relu", n.op("Add", conv(n, y, 4, (3, 3, 3), pads=(1,) * 6, bias=True), x))
    graph = fused(n.done(z))
    result, _ = check_pass(PASS, graph, changes=PASS(graph.copy()).changes)
    last = [o for o in result.order() if o.kind == "Conv"][-1]
    assert last.inputs[3] is not None
    assert result.op(last.inputs[3]).kind == "Conv"


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (alone(4, (3, 3, 3), group=4), "it is depthwise"),
        (alone(6, (3, 3, 3), shape=(2, 4, symbol("D", 3), 8, 8)), "sizes of its volumes are not known"),
        (alone(6, (3, 3, 3), shape=(2, 4, 8, symbol("H", 3), 8), auto_pad="SAME_UPPER"), "sizes of its volumes"),
        (alone(6, (3, 3, 3), shape=(0, 4, 8, 8, 8)), "it is empty"),
    ],
)
def test_refused(graph: Graph, reason: str) -> None:
    check_refused(PASS, graph, because=reason)


def test_weights_that_are_computed_are_refused() -> None:
    n = Net(np.float64)
    attrs = ConvAttrs((1, 1, 1), (0,) * 6, (1, 1, 1))
    graph = n.done(n.op("Conv", n.input(1, 2, 3, 4, 5), n.input(4, 2, 3, 3, 3, name="w"), attrs=attrs))
    check_refused(PASS, graph, because="weights are not constant")


def test_a_prologue_is_refused() -> None:
    n = Net(np.float64)
    attrs = ConvAttrs((1, 1, 1), (1,) * 6, (1, 1, 1), prologue=(Stage("Relu", (0,)),))
    graph = n.done(n.op("Conv", n.input(1, 2, 3, 4, 5), n.random(4, 2, 3, 3, 3), attrs=attrs))
    check_refused(PASS, graph, because="a prologue, which runs before its padding")


def test_an_operand_that_no_constant_target_repeats_is_refused() -> None:
    n = Net(np.float64)
    y = conv(n, n.input(symbol("N", 1), 2, 4, 4, 5), 3, (3, 3, 3))
    graph = fused(n.done(n.op("Mul", y, n.random(1, 3, 2, 1, 1))))
    check_refused(PASS, graph, because="operand of its epilogue is repeated")


def changed(
    *links: str, kernel: Sequence[int] = (1, 1, 1), again: bool = False, images: int = 2, dtype: Any = np.float64, **more: Any
) -> Graph:  # fmt: skip
    """A convolution after operators: "Mul" and "Add" with a number for each channel, "number", "gate" (for each channel of each
    image), "plane" (for each pixel), and activations."""
    n = Net(dtype)
    x = y = conv(n, n.input(images, 4, 3, 6, 5), 8, (1, 1, 1))
    others = {"Mul": (8, 1, 1, 1), "Add": (1, 8, 1, 1, 1), "number": (), "plane": (6, 5)}
    for kind in links:
        if kind == "gate":
            y = n.op("Mul", n.op("Sigmoid", n.input(images, 8, 1, 1, 1, name="g")), y)
        elif kind in others:
            y = n.op(kind if kind in ("Mul", "Add") else "Mul", y, n.random(*others[kind]))
        else:
            y = n.op(kind, y)
    return n.done(conv(n, y, 16, kernel, **more), x, *([n.op("Exp", y)] if again else []))


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    "links", [("Mul", "Add", "Relu"), ("gate",), ("gate", "Mul", "Add", "Tanh"), ("number",), ("Add",)]
)
@pytest.mark.parametrize("strides", [(1, 1, 1), (2, 1, 2)])
def test_stages_before_pixels_are_those_of_images(
    links: tuple[str, ...], strides: tuple[int, ...], images: int
) -> None:
    before = changed(*links, strides=strides, images=images)
    graph, _ = check_pass(PASS, before, changes=PASS(before.copy()).changes)
    moved = [op for op in graph.order() if op.kind in ("Mul", "Add", "Relu", "Tanh")]
    assert len(moved) == len(links)
    assert all(op.outputs[0].type.rank == 4 for op in moved)
    assert graph.op(operand(graph.of_kind("Conv")[-1])) == moved[-1]


@pytest.mark.parametrize(
    "graph",
    [
        changed("Relu"), changed("plane", "Relu"), changed("Mul", again=True),
        changed("Mul", kernel=(1, 3, 3), pads=(0, 1, 1, 0, 1, 1)), changed("Mul", pads=(1,) * 6), changed("Mul", group=2),
    ],
    ids=["an activation alone", "a plane", "another reader", "windows", "padding", "groups"],
)  # fmt: skip
def test_other_stages_before_a_convolution_stay(graph: Graph) -> None:
    result, _ = check_pass(PASS, graph, changes=PASS(graph.copy()).changes)
    assert all(op.outputs[0].type.rank == 5 for op in result.order() if op.kind in ("Mul", "Relu"))


@pytest.mark.parametrize("links", [("Mul", "Add", "Relu"), ("gate",)])
def test_the_convolution_of_a_volume_applies_them(links: tuple[str, ...]) -> None:
    program = check_simulated(changed(*links, dtype=np.float32, images=1), "fp16")
    prologues = [s.params["op"]["attrs"].get("prologue") for s in program.steps if s.params["op"]["kind"] == "Conv"]
    assert sum(map(bool, prologues)) == 1


def test_others_are_no_candidates() -> None:
    n = Net(np.float64)
    x = n.input(2, 4, 8, 8)
    check_untouched(PASS, n.done(n.conv(x, 4), n.conv(n.input(2, 4, 9, name="line"), 4)))
    n = Net(np.float64)
    check_untouched(
        PASS, n.done(n.conv_transpose(n.input(2, 4, 3, 4), 4), n.max_pool(n.input(2, 4, 5, 6, 7, name="z")))
    )


def test_views_of_networks_without_volumes_are_left_alone() -> None:
    n = Net(np.float64)
    twice = n.op("Reshape", n.op("Reshape", n.input(2, 12), n.ints(2, 3, 4)), n.ints(4, 6))
    check_untouched(PASS, n.done(n.op("Relu", twice)))


def test_gpus_alone_run_it() -> None:
    context = PassContext("cuda:sm_90a")
    assert sum(p.name == PASS.name for p in PIPELINE(3, context.target)) == 1
    assert not any(
        p.name == PASS.name for p in (*PIPELINE(3, "cpu"), *PIPELINE(3, "reference"), *PIPELINE(1, "cuda:sm_90a"))
    )
