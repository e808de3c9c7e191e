"""Removes ops that return an operand unchanged, and results that nothing reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import ints, is_filled, non_negative, operand, same_shape
from optdnn.types import normalize_axis

Check = Callable[[Graph, Op], bool]


def _alone(graph: Graph, op: Op) -> bool:
    """Whether the op has a single operand."""
    return sum(v is not None for v in op.inputs) == 1


def _cast(graph: Graph, op: Op) -> bool:
    """Whether a Cast keeps the type. A cast to a narrower type and back is not removed: it rounds, and the model asks for it."""
    x = op.inputs[0]
    return x is not None and graph.type(x).dtype == op.attrs.to


def _transpose(graph: Graph, op: Op) -> bool:
    perm = op.attrs.perm
    return perm is not None and perm == tuple(range(len(perm)))


def _pad(graph: Graph, op: Op) -> bool:
    pads = graph.known(op.inputs[1])
    return pads is not None and pads.dtype != object and not pads.any()


def _slice(graph: Graph, op: Op) -> bool:
    steps = op.input(4)
    return same_shape(graph, op) and (steps is None or is_filled(graph.known(steps), 1))


def _pool(graph: Graph, op: Op) -> bool:
    a = op.attrs
    one_point = all(k == 1 for k in a.kernel_shape) and all(s == 1 for s in a.strides) and not any(a.pads)
    return one_point and not (isinstance(a, MaxPoolAttrs) and a.indices)


def _resize(graph: Graph, op: Op) -> bool:
    scales = op.input(2)
    exact = scales is None or is_filled(graph.constant_value(scales), 1)
    return exact and same_shape(graph, op) and op.attrs.coordinate_transformation_mode != "tf_crop_and_resize"


def _cumulative(graph: Graph, op: Op) -> bool:
    """Whether an inclusive sum or product runs along an axis of size 1: positions of a single token, as fairseq computes them."""
    x, axis = operand(op), ints(graph, operand(op, 1))
    dims = graph.type(x).shape
    return not op.attrs.exclusive and dims is not None and axis is not None and dims[axis[0]] == 1


def _by(number: float) -> Check:
    """A check whether all elements of operand 1 are ``number``, and the result has the shape of operand 0."""
    return lambda graph, op: is_filled(graph.constant_value(op.inputs[1]), number) and same_shape(graph, op)


TABLE: dict[str, Check] = {
    "Identity": lambda graph, op: True,
    "Cast": _cast,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile"), same_shape),
    # A reduction that keeps the shape runs over axes of size 1, or none.
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd"), same_shape),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), same_shape),
    **dict.fromkeys(("Concat", "Sum", "Mean", "Max", "Min"), _alone),
    "Split": lambda graph, op: len(op.outputs) == 1 and same_shape(graph, op),
    "Transpose": _transpose,
    "Pad": _pad,
    "Slice": _slice,
    **dict.fromkeys(("MaxPool", "AveragePool"), _pool),
    "Resize": _resize,
    **dict.fromkeys(("CumSum", "CumProd"), _cumulative),
    **dict.fromkeys(("Mul", "Div", "Pow"), _by(1)),
    **dict.fromkeys(("Add", "Sub"), _by(0)),
    "Relu": lambda graph, op: non_negative(graph, operand(op)),
    "Clip": lambda graph, op: op.input(1) is None and op.input(2) is None,
}
"""Kind -> the check whether the op returns operand 0."""


@rule("no_op", frozenset(TABLE))
def no_op(graph: Graph, op: Op) -> Match | Miss | None:
    """An op that returns operand 0 is removed. ``constant_last`` has already made constants of commutative ops operand 1."""
    x = op.inputs[0]
    if x is None or len(op.outputs) != 1 or not TABLE[op.kind](graph, op):
        return None
    if graph.type(x).dtype != op.outputs[0].type.dtype:
        return None
    return Match((op,), lambda patch: x)


@rule("known_choice", {"Where"})
def known_choice(graph: Graph, op: Op) -> Match | None:
    """A selection by a constant mask that is true, or false, everywhere is an operand: a mask of padding without padding."""
    mask = graph.constant_value(op.inputs[0])
    if mask is None or not mask.size or mask.min() != mask.max():
        return None
    chosen = operand(op, 1 if mask.all() else 2)
    return Match((op,), lambda patch: chosen) if graph.type(chosen) == op.outputs[0].type else None


@rule("unused_indices", {"MaxPool"})
def unused_indices(graph: Graph, op: Op) -> Match | Miss | None:
    """A MaxPool loses its second output if nothing reads it."""
    if not op.attrs.indices or (len(op.outputs) > 1 and graph.uses(Value(op.id, 1))):
        return None
    return Match((op,), lambda patch: patch.add("MaxPool", op.inputs, replace(op.attrs, indices=False)))


MOST_ELEMENTS = 1 << 20
"""Most elements of a constant that replaces a normalization."""


@rule("norm_of_one", {"LayerNormalization"})
def norm_of_one(graph: Graph, op: Op) -> Match | Miss | None:
    """A normalization of single elements becomes its bias: each element is its own mean."""
    type_, a = op.outputs[0].type, op.attrs
    axis = normalize_axis(a.axis, len(type_.dims))
    if any(d != 1 for d in type_.dims[axis:]) or any(graph.uses(v) for v in op.values[1:]):
        return None
    bias = graph.constant_value(op.input(2)) if op.input(2) is not None else np.zeros((), type_.dtype)
    if bias is None or not type_.is_static or math.prod(type_.static_shape) > MOST_ELEMENTS:
        return Miss("its bias or its size is not known")
    known = np.broadcast_to(bias, type_.static_shape)
    return Match((op,), lambda patch: patch.constant(known.copy(), "bias"))
