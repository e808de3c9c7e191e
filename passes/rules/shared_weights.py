"""Products of the same softmax weights with several values become one product with the concatenated values.

Differential attention (Ye et al., 2024) writes an attention whose values have twice the features as two attentions with the same
weights, and concatenates their results.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import RESHAPES, in_shape, integers, operand, producer, shape_of
from optdnn.types import normalize_axis

BETWEEN = frozenset({"Where", "Cast", *RESHAPES})
"""Kinds between a softmax and the product with its values."""
_MOST = 4
"""Most operators between a softmax and the product, and the softmax itself."""


@rule("shared_weights", {"Concat"})
def shared_weights(graph: Graph, op: Op) -> Match | Miss | None:
    """``Concat(p v1, p v2)`` along the features becomes ``p Concat(v1, v2)``, if p comes from a softmax."""
    products = [producer(graph, v, {"MatMul"}) for v in op.inputs]
    first, shape = products[0], shape_of(graph, op.value)
    if (
        first is None
        or shape is None
        or len(products) < 2
        or normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1
    ):
        return None
    found = [p for p in products if p is not None and p.inputs[0] == first.inputs[0] and p.attrs == first.attrs]
    if len(found) < len(products) or not _from_softmax(graph, operand(first)):
        return None
    if len({p.id for p in found}) < len(found) or any(graph.sole_user(p.value) is None for p in found):
        return Miss("a product with its weights is used elsewhere")
    values = [operand(p, 1) for p in found]
    sizes = [shape_of(graph, v) for v in values]
    if any(s is None or s[:-1] != (sizes[0] or ())[:-1] for s in sizes):
        return Miss("the values of its products have different leading axes")

    def build(patch: Patch) -> Value:
        return patch.add("MatMul", [first.inputs[0], _side_by_side(graph, patch, values)], first.attrs)

    return Match((op, *found), build)


def _from_softmax(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is the result of a softmax, possibly after masks, casts and reshapes."""
    for _ in range(_MOST):
        op = graph.op(value)
        if op.kind not in BETWEEN:
            return op.kind == "Softmax"
        value = operand(op, 2) if op.kind == "Where" else operand(op)
    return False


def _side_by_side(graph: Graph, patch: Patch, values: Sequence[Value]) -> Value:
    """Add a Concat of the values along the last axis. If all heads are repeated in the same way, it comes before the repetition."""
    ops, shape = [graph.op(v) for v in values], graph.type(values[0]).dims
    width = sum(graph.type(v).dims[-1] for v in values)
    if not _moved_alike(graph, ops):
        return patch.add("Concat", list(values), ConcatAttrs(len(shape) - 1))
    inner = _side_by_side(graph, patch, [operand(op) for op in ops])
    if ops[0].kind == "Expand":
        sizes = [d for d in (*shape[:-1], width) if isinstance(d, int)]
        return patch.add("Expand", [inner, integers(patch, sizes, "shape")])
    return in_shape(patch, inner, (*shape[:-1], width))


def _moved_alike(graph: Graph, ops: Sequence[Op]) -> bool:
    """Whether the ``ops`` are all Reshapes or all Expands between the same shapes, and keep the last axis."""
    if len({op.id for op in ops}) < len(ops) or len({op.kind in RESHAPES for op in ops}) > 1:
        return False
    if any(op.kind not in RESHAPES | {"Expand"} for op in ops):
        return False
    shapes = [(shape_of(graph, operand(op)), op.outputs[0].type.shape) for op in ops]
    if any(s is None or not s or not all(isinstance(d, int) and d for d in s) for pair in shapes for s in pair):
        return False
    return len({(a[:-1], b[:-1]) for a, b in shapes if a and b}) == 1 and all(
        a[-1] == b[-1] for a, b in shapes if a and b
    )
