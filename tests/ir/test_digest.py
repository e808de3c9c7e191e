"""Digests of graphs: the differences that the structure's digest shows, and those that it ignores."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.net import Net

from optdnn.ir.digest import structure_digest


def digest(scale: float = 1.0, size: int = 4, kind: str = "Relu", axes: tuple[int, ...] = (0, 1), **shape: Any) -> str:
    n = Net()
    x = n.input(shape.get("rows", 1), size)
    y = n.op(kind, n.op("MatMul", x, n.const(scale * np.ones((size, size), np.float32))))
    return structure_digest(n.done(n.op("ReduceSum", y, n.const(np.array(axes, np.int64)))))


def test_weights_do_not_count() -> None:
    assert digest() == digest(scale=2.0)


def test_kinds_sizes_and_integers_count() -> None:
    found = [digest(), digest(kind="Tanh"), digest(size=5), digest(rows=3), digest(axes=(1,))]
    assert len(set(found)) == 5


def test_the_order_of_operands_counts() -> None:
    def made(first: bool) -> str:
        n = Net()
        x, y = n.input(2, 2), n.input(2, 2)
        return structure_digest(n.done(n.op("Sub", *((x, y) if first else (y, x)))))

    assert made(True) != made(False)
