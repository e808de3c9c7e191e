"""The expected times of a plan's steps, as engines record them: measured in tuning, otherwise predicted.

``meta["step_times"]`` is ``{"model": NAME, "steps": [[us, least_us, source], ...]}`` in the order of the steps. ``us``: microseconds.
``least_us``: the least time of the step's work, its roofline (None on the CPU). ``source``: "measured" or "predicted". ``model``: the
GPU for which times and rooflines were predicted; for older architectures the cost model is an H200's.
:func:`optdnn.runtime.cuda.measuring.expected.expected_cliffs` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from optdnn.lowering.host import copy_us
from optdnn.lowering.lanes import load_of
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.cuda.measuring.expected import MEASURED, PREDICTED, STEP_TIMES
from optdnn.runtime.cuda.measuring.work import Ceilings, work_of
from optdnn.runtime.program import Plain, Program, Step
from optdnn.runtime.steps.host import TO_HOST


def with_step_times(
    program: Program, gpu: GpuFacts, seconds: Mapping[int, float], measured: Collection[int]
) -> Program:
    """The program with the record. ``seconds``: known times by step; ``measured``: the steps whose time was measured on ``gpu``."""
    model = fitted(gpu)
    rows: list[Plain] = []
    for k, step in enumerate(program.steps):
        if step.executor != "cuda":
            rows.append([_off_the_gpu(step, program), None, PREDICTED])
            continue
        here = gpu if k in measured else model
        least = Ceilings.nominal(here).seconds(work_of(step, parse(step, program), program))
        known = seconds.get(k)
        spent = load_of(step, program, model).seconds if known is None else known
        source = MEASURED if k in measured else PREDICTED
        rows.append([round(spent * 1e6, 4), float(f"{least * 1e6:.3g}"), source])
    return replace(program, meta={**program.meta, STEP_TIMES: {"model": model.name, "steps": rows}})


def _off_the_gpu(step: Step, program: Program) -> float:
    """The predicted microseconds of a copy, or of operators on the CPU."""
    if step.executor == "copy":
        buffer = program.buffers[(step.outputs if step.params["to"] == TO_HOST else step.inputs)[0]]
        return round(copy_us(buffer.nbytes or 0), 1)
    host: Any = program.meta["host"]
    src = set(step.src)
    rows = [o for o in host["operators"] if src & set(o["nodes"])]
    own = [
        o for o in rows if o["kind"] == step.params.get("kind") and set(o["nodes"]) == src
    ]  # several may come from one node
    return round(sum(float(o["us"]) for o in own[:1] or rows), 1)
