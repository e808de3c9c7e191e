"""The precisions that each op can have on a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optdnn.config import PACKED_WEIGHTS, ROUNDED_ROWS
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.passes.support.facts import operand
from optdnn.passes.support.packed_products import read_as_floats, why_not_packed
from optdnn.passes.support.precision import ANCHORS, WEIGHTED, key, multiplies, no_fp8, no_integers, no_rounded_rows
from optdnn.target_name import TargetName


@dataclass(frozen=True)
class PrecisionChoice:
    """The precisions that an op can have. ``refused``: other precision -> the reason why the op cannot have it."""

    key: str
    kind: str
    nodes: tuple[str, ...]
    precisions: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)


def choices(graph: Graph, target: str) -> list[PrecisionChoice]:
    """The choices of each op on a target ("cpu", "cuda:sm_90a", …), in topological order.

    An engine for the cpu has one float precision for all of its ops: a plan for it mixes int8 with either fp32 or bf16.
    """
    name = TargetName.parse(target)
    found = []
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        offered, refused = ["fp32"], {}
        if name.on_gpu:
            offered += ["fp16", "bf16"]
            if op.kind not in ANCHORS:
                refused["tf32"] = f"{op.kind} computes no products on tensor cores"
            elif multiplies(target, "tf32"):
                offered.append("tf32")
            else:
                refused["tf32"] = f"there are no tf32 kernels for {name.arch}"
        else:
            offered += ["bf16"]
            refused["fp16"] = "the cpu target has no fp16 arithmetic"
        reason = no_integers(graph, op, target)
        if reason is None:
            offered.append("int8")
        else:
            refused["int8"] = reason
        if not name.on_gpu:
            refused["fp8"] = "fp8 is for GPUs"
        elif (reason := no_fp8(graph, op, target)) is not None:
            refused["fp8"] = reason
        else:
            offered.append("fp8")
        if op.kind in WEIGHTED and (reason := _no_packed(graph, op)) is not None:
            refused |= dict.fromkeys(sorted(PACKED_WEIGHTS), reason)
        elif op.kind in WEIGHTED:
            offered += sorted(PACKED_WEIGHTS - {ROUNDED_ROWS})
            if (reason := no_rounded_rows(target)) is None:
                offered.append(ROUNDED_ROWS)
            else:
                refused[ROUNDED_ROWS] = reason
        found.append(PrecisionChoice(key(op), op.kind, tuple(sorted(op.src)), tuple(offered), refused))
    return found


def _no_packed(graph: Graph, op: Op) -> str | None:
    """The reason why a product can never have packed weights, whatever the precisions of other ops; None if it can."""
    if (reason := why_not_packed(graph, op)) is not None:
        return reason
    users = {use.op for use in graph.uses(operand(op, 1))}
    return read_as_floats(graph, op, {i for i in users if why_not_packed(graph, graph.op(i)) is None})
