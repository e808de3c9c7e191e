"""canonicalize: activations before maxima, means as pools, crops of convolutions, factors before a Resize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.passes.base import Miss
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.rules.cropped_convs import crop_conv

CANON, ARITHMETIC = Canonicalize(), CanonicalizeArithmetic()


# ---------------------------------------------------------------- activations and maxima


@pytest.mark.parametrize(("kind", "more"), [("Relu", ()), ("Clip", (-0.25, 0.5)), ("Sigmoid", ()), ("Tanh", ())])
def test_an_activation_moves_in_front_of_a_maximum(kind: str, more: tuple[float, ...]) -> None:
    n = Net()
    y = n.op(kind, n.max_pool(n.conv(n.input(2, 3, 8, 8), 4), pads=1), *more)
    graph, _ = check_pass(ARITHMETIC, n.done(y), changes=1, rules={"activation_before_pool": 1})
    assert [op.kind for op in graph.order() if op.kind not in ("Input", "Constant", "Output")] == [
        "Conv",
        kind,
        "MaxPool",
    ]
    assert graph.of_kind("MaxPool")[0].src == {"MaxPool_2"}


def test_an_activation_that_is_not_monotone_stays() -> None:
    n = Net()
    check_untouched(ARITHMETIC, n.done(n.op("Abs", n.max_pool(n.conv(n.input(2, 3, 8, 8), 4)))))


def test_an_activation_stays_where_no_convolution_takes_it() -> None:
    n = Net()
    check_untouched(ARITHMETIC, n.done(n.op("Tanh", n.max_pool(n.input(2, 3, 8, 8)))))
    n = Net()
    c = n.conv(n.input(2, 3, 8, 8), 4)
    check_untouched(ARITHMETIC, n.done(n.op("Tanh", n.max_pool(c)), n.op("Exp", c)))


def test_an_activation_stays_after_a_maximum_that_others_read() -> None:
    n = Net()
    p = n.max_pool(n.conv(n.input(2, 3, 8, 8), 4))
    check_refused(ARITHMETIC, n.done(n.op("Relu", p), n.op("Exp", p)), because="MaxPool_2 has other uses")


def test_an_activation_stays_after_windows_that_may_be_empty() -> None:
    n = Net()
    y = n.op("Relu", n.max_pool(n.conv(n.input(2, 3, 8, 8), 4), ceil_mode=True))
    check_refused(ARITHMETIC, n.done(y), because="nothing but padding")


# ---------------------------------------------------------------- reductions of images


@pytest.mark.parametrize(("kind", "pool"), [("ReduceMean", "GlobalAveragePool"), ("ReduceMax", "GlobalMaxPool")])
@pytest.mark.parametrize("keepdims", [True, False])
def test_a_reduction_of_an_image_is_a_pool(kind: str, pool: str, keepdims: bool) -> None:
    n = Net()
    y = n.op(kind, n.input(symbol("n"), 3, 4, symbol("w")), n.ints(-1, 2), attrs=ReduceAttrs(keepdims))
    kinds = {pool: 1} if keepdims else {pool: 1, "Reshape": 1}
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds=kinds, rules={"spatial_reduction": 1}, sizes={"n": 2, "w": 5})


@pytest.mark.parametrize(
    ("dims", "axes"), [((2, 3, 4), (2,)), ((2, 3, 4, 5), (3,)), ((2, 3, 4, 5), (1, 2)), ((2, 3, 4, 5), (1, 2, 3))]
)
def test_other_reductions_stay(dims: tuple[int, ...], axes: tuple[int, ...]) -> None:
    n = Net()
    check_untouched(ARITHMETIC, n.done(n.op("ReduceMean", n.input(*dims), n.ints(*axes), attrs=ReduceAttrs())))


def test_a_reduction_whose_shape_no_constant_expresses_is_refused() -> None:
    """An empty dimension: a target of 0 would mean "copy"."""
    n = Net()
    y = n.op("ReduceMean", n.input(2, 0, 4, 5), n.ints(2, 3), attrs=ReduceAttrs(keepdims=False))
    check_refused(ARITHMETIC, n.done(y), because="no constant target", rule="spatial_reduction")


def test_integer_reductions_stay() -> None:
    n = Net(np.int32)
    y = n.op("ReduceMax", n.input(2, 3, 4, 5), n.ints(2, 3), attrs=ReduceAttrs())
    check_untouched(ARITHMETIC, n.done(y))


# ---------------------------------------------------------------- pools of all


@pytest.mark.parametrize("average", [True, False])
def test_a_pool_whose_window_is_the_image_is_a_global_pool(average: bool) -> None:
    n = Net()
    x = n.conv(n.input(2, 3, 5, 5), 4)
    y = n.average_pool(x, 5, strides=5) if average else n.max_pool(x, 5, strides=5)
    kinds = {"Conv": 1, "GlobalAveragePool" if average else "GlobalMaxPool": 1}
    check_pass(ARITHMETIC, n.done(y), changes=1, kinds=kinds, rules={"pool_of_all": 1})


@pytest.mark.parametrize("options", [{"kernel": 4}, {"pads": 1}, {"dtype": np.uint8}, {"rank": 3}], ids=str)
def test_other_pools_stay(options: dict[str, Any]) -> None:
    given = {"kernel": 5, **options}
    n, dims = Net(given.pop("dtype", np.float32)), (2, 3, 5, 5)[: given.pop("rank", 4)]
    check_untouched(ARITHMETIC, n.done(n.max_pool(n.input(*dims), **given)))


def transposed(
    n: Net,
    *,
    cut: tuple[tuple[int, int, int], ...] = ((1, 12, 2),),
    step: int = 1,
    auto: str = "NOTSET",
    extra: int = 0,
) -> tuple[Value, Value]:
    """A transposed convolution of (2, 4, 5), whose result is (2, 6, 15 + extra), and a part of it: begins, ends and axes."""
    attrs = ConvTransposeAttrs((2,), (0, 0), (1,), (extra,), 1, (), auto)
    y = n.op("ConvTranspose", n.input(2, 4, 5), n.random(4, 6, 7), n.random(6), attrs=attrs)
    begins, ends, axes = zip(*cut, strict=True)
    return y, n.op("Slice", y, n.ints(*begins), n.ints(*ends), n.ints(*axes), n.ints(*[step] * len(axes)))


@pytest.mark.parametrize(
    ("cut", "extra", "pads"),
    [
        (((1, 12, 2),), 0, (1, 3)),
        (((-14, 1 << 62, -1),), 0, (1, 0)),
        (((0, 15, 2),), 1, (0, 1)),
        (((0, 6, 1), (3, -4, 2)), 0, (3, 4)),
    ],
)
def test_crops_of_a_transposed_convolution(
    cut: tuple[tuple[int, int, int], ...], extra: int, pads: tuple[int, int]
) -> None:
    n = Net(np.float64)
    graph = n.done(transposed(n, cut=cut, extra=extra)[1])
    rules = {"crop_transpose": 1, **({"whole_axes": 1} if len(cut) > 1 else {})}
    after, _ = check_pass(CANON, graph, changes=len(rules), kinds={"ConvTranspose": 1}, rules=rules)
    assert after.of_kind("ConvTranspose")[0].attrs.pads == pads


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"cut": ((1, 4, 1),)}, "it cuts off images or channels"),
        ({"cut": ((9, 3, 2),)}, "it cuts off everything"),
        ({"auto": "SAME_UPPER", "cut": ((1, 9, 2),)}, "the pads of ConvTranspose_1 follow from its result"),
    ],
)
def test_crops_that_are_refused(changed: dict[str, Any], because: str) -> None:
    n = Net(np.float64)
    check_refused(CANON, n.done(transposed(n, **changed)[1]), because=because, rule="crop_transpose")


def test_a_transposed_convolution_that_is_read_whole_is_not_cut() -> None:
    n = Net(np.float64)
    y, part = transposed(n)
    check_refused(CANON, n.done(part, n.op("Relu", y)), because="is used 2 times", rule="crop_transpose")


def test_a_crop_of_an_unknown_size_is_refused() -> None:
    n = Net(np.float64)
    attrs = ConvTransposeAttrs((2,), (0, 0), (1,), (0,))
    y = n.op("ConvTranspose", n.input(2, 4, symbol("n")), n.random(4, 6, 7), attrs=attrs)
    graph = n.done(n.op("Slice", y, n.ints(1), n.ints(12), n.ints(2)))
    check_refused(CANON, graph, because="has a symbolic size", rule="crop_transpose")


def cropped(
    n: Net, begin: int = 0, end: int = -2, axis: int = -1, *, pads: tuple[int, int] = (2, 2), stride: int = 1,
    dilation: int = 1, auto: str = "NOTSET", length: Any = 9,
) -> tuple[Value, Value]:  # fmt: skip
    """A depthwise convolution of three taps, and a part of its result."""
    attrs = ConvAttrs((stride,), pads, (dilation,), 4, auto)
    y = n.op("Conv", n.input(2, 4, length), n.random(4, 1, 3), n.random(4), attrs=attrs)
    return y, n.op("Slice", y, n.ints(begin), n.ints(end), n.ints(axis))


@pytest.mark.parametrize(
    ("options", "pads"),
    [
        ({}, (2, 0)),  # causal
        ({"end": -1}, (2, 1)),
        ({"begin": 1, "end": 10}, (1, 1)),
        ({"begin": 2, "end": 1 << 62}, (0, 2)),
        ({"pads": (4, 4), "end": -4, "dilation": 2}, (4, 0)),
        ({"stride": 2, "end": -1}, (2, 0)),  # 6 results become 5, the last of which ends with the input
        ({"stride": 2, "begin": 1, "end": 6}, (0, 2)),
        ({"stride": 2, "length": 8, "end": -1}, (2, 0)),
    ],
)
def test_crops_of_a_convolution(options: dict[str, Any], pads: tuple[int, int]) -> None:
    n = Net(np.float64)
    graph = n.done(cropped(n, **options)[1])
    after, _ = check_pass(CANON, graph, changes=1, kinds={"Conv": 1}, rules={"crop_conv": 1})
    assert after.of_kind("Conv")[0].attrs.pads == pads


def separable(n: Net, *, taps: int = 1, whole: bool = False, **options: Any) -> Graph:
    """A causal depthwise convolution, a convolution of its channels (``taps``: of each result), and a part of the result."""
    y = n.op("Conv", n.input(2, 4, 9), n.random(4, 1, 3), attrs=ConvAttrs((1,), (2, 2), (1,), 4))
    attrs = replace(ConvAttrs((1,), (0, 0), (1,), 1), **options)
    z = n.op("Conv", y, n.random(6, 4, taps), n.random(6), attrs=attrs)
    z = n.op("Conv", z, n.random(2, 6, 1), attrs=ConvAttrs((1,), (0, 0), (1,), 1))
    part = n.op("Slice", z, n.ints(0), n.ints(-2), n.ints(2))
    return n.done(part, n.op("Relu", y)) if whole else n.done(part)


def test_crops_of_a_separable_convolution() -> None:
    after, _ = check_pass(CANON, separable(Net(np.float64)), changes=1, kinds={"Conv": 3}, rules={"crop_conv": 1})
    assert [op.attrs.pads for op in after.of_kind("Conv")] == [(2, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"whole": True}, "is used 2 times"),
        ({"taps": 3}, "would still compute what it cuts off"),
        ({"strides": (2,)}, "would still compute what it cuts off"),
        ({"pads": (0, 1)}, "would still compute what it cuts off"),
    ],
)
def test_crops_of_a_separable_convolution_that_are_refused(options: dict[str, Any], because: str) -> None:
    check_refused(CANON, separable(Net(np.float64), **options), because=because, rule="crop_conv")


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"end": -3}, "would still compute what it cuts off"),
        ({"begin": 3, "end": 9}, "would still compute what it cuts off"),
        ({"stride": 2, "begin": 2, "end": 9}, "would still compute what it cuts off"),
        ({"begin": 9, "end": 3}, "it cuts off everything"),
        ({"length": symbol("n")}, "has a symbolic size"),
    ],
)
def test_crops_of_a_convolution_that_are_refused(options: dict[str, Any], because: str) -> None:
    n = Net(np.float64)
    check_refused(CANON, n.done(cropped(n, **options)[1]), because=because, rule="crop_conv")


def one(n: Net, index: Any = 3, axis: int = 2, shape: tuple[Any, ...] = (4,), **options: Any) -> tuple[Value, Value]:
    """A causal convolution of four taps over a cache and a new element (``shape``), and one position of its result."""
    rank = len(shape)
    attrs = ConvAttrs((1,) * rank, (3,) * (2 * rank), (1,) * rank, 4)
    y = n.op("Conv", n.input(2, 4, *shape), n.random(4, 1, *(4,) * rank), n.random(4), attrs=replace(attrs, **options))
    return y, n.op("Gather", y, n.const(index, np.int64), attrs=GatherAttrs(axis))


@pytest.mark.parametrize(
    ("options", "pads"),
    [
        ({}, (0, 0)),
        ({"index": -4, "axis": -1}, (0, 0)),
        ({"index": [3]}, (0, 0)),
        ({"shape": (3,), "index": 2}, (1, 0)),
        ({"shape": (3,), "index": 3}, (0, 1)),
        ({"index": 2}, None),
        ({"index": 5}, None),
        ({"shape": (4, 6)}, (0, 3, 0, 3)),
        ({"dilations": (2,), "pads": (6, 6), "shape": (7,), "index": 6}, (0, 0)),
    ],
)
def test_one_position_of_a_convolution(options: dict[str, Any], pads: tuple[int, ...] | None) -> None:
    n = Net(np.float64)
    graph = n.done(one(n, **options)[1])
    if pads is None:
        check_refused(CANON, graph, because="would still compute what it cuts off", rule="pixel_of_conv")
        return
    kinds = {"Conv": 1} if options.get("index") == [3] else {"Conv": 1, "Reshape": 1}
    after, _ = check_pass(CANON, graph, changes=1, kinds=kinds, rules={"pixel_of_conv": 1})
    assert after.of_kind("Conv")[0].attrs.pads == pads


def test_positions_of_a_convolution_that_stay() -> None:
    n = Net(np.float64)
    y, part = one(n)
    check_refused(CANON, n.done(part, n.op("Relu", y)), because="is used 2 times", rule="pixel_of_conv")
    n = Net(np.float64)
    check_untouched(CANON, n.done(one(n, index=[3, 4])[1]))
    n = Net(np.float64)
    check_untouched(CANON, n.done(one(n, axis=1)[1]))
    n = Net(np.float64)
    check_untouched(CANON, n.done(one(n, shape=(symbol("n"),))[1]))


def test_a_convolution_whose_padding_is_not_resolved_is_not_cut() -> None:
    n = Net(np.float64)
    graph = n.done(cropped(n, auto="SAME_UPPER")[1])
    miss = crop_conv.function(graph, graph.of_kind("Slice")[0])
    assert isinstance(miss, Miss)
    assert "follow from its result" in miss.reason


def test_a_convolution_that_is_read_whole_is_not_cut() -> None:
    n = Net(np.float64)
    y, part = cropped(n)
    check_refused(CANON, n.done(part, n.op("Relu", y)), because="is used 2 times", rule="crop_conv")


def test_parts_of_the_channels_are_not_crops() -> None:
    n = Net(np.float64)
    check_untouched(CANON, n.done(cropped(n, axis=1, end=2)[1]))


def test_other_parts_of_a_transposed_convolution_are_not_crops() -> None:
    n = Net(np.float64)
    _y, part = transposed(n, step=2)
    check_untouched(CANON, n.done(part))


def scaled(
    *, sizes: tuple[int, int] = (8, 10), factor: tuple[int, ...] = (2, 3, 1, 1), kind: str = "Mul", flip: bool = False,
    mode: str = "linear", read: bool = False, places: str = "half_pixel",
) -> Graph:  # fmt: skip
    """An image of 4 x 5 pixels that is resized, and a factor after it."""
    n = Net(np.float64)
    roi = n.random(8) if places == "tf_crop_and_resize" else None
    attrs = ResizeAttrs(mode, places)
    y = n.op("Resize", n.input(2, 3, 4, 5), roi, None, n.ints(2, 3, *sizes), attrs=attrs)
    by = n.op("Exp", n.input(*factor, name="f"))
    return n.done(n.op(kind, *((by, y) if flip else (y, by))), *([n.op("Tanh", y)] if read else []))


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("factor", [(2, 3, 1, 1), (3, 1, 1), (1, 3, 1, 1), (2, 1, 1, 1)])
def test_a_factor_of_channels_moves_before_a_resize(mode: str, factor: tuple[int, ...]) -> None:
    graph = scaled(mode=mode, factor=factor, flip=len(factor) == 3)
    done, _ = check_pass(CanonicalizeArithmetic(), graph, changes=1, rules={"scale_before_resize": 1})
    assert done.op(done.of_kind("Resize")[0].inputs[0]).kind == "Mul"  # type: ignore[arg-type]


def test_a_resize_of_rows_lets_factors_of_columns_pass() -> None:
    graph = scaled(sizes=(9, 5), factor=(3, 1, 5), kind="Div")
    check_pass(CanonicalizeArithmetic(), graph, changes=1, rules={"scale_before_resize": 1})


@pytest.mark.parametrize(
    ("graph", "because"),
    [(scaled(sizes=(3, 5)), "fewer pixels"), (scaled(places="tf_crop_and_resize"), "no pixels of its image")],
)
def test_a_factor_that_must_stay_after_a_resize(graph: Graph, because: str) -> None:
    check_refused(CanonicalizeArithmetic(), graph, because=because)


@pytest.mark.parametrize(
    "graph",
    [scaled(factor=(8, 10)), scaled(factor=(1, 1, 8, 1)), scaled(read=True), scaled(kind="Add"), scaled(kind="Div", flip=True)],
    ids=["of pixels", "of rows", "the Resize is read elsewhere", "a sum", "the image divides"],
)  # fmt: skip
def test_other_arithmetic_after_a_resize_stays(graph: Graph) -> None:
    check_untouched(CanonicalizeArithmetic(), graph)
