"""Chains and small DAGs of pointwise operators become one Pointwise op, whose stages run in registers.

A group grows from its last op: a producer joins when every user of its value is in the group already. So a group has one
result, and no path leaves it and comes back (it is convex): fusing it cannot make a cycle. All values inside have the
result's shape. Smaller operands are read from outside and broadcast: computing them inside would repeat the work for each
element. On GPUs the work is repeated where it costs less than a launch. Types may differ inside (a comparison that feeds a Where).

On GPUs, some ops are computed again in each of their readers, which then read the op's operands. Such an op has few elements, or
reads no more than it writes (one tensor, and perhaps small constants), and no reader needs its result from memory. One reader may
be a reduction: its kernel computes the op as it reduces. So the sides of a mask's box are reductions of the mask, stored nowhere.
If several parts of a small tensor go through the same op, one op of the whole tensor replaces them. If a Concat of such ops goes
through one more op, each part does so before the Concat. A Reshape between two ops moves in front of the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.rules.pointwise_parts import ALIGNED, PointwiseOfParts, gated_parts
from optdnn.passes.rules.pointwise_views import view_after, view_before, view_before_reduction
from optdnn.passes.rules.shape import reshape_chain
from optdnn.passes.support.facts import RESHAPES, bytes_of, is_pointwise
from optdnn.passes.support.open_stages import MAX_OPERANDS, MAX_STAGES, OpenStage, body, outside, steps_of, tensors_of
from optdnn.types import BOOL, TensorType, is_float, show_shape

REPEATED = 1_000_000
"""Most stages (times elements) that a GPU launch computes again, so that a smaller operand needs no launch of its own. A division
for each of a million elements takes some hundred nanoseconds on a large GPU, a launch about a microsecond."""


VERY_FEW = 100_000
"""Most elements of an op of two tensors that is computed again. Reading both of them again costs less than a launch."""

MOVES = RESHAPES | {"Concat", "Transpose"}
"""Operators between a pointwise op and the network's outputs that compute nothing."""


class FuseGroup(Rule):
    """The largest group that ends at an op, within the bounds."""

    name = "pointwise"

    def __init__(self, most: int = MAX_STAGES, joins: Callable[[Graph, Op], bool] = lambda graph, one: True):
        self.most = most
        """Most stages of one Pointwise op."""
        self.joins = joins
        """Whether an op may join the group of its readers."""

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        return _group(graph, op, context, self)


def _group(graph: Graph, op: Op, context: PassContext, rule: FuseGroup) -> Match | Miss | None:
    if not is_pointwise(op) or op.outputs[0].known is not None:
        return None
    group, refusals = {op.id: op}, dict[int, str]()
    waiting = _producers(graph, op)
    while waiting:
        one = waiting.pop(0)
        if one.id in group:
            continue
        if not rule.joins(graph, one):
            continue
        reason = _refuse(graph, op, one, group, context, rule.most)
        if reason is not None:
            refusals[one.id] = reason
            continue
        group[one.id] = one
        refusals.pop(one.id, None)
        again = [graph.op(i) for i in refusals if i not in group]
        waiting = [*waiting, *_producers(graph, one), *again]
        refusals.clear()
    if len(group) == 1:
        return Miss(next(iter(refusals.values()))) if refusals else None
    ops = tuple(_ordered(graph, group))

    def build(patch: Patch) -> Value:
        steps = _collect(graph, ops)
        first = first_operand(graph, steps, op, context.on_gpu)
        assert first is not None
        return patch.add("Pointwise", *body(steps, first))

    return Match(ops, build, op.value)


def _refuse(graph: Graph, sink: Op, one: Op, group: dict[int, Op], context: PassContext, most: int) -> str | None:
    for user in graph.users(one.value):
        if user.kind == "Output":
            return f"{one.name} is an output of the network"
        if user.id not in group:
            return f"{one.name} is also used by {user.name}"
    return _unfit(graph, sink, one, group, context, most)


def _unfit(graph: Graph, sink: Op, one: Op, group: dict[int, Op], context: PassContext, most: int) -> str | None:
    """Why the kernel of ``group`` cannot compute its operand ``one`` too, or None."""
    result, inner = sink.outputs[0].type, one.outputs[0].type
    if result.shape is None:
        return "the rank of the result is unknown"
    if inner.shape != result.shape and not (context.on_gpu and _repeats_little(one, result, context)):
        return (
            f"{one.name} has {show_shape(inner.shape)}, the result {show_shape(result.shape)}: "
            "it would be computed again for each element"
        )
    steps = _collect(graph, [*group.values(), one])
    if len(steps) > most:
        return f"with {one.name} it would have {len(steps)} stages, more than {most}"
    read = sum((array := graph.constant_value(v)) is None or array.size > 1 for v in outside(steps))
    if read > MAX_OPERANDS:
        return f"with {one.name} it would read {read} tensors, more than {MAX_OPERANDS}"
    if first_operand(graph, steps, sink, context.on_gpu) is None:
        return f"with {one.name} no operand has the result's shape {show_shape(result.shape)}"
    return None


