"""Channels between convolutions are padded to a multiple of 8, which many kernels need.

A depthwise convolution of 254 channels, or of two halves with 127 each, cannot read 8 elements at once. Means over 16-bit images,
products of 16-bit rows, and convolutions of fp32 on tensor cores also need a multiple of 8. A *region* consists of depthwise
convolutions, pointwise arithmetic, pools, means over pixels, and splits, slices and joins of channels. Its channels come from
convolutions and products with constant weights, and go to others. Their weights get the padding, after each group of channels:
zero filters compute the padding channels, and zero weights read them after the region. No launch is added.

Groups of a convolution are padded to a multiple of 64 channels, the tiles of Hopper's tensor cores (RegNet: 112, 120, 168 or 232
channels). Otherwise several groups would share a tile, with zeros between them, up to all groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors, widened
from optdnn.passes.support.facts import (
    RESHAPES,
    in_shape,
    integers,
    ints,
    is_depthwise,
    operand,
    reduction_axes,
    slice_limits,
    sliced,
)
from optdnn.passes.support.products import PRODUCTS, output_axis
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import normalize_axis

UNIT = 8
"""Padded channels are a multiple of this."""
TILE = 64
"""Channels of a padded group are a multiple of this. Smaller groups have a kernel of their own."""
IMAGES = (3, 4, 5)
"""Ranks of images."""
MOST, LEAST = 4 / 3, 7
"""Largest ratio of padded channels to channels, and the fewest channels that are padded: fewer take less time as they are."""
BOUNDED = frozenset({
    "Abs", "Add", "Celu", "Clip", "Cos", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max", "Min", "Mish", "Mul",
    "Neg", "PRelu", "Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Sub", "Swish", "Tanh",
})  # fmt: skip
"""Pointwise kinds that compute neither an infinity nor NaN from zeros or from each other's results: zero weights could not undo
them."""
POOLS = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
SUMS = ("ReduceMean", "ReduceSum")
WEIGHTED = ("Conv", "ConvTranspose", *sorted(PRODUCTS))
"""Kinds with weights that can compute or read padding."""


@dataclass
class _Region:
    """The values whose channels (axis 1) are padded, and the operators that write and read them. ``why``: the reason against it.
    ``group``: the channels of each group of convolutions in the region (0: none has groups). ``cuts``: first channels of slices."""

    graph: Graph
    group: int = 0
    values: set[Value] = field(default_factory=set)
    ops: dict[int, Op] = field(default_factory=dict)
    cuts: set[int] = field(default_factory=set)
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
        if op.kind in WEIGHTED:
            return self._at_weights(op, value)
        if op.kind in BOUNDED and (found := self._operands(op)) is not None and value in (op.value, *found):
            return [op.value, *found]
        if op.kind in ("Split", "Concat") and normalize_axis(op.attrs.axis, len(op.outputs[0].type.dims)) == 1:
            return [operand(op, i) for i in range(len(op.inputs) if op.kind == "Concat" else 1)] + list(results)
        if op.kind == "Slice" and (limits := _sliced_channels(self.graph, op)) is not None:
            self.cuts.add(limits[0])
            return [operand(op), op.value]
        if (op.kind in POOLS and len(results) == 1) or (op.kind in SUMS and over_pixels(self.graph, op)):
            return [operand(op), op.value]
        if op.kind in RESHAPES and _of_one_pixel(self.graph, op):
            return [operand(op), op.value]
        if op.kind == "Resize" and _keeps_channels(self.graph, op):
            return [operand(op), op.value]
        return f"{op.kind} {op.name} {'makes' if value in results else 'reads'} its channels"

    def _at_weights(self, op: Op, value: Value) -> list[Value] | str:
        weight, bias = self.graph.constant_value(op.input(1)), op.input(2)
        known = bias is None or self.graph.constant_value(bias) is not None
        used_twice = op.inputs.count(value) > 1 or value in op.inputs[1:]
        if weight is None or not known or used_twice or has_stages_or_factors(op):
            return f"{_noun(op)} {op.name} has no constant weights"
        if op.kind in PRODUCTS:
            ranks = {len(op.outputs[0].type.dims), len(self.graph.type(operand(op)).dims), weight.ndim}
            of_rows = ranks == {2} and not (op.kind == "Gemm" and op.attrs.transA)
            return [] if of_rows else f"product {op.name} is not of rows of channels"
        if is_depthwise(self.graph, op):
            return [operand(op), op.value]
        if op.attrs.group > 1 and self.group == weight.shape[1] == weight.shape[0] // op.attrs.group:
            return [operand(op), op.value]
        return [] if op.attrs.group == 1 else f"convolution {op.name} has groups"

    def _operands(self, op: Op) -> list[Value] | None:
        """The operands with the channels of the result; other operands are constants, or broadcast along the channels. None if the
        channels of one are on another axis."""
        channels, rank = op.outputs[0].type.dims[1:2], len(op.outputs[0].type.dims)
        found: list[Value] = []
        for v in op.inputs:
            if v is None or self.graph.constant_value(v) is not None:
                continue
            dims = self.graph.type(v).dims
            axis = 1 - rank + len(dims)
            if axis == 1 and dims[1:2] == channels:
                found.append(v)
            elif axis >= 0 and dims[axis] != 1:
                return None
        return found

    def unit(self) -> int:
        """Channels of a group: the greatest common divisor of all values' channels, and of the places where slices begin."""
        return math.gcd(self.group, *self.cuts, *(self.channels(v) for v in self.values))

    def channels(self, value: Value) -> int:
        """Channels of a value; 1 if the number is not known."""
        channels = self.graph.type(value).dims[1]
        return channels if isinstance(channels, int) else 1


