"""The tactic of recurrent layers with weights that stay in registers: a product of all inputs, then all steps and directions in one
launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.gemm.matmul import emit_matmul
from optdnn.kernels.layout.views import reshaped
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.recurrent import input_products, resident_kernel
from optdnn.kernels.recurrent.activations import activation, per_direction
from optdnn.kernels.recurrent.grid import GridRNN, copy_states, place_states, written_states
from optdnn.kernels.recurrent.hopper import HopperRNN, initial_states
from optdnn.kernels.recurrent.input_products import constant_operand
from optdnn.kernels.tactic import Offer, ProblemTactic, Tactic, costlier, kernel_offers
from optdnn.ops.base import Attrs, Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.ops.rnn import RNNAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, FP32

FUNCTIONS = ("first_activation", "second_activation", "third_activation")
FAST = {
    "Sigmoid": "__fdividef(1.0f, 1.0f + __expf(-({x})))",
    "Tanh": "(1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * ({x}))))",
}
"""C++ of fast activations for 16-bit floats, within 3e-7 for any x."""
GRID, HOPPER = GridRNN(), HopperRNN()


def _functions(op: Op) -> str:
    """C++ of the activation functions of ``x`` in direction ``d``; functions that the cell does not use return ``x``."""
    a: RNNAttrs = op.attrs
    each, fast = per_direction(op), op.outputs[0].type.dtype in (FP16, BF16)
    lines = []
    for k, name in enumerate(FUNCTIONS):
        texts = [
            activation(a, i, k < 2, "x", "float", FAST if fast else {})
            for i in range(min(k, each - 1), len(a.activations), each)
        ]
        different = f"d == 0 ? {texts[0]} : {texts[-1]}" if len(set(texts)) > 1 else texts[0]
        lines.append(f"DEVICE float {name}(float x, int d) {{ return {different if k < each else 'x'}; }}")
    return "\n".join(lines)


class ResidentRNN(ProblemTactic):
    """RNN, GRU and LSTM with all options of ONNX and with constant weights that fit the registers."""

    name = "rnn_resident"
    row_invariant: ClassVar[bool] = False
    """The number of lanes that share a sum depends on the batch."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if op.outputs[0].type.dtype not in (FP16, BF16, FP32):
            return "it is for floats of 16 and 32 bits"
        operands = [op.inputs[1], op.inputs[2], *([] if op.input(3) is None else [op.inputs[3]])]
        if any(b.graph.constant_value(v) is None for v in operands):
            return "its weights are not constant"
        problem = self.problem(b, op)
        if self.offers(problem, b.gpu):
            return None
        least = resident_kernel.Config(b.gpu.multiprocessors, 1, 32)
        return resident_kernel.refuse(problem, least, b.gpu) or "no part of its matrix fits the registers of a block"

    def defer(self, b: Builder, op: Op) -> str | None:
        others: tuple[Tactic, ...] = (GRID,) if op.kind == "RNN" else (HOPPER, GRID)
        reasons = (costlier(b, op, self, other) for other in others if other.refuse(b, op) is None)
        return next((why for why in reasons if why is not None), None)

    def place(self, b: Builder, op: Op) -> None:
        place_states(b, op)

    def problem(self, b: Builder, op: Op) -> resident_kernel.Problem:
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        a, inputs = op.attrs, op_inputs(b, op)
        wide = op.outputs[0].type.dtype == FP32 or input_products.refuse(b, op) is not None
        return resident_kernel.Problem(
            op.kind, steps, batch, inputs, hidden, count, map_dtype(op.outputs[0].type.dtype), wide, _functions(op),
            a.direction == "reverse", op.input(3) is not None, op.kind == "LSTM" and op.input(7) is not None,
            op.input(4) is not None, any(v is not None for v in initial_states(op)),
            op.kind == "GRU" and not a.linear_before_reset, op.kind == "LSTM" and a.input_forget,
        )  # fmt: skip

    def offers(self, problem: resident_kernel.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(resident_kernel, problem, gpu, row_invariant=False)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        problem = self.problem(b, op)
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        size = problem.gates * hidden
        made = input_products.emit(b, op) if input_products.refuse(b, op) is None else _wide_products(b, op)
        operands = {
            "gates": made.view((steps, batch, count * size), (batch * count * size, count * size, 1)),
            "weights": b.constant(constant_operand(b, op, 2), "weights"),
        }  # fmt: skip
        bias = None
        if problem.bias:
            operands["bias"] = whole = b.constant(constant_operand(b, op, 3), "bias")
            bias = whole.view((count, size), (2 * size, 1), size)
        for name, value in (("peepholes", op.input(7) if problem.peepholes else None), ("lengths", op.input(4))):
            if value is not None:
                operands[name] = _dense(b, op, value, name)
        if problem.initial:
            for name, value in zip(("initial_h", "initial_c"), initial_states(op), strict=False):
                operands[name] = GRID.state(b, op, value, (count, batch, hidden))
        kept = []
        if pairs := resident_kernel.exchange_pairs(problem, config):
            y, word = op.outputs[0].name, np.dtype(np.int32)
            operands["exchange"] = b.new(f"{y}.exchange", np.dtype(np.int64), (pairs,))
            operands["epoch"] = b.new(f"{y}.epoch", word, (resident_kernel.items(problem, config),))
            kept = [operands["exchange"], operands["epoch"]]
        reads = [operands["gates"], operands["weights"], bias]
        reads += [operands.get(k) for k in ("peepholes", "lengths", "initial_h", "initial_c")]
        results, written = written_states(b, op)
        operands.update(zip(("output", "final_h", "final_c"), written, strict=False))
        attrs = {"cell": op.kind, **attrs_dict(op.attrs)}
        launch = resident_kernel.launch(problem, config, b.gpu)
        b.emit(op, launch, operands, "Recurrence", attrs, reads, written, kept=kept)
        copy_states(b, op, results, written)


def op_inputs(b: Builder, op: Op) -> int:
    """Elements of an input vector."""
    return int(constant_operand(b, op, 1).shape[2])


def _dense(b: Builder, op: Op, value: Value, name: str) -> TensorView:
    """An operand without gaps: a copy if necessary."""
    x = b.operand(value)
    return x if x.dense else copied(b, op, x, name)


def _wide_products(b: Builder, op: Op) -> TensorView:
    """Emits the products of all inputs with the weights of all directions, plus the input biases, in fp32: [rows, columns]."""
    steps, count, batch, _ = op.outputs[0].type.static_shape
    x, w = (b.operand(v) for v in op.inputs[:2])
    rows, (_, size, depth) = steps * batch, w.shape
    left = reshaped(x, (rows, depth))
    if left is None:
        left = reshaped(copied(b, op, x, "inputs"), (rows, depth))
        assert left is not None
    right = w.view((count, depth, size), (w.strides[0], w.strides[2], w.strides[1]))
    out = b.new(f"{op.outputs[0].name}.gates", FP32, (rows, count * size))
    stages: list[Stage] = []
    extra: dict[int, TensorView] = {}
    if op.input(3) is not None:
        bias = b.operand(op.inputs[3])
        extra[2] = bias.view((count, 1, size), (bias.strides[0], 0, bias.strides[1]))
        stages = [Stage("Add", (-1, 2), Attrs())]
    attrs = {"prologue": (), "epilogue": plain_stages(stages), "arity": 2}
    by_direction = out.view((count, rows, size), (size, count * size, 1))
    emit_matmul(
        b, op, left, right, by_direction, stages, extra, 1.0, {}, "MatMul", attrs, [left, right, *extra.values()]
    )
    return out
