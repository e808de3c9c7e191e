"""Bounds of magnitudes: they hold for the hardest inputs, and say nothing where inputs decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.unary import AlphaAttrs, LeakyReluAttrs
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.fuse_pointwise import FusePointwise
from optdnn.passes.support.magnitudes import Bound, magnitudes

Make = Callable[[Net, Value], Value]


def normed(n: Net, x: Value) -> Value:
    made: Value = n.op("LayerNormalization", x, n.positive(8), n.random(8), attrs=LayerNormAttrs(-1, 1e-5))
    return made


def unit(n: Net, x: Value) -> Value:
    made: Value = n.op("Tanh", x)
    return made


def _attention(n: Net, x: Value) -> Value:
    heads = [n.reshaped(n.op("MatMul", normed(n, x), n.random(8, 8)), 1, 2, 4, 4) for _ in range(3)]
    made: Value = n.op("Attention", *heads, attrs=AttentionAttrs())
    return made


BOUNDED: dict[str, Make] = {
    "layer norm": normed,
    "rms norm": lambda n, x: n.op("RMSNormalization", x, n.positive(8)),
    "norm of a plane": lambda n, x: n.op("LayerNormalization", x, n.positive(4, 8), attrs=LayerNormAttrs(-2, 1e-5)),
    "softmax": lambda n, x: n.op("Softmax", x),
    "product": lambda n, x: n.op("MatMul", normed(n, x), n.random(8, 6)),
    "gemm": lambda n, x: n.op("Gemm", n.op("Tanh", x), n.random(6, 8), n.random(6), attrs=GemmAttrs(0.5, 2.0, transB=True)),
    "gemm with one number": lambda n, x: n.op("Gemm", n.op("Tanh", x), n.random(8, 6, scale=0.1), n.const([9.0])),
    "norm with one number": lambda n, x: n.op("LayerNormalization", x, n.positive(8), n.const([9.0]), attrs=LayerNormAttrs()),
    "constant first": lambda n, x: n.op("MatMul", n.random(6, 4), normed(n, x)),
    "gelu": lambda n, x: n.op("Gelu", normed(n, x)),
    "swish": lambda n, x: n.op("Swish", normed(n, x), attrs=AlphaAttrs(1.5)),
    "leaky relu": lambda n, x: n.op("LeakyRelu", normed(n, x), attrs=LeakyReluAttrs(-3.0)),
    "elu": lambda n, x: n.op("Elu", normed(n, x), attrs=AlphaAttrs(4.0)),
    "clip": lambda n, x: n.op("Clip", x, -2.0, 3.0),
    "clip of a norm": lambda n, x: n.op("Clip", normed(n, x), 0.0),
    "clip with one end": lambda n, x: n.op("Clip", normed(n, x), None, 0.0),
    "sum": lambda n, x: n.op("Add", normed(n, x), n.random(8)),
    "scalar": lambda n, x: n.op("Add", normed(n, x), 5.0),
    "column": lambda n, x: n.op("Mul", normed(n, x), n.random(4, 1)),
    "gate": lambda n, x: n.op("Mul", normed(n, x), n.op("Sigmoid", x)),
    "quotient": lambda n, x: n.op("Div", normed(n, x), -0.25),
    "views": lambda n, x: n.transposed(n.reshaped(normed(n, x), 2, 2, 8), 2, 0, 1),
    "a part": lambda n, x: n.op("Split", normed(n, x), n.ints(3, 5), attrs=SplitAttrs(axis=-1), outputs=2)[1],
    "rows": lambda n, x: n.op("Gather", normed(n, x), n.ints(2, 0)),
    "table": lambda n, x: n.op("Gather", n.random(9, 8), n.ints(2, 0)),
    "concat": lambda n, x: n.op("Concat", normed(n, x), n.op("Tanh", x), attrs=ConcatAttrs(-1)),
    "padding": lambda n, x: n.op("Pad", unit(n, x), n.ints(0, 1, 0, 1), n.const(-3.0)),
    "attention": _attention,
}  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_hold_for_all_inputs(name: str, fused: bool) -> None:
    """Also for rows with a single large element, which a norm makes as large as it can."""
    n = Net()
    y = BOUNDED[name](n, n.input(4, 8))
    graph = n.done(y)
    if fused:
        FuseEpilogue()(graph)
        FusePointwise()(graph)
    (out,) = (graph.op(i).inputs[0] for i in graph.outputs)
    bound = magnitudes(graph).get(out)
    assert bound is not None
    assert math.isfinite(bound.length)
    rng, most, length = np.random.default_rng(2), 0.0, 0.0
    for k in range(12):
        x = rng.standard_normal((4, 8)).astype(np.float32) * 10.0 ** (k % 4 - 1)
        if k > 5:
            x *= np.eye(4, 8, k % 5, dtype=np.float32) * 1e3
        (result,) = evaluate(graph, {"x": x}).values()
        most = max(most, float(np.abs(result).max()))
        length = max(length, float(np.linalg.norm(result, axis=-1).max()))
    assert most <= bound.most * 1.0001
    assert length <= bound.length * 1.0001
    assert bound.most <= 60 * most, "it is too far from what occurs to be of use"


UNBOUNDED: dict[str, Make] = {
    "an input": lambda n, x: n.op("Relu", x),
    "product of an input": lambda n, x: n.op("MatMul", x, n.random(8, 8)),
    "computed products": lambda n, x: n.op("MatMul", normed(n, x), n.transposed(normed(n, x), 1, 0)),
    "a computed scale": lambda n, x: n.op("LayerNormalization", x, n.input(8, name="s"), attrs=LayerNormAttrs()),
    "a sum with an input": lambda n, x: n.op("Add", normed(n, x), x),
    "one bound": lambda n, x: n.op("Clip", x, 0.0),
    "a computed divisor": lambda n, x: n.op("Div", normed(n, x), x),
    "a computed table": lambda n, x: n.op("Gather", x, n.ints(1)),
    "infinite constants": lambda n, x: n.op("Add", normed(n, x), n.const([np.inf] * 8)),
    "exp": lambda n, x: n.op("Exp", normed(n, x)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bounds(name: str) -> None:
    n = Net()
    y = UNBOUNDED[name](n, n.input(4, 8))
    assert magnitudes(n.done(y)).get(y) is None


def test_bounds_of_broadcast_operands_cover_the_whole_row() -> None:
    """A column of ones has rows of length 1; added to rows of eight elements, it has the length of eight ones."""
    n = Net()
    y = n.op("Add", n.op("Softmax", n.input(4, 8)), n.const(np.ones((4, 1))))
    assert magnitudes(n.done(y)).get(y) == Bound(2.0, 2.0 * math.sqrt(8))


def test_the_statistics_of_a_norm_have_no_bound() -> None:
    n = Net()
    y, mean, inverse = n.op(
        "LayerNormalization", n.input(4, 8), n.positive(8), n.random(8), attrs=LayerNormAttrs(), outputs=3
    )
    found = magnitudes(n.done(y, mean, inverse))
    assert [found.get(v) is None for v in (y, mean, inverse)] == [False, True, True]


def test_a_batch_of_unknown_size() -> None:
    n = Net()
    y: Any = n.op("Tanh", n.input(symbol("batch"), 8))
    assert magnitudes(n.done(y)).get(y) == Bound(1.0, math.sqrt(8))


def test_rows_of_unknown_size() -> None:
    n, width = Net(), symbol("width")
    x: Any = n.input(4, width)
    norm: Any = n.op("LayerNormalization", x, n.input(width, name="s"), attrs=LayerNormAttrs())
    y: Any = n.op("Tanh", x)
    found = magnitudes(n.done(norm, y))
    assert found.get(y) == Bound(1.0, math.inf)
    assert found.get(norm) is None


PLAIN_CONV = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1))


@pytest.mark.parametrize("bias", [False, True])
def test_given_inputs_bound_convolutions(bias: bool) -> None:
    """Without the arrays there is no bound."""
    n = Net()
    added = (n.const(np.array([0.5, -3.0])),) if bias else ()
    weights = np.zeros((2, 1, 1, 2), np.float32)
    weights[0], weights[1] = [[[2.0, -1.0]]], [[[0.5, 0.5]]]
    y: Any = n.op("Conv", n.input(1, 1, 4, 4), n.const(weights), *added, attrs=PLAIN_CONV)
    graph = n.done(y)
    assert magnitudes(graph).get(y) is None
    feed = np.full((1, 1, 4, 4), -4.0, np.float32)
    bound = magnitudes(graph, {"x": feed}).get(y)
    assert bound is not None
    assert bound.most == (15.0 if bias else 12.0)
    assert np.abs(evaluate(graph, {"x": feed})[graph.op(graph.outputs[0]).outputs[0].name]).max() <= bound.most
    feed[0, 0, 1, 1] = np.inf
    assert magnitudes(graph, {"x": feed}).get(y) is None


def test_computed_weights_do_not_bound_a_convolution() -> None:
    n = Net()
    y: Any = n.op("Conv", n.op("Tanh", n.input(1, 1, 4, 4)), n.input(2, 1, 1, 2, name="w"), attrs=PLAIN_CONV)
    assert magnitudes(n.done(y)).get(y) is None


def test_weights_without_elements() -> None:
    """Products without columns or rows, convolutions without filters: their results have no elements."""
    n = Net()
    x = unit(n, n.input(2, 4))
    empty = [
        n.op("MatMul", x, np.zeros((4, 0))),
        n.op("Gemm", x, np.zeros((4, 0))),
        n.op("MatMul", np.zeros((0, 2)), x),
    ]
    image = unit(n, n.input(1, 1, 4, 4, name="image"))
    empty.append(n.op("Conv", image, np.zeros((0, 1, 1, 1)), attrs=PLAIN_CONV))
    found = magnitudes(n.done(*empty))
    assert [found.get(v) for v in empty] == [Bound(0.0, 0.0)] * 4
