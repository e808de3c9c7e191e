"""spectral_convolutions: the parts of a spectrum are blocks of channels of the convolutions around transforms; refused with the
reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.signal import DFTAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.spectral_convolutions import SpectralConvolutions

PASS = SpectralConvolutions()


def spectrum(n: Net, channels: int = 3) -> Value:
    return n.op("DFT", n.input(2, channels, 4, 5, 2), attrs=DFTAttrs(2))


def parts(n: Net, x: Value, order: tuple[int, ...] = (0, 1), axis: int = 4) -> Value:
    taken = [n.op("Gather", x, n.const(p, np.int64), attrs=GatherAttrs(axis)) for p in order]
    return n.op("Concat", *(n.op("Unsqueeze", t, n.ints(axis)) for t in taken), attrs=ConcatAttrs(axis))


@pytest.mark.parametrize("scalar", [True, False])
def test_joined_parts_are_the_numbers(scalar: bool) -> None:
    n = Net()
    x = n.input(2, 3, 2)
    taken = [n.op("Gather", x, n.const(p if scalar else [p], np.int64), attrs=GatherAttrs(2)) for p in (0, 1)]
    shape = n.ints(2, 3, 1)
    graph = n.done(n.op("Exp", n.op("Concat", *(n.op("Reshape", t, shape) for t in taken), attrs=ConcatAttrs(-1))))
    check_pass(PASS, graph, changes=1, rules={"joined_parts": 1}, kinds={"Exp": 1})


@pytest.mark.parametrize("other", ["order", "axis", "three", "two values", "lines"])
def test_other_parts_stay(other: str) -> None:
    n = Net()
    if other == "order":
        y = parts(n, n.input(2, 3, 4, 5, 2), (1, 0))
    elif other == "axis":
        y = parts(n, n.input(2, 3, 4, 2, 2), axis=3)
    elif other == "three":
        y = parts(n, n.input(2, 3, 4, 5, 3), (0, 1, 2))
    elif other == "lines":  # Gathers that do not take one number
        x = n.input(2, 3, 2)
        y = n.op("Concat", *(n.op("Reshape", n.op("Gather", x, n.ints(p, p), attrs=GatherAttrs(2)), n.ints(2, 6, 1))
                             for p in (0, 1)), attrs=ConcatAttrs(2))  # fmt: skip
    else:
        taken = [
            n.op("Gather", n.input(2, 3, 2, name=f"x{p}"), n.const(p, np.int64), attrs=GatherAttrs(2)) for p in (0, 1)
        ]
        y = n.op("Concat", *(n.op("Unsqueeze", t, n.ints(2)) for t in taken), attrs=ConcatAttrs(2))
    check_untouched(PASS, n.done(y))


def halves(n: Net, x: Value, *, axis: int = 1, order: tuple[int, int] = (0, 1), last: int = 4) -> Value:
    ports = n.op("Split", x, attrs=SplitAttrs(axis, num_outputs=2), outputs=2)
    return n.op("Concat", *(n.op("Unsqueeze", ports[p], n.ints(last)) for p in order), attrs=ConcatAttrs(last))


def test_joined_halves_are_one_transpose() -> None:
    n = Net()
    graph = n.done(halves(n, n.input(2, 6, 4, 5)))
    check_pass(PASS, graph, changes=1, rules={"joined_halves": 1}, kinds={"Reshape": 1, "Transpose": 1})


@pytest.mark.parametrize("options", [{"axis": 2}, {"order": (1, 0)}, {"last": 1}])
def test_other_halves_stay(options: dict[str, Any]) -> None:
    n = Net()
    check_untouched(PASS, n.done(halves(n, n.input(2, 6, 4, 5), **options)))


def test_halves_that_views_merge_stay() -> None:
    """The axis of the Split is none of the joined tensor's."""
    n = Net()
    parts = n.op("Split", n.input(3, 2, 6), attrs=SplitAttrs(2, num_outputs=2), outputs=2)
    joined = n.op("Concat", *(n.op("Reshape", p, n.ints(9, 1, 2)) for p in parts), attrs=ConcatAttrs(2))
    check_untouched(PASS, n.done(joined))


def test_halves_of_two_unknown_sizes_stay() -> None:
    n = Net()
    graph = n.done(halves(n, n.input(2, 6, symbol("H"), symbol("W"))))
    check_refused(PASS, graph, because="more than one of its sizes is not known")


def merged(n: Net, x: Value, *, perm: tuple[int, ...] = (0, 1, 4, 2, 3), **options: Any) -> Value:
    """A convolution whose channels are the channels and parts of ``x``."""
    y = n.op("Reshape", n.transposed(x, *perm), n.ints(2, -1, 4, 5))
    return n.conv(y, 4, **options)


