"""Constants that fp16 cannot hold and a result depends on: an epsilon that keeps a division finite, a scale out of fp16's range.

``x / max(norm(x), 1e-12)`` is 0 for a row of zeros; with the bound rounded to fp16 it is 0 / 0. Such a constant keeps a value away
from zero. The ops between the constant and the division by that value (or its logarithm) compute and store fp32. So does the sum of
squares to which the constant is added. An inverse (``1 / sqrt(variance + 1e-12)``) may also exceed fp16: it stays fp32 up to
the multiplication that reads it. A pointwise op among them converts in its registers (:mod:`optdnn.passes.support.in_registers`).
Normalizations that are one operator have their epsilon as an attribute, which is fp32 everywhere; this module ignores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.binary import CastAttrs
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.open_stages import OpenStage, steps_of
from optdnn.passes.support.precision_report import FP16_LARGEST, FP16_LEAST, FP16_NORMAL
from optdnn.types import FP32, FP64, Array

MASK = FP16_LARGEST * 2**10
"""Factors of at least this size belong to masks, which saturate: the rounding error of fp16 near 1, times such a factor, already
exceeds fp16."""

CARRIES = frozenset({"Abs", "Cast", "Identity", "Mul", "Neg", "Pow", "Sqrt"})
"""Kinds whose result is still a guarded divisor or an inverse, besides ops that only move elements. Casts to types narrower than
fp32 do not count."""

REDUCES = frozenset({"ReduceMax", "ReduceMean", "ReduceSum", "ReduceSumSquare"})

StageId = tuple[int, int]
"""The id of an op and the number of one of its pointwise stages (0 for an op without stages)."""

Argument = Array | StageId | None
"""A constant, the id of a stage, or nothing."""


@dataclass(frozen=True)
class Stage:
    """One pointwise stage, or a whole op without stages."""

    op: Op
    kind: str
    args: tuple[Argument, ...]


@dataclass
class _State:
    """A guarded value: the constant that keeps it from zero, and the ops between the constant and the value."""

    epsilon: float
    ops: set[int]
    inverse: bool = False


@dataclass(frozen=True)
class Guards:
    """``reasons``: op id -> the reason why a constant forbids fp16 for the op. ``saturates``: the ops among them whose results may
    exceed fp16 by a large factor, such as a mask's; such results become fp16's largest number."""

    reasons: Mapping[int, str]
    saturates: Collection[int] = ()

    def also(self, reasons: Mapping[int, str]) -> Guards:
        """These guards with further reasons, which override the present ones."""
        return Guards({**self.reasons, **reasons}, self.saturates)


def guards(graph: Graph) -> Guards:
    """The ops of the graph that must not compute in fp16 because of a constant."""
    walk = _Walk(graph)
    for step, node in walk.nodes.items():
        walk.visit(step, node)
    ops = {i: graph.op(i) for i in sorted(walk.found)}
    found = {i: walk.found[i] for i, op in ops.items() if op.kind == "Pointwise" or op.outputs[0].type.dtype == FP32}
    return Guards(found, walk.saturates & found.keys())


class _Walk:
    """Visits all stages in topological order, and collects the ops that must stay fp32."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = dict(nodes(graph))
        self.states: dict[StageId, _State] = {}
        self.found: dict[int, str] = {}
        self.saturates: set[int] = set()

    def visit(self, step: StageId, node: Stage) -> None:
        given = [self.states.get(a) if isinstance(a, tuple) else None for a in node.args]
        epsilon = _epsilon(node)
        if epsilon is not None:
            squares = {i for a in node.args if isinstance(a, tuple) for i in self._squares(a)}
            more = {i for s in given if s is not None and not s.inverse for i in s.ops}
            self.states[step] = _State(epsilon, {node.op.id} | squares | more)
            return
        self._factor(node)
        divisor = self._divisor(node, given)
        if divisor is not None:
            self._keep(divisor, node)
            if node.kind != "Log" and not isinstance(node.args[0] if node.kind == "Div" else None, tuple):
                self.states[step] = _State(divisor.epsilon, {node.op.id}, inverse=True)
            return
        inverse = next((s for s in given if s is not None and s.inverse), None)
        if inverse is not None and node.kind == "Mul":
            self._keep(inverse, node)
            return
        state = next((s for s in given if s is not None), None) if node.kind in CARRIES else None
        if moves(node):
            state = given[0]
        if state is not None:
            self.states[step] = _State(state.epsilon, {*state.ops, node.op.id}, state.inverse)

    def _divisor(self, node: Stage, given: list[_State | None]) -> _State | None:
        """The state of the guarded value that is the divisor or the argument of the logarithm of a stage; None if there is none."""
        slot = {"Div": 1, "Reciprocal": 0, "Log": 0, "Pow": 0}.get(node.kind)
        state = given[slot] if slot is not None else None
        if state is None or state.inverse:
            return None
        if node.kind == "Pow":
            exponent = node.args[1]
            return state if isinstance(exponent, np.ndarray) and (exponent < 0).all() else None
        return state

    def _keep(self, state: _State, end: Stage) -> None:
        what = "zero" if state.epsilon <= FP16_LEAST else "subnormal"
        reason = f"the constant {state.epsilon:.3g} that guards {end.kind} {end.op.outputs[0].name} is {what} in fp16"
        for i in (*state.ops, end.op.id):
            self.found.setdefault(i, reason)

    def _factor(self, node: Stage) -> None:
        """Record a factor, dividend or divisor that is out of fp16's range or would be subnormal in fp16."""
        for a in node.args if node.kind in ("Mul", "Div") else ():
            if not isinstance(a, np.ndarray) or a.size != 1 or a.dtype != FP32:
                continue
            size = float(np.abs(a).item())
            if 0 < size < FP16_NORMAL:
                what = "zero" if size <= FP16_LEAST else "subnormal"
                self.found.setdefault(node.op.id, f"the constant {size:.3g} of its {node.kind} is {what} in fp16")
            elif FP16_LARGEST < size < MASK:
                self.saturates.add(node.op.id)
                reason = f"the constant {size:.3g} of its {node.kind} is beyond 65504, where fp16 ends"
                self.found.setdefault(node.op.id, reason)

    def _squares(self, step: StageId) -> set[int]:
        """The ops from a squaring to this stage, if the stage computes a sum or mean of squares; else none."""
        seen: list[int] = []
        while step in self.nodes:
            node = self.nodes[step]
            steps = [a for a in node.args if isinstance(a, tuple)]  # constants are arrays
            data = set(steps)
            seen.append(node.op.id)
            if node.kind == "ReduceSumSquare" or (node.kind == "Mul" and len(steps) == 2 and len(data) == 1):
                return set(seen)
            if node.kind == "Pow" and isinstance(node.args[1], np.ndarray) and (node.args[1] == 2).all():
                return set(seen)
            if (node.kind not in CARRIES | REDUCES | {"Div"} and not moves(node)) or len(data) != 1:
                break
            (step,) = data
        return set()


