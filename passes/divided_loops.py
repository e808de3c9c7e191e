"""Long Scans and Loops keep only operators that need the previous step; all others are computed for all steps at once.

A loop that is too long to be unrolled runs on the CPU. A state space model (Mamba: Gu and Dao, 2023) multiplies the inputs of a
step with each other, updates its states, and multiplies these with a vector. Only the update needs the previous step. It is
pointwise, so :mod:`optdnn.passes.long_scans` makes one launch of it. The products around it get one more axis.

Operators that no earlier step affects come before the loop. Operators that affect no later step come after it. A state that no
earlier state affects is a sequence: the values of the previous step. If no other states are left, short loops are divided, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optdnn.ir.body import GraphBody
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.bodies import ScanAttrs
from optdnn.ops.fused import STAGE_KINDS
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, integers, sliced
from optdnn.passes.support.iterations import MOST_BYTES, Iterations, moved_axis, refused_operator
from optdnn.passes.support.long_steps import LongSteps, steps_of
from optdnn.passes.unroll import TRIPS, too_much
from optdnn.passes.unrolled_cells import Step, add_layer
from optdnn.types import is_float


@dataclass(frozen=True)
class Layer:
    """A step of the loop that is a step of an LSTM, GRU or RNN. ``cell``: the number of the state that is an LSTM's cell."""

    step: Step
    cell: int | None = None


@dataclass
class Division:
    """The operators of a body ``before`` the loop, in its ``core``, and ``after`` it, each in order. ``shifted``: the states that
    are values of the previous step, in an order in which they can be computed. ``layers``: those that a recurrent layer computes
    for all steps."""

    steps: LongSteps
    before: list[Op] = field(default_factory=list)
    core: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)
    shifted: list[int] = field(default_factory=list)
    layers: dict[int, Layer] = field(default_factory=dict)

    @property
    def carried(self) -> list[int]:
        """The states that stay states."""
        gone = {*self.shifted, *(each.cell for each in self.layers.values())}
        return [k for k in range(len(self.steps.states)) if k not in gone]

    @property
    def is_pointwise(self) -> bool:
        """Whether one launch may compute the core for all steps."""
        return all(_is_stage(op) for op in self.core)


@rule("divided_loop", {"Loop", "Scan"})
def divided_loop(graph: Graph, op: Op) -> Match | Miss | None:
    """A Loop or Scan of known length. What can be unrolled is divided only if it is long and a pointwise core remains, or none."""
    steps = steps_of(graph, op, longer_than=1)
    if not isinstance(steps, LongSteps):
        return steps
    if not all(x.type.is_static for o in steps.operators() for x in o.outputs):
        return Miss("sizes in its body are not known")
    parts = divided(steps)
    if steps.trips <= TRIPS and parts.carried:
        return None
    if (lean := _pointwise_kept(parts)).is_pointwise:
        parts = lean
    elif too_much(op.attrs.body, steps.trips) is None:
        return None
    if not parts.before and not parts.after and not parts.shifted:
        return None if parts.is_pointwise else Miss("all of its operators need what the step before computed")
    return in_parts(graph, op, parts, steps.operators())


def in_parts(graph: Graph, op: Op, parts: Division, stacked: Iterable[Op]) -> Match | Miss:
    """The match that replaces a loop by its parts. A Miss if the results of one of ``stacked``, operators of its body, would take
    too much memory for all steps."""
    types = [o.outputs[0].type for o in stacked]
    largest = max((math.prod(t.static_shape) * t.dtype.itemsize for t in types), default=0)
    if parts.steps.trips * largest > MOST_BYTES:
        return Miss("the results of all its steps would take too much memory")

    return Match((op,), lambda patch: patch.replace_each(op.values, _Rewrite(patch, parts).results()))


def divided(steps: LongSteps, layers: Mapping[int, Layer] | None = None) -> Division:
    """The parts of a body, with as few operators in the core as possible. ``layers``: states that a layer may compute for all
    steps, once its inputs are known for all of them."""
    body, ops, left = steps.body, steps.operators(), list(range(len(steps.states)))
    known = {*steps.sequences, *steps.others, *(c.value for c in body.of_kind("Constant"))}
    known |= set() if steps.number is None else {steps.number}
    parts, layers = Division(steps), layers or {}
    while True:
        for op in ops:
            if op.value not in known and known.issuperset(_read(op)) and _repeats(steps, op):
                known.add(op.value)
        ready = [k for k in left if steps.following[k] in known or (k in layers and layers[k].step.x in known)]
        if not ready:
            break
        parts.layers |= {k: layers[k] for k in ready if steps.following[k] not in known}
        known |= {v for k in ready for v in (steps.states[k], steps.following[k])}
        parts.shifted += ready
        left = parts.carried
    parts.before = [op for op in ops if op.value in known]
    rest = [op for op in _without_layers(parts, ops) if op.value not in known]
    needed = {steps.following[k] for k in left}
    for op in reversed(rest):
        if needed.isdisjoint(op.values) and refused_operator(body, op) is None:
            parts.after.insert(0, op)
        else:
            needed |= _read(op)
    parts.core = [op for op in rest if op not in parts.after]
    return parts


