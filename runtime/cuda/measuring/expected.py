"""The cliffs according to an engine's own record of its steps' times. No GPU is needed.

A build records for each step the time that its plan expects, and the least time of its work on the GPU planned for
(``optdnn.lowering.step_times``). Measured times come from tuning. ``optdnn bench --profile`` measures the real time of a run.
"""

from __future__ import annotations

from typing import Any

from optdnn.runtime.cuda.measuring.cliffs import cliffs
from optdnn.runtime.program import Plain, Program

STEP_TIMES = "step_times"
"""The key of ``Program.meta`` with the record: ``{"model": NAME, "steps": [[us, least_us or None, source], ...]}``."""
MEASURED, PREDICTED = "measured", "predicted"
"""The sources of a step's time: tuning, or the cost model."""


def expected_steps(program: Program) -> list[dict[str, Plain]]:
    """The rows of a profile (:func:`~optdnn.runtime.cuda.measuring.cliffs.cliffs`) with the recorded times, each with its
    ``source``.

    Empty if an engine has no record: it is for another target, or from an older version.
    """
    record: Any = program.meta.get(STEP_TIMES)
    if record is None:
        return []
    total = max(sum(us for us, _, _ in record["steps"]), 1e-9)
    rows: list[dict[str, Plain]] = []
    for k, (step, (us, least, source)) in enumerate(zip(program.steps, record["steps"], strict=True)):
        rows.append({
            "step": k, "src": list(step.src), "tactic": step.params.get("tactic", ""), "executor": step.executor, "us": us,
            "share": us / total, "roofline": None if least is None else least / max(us, 1e-9), "source": source,
        })  # fmt: skip
    return rows


def expected_cliffs(program: Program) -> list[dict[str, Plain]]:
    """The cliffs by the recorded times, the largest possible gain first."""
    return cliffs(expected_steps(program), program)
