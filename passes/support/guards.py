"""What fp16 cannot hold and a result depends on: an epsilon that keeps a division finite, a scale out of fp16's range.

``x / max(norm(x), 1e-12)`` is 0 for a row of zeros; with the bound rounded to fp16 it is 0 / 0. So between a constant that bounds
a value away from zero and what divides by that value (or takes its logarithm), ops compute and store fp32, and so does what sums
the squares that the constant is added to. An inverse alone (``1 / sqrt(variance + 1e-12)``) may be beyond fp16 as well: it stays
fp32 up to the multiplication that brings it back. Where such an op is pointwise, it converts in its registers
(:mod:`optdnn.passes.support.in_registers`). Normalizations that are one operator have their epsilon as an attribute, which is fp32
everywhere, and are no matter of this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.binary import CastAttrs
from optdnn.passes import fuse_pointwise
from optdnn.passes.fuse_pointwise import is_pointwise, steps_of
from optdnn.passes.support.precision_report import FP16_LARGEST, FP16_LEAST, FP16_NORMAL
from optdnn.types import FP32, FP64, Array

MASK = FP16_LARGEST * 2**10
"""Factors from here on are those of masks, which saturate: even the precision of fp16 beside 1 comes out of its range by them."""

CARRIES = frozenset({"Abs", "Cast", "Identity", "Mul", "Neg", "Pow", "Sqrt"})
"""Kinds beside movement through which a guarded divisor, or an inverse, goes on; not casts to narrower types than fp32."""

REDUCES = frozenset({"ReduceMax", "ReduceMean", "ReduceSum", "ReduceSumSquare"})

Step = tuple[int, int]
"""The id of an op and the number of one of its pointwise stages (0 for an op without)."""


@dataclass(frozen=True)
class _Node:
    """One pointwise stage, or a whole op that has none. ``args`` are constants, other steps, or None."""

    op: Op
    kind: str
    args: tuple[Array | Step | None, ...]


@dataclass
class _State:
    """What is known of a value: the constant that keeps it from zero, and the ops between that and here."""

    epsilon: float
    ops: set[int]
    inverse: bool = False


@dataclass(frozen=True)
class Guards:
    """``reasons``: the ops (by id) that must not compute in fp16 for the sake of a constant, and why. ``saturates``: those whose
    results may leave fp16's range by a large factor, as that of a mask, and are then to be the largest number it has."""

    reasons: Mapping[int, str]
    saturates: Collection[int] = ()


def guards(graph: Graph) -> Guards:
    walk = _Walk(graph)
    for step, node in walk.nodes.items():
        walk.visit(step, node)
    ops = {i: graph.op(i) for i in sorted(walk.found)}
    found = {i: walk.found[i] for i, op in ops.items() if op.kind == "Pointwise" or op.outputs[0].type.dtype == FP32}
    return Guards(found, walk.saturates & found.keys())