def moves(node: Stage) -> bool:
    """Whether an operator only moves elements."""
    return node.kind not in STRUCTURAL and node.op.definition.traits.movement


def nodes(graph: Graph, divided: Collection[str] = ()) -> Iterator[tuple[StageId, Stage]]:
    """Every stage of the graph, in topological order. After ops of the kinds ``divided`` come the stages of their epilogues."""
    last: dict[Value, StageId] = {}
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        steps = steps_of(op) if is_pointwise(op) else [OpenStage(op.kind, op.attrs, op.inputs)]
        for s in op.attrs.epilogue if op.kind in divided else ():
            args = (None if a is None else op.inputs[a] if a >= 0 else ~a for a in s.args)
            steps.append(OpenStage(s.kind, s.attrs, tuple(args)))
        for k, s in enumerate(steps):
            kind = "Narrow" if isinstance(s.attrs, CastAttrs) and s.attrs.to not in (FP32, FP64) else s.kind
            yield (op.id, k), Stage(op, kind, tuple(_argument(graph, op, a, last) for a in s.args))
        last[op.value] = (op.id, len(steps) - 1)


def _argument(graph: Graph, op: Op, a: Value | int | None, last: dict[Value, StageId]) -> Argument:
    if a is None or isinstance(a, int):
        return None if a is None else (op.id, a)
    array = graph.constant_value(a)
    return array if array is not None else last.get(a, (a.op, a.port))


def _epsilon(node: Stage) -> float | None:
    """The constant that keeps a stage's value from zero, if it is zero or subnormal in fp16."""
    slots = {"Add": (0, 1), "Sub": (1,), "Max": range(len(node.args)), "Clip": (1,), "Where": (1, 2)}.get(node.kind, ())
    for slot in slots:
        a = node.args[slot] if slot < len(node.args) else None
        if isinstance(a, np.ndarray) and a.dtype == FP32 and a.size and 0 < abs(a.flat[0]) < FP16_NORMAL:
            size = np.abs(a)
            if ((size > 0) & (size < FP16_NORMAL)).all():
                return float(size.max())
    return None
