"""Several sums of a convolution of one value and one of another value become one sum, and a Split after it.

The gates of a convolutional LSTM (Shi et al., 2015) are such sums: each gate adds a convolution of the step's input and one of the
state. Keras writes a pair of convolutions for each gate. Here two convolutions compute all gates, and one launch can add them.
The arithmetic of the cell reads the parts in place.

Where the convolutions of all steps' inputs are computed before the first step, a gate adds one step of their result. Then the
results of all gates are put side by side, once for all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.support.facts import bytes_of, operand, producer, split_along
from optdnn.passes.support.siblings import Family, Member, joined, member_of
from optdnn.types import normalize_axis

LEAST_SUMS = 3
"""Fewest sums that become one. Two sums are two launches, whose epilogues hold the arithmetic that would follow the Split."""

Sum = tuple[Op, Op, Op]
"""An Add and the two convolutions that it adds, in the order of the family's values."""


@rule("sibling_sums", {"Add"})
def sibling_sums(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """At least three sums of two convolutions, of the same two values and of equal geometry, become one."""
    left, right = (_convolution(graph, v) for v in op.inputs)
    if left is None or right is None or operand(left) == operand(right):
        return None
    sums = _sums(graph, operand(left), operand(right))
    if len(sums) < LEAST_SUMS:
        return Miss(f"fewer than {LEAST_SUMS} sums add convolutions of these two values")
    pairs = [(s, member_of(graph, s[1]), member_of(graph, s[2])) for s in sums]
    mine = next((a, b) for s, a, b in pairs if s[0].id == op.id)
    refusal = next((m for m in mine if isinstance(m, str)), None)
    if refusal is not None:
        return Miss(refusal)
    alike = [(s, a, b) for s, a, b in pairs if _keys(a, b) == _keys(*mine)]
    lefts = tuple(a for _, a, _ in alike if isinstance(a, Member))
    rights = tuple(b for _, _, b in alike if isinstance(b, Member))
    if len(alike) < LEAST_SUMS:
        return Miss(f"fewer than {LEAST_SUMS} of the sums have this geometry and type")
    adds = [s[0] for s, _, _ in alike]
    read = bytes_of(graph, operand(left)) + bytes_of(graph, operand(right))
    saved = (len(adds) - 1) * (read + LAUNCH_BYTES)
    moved = 2 * sum(bytes_of(graph, a.value) for a in adds)
    if context.counted(moved) > saved:
        return Miss(
            f"the sums would be stored ({moved / 1e6:.1f} MB) to save {saved / 1e6:.1f} MB of reading and launching"
        )

    def build(patch: Patch) -> None:
        terms = [joined(graph, patch, operand(of[0].op), Family(of, 1, None), context.kept) for of in (lefts, rights)]
        total = patch.add("Add", terms, name=f"{op.outputs[0].name}.siblings")
        parts = split_along(patch, total, 1, [m.width for m in lefts], f"{op.outputs[0].name}.siblings.sizes")
        patch.replace_each((add.value for add in adds), parts)

    covered = (op, *(a for a in adds if a.id != op.id), *(m.op for m in (*lefts, *rights)))
    return Match(covered, build)


@rule("sibling_sums_of_steps", {"Add"})
def sibling_sums_of_steps(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """At least three sums of a convolution of one value, and an entry of another tensor, become one.

    The other tensors have one shape, and all sums take their entries at one place."""
    mine = _step(graph, op)
    if mine is None:
        return None
    users = graph.users(operand(mine.conv))
    adds = [add for user in users if user.kind == "Conv" and (add := graph.sole_user(user.value)) is not None]
    steps = [step for add in adds if (step := _step(graph, add)) is not None and step.place == mine.place]
    members = [(step, member_of(graph, step.conv)) for step in steps]
    own = next(member for step, member in members if step.add.id == op.id)
    if isinstance(own, str):
        return Miss(own)
    alike = [(step, m) for step, m in members if isinstance(m, Member) and m.key == own.key]
    if len(alike) < LEAST_SUMS:
        return Miss(f"fewer than {LEAST_SUMS} sums add convolutions of this value to entries of other tensors")
    axis = _channels(graph, mine)
    if axis is None:
        return Miss("the entries are taken along their channels")
    read, summed = bytes_of(graph, operand(mine.conv)), sum(bytes_of(graph, step.add.value) for step, _ in alike)
    moved, saved = 4 * summed, (len(alike) - 1) * (read + LAUNCH_BYTES)
    if context.counted(moved) > saved:
        return Miss(f"{moved / 1e6:.1f} MB would be moved to save {saved / 1e6:.1f} MB of reading and launching")

    def build(patch: Patch) -> None:
        family = tuple(m for _, m in alike)
        made = joined(graph, patch, operand(mine.conv), Family(family, 1, None), context.kept)
        whole = patch.add("Concat", [operand(step.part) for step, _ in alike], ConcatAttrs(axis))
        entry = patch.add("Gather", [whole, mine.part.inputs[1]], mine.part.attrs)
        total = patch.add("Add", [made, entry], name=f"{op.outputs[0].name}.siblings")
        parts = split_along(patch, total, 1, [m.width for m in family], f"{op.outputs[0].name}.siblings.sizes")
        patch.replace_each((step.add.value for step, _ in alike), parts)

    others = (o for step, _ in alike for o in (step.add, step.conv, step.part) if o.id != op.id)
    return Match((op, *others), build)


@dataclass(frozen=True)
class _Step:
    """An Add, the convolution and the Gather that it adds, and where the Gather takes its entry."""

    add: Op
    conv: Op
    part: Op
    place: tuple[object, ...]


def _step(graph: Graph, add: Op) -> _Step | None:
    """The parts of a sum of a convolution and one constant entry of another tensor; None for other operators."""
    if add.kind != "Add":
        return None
    for first, second in (add.inputs, add.inputs[::-1]):
        conv, part = _convolution(graph, first), producer(graph, second, {"Gather"}, alone=True)
        index = None if part is None else graph.constant_value(part.inputs[1])
        if conv is None or part is None or index is None or part.outputs[0].type.dims != conv.outputs[0].type.dims:
            continue
        place = (part.attrs, index.shape, tuple(index.reshape(-1).tolist()), graph.type(operand(part)))
        return _Step(add, conv, part, place)
    return None


def _channels(graph: Graph, step: _Step) -> int | None:
    """The axis of the Gather's operand that becomes the channels, axis 1 of its result; None if it is the gathered one."""
    rank = len(graph.type(operand(step.part)).dims)
    axis, taken = normalize_axis(step.part.attrs.axis, rank), graph.type(operand(step.part, 1)).rank or 0
    if axis > 1:
        return 1
    return 2 - taken if axis + taken <= 1 else None


def _convolution(graph: Graph, value: Value | None) -> Op | None:
    """The convolution without stages that computes ``value`` for one reader; None if there is none."""
    found = producer(graph, value, {"Conv"}, alone=True)
    return None if found is None or found.attrs.epilogue or found.attrs.prologue else found


def _sums(graph: Graph, x: Value, h: Value) -> list[Sum]:
    """All sums of a convolution of ``x`` and one of ``h``, in the graph's order."""
    found: list[Sum] = []
    for user in graph.users(x):
        add = graph.sole_user(user.value) if user.kind == "Conv" and user.inputs[0] == x else None
        if add is None or add.kind != "Add":
            continue
        a, b = (_convolution(graph, v) for v in add.inputs)
        if a is not None and b is not None and {operand(a), operand(b)} == {x, h}:
            found.append((add, a, b) if operand(a) == x else (add, b, a))
    return found


def _keys(a: Member | str, b: Member | str) -> tuple[object, object]:
    """What two sums must have in common; unique for a sum that cannot be merged."""
    return (a.key if isinstance(a, Member) else object(), b.key if isinstance(b, Member) else object())


class SumsOfSiblings(RulePass):
    name = "sibling_sums"
    rules = (sibling_sums, sibling_sums_of_steps)
