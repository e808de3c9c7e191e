"""Why the rank of a tensor is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from optdnn.ir.graph import Graph, Op, Value


def unknown_rank(graph: Graph, operands: Iterable[Any]) -> str | None:
    """Advice for a node with an operand of unknown rank, or with its shape, if the branches of an If give that rank; else None."""
    for value in (v for v in operands if isinstance(v, Value)):
        op, port = _origin(graph, value)
        if op.kind == "If" and op.outputs[port].type.shape is None:
            types = " and ".join(str(body.outputs[port]) for body in (op.attrs.then_branch, op.attrs.else_branch))
            return (
                f"the branches of {op.name} (If) give {types}: make them tensors of one rank, or fix what decides: a size "
                "(--shape), or the value of an input (--value NAME=1, or values={...})"
            )
    return None


def _origin(graph: Graph, value: Value) -> tuple[Op, int]:
    """The first operator of unknown rank before ``value``, and the number of its result."""
    made = graph.op(value)
    if made.kind == "Shape" and made.inputs[0] is not None:
        value = made.inputs[0]
    while True:
        op = graph.op(value)
        before = [v for v in op.inputs if v is not None and graph.type(v).shape is None]
        if not before or op.kind == "If":
            return op, value.port
        value = before[0]
