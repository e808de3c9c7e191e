"""Engines for ranges of shapes on targets whose programs are for fixed shapes: one plan per shape.

Plans for the optima of the profiles come with the engine; one for any other shape inside of a profile is made when such
inputs are first seen, by the planner that the engine was loaded with. Each context keeps the state (buffers, CUDA graphs) of
the shapes that it ran last; all plans of an engine share their constants, and those of a context one arena.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.program import Dynamic, Plain, Program, target_of, validate
from optdnn.runtime.runner import RunContext, Runner, open_plan
from optdnn.runtime.signature import Shown, Signature
from optdnn.types import Array, TensorSpec

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shape of each input, in order."""
PLANS = 64
"""Plans that an engine keeps ready, those that came with it not counted; the least recently used goes first."""
CONTEXTS = 8
"""Shapes for which a context keeps buffers and graphs."""


class PlansRunner:
    """An engine of several plans, shared by threads."""

    def __init__(self, program: Program, dynamic: Dynamic, options: LoadOptions):
        self.program, self.dynamic = program, dynamic
        self.signature = Signature(dynamic.inputs, dynamic.outputs, program.profiles)
        self._options = options
        self._lock = threading.Lock()
        first = replace(program, dynamic=None, profiles=())
        self._given = {_shapes_of(p): p for p in (first, *dynamic.plans)}
        self._ready: dict[Shapes, Runner] = {}
        self._made: OrderedDict[Shapes, Runner] = OrderedDict()
        self._being_made: dict[Shapes, threading.Lock] = {}
        self._pool = options.pool or (None if options.simulate else _pool(program))
        self.facts: tuple[Mapping[str, Plain], ...] = self.plan(_shapes_of(program)).facts

    def plan(self, shapes: Shapes) -> Runner:
        """The runner for these shapes. Raises RunError where there is no plan and no way to make one."""
        with self._lock:
            found = self._ready.get(shapes) or self._made.get(shapes)
            if found is not None:
                if shapes in self._made:
                    self._made.move_to_end(shapes)
                return found
            making = self._being_made.setdefault(shapes, threading.Lock())
        with making:  # others may run, or make plans for other shapes, meanwhile
            with self._lock:
                found = self._ready.get(shapes) or self._made.get(shapes)
            if found is not None:
                return found
            given = self._given.get(shapes)
            program = given if given is not None else self._make(shapes)
            runner = open_plan(program, replace(self._options, pool=self._pool))
            with self._lock:
                if given is not None:
                    self._ready[shapes] = runner
                else:
                    self._made[shapes] = runner
                    while len(self._made) > PLANS:
                        self._made.popitem(last=False)
                self._being_made.pop(shapes, None)
            return runner

    def program_for(self, feeds: Mapping[str, Any]) -> Program:
        """The plan that runs these inputs. Raises InputError for sizes outside of the profiles."""
        arrays = self.signature.arrays(feeds)
        self.signature.sizes(arrays)
        plan = self.plan(tuple(a.shape for a in arrays))
        return plan.program  # type: ignore[attr-defined, no-any-return]

    def _make(self, shapes: Shapes) -> Program:
        named = {s.name: shape for s, shape in zip(self.signature.inputs, shapes, strict=True)}
        shown = ", ".join(f"{n}={'x'.join(map(str, dims)) or 'scalar'}" for n, dims in named.items())
        if self._options.planner is None or self.dynamic.source is None:
            why = "it does not hold its model" if self.dynamic.source is None else "it was loaded without the compiler"
            raise RunError(
                f"the engine holds no plan for {shown}, and cannot make one: {why}",
                hint="build it with these shapes as a profile of their own: another --shape "
                + " --shape ".join(shown.split(", ")),
            )
        program = self._options.planner(self.program, named, not self._options.simulate, {})
        validate(program)
        if _shapes_of(program) != shapes:
            raise RunError(f"the plan made for {shown} is for other shapes")
        return program

    def context(self) -> PlansContext:
        """One thread's own state, with the first plan's ready."""
        return PlansContext(self)


def open_sizes(program: Program, options: LoadOptions) -> Runner:
    """Make a valid program ready that has one plan, or a plan for each shape; see :func:`optdnn.runtime.runner.open_plan`."""
    if program.dynamic is not None:
        return PlansRunner(program, program.dynamic, options)
    return open_plan(program, options)


