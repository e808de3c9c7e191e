"""Convolutions or matrix products that read one value become one, with their weights side by side, and a Split after it.

The 1x1 branches of an Inception block and the query, key and value projections of attention are such siblings. What is
saved are launches and readings of the input; what is paid is the Split's copy. Measured through OpenVINO and ONNX Runtime
on a CPU, the copy costs what is saved (0.94 to 1.04 of the separate time in OpenVINO for Inception and attention blocks), so
there siblings are merged only where no Split is needed: where a Concat puts the parts together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import FusedAttrs, Stage
from optdnn.ops.checks import elements
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.target_name import TargetName
from optdnn.types import Array

LAUNCH_BYTES = 4 << 20
"""Memory traffic that takes as long as one kernel launch: about 1.5 microseconds at 3 TB/s."""

ALIGNED = 8
"""Columns in whose multiples the parts of a product can be read where they lie: on GPUs its Split is no copy then."""


@dataclass(frozen=True)
class Member:
    """One sibling taken apart. ``channels`` has an array for each operand that varies by output channel."""

    op: Op
    key: tuple[Any, ...]
    """Siblings with equal keys can be merged."""
    weight: Array
    bias: Array | None
    scalars: tuple[Array | None, ...]
    """The stages' operands, in order of slot: the scalar, or None where ``channels`` has the vector."""
    channels: tuple[Array | None, ...]
    width: int


@dataclass(frozen=True)
class Family:
    """Siblings to merge, in order; ``concat`` is set where they lie side by side in one Concat already."""

    members: tuple[Member, ...]
    axis: int
    concat: Op | None


