"""Layers with the same weights on several tensors of one shape become one layer, along the first axis.

A network may call a layer for each frame of a video, or for each step of a spiking network (Eshraghian et al., 2023). Exporters
unroll the loop. The frames are joined along the first axis, where they are items of one batch: the layer is one launch, which reads
its weights once. Recurrences between the layers are pointwise, and become one launch each (roll_scans), whose results are joined
already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, origins, producer, reshaped
from optdnn.passes.support.iterations import MOST_BYTES
from optdnn.passes.support.part_groups import group_of
from optdnn.passes.support.stacks import Joined, Shared, Stack, covered, emit, part_values, stack_of
from optdnn.types import is_float

PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
NORMS = frozenset({"InstanceNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization"})
POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
LAYERS = PRODUCTS | NORMS | POOLS
LEAST_JOINED = 4
"""Fewest layers whose operands are joined if they are not parts of one tensor: a Concat may copy them."""
MOST_PRODUCTS = 1 << 28
"""A layer of at least this many multiplications fills a GPU by itself."""


@rule("layer_of_parts", LAYERS)
def layer_of_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """Layers with equal weights, none of which depends on another, become one layer."""
    group = _group(graph, op)
    if len(group) < 2 or group[0] is not op:
        return None
    if any(one.id in {each.id for each in group} for one in origins(graph, [operand(one) for one in group])):
        return Miss("layers with the same weights depend on one another")
    if _multiplications(graph, op) >= MOST_PRODUCTS:
        return Miss("each part's layer is large enough for a launch of its own")
    if len(group) * max(_bytes(graph, operand(op)), _bytes(graph, op.value)) > MOST_BYTES:
        return Miss("the results of all parts would take too much memory")
    group, stack = _stacked(graph, group)
    if isinstance(stack, Joined) and (len(group) < LEAST_JOINED or op.kind not in PRODUCTS):
        return Miss("it reads tensors that are no parts of one tensor, and that are too few to be joined")

    def build(patch: Patch) -> None:
        items, *sizes = graph.type(operand(op)).static_shape
        x = reshaped(patch, emit(patch, stack), (len(group) * items, *sizes))
        y = patch.add(op.kind, [x, *op.inputs[1:]], op.attrs)
        rows = reshaped(patch, y, (len(group), *op.outputs[0].type.static_shape))
        for one, part in zip(group, part_values(patch, rows, len(group)), strict=True):
            patch.replace(one.value, part)

    return Match(tuple({one.id: one for one in (*group, *covered(stack))}.values()), build)


def _group(graph: Graph, op: Op) -> list[Op]:
    """The layers that are equal to ``op`` and differ only in their first operand; ``op`` is one of them.

    Layers without weights are computed from parts of one tensor. Empty if ``op`` can have no further items."""
    if not _takes_items(graph, op):
        return []
    weights = op.input(1)
    users = group_of(graph, op) if weights is None else sorted(graph.users(weights), key=lambda one: one.id)
    alike = {
        one.id: one
        for one in users
        if (one.kind, one.attrs, one.inputs[1:]) == (op.kind, op.attrs, op.inputs[1:])
        and graph.type(operand(one)) == graph.type(operand(op))
    }
    group = list(alike.values())
    return group if len({one.inputs[0] for one in group}) == len(group) else []


def _takes_items(graph: Graph, op: Op) -> bool:
    """Whether the first axis of a layer's operand and result consists of items that it computes separately."""
    x, y = graph.type(operand(op)), op.outputs[0].type
    if len(op.outputs) > 1 or not (x.is_static and y.is_static) or not is_float(y.dtype):
        return False
    if len(x.dims) < 2 or any(v is not None and graph.constant_value(v) is None for v in op.inputs[1:]):
        return False
    if op.kind in PRODUCTS and (op.attrs.prologue or op.attrs.epilogue):
        return False
    match op.kind:
        case "MatMul":
            return len(graph.type(operand(op, 1)).dims) == 2
        case "Gemm":
            bias = op.input(2)
            return not op.attrs.transA and (bias is None or _per_column(graph.type(bias).static_shape))
        case "LayerNormalization" | "RMSNormalization":
            return bool(op.attrs.axis % len(x.dims))
    return True


def _per_column(shape: Sequence[int]) -> bool:
    return len(shape) < 2 or shape[0] == 1


def _stacked(graph: Graph, group: list[Op]) -> tuple[list[Op], Stack]:
    """The stack of the operands of a group, and the group in its order: parts of a tensor may be read backward."""
    for ordered in (group, group[::-1]):
        stack = stack_of(graph, [operand(one) for one in ordered])
        if stack is not None and not isinstance(stack, Shared | Joined):
            return ordered, stack
    return group, Joined(tuple(operand(one) for one in group))


def _multiplications(graph: Graph, op: Op) -> int:
    """The multiplications of a convolution or product; 0 for other layers."""
    x, y = graph.type(operand(op)).static_shape, op.outputs[0].type.static_shape
    if op.kind not in PRODUCTS:
        return 0
    if op.kind in ("Gemm", "MatMul"):
        return math.prod(x) * y[-1]
    _, *rest = graph.type(operand(op, 1)).static_shape  # Conv: output channels; ConvTranspose: input channels
    return math.prod(y if op.kind == "Conv" else x) * math.prod(rest)


def _bytes(graph: Graph, value: Value) -> int:
    t = graph.type(value)
    return math.prod(t.static_shape) * t.dtype.itemsize


def is_stack_of_layers(graph: Graph, value: Value) -> bool:
    """Whether ``value`` may be the result of :func:`layer_of_parts`, shape (parts, items, ...)."""
    view = producer(graph, value, {"Reshape"})
    return view is not None and producer(graph, operand(view), LAYERS) is not None


class LayersOfParts(RulePass):
    name = "layers_of_parts"
    rules = (layer_of_parts,)
