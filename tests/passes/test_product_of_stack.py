"""product_of_stack: products of stacked columns or rows become weighted sums."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import PassContext, RulePass
from optdnn.passes.rules.stacks import MOST_PARTS, product_of_stack

CUDA = PassContext(target="cuda:sm_90a")


class Stacks(RulePass):
    name = "stacks"
    rules = (product_of_stack,)


def stack(n: Net, count: int, axis: int, *, wide: bool = False) -> Value:
    """Stacked results of experts, (2, 5, count), or (2, count, 5) along axis 1. ``wide``: the last part has two columns."""
    parts = [n.op("Unsqueeze", n.op("Exp", n.input(2, 5, name=f"x{k}")), n.ints(axis)) for k in range(count)]
    if wide:
        parts[-1] = n.op("Concat", parts[-1], parts[-1], attrs=ConcatAttrs(axis))
    return n.op("Concat", *parts, attrs=ConcatAttrs(axis))


def mixture(
    axis: int = 2, *, count: int = 3, columns: int = 1, constant: bool = False, readers: int = 1, other: bool = False,
    wide: bool = False,
) -> Graph:  # fmt: skip
    """The mixture of experts of ``readers`` tasks. ``other``: a further operator reads the stack."""
    n = Net(np.float64)
    experts, found = stack(n, count, axis, wide=wide), []
    for k in range(readers):
        shape = (2, count + wide, columns) if axis == 2 else (2, columns, count + wide)
        gate = n.random(*shape) if constant else n.input(*shape, name=f"gate{k}")
        found.append(n.op("MatMul", *((experts, gate) if axis == 2 else (gate, experts))))
    return n.done(*found, *([n.op("Sin", experts)] if other else []))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_weighted_sum(axis: int, constant: bool, readers: int) -> None:
    graph, _ = check_pass(Stacks(), mixture(axis, constant=constant, readers=readers), changes=readers, context=CUDA)
    assert graph.kinds() == {"Exp": 3, "Unsqueeze": 3, "Mul": 3 * readers, "Split": readers, "Add": 2 * readers}


def test_weights_without_a_batch() -> None:
    n = Net(np.float64)
    check_pass(Stacks(), n.done(n.op("MatMul", stack(n, 2, 2), n.random(2, 1))), changes=1, context=CUDA)


def test_many_parts_and_stacks_that_are_read_stay() -> None:
    check_refused(Stacks(), mixture(count=MOST_PARTS + 1), because=f"{MOST_PARTS + 1} tensors are", context=CUDA)
    check_refused(Stacks(), mixture(other=True), because="has other readers", context=CUDA)


@pytest.mark.parametrize("graph", [mixture(columns=2), mixture(1, columns=2), mixture(wide=True)])
def test_products_with_matrices_stay(graph: Graph) -> None:
    check_untouched(Stacks(), graph, context=CUDA)


def test_other_targets_keep_the_product() -> None:
    check_untouched(Stacks(), mixture())
    n = Net(np.float64)
    check_untouched(Stacks(), n.done(n.op("MatMul", stack(n, 3, 1), n.input(2, 5, 1, name="v"))), context=CUDA)


@pytest.mark.parametrize("axis", [1, 2])
def test_a_mixture_is_one_launch(axis: int) -> None:
    n = Net()
    gate = n.input(*((2, 3, 1) if axis == 2 else (2, 1, 3)), name="gate")
    experts = stack(n, 3, axis)
    found = kinds(check_simulated(n.done(n.op("MatMul", *((experts, gate) if axis == 2 else (gate, experts))))))
    assert not {"MatMul", "Copy", "Copies"} & set(found), found
