"""Networks of reductions with few outputs, for :mod:`optdnn.kernels.reduce.parts`: small and large ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optdnn.ir.graph import Graph
from optdnn.ops import reduce, shape
from optdnn.types import INT64
from support.net import Net, built

KINDS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")


def _rows(n: Net) -> list[Any]:
    x = n.op("Abs", n.op("Add", n.input(3, 4, 37), 0.1))
    return [n.op(f"Reduce{k}", x, n.ints(2)) for k in KINDS if k != "Prod"]


def _wide_rows(n: Net) -> list[Any]:
    """Rows of whole accesses of 16 bytes, contiguous or with gaps."""
    x = n.op("Abs", n.op("Add", n.input(5, 3, 48), 0.1))
    part = n.op("Slice", n.input(6, 96, name="part"), n.ints(0), n.ints(80), n.ints(1))
    return [n.op(f"Reduce{k}", y, n.ints(-1)) for y in (x, part) for k in ("Sum", "Max", "LogSumExp")]


def _columns(n: Net) -> list[Any]:
    """Neighboring outputs are contiguous in memory."""
    x = n.op("Abs", n.op("Add", n.input(57, 16), 0.1))
    return [n.op(f"Reduce{k}", x, n.ints(0), attrs=reduce.ReduceAttrs(False)) for k in KINDS if k != "Prod"]


def _pools(n: Net) -> list[Any]:
    x = n.input(2, 9, 11, 16)
    turned = n.op("Transpose", x, attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    return [n.op(kind, y) for kind in ("GlobalAveragePool", "GlobalMaxPool") for y in (x, turned)]


def _windows(n: Net) -> list[Any]:
    """Large windows that do not overlap, in images of both orders and in a sequence."""
    x = n.input(2, 16, 27, 16)
    turned = n.op("Transpose", x, attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    square = n.op("Slice", turned, n.ints(0), n.ints(24), n.ints(3))
    sequence = n.input(2, 16, 180, name="sequence")
    return [f(y, k, strides=k) for f in (n.average_pool, n.max_pool) for y, k in ((square, 8), (sequence, 60))]


CASES: dict[str, Callable[[Net], list[Any]]] = {
    "rows": _rows,
    "wide rows": _wide_rows,
    "columns": _columns,
    "whole tensors": lambda n: [n.op("ReduceMean", n.input(5, 7, 9), n.ints(0, 1, 2))],
    "integers": lambda n: [n.op(f"Reduce{k}", n.input(3, 40, dtype=INT64), n.ints(1)) for k in ("Sum", "Max")],
    "pools": _pools,
    "windows": _windows,
}
"""Reductions of every kind. Only tests divide them."""

LARGE: dict[str, Callable[[Net], list[Any]]] = {
    "large tensor": lambda n: [n.op("ReduceSum", n.input(64, 128, 200), n.ints(0, 1, 2))],
    "large columns": lambda n: [n.op("ReduceMax", n.input(100_000, 16), n.ints(0))],
    "large logarithm": lambda n: [n.op("ReduceLogSumExp", n.input(2, 500_000), n.ints(1))],
    "large pool": lambda n: [n.op("GlobalAveragePool", n.input(1, 64, 512, 512))],
}
"""Reductions that are large enough that builds divide them."""


def case(name: str) -> Graph:
    """The network of one of :data:`CASES` or :data:`LARGE`."""
    return built({**CASES, **LARGE}[name])
