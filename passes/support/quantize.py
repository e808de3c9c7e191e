"""Adds QuantizeLinear and DequantizeLinear (Q and DQ) around the ops that a plan puts in int8 or fp8.

A quantized op keeps its kind. It stands between DequantizeLinear of its operands and QuantizeLinear of its result; a library or the
lowering folds the three into one kernel. Each value has one such pair, which all its quantized readers share. Ops between quantized
ops that only move or compare elements are quantized as well, with one scale on both sides.

Weights are symmetric int8 with a scale per output channel. Biases are int32 with the scale of the products to which they are added.
Activations are uint8 with one scale and one zero point per tensor (Jacob et al., "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.config import QUANTIZED
from optdnn.errors import UsageError
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Use, Value
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes.base import Fired, PassReport, Refused, node_names
from optdnn.passes.rules.split_prologue import split_prologue
from optdnn.passes.support.facts import operand, pads_image, producer, set_operand
from optdnn.passes.support.precision import ANCHORS, OWN_SCALE, SHARES_SCALE, PrecisionPlan, key, no_fp8, no_integers
from optdnn.passes.support.ranges import FP8_LARGEST, Calibration, Range, fp8_scale, integer_parameters
from optdnn.passes.support.rounding_shift import rounding_shift
from optdnn.runtime.file.requires import bytes_saturate
from optdnn.target_name import TargetName
from optdnn.types import DTYPES, FP32, INT8, INT32, UINT8, Array, DType

FP8 = DTYPES["fp8_e4m3"]
BIAS_LIMIT = 2.0**30
"""Largest magnitude of an int32 bias: it leaves room in the accumulator for the sum of products."""


def quantize(
    graph: Graph, plan: PrecisionPlan, calibration: Calibration, target: str, report: PassReport
) -> dict[int, str]:
    """Add Q and DQ to ``graph`` for every op that ``plan`` puts in int8 or fp8, if the op has such a form.

    Ops that already read a DequantizeLinear stay unchanged. Returns the ids of the refused ops with the reasons, which are also
    added to ``report``. Raises UsageError if ``calibration`` lacks the range of a value: it then belongs to another graph.
    """
    quantizer = _Quantizer(graph, plan, calibration, target, report)
    quantizer.run()
    return quantizer.refused


def without_data(graph: Graph, plan: PrecisionPlan, target: str, report: PassReport) -> dict[str, str]:
    """Key -> the reason, for ops that stay float if there is no calibration data. They are also added to ``report``.

    Ops that the model itself has quantized are not among them."""
    found = {}
    for op in graph.order():
        if op.kind not in ANCHORS or (asked := plan.of(op)) not in QUANTIZED or is_quantized(graph, op):
            continue
        why = (no_fp8 if asked == "fp8" else no_integers)(graph, op, target)
        reason = why or "the model does not quantize it, and there is no calibration data"
        found[key(op)] = reason
        report.refused.append(Refused(asked, node_names([op]), f"{op.kind} stays float: {reason}"))
    return found


LARGEST_WEIGHT = 127
"""Largest magnitude of int8 weights: their range is symmetric."""
SMALL_WEIGHT = 64
"""Largest magnitude of int8 weights for processors that add two products in 16 bits: 2 x 255 x 64 = 32,640 fits."""


class _Quantizer:
    """Chooses the ops to quantize and the scales of values, and adds Q and DQ to the graph."""

    def __init__(self, graph: Graph, plan: PrecisionPlan, calibration: Calibration, target: str, report: PassReport):
        self.graph, self.plan, self.calibration, self.report = graph, plan, calibration, report
        self.target = target
        self.largest = SMALL_WEIGHT if TargetName.parse(target).family == "cpu" and bytes_saturate() else LARGEST_WEIGHT
        self.chosen: dict[int, str] = {}
        """Id of an op that will run in integers or fp8 -> its precision."""
        self.wanted: dict[tuple[Value, str], None] = {}
        """(value, precision) of each value that gets Q and DQ, in the order in which they were found."""
        self.scales: dict[tuple[Value, str], tuple[Value, Value | None]] = {}
        self._parent: dict[tuple[Value, str], tuple[Value, str]] = {}
        self._sources: dict[Value, bool] = {}
        self.refused: dict[int, str] = {}

    def run(self) -> None:
        self._choose_anchors()
        self._choose_between()
        parameters = self._parameters()
        for value, precision in self._in_order():
            self._pair(value, precision, *parameters[self._root((value, precision))])
        for op_id, precision in self.chosen.items():
            op = self.graph.op(op_id)
            if op.kind in ANCHORS:
                self._weights(op, precision)
            self.report.fired.append(Fired(precision, node_names([op])))

    # ------------------------------------------------------------------ which ops

    def _choose_anchors(self) -> None:
        for op in self.graph.order():
            if op.kind in STRUCTURAL or (asked := self.plan.of(op)) not in QUANTIZED:
                continue
            if op.kind not in ANCHORS:
                reason = no_integers(self.graph, op, self.target) if self.plan.named(op) else None
                if reason is not None:
                    self._refuse(op, asked, reason, reason)
                continue
            if is_quantized(self.graph, op):
                continue
            why = no_fp8 if asked == "fp8" else no_integers
            reason = why(self.graph, op, self.target) or self._unseen(op)
            if reason is not None:
                self._refuse(op, asked, reason, f"{op.kind} stays float: {reason}")
                continue
            if op.attrs.prologue:
                split_prologue(self.graph, op)
                op = self.graph.op(op.id)
            self.chosen[op.id] = asked
            for value in self._data(op):
                self.wanted[value, asked] = None

    def _refuse(self, op: Op, asked: str, reason: str, shown: str) -> None:
        self.refused[op.id] = reason
        self.report.refused.append(Refused(asked, node_names([op]), shown))

    def _unseen(self, op: Op, results: Sequence[Value] = ()) -> str | None:
        """The reason why an op must stay float: calibration saw no elements of an operand or of one of ``results``. Else None."""
        graph, ranges = self.graph, self.calibration.ranges
        lacking = [graph.type(v) for v in (*self._data(op), *results) if graph.output(v).name not in ranges]
        if lacking and self.calibration.other_sizes:
            return "calibration saw the network at other sizes, where it does not have this operand"
        if any(not t.is_static or 0 in t.static_shape for t in lacking):  # its size depends on data, or is 0
            return "the calibration data leaves its operand empty"
        return None

    def _data(self, op: Op) -> list[Value]:
        """The operands that carry data: neither parameters nor operands that broadcast in a stage."""
        graph, found = self.graph, []
        for slot, value in enumerate(op.inputs):
            if value is None or graph.constant_value(value) is not None or graph.type(value).dtype != FP32:
                continue
            arity = op.definition.arity
            if op.kind in ANCHORS and slot >= (arity or 0) and graph.type(value).shape != op.outputs[0].type.shape:
                continue
            found.append(value)
        return list(dict.fromkeys(found))

    def _choose_between(self) -> None:
        """Choose the ops between anchors: an op with a quantized form is quantized if a quantized op reads its result."""
        for op in reversed(self.graph.order()):
            if not self._follows(op):
                continue
            outputs = op.values
            asked = next((p for v in outputs for p in sorted(QUANTIZED) if (v, p) in self.wanted), None)
            if asked is None or no_integers(self.graph, op, self.target) is not None:
                continue
            data = self._data(op)
            constant = any(
                v is not None and self.graph.constant_value(v) is not None and self.graph.type(v).dtype == FP32
                for v in (
                    op.inputs[:1] if op.kind == "Pad" else op.inputs
                )  # a Pad adds 0, which every scale can represent
            )
            if not data or constant or (op.kind in OWN_SCALE and not all(map(self._from_integers, data))):
                continue
            results = [v for v in outputs if self.graph.uses(v)]
            if self._unseen(op, results) is not None:
                continue
            self.chosen[op.id] = asked
            for v in (*data, *results):
                self.wanted[v, asked] = None
                if op.kind in SHARES_SCALE:
                    self._join((data[0], asked), (v, asked))

    def _follows(self, op: Op) -> bool:
        """Whether an op takes the precision of its neighbors. The plan may name another precision for it."""
        return op.kind in SHARES_SCALE | OWN_SCALE and (not self.plan.named(op) or self.plan.of(op) in QUANTIZED)

    def _from_integers(self, value: Value) -> bool:
        """Whether a quantized op computes the value, possibly with ops between that follow their neighbors."""
        if value not in self._sources:
            op = self.graph.op(value)
            moved = self._follows(op)
            self._sources[value] = op.id in self.chosen or (
                moved and bool(data := self._data(op)) and all(map(self._from_integers, data))
            )
        return self._sources[value]

    # ------------------------------------------------------------------ scales

    def _root(self, item: tuple[Value, str]) -> tuple[Value, str]:
        """The representative of all values that share a scale with this one (union-find)."""
        while (up := self._parent.get(item, item)) != item:
            item = up
        return item

    def _join(self, a: tuple[Value, str], b: tuple[Value, str]) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a

    def _parameters(self) -> dict[tuple[Value, str], tuple[Value, Value | None]]:
        """Representative -> scale and zero point, as constants, of each set of values that share a scale."""
        hulls: dict[tuple[Value, str], Range] = {}
        for item in self.wanted:
            name = self.graph.output(item[0]).name
            found = self.calibration.range(name)
            if found is None:
                hint = "it was made for another graph: calibrate again"
                raise UsageError(f"the calibration has no range for {name!r}", hint=hint)
            root = self._root(item)
            hulls[root] = hulls[root].hull(found) if root in hulls else found
        padded = {self._root(item) for item in self.wanted if any(map(pads_image, self.graph.users(item[0])))}
        parameters = {}
        for root, range_ in hulls.items():
            name = self.graph.output(root[0]).name
            even = root in padded and TargetName.parse(self.target).family == "cuda"
            scale, zero = (fp8_scale(range_), None) if root[1] == "fp8" else integer_parameters(range_, even=even)
            parameters[root] = (
                self.graph.add_constant(scale, f"{name}/scale"),
                None if zero is None else self.graph.add_constant(zero, f"{name}/zero_point"),
            )
        return parameters

    # ------------------------------------------------------------------ the graph

    def _in_order(self) -> list[tuple[Value, str]]:
        position = {op.id: k for k, op in enumerate(self.graph.order())}
        return sorted(self.wanted, key=lambda item: (position[item[0].op], item[0].port, item[1]))

    @staticmethod
    def _dtype(precision: str) -> DType:
        return FP8 if precision == "fp8" else UINT8

    def _pair(self, value: Value, precision: str, scale: Value, zero: Value | None) -> None:
        """Add Q and DQ after a value. Its quantized users read the DQ. If a quantized op computes the value, all users but those of
        another precision do."""
        graph, source = self.graph, self.graph.op(value)
        uses = graph.uses(value)
        name = graph.output(value).name

        def joins(use: Use) -> bool:
            reads, reader = self.chosen.get(use.op), graph.op(use.op)
            return reads == precision or (reads is None and reader.kind != "Output" and source.id in self.chosen)

        readers = [use for use in uses if joins(use)]
        src = frozenset(n for use in readers for n in graph.op(use.op).src)  # their kernels take in the DQ
        attrs = QuantizeAttrs(self._dtype(precision), axis=0)
        q = graph.add("QuantizeLinear", [value, scale, zero], attrs, names=[f"{name}/q"], src=source.src or src).value
        dq = graph.add("DequantizeLinear", [q, scale, zero], DequantizeAttrs(axis=0), names=[f"{name}/dq"], src=src)
        self.scales[dq.value, precision] = (scale, zero)
        for use in readers:
            set_operand(graph, use, dq.value)

    def _weights(self, op: Op, precision: str) -> None:
        """Replace constant weights and bias by quantized constants, each with a DequantizeLinear after it."""
        graph = self.graph
        weights = graph.constant_value(op.input(1))
        if weights is None:
            return
        axis = weight_axis(op, weights)
        x_scale = graph.constant_value(self.scales[operand(op), precision][0])
        assert x_scale is not None
        bias = graph.constant_value(op.input(2)) if op.kind != "MatMul" else None
        if op.kind == "Gemm" and bias is not None and bias.size == 1:  # one number for all columns
            assert axis is not None
            bias = np.broadcast_to(bias.reshape(1), (weights.shape[axis],))
        inputs = list(op.inputs)
        name = graph.output(operand(op, 1)).name
        integers, scale = quantized_weights(weights, axis, precision, bias, float(x_scale), self.largest)
        shift = self._shift(op, weights, integers, scale, axis)
        if shift is not None and op.kind != "MatMul":
            bias = -shift if bias is None else bias.astype(np.float64) - shift.reshape(bias.shape)
            bias = bias.astype(np.float32)
            if op.input(2) is None:
                inputs = [*inputs[:2], graph.add_constant(bias, f"{name}/correction"), *inputs[3:]]
            integers, scale = quantized_weights(weights, axis, precision, bias, float(x_scale), self.largest)
        elif shift is not None:
            self._correct_stage(op, inputs, shift)
        inputs[1] = self._dequantized(integers, scale, axis, name, op)
        if bias is not None and precision == "int8":
            step = (x_scale.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
            whole = np.clip(np.rint(bias.astype(np.float64).reshape(-1) / step), -(2.0**31), 2.0**31 - 1).astype(INT32)
            b_name = graph.output(inputs[2]).name  # type: ignore[arg-type]
            inputs[2] = self._dequantized(whole.reshape(bias.shape), step, bias.ndim - 1, b_name, op)
        old = [v.op for v in op.inputs[1:] if v is not None]
        graph.set_op(replace(op, inputs=tuple(inputs)))
        graph.remove_dead(old)

    def _shift(self, op: Op, weights: Array, integers: Array, scale: Array, axis: int | None) -> Array | None:
        """The shift of each output channel's mean that rounding the weights causes; None if it is 0 or the means are not known."""
        dequantize = self.graph.op(operand(op))
        value = operand(self.graph.op(operand(dequantize)))
        means = self.calibration.means.get(self.graph.output(value).name)
        if means is None:
            return None
        error = integers.astype(np.float64) * _along(scale, axis, weights.ndim) - weights
        shift = rounding_shift(op, error, means, self.graph.type(value).dims)
        return None if shift is None or not shift.any() else shift

    def _correct_stage(self, op: Op, inputs: list[Value | None], shift: Array) -> None:
        """Subtract the shift from a MatMul's bias, which is its first stage if this stage adds a constant vector."""
        first = op.attrs.epilogue[0] if op.attrs.epilogue else None
        if first is None or first.kind != "Add":
            return
        slot = next((a for a in first.args if a is not None and a >= 0), None)
        bias = None if slot is None else self.graph.constant_value(op.inputs[slot])
        if slot is None or bias is None or bias.size != shift.size or bias.shape[-1:] != shift.shape:
            return
        name = self.graph.output(op.inputs[slot]).name
        corrected = (bias.astype(np.float64) - shift.reshape(bias.shape)).astype(bias.dtype)
        inputs[slot] = self.graph.add_constant(corrected, name)

    def _dequantized(self, integers: Array, scale: Array, axis: int | None, name: str, op: Op) -> Value:
        graph = self.graph
        operands = [graph.add_constant(integers, f"{name}/q"), graph.add_constant(scale, f"{name}/scale"), None]
        attrs = DequantizeAttrs(axis=axis or 0)
        return graph.add("DequantizeLinear", operands, attrs, names=[f"{name}/dq"], src=op.src).value


