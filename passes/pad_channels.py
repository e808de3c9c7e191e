"""Channels between convolutions are padded to a multiple of 8, which the kernels of 16-bit images need.

A depthwise convolution of 254 channels, or of two halves with 127 each, cannot read 8 bytes at once. A *region* consists of
depthwise convolutions, pointwise arithmetic, pools, and splits of channels. Its channels come from convolutions with constant
weights, and go to convolutions with constant weights. The weights of these get the padding, after each group of channels: zero
filters compute the padding channels, and zero weights read them after the region. No launch is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors, widened
from optdnn.passes.support.facts import integers, is_depthwise, operand
from optdnn.types import normalize_axis

UNIT, READ = 8, 4
"""Padded channels are a multiple of ``UNIT``. Multiples of ``READ`` are fast enough without padding."""
MOST = 1.25
"""Largest ratio of padded channels to channels."""
BOUNDED = frozenset({
    "Abs", "Add", "Celu", "Clip", "Cos", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max", "Min", "Mish", "Mul",
    "Neg", "PRelu", "Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh",
})  # fmt: skip
"""Pointwise kinds that compute no infinity from zeros or from each other's results: zero weights could not undo an infinity."""
POOLS = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")


@dataclass
class _Region:
    """The values whose channels (axis 1) are padded, and the operators that write and read them. ``why``: the reason against it."""

    graph: Graph
    values: set[Value] = field(default_factory=set)
    ops: dict[int, Op] = field(default_factory=dict)
    why: str = ""

    def grow(self, first: Value) -> None:
        """Adds all values that must have the same padding."""
        waiting = [first]
        while waiting and not self.why:
            value = waiting.pop()
            if value in self.values:
                continue
            self.values.add(value)
            for op in (self.graph.op(value), *self.graph.users(value)):
                self.ops[op.id] = op
                found = self._through(op, value)
                if isinstance(found, str):
                    self.why = found
                    break
                waiting += found

    def _through(self, op: Op, value: Value) -> list[Value] | str:
        """The other padded values of an operator, or why the operator cannot be part of the region."""
        results = op.values
        if op.kind == "Conv":
            return self._at_convolution(op, value)
        if op.kind in BOUNDED:
            return [op.value, *self._operands(op)]
        if op.kind == "Split" and normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) == 1:
            return [operand(op), *results]
        if op.kind in POOLS and len(results) == 1:
            return [operand(op), op.value]
        return f"{op.kind} {op.name} {'makes' if value in results else 'reads'} its channels"

    def _at_convolution(self, op: Op, value: Value) -> list[Value] | str:
        weight, bias = self.graph.constant_value(op.input(1)), op.input(2)
        if (
            weight is None
            or (bias is not None and self.graph.constant_value(bias) is None)
            or has_stages_or_factors(op)
        ):
            return f"convolution {op.name} has no constant weights"
        if op.inputs.count(value) > 1 or value in op.inputs[1:]:
            return f"convolution {op.name} has no constant weights"
        if is_depthwise(self.graph, op):
            return [operand(op), op.value]
        return [] if op.attrs.group == 1 else f"convolution {op.name} has groups"

    def _operands(self, op: Op) -> list[Value]:
        """The operands with the channels of the result; other operands are constants, or broadcast along the channels."""
        channels, rank = op.outputs[0].type.dims[1], len(op.outputs[0].type.dims)
        found = [v for v in op.inputs if v is not None and self.graph.constant_value(v) is None]
        shapes = ((v, self.graph.type(v).dims) for v in found)
        return [v for v, dims in shapes if len(dims) == rank and dims[1] == channels]

    def unit(self) -> int:
        """Channels of a group: the greatest common divisor of all values' channels."""
        return math.gcd(*(self.channels(v) for v in self.values))

    def channels(self, value: Value) -> int:
        """Channels of a value; 1 if the number is not known."""
        channels = self.graph.type(value).dims[1]
        return channels if isinstance(channels, int) else 1


@rule("pad_channels", {"Conv"})
def pad_channels(graph: Graph, op: Op) -> Match | Miss | None:
    """A depthwise convolution whose channels, or the parts of its channels, are not a multiple of 4."""
    if not is_depthwise(graph, op) or len(op.outputs[0].type.dims) not in (3, 4, 5):
        return None
    region = _Region(graph)
    region.grow(op.value)
    unit = region.unit()
    if unit % READ == 0 or (region.why and op.attrs.group % READ == 0):
        return None
    if region.why:
        return Miss(region.why)
    wide = -(-unit // UNIT) * UNIT
    if wide > MOST * unit:
        return Miss(f"groups of {unit} channels would become groups of {wide}")
    covered = [o for o in graph.order() if o.id in region.ops]
    return Match((op, *(o for o in covered if o is not op)), lambda patch: _rewrite(patch, region, covered, unit, wide))


def _rewrite(patch: Patch, region: _Region, ops: Sequence[Op], unit: int, wide: int) -> None:
    new: dict[Value, Value] = {}
    for op in ops:
        inputs, attrs = [None if v is None else new.get(v, v) for v in op.inputs], op.attrs
        if op.kind == "Conv":
            weight, bias = (region.graph.constant_value(v) for v in (*op.inputs, None)[1:3])
            assert weight is not None
            if op.value in region.values:
                weight = widened(weight, 0, unit, wide)
                inputs[2:3] = [] if bias is None else [patch.constant(widened(bias, 0, unit, wide), "widened")]
            if is_depthwise(region.graph, op):
                attrs = replace(attrs, group=weight.shape[0])
            elif op.inputs[0] in region.values:
                weight = widened(weight, 1, unit, wide)
            inputs[1] = patch.constant(weight, "widened")
        elif op.kind == "Split":
            parts = [region.channels(v) // unit * wide for v in op.values]
            inputs[1:], attrs = [integers(patch, parts, "sizes")], SplitAttrs(1)
        elif op.kind in BOUNDED:
            inputs = [new[v] if v in new else _constant(patch, region, op, v, unit, wide) for v in op.inputs]
        made = patch.add_op(
            op.kind, inputs, attrs, outputs=len(op.outputs), names=[o.name for o in op.outputs], src=op.src
        )
        new.update({Value(op.id, i): Value(made.id, i) for i in range(len(op.outputs))})
        if op.value not in region.values:
            patch.replace(op.value, made.value)


def _constant(patch: Patch, region: _Region, op: Op, value: Value | None, unit: int, wide: int) -> Value | None:
    """An operand from outside; a constant with a number per channel is padded with zeros."""
    known = region.graph.constant_value(value)
    axis = 0 if known is None else 1 - len(op.outputs[0].type.dims) + known.ndim
    if known is None or axis < 0 or known.shape[axis] != region.channels(op.value) or known.size == 1:
        return value
    return patch.constant(np.asarray(widened(known, axis, unit, wide)), "widened")


class PadChannels(RulePass):
    name = "pad_channels"
    rules = (pad_channels,)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """None for fp32, whose kernels need no padding."""
        return self.rules if context.plan is not None or context.precision not in ("fp32", "tf32", "fp64") else ()
