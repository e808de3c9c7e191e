"""Repetitions along axes of one element are views, and an element of a stack is the tensor that was stacked."""

from __future__ import annotations

from itertools import accumulate, pairwise

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import integers, ints, operand, producer, reshape_target, reshaped
from optdnn.types import normalize_axis


@rule("tile_is_expand", {"Tile"})
def tile_is_expand(graph: Graph, op: Op) -> Match | None:
    """A Tile that repeats only axes of one element becomes an Expand, which copies nothing: PyTorch's ``repeat``."""
    repeats, dims = ints(graph, op.input(1)), graph.type(operand(op)).shape
    if dims is None or repeats is None or any(r != 1 and (n != 1 or r < 1) for r, n in zip(repeats, dims, strict=True)):
        return None
    return Match((op,), lambda patch: patch.add("Expand", [operand(op), integers(patch, repeats, "shape")]))


@rule("element_of_stack", {"Gather"})
def element_of_stack(graph: Graph, op: Op) -> Match | Miss | None:
    """A Gather of one element of a Concat's axis reads the part that is this element. Then other parts that nothing reads are not
    computed: detectors with a decoder stack the results of all layers, and return those of the last one."""
    stack, index = producer(graph, op.input(0), {"Concat"}), ints(graph, op.input(1))
    if stack is None or index is None or len(index) != 1:
        return None
    dims, after = stack.outputs[0].type.dims, op.outputs[0].type.shape
    axis = normalize_axis(stack.attrs.axis, len(dims))
    parts = [operand(stack, k) for k in range(len(stack.inputs))]
    widths = [n for part in parts if isinstance(n := graph.type(part).dims[axis], int)]
    if normalize_axis(op.attrs.axis, len(dims)) != axis or len(widths) < len(parts) or after is None:
        return None
    at = index[0] % sum(widths)
    part = next(
        p for p, (begin, end) in zip(parts, pairwise(accumulate(widths, initial=0)), strict=True) if begin <= at < end
    )
    target = reshape_target(graph.type(part).dims, after)
    if graph.type(part).dims[axis] != 1:
        return Miss("the part that it reads has further elements")
    if any(user.kind != "Gather" for user in graph.users(stack.value)):
        return Miss("the stack has readers of other kinds, so it is stored anyway")
    if target is None:
        return Miss("no constant target can express its shape")

    def build(patch: Patch) -> Value:
        return reshaped(patch, part, target)

    return Match((op,), build)
