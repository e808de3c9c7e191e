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
    program = lowered(n.done(n.op(kind, n.input(4, 8, dtype=np.int32))))
    (row,) = program.meta["host"]["operators"]
    assert because in row["why"]


def test_many_threads_side_by_side_need_no_blocks() -> None:
    n = Net()
    graph = n.done(n.op("ArgMax", n.input(64, 600, 128), attrs=OPDEFS["ArgMax"].attrs(1)))
    check_not_taken(graph, "arg_block", "one thread per output is enough", no_cubins=True)


def test_more_elements_than_32_bits_count() -> None:
    n = Net()
    program = lowered(n.done(n.op("ReduceSum", n.input(2, 1 << 30))))
    (row,) = program.meta["host"]["operators"]
    assert "more elements than a kernel counts" in row["why"]


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "pads", "because"),
    [
        (24, 8, 4, 0, "its windows overlap, or leave elements out"),
        (26, 8, 8, 0, "its windows do not divide the image"),
        (24, 8, 8, 4, "its windows do not divide the image"),
        (21, 7, 7, 0, "one thread loads windows of up to 49 elements at once"),
    ],
)
def test_pools_that_are_no_reductions_of_parts_of_axes(
    size: int, kernel: int, strides: int, pads: int, because: str
) -> None:
    n = Net()
    graph = n.done(n.average_pool(n.input(1, 8, size, size), kernel, strides=strides, pads=pads))
    check_not_taken(graph, "reduce", because, no_cubins=True)


def test_dilated_windows() -> None:
    n = Net()
    attrs = OPDEFS["MaxPool"].attrs((8, 8), (8, 8), (0, 0, 0, 0), (2, 2), False)
    check_not_taken(
        n.done(n.op("MaxPool", n.input(1, 8, 32, 32), attrs=attrs)), "reduce", "leave elements out", no_cubins=True
    )
