"""Sums over groups of an image's channels are additions of the groups, or part of a convolution's weights.

ResNeSt's split attention (Zhang et al., 2020) and SKNet's selective kernels (Li et al., 2019) view an image of R times C channels
as (N, R, C, H, W), or stack R images so. They add up the groups, average the sum over the positions, and make R weights for each
channel of it; then they multiply each group by its weights and add up again. With five axes there is no channels-last order, and
each multiplication and sum reads and writes all groups. Here groups are slices of channels, which move nothing, and each sum is one
pointwise operator. An average of the first sum that only convolutions read is one of all channels: their weights add up the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.channel_shuffles import conv, weights_of
from optdnn.passes.support.facts import RESHAPES, integers, ints, operand, producer, reshaped
from optdnn.types import Array, normalize_axis

MOST_GROUPS = 4
"""A sum of more groups stays one reduction."""
RANK = 5
"""Axes of groups of images."""
JOINS = frozenset({"Mul", "Add", "Sub"})
"""Operators that may stand between the groups and their sum."""
Groups = Callable[[Patch, int], Value]
"""Adds a group, given its number, of (N, C, H, W), or (N, C, 1, 1)."""


def _sum_of_groups(graph: Graph, op: Op) -> Value | None:
    """The groups (N, R, C, H, W), all sizes known, that a ReduceSum adds up."""
    if op.attrs.keepdims or ints(graph, op.input(1)) is None:
        return None
    t, axes = graph.type(operand(op)), ints(graph, op.input(1)) or ()
    if t.rank != RANK or not t.is_static or [normalize_axis(a, RANK) for a in axes] != [1]:
        return None
    return operand(op) if 1 < t.static_shape[1] <= MOST_GROUPS else None


def _image(graph: Graph, groups: Value) -> Value | None:
    """The image whose channels are these groups, side by side."""
    view, (n, r, c, *size) = producer(graph, groups, RESHAPES), graph.type(groups).static_shape
    if view is None or graph.type(operand(view)).dims != (n, r * c, *size):
        return None
    return operand(view)


@rule("pooled_groups", {"ReduceSum"})
def pooled_groups(graph: Graph, op: Op) -> Match | Miss | None:
    """The average over the positions of a sum of groups, read by convolutions: they read the average of each channel."""
    pool, groups = graph.sole_user(op.value), _sum_of_groups(graph, op)
    image = None if groups is None else _image(graph, groups)
    if pool is None or pool.kind != "GlobalAveragePool" or groups is None or image is None:
        return None
    users = list(graph.users(pool.value))
    weights = [weights_of(graph, u) if u.kind == "Conv" else None for u in users]
    if any(w is None for w in weights):
        return None  # the sum remains, of slices
    count = graph.type(groups).static_shape[1]

    def build(patch: Patch) -> None:
        means = patch.add("GlobalAveragePool", [image], pool.attrs)
        for user, found in zip(users, weights, strict=True):
            assert found is not None
            weight = np.concatenate([_whole(found[0], user.attrs.group)] * count, axis=1)
            patch.replace(user.value, conv(patch, means, weight, found[1], replace(user.attrs, group=1)))

    return Match((op, pool, *users), build)


def _whole(weight: Array, groups: int) -> Array:
    """A convolution's weights (O, C / groups, H, W) as those of all channels, with zeros between its groups."""
    filters, inside = len(weight) // groups, weight.shape[1]
    made = np.zeros((len(weight), groups * inside, *weight.shape[2:]), weight.dtype)
    for g in range(groups):
        rows = slice(g * filters, (g + 1) * filters)
        made[rows, g * inside : (g + 1) * inside] = weight[rows]
    return made


@rule("sum_of_groups", {"ReduceSum"})
def sum_of_groups(graph: Graph, op: Op) -> Match | Miss | None:
    """A sum of weighted groups of channels: the groups, weighted and added up one after another."""
    value = _sum_of_groups(graph, op)
    if value is None:
        return None
    covered: list[Op] = [op]
    group = _groups(graph, value, covered)
    if group is None:
        return Miss("its groups are not those of an image's channels, or not multiplied and added one by one")

    def build(patch: Patch) -> Value:
        total = group(patch, 0)
        for number in range(1, graph.type(value).static_shape[1]):
            total = patch.add("Add", [total, group(patch, number)])
        return total

    return Match(tuple(covered), build)


def _groups(graph: Graph, value: Value, covered: list[Op]) -> Groups | None:
    """How to make each group of a value; None where groups cannot be taken apart. ``covered`` gets the operators in between."""
    join = producer(graph, value, JOINS, alone=True)
    if join is not None:
        sides, shape = (operand(join, 0), operand(join, 1)), graph.type(value).dims
        types = [graph.type(side) for side in sides]
        if any(not t.is_static or t.rank != RANK or t.dims[:3] != shape[:3] for t in types):
            return None
        first, second = (_groups(graph, side, covered) for side in sides)
        if first is None or second is None:
            return None
        covered.append(join)
        return lambda patch, k: patch.add(join.kind, [first(patch, k), second(patch, k)], join.attrs)
    return _stacked(graph, value) or _sliced(graph, value)


def _stacked(graph: Graph, value: Value) -> Groups | None:
    """Groups that are images, joined by a Concat along an axis of their own."""
    stack = producer(graph, value, {"Concat"})
    if stack is None or normalize_axis(stack.attrs.axis, RANK) != 1:
        return None
    (n, r, c, *size), images = graph.type(value).static_shape, list[Value]()
    for v in stack.inputs:
        view = producer(graph, v, RESHAPES)
        if view is None or graph.type(operand(view)).dims != (n, c, *size):
            return None
        images.append(operand(view))
    return (lambda patch, k: images[k]) if len(images) == r else None


def _sliced(graph: Graph, value: Value) -> Groups | None:
    """Groups that a Reshape made of an image's channels; or one number a channel. Slices of the second axis are groups."""
    (n, r, c, *size), x = graph.type(value).static_shape, _image(graph, value)
    if x is None and set(size) != {1}:
        return None
    x = value if x is None else x
    dims, step = graph.type(x).dims, 1 if x == value else c

    def group(patch: Patch, k: int) -> Value:
        bounds = [integers(patch, [i], "bound") for i in (k * step, (k + 1) * step, 1)]
        part = patch.add("Slice", [x, *bounds])
        return part if dims == (n, r * c, *size) else reshaped(patch, part, (n, c, *size))

    return group


class ChannelGroups(RulePass):
    name = "channel_groups"
    rules = (pooled_groups, sum_of_groups)
