"""Pointwise operators convert between fp32 and 16-bit floats in registers.

Inputs and outputs of networks that were trained in fp32 are fp32. At 16 bits, an operator that reads such an input, or gives such
an output, stands beside a conversion. If nothing else reads the converted value, both are one Pointwise op: a launch less, and
less traffic.

Operators beside normalizations, pools and reductions stay as they are: the launches of these may compute them too.

A conversion in front of a product moves behind the views between them. Positions of largest elements need none. A conversion to
fp32 after a Resize that enlarges moves in front of it, where there are fewer elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.fuse_pointwise import FuseGroup
from optdnn.passes.rules.pointwise_parts import PointwiseOfParts
from optdnn.passes.support.facts import VIEWS, is_pointwise, operand, sizes_of
from optdnn.passes.support.paths import path_to, repeated
from optdnn.types import BF16, FP16, FP32

HALVES = (FP16, BF16)


class Converted(FuseGroup):
    """A conversion from 16-bit floats to fp32 and the pointwise op before it, or a pointwise op and the conversions of its
    operands."""

    name = "converted_in_registers"

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not is_pointwise(op) or (before := _joined(graph, op)) is None:
            return None
        return FuseGroup(joins=lambda _, one: one.id in before).match(graph, op, context)


def _joined(graph: Graph, op: Op) -> set[int] | None:
    """The operators before ``op`` that may be computed with it."""
    if _converts(graph, op) == "widens":
        one = graph.op(operand(op))
        return {one.id} if is_pointwise(one) and not _beside_others(graph, one, besides=WIDENED) else None
    found = {v.op for v in op.inputs if v is not None and _converts(graph, graph.op(v))}
    return found if found and op.kind != "Cast" and not _beside_others(graph, op) else None


def _converts(graph: Graph, op: Op) -> str:
    """How an op converts floats: "widens" 16-bit floats to fp32, "narrows" fp32; "" for any other op."""
    if op.kind != "Cast":
        return ""
    pair = graph.type(operand(op)).dtype, op.outputs[0].type.dtype
    return (
        "widens"
        if pair[0] in HALVES and pair[1] == FP32
        else "narrows"
        if pair[0] == FP32 and pair[1] in HALVES
        else ""
    )


WIDENED = ("AveragePool", "LpPool", "MaxPool")
"""Kinds before a pointwise operator whose launch may compute it and give fp32."""


def _beside_others(graph: Graph, op: Op, besides: Sequence[str] = ()) -> bool:
    """Whether an op reads, or is read by, an operator whose launch may compute it. ``besides``: kinds that may be before it."""
    before = [graph.op(v).kind for v in op.inputs if v is not None]
    near = [kind for kind in before if kind not in besides] + [user.kind for user in graph.users(op.value)]
    return any(kind.endswith(("Normalization", "Pool")) or kind.startswith("Reduce") for kind in near)


@rule("conversion_after_views", {"Gemm", "MatMul"})
def conversion_after_views(graph: Graph, op: Op) -> Match | Miss | None:
    """A conversion to 16-bit floats moves behind the last Transpose between it and a product, as for the patches of a vision
    transformer's image: then one launch converts and reorders. Slices in front of it only crop: fewer elements are converted."""
    views = path_to(graph, operand(op), VIEWS | {"Slice"}, alone=True)
    cast = graph.op(operand(views[-1])) if views else None
    last = next((k for k, view in enumerate(views) if view.kind == "Transpose"), None)
    if cast is None or last is None or _converts(graph, cast) != "narrows":
        return None
    if any(view.kind == "Slice" for view in views[:last]):
        return Miss("it would convert elements that a Slice behind the last Transpose leaves out")
    views = views[last:]  # a Reshape behind the last Transpose is a view of the converted elements
    if graph.sole_user(cast.value) is None:
        return Miss(f"{cast.name} has other readers")
    if any(view.kind == "Transpose" and not _keeps_last(view) for view in views):
        return Miss("the views exchange neighbors, which copies of one type do faster")

    def build(patch: Patch) -> Value:
        return patch.add("Cast", [repeated(patch, operand(cast), views)], cast.attrs, src=cast.src)

    return Match((*views, cast), build)


@rule("choice_before_conversion", {"ArgMax", "ArgMin", "TopK"})
def choice_before_conversion(graph: Graph, op: Op) -> Match | Miss | None:
    """The positions of the largest elements are those before a conversion from 16-bit floats to fp32: nothing is converted.

    Neither are elements that are converted back: scores of experts, before a softmax of the largest ones."""
    cast = graph.op(operand(op))
    if _converts(graph, cast) != "widens":
        return None
    readers, narrow = graph.users(op.value) if op.kind == "TopK" else [], graph.type(operand(cast)).dtype
    if any(u.kind != "Cast" or u.attrs.to != narrow for u in readers):
        return Miss("the elements are read as well, and would be converted afterwards")

    def build(patch: Patch) -> None:
        made = patch.add_op(op.kind, [operand(cast), *op.inputs[1:]], op.attrs, outputs=len(op.outputs))
        for at in range(op.kind == "TopK", len(op.outputs)):  # its second output may be absent
            patch.replace(Value(op.id, at), Value(made.id, at))
        for back in readers:
            patch.replace(back.value, made.value)

    return Match((op, *readers), build)


@rule("conversion_before_resize", {"Resize"})
def conversion_before_resize(graph: Graph, op: Op) -> Match | Miss | None:
    """The conversion to fp32 after a Resize that enlarges moves in front of it, as for upsampled outputs."""
    cast = graph.sole_user(op.value)
    if cast is None or _converts(graph, cast) != "widens":
        return None
    before, after = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if before is None or after is None or math.prod(after) <= 2 * math.prod(before):
        return Miss("it does not enlarge its operand enough: converting the result moves no more bytes")

    def build(patch: Patch) -> Value:
        x = patch.add("Cast", [operand(op)], cast.attrs, src=cast.src)
        return patch.add("Resize", [x, *op.inputs[1:]], op.attrs, src=op.src)

    return Match((op, cast), build, cast.value)


def _keeps_last(op: Op) -> bool:
    """Whether a Transpose keeps the last axis last."""
    return op.attrs.perm is not None and op.attrs.perm[-1] == len(op.attrs.perm) - 1


class FuseConversions(RulePass):
    """Runs after the assignment of precisions, which adds the conversions."""

    name = "fuse_conversions"
    rules = (
        PointwiseOfParts(joins=lambda graph, one: not _beside_others(graph, one)),
        Converted(),
        choice_before_conversion,
        conversion_before_resize,  # after choices, which need no conversion
        conversion_after_views,  # after operators have taken in their conversions
    )