class MergeSiblings(Rule):
    """Convolutions of one geometry, Gemms or MatMuls on one operand, with constant weights and equal activations."""

    name = "siblings"
    kinds = frozenset({"Conv", "Gemm", "MatMul"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        x = op.inputs[0]
        assert x is not None
        same_kind = [u for u in graph.users(x) if u.kind == op.kind and u.inputs[0] == x]
        if len(same_kind) < 2:
            return None
        mine = _member(graph, op)
        if isinstance(mine, str):
            return Miss(mine)
        members = [m for m in (_member(graph, u) for u in same_kind) if isinstance(m, Member) and m.key == mine.key]
        if len(members) < 2:
            return Miss(f"no other {op.kind} on {graph.output(x).name} has the same geometry, type and activation")
        family = _family(graph, members)
        reason = _unprofitable(graph, x, family, context.target)
        if reason is not None:
            return Miss(reason)
        ops = [m.op for m in family.members] + ([family.concat] if family.concat is not None else [])
        return Match(tuple(ops), family)

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        family: Family = match.data
        members, first = family.members, family.members[0]
        patch = Patch(graph, match.ops)
        name = f"{first.op.outputs[0].name}.siblings"
        weights, axis = [m.weight for m in members], _weight_axis(first.op)
        weight = context.kept.once(("joined", axis), weights, lambda: np.concatenate(weights, axis=axis))
        inputs: list[Value | None] = [first.op.inputs[0], patch.constant(weight, f"{name}.weight"), None]
        if any(m.bias is not None for m in members):
            biases = [np.zeros(m.width, weight.dtype) if m.bias is None else m.bias for m in members]
            inputs[2] = patch.constant(np.concatenate(biases), f"{name}.bias")
        inputs = inputs[: first.op.definition.arity]
        rank = len(graph.type(first.op.value).dims)
        for k, scalar in enumerate(first.scalars):
            if scalar is None:
                vectors = [m.channels[k] for m in members]
                scalar = np.concatenate([v for v in vectors if v is not None])
                scalar = scalar.reshape(-1, *(1,) * (rank - 1 - family.axis))
            inputs.append(patch.constant(scalar, f"{name}.stage{k}"))
        while inputs[-1] is None:
            inputs.pop()
        merged = patch.add(first.op.kind, inputs, first.key[1], name=name)
        if family.concat is not None:
            _into_concat(graph, patch, family, merged)
        else:
            sizes = patch.constant(np.array([m.width for m in members], np.int64), f"{name}.sizes")
            split = patch.add_op("Split", [merged, sizes], SplitAttrs(family.axis), outputs=len(members))
            for i, m in enumerate(members):
                patch.replace(m.op.value, Value(split.id, i))
        return patch


def _into_concat(graph: Graph, patch: Patch, family: Family, merged: Value) -> None:
    """Put the merged value where its members were in the Concat, which goes away when nothing else is in it."""
    concat = family.concat
    assert concat is not None
    values = {m.op.value for m in family.members}
    at = concat.inputs.index(family.members[0].op.value)
    inputs = [v for v in concat.inputs if v not in values]
    inputs.insert(at, merged)
    if len(inputs) > 1:
        merged = patch.add("Concat", inputs, concat.attrs)
    patch.replace(concat.value, merged)


def _weight_axis(op: Op) -> int:
    """The axis of the weights along which output channels lie."""
    return 0 if op.kind == "Conv" or (op.kind == "Gemm" and op.attrs.transB) else 1


def _member(graph: Graph, op: Op) -> Member | str:
    """A sibling taken apart, or why it cannot be merged."""
    attrs: FusedAttrs = op.attrs
    weight, output = graph.constant_value(op.input(1)), op.outputs[0].type
    if weight is None:
        return "its weights are not constant"
    if op.kind == "Conv" and op.attrs.group != 1:
        return "a grouped convolution reads only its own channels"
    if op.kind != "Conv" and weight.ndim != 2:
        return f"its weights have rank {weight.ndim}, not 2"
    if attrs.prologue:
        return "it has a prologue of its own"
    if output.shape is None or len(output.shape) < 2:
        return "the rank of its result is unknown"
    width, rank = weight.shape[_weight_axis(op)], len(output.shape)
    axis = 1 if op.kind == "Conv" else rank - 1
    arity = op.definition.arity
    assert arity is not None
    bias: Array | None = None
    if arity > 2 and op.input(2) is not None:
        given = graph.constant_value(op.input(2))
        bias = None if given is None else _by_channel(given, rank if op.kind == "Gemm" else 1, axis, width)
        if bias is None:
            return "its bias is not a constant for each output channel"
    scalars: list[Array | None] = []
    channels: list[Array | None] = []
    used = sorted({a for s in attrs.epilogue for a in s.args if a is not None and a >= 0})
    for slot in used:
        array = graph.constant_value(op.inputs[slot]) if slot >= arity else None
        vector = None if array is None else _by_channel(array, rank, axis, width)
        if array is None or vector is None:
            return "its epilogue reads a value that is not a constant for each output channel"
        scalars.append(array if array.size == 1 else None)
        channels.append(None if array.size == 1 else vector)
    renumber = {slot: arity + k for k, slot in enumerate(used)}
    stages = tuple(_renumbered(s, renumber) for s in attrs.epilogue)
    plain = replace(attrs, epilogue=stages)
    kernel = weight.shape[2:] if op.kind == "Conv" else ()
    values = tuple(None if a is None else (a.shape, a.tobytes()) for a in scalars)
    key = (op.kind, plain, kernel, str(output.dtype), str(weight.dtype), values)
    return Member(op, key, weight, bias, tuple(scalars), tuple(channels), width)


def _renumbered(stage: Stage, slots: dict[int, int]) -> Stage:
    return Stage(stage.kind, tuple(slots.get(a, a) if a is not None else None for a in stage.args), stage.attrs)


def _by_channel(array: Array, rank: int, axis: int, width: int) -> Array | None:
    """A constant that varies along the channel axis alone, as a vector; None for any other."""
    if array.size == 1:
        return np.array(np.broadcast_to(array.reshape(-1), (width,)))
    where = axis - (rank - array.ndim) if rank > 1 else 0
    if array.ndim > rank or where < 0 or array.shape[where] != width or array.size != width:
        return None
    return array.reshape(-1)


def _family(graph: Graph, members: Sequence[Member]) -> Family:
    """The members in the order of the Concat that has them side by side, else in the graph's order."""
    op = members[0].op
    axis = 1 if op.kind == "Conv" else len(graph.type(op.value).dims) - 1
    concat = graph.sole_user(op.value)
    values = [m.op.value for m in members]
    if concat is not None and concat.kind == "Concat" and isinstance(concat.attrs, ConcatAttrs):
        rank = len(graph.type(op.value).dims)
        positions = {v: concat.inputs.index(v) for v in values if v in concat.inputs}
        together = len(positions) == len(values) and all(graph.sole_user(v) == concat for v in values)
        if together and concat.attrs.axis % rank == axis:
            order = sorted(members, key=lambda m: positions[m.op.value])
            if max(positions.values()) - min(positions.values()) == len(values) - 1:
                return Family(tuple(order), axis, concat)
    return Family(tuple(members), axis, None)


def _unprofitable(graph: Graph, x: Value, family: Family, target: str) -> str | None:
    """Why merging would not pay. Symbolic dimensions count as 1."""
    if family.concat is not None:
        return None
    if target in ("cpu", "reference"):
        return f"on {target} the Split's copy costs what merging saves"
    rows = TargetName.parse(target).on_gpu and family.members[0].op.kind != "Conv"
    if rows and all(m.width % ALIGNED == 0 for m in family.members):
        return None
    saved = (len(family.members) - 1) * (_bytes(graph, x) + LAUNCH_BYTES)
    copied = 2 * sum(_bytes(graph, m.op.value) for m in family.members)
    if copied > saved:
        return f"the Split would copy {copied / 1e6:.1f} MB to save {saved / 1e6:.1f} MB of reading and launching"
    return None


def _bytes(graph: Graph, value: Value) -> float:
    t = graph.type(value)
    return elements(t) * t.dtype.itemsize


class FuseSiblings(RulePass):
    """One look at each operator that shares its input."""

    name = "fuse_siblings"
    rules = (MergeSiblings(),)
