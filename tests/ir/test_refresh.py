"""Graph.refresh: changed sizes reach all operands of an operator before the operands are compared with one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.check import check_pass
from support.net import Net

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.cse import CommonSubexpressions


def chosen(n: Net, mask: Value) -> Value:
    """The indices of the rows that a mask selects."""
    return n.op("Reshape", n.op("NonZero", mask), n.ints(-1))


def selected() -> Graph:
    """A product of selected rows whose epilogue adds other selected rows: the mask is evaluated twice."""
    n = Net()
    x, y, mask = n.input(6, 4), n.input(6, 5, name="y"), n.input(6, name="mask", dtype=np.bool_)
    first = n.op("Gather", x, chosen(n, mask), attrs=GatherAttrs(0))
    at = chosen(n, mask)
    rows, added = (n.op("Gather", v, at, attrs=GatherAttrs(0)) for v in (x, y))
    return n.done(
        first, n.op("MatMul", rows, n.random(4, 5), added, attrs=MatMulAttrs(epilogue=(Stage("Add", (-1, 2)),)))
    )


def test_one_operand_of_an_epilogue_follows_the_other() -> None:
    check_pass(
        CommonSubexpressions(), selected(), changes=4, kinds={"NonZero": 1, "Reshape": 1, "Gather": 2, "MatMul": 1}
    )


def test_operands_that_contradict_are_named() -> None:
    n = Net()
    graph = n.done(
        n.op(
            "MatMul",
            n.input(6, 4),
            n.random(4, 5),
            n.random(6, 5),
            attrs=MatMulAttrs(epilogue=(Stage("Add", (-1, 2)),)),
        )
    )
    (product,) = graph.of_kind("MatMul")
    graph.set_op(replace(product, inputs=(*product.inputs[:2], graph.add_constant(np.zeros((7, 6, 5), np.float32)))))
    with pytest.raises(ShapeError, match=f"MatMul '{product.name}': the epilogue of a MatMul turns"):
        graph.refresh([product.id])
