"""Scans and Loops of pointwise steps that are too long to be unrolled become one PointwiseScan: one launch for all steps.

A Scan reads its sequences itself. A Loop gathers a position of a tensor by the number of the iteration. Both return the states of
the last step, and stack the results of each step. Unrolled loops are left to :mod:`optdnn.passes.roll_scans`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.checks import elements
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.pointwise_scan import PointwiseScanAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.roll_scans import MOST_ELEMENTS, MOST_OPERANDS, MOST_STAGES
from optdnn.passes.support.facts import operand, shape_of
from optdnn.passes.unroll import TRIPS, goes_on, number_of
from optdnn.types import Array, is_float, normalize_axis, show_shape


@dataclass
class _Steps:
    """The steps of a Scan or Loop: ``trips`` times its ``body``.

    ``states``: inputs of the body that the previous step computed; ``begin``: their initial values. ``sequences``: values of the
    body that are a position of a tensor along an axis. ``others``: values of the body that are values of the graph, the same in
    each step. ``following``: outputs that are the next states. ``stacked``: outputs that are stacked, with their axes.
    """

    body: Graph
    trips: int
    states: list[Value]
    begin: list[Value]
    sequences: dict[Value, tuple[Value, int]]
    others: dict[Value, Value]
    following: list[Value]
    stacked: list[tuple[Value, int]]
    backward: bool = False
    skipped: set[int] = field(default_factory=set)
    """Operators of the body that only read sequences: they become no stages."""


@rule("long_scan", {"Scan"})
def long_scan(graph: Graph, op: Op) -> Match | Miss | None:
    """A Scan over sequences of known length."""
    a, body = op.attrs, op.attrs.body.graph
    n = len(a.scan_input_axes)
    given, inputs = op.inputs, [Value(i) for i in body.inputs]
    if any(v is None for v in given) or not n or not a.states:
        return None
    sequences, trips = [], 0
    for value, axis in zip(given[a.states : a.states + n], a.scan_input_axes, strict=True):
        assert value is not None
        shape = shape_of(graph, value)
        length = None if shape is None else shape[normalize_axis(axis, len(shape))]
        if shape is None or not isinstance(length, int):
            return Miss("its number of iterations is not known")
        trips = length
        sequences.append((value, normalize_axis(axis, len(shape))))
    if trips <= TRIPS:
        return None
    directions = {*a.scan_input_directions, *a.scan_output_directions}
    if len(directions) > 1:
        return Miss("it reads its sequences and stacks its results in different directions")
    results = [_passed(body, k) for k in range(len(body.outputs))]
    axes = [
        normalize_axis(k, len(body.type(v).dims) + 1)
        for k, v in zip(a.scan_output_axes, results[a.states :], strict=True)
    ]
    steps = _Steps(
        body,
        trips,
        inputs[: a.states],
        [v for v in given[: a.states] if v is not None],
        dict(zip(inputs[a.states : a.states + n], sequences, strict=True)),
        {v: x for v, x in zip(inputs[a.states + n :], given[a.states + n :], strict=True) if x is not None},
        results[: a.states],
        list(zip(results[a.states :], axes, strict=True)),
        backward=directions == {1},
    )
    return _scanned(graph, op, steps)


@rule("long_loop", {"Loop"})
def long_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop with a known trip count and no earlier end."""
    body, carried = op.attrs.body.graph, op.attrs.carried
    trips = number_of(graph, op.input(0))
    going = op.input(1)
    if trips is None or trips <= TRIPS or not carried or any(v is None for v in op.inputs[2:]):
        return None
    if (going is not None and not number_of(graph, going)) or not goes_on(body):
        return Miss("its condition depends on data")
    inputs = [Value(i) for i in body.inputs]
    given = dict(zip(inputs[2:], (v for v in op.inputs[2:] if v is not None), strict=True))
    results = [_passed(body, k) for k in range(1, len(body.outputs))]
    sequences, skipped = _positions(body, inputs[0], {v: given[v] for v in inputs[2 + carried :]}, trips)
    steps = _Steps(
        body,
        trips,
        inputs[2 : 2 + carried],
        [given[v] for v in inputs[2 : 2 + carried]],
        sequences,
        {v: given[v] for v in inputs[2 + carried :]},
        results[:carried],
        [(v, 0) for v in results[carried:]],
        skipped=skipped,
    )
    return _scanned(graph, op, steps)


def _positions(
    body: Graph, number: Value, captured: Mapping[Value, Value], trips: int
) -> tuple[dict[Value, tuple[Value, int]], set[int]]:
    """Value -> (tensor, axis) for values that the body gathers by the iteration number, and the ids of these Gathers."""
    found: dict[Value, tuple[Value, int]] = {}
    for op in body.of_kind("Gather"):
        whole, index = op.inputs[0], _behind(body, operand(op, 1))
        dims = body.type(operand(op)).shape
        if (
            whole is None
            or whole not in captured
            or index != number
            or body.type(operand(op, 1)).dims != ()
            or dims is None
        ):
            continue
        axis = normalize_axis(op.attrs.axis, len(dims))
        if isinstance(size := dims[axis], int) and trips <= size:
            found[op.value] = (captured[whole], axis)
    return found, {v.op for v in found}


def _behind(body: Graph, value: Value) -> Value:
    """The value before any Identity operators."""
    while (op := body.op(value)).kind == "Identity":
        value = operand(op)
    return value


def _passed(body: Graph, k: int) -> Value:
    """The value of output ``k`` of the body."""
    return _behind(body, operand(body.op(body.outputs[k])))


