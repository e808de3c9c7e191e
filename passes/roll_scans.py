"""Recurrences of pointwise steps that exporters unroll become one PointwiseScan: one launch, whose threads loop over the steps.

A step reads one position of each sequence and the states of the previous step (RWKV: Peng et al., 2023; SRU: Lei et al., 2018;
QRNN: Bradbury et al., 2017; IndRNN, leaky integrate-and-fire neurons). The rule begins at the Concat of all steps' results. It
compares each step with the previous one, from the last step down, as long as both are equal. The first steps may differ: folded
constants change them. They stay, and their values are the initial states of the scan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.checks import elements
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.pointwise_scan import PointwiseScanAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.small_products import outer_product
from optdnn.passes.support.facts import (
    RESHAPES,
    in_shape,
    integers,
    ints,
    operand,
    origins,
    producer,
    reshape_target,
    scalar,
    shape_of,
    sliced,
)
from optdnn.passes.support.unrolled_steps import LEAST, Scan, Steps, find_scan, first_of_all, position
from optdnn.types import normalize_axis, show_shape

TRIED = 8
"""Operators at the end of a step that are tried as the result of the step."""
MOST_STAGES = 64
"""Most stages of one step."""
MOST_OPERANDS = 16
"""Most states, sequences and other tensors that a step reads: bounds the registers per thread."""
MOST_ELEMENTS = 1 << 26
"""Most elements of all results: states that a step only reduces are stored for all steps."""


@rule("pointwise_scan", {"Concat"})
def pointwise_scan(graph: Graph, op: Op) -> Match | Miss | None:
    """Rewrites the Concat of all steps' results. A Concat whose scan contains this one's is rewritten first."""
    found = _scan_of(graph, op)
    if isinstance(found, Match):
        covered = {one.id for one in found.ops}
        for other in _later(graph, op):
            wider = _scan_of(graph, other)
            if isinstance(wider, Match) and covered - {op.id} < {one.id for one in wider.ops}:
                return None
    return found


def _later(graph: Graph, op: Op) -> list[Op]:
    """Other Concats with the same number of parts that read this one's last part, possibly through pointwise operators."""
    found: dict[int, Op] = {}
    stack = [operand(op, len(op.inputs) - 1)]
    if (reshape := producer(graph, stack[0], RESHAPES)) is not None:
        stack.append(operand(reshape))
    for value in stack:
        for user in graph.users(value) if len(stack) < MOST_STAGES else ():
            if user.kind == "Concat" and user.id != op.id and len(user.inputs) == len(op.inputs):
                found[user.id] = user
            elif user.kind in STAGE_KINDS or user.kind in RESHAPES:
                stack.append(user.value)
    return list(found.values())


def _scan_of(graph: Graph, op: Op) -> Match | Miss | None:
    """The match for the scan that computes the parts of a Concat; a Miss or None if there is none."""
    shape = shape_of(graph, op.value)
    if shape is None or len(op.inputs) < LEAST:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    parts = [_part(graph, operand(op, k), axis) for k in range(len(op.inputs))]
    if shape[axis] != len(parts) or parts[-1][1] != parts[0][1]:
        return None
    kept, results_of = parts[0][1], [graph.op(v) for v, _ in parts]
    if reductions := _products(graph, results_of) or _reductions(graph, results_of):
        parts = [(operand(one, int(one.kind == "MatMul")), False) for one in reductions]
    missed: Miss | None = None
    for backward in (False, True):
        ordered = [v for v, _ in (parts[::-1] if backward else parts)]
        steps = Steps(graph, ordered)
        steps = steps.turned() if backward else steps
        if steps.count < LEAST:
            return None
        results = _results(steps, ordered)
        if len(results) < LEAST:
            continue
        scan = find_scan(steps, results, min(results))
        if isinstance(scan, Scan):
            return _rolled(graph, scan, _Rows(op, results[scan.first + 1], axis, kept, reductions))
        missed = missed or scan
    return missed


def _results(steps: Steps, ordered: Sequence[Value]) -> dict[int, Value]:
    """Step -> result, for the last values of ``ordered`` that are results of consecutive steps."""
    found: dict[int, Value] = {}
    for value in reversed(ordered):
        t = steps.time.get(value, -1)
        if t < 0 or not steps.member(value) or (found and t + 1 not in found):
            break
        found[t] = value
    return found


def _part(graph: Graph, value: Value, axis: int) -> tuple[Value, bool]:
    """A part of a Concat, before the Reshape that adds the Concat's axis, if there is one; and whether the part has the axis."""
    op = producer(graph, value, RESHAPES)
    shape = shape_of(graph, value) or ()
    if op is not None and shape_of(graph, operand(op)) == (*shape[:axis], *shape[axis + 1 :]):
        return operand(op), False
    return value, True