def test_a_convolution_of_a_spectrum_reads_parts_as_blocks() -> None:
    n = Net()
    graph, _ = check_pass(PASS, n.done(merged(n, parts(n, spectrum(n)))), changes=2, rules={
        "joined_parts": 1, "convolved_parts": 1,
    }, kinds={"DFT": 1, "Transpose": 1, "Reshape": 1, "Conv": 1})  # fmt: skip
    (turn,) = graph.of_kind("Transpose")
    assert turn.attrs.perm == (0, 4, 1, 2, 3)


@pytest.mark.parametrize("case", ["no spectrum", "other order", "one channel"])
def test_other_convolutions_stay(case: str) -> None:
    n = Net()
    x = n.input(2, 3, 4, 5, 2) if case == "no spectrum" else spectrum(n, 1 if case == "one channel" else 3)
    check_untouched(PASS, n.done(merged(n, x, perm=(0, 4, 1, 2, 3) if case == "other order" else (0, 1, 4, 2, 3))))


def test_a_convolution_with_groups_keeps_its_channels() -> None:
    n = Net()
    graph = n.done(merged(n, spectrum(n, 2), group=2))
    check_refused(PASS, graph, because="its weights are computed, or it has groups or stages")


def split(n: Net, x: Value, *, readers: int = 1, between: bool = True, dft: bool = True, **options: Any) -> Graph:
    """A transform of numbers whose parts are neighboring channels of a convolution's result."""
    y = n.conv(x, 6, **options)
    y = n.op("Relu", y) if between else y
    z = n.transposed(n.op("Reshape", y, n.ints(2, 3, 2, 4, 5)), 0, 1, 3, 4, 2)
    out = n.op("DFT", z, attrs=DFTAttrs(2, inverse=True)) if dft else n.op("Exp", z)
    return n.done(out, *(n.op("Exp", y) for _ in range(readers - 1)))


@pytest.mark.parametrize("between", [True, False])
def test_a_convolution_before_a_transform_writes_parts_as_blocks(between: bool) -> None:
    n = Net()
    graph, _ = check_pass(
        PASS, split(n, n.input(2, 4, 4, 5), between=between), changes=1, rules={"parts_of_convolution": 1}
    )
    (turn,) = graph.of_kind("Transpose")
    assert turn.attrs.perm == (0, 2, 3, 4, 1)
    assert graph.type(turn.inputs[0]).dims == (2, 2, 3, 4, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"readers": 2}, {"dft": False}])
def test_channels_that_are_read_otherwise_stay(options: dict[str, Any]) -> None:
    n = Net()
    check_untouched(PASS, split(n, n.input(2, 4, 4, 5), **options))


def test_filters_with_groups_keep_their_order() -> None:
    n = Net()
    graph = split(n, n.input(2, 4, 4, 5), group=2)
    check_refused(PASS, graph, because="computed weights, groups or stages")


def test_a_fourier_convolution_copies_only_the_parts() -> None:
    """A Fourier unit (Chi et al., 2020): two transforms, a 1x1 convolution of the spectrum, two inverse transforms, a residual."""
    n = Net()
    image = n.op("Relu", n.conv(n.input(1, 16, 32, 32), 16))
    there = n.op("DFT", n.op("Unsqueeze", image, n.ints(4)), attrs=DFTAttrs(3, onesided=True))
    there = parts(n, n.op("DFT", there, attrs=DFTAttrs(2)))
    flat = n.op("Reshape", n.transposed(there, 0, 1, 4, 2, 3), n.ints(1, 32, 32, 17))
    flat = n.op("Relu", n.op("Conv", flat, n.random(32, 32, 1, 1), attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 1)))
    back = n.transposed(n.op("Reshape", flat, n.ints(1, 16, 2, 32, 17)), 0, 1, 3, 4, 2)
    back = n.op("DFT", parts(n, back), attrs=DFTAttrs(2, inverse=True))
    back = n.op("DFT", back, n.const(32, np.int64), attrs=DFTAttrs(3, inverse=True, onesided=True))
    graph = n.done(n.conv(n.op("Add", image, n.op("Squeeze", back, n.ints(4))), 16))
    for one in PIPELINE(3, "cuda:sm_90a"):
        one(graph, PassContext(target="cuda:sm_90a", precision="fp16"))
    assert "DFT" not in graph.kinds()
    assert "Add" not in graph.kinds()  # a stage of the last product
    moved = [op for op in graph.of_kind("Transpose") if len(op.outputs[0].type.dims) == 5]
    assert [op.attrs.perm for op in moved] == [(0, 2, 3, 1, 4), (0, 3, 1, 2, 4)]  # channels stay last
