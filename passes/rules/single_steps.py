"""A recurrent layer over one step becomes two products and arithmetic.

Speech recognizers, voice detectors and robots' policies run step by step, with the state as an input and an output. A kernel that
keeps the weights in registers pays for long sequences. For one step, it would load them once and use them once.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import GemmAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import operand, reshaped, shape_of, sliced

ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"})
"""Activations without parameters."""


@rule("single_step", {"GRU", "LSTM", "RNN"})
def single_step(graph: Graph, op: Op) -> Match | Miss | None:
    """A layer in one direction, over a sequence of one step."""
    a, shapes = op.attrs, [shape_of(graph, operand(op, slot)) for slot in range(3)]
    if any(shape is None or not all(isinstance(n, int) for n in shape) for shape in shapes):
        return None
    assert shapes[0] is not None
    if shapes[0][0] != 1:
        return None
    if a.direction == "bidirectional":
        return Miss("it has two directions")
    if len(op.inputs) > 4 and op.inputs[4] is not None:
        return Miss("its sequences have lengths of their own")
    if len(op.inputs) > 7 and op.inputs[7] is not None:
        return Miss("its gates read the cell (peepholes)")
    if a.clip is not None or not ACTIVATIONS.issuperset(a.activations):
        return Miss("its gates are clipped, or an activation has parameters")
    if getattr(a, "input_forget", False):
        return Miss("its forget gate is one minus the input gate")
    if op.kind == "GRU" and not a.linear_before_reset:
        return Miss("its reset gate comes before the product of the state")

    def build(patch: Patch) -> None:
        states = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}[op.kind](_Step(patch, op))
        batch = graph.type(operand(op)).static_shape[1]
        results = [states[0], *states]
        for port, state in enumerate(results[: len(op.outputs)]):
            shape = (1, 1, batch, a.hidden_size) if port == 0 else (1, batch, a.hidden_size)
            patch.replace(Value(op.id, port), reshaped(patch, state, shape))

    return Match((op,), build)


class _Step:
    """The operands of a layer as matrices of one row per sequence."""

    def __init__(self, patch: Patch, op: Op) -> None:
        self.patch, self.op, self.hidden = patch, op, op.attrs.hidden_size
        self.batch, self.width = patch.type(operand(op)).static_shape[1:]
        self.dtype = patch.type(operand(op)).dtype
        self.gates = patch.type(operand(op, 1)).static_shape[1] // self.hidden

    def state(self, slot: int) -> Value:
        """The state before the step; zeros if the layer has none."""
        given = self.op.inputs[slot] if len(self.op.inputs) > slot else None
        if given is None:
            return self.patch.constant(np.zeros((self.batch, self.hidden), self.dtype), "zeros")
        return reshaped(self.patch, given, (self.batch, self.hidden))

    def product(self, x: Value, slot: int) -> Value:
        """``x W' + b`` of all gates; slot 1 is the input's matrix, slot 2 the state's."""
        rows, width = self.gates * self.hidden, self.width if slot == 1 else self.hidden
        operands = [x, reshaped(self.patch, operand(self.op, slot), (rows, width))]
        bias = self.op.inputs[3] if len(self.op.inputs) > 3 else None
        if bias is not None:
            flat = reshaped(self.patch, bias, (2 * rows,))
            operands.append(sliced(self.patch, flat, (slot - 1) * rows, slot * rows, 0))
        return self.patch.add("Gemm", operands, GemmAttrs(transB=True))

    def products(self) -> tuple[Value, Value]:
        x = reshaped(self.patch, operand(self.op), (self.batch, self.width))
        return self.product(x, 1), self.product(self.state(5), 2)

    def gate(self, values: Value, number: int) -> Value:
        return sliced(self.patch, values, number * self.hidden, (number + 1) * self.hidden, 1)

    def active(self, kind: int, value: Value) -> Value:
        return self.patch.add(self.op.attrs.activations[kind], [value])


def _rnn(step: _Step) -> list[Value]:
    return [step.active(0, step.patch.add("Add", list(step.products())))]


def _gru(step: _Step) -> list[Value]:
    """``z h + (1 - z) n``, as ``n + z (h - n)``."""
    (x, state), add = step.products(), step.patch.add
    z, r = (step.active(0, add("Add", [step.gate(x, k), step.gate(state, k)])) for k in (0, 1))
    new = step.active(1, add("Add", [step.gate(x, 2), add("Mul", [r, step.gate(state, 2)])]))
    return [add("Add", [new, add("Mul", [z, add("Sub", [step.state(5), new])])])]


def _lstm(step: _Step) -> list[Value]:
    add = step.patch.add
    gates = add("Add", list(step.products()))
    i, o, f = (step.active(0, step.gate(gates, k)) for k in (0, 1, 2))
    new = step.active(1, step.gate(gates, 3))
    cell = add("Add", [add("Mul", [f, step.state(6)]), add("Mul", [i, new])])
    return [add("Mul", [o, step.active(2, cell)]), cell]
