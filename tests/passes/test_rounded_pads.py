"""canonicalize_integers: zeros around a rounded image become the pads of the operators that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.quantized_nets import QNet
from support.simulated import check_simulated, kinds

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.pool import AveragePoolAttrs, MaxPoolAttrs
from optdnn.ops.quant import DequantizeAttrs
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.integers import CanonicalizeIntegers

CANONICAL = CanonicalizeIntegers()
AROUND = (0, 0, 0, 1, 0, 0, 1, 2)


def padded(n: QNet, x: Value, pads: Sequence[int] = AROUND, filler: Any = None, mode: str = "constant") -> Value:
    more = [] if filler is None else [n.const(filler, n.graph.type(x).dtype)]
    return n.op("Pad", x, n.ints(*pads), *more, attrs=PadAttrs(mode))


def pooled(n: QNet, x: Value, kind: str = "AveragePool", **own: Any) -> Value:
    made = {"AveragePool": AveragePoolAttrs, "MaxPool": MaxPoolAttrs}[kind]
    return n.op(
        kind, x, attrs=made(**{"kernel_shape": (3, 3), "strides": (2, 2), "pads": (0,) * 4, "dilations": (1, 1), **own})
    )


def network(after: str = "conv", zero: int = 5, *, integers: bool = False, scale: float = 0.04, **pad: Any) -> Graph:
    """An image that is padded and rounded. ``integers``: its integers are padded, as in the QOperator format."""
    n = QNet()
    x = n.fake(n.input(2, 4, 9, 8), 0.03, 7)
    if integers:
        y = n.dq(padded(n, n.q(x, scale, zero), filler=pad.pop("filler", zero), **pad), scale, zero)
    else:
        y = n.fake(padded(n, x, **pad), scale, zero)
    z = n.qconv(y, 8, pads=(0, 1, 0, 1), stride=2) if after == "conv" else pooled(n, y)
    return n.done(z, *([n.op("Tanh", y)] if after == "both" else []))


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize(("after", "kind"), [("conv", "Conv"), ("pool", "AveragePool")])
def test_the_reader_pads(after: str, kind: str, integers: bool) -> None:
    """A promoted graph converts floats to fp32 before it rounds them: there, the rule finds only Pads of integers."""
    graph = network(after, integers=integers)
    count = {"QuantizeLinear": 2, "DequantizeLinear": 3 if after == "conv" else 2, "Pad": 1, kind: 1}
    made, _ = check_pass(
        CANONICAL, graph, changes=1, rules={"pad_after_rounding": 1}, kinds=count, promoted_changes=int(integers)
    )
    feeds = random_feeds(graph, 1)
    for a, b in zip(evaluate(graph, feeds).values(), evaluate(made, feeds).values(), strict=True):
        np.testing.assert_array_equal(a, b)
    (pad,) = made.of_kind("Pad")
    assert made.op(pad.inputs[0]).kind == "DequantizeLinear"  # type: ignore[arg-type]
    assert [u.kind for u in made.users(pad.value)] == [kind]
    Canonicalize()(made)
    (reader,) = made.of_kind(kind)
    assert not made.of_kind("Pad")
    assert reader.attrs.pads == ((0, 2, 1, 3) if after == "conv" else (0, 1, 1, 2))


def test_one_rounding_remains_if_both_are_to_the_same_integers() -> None:
    graph = network(scale=0.03, zero=7)
    check_pass(CANONICAL, graph, changes=2, rules={"pad_after_rounding": 1, "requantize_same": 1}, promoted_changes=0)


def test_no_launch_pads() -> None:
    n = QNet()
    x = n.fake(n.qconv(n.fake(n.input(2, 8, 9, 7), 0.03), 16), 0.02)
    y = n.fake(padded(n, x), 0.02)
    program = check_simulated(n.done(n.qconv(y, 8, pads=(0,) * 4, stride=2)), "fp16")
    assert "Pad" not in kinds(program)


def blocked() -> Graph:
    n = QNet()
    stored = n.op("Cast", n.input(2, 4, 6, 6), attrs=CastAttrs(np.dtype(np.int8)))
    y = n.op("DequantizeLinear", padded(n, stored), n.const(np.full(4, 0.1), np.float32), attrs=DequantizeAttrs(1))
    return n.done(n.qconv(y, 8))


def shared() -> Graph:
    n = QNet()
    y = padded(n, n.input(2, 4, 9, 8))
    return n.done(n.qconv(n.fake(y, 0.03), 8), n.op("Tanh", y))


def other_scale() -> Graph:
    n = QNet()
    return n.done(n.qconv(n.dq(n.q(padded(n, n.input(2, 4, 9, 8)), 0.03), 0.04), 8))


def largest() -> Graph:
    n = QNet()
    return n.done(pooled(n, n.fake(padded(n, n.input(2, 4, 9, 8)), 0.03), "MaxPool"))


def all_padding() -> Graph:
    n = QNet()
    y = n.fake(padded(n, n.input(2, 4, 9, 8), (0, 0, 3, 0, 0, 0, 0, 0)), 0.03)
    return n.done(pooled(n, y))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (network("both"), "does not absorb"),
        (network(filler=1.0), "pads with 1, a convolution pads with zeros"),
        (network(integers=True, filler=3), "pads with 3, a convolution pads with zeros"),
        (network(mode="edge"), "pads by edge"),
        (network(pads=(0, 1, 0, 0, 0, 3, 0, 0)), "pads the batch or the channels"),
        (blocked(), "several scales"),
        (shared(), "has another reader"),
        (other_scale(), "another scale or zero point than the rounding"),
        (largest(), "does not absorb"),
        (all_padding(), "nothing but padding"),
    ],
    ids=["read twice", "ones", "integer", "mode", "channels", "scales", "shared", "scale", "largest", "all padding"],
)  # fmt: skip
def test_pads_that_stay(graph: Graph, because: str) -> None:
    check_refused(CANONICAL, graph, because=because, rule="pad_after_rounding")
