"""Equal products on each part of a tensor become one batched product.

Linear attention by chunks (retention: Sun et al., 2023; DeltaNet: Yang et al., 2024; Mamba-2: Dao and Gu, 2024) multiplies queries,
keys and values of each chunk. Exporters unroll the loop over the chunks: each chunk has small products of its own. Only the
products that read the state of the previous chunk depend on one another.

The products of all parts are stacked if their operands are computed in the same way, from consecutive parts of the same tensors.
One operand may have any origin, as states do: the parts of this operand are joined, and kernels write them in place. Operators on
the results are stacked too, as long as they are the same for all parts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, origins, producer
from optdnn.passes.support.stacks import (
    Forms,
    Joined,
    Part,
    Same,
    Stack,
    Window,
    columns,
    covered,
    emit,
    leaves,
    part_of,
    part_values,
    same,
    stack_of,
)
from optdnn.passes.support.stages import ADDITIONS
from optdnn.types import TensorType

LEAST_JOINED = 4
"""Fewest products for which operands of any origin are joined."""
MOST_PRODUCTS = 1 << 28
"""A product of at least this many multiplications fills a GPU by itself: it takes as long as about five small products."""


@rule("products_of_parts", {"MatMul"})
def products_of_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """A product and the same product of the other parts become one product."""
    group = _group(graph, op)
    if len(group) < 2:
        return None
    y = op.outputs[0].type
    if not y.is_static or op.attrs.prologue or op.attrs.epilogue:
        return None
    inner = graph.type(operand(op)).dims[-1]
    if not isinstance(inner, int) or math.prod(y.static_shape) * inner >= MOST_PRODUCTS:
        return Miss("each part's product is large enough for a launch of its own")
    if inner == 1:
        return Miss("a product of one term is a multiplication, which the operators that read it compute themselves")
    if any(_near_softmax(graph, one) for one in group):
        return Miss("it is a part of attention")
    if (
        all(graph.constant_value(one.inputs[1]) is not None for one in group)
        and len({one.inputs[1] for one in group}) > 1
    ):
        return Miss("each part has a matrix of its own")
    stack = same(graph, group, [_operand(graph, column) for column in columns(group)])
    if stack is None:
        return Miss("the products of the parts have operands that are computed differently")
    if not any(isinstance(each, Window | Same) for each in stack.operands):
        return None
    roots = {one.id for one in group}
    if any(one.id in roots for one in origins(graph, list(leaves(stack)))):
        return Miss("the product of one part depends on the product of another part")
    if any(isinstance(each, Joined) and _sequential(graph, each.values) for each in stack.operands):
        return Miss(
            "each operand depends on the previous one through a product, so that it runs concurrently with the next steps"
        )
    return _replaced([one.value for one in group], stack)


@rule("stages_of_parts", frozenset(STAGE_KINDS))
def stages_of_parts(graph: Graph, op: Op) -> Match | None:
    """Equal operators on all or most parts of a batched product become one operator on the whole product."""
    found = next((part for v in op.inputs if v is not None and (part := part_of(graph, v)) is not None), None)
    if found is None or not found.dropped or found.axis or not _is_stack(graph, found.source):
        return None
    group = _group(graph, op)
    if len(group) < min(LEAST_JOINED, graph.type(found.source).static_shape[0]):
        return None
    stack = stack_of(graph, [one.value for one in group])
    roots = {one.id for one in group}
    if not isinstance(stack, Same) or any(one.id in roots for one in origins(graph, list(leaves(stack)))):
        return None
    return _replaced([one.value for one in group], stack)


def _is_stack(graph: Graph, value: Value) -> bool:
    """Whether a batched product computes ``value``, perhaps with pointwise operators after it."""
    while (op := graph.op(value)).kind in STAGE_KINDS:
        value = operand(op)
    return op.kind == "MatMul" and graph.type(value).rank != 2


@rule("factors_of_steps", {"MatMul", "Mul"})
def factors_of_steps(graph: Graph, op: Op) -> Match | None:
    """In a recurrence, the factors that do not depend on earlier steps become one stack for all steps.

    Recurrences of pointwise steps alone become one launch elsewhere."""
    if op.kind == "Mul" and not any(_adds_product(graph, v) for v in op.inputs):
        return None
    group = _group(graph, op)
    if len(group) < LEAST_JOINED:
        return None
    roots = {one.id for one in group}
    both = list(columns(group))
    for values, others in (both, both[::-1]):
        stack = stack_of(graph, values)
        if not isinstance(stack, Same) or not any(one.kind in STAGE_KINDS for one in covered(stack)):
            continue
        depends = any(one.id in roots for one in origins(graph, others))
        if not depends or any(one.id in roots for one in origins(graph, values)):
            continue
        return _replaced(values, stack)
    return None


def _adds_product(graph: Graph, value: Value | None) -> bool:
    """Whether a value is a product, or a sum with a product: a state of a recurrence with products."""
    add = producer(graph, value, ADDITIONS)
    return any(producer(graph, v, {"MatMul"}) is not None for v in (value, *(() if add is None else add.inputs)))


def _operand(graph: Graph, values: list[Value]) -> Stack | None:
    """The stack of one operand of all products, or None."""
    found = stack_of(graph, values)
    if found is None and len(values) >= LEAST_JOINED:
        types = {graph.type(v) for v in values}
        found = Joined(tuple(values)) if len(types) == 1 and graph.type(values[0]).is_static else None
    if any(len(graph.type(v).dims) < 2 for v in values):
        return None
    return found


def _sequential(graph: Graph, values: Sequence[Value]) -> bool:
    """Whether each value depends on the previous one through a product, as the states of RWKV-7 do.

    Products that read these states run concurrently with the next steps. A batched product would wait for the last state (RWKV-7 on
    an H100: 120 instead of 105 us)."""
    first, second = values[-2:]
    before = {one.id for one in origins(graph, [first])}
    between = [one for one in origins(graph, [second]) if one.id not in before and one.kind == "MatMul"]
    return any(first.op in {one.id for one in origins(graph, [v for v in m.inputs if v is not None])} for m in between)


def _replaced(values: Sequence[Value], stack: Stack) -> Match:
    """A match that replaces the values by parts of their stack."""

    def build(patch: Patch) -> None:
        for old, new in zip(values, part_values(patch, emit(patch, stack), len(values)), strict=True):
            patch.replace(old, new)

    return Match(tuple({op.id: op for op in covered(stack)}.values()), build)


def _group(graph: Graph, op: Op) -> list[Op]:
    """An operator and the equal operators on later parts, in the order of the parts.

    Empty if the operator's part is not the first one: then it belongs to the group of the previous part."""
    forms = graph.kept(Forms)  # one for all steps: each looks for the others
    leaves_of = ((slot, forms.leaf(v)) for slot, v in enumerate(op.inputs) if v is not None)
    slot, leaf = next(((slot, leaf) for slot, leaf in leaves_of if leaf is not None), (0, None))
    part = None if leaf is None else part_of(graph, leaf.value)
    if leaf is None or part is None:
        return []
    path, own, seen = (*leaf.path, (op, slot)), forms.of(operand(op, slot)), _types(graph, op)
    rest = [k for k in range(len(op.inputs)) if k != slot]

    def alike(value: Value) -> list[Op]:
        found = [
            u for u in _followed(graph, value, path) if _types(graph, u) == seen and forms.of(operand(u, slot)) == own
        ]
        if len(found) > 1:  # several operators on the same part: compare their other operands too
            found = [u for u in found if all(_form(forms, u, k) == _form(forms, op, k) for k in rest)]
        return found

    siblings = forms.parts(part)
    at = bisect_left(siblings, part.start, key=lambda found: found[1].start)
    if any((part.size == 1 or p.start + p.size == part.start) and alike(v) for v, p in siblings[:at][-1:]):
        return []
    by_start = dict[int, Op]()
    for value, other in siblings[at:]:
        found = alike(value)
        if len(found) > 1 or (found and other.start in by_start):
            return []
        if found:
            by_start[other.start] = found[0]
    return _run(by_start, part) if part.start in by_start else []