def _repeats_little(one: Op, result: TensorType, context: PassContext) -> bool:
    """Whether computing ``one`` again for each element of the result costs less than a launch."""
    inner = one.outputs[0].type
    if not result.is_static or not inner.is_static or not (is_float(inner.dtype) or inner.dtype == BOOL):
        return False
    return context.counted(len(steps_of(one)) * math.prod(result.static_shape)) <= REPEATED


def _producers(graph: Graph, op: Op) -> list[Op]:
    """The pointwise ops that an op reads, each once, in operand order."""
    found = [graph.op(v) for v in op.inputs if v is not None]
    return list({o.id: o for o in found if is_pointwise(o) and o.outputs[0].known is None}.values())


def _ordered(graph: Graph, group: dict[int, Op]) -> list[Op]:
    """The ops of a group, producers first. Depth first from the ops that nothing in the group reads."""
    done: dict[int, Op] = {}

    def visit(op: Op) -> None:
        for v in op.inputs:
            if v is not None and v.op in group and v.op not in done:
                visit(graph.op(v))
        done[op.id] = op

    for op in group.values():
        if op.id not in done:
            visit(op)
    return list(done.values())


def _collect(graph: Graph, ops: Sequence[Op]) -> list[OpenStage]:
    """All steps of these ops, each before its users; equal steps (same kind, attributes, arguments) are kept apart."""
    steps: list[OpenStage] = []
    result: dict[Value, int] = {}
    for op in _ordered(graph, {op.id: op for op in ops}):
        base = len(steps)
        for step in steps_of(op):
            args: tuple[Any, ...] = tuple(
                base + a if isinstance(a, int) else result.get(a, a) if a is not None else None for a in step.args
            )
            steps.append(OpenStage(step.kind, step.attrs, args))
        result[op.value] = len(steps) - 1
    return steps


def first_operand(graph: Graph, steps: Sequence[OpenStage], op: Op, on_gpu: bool) -> Value | None:
    """The operand that becomes register 0: one of the result's shape, computed rather than constant.

    GPU kernels can broadcast this operand too. If no operand has the result's shape (an outer product), it is the operand that is
    repeated along the fewest axes.
    """
    shape = op.outputs[0].type.dims
    values = outside(steps)
    full = [v for v in values if graph.type(v).shape == op.outputs[0].type.shape]
    computed = [v for v in values if graph.constant_value(v) is None]
    found = next(iter([v for v in full if v in computed] or full), None)
    if found is not None or not on_gpu:
        return found

    def kept(v: Value) -> int:
        return sum(a == b for a, b in zip(reversed(graph.type(v).dims), reversed(shape), strict=False))

    return max(computed, key=kept, default=None)


