"""radix_sums: split attention reads groups of channels in place."""

from __future__ import annotations

from typing import Any

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.radix_sums import RadixSums


def groups(n: Net, x: Value, radix: int) -> Value:
    images, channels, *size = n.dims(x)
    return n.op("Reshape", x, n.ints(images, radix, channels // radix, *size))


def sum_of(n: Net, x: Value, axis: int = 1, keepdims: bool = False) -> Value:
    return n.op("ReduceSum", x, n.ints(axis), attrs=ReduceAttrs(keepdims=keepdims))


def attention(
    radix: int = 2, *, product: bool = True, mixed: bool = True, images: int = 2, turned: bool = False, kernel: int = 1
) -> Graph:
    """As in ResNeSt: factors for each group, from the means of the sum of groups."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(images, 8, 7, 6), 16 * radix))
    wide = groups(n, x, radix)
    means = n.op("GlobalAveragePool", sum_of(n, wide))
    y = n.conv(means, 8, kernel, pads=kernel // 2, bias=True) if mixed else n.op("Tanh", means)
    gates = n.op("Sigmoid", n.conv(y, 16 * radix, 1, pads=0, bias=True))
    if not product:
        return n.done(n.conv(sum_of(n, wide), 8), gates)
    factors = groups(n, gates, radix)
    scaled = n.op("Mul", factors, wide) if turned else n.op("Mul", wide, factors)
    return n.done(n.conv(sum_of(n, scaled), 8, 1, pads=0))


@pytest.mark.parametrize("radix", [2, 3, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_split_attention(radix: int, turned: bool) -> None:
    rules = {"sum_of_groups": 1, "mean_of_groups": 1}
    graph, _ = check_pass(RadixSums(), attention(radix, turned=turned), changes=2, rules=rules)
    found = graph.kinds()
    assert "ReduceSum" not in found
    assert found["Mul"] == radix
    assert found["Add"] == radix - 1, "the convolution of the means has weights for each group"
    assert found["Conv"] == 4


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_convolution_of_the_means_repeats_its_weights(kernel: int) -> None:
    graph, _ = check_pass(RadixSums(), attention(kernel=kernel), changes=2)
    shapes = sorted(graph.constant_value(op.inputs[1]).shape for op in graph.of_kind("Conv"))  # type: ignore[union-attr]
    assert (8, 32, kernel, kernel) in shapes


def test_means_that_no_convolution_reads_are_added() -> None:
    graph, _ = check_pass(RadixSums(), attention(mixed=False), changes=2)
    assert graph.kinds()["Add"] == 2


def test_a_sum_of_groups_alone() -> None:
    n = Net()
    x = n.conv(n.input(2, 8, 7, 6), 32)
    graph, _ = check_pass(RadixSums(), n.done(n.op("Tanh", sum_of(n, groups(n, x, 2)))), changes=1)
    assert graph.kinds() == {"Add": 1, "Conv": 1, "Split": 1, "Tanh": 1}


def test_sums_that_something_else_reads_stay() -> None:
    n = Net()
    total = sum_of(n, groups(n, n.conv(n.input(2, 8, 7, 6), 32), 2))
    before = n.done(n.op("GlobalAveragePool", total), n.op("Tanh", total))
    graph, _ = check_pass(RadixSums(), before, changes=1)  # the sum, not the means
    assert graph.kinds()["Add"] == 1
    n = Net()
    x = n.conv(n.input(2, 8, 7, 6), 32)
    scaled = n.op("Mul", groups(n, x, 2), groups(n, n.op("GlobalAveragePool", x), 2))
    check_refused(RadixSums(), n.done(sum_of(n, scaled), n.op("Tanh", scaled)), because="have another reader")


def test_the_means_of_sums_that_something_else_reads() -> None:
    n = Net()
    total = sum_of(n, groups(n, n.conv(n.input(2, 8, 7, 6), 80), 5))
    check_untouched(RadixSums(), n.done(n.op("GlobalAveragePool", total)))  # five groups
    assert RadixSums.rules[1].match(*_shared_sum(), None).reason.endswith("have another reader")  # type: ignore


def _shared_sum() -> Any:
    n = Net()
    total = sum_of(n, groups(n, n.conv(n.input(2, 8, 7, 6), 32), 2))
    graph = n.done(n.op("GlobalAveragePool", total), n.op("Tanh", total))
    (pool,) = graph.of_kind("GlobalAveragePool")
    return graph, pool


def other(kind: str) -> Graph:
    n = Net()
    x = n.conv(n.input(2, 8, 7, 6), 32)
    wide = groups(n, x, 2)
    match kind:
        case "another axis":
            return n.done(n.op("Tanh", sum_of(n, wide, axis=2)))
        case "kept":
            return n.done(n.op("Tanh", sum_of(n, wide, keepdims=True)))
        case "other view":
            return n.done(n.op("Tanh", sum_of(n, n.op("Reshape", x, n.ints(2, 4, 8, 6, 7)))))
        case "whole factors":
            return n.done(n.op("Tanh", sum_of(n, n.op("Mul", wide, n.random(2, 2, 16, 7, 6)))))
        case _:
            return n.done(n.op("Tanh", sum_of(n, n.input(2, 2, 8, 7, 6, name="z"))), x)


@pytest.mark.parametrize("kind", ["another axis", "kept", "other view", "whole factors", "no view"])
def test_others_are_no_candidates(kind: str) -> None:
    check_untouched(RadixSums(), other(kind))


@pytest.mark.parametrize("images", [1, 3])
def test_one_launch_reads_the_groups(images: int) -> None:
    program = check_simulated(attention(images=images))
    assert "ReduceSum" not in kinds(program)
    (made,) = [
        step
        for step in program.steps
        if any(name.startswith("ReduceSum") for name in step.src) and len(step.inputs) == 2
    ]
    assert made.params["op"]["kind"] == "Pointwise"