def _along(scale: Array, axis: int | None, rank: int) -> Array:
    """Scales reshaped for broadcasting along ``axis`` of a tensor with ``rank`` axes; None: one scale for all."""
    return scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(rank)])


def is_quantized(graph: Graph, op: Op) -> bool:
    """Whether a DequantizeLinear computes the op's data operand."""
    return producer(graph, op.input(0), {"DequantizeLinear"}) is not None


def weight_axis(op: Op, weights: Array) -> int | None:
    """The axis of output channels, along which each entry has its own scale; None: one scale for all weights."""
    if op.kind == "Conv":
        return 0
    if op.kind == "ConvTranspose":
        return 1 if op.attrs.group == 1 else None
    if op.kind == "Gemm":
        return 0 if op.attrs.transB else 1
    return weights.ndim - 1 if weights.ndim == 2 else None


def quantized_weights(
    weights: Array,
    axis: int | None,
    precision: str,
    bias: Array | None = None,
    x_scale: float = 1.0,
    largest: int = LARGEST_WEIGHT,
) -> tuple[Array, Array]:
    """(int8 or fp8 weights, float32 scales), symmetric: a scale for each entry of ``axis``, or (None) one for all, with shape [].

    The magnitude of int8 weights is at most ``largest``. A channel of zeros has the scale 1, or the scale that its bias needs. The
    scale of products is ``x_scale`` times the scale of the weights; if the bias would not fit 30 bits at this scale, the scale of
    the weights is raised until it does. Raises UsageError for weights that are not finite.
    """
    wide = weights.astype(np.float64)
    if not np.isfinite(wide).all():
        raise UsageError("weights that are not finite cannot be quantized")
    others = None if axis is None else tuple(i for i in range(wide.ndim) if i != axis)
    top = FP8_LARGEST if precision == "fp8" else float(largest)
    scale = np.asarray(np.abs(wide).max(axis=others, initial=0.0)) / top
    empty = scale < np.finfo(np.float32).tiny
    if bias is not None and precision == "int8":
        row = np.abs(bias.astype(np.float64)).reshape(-1)
        if scale.ndim == 0:
            row = row.max(initial=0.0)
        needed = row / (BIAS_LIMIT * x_scale)
        of_bias = np.maximum(needed * 2**10, np.finfo(np.float32).tiny)
        scale = np.maximum(np.where(empty, np.where(row > 0, of_bias, 1.0), scale), needed)
    else:
        scale = np.where(empty, 1.0, scale)
    scale = scale.astype(np.float32)
    quotient = wide / _along(scale, axis, wide.ndim).astype(np.float64)
    if precision == "fp8":
        return np.clip(quotient, -FP8_LARGEST, FP8_LARGEST).astype(FP8), scale
    return np.clip(np.rint(quotient), -largest, largest).astype(INT8), scale
