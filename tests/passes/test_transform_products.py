"""transform_products: a DFT is a product with a constant matrix, an STFT a convolution; refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.sweep import all_pairs

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.signal import DFTAttrs, STFTAttrs
from optdnn.passes import transform_products
from optdnn.passes.base import PassContext
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.support.precision import PrecisionPlan, asks_packed, no_integers
from optdnn.passes.transform_products import TransformProducts

PASS = TransformProducts()
LEAST = transform_products.LEAST


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform_products, "LEAST", 0)


def transform(shape: tuple[Any, ...], axis: int, length: int | None = None, **options: bool) -> Graph:
    n = Net()
    more = [] if length is None else [n.const(length, np.int64)]
    return n.done(n.op("DFT", n.input(*shape), *more, attrs=DFTAttrs(axis, **options)))


@all_pairs(
    {
        "parts, options": [
            (1, {}),
            (2, {}),
            (1, {"onesided": True}),
            (2, {"inverse": True}),
            (1, {"inverse": True}),
            (2, {"inverse": True, "onesided": True}),
            (1, {"inverse": True, "onesided": True}),
        ],
        "behind": [(), (3,), (5, 4)],
        "length": [None, 4, 5, 11, 12],
    }
)
def test_forms(length: int | None, behind: tuple[int, ...], parts: int, options: dict[str, bool]) -> None:
    """Along the last axis and others, with the signal padded and cut, of real and complex signals."""
    graph = transform((2, 3, 7, *behind, parts), 2, length, **options)
    result, _ = check_pass(PASS, graph, changes=1, rules={"dft_to_matmul": 1})
    assert result.kinds()["MatMul"] == 1
    assert "DFT" not in result.kinds()


def test_any_batch() -> None:
    graph = transform((symbol("n"), 8, 24, 2), 1)
    check_pass(PASS, graph, changes=1, sizes={"n": 3})


def test_a_matrix_is_not_repeated_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = transform((3, 8, 16, 1), 1)
    result, _ = check_pass(PASS, graph, changes=1)
    assert result.constant_value(result.of_kind("MatMul")[0].inputs[0]) is not None
    monkeypatch.setattr(transform_products, "MOST", 3 * 8 * 16 - 1)
    result, _ = check_pass(PASS, graph, changes=1)
    assert result.constant_value(result.of_kind("MatMul")[0].inputs[1]) is not None


@pytest.mark.parametrize("perm", [None, (0, 2, 1), (1, 0, 2)])
def test_a_transposed_signal(perm: tuple[int, ...] | None) -> None:
    n = Net()
    x = n.op("Transpose", n.input(2, 2, 2), attrs=TransposeAttrs(perm))
    check_pass(PASS, n.done(n.op("DFT", x, attrs=DFTAttrs(1))), changes=1, context=PassContext(precision="fp16"))


def fnet(select: str) -> Graph:
    """Two transforms of a real signal that is written as a complex one; the real part is read."""
    n = Net()
    x = n.input(2, 6, 16, 1)
    z = n.op("Concat", x, n.const(np.zeros((2, 6, 16, 1))), attrs=ConcatAttrs(-1))
    both = n.op("DFT", n.op("DFT", z, attrs=DFTAttrs(2)), attrs=DFTAttrs(1))
    if select == "gather":
        return n.done(n.op("Gather", both, n.const(0, np.int64), attrs=GatherAttrs(3)))
    return n.done(n.op("Slice", both, n.ints(0), n.ints(1), n.ints(-1)))


def matrices(graph: Graph) -> list[tuple[int, ...]]:
    found = [graph.constant_value(v) for op in graph.of_kind("MatMul") for v in op.inputs]
    return [array.shape for array in found if array is not None]


@pytest.mark.parametrize("select", ["gather", "slice"])
def test_unread_columns_and_zeros_are_left_out(select: str) -> None:
    result, _ = check_pass(PASS, fnet(select), changes=2)
    assert matrices(result) == [(16, 32), (6, 12)]


def test_no_copies_between_two_transforms() -> None:
    graph = fnet("gather")
    for one in PIPELINE(3, "cuda:sm_90a"):
        one(graph, PassContext(target="cuda:sm_90a"))
    assert set(graph.kinds()) <= {"Constant", "Input", "MatMul", "Output", "Reshape"}


def test_a_filter_of_spectra() -> None:
    """GFNet (Rao et al., 2021): a transform and its inverse, with scales between; its parts are products and sums of planes."""
    n = Net()
    x = n.op("Div", n.input(2, 6, 5, 16, 1), 2.0)
    there = n.op("Div", n.op("DFT", x, attrs=DFTAttrs(2, onesided=True)), 3.0)
    there = n.op("DFT", there, attrs=DFTAttrs(1))
    real, imaginary = (n.op("Slice", there, n.ints(i), n.ints(i + 1), n.ints(4)) for i in (0, 1))
    w = n.random(6, 3, 16, 1)
    back = n.op("Concat", n.op("Mul", real, w), n.op("Mul", imaginary, w), attrs=ConcatAttrs(4))
    back = n.op("Mul", n.op("DFT", back, attrs=DFTAttrs(1, inverse=True)), 3.0)
    y = n.op("DFT", back, n.const(5, np.int64), attrs=DFTAttrs(2, inverse=True, onesided=True))
    result, _ = check_pass(PASS, n.done(y), changes=4)
    for one in PIPELINE(3, "cuda:sm_90a"):
        one(result, PassContext(target="cuda:sm_90a"))
    assert "Transpose" not in result.kinds()
    assert matrices(result) == [(6, 5), (12, 12), (12, 12), (5, 6)]


@pytest.mark.parametrize(
    ("channels", "convolution", "precision"),
    [
        (16, True, "fp16"),
        (12, True, "fp16"),
        (8, True, "fp16"),
        (16, False, "fp16"),
        (16, True, "fp32"),
        (16, True, "tf32"),
    ],
)
def test_channels_stay_last_between_convolutions(channels: int, convolution: bool, precision: str) -> None:
    """With convolutions, a multiple of 8 and at least 16 channels are the columns that both matrices multiply from the left."""
    n = Net()
    x = n.input(2, channels, 6, 5)
    x = n.op("Unsqueeze", n.conv(x, channels) if convolution else x, n.ints(4))
    there = n.op("DFT", n.op("DFT", x, attrs=DFTAttrs(3, onesided=True)), attrs=DFTAttrs(2))
    back = n.op("DFT", n.op("DFT", there, attrs=DFTAttrs(2, inverse=True)), n.const(5, np.int64), attrs=DFTAttrs(
        3, inverse=True, onesided=True))  # fmt: skip
    graph, _ = check_pass(PASS, n.done(back), changes=4, context=PassContext(precision=precision))
    last = convolution and channels == 16 and precision == "fp16"
    assert matrices(graph) == ([(6, 5), (12, 12), (12, 12), (5, 6)] if last else [(5, 6), (12, 12), (12, 12), (6, 5)])


def test_a_transform_over_channels_keeps_them() -> None:
    n = Net()
    x = n.op("Unsqueeze", n.conv(n.input(2, 16, 6, 5), 16), n.ints(4))
    check_pass(PASS, n.done(n.op("DFT", x, attrs=DFTAttrs(1))), changes=1, context=PassContext(precision="fp16"))


def test_both_parts_read_apart_and_together() -> None:
    n = Net()
    y = n.op("DFT", n.input(2, 9, 1), attrs=DFTAttrs(1))
    parts = [n.op("Slice", y, n.ints(i), n.ints(i + 1), n.ints(2)) for i in (1, 0)]
    check_pass(PASS, n.done(*parts), changes=1)
    n = Net()
    y = n.op("DFT", n.input(2, 9, 1), attrs=DFTAttrs(1))
    check_pass(PASS, n.done(n.op("Slice", y, n.ints(0), n.ints(1), n.ints(2)), n.op("Exp", y)), changes=1)
    n = Net()
    y = n.op("DFT", n.input(2, 9, 1), attrs=DFTAttrs(1))
    check_pass(PASS, n.done(n.op("Slice", y, n.ints(0), n.ints(4), n.ints(1))), changes=1)  # bins, not parts


def test_refusals() -> None:
    check_refused(PASS, transform((2, symbol("n"), 1), 1), because="its length is not known")
    check_refused(PASS, transform((2, 0, 1), 1, 4), because="it has no elements")
    check_refused(
        PASS, transform((1, 4096, 2), 1), because="its matrix would have 67108864 elements, more than 16777216"
    )
    n = Net()
    y = n.op("DFT", n.input(2, 6, 2), None, n.input(1, name="axis", dtype=np.int64))
    check_refused(PASS, n.done(y), because="its axis is not known")
    graph = transform((8, symbol("b"), symbol("c"), 2), 0)
    check_refused(PASS, graph, because="more than one of its sizes is not known")


def test_small_transforms_are_summed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform_products, "LEAST", LEAST)
    check_refused(PASS, transform((31, 32, 1), 1), because="63488 multiplications, too few for a product")
    check_pass(PASS, transform((32, 32, 1), 1), changes=1)
    check_pass(PASS, transform((symbol("n"), 32, 1), 1), changes=1, sizes={"n": 2})


# ---------------------------------------------------------------- frames


def frames(
    samples: Any = 100, step: int = 8, length: int | None = 20, *, window: bool = True, parts: tuple[int, ...] = (1,),
    onesided: bool = True,
) -> Graph:  # fmt: skip
    n = Net()
    operands = [n.positive(length or 20) if window else None, None if length is None else n.const(length, np.int64)]
    x = n.input(2, samples, *parts)
    return n.done(n.op("STFT", x, n.const(step, np.int64), *operands, attrs=STFTAttrs(onesided)))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"onesided": False}, {"window": False}, {"length": None}, {"parts": ()}, {"step": 7}, {"step": 20},
        {"step": 32}, {"samples": 20},
    ],
)  # fmt: skip
def test_frames(options: dict[str, Any]) -> None:
    """Steps that divide frames and that do not, frames that do not overlap, and one frame."""
    result, _ = check_pass(PASS, frames(**options), changes=1, rules={"stft_to_conv": 1})
    assert result.kinds()["Conv"] == 1


def test_blocks_of_samples_are_channels() -> None:
    graph = frames(step=160, length=400, samples=4000)
    PASS(graph)
    (conv,) = graph.of_kind("Conv")
    assert [graph.type(v).dims for v in conv.inputs if v is not None] == [(2, 80, 49), (402, 80, 5)]
    for one in PIPELINE(3, "cuda:sm_90a")[10:]:
        one(graph, PassContext(target="cuda:sm_90a"))
    assert "Layout" not in graph.kinds()  # the samples are blocks with their channels last already


def test_refused_frames() -> None:
    check_refused(PASS, frames(symbol("n")), because="its number of samples is not known")
    check_refused(PASS, frames(0, 8, 20), because="it has no elements")
    check_refused(PASS, frames(parts=(2,), onesided=False), because="its signal is complex")
    check_refused(PASS, frames(9000, 4096, 8192), because="its filters would have 67125248 elements")
    n = Net()
    y = n.op("STFT", n.input(1, 64), n.const(4, np.int64), n.input(8, name="window"), attrs=STFTAttrs())
    check_refused(PASS, n.done(y), because="its window, its frames' length or their distance is not known")


# ---------------------------------------------------------------- what the products stay


@pytest.mark.parametrize("graph", [transform((2, 64, 1), 1), frames()], ids=["DFT", "STFT"])
def test_the_matrix_is_not_quantized(graph: Graph) -> None:
    PASS(graph)
    (op,) = [*graph.of_kind("MatMul"), *graph.of_kind("Conv")]
    assert no_integers(graph, op) == "its matrix is that of a Fourier transform, which stays floating point"
    assert not asks_packed(graph, PrecisionPlan.of_option("w4"), op)


def test_neighbors() -> None:
    n = Net()
    check_untouched(PASS, n.done(n.op("Transpose", n.matmul(n.input(2, 8), 4), attrs=TransposeAttrs((1, 0)))))
