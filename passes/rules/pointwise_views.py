"""Reshapes between pointwise operators move out of the way, so that the operators become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.support.facts import RESHAPES, is_pointwise, reshaped
from optdnn.passes.support.open_stages import MAX_OPERANDS, MAX_STAGES, OpenStage, body, outside, steps_of, tensors_of
from optdnn.passes.support.views import groups
from optdnn.types import TensorType


@rule("view_before")
def view_before(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Reshape after an op of one computed tensor moves in front of it, if ops read the Reshape's result. They then become one op.

    Exporters convert a mask, and then give it axes. Optimal transport subtracts a logarithm of sums from constants, gives the
    result an axis, and adds it to a matrix of scores (SuperGlue: Sarlin et al., 2020)."""
    reshape = _reshape_after(graph, op, context)
    if reshape is None:
        return None
    if not all(is_pointwise(user) for user in graph.users(reshape.value)):
        return None
    tensors, before, after = tensors_of(graph, op), op.outputs[0].type, graph.type(reshape.value)
    constants = {v: array for v in tensors if (array := graph.constant_value(v)) is not None}
    computed = [v for v in tensors if v not in constants]
    if len(computed) != 1 or graph.type(computed[0]).shape != before.shape:
        return Miss(f"{op.name} reads more than one tensor, so that the Reshape after it stays")
    rank = len(after.dims)
    if any(len(graph.type(v).dims) > rank for v in outside(steps_of(op)) if v not in tensors):
        return Miss(f"a constant that {op.name} reads has more axes than the result of the Reshape after it")
    axes = _merged(after, before) if constants else []
    if axes is None:
        return Miss(f"the Reshape after {op.name}, which reads constants, joins axes, or its sizes are not known")

    def build(patch: Patch) -> Value:
        x = patch.add(reshape.kind, [computed[0], *reshape.inputs[1:]], reshape.attrs, src=reshape.src)
        inner = {computed[0]: x}
        for v, array in constants.items():
            inner[v] = patch.constant(array.reshape(_finer(array.shape, after, before, axes)), "constant")
        return patch.add("Pointwise", *body(_reading(steps_of(op), inner), x), src=op.src)

    return Match((reshape, op), build)


@rule("view_after")
def view_after(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Reshape between two ops that merges axes moves behind the second one, whose other operands get the finer axes. The two then
    become one op.

    State-space models join the chunks of a sequence, add a skip connection, join the heads, and multiply a gate."""
    reshape = _reshape_after(graph, op, context)
    if reshape is None:
        return None
    reader = graph.sole_user(reshape.value)
    if reader is None or not is_pointwise(reader):
        return None
    before, after = graph.type(op.value), graph.type(reader.value)
    axes = _merged(before, after) if graph.type(reshape.value).shape == after.shape else None
    if axes is None:
        return None
    if any(any(word in u.kind for word in ("Norm", "Reduce", "Softmax")) for u in graph.users(reader.value)):
        return Miss(f"the launch after {reader.name} may compute it")
    tensors = [*tensors_of(graph, op), *tensors_of(graph, reader)]
    if len(steps_of(op)) + len(steps_of(reader)) > MAX_STAGES or len(tensors) > MAX_OPERANDS + 1:
        return Miss(f"{op.name} and {reader.name} together have too many stages, or read too many tensors")

    def build(patch: Patch) -> Value:
        given = [v for v in outside(steps_of(reader)) if v != reshape.value]
        inner = {reshape.value: op.value}
        for v in given:
            inner[v] = reshaped(patch, v, _finer(graph.type(v).static_shape, before, after, axes))
        y = patch.add("Pointwise", *body(_reading(steps_of(reader), inner), op.value), src=reader.src)
        return reshaped(patch, y, after.static_shape, src=reshape.src)

    return Match((reader, reshape), build)


@rule("view_before_reduction")
def view_before_reduction(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Reshape that splits axes, between an op and a reduction, moves in front of the op, whose operands get the finer axes. The
    launch of the reduction can then compute the op.

    A mixture of experts multiplies the results of all tokens' experts by their weights, and sums those of each token."""
    reshape = _reshape_after(graph, op, context)
    if reshape is None:
        return None
    reader = graph.sole_user(reshape.value)
    if reader is None or not reader.kind.startswith("Reduce"):
        return None
    before, after = graph.type(op.value), graph.type(reshape.value)
    axes = _merged(after, before)
    if axes is None:
        return Miss(f"the Reshape after {op.name} joins axes, or its sizes are not known")

    def build(patch: Patch) -> Value:
        steps = steps_of(op)
        inner: dict[Value, Value] = {}
        for v in outside(steps):
            shape = graph.type(v).static_shape
            alike = {*shape} <= {1} != {*after.static_shape} and len(shape) <= len(after.dims)
            inner[v] = v if alike else reshaped(patch, v, _finer(shape, after, before, axes))
        return patch.add("Pointwise", *body(_reading(steps, inner), inner[tensors_of(graph, op)[0]]), src=op.src)

    return Match((reshape, op), build)


def _reshape_after(graph: Graph, op: Op, context: PassContext) -> Op | None:
    """The Reshape (also a Squeeze, Unsqueeze or Flatten) that alone reads a pointwise op, on a GPU; None if there is none, or the
    op computes a known shape."""
    reshape = graph.sole_user(op.value) if context.on_gpu and is_pointwise(op) else None
    return reshape if reshape is not None and reshape.kind in RESHAPES and op.outputs[0].known is None else None


def _reading(steps: Sequence[OpenStage], moved: Mapping[Value, Value]) -> list[OpenStage]:
    """The steps, which read other values in the place of these."""
    return [replace(s, args=tuple(moved.get(a, a) if isinstance(a, Value) else a for a in s.args)) for s in steps]


def _merged(fine: TensorType, coarse: TensorType) -> list[tuple[Sequence[int], Sequence[int]]] | None:
    """The axes of ``fine`` that each axis of ``coarse`` consists of, those of one element apart; None if one is split."""
    if not fine.is_static or not coarse.is_static or 0 in coarse.static_shape:
        return None
    found = groups(fine.static_shape, coarse.static_shape) or []
    axes: list[tuple[Sequence[int], Sequence[int]]] = [
        (of, [k for k in to if coarse.static_shape[k] > 1]) for of, to in found
    ]
    return None if any(len(to) > 1 for _, to in axes) else axes


def _finer(
    shape: tuple[int, ...], fine: TensorType, coarse: TensorType, axes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[int, ...]:
    """The shape of an operand of a result ``coarse``, for a result ``fine``."""
    whole, found = (*(1,) * (len(coarse.dims) - len(shape)), *shape), [1] * len(fine.dims)
    for of, to in axes:
        if to and whole[to[0]] != 1:
            for k in of:
                found[k] = fine.static_shape[k]
    return tuple(found)