def _without_layers(parts: Division, ops: Sequence[Op]) -> list[Op]:
    """The operators that are still needed when layers compute their states."""
    steps = parts.steps
    made = {steps.following[k] for k in parts.layers}
    gone = made | {steps.following[each.cell] for each in parts.layers.values() if each.cell is not None}
    needed = {v for v in (*steps.following, *(v for v, _ in steps.stacked)) if v not in gone}
    needed |= {each.step.x for each in parts.layers.values()}
    found: list[Op] = []
    for op in reversed(ops):
        if op.value not in made and not needed.isdisjoint(op.values):
            found.insert(0, op)
            needed |= _read(op)
    return found


def _pointwise_kept(parts: Division) -> Division:
    """The parts in which pointwise operators stay in the core, if only operators of the core read them: a launch has their results
    in registers."""
    steps = parts.steps
    shapes = {steps.body.type(steps.following[k]).shape for k in parts.carried}
    after: list[Op] = []
    for op in parts.after:
        outside = {o.value for o in after}
        if not _is_stage(op) or op.outputs[0].type.shape not in shapes or not outside.isdisjoint(_read(op)):
            after.append(op)
    before, needed = list[Op](), {steps.following[k] for k in parts.shifted} | {v for v, _ in steps.stacked}
    needed |= {v for op in after for v in _read(op)}
    for op in reversed(parts.before):
        if not _is_stage(op) or op.value in needed:
            before.insert(0, op)
            needed |= _read(op)
    outside = {o.value for o in (*before, *after)}
    return Division(steps, before, [o for o in steps.operators() if o.value not in outside], after, parts.shifted)


def _read(op: Op) -> set[Value]:
    return {v for v in op.inputs if v is not None}


def _is_stage(op: Op) -> bool:
    return op.kind in STAGE_KINDS and len(op.outputs) == 1 and is_float(op.outputs[0].type.dtype)


def _repeats(steps: LongSteps, op: Op) -> bool:
    """Whether an operator that no state affects can be computed for all steps at once."""
    if op.kind == "Gather" and op.inputs[0] in steps.others:
        return steps.body.type(op.inputs[0]).is_static
    return refused_operator(steps.body, op) is None


