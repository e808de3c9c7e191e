"""Repetitions of one element are views, and elements of stacks are the stacked tensors."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.canonicalize import Canonicalize


def test_a_tile_of_one_element_is_an_expand() -> None:
    n = Net(np.float64)
    graph = n.done(n.op("Exp", n.op("Tile", n.input(2, 1, 3, 1), n.ints(1, 4, 1, 5))))
    after, _ = check_pass(Canonicalize(), graph, changes=1, rules={"tile_is_expand": 1}, kinds={"Expand": 1, "Exp": 1})
    assert [op.outputs[0].type.dims for op in after.of_kind("Expand")] == [(2, 4, 3, 5)]


def test_a_tile_of_an_unknown_size_keeps_it() -> None:
    n = Net(np.float64)
    graph = n.done(n.op("Exp", n.op("Tile", n.input(symbol("n"), 1, 3), n.ints(1, 4, 1))))
    check_pass(Canonicalize(), graph, changes=1, rules={"tile_is_expand": 1}, kinds={"Expand": 1, "Exp": 1})


@pytest.mark.parametrize("repeats", [(1, 1, 2), (0, 1, 1)])
def test_other_tiles_stay(repeats: tuple[int, ...]) -> None:
    n = Net(np.float64)
    check_untouched(Canonicalize(), n.done(n.op("Exp", n.op("Tile", n.input(1, 1, 3), n.ints(*repeats)))))


def layers(n: Net, *widths: int) -> Value:
    """The results of a decoder's layers, side by side along axis 1."""
    parts = [n.op(("Tanh", "Exp")[k % 2], n.input(2, w, 4, name=f"x{k}")) for k, w in enumerate(widths)]
    return n.op("Concat", *parts, attrs=ConcatAttrs(1))


def element(n: Net, x: Value, *at: int, axis: int = 1) -> Value:
    index = n.ints(*at) if len(at) > 1 else n.const(at[0], np.int64)
    return n.op("Sin", n.op("Gather", x, index, attrs=GatherAttrs(axis)))


@pytest.mark.parametrize(("at", "kind"), [(0, "Tanh"), (-1, "Tanh"), (3, "Exp")])
def test_an_element_of_a_stack_is_its_part(at: int, kind: str) -> None:
    n = Net(np.float64)
    graph = n.done(element(n, layers(n, 1, 1, 1, 1, 1), at))
    check_pass(Canonicalize(), graph, changes=1, rules={"element_of_stack": 1}, kinds={kind: 1, "Reshape": 1, "Sin": 1})


def test_an_element_beside_wider_parts() -> None:
    n = Net(np.float64)
    graph = n.done(element(n, layers(n, 3, 1), 3))
    check_pass(
        Canonicalize(), graph, changes=1, rules={"element_of_stack": 1}, kinds={"Exp": 1, "Reshape": 1, "Sin": 1}
    )


def test_all_elements_of_a_stack() -> None:
    n = Net(np.float64)
    stack = layers(n, 1, 1)
    graph = n.done(element(n, stack, 0), element(n, stack, 1))
    check_pass(
        Canonicalize(),
        graph,
        changes=2,
        rules={"element_of_stack": 2},
        kinds={"Exp": 1, "Tanh": 1, "Reshape": 2, "Sin": 2},
    )


def shared(n: Net) -> Graph:
    stack = layers(n, 1, 1)
    return n.done(element(n, stack, 0), n.op("Cos", stack))


def test_refusals() -> None:
    n = Net(np.float64)
    check_refused(Canonicalize(), n.done(element(n, layers(n, 2, 1), 1)), because="has further elements")
    check_refused(Canonicalize(), shared(Net(np.float64)), because="readers of other kinds")


def test_other_selections_stay() -> None:
    n = Net(np.float64)
    stack = layers(n, 1, 1)
    check_untouched(Canonicalize(), n.done(element(n, stack, 0, 1), element(n, stack, 2, axis=2)))


def test_layers_that_nothing_reads_are_not_computed() -> None:
    n = Net()
    x = n.input(1, 6, 16)
    logits = []
    for _ in range(3):
        x = n.op("Relu", n.matmul(x, 16))
        logits.append(n.op("Unsqueeze", n.matmul(x, 8), n.ints(1)))
    stack = n.op("Concat", *logits, attrs=ConcatAttrs(1))
    graph = n.done(n.op("Gather", stack, n.const(-1, np.int64), attrs=GatherAttrs(1)))
    found = kinds(check_simulated(graph, "fp16"))
    assert found.count("SeparableConv") == 2, "three layers and one head, two products per launch"
    assert not {"Conv", "MatMul"} & set(found)
    assert "Concat" not in found
