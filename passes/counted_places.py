"""The number of elements that are not zero is a sum, where only the number is read; a padded list of their places is a scatter.

PyTorch's RetinaNet and FCOS list the scores that exceed a threshold. Once the best ones are selected from all (``masked_rows``),
only the length of the list is used. NonZero runs on the CPU, since its size depends on data; the sum runs on a GPU.
Mochi (Genmo, 2024) gathers the words of a prompt that its mask selects. ``pad_rows`` pads their places to a row of known length.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, operand, producer
from optdnn.passes.support.places import MOST_PLACES, ones_of, places_of, total_of


@rule("counted_places", {"NonZero"})
def counted_places(graph: Graph, op: Op) -> Match | Miss | None:
    """A NonZero of a tensor of known size whose readers ask only for the number of its columns."""
    shapes = graph.users(op.value)
    if not shapes or any(s.kind != "Shape" for s in shapes) or not graph.type(operand(op)).is_static:
        return None
    if not all(_counts_columns(s) for s in shapes):
        return Miss("the number of its rows is read as well")

    def build(patch: Patch) -> None:
        total = total_of(patch, ones_of(patch, operand(op)))
        for shape in shapes:
            patch.replace(shape.value, total)

    return Match((op, *shapes), build)


@rule("padded_places", {"NonZero"})
def padded_places(graph: Graph, op: Op) -> Match | Miss | None:
    """A NonZero of a vector whose places are read in a row of known length, as ``pad_rows`` pads them.

    A scatter writes the places in their order, and behind them the other ones, which a spare place hides."""
    users = graph.users(op.value)
    joints = [u for u in users if u.kind == "Concat"]
    shapes = [u for u in users if u.kind == "Shape"]
    dims = graph.type(operand(op)).dims
    if not joints or len(joints) + len(shapes) < len(users) or len(dims) != 1 or not isinstance(dims[0], int):
        return None
    size, reads = dims[0], [u for joint in joints for u in graph.users(joint.value)]
    if not all(_counts_columns(s) for s in shapes) or not all(_spared(graph, joint) for joint in joints):
        return None
    if not all(_reads_cyclically(graph, u) for u in reads):
        return None
    if not 0 < size <= MOST_PLACES:
        return Miss(
            f"it lists the places of {size} elements; a scan of more than {MOST_PLACES} takes longer than the CPU"
        )

    def build(patch: Patch) -> None:
        ones = ones_of(patch, operand(op))
        total, places = total_of(patch, ones), patch.constant(np.arange(size), "places")
        listed = places_of(patch, ones, total)
        given = patch.add("Less", [places, total])
        for joint in joints:
            spare = in_shape(patch, operand(joint, 1), (1,))
            row = in_shape(patch, patch.add("Where", [given, listed, spare]), (1, size))
            whole = patch.add("Concat", [row, operand(joint, 1)], ConcatAttrs(1))
            for gather in graph.users(joint.value):
                patch.replace(gather.value, patch.add("Gather", [whole, gather.inputs[1]], gather.attrs))
        for shape in shapes:
            patch.replace(shape.value, total)

    return Match((op, *joints, *shapes, *reads), build)


def _counts_columns(shape: Op) -> bool:
    """Whether a Shape of the list gives only the number of its columns."""
    return (shape.attrs.start, shape.attrs.end) in ((1, None), (1, 2), (-1, None))


def _spared(graph: Graph, joint: Op) -> bool:
    """Whether a Concat appends one place to the list."""
    places = [graph.op(operand(joint, k)).kind == "NonZero" for k in range(len(joint.inputs))]
    return joint.attrs.axis in (1, -1) and places == [True, False] and graph.type(operand(joint, 1)).dims == (1, 1)


def _reads_cyclically(graph: Graph, gather: Op) -> bool:
    """Whether a Gather takes columns by numbers that are not negative: ``k % max(n, 1)``."""
    if gather.kind != "Gather" or gather.attrs.axis not in (1, -1):
        return False
    numbers = producer(graph, gather.inputs[1], {"Mod"})
    count = None if numbers is None else producer(graph, numbers.inputs[1], {"Max"})
    if numbers is None or count is None or numbers.attrs.fmod:
        return False
    known = graph.constant_value(numbers.inputs[0])
    least = [c.min() for v in count.inputs if (c := graph.constant_value(v)) is not None and c.size]
    return known is not None and bool((known >= 0).all()) and max(least, default=0) > 0


class CountedPlaces(RulePass):
    name = "counted_places"
    rules = (counted_places, padded_places)
