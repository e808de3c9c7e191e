"""Networks of reductions that include the pointwise operators before them (:mod:`optdnn.kernels.reduce.staged`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optdnn.ir.graph import Graph
from optdnn.ops import reduce, shape
from optdnn.ops.binary import CastAttrs
from optdnn.types import INT64
from support.net import Net, built

KINDS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
DROPPED = reduce.ReduceAttrs(False)


def _kinds(n: Net) -> list[Any]:
    x, y = n.input(3, 4, 7), n.input(3, 4, 7)
    made = [n.op("Exp", n.op("Mul", n.op("Add", x, 0.1 * i), y)) for i in range(len(KINDS))]
    return [n.op(f"Reduce{k}", one, n.ints(2)) for k, one in zip(KINDS, made, strict=True)]


def _pairs(n: Net) -> list[Any]:
    """The sum of gated attention: two factors that are repeated along different axes, and a third one."""
    a, b, c = n.input(2, 5, 1, 16), n.input(2, 1, 6, 16), n.input(2, 5, 6, 16)
    return [n.op("ReduceSum", n.op("Mul", n.op("Mul", a, b), c), n.ints(3), attrs=DROPPED)]


def _distances(n: Net) -> list[Any]:
    """Squares of differences of all pairs of points: no operand has the shape of the terms."""
    return [n.op("ReduceSumSquare", n.op("Sub", n.input(9, 1, 3), n.input(1, 11, 3)), n.ints(2), attrs=DROPPED)]


def _wide_rows(n: Net) -> list[Any]:
    """Rows of whole accesses of 16 bytes: a factor belongs to a row, an addend to a column, and long rows have several warps."""
    x, row, column = n.input(9, 320), n.input(9, 1), n.input(320)
    long = n.op("Mul", n.input(2, 5120, name="long"), n.input(2, 5120, name="other"))
    return [
        n.op("ReduceSum", n.op("Add", n.op("Mul", x, row), column), n.ints(1)),
        n.op("ReduceMax", n.op("Sub", x, row), n.ints(1), attrs=DROPPED),
        n.op("ReduceL2", long, n.ints(1)),
    ]


def _columns(n: Net) -> list[Any]:
    """Neighboring outputs are contiguous in memory. One factor is per row, one per column."""
    x, row, column = n.input(57, 16), n.input(57, 1), n.input(16)
    return [
        n.op("ReduceSum", n.op("Add", n.op("Mul", x, row), column), n.ints(0)),
        n.op("ReduceMax", n.op("Sub", x, row), n.ints(0), attrs=DROPPED),
    ]


def _images(n: Net) -> list[Any]:
    """An image channels-last, times a factor of each channel."""
    x, gate = n.op("Transpose", n.input(2, 6, 5, 16), attrs=shape.TransposeAttrs((0, 3, 1, 2))), n.input(2, 16, 1, 1)
    return [n.op("ReduceMean", n.op("Mul", x, gate), n.ints(2, 3))]


def _neighbors(n: Net) -> list[Any]:
    """The maxima over the neighbors of points (EdgeConv): the centers are in another order in memory than the neighbors."""
    near = n.op("Transpose", n.input(2, 9, 20, 16), attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    few = n.op("Transpose", n.input(2, 9, 3, 12, name="few"), attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    centers, others = n.input(2, 16, 9, 1, name="centers"), n.input(2, 12, 9, 1, name="others")
    return [
        n.op("ReduceMax", n.op("Relu", n.op("Add", near, centers)), n.ints(3), attrs=DROPPED),
        n.op("ReduceLogSumExp", n.op("Mul", few, others), n.ints(3)),
    ]


def _selected(n: Net) -> list[Any]:
    """A comparison selects the terms; the reduced axes are not adjacent."""
    x, y = n.input(4, 6, 5), n.input(4, 6, 1)
    return [n.op("ReduceSum", n.op("Where", n.op("Less", x, y), x, n.op("Neg", y)), n.ints(0, 2))]


def _sinkhorn(n: Net) -> list[Any]:
    """Logarithms of the sums of rows and of columns of scores. Each uses the result of the other step (SuperGlue)."""
    scores, u, v = n.input(33, 27), n.input(33, 1), n.input(27)
    wide = n.op("Sub", n.input(5, 640), n.input(5, 1))
    return [
        n.op("ReduceLogSumExp", n.op("Add", scores, v), n.ints(1), attrs=DROPPED),
        n.op("ReduceLogSumExp", n.op("Add", scores, u), n.ints(0), attrs=DROPPED),
        n.op("ReduceLogSumExp", wide, n.ints(1)),
    ]


def _counts(n: Net) -> list[Any]:
    """Integers: elements above a bound are counted, and sums of two tensors added."""
    x, k, m = n.input(6, 37), n.input(4, 6, dtype=INT64), n.input(4, 6, dtype=INT64)
    above = n.op("Cast", n.op("Greater", x, n.const(0.25)), attrs=CastAttrs(INT64))
    return [n.op("ReduceSum", above, n.ints(1), attrs=DROPPED), n.op("ReduceMax", n.op("Add", k, m), n.ints(0))]


CASES: dict[str, Callable[[Net], list[Any]]] = {
    "kinds": _kinds,
    "pairs": _pairs,
    "distances": _distances,
    "columns": _columns,
    "wide rows": _wide_rows,
    "images": _images,
    "sinkhorn": _sinkhorn,
    "neighbors": _neighbors,
    "selected": _selected,
    "counts": _counts,
}


def _shared(n: Net) -> list[Any]:
    x = n.op("Mul", n.input(4, 6), n.input(4, 6))
    return [n.op("ReduceSum", x, n.ints(1)), n.op("Transpose", x, attrs=shape.TransposeAttrs((1, 0)))]


def _many(n: Net) -> list[Any]:
    x, *others = [n.input(4, 6) for _ in range(8)]
    for y in others:
        x = n.op("Mul", x, y)
    return [n.op("ReduceSum", x, n.ints(1))]


REFUSED: dict[str, tuple[Callable[[Net], list[Any]], str]] = {
    "its operand is not the result of a pointwise operator": (
        lambda n: [n.op("ReduceSum", n.input(4, 6), n.ints(1))],
        "ReduceSum",
    ),
    "its operand has other readers": (_shared, "ReduceSum"),
    "its operand has no elements": (
        lambda n: [n.op("ReduceSum", n.op("Mul", n.input(4, 0), n.input(4, 0)), n.ints(1))],
        "ReduceSum",
    ),
    "it reduces nothing": (
        lambda n: [
            n.op("ReduceL1", n.op("Mul", n.input(4, 6), n.input(4, 6)), n.ints(), attrs=reduce.ReduceAttrs(True, True))
        ],
        "ReduceL1",
    ),
    "its operand is computed from 8 tensors; 6 are the most": (_many, "ReduceSum"),
    "several blocks would share the terms of an output": (
        lambda n: [n.op("ReduceSum", n.op("Mul", n.input(64, 128, 200), n.input(64, 128, 200)), n.ints(0, 1, 2))],
        "ReduceSum",
    ),
}
"""Reason -> a network, and the reduction that is refused in it."""


def case(name: str) -> Graph:
    """The network of one of :data:`CASES`."""
    return built(CASES[name])
