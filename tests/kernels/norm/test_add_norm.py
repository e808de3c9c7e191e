"""add_norm: a sum that several normalizations read. test_sequence.py checks the kernel's numbers."""

from __future__ import annotations

import pytest
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph


def branches(norms: int) -> Graph:
    """A parallel block: attention and perceptron have norms of their own of one residual stream (Falcon)."""
    n = Net()
    x = n.op("Add", n.op("Softmax", n.input(2, 6, 48)), n.op("Softmax", n.input(2, 6, 48, name="y")))
    return n.done(
        *(n.op("Neg", n.matmul(n.op("RMSNormalization", x, n.positive(48)), 16)) for _ in range(norms)), n.op("Sin", x)
    )


@pytest.mark.parametrize("norms", [1, 2, 3])
def test_the_first_norm_of_a_sum_shares_its_launch(norms: int) -> None:
    program = check_simulated(branches(norms))
    found = [s.params["op"]["kind"] for s in program.steps]
    assert found.count("AddNorm") == 1
    assert found.count("RMSNormalization") == norms - 1
    assert "Add" not in found
