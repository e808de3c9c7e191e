"""added_positions: products of sums with constant positions become products, with the products of other terms."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.added_positions import AddedPositions

TOKENS, WIDTH = 6, 16


def biased(n: Net, x: Value, width: int = WIDTH) -> Value:
    return n.op("Add", n.matmul(x, width), n.random(width))


def projections(n: Net, batch: int = 1, *, rows: int = TOKENS, width: int = WIDTH, bias: bool = True) -> list[Value]:
    """Queries and keys of x with positions, values of x, and x, which is the shortcut."""
    x = n.op("Relu", n.input(batch, TOKENS, WIDTH))
    y = n.op("Add", n.random(1, rows, WIDTH), x)
    made = [biased(n, v, width) if bias else n.matmul(v, width) for v in (y, y, x)]
    return [*made, x]


def done(n: Net, values: list[Value]) -> Graph:
    return n.done(*(n.op("Tanh", v) for v in values))


@pytest.mark.parametrize("bias", [True, False])
def test_queries_keys_and_values_are_one_product(bias: bool) -> None:
    n = Net(np.float64)
    graph = done(n, projections(n, bias=bias))
    after, _ = check_pass(
        AddedPositions(), graph, changes=1, kinds={"MatMul": 1, "Add": 1, "Split": 1, "Relu": 1, "Tanh": 4}
    )
    (product,) = after.of_kind("MatMul")
    assert product.outputs[0].type.dims == (1, TOKENS, 3 * WIDTH)


def test_a_query_alone_needs_no_split() -> None:
    n = Net(np.float64)
    x = n.op("Relu", n.input(2, TOKENS, WIDTH))
    y = n.matmul(n.op("Add", x, n.random(2, TOKENS, WIDTH)), 5)
    check_pass(AddedPositions(), done(n, [y, x]), changes=1, kinds={"MatMul": 1, "Add": 1, "Relu": 1, "Tanh": 2})


def test_what_is_added_to_a_product_is_no_bias() -> None:
    """An addition of another tensor, and of rows, stays behind the product."""
    n = Net(np.float64)
    q, k, v, x = projections(n, bias=False)
    graph = done(
        n, [n.op("Add", q, n.random(TOKENS, WIDTH)), n.op("Add", k, n.random(1, 1, TOKENS, WIDTH)), n.op("Add", v, x)]
    )
    check_pass(AddedPositions(), graph, changes=1, kinds={"MatMul": 1, "Add": 4, "Split": 1, "Relu": 1, "Tanh": 3})


def with_reader(n: Net) -> Graph:
    x = n.op("Relu", n.input(1, TOKENS, WIDTH))
    y = n.op("Add", x, n.random(TOKENS, WIDTH))
    return done(n, [n.matmul(y, WIDTH), y, x])


def test_refusals() -> None:
    n = Net(np.float64)
    check_refused(AddedPositions(), with_reader(n), because="readers that are no products")
    n = Net(np.float64)
    check_refused(AddedPositions(), done(n, projections(n, 2)), because="repeated along the batch")
    n = Net(np.float64)
    check_refused(AddedPositions(), done(n, projections(n, width=12)), because=r"\[12, 12, 12\] columns wide")
    n = Net(np.float64)
    x = n.op("Relu", n.input(1, 1 << 14, 8))
    wide = n.matmul(n.op("Add", x, n.random(1 << 14, 8)), 512)
    check_refused(AddedPositions(), done(n, [wide, x]), because="larger than what the addition moves")


def test_other_sums_stay() -> None:
    n = Net(np.float64)
    check_untouched(AddedPositions(), done(n, projections(n, rows=1)))  # a bias
    n = Net(np.float64)
    x = n.op("Relu", n.input(1, TOKENS, WIDTH))
    check_untouched(
        AddedPositions(), done(n, [n.matmul(n.op("Add", x, n.random(TOKENS, WIDTH)), 8)])
    )  # relu may add it
    n = Net(np.float64)
    x = n.input(1, TOKENS, WIDTH)
    check_untouched(AddedPositions(), done(n, [n.matmul(n.op("Add", x, n.input(1, TOKENS, WIDTH, name="p")), 8), x]))


def encoder(n: Net) -> Graph:
    """The attention of an encoder's layer in DETR."""
    q, k, v, x = projections(n, width=32)
    heads = [
        n.op("Transpose", n.op("Reshape", y, n.ints(1, TOKENS, 2, 16)), attrs=TransposeAttrs((0, 2, 1, 3)))
        for y in (q, k, v)
    ]
    y = n.op("Attention", *heads, attrs=AttentionAttrs(scale=0.25))
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(1, TOKENS, 32))
    return n.done(n.op("Softmax", n.op("Add", x, biased(n, y))))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_launches_of_an_encoder(precision: str) -> None:
    found = kinds(check_simulated(encoder(Net()), precision))
    assert found[:-1] == ["Pointwise", "Conv", "Attention", "Conv"], "the first one is the Relu"