@rule("computed_again")
def computed_again(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """An op that reads no more bytes than it writes, or has few elements, is computed again in each of its readers."""
    if not context.on_gpu or not is_pointwise(op) or op.outputs[0].known is not None:
        return None
    readers = graph.users(op.value)
    inner = [u for u in readers if is_pointwise(u) and u.outputs[0].known is None]
    others = [u for u in readers if u not in inner]
    last = bool(others) and context.counted(_elements(op)) <= VERY_FEW and _to_outputs(graph, others)
    if len(readers) < 2 or not inner or not (last or _reads_little(graph, op, context)):
        return None
    if not last and (len(others) > 1 or not all(_reduces(u) for u in others)):
        return Miss(f"{op.name} is also used by {others[-1].name}")
    for reader in inner:
        if (why := _unfit(graph, reader, op, {reader.id: reader}, context, MAX_STAGES)) is not None:
            return Miss(why)

    def build(patch: Patch) -> None:
        for reader in inner:
            steps = _collect(graph, [op, reader])
            first = first_operand(graph, steps, reader, True)
            assert first is not None
            fused = patch.add("Pointwise", *body(steps, first), src=op.src | reader.src)
            patch.replace(reader.value, fused)

    return Match((*inner, *(() if others else (op,))), build)


def _to_outputs(graph: Graph, readers: Sequence[Op]) -> bool:
    """Whether all of these only move a result to the network's outputs, as the state of a recurrent step. One launch then computes
    the result and, from the same operands, what reads it."""
    return all(u.kind == "Output" or (u.kind in MOVES and _to_outputs(graph, graph.users(u.value))) for u in readers)


def _reduces(op: Op) -> bool:
    """Whether the launch of an op may compute its operand as it reduces."""
    return op.kind.startswith("Reduce") or op.kind in ("GlobalAveragePool", "GlobalMaxPool")


def _elements(op: Op) -> float:
    out = op.outputs[0].type
    return math.prod(out.static_shape) if out.is_static else math.inf


def _reads_little(graph: Graph, op: Op, context: PassContext) -> bool:
    """Whether an op reads a single computed tensor, of its result's shape, and with its constants no more bytes than it writes. An
    op of few elements may read any constants, and an op of very few a second tensor."""
    tensors, out = tensors_of(graph, op), op.outputs[0].type
    computed = [v for v in tensors if graph.constant_value(v) is None]
    if not any(graph.type(v).shape == out.shape for v in computed):
        return False
    size = context.counted(_elements(op))
    if len(computed) > 1:
        return len(computed) == 2 and size <= VERY_FEW
    return size <= REPEATED or (out.is_static and sum(bytes_of(graph, v) for v in tensors) <= bytes_of(graph, op.value))


@rule("parts_together")
def parts_together(graph: Graph, op: Op, context: PassContext) -> Match | None:
    """The same op of several parts of a tensor becomes one op of the tensor, which is split after it."""
    if not context.on_gpu or not is_pointwise(op) or op.outputs[0].known is not None:
        return None
    split = _split_before(graph, op)
    if split is None or split.input(0) is None:
        return None
    form = _form(graph, op)
    same = [u for v in split.values for u in graph.users(v) if is_pointwise(u)]
    same = [u for u in same if _split_before(graph, u) == split and _form(graph, u) == form]
    whole, sizes = graph.type(split.input(0)), [u.outputs[0].type for u in same]  # type: ignore[arg-type]
    if len(same) < 2 or not all(t.is_static for t in (whole, *sizes)):
        return None
    if any(not t.is_static or t.static_shape[split.attrs.axis] % ALIGNED for t in (out.type for out in split.outputs)):
        return None  # readers of a part would copy it
    size = math.prod(whole.static_shape)
    if context.counted(size) > REPEATED or size > 2 * sum(math.prod(t.static_shape) for t in sizes):
        return None

    def build(patch: Patch) -> None:
        steps = [replace(s, args=tuple(split.input(0) if a in op_parts else a for a in s.args)) for s in steps_of(op)]
        y = patch.add("Pointwise", *body(steps, split.input(0)), src=frozenset().union(*(u.src for u in same)))  # type: ignore[arg-type]
        parts = patch.add_op("Split", [y, *split.inputs[1:]], split.attrs, outputs=len(split.outputs))
        for reader in same:
            patch.replace(reader.value, Value(parts.id, tensors_of(graph, reader)[0].port))

    op_parts = tensors_of(graph, op)
    return Match(tuple(same), build)


def _split_before(graph: Graph, op: Op) -> Op | None:
    """The Split whose part is the only tensor that an op reads; None for other ops."""
    tensors = tensors_of(graph, op)
    split = graph.op(tensors[0]) if len(tensors) == 1 else None
    whole = split is not None and graph.type(tensors[0]).shape == op.outputs[0].type.shape
    return split if split is not None and split.kind == "Split" and whole else None


def _form(graph: Graph, op: Op) -> tuple[object, ...]:
    """A key for the op's function of its tensor: equal keys mean the same function."""

    def key_of(a: Value | int | None) -> object:
        array = graph.constant_value(a) if isinstance(a, Value) else None
        return a if not isinstance(a, Value) else "tensor" if array is None else float(array.reshape(-1)[0])

    return (op.outputs[0].type.dtype, *((s.kind, s.attrs, *map(key_of, s.args)) for s in steps_of(op)))


class FusePointwise(RulePass):
    """Sinks first: each group is grown from its last op."""

    name = "fuse_pointwise"
    rules: Sequence[Rule] = (
        reshape_chain,  # earlier passes leave views in a row, which hide a pointwise operator from another one
        PointwiseOfParts(),
        gated_parts,
        FuseGroup(),
        computed_again,
        parts_together,
        view_before,
        view_after,
        view_before_reduction,
    )
    sinks_first = True
