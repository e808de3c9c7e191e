"""A Loop whose iterations may append a row to a state stacks the rows of all iterations; the appended ones are selected after it.

Decoders of speech and text write ``if token != blank: result = concat(result, token)``. The size of such a state differs between
iterations, so neither the If nor an unrolled iteration can run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.ir.body import GraphBody
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.bodies import IfAttrs, LoopAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.ops.sort import CompressAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand
from optdnn.passes.support.long_steps import value_behind
from optdnn.passes.unroll import may_fail
from optdnn.types import normalize_axis


@dataclass(frozen=True)
class Appended:
    """The carried state ``k`` of a Loop, the result ``port`` of ``choice``. The branch ``taken`` appends its value ``row``."""

    k: int
    choice: Op
    port: int
    taken: bool
    row: Value

    @property
    def branch(self) -> Graph:
        a = self.choice.attrs
        return (a.then_branch if self.taken else a.else_branch).graph  # type: ignore[no-any-return]


@rule("appended_rows", {"Loop"})
def appended_rows(graph: Graph, op: Op) -> Match | Miss | None:
    """A state that an If extends by one row or leaves as it is, and that nothing else in the body reads."""
    found = next((each for k in range(op.attrs.carried) if (each := _appended(op, k)) is not None), None)
    if found is None:
        return None
    branch, start = found.branch, operand(op, 2 + found.k)
    row, first = branch.type(found.row), graph.type(start)
    if not row.is_static or not first.is_static:
        return Miss("sizes of the rows that it appends are not known")
    if row.dims[0] != 1:
        return Miss("an iteration appends several rows")
    if any(may_fail(branch, o) for o in _needed(branch, found.row)):
        return Miss("an operator may fail in an iteration that appends nothing")

    def build(patch: Patch) -> None:
        carried, count = op.attrs.carried - 1, len(op.outputs) - 1
        operands = [v for slot, v in enumerate(op.inputs) if slot != 2 + found.k]
        attrs = LoopAttrs(GraphBody(_stacking(op, found)), carried)
        loop = patch.add_op("Loop", operands, attrs, outputs=count + 2)
        rows, takes = Value(loop.id, count), Value(loop.id, count + 1)
        appended = patch.add("Compress", [rows, takes], CompressAttrs(0))
        if first.dims[0] != 0:
            appended = patch.add("Concat", [start, appended], ConcatAttrs(0))
        results = list(loop.values[:count])
        results.insert(found.k, appended)
        patch.replace_each(op.values, results)

    return Match((op,), build)


def _appended(op: Op, k: int) -> Appended | None:
    """The state ``k``, if an iteration may append rows to it, and does nothing else with it."""
    body: Graph = op.attrs.body.graph
    own, made = Value(body.inputs[2 + k]), value_behind(body, operand(body.op(body.outputs[1 + k])))
    choice = body.op(made)
    if choice.kind != "If" or body.use_count(made) != 1:
        return None
    for taken in (True, False):
        kept, branch = _branch(choice, not taken), _branch(choice, taken)
        inner, outer = _result(kept, made.port), _result(branch, made.port)
        join = branch[0].op(outer)
        if kept[1].get(inner) != own or join.kind != "Concat" or len(join.inputs) != 2:
            continue
        if branch[1].get(value_behind(branch[0], operand(join))) != own or len(body.uses(own)) != 2:
            continue
        captured = next(v for v, place in branch[1].items() if place == own)
        if kept[0].use_count(inner) != 1:
            continue
        rank = len(join.outputs[0].type.dims) if join.outputs[0].type.shape is not None else 0
        if rank and not normalize_axis(join.attrs.axis, rank) and branch[0].use_count(captured) == 1:
            return Appended(k, choice, made.port, taken, operand(join, 1))
    return None


def _branch(choice: Op, taken: bool) -> tuple[Graph, dict[Value, Value]]:
    """A branch of an If: its graph, and its inputs with their values around the If."""
    a, split = choice.attrs, 1 + choice.attrs.then_captured
    branch: Graph = (a.then_branch if taken else a.else_branch).graph
    given = choice.inputs[1:split] if taken else choice.inputs[split:]
    return branch, {Value(i): v for i, v in zip(branch.inputs, given, strict=True) if v is not None}


def _result(branch: tuple[Graph, dict[Value, Value]], port: int) -> Value:
    return value_behind(branch[0], operand(branch[0].op(branch[0].outputs[port])))


def _stacking(op: Op, found: Appended) -> Graph:
    """The body of the Loop without the state: it stacks the rows of all iterations, and whether each is appended."""
    body: Graph = op.attrs.body.graph.copy()
    body.share_symbols(op.attrs.body.graph)
    branch, place = _branch(found.choice, found.taken)
    for inner in _needed(branch, found.row):
        if inner.kind == "Constant":
            place[inner.value] = body.add_constant(inner.attrs.value, inner.outputs[0].name)
            continue
        read, names = [None if v is None else place[v] for v in inner.inputs], [o.name for o in inner.outputs]
        made = body.add(inner.kind, read, inner.attrs, names=names, outputs=len(names), src=inner.src)
        place.update({v: Value(made.id, v.port) for v in inner.values})
    axis, scalar = body.add_constant(np.array([0]), "axis"), body.add_constant(np.zeros(0, np.int64), "scalar")
    row = body.add("Squeeze", [place[found.row], axis]).value
    takes = body.add("Reshape", [operand(found.choice), scalar], ReshapeAttrs()).value
    takes = takes if found.taken else body.add("Not", [takes]).value
    result, own = body.outputs.pop(1 + found.k), body.inputs.pop(2 + found.k)
    left = body.op(operand(body.op(result)))
    body.remove(result)
    if len(found.choice.outputs) > 1:
        _add_without(body, found, Value(own))
    body.remove_dead([left.id, found.choice.id])
    body.remove(own)
    body.add_output(row, "appended_row")
    body.add_output(takes, "appends")
    return body


def _add_without(body: Graph, found: Appended, own: Value) -> None:
    """Adds the If without the state, for its other results."""
    choice, split = found.choice, 1 + found.choice.attrs.then_captured
    places = [
        next(k for k, v in enumerate(part) if v == own) for part in (choice.inputs[1:split], choice.inputs[split:])
    ]
    branches: list[GraphBody] = []
    for old, place in zip((choice.attrs.then_branch, choice.attrs.else_branch), places, strict=True):
        branch: Graph = old.graph.copy()
        branch.share_symbols(old.graph)
        result, given = branch.outputs.pop(found.port), branch.inputs.pop(place)
        made = branch.op(operand(branch.op(result)))
        branch.remove(result)
        branch.remove_dead([made.id])
        branch.remove(given)
        branches.append(GraphBody(branch))
    names = [o.name for port, o in enumerate(choice.outputs) if port != found.port]
    operands = [v for v in choice.inputs if v != own]
    then, other = branches
    new = body.add("If", operands, IfAttrs(then, other, split - 2), names=names, outputs=len(names), src=choice.src)
    others = [port for port in range(len(choice.outputs)) if port != found.port]
    for k, port in enumerate(others):
        body.replace_uses(Value(choice.id, port), Value(new.id, k))


def _needed(branch: Graph, value: Value) -> list[Op]:
    """The operators of a branch that compute a value, in order."""
    needed, found = {value}, list[Op]()
    for op in reversed(branch.order()):
        if not needed.isdisjoint(op.values) and op.kind not in STRUCTURAL - {"Constant"}:
            found.insert(0, op)
            needed |= {v for v in op.inputs if v is not None}
    return found


class AppendedRows(RulePass):
    name = "appended_rows"
    rules = (appended_rows,)
    gpu_only = True  # the libraries of the CPU run loops
