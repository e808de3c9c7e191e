"""Quantized values beyond 65504, where fp16 ends: what computes and rounds them stays in fp32.

ONNX Runtime's tools also quantize the sum of attention's scores and a causal mask of -3.4e38. Its scale is 2.7e36: all scores are
rounded to 0, and only the mask is left. In fp16 the mask would be -65504, which is rounded to 0, too. Masks that are not quantized
saturate and lose nothing.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.passes.support.facts import is_pointwise
from optdnn.passes.support.guards import Argument, Guards, Stage, StageId, moves, nodes
from optdnn.passes.support.overflows import BOUNDS
from optdnn.passes.support.precision_report import FP16_LARGEST

STEPS = 128.0
"""A scale times this many steps is the largest value of int8."""


def large_scales(graph: Graph) -> Guards:
    """The operators that compute, round or restore values whose scale is too large for fp16. Restored values saturate."""
    stages = dict(nodes(graph))
    scales = {
        step: _largest(stage.args[1])
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
        elif any(a in reads for a in _carried(stage) if isinstance(a, tuple)):
            large.add(step)
    return Guards(found, {stages[i].op.id for i in scales if stages[i].kind == "DequantizeLinear"})


def _filled(stages: dict[StageId, Stage]) -> set[StageId]:
    """The stages that put a large constant into their results."""
    return {i for i, s in stages.items() if any(_largest(a) > FP16_LARGEST for a in _carried(s))}


def _carried(stage: Stage) -> tuple[Argument, ...]:
    """The operands that its result may be as large as. A product's result may be as large as what its epilogue adds."""
    if stage.kind in {*BOUNDS, "QuantizeLinear"}:
        return ()
    if is_pointwise(stage.op) or moves(stage):
        return stage.args
    epilogue = getattr(stage.op.attrs, "epilogue", ())
    if not epilogue or any(s.kind in BOUNDS for s in epilogue):
        return ()
    return stage.args[stage.op.definition.arity :]


def _sources(reads: list[StageId], stages: dict[StageId, Stage], large: set[StageId]) -> set[int]:
    """The operators that compute these values from large ones."""
    seen: set[StageId] = set()
    while reads:
        step = reads.pop()
        if step not in seen:
            seen.add(step)
            reads += [a for a in stages[step].args if isinstance(a, tuple) and a in large]
    return {stages[s].op.id for s in seen}


def _largest(a: Argument) -> float:
    """The largest finite magnitude of a constant operand of floats; 0 if it is none."""
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
        return 0.0
    size = np.abs(a)
    return float(np.max(size, where=np.isfinite(size), initial=0.0))
