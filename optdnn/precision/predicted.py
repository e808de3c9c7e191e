"""Programs that are lowered only for the times that the cost model predicts: for GPUs that are not present, and before a choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optdnn.config import BuildOptions
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.measuring.expected import STEP_TIMES
from optdnn.runtime.program import Program


def lowered(graph: Graph, options: BuildOptions, gpu: GpuFacts, constants: ConstantCache | None = None) -> Program:
    """The program of a graph with precisions that the cost model chooses, not compiled."""
    from optdnn.lowering.cuda import lower_cuda  # with all kernel families, which builds for the CPU do not need

    quick = replace(options, tactics="heuristic", no_cubins=True, workspace=None, memory_limit=None)
    return lower_cuda(graph, quick, gpu, {}, constants=constants)


def microseconds(program: Program) -> float:
    """The predicted time of a run: of its lanes, if it has several."""
    lanes: Any = program.meta.get("streams", {})
    if program.lanes and "predicted_us" in lanes:
        return float(lanes["predicted_us"])
    return sum(step_times(program))


def step_times(program: Program) -> list[float]:
    """The predicted microseconds of each step."""
    rows: Any = program.meta[STEP_TIMES]
    return [float(us) for us, *_ in rows["steps"]]
