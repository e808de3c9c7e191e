"""Transpose, Reshape, Transpose become one Transpose between two Reshapes.

MobileViT (Mehta and Rastegari, 2022) cuts an image into patches in two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, operand, producer, reshaped

Shape = tuple[int, ...]


@rule("view_chain", {"Transpose"})
def view_chain(graph: Graph, op: Op) -> Match | Miss | None:
    """Transpose, Reshape, Transpose: the axes are split as far as both need, permuted once, and joined again.

    Otherwise the Reshape in the middle would copy the transposed tensor. A Reshape before or after the chain is absorbed."""
    middle = producer(graph, op.inputs[0], RESHAPES, alone=True)
    first = None if middle is None else producer(graph, middle.inputs[0], {"Transpose"}, alone=True)
    if middle is None or first is None:
        return None
    before = producer(graph, first.inputs[0], RESHAPES, alone=True)
    x = operand(first if before is None else before)
    if first.attrs.perm is None or op.attrs.perm is None or 0 in op.outputs[0].type.dims:
        return None
    if not all(t.is_static for t in (graph.type(x), first.outputs[0].type, op.outputs[0].type)):
        return None
    reader = graph.sole_user(op.value)
    after = reader if reader is not None and reader.kind in RESHAPES else None
    end = op if after is None else after
    one, two = first.outputs[0].type.static_shape, middle.outputs[0].type.static_shape
    parts = _parts(one, two)
    if parts is None:
        return Miss("the axes before and after its Reshape have no common parts")
    back = [first.attrs.perm.index(i) for i in range(len(one))]
    given = [p for j in back for p in _groups(one, parts)[j]]
    joined = _groups(two, parts)
    copied = any(given.index(q) != given.index(p) + 1 for axis in joined for p, q in pairwise(axis))
    if not copied and before is None:
        return None  # the chain makes one copy at most
    taken = [p for j in op.attrs.perm for p in joined[j]]
    runs = _runs(given, taken, _starts(graph.type(x).static_shape, [parts[p] for p in given]))
    order = sorted(runs, key=lambda run: taken.index(run[0]))
    kept = (1,) if graph.type(x).dims[:1] == (1,) else ()  # the batch stays in front
    sizes = (*kept, *(math.prod(parts[p] for p in run) for run in runs))
    perm = (*range(len(kept)), *(runs.index(run) + len(kept) for run in order))

    def build(patch: Patch) -> Value:
        turned = patch.add("Transpose", [reshaped(patch, x, sizes)], TransposeAttrs(perm))
        return reshaped(patch, turned, end.outputs[0].type.static_shape)

    covered = [o for o in (end, op, middle, first, before) if o is not None]
    return Match(tuple(dict.fromkeys(covered)), build)


def _parts(one: Shape, two: Shape) -> Shape | None:
    """The coarsest common split of two shapes: sizes whose products give the axes of both, in row-major order. None without one."""
    ends = sorted({math.prod(shape[i:]) for shape in (one, two) for i in range(len(shape) + 1)}, reverse=True)
    if any(a % b for a, b in pairwise(ends)):
        return None
    return tuple(a // b for a, b in pairwise(ends))


def _groups(shape: Shape, parts: Shape) -> list[list[int]]:
    """The numbers of the parts that make up each axis; an axis of size 1 has none."""
    found, at = list[list[int]](), 0
    for size in shape:
        own: list[int] = []
        while math.prod(parts[p] for p in own) < size:
            own.append(at)
            at += 1
        found.append(own)
    return found


def _starts(shape: Shape, sizes: Sequence[int]) -> set[int]:
    """The numbers of the parts at which an axis of ``shape`` begins."""
    axes = {math.prod(shape[i:]) for i in range(len(shape))}
    return {i for i in range(len(sizes)) if math.prod(sizes[i:]) in axes}


def _runs(given: Sequence[int], taken: Sequence[int], starts: set[int]) -> list[list[int]]:
    """``given`` in runs that are also consecutive in ``taken``. Each of ``starts`` begins a run: there may be gaps between axes."""
    runs: list[list[int]] = []
    for i, p in enumerate(given):
        together = i not in starts and taken.index(p) == taken.index(runs[-1][-1]) + 1
        if together:
            runs[-1].append(p)
        else:
            runs.append([p])
    return runs


class ViewChains(RulePass):
    name = "view_chains"
    rules = (view_chain,)
