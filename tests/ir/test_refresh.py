"""Graph.refresh: changed sizes reach all operands of an operator before the operands are compared with one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.check import check_pass
from support.net import Net

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import ReshapeAttrs, ShapeAttrs
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


def test_a_replaced_op_keeps_the_name_of_its_size() -> None:
    """Both NonZero make a symbol: all readers know the older one."""
    n = Net()
    x, mask = n.input(6, 4), n.input(6, name="mask", dtype=np.bool_)
    index = chosen(n, mask)
    graph = n.done(n.op("Gather", x, index, attrs=GatherAttrs(0)), index)
    (op,) = graph.of_kind("NonZero")
    before = op.outputs[0].type
    patch = Patch(graph, [op])
    patch.replace(op.value, patch.add("NonZero", [patch.add("And", [mask, mask])]))
    patch.apply()
    (made,) = graph.of_kind("NonZero")
    assert made.id != op.id
    assert made.outputs[0].type == before
    assert all(i.outputs[0].type.dims[:1] == before.dims[1:] for i in graph.of_kind("Gather", "Reshape"))


def test_a_size_gets_the_expression_of_a_replacement() -> None:
    """A reader in another branch, and known values, name it too."""
    n = Net()
    mask, other = (n.input(6, name=name, dtype=np.bool_) for name in ("mask", "other"))
    index, more = chosen(n, mask), chosen(n, other)
    both = n.op("Concat", more, index, attrs=ConcatAttrs(0))
    size = n.op("Shape", both, attrs=ShapeAttrs(0, 1))
    graph = n.done(both, size, n.op("Neg", index))
    (second,) = (op for op in graph.of_kind("Reshape") if op.value == more)
    before, kept = graph.type(index).dims[0], graph.type(more).dims[0]
    nonzero = graph.op(second.inputs[0])
    patch = Patch(graph, [nonzero])
    patch.replace(
        nonzero.value, patch.add("Reshape", [index, patch.constant(np.array([1, -1]), "shape")], ReshapeAttrs())
    )
    patch.apply()
    assert kept != before
    assert graph.type(both).dims == (2 * before,)
    assert graph.known(size).tolist() == [2 * before]