def _sliced_channels(graph: Graph, op: Op) -> tuple[int, int] | None:
    """The first channel that a Slice takes, and the one behind the last; None if it has another axis, a step, or unknown limits.
    Legacy exports cut a tensor of any batch size into chunks with slices."""
    limits, channels = slice_limits(graph, op), graph.type(operand(op)).dims[1]
    if limits is None or not isinstance(channels, int) or [(axis, step) for axis, *_, step in limits] != [(1, 1)]:
        return None
    begin, end, _ = slice(*limits[0][1:3]).indices(channels)
    return (begin, end) if begin < end else None


def _of_one_pixel(graph: Graph, op: Op) -> bool:
    """Whether a reshape only adds or removes axes of one element behind the channels."""
    before, after = graph.type(operand(op)).dims, op.outputs[0].type.dims
    return before[:2] == after[:2] and set(before[2:] + after[2:]) <= {1}


def _keeps_channels(graph: Graph, op: Op) -> bool:
    """Whether a Resize keeps the channels, without a region of interest, and its scales or sizes are known."""
    same = graph.type(operand(op)).dims[:2] == op.outputs[0].type.dims[:2]
    if not same or op.input(1) is not None:
        return False
    if op.input(3) is not None:
        return ints(graph, op.input(3)) is not None
    scales = graph.constant_value(op.input(2))
    return scales is not None and all(n == 1 for axis, n in zip(_resized(op), scales, strict=True) if axis == 1)


def _resized(op: Op) -> list[int]:
    """The axes to which scales and sizes of a Resize refer."""
    rank = len(op.outputs[0].type.dims)
    return list(range(rank)) if op.attrs.axes is None else [normalize_axis(axis, rank) for axis in op.attrs.axes]


def over_pixels(graph: Graph, op: Op) -> bool:
    """Whether a reduction is only over axes after the channels."""
    axes = reduction_axes(graph, op)
    return axes is not None and min(axes, default=0) > 1


def _noun(op: Op) -> str:
    return "product" if op.kind in PRODUCTS else "convolution"


@rule("pad_channels", {"Conv"})
def pad_channels(graph: Graph, op: Op) -> Match | Miss | None:
    """A depthwise convolution whose channels, or the parts of its channels, are not a multiple of 8."""
    if not is_depthwise(graph, op) or len(op.outputs[0].type.dims) not in IMAGES:
        return None
    return _padded(_Region(graph), op, op.value)


@rule("pad_means", {"GlobalAveragePool", *SUMS})
def pad_means(graph: Graph, op: Op) -> Match | Miss | None:
    """A mean over the pixels of 16-bit images whose channels are not a multiple of 8."""
    dims = graph.type(operand(op)).dims
    if len(dims) not in IMAGES or not _odd(dims[1]) or (op.kind in SUMS and not over_pixels(graph, op)):
        return None
    return _padded(_Region(graph), op, operand(op))


