"""Groups of equal operators that are computed from different parts of one tensor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.support.facts import operand
from optdnn.passes.support.stacks import Forms, Part, part_of, parts_of
from optdnn.types import TensorType


def group_of(graph: Graph, op: Op) -> list[Op]:
    """An operator and the equal operators on later parts, in the order of the parts.

    Empty if the operator's part is not the first one: then it belongs to the group of the previous part."""
    forms = Forms(graph)
    leaves_of = ((slot, forms.leaf(v)) for slot, v in enumerate(op.inputs) if v is not None)
    slot, leaf = next(((slot, leaf) for slot, leaf in leaves_of if leaf is not None), (0, None))
    part = None if leaf is None else part_of(graph, leaf.value)
    if leaf is None or part is None:
        return []
    path, own, seen = (*leaf.path, (op, slot)), forms.of(operand(op, slot)), _types(graph, op)
    rest = [k for k in range(len(op.inputs)) if k != slot]

    def alike(value: Value) -> list[Op]:
        found = [
            u for u in _followed(graph, value, path) if _types(graph, u) == seen and forms.of(operand(u, slot)) == own
        ]
        if len(found) > 1:  # several operators on the same part: compare their other operands too
            found = [u for u in found if all(_form(forms, u, k) == _form(forms, op, k) for k in rest)]
        return found

    siblings = sorted(parts_of(graph, part), key=lambda found: found[1].start)
    before = [(v, p) for v, p in siblings if p.start < part.start][-1:]
    if any((part.size == 1 or p.start + p.size == part.start) and alike(v) for v, p in before):
        return []
    by_start = dict[int, Op]()
    for value, other in siblings:
        found = alike(value) if other.start >= part.start else []
        if len(found) > 1 or (found and other.start in by_start):
            return []
        if found:
            by_start[other.start] = found[0]
    return _run(by_start, part) if part.start in by_start else []


def _run(by_start: Mapping[int, Op], part: Part) -> list[Op]:
    """The operators on this part and on later parts at equal distances."""
    others = [at - part.start for at in by_start if at != part.start]
    step = min(others, default=part.size) if part.size == 1 else part.size
    end = part.start
    while end + step in by_start:
        end += step
    return [by_start[at] for at in range(part.start, end + 1, step)]


def _types(graph: Graph, op: Op) -> list[TensorType | None]:
    return [None if v is None else graph.type(v) for v in op.inputs]


def _form(forms: Forms, op: Op, slot: int) -> Hashable:
    value = op.inputs[slot]
    return None if value is None else forms.of(value)


def _followed(graph: Graph, value: Value, path: Sequence[tuple[Op, int]]) -> list[Op]:
    """The operators that ``value`` reaches through operators equal to those of ``path``."""
    reached, ops = [value], list[Op]()
    for like, slot in path:
        ops = [
            u
            for v in reached
            for u in graph.users(v)
            if (u.kind, u.attrs) == (like.kind, like.attrs) and slot < len(u.inputs) and u.inputs[slot] == v
        ]
        reached = [u.value for u in ops]
    return ops
