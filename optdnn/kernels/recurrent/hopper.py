"""The tactic of LSTM and GRU on Hopper's persistent kernel: all steps of all stacked layers in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.layout.tap_tables import AxisTable
from optdnn.kernels.layout.taps import emit_taps
from optdnn.kernels.pointwise.pointwise import copied, copy
from optdnn.kernels.recurrent import kernel as rnn
from optdnn.kernels.tactic import Offer, ProblemTactic, Region, kernel_offers
from optdnn.ops.base import attrs_dict
from optdnn.ops.index import PadAttrs
from optdnn.ops.rnn import RNNAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16, FP32, Array

BETWEEN = frozenset({"Squeeze", "Reshape"})
"""Operators between stacked layers: they remove the axis of directions."""


def _constants(b: Builder, op: Op) -> list[Array] | None:
    """W, R and B (zeros if absent) of a layer; None if they are not constant."""
    w, r = (b.graph.constant_value(v) for v in op.inputs[1:3])
    if w is None or r is None:
        return None
    bias = (
        np.zeros((w.shape[0], 2 * w.shape[1]), w.dtype) if op.input(3) is None else b.graph.constant_value(op.inputs[3])
    )
    return None if bias is None else [w, r, bias]


def unplain(op: Op) -> str | None:
    """Why the kernels with blocks that exchange states do not support the cells of a layer, or None. Activations are checked
    separately."""
    a: RNNAttrs = op.attrs
    if op.kind == "GRU" and not a.linear_before_reset:  # type: ignore[attr-defined]
        return "it needs a GRU with linear_before_reset"
    if a.clip is not None or (op.kind == "LSTM" and a.input_forget):  # type: ignore[attr-defined]
        return "it does not support clipped or coupled gates"
    if op.input(4) is not None:
        return "it does not support sequences of several lengths"
    if op.kind == "LSTM" and op.input(7) is not None:
        return "it does not support peepholes"
    return None


def initial_states(op: Op) -> list[Value | None]:
    """The initial states of the cell: h, and c of an LSTM (None: zeros)."""
    return [op.input(5), op.input(6)][: 2 if op.kind == "LSTM" else 1]


def _zero(b: Builder, value: Value | None) -> bool:
    array = b.graph.constant_value(value) if value is not None else None
    return value is None or (array is not None and not array.any())


class HopperRNN(ProblemTactic):
    """LSTM and GRU of 16-bit floats with constant weights: all steps of all stacked layers in one launch.

    The launch is emitted at the first layer.
    """

    name = "rnn_sm90"
    row_invariant: ClassVar[bool] = False
    """The number of columns of a product sets how a sum is split, and other tactics run batches beyond the tile."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        a: RNNAttrs = op.attrs
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's clusters (sm_90a), not {b.arch}"
        if op.outputs[0].type.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        usual = ("Sigmoid", "Tanh", "Tanh") if op.kind == "LSTM" else ("Sigmoid", "Tanh")
        if (
            a.activations[: len(usual)] * (len(a.activations) // len(usual)) != a.activations
            or a.activations[: len(usual)] != usual
        ):
            return f"it supports the default activations only, not {', '.join(a.activations)}"
        if (why := unplain(op)) is not None:
            return why
        if _constants(b, op) is None:
            return "its weights are not constant"
        problem = self._problem(b, [op], False)
        reason = rnn.refuse(problem, rnn.Config(8), most_clusters=1 << 30)
        if reason is None and not kernel_offers(rnn, problem, b.gpu):
            reason = "its clusters cannot run at once"
        return reason

    @staticmethod
    def _problem(b: Builder, layers: Sequence[Op], initial: bool, reverse: bool = False) -> rnn.Problem:
        first = layers[0]
        steps, batch, inputs = b.graph.type(first.inputs[0]).static_shape  # type: ignore[arg-type]
        dtype = map_dtype(first.outputs[0].type.dtype)
        return rnn.Problem(
            first.kind.lower(), steps, batch, up(inputs, rnn.VECTOR), first.attrs.hidden_size, len(layers), dtype, initial, reverse
        )  # fmt: skip

    def region(self, b: Builder, op: Op) -> Region:
        """The layer and the layers stacked on it, with the operators between them."""
        layers = self._stack(b, op)
        between = [b.graph.op(layer.inputs[0]) for layer in layers[1:]]  # type: ignore[arg-type]
        return Region(op, after=tuple(x for pair in zip(between, layers[1:], strict=True) for x in pair))

    def place(self, b: Builder, op: Op) -> None:
        """Place the results in one buffer per kind: outputs of the last layer, final states, and outputs of the layers before."""
        layers = self._stack(b, op)
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        kinds = 2 if op.kind == "LSTM" else 1
        dtype, name = op.outputs[0].type.dtype, op.outputs[0].name
        last = b.new(name, dtype, (steps, count, batch, hidden), (batch * hidden, steps * batch * hidden, hidden, 1))
        finals = [b.new(f"{name}.state{k}", dtype, (len(layers) * count, batch, hidden)) for k in range(kinds)]
        shape = (max(len(layers) - 1, 1), steps, batch, hidden)
        inner = [b.new(f"{name}.inner", dtype, shape) for _ in range(count)]  # directions may run side by side
        b.together[op.id] = (layers, last, finals, inner)
        for value, found in self._results(b, layers, last, finals, inner[0]):
            if value in b.reserved and b.graph.uses(value):
                b.target(value)
            else:
                b.place[value] = found

    def problem(self, b: Builder, op: Op) -> rnn.Problem:
        """The problem of all layers in the first direction."""
        layers = self._stack(b, op)
        return self._problem(b, layers, self._initialized(b, layers), op.attrs.direction == "reverse")

    @staticmethod
    def _initialized(b: Builder, layers: Sequence[Op]) -> bool:
        """Whether any layer has initial states that are not zeros."""
        return not all(_zero(b, v) for layer in layers for v in initial_states(layer))

    def offers(self, problem: rnn.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return kernel_offers(rnn, problem, gpu)

    def named(self, b: Builder, op: Op, name: str) -> Offer | None:
        """The configuration of this name, or the best one: the name may have been chosen for the layer without the layers after it."""
        return super().named(b, op, name) or self.configs(b, op)[0]

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        layers, last, finals, inner = b.together[op.id]
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        initial = self._initialized(b, layers)
        x = self._input(b, op)
        for d in range(count):
            reverse = op.attrs.direction == "reverse" or d == 1
            problem = self._problem(b, layers, initial, reverse)
            y = last.view((steps, batch, hidden), (batch * hidden, hidden, 1), d * steps * batch * hidden)
            states = [f.view((len(layers), batch, hidden), f.strides, d * batch * hidden) for f in finals]
            self._launch(b, op, layers, problem, config, d, x, y, states, inner[d])
        for value, found in self._results(b, layers, last, finals, inner[0]):
            if b.place[value] != found:
                copy(b, b.graph.op(value), found, b.place[value])

    def _launch(
        self, b: Builder, op: Op, layers: Sequence[Op], problem: rnn.Problem, config: rnn.Config, d: int, x: TensorView,
        y: TensorView, states: Sequence[TensorView], inner: TensorView,
    ) -> None:  # fmt: skip
        name = op.outputs[0].name
        parameters = [_constants(b, layer) for layer in layers]
        ws, rs, bs = ([p[i][d] for p in parameters if p is not None] for i in range(3))
        half = bs[0].shape[0] // 2
        sizes = rnn.workspace(problem, config)
        ws[0] = np.pad(ws[0], ((0, 0), (0, problem.inputs - ws[0].shape[1])))
        operands = {
            "input": x, "output": y, "hidden": inner, "final_h": states[0],
            "weights": b.constant(rnn.pack_weights(problem, ws, rs), f"{name}.weights"),
            "bias": b.constant(rnn.pack_bias(problem, [v[:half] for v in bs], [v[half:] for v in bs]), f"{name}.bias"),
            "gates": b.new(f"{name}.gates", FP32, (sizes["gates"] // 4,)),
            "progress": b.new(f"{name}.progress", np.dtype(np.int32), (sizes["progress"] // 4,)),
        }  # fmt: skip
        writes = [y, *states]
        if len(states) > 1:
            operands["final_c"] = states[1]
        given: list[TensorView | None] = [None, None]
        if problem.initial:
            for k, key in enumerate(("initial_h", "initial_c")[: len(states)]):
                operands[key] = given[k] = self._initial(b, op, layers, d, k)
        progress = operands["progress"]
        reset = rnn.launch_reset(problem, config, b.gpu)
        b.emit(op, reset, operands, "Zeros", {"shape": progress.shape}, [], [progress])
        attrs = {
            "cell": op.kind, "layers": len(layers), "hidden": problem.hidden, "inputs": problem.inputs,
            "reverse": problem.reverse,
        }  # fmt: skip
        reads = [x, operands["weights"], operands["bias"], *given]
        writes = [y, states[0], *states[1:], inner, operands["gates"]]
        b.emit(op, rnn.launch(problem, config, b.gpu), operands, "StackedRNN", attrs, reads, writes)

    @staticmethod
    def _input(b: Builder, op: Op) -> TensorView:
        """The input without gaps. Rows that a thread cannot load in whole vectors get zeros at the end."""
        x = b.operand(op.inputs[0])
        inputs = up(x.shape[2], rnn.VECTOR)
        if inputs == x.shape[2]:
            return x if x.dense and x.offset % rnn.VECTOR == 0 else copied(b, op, x, "input")
        wide = b.new(f"{op.outputs[0].name}.input", x.dtype, (*x.shape[:2], inputs))
        at = np.arange(inputs)
        table = AxisTable(2, np.where(at < x.shape[2], at, -1)[:, None])
        pads = b.constant(np.array([0, 0, 0, 0, 0, inputs - x.shape[2]]), "pads")
        emit_taps(b, op, x, wide, [table], 0.0, kind="Pad", attrs=attrs_dict(PadAttrs()), reads=[x, pads])
        return wide

    @staticmethod
    def _initial(b: Builder, op: Op, layers: Sequence[Op], d: int, kind: int) -> TensorView:
        """The initial states of all layers in one tensor [layers, batch, hidden]."""
        batch, hidden = op.outputs[0].type.static_shape[2:]
        dtype = op.outputs[0].type.dtype
        values = [initial_states(layer)[kind] for layer in layers]
        arrays = [
            np.zeros((batch, hidden), dtype)
            if v is None
            else None
            if (c := b.graph.constant_value(v)) is None
            else c[d]
            for v in values
        ]
        if all(a is not None for a in arrays):
            return b.constant(np.stack([a for a in arrays if a is not None]), "initial")
        if len(values) == 1 and values[0] is not None:
            one = b.operand(values[0])
            one = one.view((1, batch, hidden), one.strides, d * one.strides[0])
            if one.dense:
                return one
        made = b.new(f"{op.outputs[0].name}.initial{kind}", dtype, (len(layers), batch, hidden))
        for i, v in enumerate(values):
            source = b.operand(v) if v is not None else b.constant(np.zeros((1, batch, hidden), dtype), "zeros")
            at = 0 if v is None else d
            part = source.view((batch, hidden), source.strides[1:], at * source.strides[0])
            copy(b, op, part, made.view((batch, hidden), made.strides[1:], i * made.strides[0]))
        return made

    @staticmethod
    def _results(
        b: Builder, layers: Sequence[Op], last: TensorView, finals: Sequence[TensorView], inner: TensorView
    ) -> Iterator[tuple[Value, TensorView]]:
        """The results of all layers and of the views between them, and what the launch writes."""
        count = last.shape[1]
        for i, layer in enumerate(layers):
            whole = last if layer is layers[-1] else inner.view(
                last.shape, (inner.strides[1], 0, *inner.strides[2:]), i * inner.strides[0])  # fmt: skip
            parts = [f.view((count, *f.shape[1:]), f.strides, i * count * f.strides[0]) for f in finals]
            for port, found in enumerate([whole, *parts][: len(layer.outputs)]):
                yield Value(layer.id, port), found
            if i:
                steps, _, *rest = last.shape
                previous = inner.view((steps, *rest), inner.strides[1:], (i - 1) * inner.strides[0])
                yield b.graph.op(layer.inputs[0]).value, previous  # type: ignore[arg-type]

    def _stack(self, b: Builder, op: Op) -> list[Op]:
        """The layer and the layers stacked on it, as far as one launch can run them."""
        layers = [op]
        if op.attrs.direction == "bidirectional":
            return layers
        while (following := self._following(b, layers[-1])) is not None:
            ready = all(
                v is None or v in b.place or b.graph.constant_value(v) is not None for v in initial_states(following)
            )
            more = [*layers, following]
            if (
                not ready
                or self.refuse(b, following) is not None
                or not kernel_offers(rnn, self._problem(b, more, False), b.gpu)
            ):
                return layers
            layers = more
        return layers

    @staticmethod
    def _following(b: Builder, layer: Op) -> Op | None:
        """The one layer of the same kind that reads the layer's outputs, behind a view. Other operators may read them, too."""
        steps, _, batch, hidden = layer.outputs[0].type.static_shape
        found = [
            user
            for view in b.graph.users(layer.value)
            if view.kind in BETWEEN and view.outputs[0].type.static_shape == (steps, batch, hidden)
            for user in b.graph.users(view.value)
            if user.kind == layer.kind and user.attrs == layer.attrs and user.inputs[0] == view.value
        ]
        return found[0] if len(found) == 1 else None