class _Rewrite:
    """Adds the parts of a loop. ``all``: values of the body for all steps, in the order of positions in the sequences."""

    def __init__(self, patch: Patch, parts: Division):
        self.patch, self.parts, self.steps = patch, parts, parts.steps
        steps, body, trips = self.steps, self.steps.body, self.steps.trips
        place = dict(steps.others)
        for value, (whole, axis) in steps.sequences.items():
            place[value] = self._cut(moved_axis(patch, whole, axis, 0), 0, trips)
        if steps.number is not None:
            place[steps.number] = patch.constant(np.arange(trips, dtype=np.int64), "numbers")
        every = [*steps.sequences, *([] if steps.number is None else [steps.number])]
        read = {v for op in (*parts.before, *parts.after) for v in _read(op)}
        read |= {*steps.following, *(v for v, _ in steps.stacked)}
        self.all = Iterations(patch, body, trips, place, every)
        self.all.run(c for c in body.of_kind("Constant") if c.value in read)

    def results(self) -> list[Value]:
        """The values that replace the results of the loop."""
        steps, parts, patch = self.steps, self.parts, self.patch
        last = dict[int, Value]()
        for k in parts.shifted:
            if k in parts.layers:
                last |= self._add_layer(k, parts.layers[k])
            else:
                self.all.run(self._ancestors(steps.following[k]))
            self._add(steps.states[k], self._previous(k, self.all.stacked(steps.following[k])))
        self.all.run(parts.before)
        last |= self._add_core() if parts.core or parts.carried else {}
        self.all.run(parts.after)
        at = patch.constant(np.array(0 if steps.backward else steps.trips - 1, np.int64), "last")
        for k in parts.shifted:
            last[k] = patch.add("Gather", [self.all.stacked(steps.following[k]), at], GatherAttrs(0))
        stacks = [moved_axis(patch, self.all.stacked(v), 0, axis) for v, axis in steps.stacked]
        return [*(last[k] for k in range(len(steps.states))), *stacks]

    def _add_layer(self, k: int, layer: Layer) -> dict[int, Value]:
        """Adds the layer that computes state ``k`` of all steps. Returns an LSTM's last cell, by the number of its state."""
        steps, step = self.steps, layer.step
        self.all.run(self._ancestors(step.x))
        begin = [steps.begin[k], *([] if layer.cell is None else [steps.begin[layer.cell]])]
        x = self.all.stacked(step.x)
        states, cell = add_layer(steps.body, self.patch, step, x, steps.trips, begin, steps.backward)
        shape = step.op.outputs[0].type.static_shape
        self._add(steps.following[k], in_shape(self.patch, states, (steps.trips, *shape)))
        return {} if cell is None or layer.cell is None else {layer.cell: in_shape(self.patch, cell, shape)}

    def _ancestors(self, value: Value) -> list[Op]:
        """The operators before the loop that compute a value, in order."""
        needed, found = {value}, list[Op]()
        for op in reversed(self.parts.before):
            if not needed.isdisjoint(op.values):
                found.insert(0, op)
                needed |= _read(op)
        return found

    def _add(self, value: Value, of_all: Value) -> None:
        self.all.place[value] = of_all
        self.all.every.add(value)

    def _previous(self, k: int, following: Value) -> Value:
        """The values of state ``k`` before each step, from those after each step."""
        steps, patch = self.steps, self.patch
        first = patch.add("Unsqueeze", [steps.begin[k], integers(patch, [0], "axes")])
        start, stop = (1, steps.trips) if steps.backward else (0, steps.trips - 1)
        parts = [first, self._cut(following, start, stop)]
        return patch.add("Concat", parts[::-1] if steps.backward else parts, ConcatAttrs(0))

    def _cut(self, x: Value, start: int, stop: int) -> Value:
        size = self.patch.type(x).dims[0]
        return x if (start, stop) == (0, size) else sliced(self.patch, x, start, stop, 0)

    def _add_core(self) -> dict[int, Value]:
        """Adds the Scan of the core. Returns the last values of the carried states, by their numbers."""
        steps, parts, carried = self.steps, self.parts, self.parts.carried
        computed = {v for o in parts.core for v in o.values}
        outside = [*(v for o in parts.after for v in o.inputs if v is not None), *(v for v, _ in steps.stacked)]
        before = [k for k in carried if steps.states[k] in outside]
        stacked = [v for v in outside if v in computed] + [steps.following[k] for k in before]
        stacked = list(dict.fromkeys(stacked))
        passed = [v for v in (*(steps.following[k] for k in carried), *stacked) if v not in computed]
        read = dict.fromkeys([*(v for o in parts.core for v in o.inputs if v is not None), *passed])
        free = [v for v in read if v in self.all.place and v not in {steps.states[k] for k in carried}]
        constants = {c.value for c in steps.body.of_kind("Constant")}
        sequences = [v for v in free if v in self.all.every]
        captured = [v for v in free if v not in self.all.every and v not in constants]
        if not sequences:  # a Scan has as many steps as its sequences have positions
            sequences = [steps.number or next(iter(steps.sequences))]
        inputs = [*(steps.states[k] for k in carried), *sequences, *captured]
        body = _body(steps.body, inputs, parts.core, [*(steps.following[k] for k in carried), *stacked])
        way = int(steps.backward)
        attrs = ScanAttrs(
            GraphBody(body),
            len(carried),
            *((0,) * len(sequences), (way,) * len(sequences)),
            *((0,) * len(stacked), (way,) * len(stacked)),
        )
        operands = [*(steps.begin[k] for k in carried), *(self.all.place[v] for v in (*sequences, *captured))]
        scan = self.patch.add_op("Scan", operands, attrs, outputs=len(carried) + len(stacked))
        for port, value in enumerate(stacked, len(carried)):
            self._add(value, Value(scan.id, port))
        for k in before:
            self._add(steps.states[k], self._previous(k, self.all.place[steps.following[k]]))
        return {k: Value(scan.id, port) for port, k in enumerate(carried)}


def _body(old: Graph, inputs: Sequence[Value], ops: Iterable[Op], outputs: Sequence[Value]) -> Graph:
    """A body with these inputs, operators and outputs of another body."""
    body = Graph("body")
    body.share_symbols(old)
    place = {v: body.add_input(old.output(v).name, old.type(v)) for v in inputs}

    def placed(value: Value | None) -> Value | None:
        if value is not None and value not in place:
            place[value] = body.add_constant(old.op(value).attrs.value, old.output(value).name)
        return None if value is None else place[value]

    for op in ops:
        names = [o.name for o in op.outputs]
        made = body.add(op.kind, [placed(v) for v in op.inputs], op.attrs, names=names, outputs=len(names), src=op.src)
        place.update({v: Value(made.id, v.port) for v in op.values})
    for k, value in enumerate(outputs):
        if (inner := placed(value)) is not None:
            known = inner if value not in inputs else body.add("Identity", [inner]).value
            body.add_output(known, f"result_{k}")
    return body


class DividedLoops(RulePass):
    name = "divided_loops"
    rules = (divided_loop,)
    gpu_only = True  # the libraries of the CPU run loops
