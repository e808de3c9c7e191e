"""Rounds that double the length of prefixes become one loop over the steps (Hillis and Steele, 1986).

PyTorch has no operator for ``s[t] = a[t] * s[t - 1] + b[t]``. Implementations of Mamba therefore compute all states by rounds on
whole tensors, with distances d = 1, 2, 4, …: ``b = a * shift(b, d) + b`` and ``a = a * shift(a, d)``. The shift puts zeros before
b, and ones before a. A round takes several launches that each read and write all states. For few steps, one loop over them is
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.checks import elements
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import ints, is_filled, operand, producer, scalar, shape_of
from optdnn.passes.support.parts import PARTS, span
from optdnn.passes.support.recurrences import is_looped, looped
from optdnn.types import normalize_axis

LEAST = 3
"""Fewest rounds: two are hardly more launches than the loop."""


@dataclass(frozen=True)
class _Round:
    """One round: ``before`` is the tensor that it reads, ``factors`` multiply its shift by ``distance`` along ``axis``."""

    before: Value
    factors: Value
    distance: int
    axis: int
    ops: tuple[Op, ...]


@rule("doubled_prefixes", {"Add", "Concat"})
def doubled_prefixes(graph: Graph, op: Op) -> Match | Miss | None:
    """All states of a recurrence that begins with zeros. The rule starts at the last round."""
    rounds = list(_rounds(graph, op.value))
    if len(rounds) < LEAST or any(one.axis != rounds[0].axis for one in rounds):
        return None
    axis, terms = rounds[0].axis, rounds[-1].before
    sizes, factors = graph.type(terms), rounds[-1].factors
    if not sizes.is_static or [one.distance for one in rounds[::-1]] != [1 << k for k in range(len(rounds))]:
        return None
    count = sizes.static_shape[axis]
    if 2 * rounds[0].distance < count:
        return None
    covered, value = [x for one in rounds for x in one.ops], factors
    for number, one in enumerate(rounds[::-1]):
        if number:
            step = _factor_round(graph, one.factors)
            if step is None or (step.before, step.distance, step.axis) != (value, one.distance // 2, axis):
                return Miss(f"the factors of {one.ops[0].name} are not the products of those of the round before")
            covered += step.ops
        value = one.factors
    shape = shape_of(graph, factors)
    if shape is None or len(shape) != len(sizes.dims) or shape[axis] != count:
        return Miss("its factors do not have one position per step")
    if not is_looped(count, elements(sizes)):
        return Miss(f"a loop over its {count} steps would take longer than the rounds")
    ops = (op, *(x for x in dict.fromkeys(covered) if x.id != op.id))
    return Match(ops, lambda patch: looped(patch, factors, terms, axis, count))


def _rounds(graph: Graph, value: Value) -> Iterator[_Round]:
    """The rounds that end in ``value``, the last one first."""
    while (found := _state_round(graph, value)) is not None:
        yield found
        value = found.before


def _state_round(graph: Graph, value: Value) -> _Round | None:
    """``factors * shift(before, d) + before``, of whole tensors or of the positions from d on."""
    op = graph.op(value)
    if op.kind == "Add":
        for scaled, own in _both(op):
            mul = producer(graph, scaled, {"Mul"}, alone=True)
            for factors, moved in () if mul is None else _both(mul):
                shift = _shift(graph, moved, 0)
                if mul is not None and shift is not None and shift.before == own:
                    return _Round(own, factors, shift.distance, shift.axis, (op, mul, *shift.ops))
    if (joined := _joined(graph, op)) is None:
        return None
    first, late, axis, count = joined
    if late.kind != "Add":
        return None
    for scaled, own in _both(late):
        mul = producer(graph, scaled, {"Mul"}, alone=True)
        for factors, moved in () if mul is None else _both(mul):
            parts = [_part(graph, v, axis) for v in (first, own, moved, factors)]
            found = _round_of(parts, axis, count)
            if mul is not None and found is not None and parts[3] is not None:
                return _Round(found.before, parts[3][0], found.distance, axis, (op, late, mul))
    return None


def _factor_round(graph: Graph, value: Value) -> _Round | None:
    """``before * shift(before, d)``, of whole tensors or of the positions from d on."""
    op = graph.op(value)
    if op.kind == "Mul":
        for own, moved in _both(op):
            shift = _shift(graph, moved, 1)
            if shift is not None and shift.before == own:
                return _Round(own, own, shift.distance, shift.axis, (op, *shift.ops))
    if (joined := _joined(graph, op)) is None:
        return None
    first, late, axis, count = joined
    if late.kind != "Mul":
        return None
    for own, moved in _both(late):
        found = _round_of([_part(graph, v, axis) for v in (first, own, moved, own)], axis, count)
        if found is not None:
            return _Round(found.before, found.before, found.distance, axis, (op, late))
    return None


def _round_of(parts: Sequence[tuple[Value, int, int] | None], axis: int, count: int) -> _Round | None:
    """The round whose parts are the first d positions, the ones from d on, the moved ones, and the factors from d on."""
    first, own, moved, factors = parts
    if first is None or own is None or moved is None or factors is None:
        return None
    before, start, distance = first
    wanted = [(before, distance, count), (before, 0, count - distance), (factors[0], distance, count)]
    if start or [own, moved, factors] != wanted:
        return None
    return _Round(before, factors[0], distance, axis, ())


def _joined(graph: Graph, op: Op) -> tuple[Value, Op, int, int] | None:
    """The two parts of a Concat, the second one as its operator; the axis, and its size."""
    shape = shape_of(graph, op.value) if op.kind == "Concat" and len(op.inputs) == 2 else None
    if shape is None:
        return None
    axis = normalize_axis(op.attrs.axis, len(shape))
    size = shape[axis]
    return (operand(op), graph.op(operand(op, 1)), axis, size) if isinstance(size, int) else None


def _both(op: Op) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """The operands of a binary operator in both orders."""
    return (operand(op), operand(op, 1)), (operand(op, 1), operand(op))


def _part(graph: Graph, value: Value, axis: int) -> tuple[Value, int, int] | None:
    """The tensor whose positions along ``axis`` this value is, with the first one and the one after the last."""
    op = producer(graph, value, PARTS)
    whole, shape = (None, None) if op is None else (operand(op), shape_of(graph, operand(op)))
    size = None if shape is None else shape[axis]
    if op is None or whole is None or not isinstance(size, int) or not graph.type(value).is_static:
        return None
    if op.kind == "Slice":
        limits = span(graph, op, size, axis - len(graph.type(whole).dims))
        return None if limits is None or limits[2] != 1 else (whole, limits[0], limits[1])
    if normalize_axis(op.attrs.axis, len(graph.type(whole).dims)) != axis:
        return None
    sizes = [one.type.dims[axis] for one in op.outputs]
    start = sum(n for n in sizes[: value.port] if isinstance(n, int))
    return whole, start, start + graph.type(value).static_shape[axis]


def _shift(graph: Graph, value: Value, fill: int) -> _Round | None:
    """The tensor that ``value`` is, moved by some positions along an axis; ``fill`` stands in the first ones."""
    op, shape = graph.op(value), shape_of(graph, value)
    if shape is None:
        return None
    if op.kind == "Concat" and len(op.inputs) == 2 and is_filled(graph.known(operand(op)), fill):
        axis = normalize_axis(op.attrs.axis, len(shape))
        return _moved(graph, operand(op, 1), axis, shape[axis], (op,))
    pads = ints(graph, op.input(1)) if op.kind == "Pad" and op.attrs.mode == "constant" else None
    given = 0.0 if op.input(2) is None else scalar(graph, op.input(2))
    if pads is None or given != fill:
        return None
    axes = range(len(shape)) if op.input(3) is None else ints(graph, op.input(3)) or ()
    added = [k for k in range(len(axes)) if pads[k] or pads[k + len(axes)]]
    if len(added) != 1 or pads[added[0]] <= 0:
        return None
    axis, begin, end = normalize_axis(axes[added[0]], len(shape)), pads[added[0]], pads[added[0] + len(axes)]
    if end == -begin:
        return _Round(operand(op), operand(op), begin, axis, (op,))
    return _moved(graph, operand(op), axis, shape[axis], (op,)) if not end else None


def _moved(graph: Graph, rest: Value, axis: int, size: object, ops: tuple[Op, ...]) -> _Round | None:
    """The shift whose positions after the filled ones are ``rest``."""
    part = _part(graph, rest, axis)
    if part is None or part[1] or shape_of(graph, part[0]) is None or graph.type(part[0]).dims[axis] != size:
        return None
    assert isinstance(size, int)
    return _Round(part[0], part[0], size - part[2], axis, (*ops, graph.op(rest)))
