"""A tensor is transposed once, if it is also transposed after a pointwise operator with constants or views.

ONNX Runtime moves transposes apart: queries are multiplied by cosines before one Transpose, and by sines after another. With the
heads in front in both products, a rotary embedding has its usual form again.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.rules.transpose import Perm, pays, shape_before, sink_transpose, undo
from optdnn.passes.support.facts import in_shape, is_pointwise, operand, with_rank


@rule("shared_transpose", {"Transpose"}, looks_far=True)
def shared_transpose(graph: Graph, op: Op) -> Match | Miss | None:
    """The Transpose of a pointwise result moves before the operator, if its data are transposed alike for another reader."""
    made, perm = graph.op(operand(op)), op.attrs.perm
    if perm is None or not is_pointwise(made) or made.kind == "Pointwise":
        return None
    given = {v: other for v in made.inputs if v is not None and (other := _transposed(graph, v, perm, op)) is not None}
    if len(given) != 1:
        return None
    (data, other), *_ = given.items()
    if graph.type(data).shape != made.outputs[0].type.shape:
        return None
    if graph.users(made.value) != [op]:
        return Miss(f"the result of {made.name} is also read in its first order")
    others = [v for v in made.inputs if v is not None and v != data]
    if not all(_moves(graph, v, perm) for v in others):
        return Miss(f"{made.name} reads another tensor, which would have to be transposed")
    if isinstance(sink_transpose.function(graph, other), Match) or pays(graph, other, op):
        return None  # they move past their readers

    def build(patch: Patch) -> Value:
        operands = [
            v if v is None else other.value if v == data else _moved(graph, patch, v, perm) for v in made.inputs
        ]
        return patch.add(made.kind, operands, made.attrs, src=made.src | op.src)

    return Match((op, made), build)


def _transposed(graph: Graph, value: Value, perm: Perm, op: Op) -> Op | None:
    """Another Transpose of ``value`` by ``perm``."""
    users = graph.users(value)
    return next((u for u in users if u.kind == "Transpose" and u.attrs.perm == perm and u is not op), None)


def _moves(graph: Graph, value: Value, perm: Perm) -> bool:
    """Whether an operand can be transposed at build time, or by a Reshape."""
    array = graph.constant_value(value)
    if array is not None:
        return array.ndim <= len(perm)
    return shape_before(graph.type(value).shape, undo(perm)) is not None


def _moved(graph: Graph, patch: Patch, value: Value, perm: Perm) -> Value:
    array = graph.constant_value(value)
    if array is not None:
        whole = with_rank(array, len(perm))
        return value if array.size == 1 else patch.constant(np.ascontiguousarray(whole.transpose(perm)), "moved")
    shape = shape_before(graph.type(value).shape, undo(perm))
    assert shape is not None
    return in_shape(patch, value, shape)
