"""Scans and Loops of pointwise steps that are too long to be unrolled become one PointwiseScan: one launch for all steps.

A Scan reads its sequences itself. A Loop gathers a position of a tensor by the number of the iteration. Both return the states of
the last step, and stack the results of each step. Unrolled loops are left to :mod:`optdnn.passes.roll_scans`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from optdnn.passes.support.long_steps import LongSteps, steps_of, value_behind
from optdnn.passes.unroll import TRIPS
from optdnn.types import Array, is_float, show_shape


@rule("long_scan", {"Loop", "Scan"})
def long_scan(graph: Graph, op: Op) -> Match | Miss | None:
    """A Scan over sequences of known length, or a Loop with a known trip count and no earlier end."""
    steps = steps_of(graph, op, longer_than=TRIPS)
    return _scanned(graph, op, steps) if isinstance(steps, LongSteps) else steps


def _scanned(graph: Graph, op: Op, steps: LongSteps) -> Match | Miss:
    """The PointwiseScan that replaces ``op``, or a Miss."""
    body = steps.body
    inner = [
        o
        for o in body.order()
        if o.kind not in STRUCTURAL and o.kind not in ("Constant", "Identity") and o.id not in steps.skipped
    ]
    inner = [o for o in inner if not _only_goes_on(body, o, steps)]
    constants = {o.value: o.attrs.value for o in body.of_kind("Constant")}
    read = dict.fromkeys(value_behind(body, v) for o in inner for v in o.inputs if v is not None)
    others = [v for v in read if v in steps.others or (v in constants and v not in steps.sequences)]
    if (why := _refused(graph, steps, inner, read, len(others), constants)) is not None:
        return Miss(why)
    register = {o.value: ~(k + 1) for k, o in enumerate(inner)}
    sequences = {v: each for v, each in steps.sequences.items() if v in read}
    slot = {v: k for k, v in enumerate((*steps.states, *sequences, *others))}

    def named(value: Value) -> int:
        return register[value] if value in register else slot[value]

    last = [v for k, v in enumerate(steps.following) if graph.uses(Value(op.id, k))]
    results = [*steps.stacked, *((v, 0) for v in dict.fromkeys(last) if (v, 0) not in steps.stacked)]
    wholes = list(sequences.values())
    ranks = [len(graph.type(v).dims) for v, _ in wholes]
    attrs = PointwiseScanAttrs(
        stages=tuple(
            Stage(o.kind, tuple(None if v is None else named(value_behind(body, v)) for v in o.inputs), o.attrs)
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


def _only_goes_on(body: Graph, op: Op, steps: LongSteps) -> bool:
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
    steps: LongSteps,
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
    made = {*steps.states, *(o.value for o in inner)}
    if any(v not in made for v in (*steps.following, *(v for v, _ in steps.stacked))):
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
    rules = (long_scan,)
