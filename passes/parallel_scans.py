"""A Scan with independent iterations computes all of them at once, along one more axis.

Converters of scikit-learn write the distances between two sets of points as a Scan over the points of one set. Unrolled, it needs
several launches per point. As one broadcast subtraction and one reduction, it is one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.reduce import reduced_axes
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.support.facts import ints, operand, reshaped, shape_of
from optdnn.types import normalize_axis

MOST_BYTES = 1 << 30
"""Most bytes of a result for all iterations."""


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
    inner = [o for o in body.order() if o.kind not in STRUCTURAL and o.kind != "Constant"]
    if (why := next((w for o in inner if (w := _why_not(body, o)) is not None), None)) is not None:
        return Miss(why)
    sizes = (math.prod(_dims(body, o.value)) * o.outputs[0].type.dtype.itemsize for o in inner)
    if trips * max(sizes, default=0) > MOST_BYTES:
        return Miss("the results of all its iterations would take too much memory")

    def build(patch: Patch) -> None:
        results = _Parallel(patch, op, trips).results()
        for port, new in enumerate(results):
            if graph.uses(Value(op.id, port)):
                patch.replace(Value(op.id, port), new)

    return Match((op,), build)


def _source(body: Graph, output: int) -> Value | None:
    """The value of an output of the body, before any Identity operators."""
    value = body.op(output).inputs[0]
    while value is not None and body.op(value).kind == "Identity":
        value = body.op(value).inputs[0]
    return value


def _dims(body: Graph, value: Value) -> tuple[int, ...]:
    return body.type(value).static_shape


def _why_not(body: Graph, op: Op) -> str | None:
    """Why an operator of the body cannot have one more leading axis, or None."""
    if len(op.outputs) != 1 or not all(body.type(v).is_static for v in (*op.inputs, op.value) if v is not None):
        return f"its {op.kind} has sizes that are not known"
    if op.definition.traits.pointwise or op.kind == "Transpose":
        return None
    if op.kind == "MatMul" and all(len(_dims(body, operand(op, i))) >= 2 for i in (0, 1)):
        return None
    if op.kind.startswith("Reduce") and (op.input(1) is None or ints(body, op.input(1)) is not None):
        return None
    return f"its {op.kind} cannot have one more axis"


class _Parallel:
    """The body's values for all iterations. ``every``: values with a leading axis of iterations; all other values have none."""

    def __init__(self, patch: Patch, op: Op, trips: int):
        self.patch, self.op, self.trips, self.body = patch, op, trips, op.attrs.body.graph
        a, n = op.attrs, len(op.attrs.scan_input_axes)
        given = list(op.inputs)
        for k, axis in zip(range(a.states, a.states + n), a.scan_input_axes, strict=True):
            given[k] = self._moved(operand(op, k), axis, to_front=True)
        self.place = {Value(i): v for i, v in zip(self.body.inputs, given, strict=True) if v is not None}
        self.every = {Value(i) for i in self.body.inputs[a.states : a.states + n]}

    def _moved(self, x: Value, axis: int, *, to_front: bool) -> Value:
        rank = len(self.patch.type(x).dims)
        at = normalize_axis(axis, rank)
        if not at:
            return x
        perm = [at, *(k for k in range(rank) if k != at)]
        order = perm if to_front else np.argsort(perm).tolist()
        return self.patch.add("Transpose", [x], TransposeAttrs(tuple(order)))

    def results(self) -> list[Value]:
        """The values that replace the Scan's results."""
        for op in self.body.order():
            if op.kind == "Constant":
                self.place[op.value] = self.patch.constant(op.attrs.value, op.outputs[0].name)
            elif op.kind not in STRUCTURAL:
                if self.every.intersection(v for v in op.inputs if v is not None):
                    self.place[op.value] = self._for_all(op)
                    self.every.add(op.value)
                else:
                    operands = [None if v is None else self.place[v] for v in op.inputs]
                    self.place[op.value] = self.patch.add(op.kind, operands, op.attrs)
        a = self.op.attrs
        found = [operand(self.body.op(i)) for i in self.body.outputs]
        stacks = [
            self._moved(self._stack(v), axis, to_front=False)
            for v, axis in zip(found[a.states :], a.scan_output_axes, strict=True)
        ]
        return [*(self.place[v] for v in found[: a.states]), *stacks]

    def _stack(self, value: Value) -> Value:
        """The results of all iterations, stacked along a first axis."""
        if value in self.every:
            return self.place[value]
        shape = (self.trips, *_dims(self.body, value))
        return self.patch.add("Expand", [self.place[value], self.patch.constant(np.array(shape, np.int64), "shape")])

    def _for_all(self, op: Op) -> Value:
        """An operator of the body for all iterations."""
        patch, rank = self.patch, len(_dims(self.body, operand(op)))
        if op.kind == "Transpose":
            perm = op.attrs.perm or tuple(reversed(range(rank)))
            return patch.add("Transpose", [self.place[operand(op)]], TransposeAttrs((0, *(k + 1 for k in perm))))
        if op.kind.startswith("Reduce"):
            axes = reduced_axes(op.attrs, ints(self.body, op.input(1)), rank, op.kind)
            where = patch.constant(np.array([k + 1 for k in axes], np.int64), "axes")
            return patch.add(op.kind, [self.place[operand(op)], where], replace(op.attrs, noop_with_empty_axes=True))
        ranks = [len(_dims(self.body, v)) for v in op.inputs if v is not None]
        return patch.add(op.kind, [None if v is None else self._aligned(v, max(ranks)) for v in op.inputs], op.attrs)

    def _aligned(self, value: Value, rank: int) -> Value:
        """A value with axes of size 1 after the axis of iterations, up to ``rank`` more axes: ready for broadcasting."""
        dims = _dims(self.body, value)
        if value not in self.every or len(dims) == rank:
            return self.place[value]
        return reshaped(self.patch, self.place[value], (self.trips, *[1] * (rank - len(dims)), *dims))


class ParallelScans(RulePass):
    """Does nothing unless the target is a GPU: the libraries of the CPU run loops."""

    name = "parallel_scans"
    rules = (parallel_scan,)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        return self.rules if context.on_gpu else ()