def _reductions(graph: Graph, found: Sequence[Op]) -> tuple[Op, ...]:
    """``found`` if all are reductions along the same axes without other readers (states of S4: Gu et al., 2022); else empty."""
    first = found[0]
    axes = ints(graph, first.input(1)) if first.kind.startswith("Reduce") else None
    alike = axes and all(
        (one.kind, one.attrs, ints(graph, one.input(1))) == (first.kind, first.attrs, axes)
        and graph.sole_user(one.value) is not None
        for one in found
    )
    return tuple(found) if alike else ()


def _products(graph: Graph, found: Sequence[Op]) -> tuple[Op, ...]:
    """``found`` if each is a product of a row with the state of its step, without other readers; else empty.

    Linear attention has this form (Katharopoulos et al., 2020)."""
    if any(one.kind != "MatMul" or one.attrs.prologue or one.attrs.epilogue for one in found):
        return ()
    rank = len(found[0].outputs[0].type.dims)
    if any(len(graph.type(operand(one, slot)).dims) != rank for one in found for slot in (0, 1)):
        return ()
    alike = first_of_all(graph, [operand(one) for one in found]) is not None
    return tuple(found) if alike and all(graph.sole_user(one.value) is not None for one in found) else ()


@rule("outer_step", {"MatMul"})
def outer_step(graph: Graph, op: Op) -> Match | Miss | None:
    """The product of a column and a row, both positions of sequences, becomes a multiplication, which may be part of a step."""
    if not all(len(graph.type(v).dims) > 1 and position(graph, v) for v in op.inputs if v is not None):
        return None
    return outer_product.function(graph, op)


@rule("view_before_step", RESHAPES)
def view_before_step(graph: Graph, op: Op) -> Match | None:
    """A Reshape that adds or removes axes of size 1 moves in front of arithmetic on positions, which then is part of a step."""
    before, after = shape_of(graph, operand(op)), op.outputs[0].type.shape
    inner = producer(graph, operand(op), frozenset(STAGE_KINDS), alone=True)
    if (
        inner is None
        or before is None
        or after is None
        or [n for n in before if n != 1] != [n for n in after if n != 1]
    ):
        return None
    positions = [v for v in inner.inputs if v is not None and shape_of(graph, v) == before and _one_of_many(graph, v)]
    if not any(user.kind in STAGE_KINDS for user in graph.users(op.value)):
        return None
    numbers = [v for v in inner.inputs if v is not None and scalar(graph, v) is not None]
    if not positions or len(positions) + len(numbers) < len(inner.inputs) or reshape_target(before, after) is None:
        return None

    def build(patch: Patch) -> Value:
        moved = {v: in_shape(patch, v, after) for v in dict.fromkeys(positions)}
        return patch.add(inner.kind, [v if v is None else moved.get(v, v) for v in inner.inputs], inner.attrs)

    return Match((op, inner), build)


def _one_of_many(graph: Graph, value: Value) -> bool:
    """Whether a value is one position of a tensor, and enough of its positions are read for a scan."""
    place = position(graph, value)
    return place is not None and graph.use_count(place.whole) >= LEAST


@rule("last_state", STAGE_KINDS)
def last_state(graph: Graph, op: Op) -> Match | Miss | None:
    """The result of the last step, if nothing reads the results of all steps."""
    users = graph.users(op.value)
    users = [*users, *(further for user in users if user.kind in RESHAPES for further in graph.users(user.value))]
    if len(op.outputs) != 1 or any(user.kind in STAGE_KINDS or user.kind == "Concat" for user in users):
        return None
    missed: Miss | None = None
    forward = Steps(graph, [op.value])
    if forward.count < LEAST:
        return None
    for steps in (forward, forward.turned()):
        last = steps.time.get(op.value, -1)
        if last + 1 < LEAST:
            continue
        late = [v for v in steps.time if steps.time[v] == last and steps.member(v)]
        early = [v for v in steps.time if steps.time[v] == last - 1 and steps.member(v)]
        for value, before in ((a, b) for a in late[:-TRIED:-1] for b in early[:-TRIED:-1]):
            if graph.op(value).kind != graph.op(before).kind or steps.compare(last, [(value, before)]) is None:
                continue
            scan = find_scan(steps, {last: value, last - 1: before}, 0)
            if isinstance(scan, Scan):
                return _rolled(graph, scan, None)
            missed = missed or scan
    return missed


