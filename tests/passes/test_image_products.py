"""image_tokens: products and attention between channels read images as views of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.image_tokens import ImageTokens


def channels_attended(n: Net, normalized: bool = True, back: tuple[int, ...] = (0, 8, 4, 6)) -> Graph:
    """A layer as in Restormer: attention between the channels of an image, in two heads."""
    parts = n.conv(n.input(2, 3, 4, 6), 24)
    split = n.op("Split", parts, n.ints(8, 8, 8), outputs=3, attrs=SplitAttrs(1))
    q, k, v = (n.op("Reshape", x, n.ints(0, 2, 4, 24)) for x in split)
    if normalized:
        q, k = (n.op("LpNormalization", x, attrs=LpNormAttrs(-1, 2, 1e-12)) for x in (q, k))
    y = n.op("Reshape", n.op("Attention", q, k, v, attrs=AttentionAttrs(1.0)), n.ints(*back))
    return n.done(n.conv(y, 8))


@pytest.mark.parametrize("normalized", [True, False])
def test_attention_between_channels_reads_tokens(normalized: bool) -> None:
    graph = channels_attended(Net(np.float64), normalized)
    kinds = {"Transpose": 8, "Reshape": 4, "Attention": 1, "Split": 1, "Conv": 2}
    kinds |= {"LpNormalization": 2} if normalized else {}
    check_pass(ImageTokens(), graph, changes=1, rules={"channel_attention": 1}, kinds=kinds)


def test_attention_between_channels_takes_no_copies() -> None:
    program = check_simulated(channels_attended(Net()), "fp16")
    tactics = [s.params.get("tactic", "") for s in program.steps]
    assert any(t.startswith("attention_channels") for t in tactics)


def test_attention_between_channels_of_no_image() -> None:
    n = Net(np.float64)
    q = n.op("Reshape", n.conv(n.input(2, 3, 4, 6), 8), n.ints(0, 2, 4, 24))
    y = n.op("Attention", q, q, q, attrs=AttentionAttrs(1.0))
    check_untouched(ImageTokens(), n.done(n.op("Reshape", y, n.ints(0, 8, 24))))
    graph = channels_attended(Net(np.float64), back=(0, 4, 8, 6))
    check_untouched(ImageTokens(), graph)
    n = Net(np.float64)
    parts = [n.op("Reshape", n.conv(n.input(2, 3, 4, 6), 8), n.ints(0, 2, 4, 24)) for _ in range(3)]
    y = n.op("Reshape", n.op("Attention", *parts, attrs=AttentionAttrs(1.0)), n.ints(0, 8, 4, 6))
    check_refused(ImageTokens(), n.done(n.op("Tanh", y)), because="no operator on images reads it")


def scores(source: str = "conv", *, batch: Any = 2, heads: int = 2, readers: int = 1) -> Graph:
    """The scores of VITS's text encoder: a convolution's channels in heads, queries transposed and keys as they are."""
    n = Net(np.float64)
    x = n.input(batch, 3, 20)
    q, k = (n.conv(x, 8, 1, pads=0) if source == "conv" else n.input(batch, 8, 20, name=f"x{i}") for i in range(2))
    q, k = (n.op("Reshape", v, n.ints(0, heads, 8 // heads, 20)) for v in (q, k))
    rank = (0, 1, 3, 2)
    y = n.op("MatMul", n.op("Transpose", q, attrs=TransposeAttrs(rank)), k)
    return n.done(y, *(n.op("Exp", k) for _ in range(readers - 1)))


@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
def test_heads_of_an_image_that_a_product_reads_are_views_of_tokens(batch: Any) -> None:
    graph, _ = check_pass(
        ImageTokens(), scores(batch=batch), changes=2, rules={"image_to_tokens": 1, "pixels_of_image": 1},
        kinds={"Conv": 2, "Transpose": 4, "Reshape": 2, "MatMul": 1}, sizes={"N": 3} if batch != 2 else None,
    )  # fmt: skip
    (product,) = graph.of_kind("MatMul")
    assert [graph.op(v).kind for v in product.inputs] == ["Transpose", "Transpose"]  # type: ignore[arg-type]


def test_heads_of_an_input_stay() -> None:
    check_untouched(ImageTokens(), scores("input"))


def test_heads_that_others_read_stay() -> None:
    check_pass(ImageTokens(), scores(readers=2), changes=1, rules={"image_to_tokens": 1})


def test_one_head_stays() -> None:
    """A Reshape to (B, 1, C, H * W) moves no axis."""
    report = ImageTokens()(scores(heads=1))
    assert "pixels_of_image" not in {f.rule for f in report.fired}


def masks(source: str = "conv", *, readers: int = 1, channels: int = 8, gram: bool = False, batch: Any = 2) -> Graph:
    """Masks of five queries: products with the pixels of an image. ``gram``: the product of an image with itself, transposed."""
    n = Net(np.float64)
    image = n.conv(n.input(batch, 3, 6, 4), channels) if source == "conv" else n.input(batch, channels, 6, 4)
    pixels = n.op("Reshape", image, n.ints(0, channels, 24))
    queries = (
        n.op("Transpose", pixels, attrs=TransposeAttrs((0, 2, 1)))
        if gram
        else n.input(batch, 5, channels, name="queries")
    )
    y = n.op("MatMul", *((pixels, queries) if gram else (queries, pixels)))
    return n.done(y, *(n.op("Exp", pixels) for _ in range(readers - 1)))


@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
@pytest.mark.parametrize("readers", [1, 2])
def test_the_pixels_of_an_image_that_a_product_reads_are_a_view_of_tokens(batch: Any, readers: int) -> None:
    graph, _ = check_pass(
        ImageTokens(), masks(batch=batch, readers=readers), changes=1, rules={"pixels_of_image": 1},
        kinds={"Conv": 1, "Transpose": 2, "Reshape": readers, "MatMul": 1, **({"Exp": 1} if readers > 1 else {})},
        sizes={"N": 3} if batch != 2 else None,
    )  # fmt: skip
    (product,) = graph.of_kind("MatMul")
    assert [graph.op(v).kind for v in product.inputs] == ["Input", "Transpose"]  # type: ignore[arg-type]


def test_both_factors_of_a_gram_matrix_are_views_of_tokens() -> None:
    report, graph = ImageTokens()(masks(gram=True)), masks(gram=True)
    assert {f.rule for f in report.fired} == {"image_to_tokens", "pixels_of_image"}
    check_pass(ImageTokens(), graph, changes=2, rules={"image_to_tokens": 1, "pixels_of_image": 1})


@pytest.mark.parametrize("graph", [masks("input"), masks(channels=1)], ids=["an input", "one channel"])
def test_pixels_of_an_input_and_of_one_channel_stay(graph: Graph) -> None:
    check_untouched(ImageTokens(), graph)


def test_masks_are_computed_without_a_copy_of_the_image() -> None:
    n = Net()
    pixels = n.op("Reshape", n.conv(n.input(1, 16, 16, 16), 64), n.ints(1, 64, 256))
    program = check_simulated(n.done(n.op("MatMul", n.op("Relu", n.input(1, 24, 64, name="queries")), pixels)), "fp16")
    assert [s.params["op"]["kind"] for s in program.steps].count("MatMul") == 1
    assert not [s for s in program.steps if s.params["op"]["kind"] in ("Copy", "Copies") and "Reshape" in str(s.src)]


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_keys_of_a_convolution_are_read_without_a_copy(precision: str) -> None:
    n = Net()
    x = n.input(1, 16, 24)
    q, k = (n.op("Reshape", n.conv(x, 64, 1, pads=0), n.ints(1, 2, 32, 24)) for _ in range(2))
    y = n.op("MatMul", n.op("Transpose", q, attrs=TransposeAttrs((0, 1, 3, 2))), k)
    program = check_simulated(n.done(n.op("Relu", y)), precision)
    if precision == "fp16":
        assert not {"Copy", "Copies"} & {s.params["op"]["kind"] for s in program.steps[1:]}
