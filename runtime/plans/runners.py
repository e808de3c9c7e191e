"""Prepared programs of one plan, and contexts that pass a run to the context of a plan.

Programs for `cpu` and `reference` run step by step (:mod:`optdnn.runtime.contexts.stepwise`). Programs for a GPU run as
a whole: their runner module, imported only if a program names it, offers ``prepare(program, options) -> Runner``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from optdnn.errors import EngineError
from optdnn.runtime.contexts.base import BaseContext, Runner
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.stepwise import StepRunner
from optdnn.runtime.program import Program, target_of
from optdnn.runtime.steps.executor import LoadOptions, prepare
from optdnn.types import Array

RUNNERS: dict[str, str] = {
    "cuda": "optdnn.runtime.cuda.runner",
    "simulate": "optdnn.runtime.simulate.runner",
}
"""Family of targets -> the module that runs their programs as a whole."""

STEPWISE = ("cpu", "reference")
"""Targets whose programs run step by step."""


def open_plan(program: Program, options: LoadOptions) -> Runner:
    """Prepare a valid program of one plan. Raises EngineError for a target that this version cannot run, MissingDependency."""
    name = target_of(program)
    family = "simulate" if options.simulate else name.family
    if family in STEPWISE:
        return StepRunner(program, prepare(program, options))
    if not name.on_gpu:
        raise EngineError(
            f"the engine is for target {program.target!r}, which has no launches to simulate",
            hint="load it without simulate=True (--simulate)",
        )
    runner: Runner = import_module(RUNNERS[family]).prepare(program, options)
    return runner


def with_pool(program: Program, options: LoadOptions) -> LoadOptions:
    """The options with the GPU memory that all plans of an engine share, if it runs on a GPU."""
    if options.pool is not None or options.simulate or target_of(program).family != "cuda":
        return options
    from optdnn.runtime.cuda.memory.shared import Pool

    return replace(options, pool=Pool())


class Dispatching(BaseContext):
    """A context that passes each run to the context of a plan, and keeps the contexts of the plans that it ran last.

    ``arena``: GPU memory that the plans share.
    """

    most = 8
    """The most plans for which a context keeps buffers and graphs."""

    def __init__(self, program: Program, signature: Signature, arena: Any = None):
        super().__init__(program, signature)
        self._arena = arena
        self.takes_device_arrays = arena is not None
        self._contexts: OrderedDict[Hashable, BaseContext] = OrderedDict()
        """By plan (its shapes), the last used last."""

    def _dispatch(self, feeds: Mapping[str, Any]) -> tuple[BaseContext, Mapping[str, Any]]:
        """The context of a plan, and the inputs that it takes."""
        raise NotImplementedError

    def _context_of(self, key: Hashable, plan: Callable[[], Runner]) -> BaseContext:
        """The context of the plan of this name, created if it is not kept."""
        context = self._contexts.get(key)
        if context is None:
            context = plan().context(self._arena)
            while len(self._contexts) >= self.most:
                self._contexts.popitem(last=False)
            self._contexts[key] = context
        self._contexts.move_to_end(key)
        return context

    def _run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Any]:
        context, feeds = self._dispatch(self.signature.named(feeds))
        return context.run(feeds, out, stream)

    def innermost(self, feeds: Mapping[str, Any]) -> tuple[BaseContext, Mapping[str, Any]]:
        with self._alone:
            context, feeds = self._dispatch(feeds)
        return context.innermost(feeds)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once and time each step of the plan."""
        with self._alone:
            context, feeds = self._dispatch(feeds)
            return context.profile(feeds)
