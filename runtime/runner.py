"""Runners: who runs a whole program.

Programs for `cpu` and `reference` run step by step (:mod:`optdnn.runtime.context`). Programs for a GPU are run as a whole: their
runner module, imported only when a program names it, offers ``prepare(program, options) -> Runner``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from optdnn.errors import EngineError
from optdnn.runtime.context import Schedule
from optdnn.runtime.executor import LoadOptions, prepare
from optdnn.runtime.program import Plain, Program, target_of
from optdnn.runtime.signature import Signature
from optdnn.types import Array


class RunContext(Protocol):
    """One thread's own state for running a program."""

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None
    ) -> dict[str, Any]:
        """Run once; see :meth:`optdnn.runtime.context.Context.run`."""

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once and time each step: (outputs, nanoseconds per step of the program)."""


class Runner(Protocol):
    """A program made ready to run, shared by all threads."""

    @property
    def signature(self) -> Signature: ...

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        """Per step, what really runs."""

    def context(self) -> RunContext: ...


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
        return Schedule(program, prepare(program, options))
    if not name.on_gpu:
        raise EngineError(
            f"the engine is for target {program.target!r}, which has no launches to simulate",
            hint="load it without simulate=True",
        )
    runner: Runner = import_module(RUNNERS[family]).prepare(program, options)
    return runner
