"""joined_rows: the order of parts that products read, and parts that differ only by numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.joined_rows import JoinedRows


def joined(widths: Sequence[int], reader: str = "MatMul", rows: int = 5) -> Graph:
    """A Concat of parts of these widths, which products read."""
    n = Net(np.float64)
    x = n.op("Concat", *(n.op("Tanh", n.input(rows, w)) for w in widths), attrs=ConcatAttrs(1))
    depth = sum(widths)
    if reader == "Gemm":
        y = n.op("Gemm", x, n.random(7, depth), n.random(7), attrs=GemmAttrs(transB=True))
        return n.done(y, n.matmul(x, 3))
    if reader == "computed":
        return n.done(n.op("MatMul", x, n.input(depth, 4)))
    return n.done(n.matmul(x, 6), *([x] if reader == "output" else []))


@pytest.mark.parametrize("reader", ["MatMul", "Gemm"])
@pytest.mark.parametrize("widths", [(3, 16), (5, 8, 2, 24), (8, 3, 16)])
def test_aligned_parts_come_first(widths: tuple[int, ...], reader: str) -> None:
    changed, _ = check_pass(JoinedRows(), joined(widths, reader), changes=1)
    (concat,) = changed.of_kind("Concat")
    found = [changed.type(v).static_shape[1] for v in concat.inputs if v is not None]
    assert found == sorted(widths, key=lambda w: w % 8 != 0)


@pytest.mark.parametrize("reader", ["output", "computed"])
def test_other_readers_keep_the_order(reader: str) -> None:
    check_refused(JoinedRows(), joined((3, 16), reader), because="read by more than products with constant matrices")


@pytest.mark.parametrize("widths", [(16, 3), (8, 24), (3, 5)])
def test_parts_that_lie_well_stay(widths: tuple[int, ...]) -> None:
    check_untouched(JoinedRows(), joined(widths))


def encoded(
    functions: Sequence[str] = ("Sin", "Cos"), count: int = 4, shape: tuple[int, ...] = (2, 6, 3), *, first: bool = True
) -> Graph:
    """A Concat of a position and of functions of its multiples. "Pow": with two numbers."""
    n = Net(np.float64)
    x = n.op("Tanh", n.input(*shape))
    parts: list[Value] = [x] if first else []
    for k in range(count):
        scaled = n.op("Mul", x, n.const(1.5 + k))
        for f in functions:
            parts.append(n.op("Add", n.op("Sin", scaled), n.const(0.5)) if f == "moved" else n.op(f, scaled))
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(-1)))


@pytest.mark.parametrize(
    ("functions", "count", "shape", "first"),
    [(("Sin", "Cos"), 4, (2, 6, 3), True), (("Sin",), 3, (5, 2), False), (("moved", "Exp", "Cos"), 5, (4, 1), True)],
)
def test_parts_that_differ_by_numbers_are_one(
    functions: tuple[str, ...], count: int, shape: tuple[int, ...], first: bool
) -> None:
    changed, _ = check_pass(JoinedRows(), encoded(functions, count, shape, first=first), changes=1)
    assert len(list(changed.of_kind("Mul"))) == 1
    assert len(list(changed.of_kind("Cos"))) == ("Cos" in functions)


def other(kind: str) -> Graph:
    n = Net(np.float64)
    x = n.op("Tanh", n.input(4, 3))
    if kind == "sources":
        parts = [n.op("Sin", n.op("Mul", n.input(4, 3), n.const(1.5 + k))) for k in range(4)]
    elif kind == "ranks":
        row = n.op("Tanh", n.input(3))
        parts = [n.op("Add", n.op("Mul", x, n.const(2.0 + k)), row) for k in range(4)]
    else:
        parts = [n.op("Mul", x, n.random(4, 3)) for _ in range(4)]
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1)))


@pytest.mark.parametrize("kind", ["sources", "ranks", "tensors"])
def test_parts_of_other_tensors_stay(kind: str) -> None:
    check_untouched(JoinedRows(), other(kind))


def test_two_repetitions_stay() -> None:
    check_untouched(JoinedRows(), encoded(count=2))


def test_rows_of_products_lie_where_they_are_joined() -> None:
    """Rows of 67 elements begin at multiples of eight: the product before them writes there, and the one after them reads them."""
    n = Net()
    rows = n.matmul(n.op("Tanh", n.input(2048, 24)), 64)
    x = n.op("Concat", n.op("Tanh", n.input(2048, 3, name="x")), rows, attrs=ConcatAttrs(1))
    steps = check_simulated(n.done(n.matmul(x, 16)), "fp16").steps
    assert "Copy" not in [s.params["op"]["kind"] for s in steps]