class Dispatching(Shown):
    """A context that hands each run to the context of a plan, one at a time."""

    _lock: threading.Lock

    def _dispatch(self, feeds: Mapping[str, Any]) -> tuple[RunContext, Mapping[str, Any]]:
        raise NotImplementedError

    def innermost(self, feeds: Mapping[str, Any]) -> tuple[RunContext, Mapping[str, Any]]:
        """The context of the one plan that runs these inputs, and what of them it takes."""
        with Alone(self._lock):
            context, feeds = self._dispatch(feeds)
        return context.innermost(feeds) if isinstance(context, Dispatching) else (context, feeds)

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None
    ) -> dict[str, Any]:
        """Run once; see :meth:`optdnn.runtime.context.Context.run`."""
        _, signature = self._shown()
        with Alone(self._lock):
            context, feeds = self._dispatch(signature.named(feeds))
            return context.run(feeds, out, stream)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once and time each step of the plan."""
        with Alone(self._lock):
            context, feeds = self._dispatch(feeds)
            return context.profile(feeds)


class PlansContext(Dispatching):
    """One thread's state of the plans that it ran last."""

    def __init__(self, runner: PlansRunner):
        self._runner = runner
        self._lock = threading.Lock()
        pool = runner._pool
        self._arena = None if pool is None else pool.arena(runner.dynamic.arena_bytes)
        self._contexts: OrderedDict[Shapes, RunContext] = OrderedDict()
        self._context(_shapes_of(runner.program))

    def _shown(self) -> tuple[Program, Signature]:
        return self._runner.program, self._runner.signature

    def bind(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        state: Mapping[str, str] | None = None,
    ) -> Any:
        """A call on these arrays, to be repeated; see the plan's own context. On a GPU it is of the plan for these sizes, but
        where state changes its size from run to run, which it may on every target."""
        if self._runner._pool is None:
            from optdnn.runtime.state import Bound

            return Bound(self, self._runner.signature, inputs, outputs, state)
        if state:
            from optdnn.runtime.cuda.memory.growing import Growing, grows

            if grows(self._runner.signature, state):
                return Growing(self, self._runner.signature, inputs, outputs, state)
        with Alone(self._lock):
            context, inputs = self._dispatch(inputs)
            return context.bind(inputs, outputs, state)  # type: ignore[attr-defined]

    def outputs_for(self, feeds: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        """What a run on inputs of these shapes gives. Raises InputError for sizes outside of the profiles."""
        arrays = [
            SimpleNamespace(shape=tuple(a.shape), ndim=len(a.shape)) for a in self._runner.signature.in_order(feeds)
        ]
        self._runner.signature.sizes(arrays)  # type: ignore[arg-type]
        return self._runner.plan(tuple(a.shape for a in arrays)).signature.outputs

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """The shapes that the context holds state for, the last used last."""
        return tuple(self._contexts)

    def _dispatch(self, feeds: Mapping[str, Any]) -> tuple[RunContext, Mapping[str, Any]]:
        """The context for the shapes of ``feeds``. Raises InputError for sizes outside of the profiles."""
        signature = self._runner.signature
        if isinstance(feeds, Mapping) and any(_foreign(a) for a in feeds.values()):
            given = signature.in_order(feeds)
            like: list[Any] = [SimpleNamespace(shape=tuple(a.shape), ndim=len(a.shape)) for a in given]
            signature.sizes(like)
            return self._context(tuple(a.shape for a in like)), feeds
        arrays = signature.arrays(feeds)
        signature.sizes(arrays)
        own = {s.name: a for s, a in zip(signature.inputs, arrays, strict=True)}
        return self._context(tuple(a.shape for a in arrays)), own

    def _context(self, shapes: Shapes) -> RunContext:
        found = self._contexts.get(shapes)
        if found is None:
            runner = self._runner.plan(shapes)
            found = runner.context() if self._arena is None else runner.context(self._arena)  # type: ignore[call-arg]
            while len(self._contexts) >= CONTEXTS:
                self._contexts.popitem(last=False)
            self._contexts[shapes] = found
        self._contexts.move_to_end(shapes)
        return found


class Alone:
    """Refuses a second thread."""

    def __init__(self, lock: threading.Lock):
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RunError(
                "this context is running in another thread", hint="use engine.run, or engine.context() per thread"
            )

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _foreign(array: Any) -> bool:
    """Whether an array lies on a GPU: it is handed on as it is."""
    if isinstance(array, np.ndarray):
        return False
    from optdnn.runtime.cuda.memory.arrays import on_gpu

    return on_gpu(array)


def _shapes_of(program: Program) -> Shapes:
    return tuple(tuple(d for d in spec.shape if isinstance(d, int)) for spec, _ in program.inputs)


def _pool(program: Program) -> Any:
    """What shares memory between the plans of an engine; None on targets that need nothing."""
    if target_of(program).family != "cuda":
        return None
    from optdnn.runtime.cuda.memory.shared import Pool

    return Pool()
