"""Refusals of the tactics of reductions, with their reasons."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_not_taken, lowered

from optdnn.ops.table import OPDEFS


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("ReduceL2", "it does not add squares of int32: they overflow"),
        ("ReduceLogSumExp", "it does not compute exponentials of int32"),
    ],
)
def test_sums_of_integers_that_the_kernel_does_not_compute(kind: str, because: str) -> None:
    n = Net()
    program = lowered(n.done(n.op(kind, n.input(4, 8, dtype=np.int32))), no_cubins=True)
    (row,) = program.meta["host"]["operators"]
    assert because in row["why"]


def test_many_threads_side_by_side_need_no_blocks() -> None:
    n = Net()
    graph = n.done(n.op("ArgMax", n.input(64, 600, 128), attrs=OPDEFS["ArgMax"].attrs(1)))
    check_not_taken(graph, "arg_block", "one thread per output is enough", no_cubins=True)


def test_more_elements_than_32_bits_count() -> None:
    n = Net()
    program = lowered(n.done(n.op("ReduceSum", n.input(2, 1 << 30))), no_cubins=True)
    (row,) = program.meta["host"]["operators"]
    assert "more elements than a kernel counts" in row["why"]
