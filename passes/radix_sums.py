"""Sums over an axis of channel groups that a Reshape made become additions of these groups in place.

Split attention (ResNeSt: Zhang et al., 2022) views its channels as ``[radix, channels]``. It sums over the radix and takes the
means of all positions. Later it multiplies each group by a factor per image and channel, and sums the groups again. In
channels-last order the view is a copy of the image, and the sums read and write it again. This pass takes the means of all
channels first, and adds them then. The factors and the second sum become one pointwise operator, which reads each group in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, ints, operand, producer, shape_of, split_along

MOST = 4
"""Most groups of a sum: a kernel reads as many tensors at once."""


@dataclass(frozen=True)
class _Groups:
    """``count`` groups of channels, side by side in ``whole``. ``ops``: the operators that view the groups as an axis."""

    whole: Value
    count: int
    ops: tuple[Op, ...]

    def parts(self, patch: Patch, x: Value) -> list[Value]:
        """The groups of a tensor with the channels of ``whole``."""
        return split_along(patch, x, 1, [patch.type(x).static_shape[1] // self.count] * self.count)


def _sums_groups(graph: Graph, op: Op) -> bool:
    """Whether ``op`` sums over axis 1 of five or more axes of known sizes, and drops that axis."""
    shape = shape_of(graph, operand(op)) if op.kind == "ReduceSum" else None
    if shape is None or len(shape) < 5 or 0 in shape or not graph.type(operand(op)).is_static or op.attrs.keepdims:
        return False
    return reduced_axes(op.attrs, ints(graph, op.input(1)), len(shape)) == (1,)


def _groups(graph: Graph, x: Value) -> _Groups | None:
    """The groups of channels that a Reshape turned into axis 1 of ``x``; None for other values."""
    view, shape = producer(graph, x, {"Reshape"}), graph.type(x).static_shape
    if view is None or not 2 <= shape[1] <= MOST:
        return None
    whole = operand(view)
    if shape_of(graph, whole) != (shape[0], shape[1] * shape[2], *shape[3:]):
        return None
    return _Groups(whole, shape[1], (view,))


def _added(patch: Patch, values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = patch.add("Add", [total, value])
    return total


@rule("sum_of_groups", {"ReduceSum"})
def sum_of_groups(graph: Graph, op: Op) -> Match | Miss | None:
    """ReduceSum of a view of groups, or of such a view times a factor per image and channel."""
    if not _sums_groups(graph, op):
        return None
    x, factor = operand(op), None
    product = producer(graph, x, {"Mul"})
    if product is not None:
        sides = [(a, f) for a, f in (product.inputs, product.inputs[::-1]) if a is not None and f is not None]
        x, factor = next(((a, f) for a, f in sides if _groups(graph, a) and _scales(graph, a, f)), (x, None))
    found = _groups(graph, x) if product is None or factor is not None else None
    if found is None:
        return None
    if product is not None and graph.sole_user(product.value) != op:
        return Miss(f"the products of {product.name} have another reader")
    user = graph.sole_user(op.value)
    if user is not None and user.kind == "GlobalAveragePool":
        return None  # mean_of_groups rewrites it

    def build(patch: Patch) -> Value:
        groups = found.parts(patch, found.whole)
        if factor is not None:
            n, count, channels = graph.type(factor).static_shape[:3]
            shape = (n, count * channels, *graph.type(factor).static_shape[3:])
            factors = found.parts(patch, in_shape(patch, factor, shape))
            groups = [patch.add("Mul", [g, f]) for g, f in zip(groups, factors, strict=True)]
        return _added(patch, groups)

    return Match((op, *([product] if product is not None else []), *found.ops), build)


def _scales(graph: Graph, x: Value, factor: Value) -> bool:
    """Whether ``factor`` has one number for each image and channel of ``x``."""
    shape = shape_of(graph, x)
    return shape is not None and shape_of(graph, factor) == (*shape[:3], *(1 for _ in shape[3:]))


@rule("mean_of_groups", {"GlobalAveragePool"})
def mean_of_groups(graph: Graph, op: Op) -> Match | Miss | None:
    """The means of a sum of groups are sums of means. If a convolution reads them, its weights are repeated for each group."""
    total = producer(graph, operand(op), {"ReduceSum"})
    if total is None or not _sums_groups(graph, total):
        return None
    found = _groups(graph, operand(total))
    if found is None:
        return None
    if graph.sole_user(total.value) != op:
        return Miss(f"the sums of {total.name} have another reader")
    reader = graph.sole_user(op.value)
    weight = None
    if reader is not None and reader.kind == "Conv" and reader.inputs[0] == op.value and reader.attrs.group == 1:
        weight = graph.constant_value(reader.inputs[1])

    def build(patch: Patch) -> Value:
        means = patch.add("GlobalAveragePool", [found.whole], op.attrs)
        if weight is None or reader is None:
            return _added(patch, found.parts(patch, means))
        repeated = patch.constant(np.concatenate([weight] * found.count, 1), "weight")
        return patch.add("Conv", [means, repeated, *reader.inputs[2:]], reader.attrs)

    covered = (op, total, *found.ops)
    if weight is None or reader is None:
        return Match(covered, build)
    return Match((*covered, reader), build, reader.value)


class RadixSums(RulePass):
    """Runs when the arithmetic is canonical, and before it becomes stages of convolutions."""

    name = "radix_sums"
    rules = (sum_of_groups, mean_of_groups)
