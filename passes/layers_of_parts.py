"""Layers with the same weights on several tensors of one shape become one layer, whose items are the items of all tensors.

A network may call a layer for each frame of a video, for each view of an object, or for each step of a spiking network (Eshraghian
et al., 2023). Exporters unroll the loop. The tensors are joined along the first axis: the layer is one launch, which reads its
weights once. A Split takes the parts of its result. Operators that are equal for all parts, and that compute each item by itself,
move in front of this Split one by one, so that layers after them find all items joined.

Recurrences between the layers are pointwise, and become one launch each (roll_scans), whose results are joined already.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, integers, operand, origins, reshaped
from optdnn.passes.support.items import LAYERS, computes_items, equal
from optdnn.passes.support.iterations import MOST_BYTES
from optdnn.passes.support.linear import LINEAR
from optdnn.passes.support.stacks import Joined, Shared, Stack, covered, emit, part_values, stack_of
from optdnn.passes.support.unrolled_steps import LEAST

LEAST_JOINED = 4
"""Fewest layers whose operands are joined if they are not parts of one tensor: a Concat may copy them."""
MOST_PRODUCTS = 1 << 28
"""A layer of at least this many multiplications fills a GPU by itself."""

FEW = 16
"""Elements of a weight that are compared before all of them are."""


class _LayerOfParts(Rule):
    """Layers with equal weights, none of which depends on another, become one layer."""

    name = "layer_of_parts"
    kinds = LINEAR

    def __init__(self, graph: Graph, made: set[int]):
        self.made = made
        self._calls = dict[Hashable, list[int]]()
        """Products whose weights may be equal, in the order of the graph."""
        for op in graph.ops():
            if op.kind in LINEAR:
                self._calls.setdefault(_key(graph, op), []).append(op.id)

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        group = self._group(graph, op)
        if len(group) < 2:
            return None
        if any(one.id in {each.id for each in group} for one in origins(graph, [operand(one) for one in group])):
            return Miss("layers with the same weights depend on one another")
        if _multiplications(graph, op) >= MOST_PRODUCTS:
            return Miss("each part's layer is large enough for a launch of its own")
        if len(group) * max(_bytes(graph, operand(op)), _bytes(graph, op.value)) > MOST_BYTES:
            return Miss("the results of all parts would take too much memory")
        group, stack = _stacked(graph, group)
        if isinstance(stack, Joined) and not _joins(graph, op, stack):
            return Miss("it reads tensors that are no parts of one tensor, and that are too few to be joined")

        def build(patch: Patch) -> None:
            items, *sizes = graph.type(operand(op)).static_shape
            x = reshaped(patch, emit(patch, stack), (len(group) * items, *sizes))
            y = patch.add(op.kind, [x, *op.inputs[1:]], op.attrs)
            _split(patch, y, group, self.made)

        return Match(tuple({one.id: one for one in (*group, *covered(stack))}.values()), build)

    def _group(self, graph: Graph, op: Op) -> list[Op]:
        """The layers that are equal to ``op``, which is the first of them, and differ only in their first operand.

        Empty if ``op`` is not the first: the products of a loop are not compared with each other again for each step. Also empty if
        ``op`` can have no further items."""
        calls = [graph.op(i) for i in self._calls.get(_key(graph, op), ()) if i in graph]
        equals = (one for one in calls if all(map(partial(equal, graph), one.inputs[1:], op.inputs[1:])))
        if len(calls) < 2 or op.input(1) is None or next(equals, None) is not op or not computes_items(graph, op, (0,)):
            return []
        alike = [op, *equals]
        return alike if len({one.inputs[0] for one in alike}) == len(alike) else []


def _split(patch: Patch, whole: Value, group: Sequence[Op], made: set[int]) -> None:
    """Replace the results of a group by the parts of ``whole`` along the first axis."""
    items = group[0].outputs[0].type.dims[0]
    sizes = integers(patch, [items] * len(group), "sizes")  # type: ignore[list-item]
    split = patch.add_op("Split", [whole, sizes], SplitAttrs(0), outputs=len(group), names=[""] * len(group))
    made.add(split.id)
    patch.replace_each((one.value for one in group), split.values)


def _key(graph: Graph, op: Op) -> Hashable:
    """Equal layers have equal keys: their types, attributes, and a few elements of each weight and bias."""
    constants = (graph.constant_value(v) for v in op.inputs[1:])
    few = (None if a is None else a.reshape(-1)[:: max(1, a.size // FEW)].tobytes() for a in constants)
    return op.kind, op.attrs, *(None if v is None else graph.type(v) for v in op.inputs), *few


def _stacked(graph: Graph, group: list[Op]) -> tuple[list[Op], Stack]:
    """The stack of the operands of a group, and the group in its order: parts of a tensor may be read backward."""
    for ordered in (group, group[::-1]):
        stack = stack_of(graph, [operand(one) for one in ordered])
        if stack is not None and not isinstance(stack, Shared | Joined):
            return ordered, stack
    return group, Joined(tuple(operand(one) for one in group))


def _joins(graph: Graph, op: Op, stack: Joined) -> bool:
    """Whether joining tensors takes less time than a launch for each: there are several, or they are the images of the network,
    which are copied anyway: two images that are compared, for example (LPIPS: Zhang et al., 2018)."""
    images = op.kind == "Conv" and all(graph.op(v).kind in {"Input", *STAGE_KINDS} for v in stack.values)
    return images or len(stack.values) >= LEAST_JOINED


def _multiplications(graph: Graph, op: Op) -> int:
    x, y = graph.type(operand(op)).static_shape, op.outputs[0].type.static_shape
    if op.kind in ("Gemm", "MatMul"):
        return math.prod(x) * y[-1]
    _, *rest = graph.type(operand(op, 1)).static_shape  # Conv: output channels; ConvTranspose: input channels
    return math.prod(y if op.kind == "Conv" else x) * math.prod(rest)


def _bytes(graph: Graph, value: Value) -> int:
    t = graph.type(value)
    return math.prod(t.static_shape) * t.dtype.itemsize


class _OperatorOfItems(Rule):
    """An operator that is equal for all parts moves in front of the Split that takes the parts."""

    name = "operator_of_items"

    def __init__(self, made: set[int]):
        self.made = made
        """The Splits of this pass: those of the network may have a reason."""

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        slots = [k for k, v in enumerate(op.inputs) if v is not None and v.op in self.made]
        first = op.input(slots[0]) if slots else None
        if first is None or first.port or any(op.inputs[k].port for k in slots):  # type: ignore[union-attr]
            return None
        splits = [graph.op(op.inputs[k]) for k in slots]  # type: ignore[arg-type]
        count = len(splits[0].outputs)
        if any(len(split.outputs) != count for split in splits) or not computes_items(graph, op, slots):
            return None
        group = [op, *(one for t in range(1, count) if (one := self._alike(graph, op, slots, t)) is not None)]
        if len(group) < count:
            return Miss("the operators on the other parts differ")

        def build(patch: Patch) -> None:
            given = [operand(graph.op(v)) if k in slots and v is not None else v for k, v in enumerate(op.inputs)]
            if op.kind in RESHAPES:
                items, *sizes = op.outputs[0].type.static_shape
                y = reshaped(patch, operand(splits[0]), (count * items, *sizes))
            else:
                y = patch.add(op.kind, given, op.attrs)
            _split(patch, y, group, self.made)

        return Match(tuple(group), build)

    def _alike(self, graph: Graph, op: Op, slots: Sequence[int], port: int) -> Op | None:
        """The operator on the parts with this number that is equal to ``op``, or None."""
        inputs = [Value(v.op, port) if v is not None and k in slots else v for k, v in enumerate(op.inputs)]
        users = graph.users(inputs[slots[0]])  # type: ignore[arg-type]
        alike = (one for one in users if (one.kind, one.attrs, len(one.inputs)) == (op.kind, op.attrs, len(inputs)))
        return next((one for one in alike if all(map(partial(equal, graph), one.inputs, inputs))), None)


class LayersOfParts(RulePass):
    """Layers with the same weights on several tensors of one shape become one layer, whose items are the items of all tensors."""

    name = "layers_of_parts"

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        made = set[int]()
        return (_LayerOfParts(graph, made), _OperatorOfItems(made))


@rule("steps_of_items", {"Split"})
def steps_of_items(graph: Graph, op: Op) -> Match | None:
    """Parts of a layer's items that pointwise operators read become positions along an axis of steps, as recurrences have them."""
    whole, sizes = graph.op(operand(op)), {y.type for y in op.outputs}
    if whole.kind not in LAYERS or op.attrs.axis % len(whole.outputs[0].type.dims) or len(sizes) > 1:
        return None
    readers = [user for v in op.values for user in graph.users(v)]
    if len(op.outputs) < LEAST or not any(user.kind in STAGE_KINDS for user in readers):
        return None

    def build(patch: Patch) -> None:
        steps = reshaped(patch, whole.value, (len(op.outputs), *op.outputs[0].type.static_shape))
        patch.replace_each(op.values, part_values(patch, steps, len(op.outputs)))

    return Match((op,), build)


class StepsOfItems(RulePass):
    """Items that are steps of a recurrence become positions of an axis, over which one launch loops."""

    name = "steps_of_items"
    rules = (steps_of_items,)
