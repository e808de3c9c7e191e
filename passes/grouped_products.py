"""Products of the parts of a tensor, each part with its own matrix, become one grouped convolution.

Networks that split a spectrum into bands (BSRNN: Luo and Yu, 2023; BS-RoFormer: Lu et al., 2023), have a linear layer for each
channel (DLinear: Zeng et al., 2023) or a small network for each variable (temporal fusion transformers: Lim et al., 2021) compute
each part by itself: dozens of launches that do not fill a GPU. Parts of one size are the groups of a 1x1 convolution, which adds
their biases and applies their activation. Operators between these products, and after them, are computed for all parts at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, integers, operand, producer, reshaped
from optdnn.passes.support.lanes import (
    CUTS,
    LAST_AXIS,
    alike,
    along_last,
    covered,
    emit,
    leaf,
    plan,
    rows_in,
    taken,
)
from optdnn.passes.support.products import PRODUCTS, PlainProduct, added_vector, multiplied, plain_product
from optdnn.passes.support.stacks import DEPTH, Forms, Part, part_of
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.types import TensorType, is_float

LEAST = 3
"""Fewest parts of a group."""
MOST_PRODUCTS = 1 << 28
"""A product of at least this many multiplications fills a GPU by itself."""
MOST_STEPS = 6
"""Most operators between two products of a tower, such as a bias, a norm and an activation."""
PASSED = frozenset(STAGE_KINDS) | LAST_AXIS | CUTS | RESHAPES | {"Transpose"}
"""Kinds between a part and the operator that is computed for all parts at once."""

Step = tuple[Op, int, int]
"""An operator, the slot of the operand that comes from the part, and the port of the result that is read further."""


@dataclass(frozen=True)
class Family:
    """The part from which a value is computed, and the operators in between."""

    part: Part
    steps: tuple[Step, ...]


@rule("grouped_products", PRODUCTS)
def grouped_products(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A product and the products of the next parts, with other matrices of the same size, become one convolution."""
    x = operand(op)
    if (
        not op.outputs[0].type.is_static
        or not is_float(op.outputs[0].type.dtype)
        or plain_product(graph, op.value) is None
    ):
        return None
    group = _group(graph, op, 0)
    if len(group) < LEAST or len({one.inputs[1] for one in group}) == 1:
        return None
    weight = graph.type(operand(op, 1)).static_shape
    if context.counted(rows_in(graph, x) * weight[0] * weight[1]) >= MOST_PRODUCTS:
        return Miss("each part's product is large enough for a launch of its own")
    lanes = plan(graph, [operand(one) for one in group])
    products = [plain_product(graph, value) for value in _biased(graph, group)]
    if lanes is None or None in products:
        return Miss("the products of the parts have operands that are computed differently")
    found = [p for p in products if p is not None]
    activations = _activations(graph, [p.ops[0] for p in found])
    ends = activations or [p.ops[0] for p in found]

    def build(patch: Patch) -> None:
        y = _convolution(patch, emit(patch, lanes), found, activations[0] if activations else None)
        for end, lane in zip(ends, taken(patch, y, len(ends)), strict=True):
            patch.replace(end.value, lane)

    ops = (*(o for p in found for o in reversed(p.ops)), *activations, *covered(lanes))
    return Match(tuple({o.id: o for o in ops}.values()), build)


@rule("products_of_one", PRODUCTS)
def products_of_one(graph: Graph, op: Op) -> Match | None:
    """Products of one tensor with several matrices become one product, if each result is multiplied with a matrix of its own.

    Experts and towers of recommenders (MMoE: Ma et al., 2018) and ensembles have such layers. Their first products would be
    joined later (``fuse_siblings``), but the next ones need groups."""
    readers = [u for u in graph.users(operand(op)) if _begins_tower(graph, u) and _types(graph, u) == _types(graph, op)]
    group = list({u.id: u for u in readers}.values())
    if len(group) < LEAST or group[0].id != op.id or len({one.inputs[1] for one in group}) < len(group):
        return None
    products = [p for value in _biased(graph, group) if (p := plain_product(graph, value)) is not None]
    if len(products) < len(group) or len({p.bias is None for p in products}) > 1:
        return None
    activations = _activations(graph, [p.ops[0] for p in products])
    ends = activations or [p.ops[0] for p in products]

    def build(patch: Patch) -> None:
        weight, biases = (
            np.concatenate([p.weight for p in products], -1),
            [p.bias for p in products if p.bias is not None],
        )
        y = multiplied(patch, operand(op), weight, np.concatenate(biases) if biases else None)
        if activations:
            y = patch.add(activations[0].kind, [y], activations[0].attrs)
        y = reshaped(patch, y, (*patch.type(y).static_shape[:-1], len(ends), products[0].matrix.shape[1]))
        for end, lane in zip(ends, taken(patch, y, len(ends)), strict=True):
            patch.replace(end.value, lane)

    return Match(
        tuple({o.id: o for o in (*(o for p in products for o in reversed(p.ops)), *activations)}.values()), build
    )


