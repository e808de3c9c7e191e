"""The stages of pointwise operators before and after they are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.fused import PointwiseAttrs

MAX_STAGES = 16
"""Most stages of one Pointwise op: bounds the registers per thread of a GPU kernel."""
MAX_OPERANDS = 8
"""Most tensors that one Pointwise op reads; constants of one element do not count (they become literals)."""


@dataclass(frozen=True)
class OpenStage:
    """A stage before slots are assigned: an argument is a value from outside, the number of an earlier stage, or None."""

    kind: str
    attrs: Attrs
    args: tuple[Value | int | None, ...]


def steps_of(op: Op) -> list[OpenStage]:
    """A pointwise op as one step, or a Pointwise as the steps of its body."""
    if op.kind != "Pointwise":
        return [OpenStage(op.kind, op.attrs, op.inputs)]

    def argument(a: int | None) -> Value | int | None:
        if a is None:
            return None
        if a >= 0:
            return op.inputs[a]
        return op.inputs[0] if a == -1 else ~a - 1

    return [OpenStage(s.kind, s.attrs, tuple(map(argument, s.args))) for s in op.attrs.epilogue]


def body(steps: Sequence[OpenStage], first: Value) -> tuple[list[Value], PointwiseAttrs]:
    """Operands and attributes of the Pointwise op that runs these steps; ``first`` becomes operand 0."""
    operands = [first]
    for step in steps:
        operands += [a for a in step.args if isinstance(a, Value) and a not in operands]

    def slot(a: Value | int | None) -> int | None:
        if a is None:
            return None
        if isinstance(a, int):
            return ~(a + 1)
        return -1 if a == first else operands.index(a)

    stages = tuple(Stage(s.kind, tuple(map(slot, s.args)), s.attrs) for s in steps)
    return operands, PointwiseAttrs(epilogue=stages)


def outside(steps: Sequence[OpenStage]) -> list[Value]:
    """The values that steps read from outside, in order of first use."""
    return list(dict.fromkeys(a for s in steps for a in s.args if isinstance(a, Value)))


def tensors_of(graph: Graph, op: Op) -> list[Value]:
    """The operands of an op, without scalar constants."""
    return [v for v in outside(steps_of(op)) if (array := graph.constant_value(v)) is None or array.size > 1]
