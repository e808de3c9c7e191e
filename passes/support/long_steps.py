"""The steps of Scans and Loops whose number is known: their states, the sequences that they read, the results that they stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.base import Miss
from optdnn.passes.support.facts import operand, shape_of
from optdnn.passes.unroll import goes_on, number_of
from optdnn.types import normalize_axis


@dataclass
class LongSteps:
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
    number: Value | None = None
    """The input of the body that is the number of the step."""

    def operators(self) -> list[Op]:
        """The operators that results of the body depend on, in order, without constants and positions of sequences. They read
        values before any Identity operators."""
        kept = {*self.following, *(v for v, _ in self.stacked)}
        found: list[Op] = []
        for op in reversed(self.body.order()):
            if op.kind in STRUCTURAL or op.kind in ("Constant", "Identity") or op.id in self.skipped:
                continue
            if kept.intersection(op.values):
                read = tuple(None if v is None else value_behind(self.body, v) for v in op.inputs)
                found.append(replace(op, inputs=read))
                kept.update(v for v in read if v is not None)
        return found[::-1]


def steps_of(graph: Graph, op: Op, *, longer_than: int) -> LongSteps | Miss | None:
    """The steps of a Scan or Loop that carries states, if it runs more than ``longer_than`` times, however the data are."""
    return (_steps_of_scan if op.kind == "Scan" else _steps_of_loop)(graph, op, longer_than)


def _steps_of_scan(graph: Graph, op: Op, longer_than: int) -> LongSteps | Miss | None:
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
    if trips <= longer_than:
        return None
    directions = {*a.scan_input_directions, *a.scan_output_directions}
    if len(directions) > 1:
        return Miss("it reads its sequences and stacks its results in different directions")
    results = [_passed(body, k) for k in range(len(body.outputs))]
    axes = [
        normalize_axis(k, len(body.type(v).dims) + 1)
        for k, v in zip(a.scan_output_axes, results[a.states :], strict=True)
    ]
    return LongSteps(
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


def _steps_of_loop(graph: Graph, op: Op, longer_than: int) -> LongSteps | Miss | None:
    """A Loop with a known trip count and no earlier end."""
    body, carried = op.attrs.body.graph, op.attrs.carried
    trips = number_of(graph, op.input(0))
    going = op.input(1)
    if trips is None or trips <= longer_than or not carried or any(v is None for v in op.inputs[2:]):
        return None
    if (going is not None and not number_of(graph, going)) or not goes_on(body):
        return Miss("its condition depends on data")
    inputs = [Value(i) for i in body.inputs]
    given = dict(zip(inputs[2:], (v for v in op.inputs[2:] if v is not None), strict=True))
    results = [_passed(body, k) for k in range(1, len(body.outputs))]
    sequences, skipped = _positions(body, inputs[0], {v: given[v] for v in inputs[2 + carried :]}, trips)
    return LongSteps(
        body,
        trips,
        inputs[2 : 2 + carried],
        [given[v] for v in inputs[2 : 2 + carried]],
        sequences,
        {v: given[v] for v in inputs[2 + carried :]},
        results[:carried],
        [(v, 0) for v in results[carried:]],
        skipped=skipped,
        number=inputs[0],
    )


def _positions(
    body: Graph, number: Value, captured: Mapping[Value, Value], trips: int
) -> tuple[dict[Value, tuple[Value, int]], set[int]]:
    """Value -> (tensor, axis) for values that the body gathers by the iteration number, and the ids of these Gathers."""
    found: dict[Value, tuple[Value, int]] = {}
    for op in body.of_kind("Gather"):
        whole, index = op.inputs[0], value_behind(body, operand(op, 1))
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


def value_behind(body: Graph, value: Value) -> Value:
    """The value before any Identity operators."""
    while (op := body.op(value)).kind == "Identity":
        value = operand(op)
    return value


def _passed(body: Graph, k: int) -> Value:
    """The value of output ``k`` of the body."""
    return value_behind(body, operand(body.op(body.outputs[k])))
