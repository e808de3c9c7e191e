"""A Scan with independent iterations computes all of them at once, along one more axis.

Converters of scikit-learn write the distances between two sets of points as a Scan over the points of one set. Unrolled, it needs
several launches per point. As one broadcast subtraction and one reduction, it is one launch.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, shape_of
from optdnn.passes.support.iterations import Iterations, moved_axis, refusal
from optdnn.types import normalize_axis


@rule("parallel_scan", {"Scan"})
def parallel_scan(graph: Graph, op: Op) -> Match | Miss | None:
    """A Scan of pointwise operators, reductions and products that does not change its states."""
    a, body = op.attrs, op.attrs.body.graph
    sequences = op.inputs[a.states : a.states + len(a.scan_input_axes)]
    if any(v is None for v in sequences) or not sequences:
        return None
    if any(_source(body, body.outputs[k]) != Value(body.inputs[k]) for k in range(a.states)):
        return Miss("an iteration reads what the one before it computed")
    if any((*a.scan_input_directions, *a.scan_output_directions)):
        return Miss("it goes backwards")
    dims = shape_of(graph, sequences[0])
    trips = None if dims is None else dims[normalize_axis(a.scan_input_axes[0], len(dims))]
    if not isinstance(trips, int) or not trips:
        return Miss("its number of iterations is not known")
    if (why := refusal(body, body.order(), trips)) is not None:
        return Miss(why)

    return Match((op,), lambda patch: patch.replace_each(op.values, _results(patch, op, trips)))


def _source(body: Graph, output: int) -> Value | None:
    """The value of an output of the body, before any Identity operators."""
    value = body.op(output).inputs[0]
    while value is not None and body.op(value).kind == "Identity":
        value = body.op(value).inputs[0]
    return value


def _results(patch: Patch, op: Op, trips: int) -> list[Value]:
    """The values that replace the Scan's results."""
    a, body, n = op.attrs, op.attrs.body.graph, len(op.attrs.scan_input_axes)
    given = list(op.inputs)
    for k, axis in zip(range(a.states, a.states + n), a.scan_input_axes, strict=True):
        x = operand(op, k)
        given[k] = moved_axis(patch, x, normalize_axis(axis, len(patch.type(x).dims)), 0)
    place = {Value(i): v for i, v in zip(body.inputs, given, strict=True) if v is not None}
    all_at_once = Iterations(patch, body, trips, place, (Value(i) for i in body.inputs[a.states : a.states + n]))
    all_at_once.run(body.order())
    found = [operand(body.op(i)) for i in body.outputs]
    stacks = []
    for v, axis in zip(found[a.states :], a.scan_output_axes, strict=True):
        whole = all_at_once.stacked(v)
        stacks.append(moved_axis(patch, whole, 0, normalize_axis(axis, len(patch.type(whole).dims))))
    return [*(all_at_once.place[v] for v in found[: a.states]), *stacks]


class ParallelScans(RulePass):
    name = "parallel_scans"
    rules = (parallel_scan,)
    gpu_only = True  # the libraries of the CPU run loops