@dataclass(frozen=True)
class _Rows:
    """The Concat of all steps' results along ``axis``.

    ``value``: the result of the template. ``kept``: whether the results have the axis themselves. ``reductions``: the operators
    that reduce the result of each step before the Concat."""

    concat: Op
    value: Value
    axis: int
    kept: bool
    reductions: tuple[Op, ...] = ()

    @property
    def stacked(self) -> tuple[int, bool]:
        """The axis of steps in the scan's result, and whether a step's result has it."""
        return (0, False) if self.reductions else (self.axis, self.kept)

    def joined(self, patch: Patch, scan: Scan, rolled: Value) -> Value:
        """The Concat of the steps that are not part of the scan, and of the scan's results."""
        count, before = scan.last + 1 - scan.first, [operand(self.concat, k) for k in range(len(self.concat.inputs))]
        before = before[count:] if scan.steps.backward else before[: len(before) - count]
        if self.reductions:
            first = 0 if scan.steps.backward else len(before)
            many = (
                self._multiplied(patch, rolled, first)
                if self.reductions[0].kind == "MatMul"
                else self._reduced(patch, rolled)
            )
            rolled = self._turned(patch, many)
        parts = [rolled, *before] if scan.steps.backward else [*before, rolled]
        return patch.add("Concat", parts, ConcatAttrs(self.axis)) if before else rolled

    def _reduced(self, patch: Patch, rolled: Value) -> Value:
        """The results of all steps, reduced at once."""
        one, rank = self.reductions[0], len(patch.type(rolled).dims) - 1
        given = ints(patch.graph, one.input(1)) or ()
        return patch.add(
            one.kind, [rolled, integers(patch, [normalize_axis(i, rank) + 1 for i in given], "axes")], one.attrs
        )

    def _multiplied(self, patch: Patch, rolled: Value, first: int) -> Value:
        """The products of the rows of all steps with their results, as one batched product. ``first``: the first row's position."""
        place = position(patch.graph, operand(self.reductions[0]))
        assert place is not None
        dims = patch.graph.type(place.whole).dims
        count, moved = patch.type(rolled).dims[0], [i for i in place.view if i >= 0]
        left = [i for i in range(len(dims)) if i not in (place.axis, *moved)]
        rows = patch.add("Transpose", [place.whole], TransposeAttrs((place.axis, *moved, *left)))
        rows = in_shape(patch, rows, (dims[place.axis], *(1 if i < 0 else dims[i] for i in place.view)))
        if dims[place.axis] != count:
            assert isinstance(count, int)
            rows = sliced(patch, rows, first, first + count, 0)
        return patch.add("MatMul", [rows, rolled], self.reductions[0].attrs)

    def _turned(self, patch: Patch, many: Value) -> Value:
        """Results of all steps along axis 0, with the steps along the axis of the Concat."""
        dims = patch.type(many).dims
        if self.kept:
            many = in_shape(patch, many, (*dims[: self.axis + 1], *dims[self.axis + 2 :]))
        others = list(range(1, len(patch.type(many).dims)))
        turned = (*others[: self.axis], 0, *others[self.axis :])
        return patch.add("Transpose", [many], TransposeAttrs(turned)) if self.axis else many