def _begins_tower(graph: Graph, op: Op) -> bool:
    """Whether the result of a product with a constant matrix is multiplied with another one, after steps with constants."""
    if op.kind not in PRODUCTS or not op.outputs[0].type.is_static or plain_product(graph, op.value) is None:
        return False
    value = op.value
    for _ in range(MOST_STEPS):
        user = graph.sole_user(value)
        if (
            user is None
            or user.inputs[0] != value
            or any(graph.constant_value(v) is None for v in user.inputs[1:] if v)
        ):
            return False
        if user.kind in PRODUCTS:
            return plain_product(graph, user.value) is not None
        if user.kind not in STAGE_KINDS and not along_last(graph, user):
            return False
        value = user.value
    return False


@rule("grouped_stages", frozenset(STAGE_KINDS) | LAST_AXIS | CUTS)
def grouped_stages(graph: Graph, op: Op) -> Match | None:
    """Equal operators on all groups of a grouped convolution, or on most of them, are computed at once."""
    slot = next((k for k, v in enumerate(op.inputs) if v is not None and _is_group(graph, v)), None)
    if (
        slot is None
        or not op.outputs[0].type.is_static
        or (leaf(graph, Value(op.id, 0)) is not None and op.kind not in CUTS)
    ):
        return None
    group = _group(graph, op, slot)
    if len(group) < LEAST:
        return None
    lanes = [plan(graph, [Value(one.id, port) for one in group]) for port in range(len(op.outputs))]
    if any(each is None for each in lanes):
        return None

    def build(patch: Patch) -> None:
        for port, each in enumerate(lanes):
            assert each is not None
            for one, lane in zip(group, taken(patch, emit(patch, each), len(group)), strict=True):
                patch.replace(Value(one.id, port), lane)

    ops = {o.id: o for each in lanes for o in covered(each)}
    return Match(tuple({op.id: op, **ops}.values()), build)


