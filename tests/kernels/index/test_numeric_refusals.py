"""Numeric operators with simple kernels that run on the host in some forms, and the reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.ir.graph import Graph
from optdnn.ops.signal import DFTAttrs


def axis_given_late() -> Graph:
    n = Net()
    return n.done(n.op("DFT", n.input(2, 8, 8, 1), None, n.input(name="axis", dtype=np.int64), attrs=DFTAttrs()))


def of_no_elements() -> Graph:
    """The scale and the zero point have elements."""
    n = Net()
    made: Any = n.op("DynamicQuantizeLinear", n.input(0), outputs=3)
    return n.done(*made)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (axis_given_late, "its axis is not known when the engine is built"),
        (of_no_elements, "it has no elements"),
    ],
)
def test_operators_that_run_on_the_host(graph: Callable[[], Graph], because: str) -> None:
    (row,) = lowered(graph()).meta["host"]["operators"]
    assert because in row["why"]


def test_sums_of_products_are_not_predicted_as_those_of_tensor_cores() -> None:
    n = Net()
    a, c = n.input(512, 512, dtype=np.uint8), n.input(512, 512, name="c", dtype=np.uint8)
    graph = n.done(n.op("MatMulInteger", a, c))
    program: Any = lowered(graph, "fp32")
    ((seconds, least, _),) = program.meta["step_times"]["steps"]
    assert program.steps[0].params["tactic"] == "each"
    assert seconds > 100 > 10 * least  # with products of 512^3
