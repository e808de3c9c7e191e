"""Quantized values beyond 65504, where fp16 ends: what computes and rounds them stays in fp32.

ONNX Runtime's tools also quantize the sum of attention's scores and a causal mask of -3.4e38. Its scale is 2.7e36: all scores are
rounded to 0, and only the mask is left. In fp16 the mask would be -65504, which is rounded to 0, too. Masks that are not quantized
saturate and lose nothing.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.guards import Guards, Stage, StageId, moves, nodes
from optdnn.passes.support.overflows import BOUNDS
from optdnn.passes.support.precision_report import FP16_LARGEST

STEPS = 128.0
"""A scale times this many steps is the largest value of int8."""


def large_scales(graph: Graph) -> Guards:
    """The operators that compute, round or restore values whose scale is too large for fp16. Restored values saturate."""
    stages = dict(nodes(graph))
    scales = {
        step: _largest(stage, 1)
        for step, stage in stages.items()
        if stage.kind in ("DequantizeLinear", "QuantizeLinear")
    }
    scales = {step: scale for step, scale in scales.items() if scale * STEPS > FP16_LARGEST}
    if not scales:
        return Guards({})
    found = {
        stages[i].op.id: f"its scale {s:.3g} is too large for fp16, which ends at 65504" for i, s in scales.items()
    }
    large = {step for step in scales if stages[step].kind == "DequantizeLinear"} | _filled(stages)
    for step, stage in stages.items():
        reads = [a for a in stage.args if isinstance(a, tuple) and a in large]
        if step in scales and stage.kind == "QuantizeLinear":
            for i in _sources(reads, stages, large):
                found.setdefault(i, "it computes a value whose scale is too large for fp16")
        elif reads and _carries(stage):
            large.add(step)
    return Guards(found, {stages[i].op.id for i in scales if stages[i].kind == "DequantizeLinear"})


def _filled(stages: dict[StageId, Stage]) -> set[StageId]:
    """The stages that put a large constant into their results."""
    carrying = {i: s for i, s in stages.items() if _carries(s)}
    return {i for i, s in carrying.items() if any(_largest(s, slot) > FP16_LARGEST for slot in range(len(s.args)))}


def _carries(stage: Stage) -> bool:
    """Whether its result may be as large as its operands."""
    return stage.kind not in {*BOUNDS, "QuantizeLinear"} and (is_pointwise(stage.op) or moves(stage))


def _sources(reads: list[StageId], stages: dict[StageId, Stage], large: set[StageId]) -> set[int]:
    """The operators that compute these values from large ones."""
    seen: set[StageId] = set()
    while reads:
        step = reads.pop()
        if step not in seen:
            seen.add(step)
            reads += [a for a in stages[step].args if isinstance(a, tuple) and a in large]
    return {stages[s].op.id for s in seen}


def _largest(stage: Stage, slot: int) -> float:
    """The largest finite magnitude of a constant operand of floats; 0 if it is none."""
    a = stage.args[slot] if slot < len(stage.args) else None
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
        return 0.0
    size = np.abs(a)
    return float(np.max(size, where=np.isfinite(size), initial=0.0))
