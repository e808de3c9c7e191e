"""Engines for ranges of shapes on targets whose programs are for fixed shapes: one plan per shape.

Plans for the optima of the profiles come with the engine. A plan for another shape inside of a profile is made when such
inputs first occur, by the planner that the engine was loaded with. Each context keeps the state (buffers, CUDA graphs) of the
shapes that it ran last. All plans of an engine share their constants, and the plans of a context share one arena.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from optdnn.errors import RunError
from optdnn.runtime.contexts.base import BaseContext, Runner
from optdnn.runtime.contexts.dlpack import on_gpu
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.state import Binding
from optdnn.runtime.file.validate import validate
from optdnn.runtime.plans.runners import Dispatching, open_plan, with_pool
from optdnn.runtime.program import Dynamic, Program, known_sizes
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import TensorSpec

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shape of each input, in order."""
PLANS = 64
"""The most plans that an engine keeps in addition to those in its file; the least recently used is dropped first."""


class PlansRunner(Runner):
    """An engine of several plans, shared by threads."""

    def __init__(self, program: Program, dynamic: Dynamic, options: LoadOptions):
        self.program, self.dynamic = program, dynamic
        self.signature = Signature(dynamic.inputs, dynamic.outputs, program.profiles)
        self._options = with_pool(program, options)
        self._pool = self._options.pool
        self._lock = threading.Lock()
        first = replace(program, dynamic=None, profiles=())
        self._given = {_shapes_of(p): p for p in (first, *dynamic.plans)}
        self._ready: dict[Shapes, Runner] = {}
        self._made: OrderedDict[Shapes, Runner] = OrderedDict()
        self._being_made: dict[Shapes, threading.Lock] = {}
        self._facts = self.plan(_shapes_of(program)).facts

    def plan(self, shapes: Shapes) -> Runner:
        """The runner for these shapes. Raises RunError if there is no plan and no way to make one."""
        with self._lock:
            if (runner := self._known(shapes)) is not None:
                return runner
            making = self._being_made.setdefault(shapes, threading.Lock())
        with making:  # others may run, or make plans for other shapes, meanwhile
            with self._lock:
                runner = self._known(shapes)
            if runner is not None:
                return runner
            given = self._given.get(shapes)
            program = given if given is not None else self._make(shapes)
            runner = open_plan(program, self._options)
            with self._lock:
                if given is not None:
                    self._ready[shapes] = runner
                else:
                    self._made[shapes] = runner
                    while len(self._made) > PLANS:
                        self._made.popitem(last=False)
                self._being_made.pop(shapes, None)
            return runner

    def _known(self, shapes: Shapes) -> Runner | None:
        if shapes in self._made:
            self._made.move_to_end(shapes)
        return self._ready.get(shapes) or self._made.get(shapes)

    def program_for(self, feeds: Mapping[str, Any]) -> Program:
        """Raises InputError for sizes outside of the profiles."""
        arrays = self.signature.arrays(feeds)
        self.signature.sizes(arrays)
        return self.plan(tuple(a.shape for a in arrays)).program

    def _make(self, shapes: Shapes) -> Program:
        named = {s.name: shape for s, shape in zip(self.signature.inputs, shapes, strict=True)}
        shown = ", ".join(f"{n}={'x'.join(map(str, dims)) or 'scalar'}" for n, dims in named.items())
        if self._options.planner is None or self.dynamic.source is None:
            why = "it does not hold its model" if self.dynamic.source is None else "it was loaded without the compiler"
            raise RunError(
                f"the engine holds no plan for {shown}, and cannot make one: {why}",
                hint="build it with these shapes as a separate profile: another --shape "
                + " --shape ".join(shown.split(", ")),
            )
        program = self._options.planner(self.program, named, not self._options.simulate, {})
        validate(program)
        if _shapes_of(program) != shapes:
            raise RunError(f"the plan made for {shown} is for other shapes")
        return program

    def context(self, arena: object = None) -> PlansContext:
        """One thread's own state, with the first plan's context created."""
        return PlansContext(self)


def open_sizes(program: Program, options: LoadOptions) -> Runner:
    """Prepare a valid program of one plan, or of a plan for each shape; see
    :func:`optdnn.runtime.plans.runners.open_plan`."""
    if program.dynamic is not None:
        return PlansRunner(program, program.dynamic, options)
    return open_plan(program, options)


class PlansContext(Dispatching):
    """One thread's state for the plans that it ran last."""

    def __init__(self, runner: PlansRunner):
        pool = runner._pool
        arena = None if pool is None else pool.arena(runner.dynamic.arena_bytes)
        super().__init__(runner.program, runner.signature, arena)
        self._runner = runner
        self._context(_shapes_of(runner.program))

    def _bind(self, given: Binding) -> Any:
        """On a GPU, the call belongs to the plan for these sizes. State may change its size from run to run, on every target."""
        if self._runner._pool is None:
            return super()._bind(given)
        if given.state:
            from optdnn.runtime.cuda.memory.state import Growing, grows

            if grows(self.signature, given.state):
                return Growing(self, given)
        with self._alone:
            context, inputs = self._dispatch(given.inputs)
            return context.bind(inputs, given.outputs, given.state)

    def outputs_for(self, feeds: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        """The outputs of a run on inputs of these shapes. Raises InputError for sizes outside of the profiles."""
        return self._runner.plan(self._checked_shapes(self.signature.in_order(feeds))).signature.outputs

    def _checked_shapes(self, arrays: Sequence[Any]) -> Shapes:
        """The shapes of arrays, on the host or the GPU. Raises InputError for sizes outside of the profiles."""
        shapes = tuple(tuple(a.shape) for a in arrays)
        self.signature.sizes_at(shapes)
        return shapes

    def _dispatch(self, feeds: Mapping[str, Any]) -> tuple[BaseContext, Mapping[str, Any]]:
        """Raises InputError for sizes outside of the profiles."""
        if isinstance(feeds, Mapping) and any(on_gpu(a) for a in feeds.values()):
            return self._context(self._checked_shapes(self.signature.in_order(feeds))), feeds
        arrays = self.signature.arrays(feeds)
        named = {s.name: a for s, a in zip(self.signature.inputs, arrays, strict=True)}
        return self._context(self._checked_shapes(arrays)), named

    def _context(self, shapes: Shapes) -> BaseContext:
        return self._context_of(shapes, lambda: self._runner.plan(shapes))


def _shapes_of(program: Program) -> Shapes:
    return tuple(known_sizes(spec.shape) for spec, _ in program.inputs)
