"""Operators that a launch of another one may take along: the pool behind a convolution, the mean before a product."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op

TAKE_MEANS = False
"""Whether products take along the mean before them (:mod:`.pool_gemv`). The first form took 1.4 us longer than two launches in
ResNet-50 at batch 1 and 2.4 us in MobileNetV2, since a thread's pixels came one after the other; with all of them in flight it has not
been measured."""
KEEP = frozenset({"Flatten", "Reshape", "Squeeze", "Layout"})
"""Kinds that leave the elements of an image of one position as they lie."""


def max_pool_behind(graph: Graph, op: Op) -> Op | None:
    """The max pool that is all that reads the result."""
    user = graph.sole_user(op.value)
    return user if user is not None and user.kind == "MaxPool" else None


def mean_before(graph: Graph, op: Op) -> Op | None:
    """The global average pool whose means are the rows of a product, and that nothing else reads."""
    source = op.inputs[0] if op.kind in ("Gemm", "MatMul") else None
    if source is None:
        return None
    rows, before = graph.type(source).shape, graph.op(source)
    while before.kind in KEEP and len(graph.uses(source)) == 1 and before.inputs[0] is not None:
        source = before.inputs[0]
        before = graph.op(source)
    if before.kind != "GlobalAveragePool" or len(graph.uses(source)) != 1:
        return None
    means = before.outputs[0].type.shape
    return before if rows is not None and means is not None and rows == means[:2] else None
