"""Sums of products of integers, which exceed fp16 before they are scaled (ONNX Runtime's dynamic quantization).

An example is ``float(a8 @ b8) * scale``. A sum of three products of 8-bit numbers may already exceed 65504, and a product of two
scales may be subnormal in fp16. So these stay in fp32; a pointwise operator converts in its registers, and stores fp16.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.guards import Stage, StageId, moves, nodes
from optdnn.types import INT32, INT64

SUMS = frozenset({"ConvInteger", "MatMulInteger"})
COMPARES = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
CARRIES = frozenset(
    {"Abs", "Add", "Identity", "Max", "Min", "Neg", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Sub"}
)
"""Kinds whose result is as large as a sum that they read, besides ops that only move elements."""


def integer_sums(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for operators that convert, carry or scale such sums, and that compute a scale.

    Integers that are computed from sums are just as large, and so are floats until they are scaled.
    """
    if SUMS.isdisjoint(graph.kinds()):
        return {}
    stages = dict(nodes(graph))
    integers, sums, scaled = set[StageId](), set[StageId](), set[StageId]()
    found: dict[int, str] = {}
    for step, stage in stages.items():
        args = [a for a in stage.args if isinstance(a, tuple)]
        of_integers = not integers.isdisjoint(args)
        converts = of_integers and stage.kind == "Cast"
        scales = stage.kind in ("Mul", "Div") and not (sums | scaled).isdisjoint(args)
        if stage.kind in SUMS or (of_integers and not converts and _stays_large(stage)):
            integers.add(step)
        elif scales:
            scaled.add(step)
        elif converts or ((stage.kind in CARRIES or moves(stage)) and not sums.isdisjoint(args)):
            sums.add(step)
        if step not in sums | scaled:
            continue
        factors = (stages[a].op for a in args if scales and a in stages and a not in sums | scaled)
        for op in (stage.op, *(op for op in factors if is_pointwise(op))):
            found.setdefault(op.id, "it scales sums of integers, which leave fp16's range")
    return found


def _stays_large(stage: Stage) -> bool:
    """Whether the results of a stage that reads large integers may be large integers."""
    if stage.kind == "Narrow":  # the type of a cast within a fused operator is not known here
        return stage.op.outputs[0].type.dtype in (INT32, INT64) or stage.op.kind == "Pointwise"
    return stage.kind not in COMPARES
