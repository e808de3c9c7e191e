"""The number of elements that are not zero is a sum, where only the number is read.

PyTorch's RetinaNet and FCOS list the scores that exceed a threshold. Once the best ones are selected from all (``masked_rows``),
only the length of the list is used. NonZero runs on the CPU, since its size depends on data; the sum runs on a GPU.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import in_shape, operand
from optdnn.types import BOOL, INT64


@rule("counted_places", {"NonZero"})
def counted_places(graph: Graph, op: Op) -> Match | Miss | None:
    """A NonZero of a tensor of known size whose readers ask only for the number of its columns."""
    shapes = graph.users(op.value)
    if not shapes or any(s.kind != "Shape" for s in shapes) or not graph.type(operand(op)).is_static:
        return None
    if any((s.attrs.start, s.attrs.end) not in ((1, None), (1, 2), (-1, None)) for s in shapes):
        return Miss("the number of its rows is read as well")

    def build(patch: Patch) -> None:
        x = operand(op)
        if graph.type(x).dtype != BOOL:
            zero = patch.constant(np.zeros((), graph.type(x).dtype), "zero")
            x = patch.add("Not", [patch.add("Equal", [x, zero])])
        ones = patch.add("Cast", [x], CastAttrs(INT64))
        total = in_shape(patch, patch.add("ReduceSum", [ones, None], ReduceAttrs(keepdims=False)), (1,))
        for shape in shapes:
            patch.replace(shape.value, total)

    return Match((op, *shapes), build)


class CountedPlaces(RulePass):
    name = "counted_places"
    rules = (counted_places,)
