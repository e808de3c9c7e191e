"""Runners: each makes a whole program ready and gives its contexts.

Programs for `cpu` and `reference` run step by step (:mod:`optdnn.runtime.contexts.stepwise`). Programs for a GPU are run as
a whole: their runner module, imported only when a program names it, offers ``prepare(program, options) -> Runner``.
"""

from __future__ import annotations

from importlib import import_module

from optdnn.errors import EngineError
from optdnn.runtime.contexts.base import Runner
from optdnn.runtime.contexts.stepwise import StepRunner
from optdnn.runtime.program import Program, target_of
from optdnn.runtime.steps.executor import LoadOptions, prepare

RUNNERS: dict[str, str] = {
    "cuda": "optdnn.runtime.cuda.runner",
    "simulate": "optdnn.runtime.simulate.runner",
}
"""Family of targets -> the module that runs their programs as a whole."""

STEPWISE = ("cpu", "reference")
"""Targets whose programs run step by step."""


def open_plan(program: Program, options: LoadOptions) -> Runner:
    """Make a valid program of one plan ready. Raises EngineError for a target this version cannot run, MissingDependency."""
    name = target_of(program)
    family = "simulate" if options.simulate else name.family
    if family in STEPWISE:
        return StepRunner(program, prepare(program, options))
    if not name.on_gpu:
        raise EngineError(
            f"the engine is for target {program.target!r}, which has no launches to simulate",
            hint="load it without simulate=True",
        )
    runner: Runner = import_module(RUNNERS[family]).prepare(program, options)
    return runner
