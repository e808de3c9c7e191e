"""Operators that compute each item of a batch, each entry along the first axis, by itself."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.fused import STAGE_KINDS
from optdnn.passes.support.facts import RESHAPES, ints, operand, reduction_axes
from optdnn.passes.support.linear import LINEAR

NORMS = frozenset({"InstanceNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization"})
POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
LAYERS = LINEAR | NORMS | POOLS


def computes_items(graph: Graph, op: Op, slots: Collection[int]) -> bool:
    """Whether ``op`` computes each item by itself, and may have more items. The operands in ``slots`` have the items, all others
    are constants."""
    y = op.outputs[0].type
    given = [graph.type(operand(op, k)) for k in slots]
    if len(op.outputs) > 1 or not y.is_static or not all(t.is_static for t in given):
        return False
    if not y.dims or any(len(t.dims) < 2 or t.dims[0] != y.dims[0] for t in given):
        return False
    others = [v for k, v in enumerate(op.inputs) if v is not None and k not in slots]
    if any(graph.constant_value(v) is None for v in others):
        return False
    if op.kind in STAGE_KINDS:
        rank = len(y.dims)
        small = all(len(graph.type(v).dims) < rank or graph.type(v).dims[0] == 1 for v in others)
        return small and all(len(t.dims) == rank for t in given)
    if op.kind in LAYERS:
        return tuple(slots) == (0,) and _layer(graph, op)
    # a constant part of a Concat has the items of one operand only
    fits = not others if op.kind == "Concat" else tuple(slots) == (0,)
    return fits and _moves(graph, op)


def equal(graph: Graph, a: Value | None, b: Value | None) -> bool:
    """Whether two operands are one value, or constants with equal elements: folding makes a constant for each call of a layer."""
    if a == b or a is None or b is None:
        return a == b
    known, other = graph.constant_value(a), graph.constant_value(b)
    return known is not None and other is not None and graph.type(a) == graph.type(b) and np.array_equal(known, other)


def _layer(graph: Graph, op: Op) -> bool:
    if op.kind in LINEAR and (op.attrs.prologue or op.attrs.epilogue):
        return False
    match op.kind:
        case "MatMul":
            return len(graph.type(operand(op, 1)).dims) == 2
        case "Gemm":
            shape = () if (bias := op.input(2)) is None else graph.type(bias).static_shape
            return not op.attrs.transA and (len(shape) < 2 or shape[0] == 1)
        case "LayerNormalization" | "RMSNormalization":
            return bool(op.attrs.axis % len(graph.type(operand(op)).dims))
    return True


def _moves(graph: Graph, op: Op) -> bool:
    """Whether an operator without weights leaves the first axis as it is."""
    rank = len(graph.type(operand(op)).dims)
    if op.kind in RESHAPES:
        return True  # the first axis has the same size before and after it
    if op.kind == "Transpose":
        return bool(op.attrs.perm) and not op.attrs.perm[0]
    if op.kind in ("Concat", "Softmax", "LogSoftmax", "LpNormalization"):
        return bool(op.attrs.axis % rank)
    if op.kind.startswith("Reduce"):
        axes = reduction_axes(graph, op)
        return axes is not None and 0 not in {axis % rank for axis in axes}
    if op.kind == "Slice":
        axes = ints(graph, op.input(3))
        return axes is not None and 0 not in {axis % rank for axis in axes}
    if op.kind == "Pad":
        pads = ints(graph, op.input(1))
        return pads is not None and op.input(3) is None and not pads[0] and not pads[rank]
    if op.kind == "Resize":
        scales = None if op.input(2) is None else graph.constant_value(operand(op, 2))
        return op.input(3) is None and scales is not None and len(scales) == rank and float(scales[0]) == 1
    return False