def _is_group(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is one lane of a tensor that a grouped convolution computes, perhaps with operators after it."""
    gather = producer(graph, value, {"Gather"})
    part = None if gather is None else leaf(graph, value)
    if part is None or part.axis != len(graph.type(part.source).dims) - 2:
        return False
    source = part.source
    for _ in range(DEPTH):
        op = graph.op(source)
        if op.kind == "Conv":
            return bool(op.attrs.group > 1)
        if op.kind == "ReduceSum":
            scaled = producer(graph, operand(op), {"Mul"})
            return scaled is not None and graph.constant_value(operand(scaled, 1)) is not None
        if op.kind not in PASSED or not op.inputs:
            return False
        source = next((v for v in op.inputs if v is not None and graph.constant_value(v) is None), operand(op))
    return False


def _group(graph: Graph, op: Op, slot: int) -> list[Op]:
    """An operator and the same operator on the next parts, in order. Empty if the operator's part is not the first one."""
    found = _family(graph, operand(op, slot), DEPTH)
    if found is None:
        return []
    steps, same = (*found.steps, (op, slot, 0)), [alike(op), _types(graph, op)]

    def reached(value: Value) -> list[Op]:
        return [u for u in _followed(graph, value, steps) if [alike(u), _types(graph, u)] == same]

    start, size = found.part.start, found.part.size
    parts = graph.kept(Forms).parts(found.part)  # one list for all of them: each part looks for the others
    if any(reached(value) for value, part in parts if part.start == start - size):
        return []
    by_start = dict[int, Op]()
    for value, part in parts:
        ops = reached(value)
        if len(ops) > 1:
            return []
        if ops:
            by_start[part.start] = ops[0]
    if by_start.get(start) != op:
        return []
    count = next(k for k in range(len(by_start) + 1) if start + k * size not in by_start)
    return [by_start[start + k * size] for k in range(count)]


def _family(graph: Graph, value: Value, depth: int) -> Family | None:
    """The part from which ``value`` is computed, and the operators in between; None if there is none."""
    part = part_of(graph, value)
    if part is not None:
        return Family(part, ())
    op = graph.op(value)
    if depth == 0 or op.kind not in PASSED:
        return None
    for slot, inner in enumerate(op.inputs):
        found = None if inner is None else _family(graph, inner, depth - 1)
        if found is not None:
            return Family(found.part, (*found.steps, (op, slot, value.port)))
    return None


def _followed(graph: Graph, value: Value, steps: Sequence[Step]) -> list[Op]:
    """The operators that ``value`` reaches by operators like those of ``steps``."""
    reached, ops = [value], list[Op]()
    for like, slot, port in steps:
        ops = [
            u
            for v in reached
            for u in graph.users(v)
            if alike(u) == alike(like) and slot < len(u.inputs) and u.inputs[slot] == v
        ]
        reached = [Value(u.id, port) for u in ops]
    return ops


def _types(graph: Graph, op: Op) -> list[TensorType | None]:
    return [None if v is None else graph.type(v) for v in op.inputs]


def _biased(graph: Graph, group: Sequence[Op]) -> list[Value]:
    """The results of the products, or of the Adds after them if each product's only reader adds a constant vector."""
    adds = [graph.sole_user(one.value) for one in group]
    if all(a is not None and a.kind == "Add" and added_vector(graph, a) is not None for a in adds):
        return [a.value for a in adds if a is not None]
    return [one.value for one in group]


def _activations(graph: Graph, ends: Sequence[Op]) -> list[Op]:
    """The activations that are the only readers of the products, if they are equal and have no further operand; else none."""
    found = [graph.sole_user(end.value) for end in ends]
    first = found[0]
    if first is None or first.kind not in ACTIVATIONS or len(first.inputs) > 1:
        return []
    same = [
        op for op in found if op is not None and (op.kind, op.attrs, len(op.inputs)) == (first.kind, first.attrs, 1)
    ]
    return same if len(same) == len(found) else []


def _convolution(patch: Patch, x: Value, products: Sequence[PlainProduct], activation: Op | None) -> Value:
    """Add the convolution whose groups are the lanes of ``x``, and the activation of its result.

    Groups of one column would fill an eighth of a tensor core's tile, or one thread. They are a sum of a multiplied tensor."""
    *lead, lanes, depth = patch.type(x).static_shape
    rows, columns = math.prod(lead), products[0].matrix.shape[1]
    if columns == 1:
        factors = patch.constant(np.concatenate([p.weight.T for p in products]), "weight")
        y = patch.add("ReduceSum", [patch.add("Mul", [x, factors]), integers(patch, [-1], "axes")], ReduceAttrs())
        if products[0].bias is not None:
            y = patch.add(
                "Add", [y, patch.constant(np.stack([p.bias for p in products if p.bias is not None]), "bias")]
            )
        return y if activation is None else patch.add(activation.kind, [y], activation.attrs)
    image = patch.add("Transpose", [reshaped(patch, x, (1, rows, lanes * depth))], TransposeAttrs((0, 2, 1)))
    weight = np.concatenate([p.weight.T for p in products])[..., None]
    bias = None if products[0].bias is None else np.concatenate([p.bias for p in products if p.bias is not None])
    inputs = [image, patch.constant(np.ascontiguousarray(weight), "weight")]
    inputs += [] if bias is None else [patch.constant(bias, "bias")]
    y = patch.add("Conv", inputs, ConvAttrs((1,), (0, 0), (1,), group=lanes))
    if activation is not None:
        y = patch.add(activation.kind, [y], activation.attrs)
    return reshaped(patch, patch.add("Transpose", [y], TransposeAttrs((0, 2, 1))), (*lead, lanes, columns))


class GroupedProducts(RulePass):
    name = "grouped_products"
    rules = (products_of_one, grouped_products, grouped_stages)
