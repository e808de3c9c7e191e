"""Pointwise ops as stages of another op: the kinds, and the conversion of operands to stage arguments and operand slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import FusedAttrs, Stage
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import Miss
from optdnn.types import is_float

ANCHORS = frozenset(k for k, d in OPDEFS.items() if issubclass(d.attrs, FusedAttrs) and k != "Pointwise")
"""Kinds that hold stages besides their own computation."""

ADDITIONS = frozenset({"Add", "Sub"})
SCALINGS = frozenset({"Mul", "Div"})
ACTIVATIONS = frozenset(
    {
        *("Relu", "LeakyRelu", "PRelu", "Snake", "Elu", "Selu", "Celu", "ThresholdedRelu", "Clip", "Min", "Max"),
        *("Sigmoid", "HardSigmoid", "Swish", "HardSwish", "Mish", "Gelu", "Tanh", "Softplus", "Softsign", "Neg", "Abs"),
        *("Sin", "Cos", "Sqrt", "Reciprocal", "FakeQuantize"),
    }
)
"""Kinds that every kernel template can compute as a stage. None of them changes the element type."""


def refuses(graph: Graph, op: Op, value: Value) -> Miss | None:
    """A Miss if ``op``, which reads ``value``, cannot be a stage that is applied to ``value``; else None.

    The stage must keep dtype and shape. A symbolic dimension counts as kept only if it is the same expression.
    """
    before, after = graph.type(value), op.outputs[0].type
    if not is_float(before.dtype) or after.dtype != before.dtype:
        return Miss(f"{op.kind} {op.name} gives {after}, not the floating type of {before}")
    if after.shape is None or after.shape != before.shape:
        return Miss(f"{op.kind} {op.name} would enlarge {before} to {after}")
    return None


def reads_tensor(graph: Graph, op: Op) -> bool:
    """Whether an anchor's epilogue already reads a computed tensor of the result's shape: its kernel cannot read a second one."""
    slots = {a for stage in op.attrs.epilogue for a in stage.args if a is not None and a >= 0}
    tensors = [v for a in slots if (v := op.input(a)) is not None and graph.constant_value(v) is None]
    return any(graph.type(v).shape == op.outputs[0].type.shape for v in tensors)


class Slots:
    """The operands of an op that absorbs stages: first its own ``arity`` slots, then the operands of stages, each value once."""

    def __init__(self, op: Op):
        arity = op.definition.arity
        assert arity is not None
        self.operands: list[Value | None] = [*op.inputs, *[None] * (arity - len(op.inputs))]
        self.arity = arity

    def stage(self, op: Op, value: Value, register: int) -> Stage:
        """``op`` as a stage; its operand ``value`` is read from ``register``."""
        args = [None if v is None else ~register if v == value else self.slot(v) for v in op.inputs]
        while args and args[-1] is None:
            args.pop()
        return Stage(op.kind, tuple(args), op.attrs)

    def slot(self, value: Value) -> int:
        """The slot of a stage's operand, which is added if it is new."""
        if value not in self.operands[self.arity :]:
            self.operands.append(value)
        return self.operands.index(value, self.arity)

    def inputs(self, first: Value | None = None) -> tuple[Value | None, ...]:
        """All operands, without absent trailing ones; ``first`` replaces operand 0."""
        found = [first if first is not None else self.operands[0], *self.operands[1:]]
        while found[-1] is None:
            found.pop()
        return tuple(found)


def with_stages(attrs: FusedAttrs, *, prologue: Sequence[Stage] = (), epilogue: Sequence[Stage] = ()) -> FusedAttrs:
    """``attrs`` with these stages added before its prologue or after its epilogue."""
    if prologue and attrs.prologue:
        raise ValueError("registers of an existing prologue would have to be renumbered")
    return replace(attrs, prologue=(*prologue, *attrs.prologue), epilogue=(*attrs.epilogue, *epilogue))