def _run(by_start: Mapping[int, Op], part: Part) -> list[Op]:
    """The operators on this part and on later parts at equal distances."""
    others = [at - part.start for at in by_start if at != part.start]
    step = min(others, default=part.size) if part.size == 1 else part.size
    end = part.start
    while end + step in by_start:
        end += step
    return [by_start[at] for at in range(part.start, end + 1, step)]


def _types(graph: Graph, op: Op) -> list[TensorType | None]:
    return [None if v is None else graph.type(v) for v in op.inputs]


def _form(forms: Forms, op: Op, slot: int) -> Hashable:
    value = op.inputs[slot]
    return None if value is None else forms.of(value)


def _followed(graph: Graph, value: Value, path: Sequence[tuple[Op, int]]) -> list[Op]:
    """The operators that ``value`` reaches through operators equal to those of ``path``."""
    reached, ops = [value], list[Op]()
    for like, slot in path:
        ops = [
            u
            for v in reached
            for u in graph.users(v)
            if (u.kind, u.attrs) == (like.kind, like.attrs) and slot < len(u.inputs) and u.inputs[slot] == v
        ]
        reached = [u.value for u in ops]
    return ops


def _near_softmax(graph: Graph, op: Op) -> bool:
    """Whether a product seems to be one of the two products of an attention, which a later pass fuses."""
    before, after = [operand(op)], [op.value]
    for _ in range(4):
        before = [v for at in before for v in graph.op(at).inputs[:1] if v is not None]
        if any(graph.op(v).kind == "Softmax" for v in (operand(op), *before)):
            return True
        after = [u.value for at in after for u in graph.users(at)[:8] if len(u.outputs) == 1]
        if any(graph.op(v).kind == "Softmax" for v in after):
            return True
    return False


class ProductsOfParts(RulePass):
    name = "products_of_parts"
    rules = (products_of_parts, stages_of_parts, factors_of_steps)
