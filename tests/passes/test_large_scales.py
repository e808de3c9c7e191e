"""Values with a scale beyond fp16 (a quantized mask) are computed and rounded in fp32."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text
from support.simulated import lowered, simulate

from optdnn.passes.support.large_scales import large_scales

HEAD = '<ir_version: 9, opset_import: ["": 17]>\ng (float[4,8] x, bool[4,8] m) => (float[4,8] y)\n'


def graph_of(body: str, scale: float = 2.7e36, fill: float = -3.4e38) -> str:
    constants = f"float large = {{{scale}}}, float small = {{0.02}}, int8 zero = {{0}}, float fill = {{{fill}}}, float none = {{0}}"
    return f"{HEAD}<{constants}>\n{{ {body} }}"


MASK = "mask = Where(m, none, fill) "
ROUND = "q = QuantizeLinear({0}, large, zero) d = DequantizeLinear(q, large, zero) "
QUANTIZED = MASK + "s = Add(x, mask) " + ROUND.format("s") + "y = Softmax(d)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (QUANTIZED, {"mask", "s", "q", "d"}),
        (MASK + ROUND.format("mask") + "t = Relu(x) s = Add(t, d) y = Softmax(s)", {"mask", "q", "d"}),
        (
            MASK + "s = Add(x, mask) p = Softmax(s) " + ROUND.format("p") + "y = Relu(d)",
            {"q", "d"},
        ),  # softmax bounds it
        (MASK + "s = Add(x, mask) y = Softmax(s)", set()),  # it saturates, and nothing rounds it
        (MASK + "q = QuantizeLinear(mask, small, zero) d = DequantizeLinear(q, small, zero) y = Add(x, d)", set()),
    ],
)
def test_operators_with_large_scales(body: str, expected: set[str]) -> None:
    graph = from_text(graph_of(body))
    assert {graph.op(i).outputs[0].name for i in large_scales(graph).reasons} == expected


@pytest.mark.parametrize(("scale", "found"), [(511.0, False), (513.0, True)])
def test_the_largest_integer_decides(scale: float, found: bool) -> None:
    guards = large_scales(from_text(graph_of(QUANTIZED, scale)))
    assert bool(guards.reasons) == found
    assert bool(guards.saturates) == found


@pytest.mark.parametrize("added", ["mask", "d"])
def test_a_mask_in_the_epilogue_of_a_product_works_in_fp16(added: str) -> None:
    """The scores of an attention, whose product adds the mask."""
    mask = "nm = Cast<to=1>(m) n = Sub(one, nm) mask = Mul(n, fill) "
    body = "w = Transpose<perm=[1, 0]>(k) a = MatMul(x, w) "
    body += mask + (ROUND.format("mask") if added == "d" else "") + f"s = Add(a, {added}) "
    body += "r = QuantizeLinear(s, large, zero) t = DequantizeLinear(r, large, zero) y = Softmax(t)"
    text = (
        graph_of(body, 7.9e6, -1e9)
        .replace("bool[4,8] m)", "bool[4,8] m, float[8,8] k)")
        .replace("float none", "float one = {1}, float none")
    )
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 8)), "k": rng.standard_normal((8, 8))}
    m = rng.random((4, 8)) < 0.7
    m[:, 0] = True
    got = simulate(lowered(from_text(text), "fp16"), {**{k: v.astype(np.float32) for k, v in feeds.items()}, "m": m})[
        "y"
    ]
    np.testing.assert_allclose(got, m / m.sum(axis=1, keepdims=True), atol=1e-3)


def test_rows_that_are_masked_as_a_whole_have_equal_weights_in_fp16() -> None:
    """Restored values are at most 65504: infinities would become NaN in a softmax."""
    feeds = {"x": np.zeros((4, 8), np.float32), "m": np.arange(32).reshape(4, 8) >= 8}
    got = simulate(lowered(from_text(graph_of(QUANTIZED)), "fp16"), feeds)["y"]
    np.testing.assert_allclose(got, np.full((4, 8), 1 / 8), atol=1e-3)


def test_restored_values_saturate() -> None:
    graph = from_text(graph_of(ROUND.format("x") + "t = Relu(d) s = Sub(t, t) y = Cast<to=1>(s)", 1000.0))
    feeds = {"x": np.full((4, 8), 9e4, np.float32), "m": np.ones((4, 8), bool)}
    assert not simulate(lowered(graph, "fp16"), feeds)["y"].any()


def test_a_mask_whose_product_is_bounded_is_not_concerned() -> None:
    graph = from_text(
        graph_of("mask = Where(m, none, fill) s = Add(x, mask) t = Tanh(s) " + ROUND.format("t") + "y = Relu(d)")
    )
    assert {graph.op(i).outputs[0].name for i in large_scales(graph).reasons} == {"q", "d"}


def test_a_quantized_mask_works_in_fp16() -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 8)).astype(np.float32), "m": rng.random((4, 8)) < 0.7}
    feeds["m"][:, 0] = True
    got = simulate(lowered(from_text(graph_of(QUANTIZED)), "fp16"), feeds)["y"]
    expected = feeds["m"] / feeds["m"].sum(axis=1, keepdims=True)  # all scores are rounded to 0
    np.testing.assert_allclose(got, expected, atol=1e-3)