def _rolled(graph: Graph, scan: Scan, rows: _Rows | None) -> Match | Miss:
    """The PointwiseScan that replaces the steps, or a Miss."""
    steps, template, named = scan.steps, scan.template, scan.named()
    begin, after = scan.alike[scan.first + 1].states, scan.alike[scan.first + 2].states
    following = {before: value for value, before in after.items()}
    states, inside = list(begin), set(template)
    reads = dict.fromkeys(v for value in template for v in graph.op(value).inputs if v is not None and v not in inside)
    sequences = [v for v in reads if v in steps.positions]
    others = [v for v in reads if v not in steps.positions and v not in begin]
    if len(template) > MOST_STAGES or len(states) + len(sequences) + len(others) > MOST_OPERANDS:
        return Miss(f"a step of {len(template)} operators and {len(reads)} operands takes too many registers")
    shown = {} if rows is None else {rows.value: rows.stacked}
    used = _used_elsewhere(graph, named, rows)
    if rows is None and any(steps.time[v] < scan.last for v in used):
        return Miss("results of other steps than the last one have readers too, but no Concat joins them")
    shown |= {v: (0, False) for v in dict.fromkeys(named[u] for u in used) if v not in shown}
    shapes = {shape_of(graph, v) for v in (*shown, *states)}
    if len(shapes) > 1:
        return Miss(f"its states and results differ in shape: {', '.join(sorted(map(show_shape, shapes)))}")
    if sum((scan.last + 1 - scan.first) * elements(graph.type(v)) for v in shown) > MOST_ELEMENTS:
        return Miss("storing the results of all steps would take longer than a launch for each step")
    wholes = [steps.positions[v].whole for v in sequences]
    inside_steps = {v.op for v in named}
    if any(one.id in inside_steps for one in origins(graph, [*wholes, *others, *begin.values()])):
        return Miss("other operands of its steps depend on their results too")
    ahead = -1 if steps.backward else 1
    slot = {v: k for k, v in enumerate((*states, *sequences, *others))}
    register = {v: ~(k + 1) for k, v in enumerate(template)}
    attrs = PointwiseScanAttrs(
        stages=tuple(_stage(graph.op(v), slot, register) for v in template),
        states=len(states),
        steps=scan.last + 1 - scan.first,
        axes=tuple(steps.positions[v].axis for v in sequences),
        starts=tuple(steps.positions[v].index - ahead for v in sequences),
        views=tuple(steps.positions[v].view for v in sequences),
        following=tuple(register[following[v]] for v in states),
        results=tuple(register[v] for v in shown),
        result_axes=tuple(a for a, _ in shown.values()),
        result_kept=tuple(k for _, k in shown.values()),
        backward=steps.backward,
    )

    def build(patch: Patch) -> None:
        given = [*begin.values(), *wholes, *others]
        made = patch.add_op("PointwiseScan", given, attrs, outputs=len(shown), names=[""] * len(shown))
        if rows is not None:
            patch.replace(rows.concat.value, rows.joined(patch, scan, Value(made.id, 0)))
        for value in used:
            port = list(shown).index(named[value])
            along, keeps = shown[named[value]]
            at = _row(scan, steps.time[value])
            index = patch.constant(np.array([at] if keeps else at, np.int64), "step")
            patch.replace(value, patch.add("Gather", [Value(made.id, port), index], GatherAttrs(along)))

    ops = tuple(graph.op(v) for v in named)
    return Match(ops if rows is None else (rows.concat, *rows.reductions, *ops), build)


def _row(scan: Scan, t: int) -> int:
    """The index of step ``t`` in a stacked result."""
    return scan.last - t if scan.steps.backward else t - scan.first


def _stage(op: Op, slot: Mapping[Value, int], register: Mapping[Value, int]) -> Stage:
    args = tuple(None if v is None else register.get(v, slot.get(v)) for v in op.inputs)
    return Stage(op.kind, args, op.attrs)


def _used_elsewhere(graph: Graph, named: Mapping[Value, Value], rows: _Rows | None) -> list[Value]:
    """Values of steps with readers other than the steps and the Concat."""
    inside = {v.op for v in named}
    through = set[int]()
    if rows is not None:
        inside |= {rows.concat.id, *(one.id for one in rows.reductions)}
        through = {v.op for v in rows.concat.inputs if v is not None}
    found = []
    for value in named:
        for user in graph.users(value):
            if user.id in inside or (user.id in through and all(u.id in inside for u in graph.users(user.value))):
                continue
            found.append(value)
            break
    return found


@rule("stacked_positions", {"Concat"})
def stacked_positions(graph: Graph, op: Op) -> Match | None:
    """Parts of a Concat that are all positions of a tensor in order become this tensor, possibly transposed."""
    shape = shape_of(graph, op.value)
    if shape is None:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    values = [operand(op, k) for k in range(len(op.inputs))]
    for begin, value in enumerate(values):
        first = position(graph, value)
        if first is None or first.index or len(first.view) != len(shape) or first.view[axis] >= 0:
            continue
        size = (shape_of(graph, first.whole) or ())[first.axis]
        order = tuple(first.axis if k == axis else i for k, i in enumerate(first.view))
        if not isinstance(size, int) or size < LEAST or sorted(order) != list(range(len(shape))):
            continue
        if begin + size <= len(values) and first_of_all(graph, values[begin : begin + size]):
            return _joined(op, first.whole, order, begin, size)
    return None


def _joined(op: Op, whole: Value, order: tuple[int, ...], begin: int, size: int) -> Match:
    """Replaces ``size`` parts of a Concat by ``whole``, transposed by ``order``."""

    def build(patch: Patch) -> Value:
        turned = order != tuple(range(len(order)))
        same = patch.add("Transpose", [whole], TransposeAttrs(order)) if turned else whole
        parts = [*op.inputs[:begin], same, *op.inputs[begin + size :]]
        return patch.add("Concat", parts, op.attrs) if len(parts) > 1 else same

    return Match((op,), build)


class RollScans(RulePass):
    name = "roll_scans"
    rules = (outer_step, view_before_step, pointwise_scan, stacked_positions, last_state)
