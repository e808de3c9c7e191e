"""The tactic of recurrent layers on the persistent kernel over the whole grid: a product of all inputs, then all steps in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype, row_major
from optdnn.kernels.pointwise.pointwise import copied, copy
from optdnn.kernels.ranking import first_reason
from optdnn.kernels.recurrent import grid_kernel, input_products
from optdnn.kernels.recurrent.hopper import initial_states, unplain
from optdnn.kernels.recurrent.input_products import constant_operand
from optdnn.kernels.tactic import Offer, ProblemTactic, kernel_offers
from optdnn.ops.base import attrs_dict
from optdnn.ops.rnn import GATES, RNNAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16

ACTIVATIONS: dict[str, list[tuple[str, ...]]] = {
    "LSTM": [("Sigmoid", "Tanh", "Tanh")],
    "GRU": [("Sigmoid", "Tanh")],
    "RNN": [("Relu",), ("Tanh",)],
}
"""Cell -> the activations of a direction that the kernel supports."""


def state_strides(op: Op) -> tuple[int, ...]:
    """Strides of the states of all steps in the kernel's order: [steps, batch, directions, hidden]."""
    _, count, batch, hidden = op.outputs[0].type.static_shape
    return (batch * count * hidden, hidden, count * hidden, 1)


def place_states(b: Builder, op: Op) -> None:
    """Place the results. For each batch entry, the states of both directions are contiguous, the order that readers want."""
    b.target(op.value, state_strides(op))
    for value in op.values[1:]:
        b.target(value)


def written_states(b: Builder, op: Op) -> tuple[list[TensorView], list[TensorView]]:
    """The results, and the views that the launch writes: the results themselves, or the sources of :func:`copy_states`."""
    results = [b.target(v) for v in op.values]
    strides = [state_strides(op), *(row_major(y.shape) for y in results[1:])]
    written = [
        y if y.is_like(s) else b.new(f"{op.outputs[0].name}.apart", y.dtype, y.shape, s)
        for y, s in zip(results, strides, strict=True)
    ]
    return results, written


def copy_states(b: Builder, op: Op, results: Sequence[TensorView], written: Sequence[TensorView]) -> None:
    """Copy results that the launch wrote elsewhere to their places."""
    for source, target in zip(written, results, strict=True):
        if source is not target:
            copy(b, op, source, target)


class GridRNN(ProblemTactic):
    """RNN, GRU and LSTM of 16-bit floats with constant weights: each block of the grid holds rows of the recurrent matrix."""

    name = "rnn_grid"
    row_invariant: ClassVar[bool] = False
    """Other tactics run batches beyond its tiles."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        a: RNNAttrs = op.attrs
        if op.outputs[0].type.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        count = op.outputs[0].type.static_shape[1]
        if a.activations not in [own * count for own in ACTIVATIONS[op.kind]]:
            return (
                f"it supports the default activations only, the same in both directions, not {', '.join(a.activations)}"
            )
        if (why := unplain(op)) is not None:
            return why
        operands = [op.inputs[1], op.inputs[2], *([] if op.input(3) is None else [op.inputs[3]])]
        if any(b.graph.constant_value(v) is None for v in operands):
            return "its weights are not constant"
        problem = self.problem(b, op)
        return input_products.refuse(b, op) or first_reason(
            grid_kernel.refuse(problem, grid_kernel.Config(n), at_once=b.gpu.multiprocessors)
            for n in reversed(grid_kernel.ROW_TILES)
        )

    def place(self, b: Builder, op: Op) -> None:
        place_states(b, op)

    def problem(self, b: Builder, op: Op) -> grid_kernel.Problem:
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        return grid_kernel.Problem(
            op.kind, steps, batch, hidden, count, map_dtype(op.outputs[0].type.dtype), "Relu" in op.attrs.activations,
            op.attrs.direction == "reverse", op.input(3) is not None, any(v is not None for v in initial_states(op)),
        )  # fmt: skip

    def offers(self, problem: grid_kernel.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(grid_kernel, problem, gpu, row_invariant=False)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        problem = self.problem(b, op)
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        size = GATES[op.kind] * hidden
        gates = input_products.emit(b, op).view((steps, batch, count * size), (batch * count * size, count * size, 1))
        results, made = written_states(b, op)
        operands = {
            "gates": gates, "weights": b.constant(constant_operand(b, op, 2), "weights"),
            "exchange": b.new(f"{op.outputs[0].name}.exchange", np.dtype(np.int32), (grid_kernel.exchange_words(problem),)),
            "epoch": b.new(f"{op.outputs[0].name}.epoch", np.dtype(np.int32), (count,)),
            **dict(zip(("output", "final_h", "final_c"), made, strict=False)),
        }  # fmt: skip
        bias = None
        if problem.bias:
            operands["bias"] = whole = b.constant(constant_operand(b, op, 3), "bias")
            bias = whole.view((count, size), (2 * size, 1), size)
        initial: list[TensorView | None] = []
        for name, value in zip(("initial_h", "initial_c"), initial_states(op), strict=False):
            found = self.state(b, op, value, (count, batch, hidden)) if problem.initial else None
            initial.append(found)
            if found is not None:
                operands[name] = found
        attrs = {"cell": op.kind, **attrs_dict(op.attrs)}
        peepholes, lengths = None, None
        reads = [gates, operands["weights"], bias, peepholes, lengths, *initial]
        kept = [operands["exchange"], operands["epoch"]]
        b.emit(op, grid_kernel.launch(problem, config, b.gpu), operands, "Recurrence", attrs, reads, made, kept=kept)
        copy_states(b, op, results, made)

    @staticmethod
    def state(b: Builder, op: Op, value: Value | None, shape: tuple[int, ...]) -> TensorView:
        """An initial state without gaps; zeros if ``value`` is None."""
        if value is None:
            return b.constant(np.zeros(shape, op.outputs[0].type.dtype), "zeros")
        x = b.operand(value)
        return x if x.dense and x.offset % 8 == 0 else copied(b, op, x, "initial")
