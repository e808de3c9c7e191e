"""canonicalize: padding of convolutions and pools, by numbers or by a Pad in front."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.pool import AveragePoolAttrs, LpPoolAttrs, MaxPoolAttrs
from optdnn.passes.canonicalize import Canonicalize

CANON = Canonicalize()


def pad(n: Net, x: Value, pads: tuple[int, ...] = (0, 0, 1, 2, 0, 0, 0, 1), value: Any = None, **attrs: str) -> Value:
    return n.op("Pad", x, n.ints(*pads), *([] if value is None else [value]), attrs=PadAttrs(**attrs))


# ---------------------------------------------------------------- padding that follows from sizes


def _padded(kind: str, auto_pad: str, x: Any, n: Net) -> Value:
    window = {"kernel_shape": (3, 2), "strides": (2, 3), "pads": (0,) * 4, "dilations": (1, 1)}
    if kind == "Conv":
        return n.conv(x, 4, pads=0, strides=2, auto_pad=auto_pad)
    attrs: Any = MaxPoolAttrs if kind == "MaxPool" else AveragePoolAttrs if kind == "AveragePool" else LpPoolAttrs
    return n.op(kind, x, attrs=attrs(**window, auto_pad=auto_pad))


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("kind", ["Conv", "MaxPool", "AveragePool", "LpPool"])
def test_padding_by_known_sizes_becomes_numbers(kind: str, auto_pad: str) -> None:
    n = Net()
    y = _padded(kind, auto_pad, n.input(2, 3, 6, 7), n)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={kind: 1}, rules={"known_pads": 1})
    a = graph.of_kind(kind)[0].attrs
    assert a.auto_pad == "NOTSET"
    assert sum(a.pads) == (3 if kind == "Conv" else 2)
    assert a.pads[0 if auto_pad == "SAME_LOWER" else 2] == 1


def test_both_results_of_a_pool_keep_their_readers() -> None:
    n = Net()
    attrs = MaxPoolAttrs((3, 3), (2, 2), (0,) * 4, (1, 1), auto_pad="SAME_UPPER", indices=True)
    values, indices = n.op("MaxPool", n.input(2, 3, 6, 6), attrs=attrs, outputs=2)
    check_pass(CANON, n.done(values, indices), changes=1, kinds={"MaxPool": 1}, rules={"known_pads": 1})


def test_a_transposed_convolution_to_a_known_size_has_pads() -> None:
    n = Net()
    attrs = ConvTransposeAttrs((2, 2), (0,) * 4, (1, 1), (0, 0), 1, (9, 12), "SAME_UPPER")
    y = n.op("ConvTranspose", n.input(1, 3, 5, 6), n.random(3, 2, 3, 3), attrs=attrs)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"ConvTranspose": 1}, rules={"known_pads": 1})
    (op,) = graph.of_kind("ConvTranspose")
    assert not op.attrs.output_shape
    assert op.outputs[0].type.static_shape == (1, 2, 9, 12)


def test_padding_by_unknown_sizes_stays() -> None:
    n = Net()
    y = _padded("Conv", "SAME_UPPER", n.input(2, 3, symbol("h"), 6), n)
    check_refused(CANON, n.done(y), because="its padding depends on a size that is not known")


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize("pads", [0, (1, 0, 2, 1)])
def test_padding_goes_into_a_convolution(pads: int | tuple[int, ...]) -> None:
    n = Net()
    y = n.conv(pad(n, n.input(2, 3, 6, 6)), 4, pads=pads, strides=2)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Conv": 1}, rules={"pad_conv": 1})
    own = (0, 0, 0, 0) if pads == 0 else (1, 0, 2, 1)
    assert graph.of_kind("Conv")[0].attrs.pads == tuple(a + b for a, b in zip(own, (1, 2, 0, 1), strict=True))


def test_padding_by_named_axes_of_a_symbolic_image() -> None:
    n = Net()
    x = n.input(2, 3, symbol("h"), symbol("w"))
    y = n.conv(n.op("Pad", x, n.ints(1, 2), 0.0, n.ints(-1), attrs=PadAttrs()), 4, pads=0)
    check_pass(CANON, n.done(y), changes=1, kinds={"Conv": 1}, sizes={"h": 5, "w": 4})


def test_padding_that_others_use_stays_for_them() -> None:
    n = Net()
    p = pad(n, n.input(2, 3, 6, 6))
    check_pass(CANON, n.done(n.conv(p, 4), n.op("Exp", p)), changes=1, kinds={"Conv": 1, "Exp": 1, "Pad": 1})


@pytest.mark.parametrize(
    ("dilations", "pads", "kernel", "own"),
    [
        ((36, 36), (36, 36, 36, 36), (1, 1), (0, 0, 0, 0)),
        ((36, 2), (36, 2, 36, 2), (1, 3), (0, 2, 0, 2)),
        ((7, 1), (2, 1, 14, 1), (2, 3), (2, 1, 7, 1)),
    ],
)
def test_taps_that_read_padding_alone_are_dropped(
    dilations: tuple[int, int], pads: tuple[int, ...], kernel: tuple[int, int], own: tuple[int, ...]
) -> None:
    n = Net()
    x, w = n.input(2, 3, 6, 7), n.random(4, 3, 3, 3, scale=0.3)
    y = n.op("Conv", x, w, n.random(4), attrs=ConvAttrs((1, 1), pads, dilations))
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Conv": 1}, rules={"drop_taps": 1})
    (op,) = graph.of_kind("Conv")
    assert (graph.constant_value(op.inputs[1]).shape[2:], op.attrs.pads) == (kernel, own)


@pytest.mark.parametrize(
    ("dilation", "pads", "strides", "because"),
    [(5, 5, 1, None), (8, 9, 20, "nothing but padding"), (4, 3, 20, "would crop")],
)
def test_taps_that_stay(dilation: int, pads: int, strides: int, because: str | None) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(1, 3, 6, 6), 4, 3, pads=pads, dilations=dilation, strides=strides))
    if because is None:
        check_untouched(CANON, graph)
    else:
        check_refused(CANON, graph, because=because, rule="drop_taps")


def conv_refusals() -> dict[str, tuple[str, Graph]]:
    cases: dict[str, tuple[str, Graph]] = {}
    n = Net()
    cases["reflection"] = ("by reflect", n.done(n.conv(pad(n, n.input(2, 3, 6, 6), mode="reflect"), 4)))
    n = Net()
    cases["a number"] = ("pads with 0.5", n.done(n.conv(pad(n, n.input(2, 3, 6, 6), value=0.5), 4)))
    n = Net()
    cases["channels"] = (
        "batch or the channels",
        n.done(n.conv(pad(n, n.input(2, 3, 6, 6), (0, 1, 0, 0, 0, 0, 0, 0)), 4)),
    )
    n = Net()
    cases["cropping"] = ("crops", n.done(n.conv(pad(n, n.input(2, 3, 6, 6), (0, 0, 0, -1, 0, 0, 0, 1)), 4)))
    n = Net()
    wide = n.input(2, 3, symbol("h"), 6)
    cases["auto_pad"] = (
        "depends on its input",
        n.done(n.conv(pad(n, wide), 4, pads=0, strides=2, auto_pad="SAME_UPPER")),
    )
    n = Net()
    p = n.op("Pad", n.input(2, 3, 6, 6), n.input(8, name="pads", dtype=np.int64), attrs=PadAttrs())
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1))
    cases["computed"] = ("are not constant", n.done(n.op("Conv", p, n.random(4, 3, 3, 3), attrs=attrs)))
    n = Net()
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1), prologue=(Stage("Exp", (-1,)),))
    y = n.op("Conv", pad(n, n.input(2, 3, 6, 6)), n.random(4, 3, 3, 3), attrs=attrs)
    cases["prologue"] = ("depends on its input", n.done(y))
    return cases


@pytest.mark.parametrize(("because", "graph"), conv_refusals().values(), ids=conv_refusals().keys())
def test_padding_that_a_convolution_cannot_take(because: str, graph: Graph) -> None:
    check_refused(CANON, graph, because=because, rule="pad_conv")


@pytest.mark.parametrize("include", [False, True])
def test_zeros_in_front_of_an_average_count(include: bool) -> None:
    n = Net()
    y = n.average_pool(pad(n, n.input(2, 3, 6, 6)), include_pad=include)
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"AveragePool": 1}, rules={"pad_pool": 1})
    assert graph.of_kind("AveragePool")[0].attrs.count_include_pad


def test_padding_adds_up_where_a_pool_counts_its_own() -> None:
    n = Net()
    x = pad(n, n.input(2, 3, 6, 6), (0, 0, 1, 0, 0, 0, 1, 0))
    check_pass(CANON, n.done(n.average_pool(x, pads=1, include_pad=True)), changes=1, kinds={"AveragePool": 1})


@pytest.mark.parametrize("filler", [-np.inf, float(np.finfo(np.float32).min)])
def test_the_lowest_number_in_front_of_a_maximum(filler: float) -> None:
    n = Net()
    y = n.max_pool(pad(n, n.input(2, 3, 6, 6), value=filler))
    check_pass(CANON, n.done(y), changes=1, kinds={"MaxPool": 1})


def test_zeros_before_a_maximum_of_values_that_are_not_negative() -> None:
    n = Net()
    y = n.max_pool(pad(n, n.op("Relu", n.input(2, 3, 6, 6))))
    check_pass(CANON, n.done(y), changes=1, kinds={"MaxPool": 1, "Relu": 1})


def pool_refusals() -> dict[str, tuple[str, Graph]]:
    cases: dict[str, tuple[str, Graph]] = {}
    n = Net()
    cases["any sign"] = ("pads with 0, and elements may be smaller", n.done(n.max_pool(pad(n, n.input(2, 3, 6, 6)))))
    n = Net()
    x = n.op("Relu", n.input(2, 3, 6, 6))
    cases["above zero"] = ("pads with 0.25, and elements", n.done(n.max_pool(pad(n, x, value=0.25))))
    n = Net()
    cases["average of a number"] = (
        "pads with 1, an average",
        n.done(n.average_pool(pad(n, n.input(2, 3, 6, 6), value=1.0))),
    )
    n = Net()
    x = pad(n, n.input(2, 3, 6, 6), (0, 0, 1, 0, 0, 0, 1, 0))
    cases["uncounted"] = ("does not count", n.done(n.average_pool(x, pads=1)))
    n = Net()
    cases["ceil"] = ("rounds its output size up", n.done(n.average_pool(pad(n, n.input(2, 3, 6, 6)), ceil_mode=True)))
    n = Net()
    x = pad(n, n.input(2, 3, 6, 6), (0, 0, 3, 0, 0, 0, 0, 0), -np.inf)
    cases["a window of padding"] = ("nothing but padding", n.done(n.max_pool(x)))
    n = Net()
    attrs = MaxPoolAttrs((2, 2), (1, 1), (0,) * 4, (3, 3))
    x = pad(n, n.input(2, 3, 6, 6), (0, 0, 1, 0, 0, 0, 1, 0), -np.inf)
    cases["a dilated window"] = ("nothing but padding", n.done(n.op("MaxPool", x, attrs=attrs)))
    n = Net()
    attrs = MaxPoolAttrs((3, 3), (2, 2), (0,) * 4, (1, 1), indices=True)
    x = pad(n, n.input(2, 3, 6, 6), value=-np.inf)
    cases["indices"] = ("returns indices", n.done(*n.op("MaxPool", x, attrs=attrs, outputs=2)))
    n = Net()
    attrs = AveragePoolAttrs((3, 3), (2, 2), (0,) * 4, (1, 1), auto_pad="SAME_UPPER")
    wide = n.input(2, 3, symbol("h"), 6)
    cases["auto_pad"] = ("depends on its input", n.done(n.op("AveragePool", pad(n, wide), attrs=attrs)))
    return cases


@pytest.mark.parametrize(("because", "graph"), pool_refusals().values(), ids=pool_refusals().keys())
def test_padding_that_a_pool_cannot_take(because: str, graph: Graph) -> None:
    check_refused(CANON, graph, because=because, rule="pad_pool")