def _scanned(graph: Graph, op: Op, steps: _Steps) -> Match | Miss:
    """The PointwiseScan that replaces ``op``, or a Miss."""
    body = steps.body
    inner = [
        o
        for o in body.order()
        if o.kind not in STRUCTURAL and o.kind not in ("Constant", "Identity") and o.id not in steps.skipped
    ]
    inner = [o for o in inner if not _only_goes_on(body, o, steps)]
    constants = {o.value: o.attrs.value for o in body.of_kind("Constant")}
    read = dict.fromkeys(_behind(body, v) for o in inner for v in o.inputs if v is not None)
    others = [v for v in read if v in steps.others or (v in constants and v not in steps.sequences)]
    if (why := _refused(graph, steps, inner, read, len(others), constants)) is not None:
        return Miss(why)
    register = {o.value: ~(k + 1) for k, o in enumerate(inner)}
    slot = {v: k for k, v in enumerate((*steps.states, *steps.sequences, *others))}

    def named(value: Value) -> int:
        return register[value] if value in register else slot[value]

    last = [v for k, v in enumerate(steps.following) if graph.uses(Value(op.id, k))]
    results = [*steps.stacked, *((v, 0) for v in dict.fromkeys(last) if (v, 0) not in steps.stacked)]
    wholes = list(steps.sequences.values())
    ranks = [len(graph.type(v).dims) for v, _ in wholes]
    attrs = PointwiseScanAttrs(
        stages=tuple(
            Stage(o.kind, tuple(None if v is None else named(_behind(body, v)) for v in o.inputs), o.attrs)
            for o in inner
        ),
        states=len(steps.states),
        steps=steps.trips,
        axes=tuple(axis for _, axis in wholes),
        starts=tuple(steps.trips - 1 if steps.backward else 0 for _ in wholes),
        views=tuple(tuple(i for i in range(r) if i != axis) for r, (_, axis) in zip(ranks, wholes, strict=True)),
        following=tuple(named(v) for v in steps.following),
        results=tuple(named(v) for v, _ in results),
        result_axes=tuple(axis for _, axis in results),
        result_kept=(False,) * len(results),
        backward=steps.backward,
    )

    def build(patch: Patch) -> None:
        more = [steps.others[v] if v in steps.others else patch.constant(constants[v], "step") for v in others]
        scan = patch.add_op(
            "PointwiseScan", [*steps.begin, *(v for v, _ in wholes), *more], attrs, outputs=len(results)
        )
        at = patch.constant(np.array(0 if steps.backward else steps.trips - 1, np.int64), "last")
        for k, value in enumerate(steps.following):
            if graph.uses(Value(op.id, k)):
                port, axis = next((p, axis) for p, (v, axis) in enumerate(results) if v == value)
                patch.replace(Value(op.id, k), patch.add("Gather", [Value(scan.id, port), at], GatherAttrs(axis)))
        for k in range(len(steps.stacked)):
            if graph.uses(Value(op.id, len(steps.following) + k)):
                patch.replace(Value(op.id, len(steps.following) + k), Value(scan.id, k))

    return Match((op,), build)


def _only_goes_on(body: Graph, op: Op, steps: _Steps) -> bool:
    """Whether no result of the body depends on an operator: it is dead, or computes only the condition of a Loop."""
    kept = {*steps.following, *(v for v, _ in steps.stacked)}
    stack, seen = [op.value], {op.value}
    while stack:
        value = stack.pop()
        if value in kept:
            return False
        for user in body.users(value):
            if user.kind != "Output" and user.value not in seen:
                seen.add(user.value)
                stack.append(user.value)
    return True


def _refused(
    graph: Graph,
    steps: _Steps,
    inner: Sequence[Op],
    read: Mapping[Value, None],
    others: int,
    constants: Mapping[Value, Array],
) -> str | None:
    """Why the steps are not a scan of pointwise operators, or None."""
    body, known = steps.body, {*steps.states, *steps.sequences, *steps.others, *constants, *(o.value for o in inner)}
    for o in inner:
        if o.kind not in STAGE_KINDS or len(o.outputs) != 1:
            return f"a step has a {o.kind}, which is not pointwise"
        if not o.outputs[0].type.is_static or not is_float(o.outputs[0].type.dtype):
            return f"its {o.kind} gives {o.outputs[0].type}, which is no floats of known size"
    if any(v not in known or not is_float(body.type(v).dtype) for v in read):
        return "a step reads more than states, positions and other floats"
    computed = {o.value for o in inner}
    if any(v not in computed for v in (*steps.following, *(v for v, _ in steps.stacked))):
        return "a result of a step is not computed in it"
    if len(inner) > MOST_STAGES or len(steps.states) + len(steps.sequences) + others > MOST_OPERANDS:
        return f"a step of {len(inner)} operators and {len(read)} operands takes too many registers"
    shapes = {body.type(v).shape for v in (*steps.following, *(v for v, _ in steps.stacked))}
    shapes |= {graph.type(v).shape for v in steps.begin}
    if len(shapes) > 1:
        return f"its states and results differ in shape: {', '.join(sorted(show_shape(s) for s in shapes if s is not None))}"
    if steps.trips * elements(body.type(steps.following[0])) * (len(steps.stacked) + len(steps.states)) > MOST_ELEMENTS:
        return "storing the results of all steps would take longer than a launch for each step"
    return None


class LongScans(RulePass):
    name = "long_scans"
    rules = (long_scan, long_loop)
