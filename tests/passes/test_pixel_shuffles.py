"""pixel_shuffles: the filters before a pixel shuffle are ordered by their pixels."""

from __future__ import annotations

import numpy as np
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import BlockAttrs
from optdnn.passes.pixel_shuffles import PixelShuffles


def shuffled(n: Net, x: Value, mode: str = "CRD") -> Value:
    return n.op("DepthToSpace", x, attrs=BlockAttrs(2, mode))


def image(n: Net) -> Value:
    return n.input(2, 8, 5, 6)


def modes(graph: Graph) -> list[str]:
    return [op.attrs.mode for op in graph.of_kind("DepthToSpace")]


def test_a_convolution_before_a_shuffle() -> None:
    n = Net(np.float64)
    before = n.done(shuffled(n, n.conv(image(n), 12, bias=True)))
    graph, _ = check_pass(PixelShuffles(), before, changes=1, kinds={"Conv": 1, "DepthToSpace": 1})
    assert modes(graph) == ["DCR"]
    (one,), (other,) = (g.of_kind("Conv") for g in (before, graph))
    old, new = (g.constant_value(c.inputs[1]) for g, c in ((before, one), (graph, other)))
    assert old is not None
    assert new is not None
    np.testing.assert_array_equal(new[[0, 3, 6, 9]], old[:4])
    assert other.src == one.src


def test_activations_between_them_stay() -> None:
    n = Net(np.float64)
    y = n.op("Sigmoid", n.op("Relu", n.conv(image(n), 8, 1, pads=0)))
    kinds = {"Conv": 1, "Relu": 1, "Sigmoid": 1, "DepthToSpace": 1}
    check_pass(PixelShuffles(), n.done(shuffled(n, y)), changes=1, kinds=kinds)


def test_refusals() -> None:
    n = Net(np.float64)
    check_refused(PixelShuffles(), n.done(shuffled(n, n.conv(image(n), 8, group=2))), because="has groups")
    n = Net(np.float64)
    y = n.conv(image(n), 8)
    check_refused(PixelShuffles(), n.done(shuffled(n, y), n.op("Relu", y)), because="also read in their own order")
    n = Net(np.float64)
    bias = n.op("Relu", n.input(8, name="b"))
    y = n.op("Conv", image(n), n.random(8, 8, 1, 1), bias, attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1)))
    check_refused(PixelShuffles(), n.done(shuffled(n, y)), because="bias .* is not constant")


def test_a_convolution_with_stages() -> None:
    from optdnn.passes.fuse_epilogue import FuseEpilogue

    n = Net(np.float64)
    graph = n.done(shuffled(n, n.op("Relu", n.conv(image(n), 8))))
    FuseEpilogue()(graph)
    check_refused(PixelShuffles(), graph, because="has stages")


def test_networks_without_a_candidate() -> None:
    n = Net(np.float64)
    check_untouched(PixelShuffles(), n.done(shuffled(n, n.conv(image(n), 8), "DCR")))
    n = Net(np.float64)
    check_untouched(PixelShuffles(), n.done(shuffled(n, n.op("Relu", image(n)))))


def test_a_network_on_the_gpu() -> None:
    n = Net()
    y = shuffled(n, n.op("Relu", n.conv(image(n), 16, bias=True)))  # with 32 channels, no copy is needed
    graph = n.done(n.conv(y, 8))
    program = lowered(graph, "fp16", target="cuda:sm_90a", no_cubins=True)
    moves = [s.params for s in program.steps if s.params.get("tactic") == "copy"]
    (move,) = [m for m in moves if len(m["reads"][0][2]) == 6]
    assert move["reads"][0][3][1] == move["writes"][0][3][1] == 1, "channels are neighbors before and after"
    check_simulated(graph, "fp16")
