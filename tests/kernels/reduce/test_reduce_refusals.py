"""Reductions of integers that run on the host, and why."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("ReduceL2", "it adds no squares of int32, which overflow"),
        ("ReduceLogSumExp", "it takes no exponentials of int32"),
    ],
)
def test_sums_of_integers_that_the_kernel_does_not_compute(kind: str, because: str) -> None:
    n = Net()
    program = lowered(n.done(n.op(kind, n.input(4, 8, dtype=np.int32))), no_cubins=True)
    (row,) = program.meta["host"]["operators"]
    assert because in row["why"]