@rule("pad_filters", {"Conv", "ConvTranspose"})
def pad_filters(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution of fp32 whose filters are not a multiple of 8: tensor cores would need a copy of its result."""
    dims = op.outputs[0].type.dims
    if op.attrs.group != 1 or len(dims) not in IMAGES or not _odd(dims[1]) or _is_output(graph, op):
        return None
    return _padded(_Region(graph), op, op.value)


@rule("pad_features", PRODUCTS)
def pad_features(graph: Graph, op: Op) -> Match | Miss | None:
    """A product of 16-bit rows whose columns are not a multiple of 8: the next product would need a copy of its result. One row
    needs none: one launch may run both products."""
    dims = op.outputs[0].type.dims
    if len(dims) != 2 or dims[0] == 1 or not _odd(dims[1]) or _is_output(graph, op):
        return None
    return _padded(_Region(graph), op, op.value)


@rule("pad_groups", {"Conv"})
def pad_groups(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution of 16 bits or tf32 whose groups have more than 64 channels, as many in as out, and no multiple of 64."""
    weight, groups = graph.constant_value(op.inputs[1]), op.attrs.group
    if weight is None or groups == 1 or len(op.outputs[0].type.dims) not in IMAGES:
        return None
    size = weight.shape[1]
    if size <= TILE or size % TILE == 0 or weight.shape[0] != groups * size:
        return None
    region = _Region(graph, size)
    region.grow(op.value)
    sums = [o.name for o in region.ops.values() if o.kind == "Add" and region.values.issuperset(o.inputs)]
    joins = [o.name for o in region.ops.values() if o.kind in ("Concat", "Slice", "Split")]
    if region.why or sums or joins:
        return Miss(region.why or f"the padding would reach {(sums + joins)[0]}, and all that it adds or joins")
    return _padded(region, op, op.value, TILE)


def _odd(channels: DimLike) -> bool:
    """Whether a known number of channels is not a multiple of 8."""
    return isinstance(channels, int) and channels % UNIT != 0


def _is_output(graph: Graph, op: Op) -> bool:
    """Whether the result is an output of the network, as that of most classifiers."""
    return any(user.kind == "Output" for user in graph.users(op.value))


def _padded(region: _Region, op: Op, value: Value, multiple: int = UNIT) -> Match | Miss | None:
    """The region of ``value``, which ``op`` reads or makes, with padding after each group of channels, to a ``multiple``."""
    region.grow(value)
    unit = region.unit()
    wide = -(-unit // multiple) * multiple
    if region.why:
        return Miss(region.why) if region.channels(value) % multiple else None
    if unit == wide:
        return None
    if wide > MOST * unit or unit < LEAST:
        return Miss(f"groups of {unit} channels would become groups of {wide}")
    covered = [o for o in region.graph.order() if o.id in region.ops]
    return Match((op, *(o for o in covered if o is not op)), lambda patch: _rewrite(patch, region, covered, unit, wide))


def _rewrite(patch: Patch, region: _Region, ops: Sequence[Op], unit: int, wide: int) -> None:
    new: dict[Value, Value] = {}
    for op in ops:
        inputs, attrs = [None if v is None else new.get(v, v) for v in op.inputs], op.attrs
        if op.kind in WEIGHTED:
            weight, bias = (region.graph.constant_value(v) for v in (*op.inputs, None)[1:3])
            assert weight is not None
            axis = output_axis(op)
            if op.value in region.values:
                if bias is not None and bias.shape[-1:] == (region.channels(op.value),):
                    inputs[2] = patch.constant(widened(bias, -1, unit, wide), "widened")
                weight = widened(weight, axis, unit, wide)
            if is_depthwise(region.graph, op):
                attrs = replace(attrs, group=weight.shape[0])
            elif op.inputs[0] in region.values:
                weight = widened(weight, 1 - axis, unit, wide)
            inputs[1] = patch.constant(weight, "widened")
        elif op.kind == "Split":
            parts = [region.channels(v) // unit * wide for v in op.values]
            inputs[1:], attrs = [integers(patch, parts, "sizes")], SplitAttrs(1)
        elif op.kind == "Slice" and (limits := _sliced_channels(region.graph, op)):
            begin, end = (n // unit * wide for n in limits)
            new[op.value] = sliced(patch, new[operand(op)], begin, end, 1)
            continue
        elif op.kind == "Resize" and (sizes := ints(region.graph, op.input(3))):
            channels = region.channels(op.value) // unit * wide
            given = [channels if axis == 1 else n for axis, n in zip(_resized(op), sizes, strict=True)]
            inputs[3] = integers(patch, given, "sizes")
        elif op.kind in RESHAPES:
            rows, _, *ones = op.outputs[0].type.dims
            new[op.value] = in_shape(
                patch, new[operand(op)], (rows, region.channels(op.value) // unit * wide, *ones), op.src
            )
            continue
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
    rules = (pad_channels, pad_means, pad_features)
    exact = (pad_channels, pad_filters)
    """The rules for fp32."""

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        precision, target = context.only_precision or "", TargetName.parse(context.target)
        rules = {"fp32": self.exact, "tf32": self.exact[:1], "fp64": ()}.get(precision, self.rules)
        tiles = precision in ("fp16", "bf16", "tf32") and (target.arch or HOPPER) == HOPPER
        return (*rules, pad_groups) if tiles else rules