class _Walk:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = dict(_nodes(graph))
        self.states: dict[Step, _State] = {}
        self.found: dict[int, str] = {}
        self.saturates: set[int] = set()

    def visit(self, step: Step, node: _Node) -> None:
        given = [self.states.get(a) if isinstance(a, tuple) else None for a in node.args]
        epsilon = _epsilon(node)
        if epsilon is not None:
            behind = {i for a in node.args if isinstance(a, tuple) for i in self._squares(a)}
            more = {i for s in given if s is not None and not s.inverse for i in s.ops}
            self.states[step] = _State(epsilon, {node.op.id} | behind | more)
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
        moves = node.kind not in STRUCTURAL and node.op.definition.traits.movement
        state = next((s for s in given if s is not None), None) if node.kind in CARRIES else given[0] if moves else None
        if state is not None:
            self.states[step] = _State(state.epsilon, {*state.ops, node.op.id}, state.inverse)

    def _divisor(self, node: _Node, given: list[_State | None]) -> _State | None:
        """The guarded value that a step divides by, or takes the logarithm of."""
        slot = {"Div": 1, "Reciprocal": 0, "Log": 0, "Pow": 0}.get(node.kind)
        state = given[slot] if slot is not None else None
        if state is None or state.inverse:
            return None
        if node.kind == "Pow":
            exponent = node.args[1]
            return state if isinstance(exponent, np.ndarray) and (exponent < 0).all() else None
        return state

    def _keep(self, state: _State, end: _Node) -> None:
        what = "zero" if state.epsilon <= FP16_LEAST else "subnormal"
        reason = f"the constant {state.epsilon:.3g} that guards {end.kind} {end.op.outputs[0].name} is {what} in fp16"
        for i in (*state.ops, end.op.id):
            self.found.setdefault(i, reason)

    def _factor(self, node: _Node) -> None:
        """A factor, dividend or divisor that fp16 has not, or not precisely."""
        for a in node.args if node.kind in ("Mul", "Div") else ():
            if not isinstance(a, np.ndarray) or a.size != 1 or a.dtype != FP32:
                continue
            size = float(np.abs(a).item())
            if 0 < size < FP16_NORMAL:
                what = "zero" if size <= FP16_LEAST else "subnormal"
                self.found.setdefault(node.op.id, f"the constant {size:.3g} of its {node.kind} is {what} in fp16")
            elif FP16_LARGEST < size < MASK:
                self.saturates.add(node.op.id)
                self.found.setdefault(
                    node.op.id, f"the constant {size:.3g} of its {node.kind} is beyond 65504, where fp16 ends"
                )

    def _squares(self, step: Step) -> set[int]:
        """The ops from a squaring to this step, where this is a sum or mean of squares."""
        seen: list[int] = []
        while step in self.nodes:
            node = self.nodes[step]
            steps = [a for a in node.args if isinstance(a, tuple)]  # without the constants, which are arrays
            data = set(steps)
            seen.append(node.op.id)
            if node.kind == "ReduceSumSquare" or (node.kind == "Mul" and len(steps) == 2 and len(data) == 1):
                return set(seen)
            if node.kind == "Pow" and isinstance(node.args[1], np.ndarray) and (node.args[1] == 2).all():
                return set(seen)
            moves = node.kind not in STRUCTURAL and node.op.definition.traits.movement
            if (node.kind not in CARRIES | REDUCES | {"Div"} and not moves) or len(data) != 1:
                break
            (step,) = data
        return set()


def _nodes(graph: Graph) -> Iterator[tuple[Step, _Node]]:
    """Every step of the graph's floating-point work, in topological order."""
    last: dict[Value, Step] = {}
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        steps = steps_of(op) if is_pointwise(op) else [fuse_pointwise.Step(op.kind, op.attrs, op.inputs)]
        for k, s in enumerate(steps):
            kind = "Narrow" if isinstance(s.attrs, CastAttrs) and s.attrs.to not in (FP32, FP64) else s.kind
            yield (op.id, k), _Node(op, kind, tuple(_argument(graph, op, a, last) for a in s.args))
        last[op.value] = (op.id, len(steps) - 1)


def _argument(graph: Graph, op: Op, a: Value | int | None, last: dict[Value, Step]) -> Array | Step | None:
    if a is None or isinstance(a, int):
        return None if a is None else (op.id, a)
    array = graph.constant_value(a)
    return array if array is not None else last.get(a, (a.op, a.port))


def _epsilon(node: _Node) -> float | None:
    """The constant by which a step keeps a value from zero, where fp16 has it as a subnormal number or not at all."""
    slots = {"Add": (0, 1), "Sub": (1,), "Max": range(len(node.args)), "Clip": (1,), "Where": (1, 2)}.get(node.kind, ())
    for slot in slots:
        a = node.args[slot] if slot < len(node.args) else None
        if isinstance(a, np.ndarray) and a.dtype == FP32 and a.size and 0 < abs(a.flat[0]) < FP16_NORMAL:
            size = np.abs(a)
            if ((size > 0) & (size < FP16_NORMAL)).all():
                return float(size.max())
    return None
