"""Transposes move after ops that work on any order of axes, until they cancel or merge with other transposes.

TensorFlow's exports transpose an image from NHWC to NCHW and back around every convolution. The ops between two such transposes
(bias, activation, padding, concatenation, mean, rounding) work on any order of axes if their axes are renumbered. A product of rows
with one matrix works on any order of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import (
    in_shape,
    integers,
    ints,
    is_pointwise,
    operand,
    producer,
    reshape_target,
    with_rank,
)
from optdnn.passes.support.size_values import follows_from_sizes
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS
from optdnn.types import Array, Shape, normalize_axis

REDUCTIONS = frozenset(
    f"Reduce{k}" for k in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
)
"""Kinds that reduce the axes in operand 1."""
QUANTIZATION = frozenset({"QuantizeLinear", "DequantizeLinear"})
_LOOK_AHEAD = 64
"""Most ops that a transpose may pass to reach another one."""
_STAGES_BACK = 8
"""Most stages after a convolution or product that are examined."""

Perm = tuple[int, ...]
Turned = Mapping[Value, Perm]


@dataclass(frozen=True)
class Passage:
    """The exchange of a transpose and the op after it.

    ``moved``: the operand slots that hold transposed values. ``build`` adds the op to a patch, reading the values before the
    transpose. Its result must then be transposed by ``perm`` (None: it needs no Transpose).
    """

    moved: tuple[int, ...]
    build: Callable[[Patch], Value]
    perm: Perm | None


@rule("sink_transpose", {"Transpose"}, looks_far=True)
def sink_transpose(graph: Graph, op: Op) -> Match | Miss | None:
    """A Transpose and an op that reads it are exchanged, if this pays on every path after the Transpose.

    A path pays if it leads to another Transpose or to a reduction that leaves nothing to transpose. It pays if it leads to an op
    that reads two transposed values: two Transposes become one (values that follow from sizes do not count). It also pays if the
    op can become a stage of the convolution or matrix product before the Transpose. A Transpose only moves toward the outputs, so
    this terminates.
    """
    if op.attrs.perm is None:
        return None
    users = graph.users(op.value)
    movable = [u for u in users if u.kind != "Transpose"]
    if not movable:
        return None
    given = {op.value: op.attrs.perm}
    user, passage = next(((u, p) for u in movable if (p := _passage(graph, u, given)) is not None), (movable[0], None))
    if passage is None:
        return None
    if not pays(graph, op):
        return Miss("it reaches no other transpose after the operators that it could pass")
    transposes = dict.fromkeys(graph.op(operand(user, i)) for i in passage.moved)

    def build(patch: Patch) -> Value:
        value = passage.build(patch)
        if passage.perm is None:
            return value
        src = frozenset[str]().union(*(t.src for t in transposes))
        return patch.add("Transpose", [value], TransposeAttrs(passage.perm), src=src)

    return Match((user, *transposes), build)


def pays(graph: Graph, op: Op, *others: Op) -> bool:
    """Whether all paths after the Transpose ``op`` pay. ``others``: Transposes by the same permutation that move with it.

    Paths may part and meet again (SiLU, squeeze-and-excitation). Then all of them must lead to Transposes that undo ``op``:
    otherwise the norms of keys, say, would leave the order of the queries."""
    turned: dict[Value, Perm] = {t.value: op.attrs.perm for t in (op, *others)}
    users = list(dict.fromkeys(u for v in turned for u in graph.users(v)))
    stage = len(users) == 1 and _stage_of_constants(graph, users[0], op.value)
    if stage and is_after_anchor(graph, op):
        return True
    waiting, passed, parts, undone = [u for u in users if u.kind != "Transpose"], 0, False, True
    while waiting:
        given = ((user, {**_transposed_before(graph, user, turned), **turned}) for user in waiting)
        found = next(((u, p) for u, values in given if (p := _passage(graph, u, values)) is not None), None)
        if found is None or passed == _LOOK_AHEAD:
            return False
        user, passage = found
        passed += 1
        waiting.remove(user)
        moved = {operand(user, i) for i in passage.moved}
        parts = parts or len(moved & turned.keys()) > 1
        if passage.perm is None or _joins(
            graph, op, [v for v in moved - turned.keys() if graph.sole_user(v) is not None]
        ):
            continue
        readers = graph.users(user.value)
        if not readers:
            return False
        parts = parts or len(readers) > 1
        turned[user.value] = passage.perm
        waiting += [u for u in readers if u.kind != "Transpose" and u not in waiting]
        undone = undone and all(u.attrs.perm == undo(passage.perm) for u in readers if u.kind == "Transpose")
    return undone or not parts


def _joins(graph: Graph, op: Op, met: Sequence[Value]) -> bool:
    """Whether the Transpose ``op`` and those that compute ``met`` become one.

    Those of values that follow from sizes do not count: at given sizes they are constants, which need no Transpose."""
    return bool(met) and sum(not follows_from_sizes(graph, v) for v in (op.value, *met)) > 1


def undo(perm: Perm) -> Perm:
    """The permutation after which an array has the order that it had before ``perm``."""
    return tuple(int(i) for i in np.argsort(perm))


def _transposed_before(graph: Graph, op: Op, turned: Turned) -> dict[Value, Perm]:
    """The operands of ``op`` that other Transposes, by the permutation of its turned operand, can reach."""
    perm = next(turned[v] for v in op.inputs if v is not None and v in turned)
    return {v: perm for v in op.inputs if v is not None and v not in turned and _is_behind(graph, v, perm)}


def _is_behind(graph: Graph, value: Value, perm: Perm) -> bool:
    """Whether only quantization and pointwise ops, at most ``_STAGES_BACK`` in a row, lie between Transposes and ``value``."""
    level, seen = {value}, {value}
    for _ in range(_STAGES_BACK + 1):
        before = set[Value]()
        for op in (graph.op(v) for v in level):
            if op.kind == "Transpose" and op.attrs.perm == perm:
                continue
            given = _moved_before(graph, op, perm)
            if not given:
                return False
            before |= given
        level = before - seen
        seen |= level
    return not level


def _moved_before(graph: Graph, op: Op, perm: Perm) -> set[Value]:
    """The operands that a Transpose by ``perm`` must reach before it can pass ``op``; none if it cannot."""
    quantized = op.kind in QUANTIZATION
    if not quantized and (not is_pointwise(op) or op.kind == "Pointwise" or op.outputs[0].type.rank != len(perm)):
        return set()
    given = {v for v in op.inputs[: 1 if quantized else None] if v is not None and graph.constant_value(v) is None}
    return {v for v in given if shape_before(graph.type(v).shape, perm) is None}  # a Reshape does for the others


def _stage_of_constants(graph: Graph, op: Op, value: Value) -> bool:
    """Whether ``op`` could be an epilogue stage, and reads only ``value`` and constants."""
    if op.kind not in ACTIVATIONS | ADDITIONS | SCALINGS:
        return False
    return all(v == value or graph.constant_value(v) is not None for v in op.inputs if v is not None)


def is_after_anchor(graph: Graph, op: Op) -> bool:
    """Whether operand 0 of ``op`` is the result of a convolution or matrix product, possibly with stages of constants after it."""
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


def _passage(graph: Graph, op: Op, turned: Turned) -> Passage | None:
    """The exchange of ``op`` with the transposes that compute its operands; None if they cannot be exchanged.

    ``turned``: transposed values, with their permutations. During look-ahead they need not be results of Transposes yet.
    """
    if op.kind in STRUCTURAL or len(op.outputs) != 1 or op.outputs[0].type.rank is None:
        return None
    value = next(v for v in op.inputs if v in turned)
    assert value is not None
    perm = turned[value]
    if op.definition.traits.pointwise and op.kind != "Pointwise":
        return _pointwise(graph, op, turned, perm)
    if op.kind == "Concat":
        return _concat(graph, op, turned, perm)
    if op.inputs[0] != value or any(v in turned for v in op.inputs[1:]):
        return None
    if op.kind in REDUCTIONS:
        return _reduction(graph, op, perm)
    if op.kind in ("Softmax", "LogSoftmax", "Hardmax") or op.kind in QUANTIZATION:
        return _along_axis(graph, op, value, perm)
    if op.kind == "Pad":
        return _pad(graph, op, value, perm)
    if op.kind == "MatMul":
        return _rows(graph, op, value, perm)
    if op.kind == "Reshape":
        return _split(graph, op, value, perm)
    return None


def _untransposed(graph: Graph, value: Value) -> Value:
    """The operand of the Transpose that computes ``value``."""
    return operand(graph.op(value))


def _is_moved(graph: Graph, v: Value, turned: Turned, perm: Perm) -> bool:
    """Whether ``v`` is transposed by ``perm``."""
    transpose = producer(graph, v, {"Transpose"})
    return turned.get(v) == perm or (transpose is not None and bool(transpose.attrs.perm == perm))


def _moved_constant(array: Array, perm: Perm) -> Array:
    """A constant operand for the op before the transpose: ``array``, transposed by the inverse of ``perm``."""
    return np.ascontiguousarray(np.transpose(with_rank(array, len(perm)), np.argsort(perm)))


def _pointwise(graph: Graph, op: Op, turned: Turned, perm: Perm) -> Passage | None:
    if op.outputs[0].type.rank != len(perm):
        return None
    moved: list[int] = []
    for i, v in enumerate(op.inputs):
        if v is None:
            continue
        array = graph.constant_value(v)
        if _is_moved(graph, v, turned, perm):
            moved.append(i)
        elif (array is None and shape_before(graph.type(v).shape, perm) is None) or (
            array is not None and array.ndim > len(perm)
        ):
            return None

    def build(patch: Patch) -> Value:
        operands: list[Value | None] = []
        for i, v in enumerate(op.inputs):
            array = graph.constant_value(v)
            if v is not None and i in moved:
                operands.append(_untransposed(graph, v))
            elif array is not None and array.size > 1:
                operands.append(patch.constant(_moved_constant(array, perm), "moved"))
            elif v is not None and array is None and (shape := shape_before(graph.type(v).shape, perm)) is not None:
                operands.append(in_shape(patch, v, shape, op.src))
            else:
                operands.append(v)
        return patch.add(op.kind, operands, op.attrs, src=op.src)

    return Passage(tuple(moved), build, perm)


def shape_before(shape: Shape | None, perm: Perm) -> Shape | None:
    """The shape before a transpose by ``perm`` to ``shape``, if a Reshape does the same (only axes of size 1 move); else None."""
    if shape is None or len(shape) > len(perm):
        return None
    after = (*(1,) * (len(perm) - len(shape)), *shape)
    before = tuple(after[i] for i in np.argsort(perm))
    kept = [n for n in after if n != 1] == [n for n in before if n != 1]
    in_order = [perm[i] for i, n in enumerate(after) if n != 1]
    return before if kept and in_order == sorted(in_order) and reshape_target(shape, before) is not None else None


def _concat(graph: Graph, op: Op, turned: Turned, perm: Perm) -> Passage | None:
    operands = [operand(op, i) for i in range(len(op.inputs))]
    if not all(_is_moved(graph, v, turned, perm) for v in operands):
        return None
    attrs = replace(op.attrs, axis=perm[normalize_axis(op.attrs.axis, len(perm))])

    def build(patch: Patch) -> Value:
        return patch.add("Concat", [_untransposed(graph, v) for v in operands], attrs, src=op.src)

    return Passage(tuple(range(len(operands))), build, perm)


def _along_axis(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    """Softmax along an axis, or the conversion from or to integers, whose scales may belong to the entries of an axis."""
    axis = op.attrs.axis
    if op.kind in QUANTIZATION and op.attrs.block_size:
        return None
    if op.kind not in QUANTIZATION or graph.type(operand(op, 1)).dims not in ((), (1,)):
        axis = perm[normalize_axis(axis, len(perm))]

    def build(patch: Patch) -> Value:
        operands = [_untransposed(graph, value), *op.inputs[1:]]
        return patch.add(op.kind, operands, replace(op.attrs, axis=axis), src=op.src)

    return Passage((0,), build, perm)


def _reduction(graph: Graph, op: Op, perm: Perm) -> Passage | None:
    rank = len(perm)
    given = op.input(1)
    axes = ints(graph, given) if given is not None else ()
    if axes is None or (not axes and op.attrs.noop_with_empty_axes):
        return None
    out = sorted(normalize_axis(a, rank) for a in axes) or list(range(rank))
    new_axes = sorted(perm[a] for a in out)
    result = op.outputs[0].type.shape
    meets = all(user.kind == "Transpose" for user in graph.users(op.value))
    in_place = op.attrs.keepdims and not meets and shape_before(result, perm) is not None  # a Reshape does the same
    inverse = None if in_place else perm
    after = inverse if op.attrs.keepdims else _order([perm[i] for i in range(rank) if i not in out])

    def build(patch: Patch) -> Value:
        src = None if after is None else op.src  # without a Transpose after it, it replaces both ops
        y = patch.add(
            op.kind, [_untransposed(graph, operand(op)), integers(patch, new_axes, "axes")], op.attrs, src=src
        )
        return in_shape(patch, y, result, src) if in_place and result is not None else y

    return Passage((0,), build, after)


def _rows(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    """The product of rows, in any order, and one matrix."""
    if graph.type(operand(op, 1)).rank != 2 or len(op.inputs) > 2 or perm[-1] != len(perm) - 1:
        return None

    def build(patch: Patch) -> Value:
        return patch.add("MatMul", [_untransposed(graph, value), operand(op, 1)], op.attrs, src=op.src)

    return Passage((0,), build, perm)


def _split(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    """A Reshape that splits the last axis, which the Transpose left in its place."""
    lead, before, after = len(perm) - 1, graph.type(value), op.outputs[0].type
    if not (before.is_static and after.is_static) or perm[-1] != lead:
        return None
    ones = 0
    while len(after.dims) - ones > lead + 1 and after.dims[ones] == 1:
        ones += 1
    kept, parts = after.static_shape[ones : ones + lead], after.static_shape[ones + lead :]
    if len(parts) < 2 or kept != before.static_shape[:-1]:
        return None
    order = (*range(ones), *(p + ones for p in perm[:-1]), *range(ones + lead, len(after.dims)))
    dims = (*(1,) * ones, *(kept[i] for i in np.argsort(perm[:-1])), *parts)

    def build(patch: Patch) -> Value:
        return in_shape(patch, _untransposed(graph, value), dims, op.src)

    return Passage((0,), build, order)


def _order(axes: Sequence[int]) -> Perm | None:
    """The permutation that brings the sorted axes into the order of ``axes``; None for the identity."""
    ranks = sorted(axes)
    perm = tuple(ranks.index(a) for a in axes)
    return None if perm == tuple(range(len(perm))) else perm


def _pad(graph: Graph, op: Op, value: Value, perm: Perm) -> Passage | None:
    rank = len(perm)
    pads = ints(graph, op.inputs[1])
    axes = tuple(range(rank)) if op.input(3) is None else ints(graph, op.input(3))
    if pads is None or axes is None:
        return None
    new_axes = [perm[normalize_axis(a, rank)] for a in axes]

    def build(patch: Patch) -> Value:
        operands = [_untransposed(graph, value), op.inputs[1], op.input(2), integers(patch, new_axes, "axes")]
        return patch.add("Pad", operands, op.attrs, src=op.src)

    return Passage((0,), build, perm)
