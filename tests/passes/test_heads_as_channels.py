"""heads_as_channels: depthwise convolutions of heads that are part of the batch filter the channels of all heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.passes.view_chains import ViewChains

PASS = ViewChains()
FEATURES = 16


def heads_of(n: Net, batch: int, heads: int, positions: int, *, neighbors: bool = True) -> Value:
    """Heads (batch, heads, positions, features) of tokens. ``neighbors``: the heads of a token are neighbors in memory."""
    rows = n.matmul(n.input(batch, positions, 24), heads * FEATURES)
    if neighbors:
        return n.transposed(n.reshaped(rows, batch, positions, heads, FEATURES), 0, 2, 1, 3)
    return n.transposed(n.reshaped(rows, batch, positions, FEATURES, heads), 0, 3, 1, 2)


def pooled(
    batch: int = 2, heads: int = 3, size: tuple[int, ...] = (4, 6), *, token: bool = False, last: bool = True,
    group: bool = True, bias: bool = True, neighbors: bool = True,
) -> Graph:  # fmt: skip
    """Heads pooled by a depthwise convolution. ``last``: images are reshaped with channels last (timm), or first (torchvision)."""
    n = Net()
    count = 1
    for side in size:
        count *= side
    x = heads_of(n, batch, heads, count + token, neighbors=neighbors)
    x = n.sliced(x, 1, count + 1, 2) if token else x
    rank = len(size)
    if last:
        images = n.transposed(n.reshaped(x, batch * heads, *size, FEATURES), 0, rank + 1, *range(1, rank + 1))
    else:
        images = n.reshaped(n.transposed(x, 0, 1, 3, 2), batch * heads, FEATURES, *size)
    y = n.conv(images, FEATURES, 3, pads=1, strides=2, group=FEATURES if group else 1, bias=bias)
    y = n.transposed(n.reshaped(y, batch, heads, FEATURES, -1), 0, 1, 3, 2)
    return n.done(n.op("LayerNormalization", y, n.random(FEATURES), n.random(FEATURES)))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("size", [(4, 6), (2, 4, 6)])
def test_filters_are_repeated_for_each_head(size: tuple[int, ...], token: bool, last: bool) -> None:
    views = {} if token or last else {"chain_to_image": 1}
    rules = {"heads_as_channels": 1, **views}
    graph, _ = check_pass(PASS, pooled(size=size, token=token, last=last), changes=len(rules), rules=rules)
    (op,) = graph.of_kind("Conv")
    assert op.attrs.group == 3 * FEATURES
    assert op.outputs[0].type.dims[:2] == (2, 3 * FEATURES)


def test_nothing_is_copied() -> None:
    found = kinds(check_simulated(pooled(bias=False), "fp16", tolerance=1e-2))
    assert not {"Copy", "Layout", "Transpose"} & set(found)


@pytest.mark.parametrize(
    "graph",
    [
        lambda: pooled(batch=1),  # a view already
        lambda: pooled(heads=1),
        lambda: pooled(group=False),
        lambda: pooled(neighbors=False),
    ],
)
def test_others_stay(graph: Callable[[], Graph]) -> None:
    check_untouched(PASS, graph())
