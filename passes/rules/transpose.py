"""Transposes move down through ops that do not mind, towards other transposes that they cancel or merge with.

TensorFlow's exports carry an image from NHWC to NCHW and back around every convolution; what stands between two such
transposes (bias, activation, padding, concatenation, mean) works on any order of axes once its own axes are renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule
from optdnn.passes.support.facts import ints
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS
from optdnn.types import Array, normalize_axis

_REDUCTIONS = frozenset(
    f"Reduce{k}" for k in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
)
_LOOK_AHEAD = 64
"""How many ops a transpose may pass before it has to have met another one."""

_STAGES_BACK = 8

Perm = tuple[int, ...]


@dataclass(frozen=True)
class Passage:
    """How an op lets a transpose through.

    ``moved`` are the operand slots that hold the transposed values. ``build`` adds the op to a patch, on the values before
    the transpose; ``perm`` is what the result then has to be transposed by (None: not at all).
    """

    moved: tuple[int, ...]
    build: Callable[[Patch], Value]
    perm: Perm | None


class SinkTranspose(Rule):
    """A Transpose and an op that reads it change places, where every way down from the Transpose pays.

    A way pays when it leads to another Transpose, to a reduction that leaves nothing to transpose, or to an op that reads
    two transposed values (two become one); or when the op can become a stage of the convolution or matrix product in front of
    the Transpose. A transpose only ever moves towards the outputs, so this ends.
    """

    name = "sink_transpose"
    kinds = frozenset({"Transpose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if op.attrs.perm is None:
            return None
        users = graph.users(op.value)
        movable = [u for u in users if u.kind != "Transpose"]
        if not movable:
            return None
        user = movable[0]
        passage = _passage(graph, user, op.value, op.attrs.perm)
        if passage is None:
            return None
        if not all(u.kind == "Transpose" or self._pays(graph, op, u) for u in users):
            return Miss("it meets no other transpose on its way down")
        transposes = tuple(graph.op(v) for i in passage.moved if (v := user.inputs[i]) is not None)
        return Match((user, *dict.fromkeys(transposes)), passage)

    def _pays(self, graph: Graph, op: Op, user: Op) -> bool:
        if _stage_of_constants(graph, user, op.value) and len(graph.users(op.value)) == 1 and _behind_anchor(graph, op):
            return True
        value, perm = op.value, op.attrs.perm
        for _ in range(_LOOK_AHEAD):
            passage = _passage(graph, user, value, perm)
            if passage is None:
                return False
            others = {v for i in passage.moved if (v := user.inputs[i]) is not None and v != value}
            if passage.perm is None or any(graph.sole_user(v) is not None for v in others):
                return True
            users = graph.users(user.value)
            if len(users) != 1:
                return False
            value, perm, user = user.value, passage.perm, users[0]
            if user.kind == "Transpose":
                return True
        return False

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        user, *transposes = match.ops
        passage: Passage = match.data
        patch = Patch(graph, match.ops)
        value = passage.build(patch)
        if passage.perm is not None:
            src = frozenset[str]().union(*(t.src for t in transposes))
            value = patch.add("Transpose", [value], TransposeAttrs(passage.perm), src=src)
        patch.replace(user.value, value)
        return patch


def _stage_of_constants(graph: Graph, op: Op, value: Value) -> bool:
    """Whether ``op`` could be an epilogue stage that reads nothing but ``value`` and constants."""
    if op.kind not in ACTIVATIONS | ADDITIONS | SCALINGS:
        return False
    return all(v == value or graph.constant_value(v) is not None for v in op.inputs if v is not None)


def _behind_anchor(graph: Graph, op: Op) -> bool:
    """Whether operand 0 of ``op`` is the result of a convolution or matrix product, or of a stage-like chain behind one."""
    for _ in range(_STAGES_BACK):
        value = op.inputs[0]
        if value is None or graph.sole_user(value) is None:
            return False
        op = graph.op(value)
        if op.kind in ANCHORS:
            return True
        operands = [v for v in op.inputs if v is not None and graph.constant_value(v) is None]
        if len(operands) != 1 or not _stage_of_constants(graph, op, operands[0]):
            return False
        op = replace(op, inputs=(operands[0],))
    return False


def _passage(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    """How ``op`` lets ``value``, a value transposed by ``perm``, through; None where it does not.

    During look-ahead ``value`` need not be a Transpose's result yet; other operands have to be.
    """
    if op.kind in STRUCTURAL or len(op.outputs) != 1 or op.outputs[0].type.rank is None:
        return None
    if op.definition.traits.pointwise and op.kind != "Pointwise":
        return _pointwise(graph, op, value, perm)
    if op.kind == "Concat":
        return _concat(graph, op, value, perm)
    if op.inputs[0] != value or any(v == value for v in op.inputs[1:]):
        return None
    if op.kind in _REDUCTIONS:
        return _reduction(graph, op, perm)
    if op.kind in ("Softmax", "LogSoftmax", "Hardmax"):
        axis = perm[normalize_axis(op.attrs.axis, len(perm))]
        attrs = replace(op.attrs, axis=axis)
        return Passage((0,), lambda patch: patch.add(op.kind, [_under(graph, value)], attrs, src=op.src), perm)
    if op.kind == "Pad":
        return _pad(graph, op, value, perm)
    return None


def _under(graph: Graph, value: Value) -> Value:
    """The value before the Transpose that makes ``value``."""
    inner = graph.op(value).inputs[0]
    assert inner is not None
    return inner


def _is_moved(graph: Graph, v: Value, value: Value, perm: Perm) -> bool:
    if v == value:
        return True
    producer = graph.op(v)
    return producer.kind == "Transpose" and bool(producer.attrs.perm == perm)


def _moved_constant(array: Array, perm: Perm) -> Array:
    """A constant operand as it has to be before the transpose: its axes in the order that ``perm`` undoes."""
    full = array.reshape((1,) * (len(perm) - array.ndim) + array.shape)
    return np.ascontiguousarray(np.transpose(full, np.argsort(perm)))


def _pointwise(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    if op.outputs[0].type.rank != len(perm):
        return None
    moved: list[int] = []
    for i, v in enumerate(op.inputs):
        if v is None:
            continue
        array = graph.constant_value(v)
        if _is_moved(graph, v, value, perm):
            moved.append(i)
        elif array is None or array.ndim > len(perm):
            return None

    def build(patch: Patch) -> Value:
        operands: list[Value | None] = []
        for i, v in enumerate(op.inputs):
            array = graph.constant_value(v)
            if v is not None and i in moved:
                operands.append(_under(graph, v))
            elif array is not None and array.size > 1:
                operands.append(patch.constant(_moved_constant(array, perm), "moved"))
            else:
                operands.append(v)
        return patch.add(op.kind, operands, op.attrs, src=op.src)

    return Passage(tuple(moved), build, perm)


def _concat(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    operands: list[Value] = []
    for v in op.inputs:
        if v is None or not _is_moved(graph, v, value, perm):
            return None
        operands.append(v)
    attrs = replace(op.attrs, axis=perm[normalize_axis(op.attrs.axis, len(perm))])
    slots = tuple(range(len(operands)))
    return Passage(
        slots, lambda patch: patch.add("Concat", [_under(graph, v) for v in operands], attrs, src=op.src), perm
    )


def _reduction(graph: Graph, op: Op, perm: Perm) -> Passage | None:
    rank = len(perm)
    given = op.input(1)
    axes = ints(graph, given) if given is not None else ()
    if axes is None or (not axes and op.attrs.noop_with_empty_axes):
        return None
    out = sorted(normalize_axis(a, rank) for a in axes) or list(range(rank))
    new_axes = np.asarray(sorted(perm[a] for a in out), dtype=np.int64)
    value = op.inputs[0]
    assert value is not None

    after = perm if op.attrs.keepdims else _order([perm[i] for i in range(rank) if i not in out])

    def build(patch: Patch) -> Value:
        src = None if after is None else op.src  # without a Transpose behind it, it stands for both
        return patch.add(op.kind, [_under(graph, value), patch.constant(new_axes, "axes")], op.attrs, src=src)

    return Passage((0,), build, after)


def _order(axes: Sequence[int]) -> Perm | None:
    """The permutation that puts the sorted axes into this order; None for the identity."""
    ranks = sorted(axes)
    perm = tuple(ranks.index(a) for a in axes)
    return None if perm == tuple(range(len(perm))) else perm


def _pad(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    rank = len(perm)
    pads = ints(graph, op.inputs[1])
    axes = tuple(range(rank)) if op.input(3) is None else ints(graph, op.input(3))
    if pads is None or axes is None:
        return None
    new_axes = np.asarray([perm[normalize_axis(a, rank)] for a in axes], dtype=np.int64)

    def build(patch: Patch) -> Value:
        operands = [_under(graph, value), op.inputs[1], op.input(2), patch.constant(new_axes, "axes")]
        return patch.add("Pad", operands, op.attrs, src=op.src)

    return Passage((0,), build, perm)
