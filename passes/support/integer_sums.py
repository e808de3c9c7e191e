"""Sums of products of integers, which leave fp16's range before their scale brings them back (ONNX Runtime's dynamic quantization).

``float(a8 @ b8) * scale``: three products of two 8-bit numbers may exceed 65504 already, and a product of two scales may be
subnormal in fp16. A pointwise operator converts in its registers, and stores the result as fp16.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph
from optdnn.passes.fuse_pointwise import is_pointwise
from optdnn.passes.support.guards import StageId, nodes

SUMS = frozenset({"ConvInteger", "MatMulInteger"})


def integer_sums(graph: Graph) -> dict[int, str]:
    """Op id -> the reason, for operators that convert such sums, that scale them, and that compute a scale."""
    if SUMS.isdisjoint(graph.kinds()):
        return {}
    stages = dict(nodes(graph))
    sums: set[StageId] = set()
    found: dict[int, str] = {}
    for step, stage in stages.items():
        args = [a for a in stage.args if isinstance(a, tuple)]
        converts = stage.kind == "Cast" and any(graph.op(a[0]).kind in SUMS for a in args)
        if not converts and not (stage.kind in ("Mul", "Div") and sums.intersection(args)):
            continue
        sums.add(step)
        scales = (stages[a].op for a in args if not converts and a in stages and a not in sums)
        for op in (stage.op, *(op for op in scales if is_pointwise(op))):
            found.setdefault(op.id, "it scales sums of integers, which leave fp16's range")
    return found
