"""Engines for GPUs with shape inputs (sizes, axes or positions): plans for their values, made when a value first occurs.

Such an input is read on the host. In the plan for its value it is a constant: sizes that follow from it are known, and no step
runs on the CPU because of it. The engine's own program is correct for all values, and runs values without a plan. So an input that
changes with every call (such as a counter of steps) does not start the compiler each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from optdnn.errors import InputError, OptdnnError
from optdnn.runtime.contexts.base import BaseContext, Runner
from optdnn.runtime.contexts.dlpack import import_cupy, on_gpu
from optdnn.runtime.contexts.state import Binding
from optdnn.runtime.file.validate import validate
from optdnn.runtime.plans.by_shape import open_sizes
from optdnn.runtime.plans.runners import Dispatching, with_pool
from optdnn.runtime.program import ByValue, Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array

Key: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[bytes, ...]]
"""The shape of each input, and the elements of each shape input."""
PLANS = 16
"""The most plans by value of an engine; further values run its own program."""
SEEN = 1024
"""The most values without a plan that are remembered: the first value gets a plan immediately, others on their second
occurrence."""


class ByValueRunner(Runner):
    """An engine with plans by value, shared by threads."""

    def __init__(self, program: Program, by_value: ByValue, options: LoadOptions):
        self.program, self.by_value = program, by_value
        self._options = options = with_pool(program, options)
        self.on_gpu = options.pool is not None
        self.general: Runner = open_sizes(replace(program, by_value=None), options)
        self.signature, self._facts = self.general.signature, self.general.facts
        self.plans: dict[Key, Runner] = {}
        self.refused: dict[Key, str] = {}
        """Values for which no plan could be made, with the reason: the engine's own program runs them, or raises the error."""
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()

    def context(self, arena: object = None) -> ByValueContext:
        """One thread's own state, with the context of the engine's own program created."""
        return ByValueContext(self)

    def program_for(self, feeds: Mapping[str, Any]) -> Program:
        key = self.key(feeds)
        plan = None if key is None else self.plan(key)
        if plan is not None:
            return plan.program
        return self.program if self.program.dynamic is None else self.general.program_for(feeds)

    def key(self, feeds: Mapping[str, Any]) -> Key | None:
        """The key of the plan for these inputs. None if they do not fit the signature: running them then raises the error.

        Raises InputError for sizes outside of the profiles.
        """
        specs = self.signature.inputs
        if not isinstance(feeds, Mapping) or feeds.keys() != {s.name for s in specs}:
            return None
        values: list[bytes] = []
        shapes: list[tuple[int, ...]] = []
        for spec in specs:
            given = feeds[spec.name]
            if spec.name in self.by_value.inputs:
                given = host_array(given)
                if given.dtype != spec.dtype or given.shape != spec.shape:
                    return None
                values.append(given.tobytes())
            shapes.append(tuple(np.shape(given) if not hasattr(given, "shape") else given.shape))
        self.signature.sizes_at(shapes)
        return tuple(shapes), tuple(values)

    def plan(self, key: Key) -> Runner | None:
        """The plan for a value; None if the engine's own program runs it."""
        with self._lock:
            plan = self.plans.get(key)
            if plan is not None or key in self.refused or len(self.plans) >= PLANS or self._options.planner is None:
                return plan
            if (self.plans or self.refused or self._seen) and key not in self._seen:
                self._seen[key] = None
                while len(self._seen) > SEEN:
                    self._seen.popitem(last=False)
                return None
            if not self._making.acquire(blocking=False):
                return None  # another thread makes one: this one does not wait
        try:
            return self._make(key)
        finally:
            self._making.release()

    def _make(self, key: Key) -> Runner | None:
        specs = self.signature.inputs
        shapes, raw = key
        sized = {s.name: shape for s, shape in zip(specs, shapes, strict=True)}
        types = {s.name: s.dtype for s in specs}
        wanted = [s.name for s in specs if s.name in self.by_value.inputs]
        values = {
            name: np.frombuffer(data, types[name]).reshape(sized[name]) for name, data in zip(wanted, raw, strict=True)
        }
        assert self._options.planner is not None
        try:
            program = self._options.planner(self.program, sized, not self._options.simulate, values)
            validate(program)
            runner = open_sizes(program, self._options)
        except OptdnnError as error:
            with self._lock:
                self.refused[key] = str(error)
            return None
        with self._lock:
            self.plans[key] = runner
        return runner


def open_runner(program: Program, options: LoadOptions) -> Runner:
    """Prepare any valid program. Raises EngineError for a target that this version cannot run, MissingDependency."""
    if program.by_value is not None:
        return ByValueRunner(program, program.by_value, options)
    return open_sizes(program, options)


class ByValueContext(Dispatching):
    """One thread's state for the plans that it ran.

    Shape inputs may be on the host wherever the other inputs are. If they are on the GPU, a run waits for them.
    """

    most = PLANS

    def __init__(self, runner: ByValueRunner):
        super().__init__(runner.program, runner.signature, runner._options.pool.arena(0) if runner.on_gpu else None)
        self._runner = runner
        self._general = runner.general.context()

    def _bind(self, given: Binding) -> Any:
        """With state on a GPU, the call belongs to the program that is correct for all values, and all arrays are on the GPU."""
        if not self._runner.on_gpu:
            return super()._bind(given)
        if given.state:
            return self._general.bind(given.inputs, given.outputs, given.state)
        return BoundByValue(self, given)

    def _dispatch(self, feeds: Mapping[str, Any]) -> tuple[BaseContext, Mapping[str, Any]]:
        """The inputs of the plan: without those that are constants in it."""
        key = self._runner.key(feeds)
        plan = None if key is None else self._runner.plan(key)
        if plan is None:
            return self._general, self._on_gpu(feeds)
        context = self._context_of(key, lambda: plan)
        return context, {n: a for n, a in feeds.items() if n not in self._runner.by_value.inputs}

    def _on_gpu(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs where the engine's own program expects them: shape inputs go to the GPU if the others are there."""
        if not self._runner.on_gpu or not isinstance(feeds, Mapping):
            return feeds
        there = {name: on_gpu(a) for name, a in feeds.items()}
        if not any(there.values()):
            return feeds
        moved = [n for n in self._runner.by_value.inputs if n in feeds and not there[n]]
        cupy = import_cupy("to hand on a shape input") if moved else None
        return {n: cupy.asarray(a) if n in moved else a for n, a in feeds.items()}  # type: ignore[union-attr]


class BoundByValue:
    """A call on fixed arrays on the GPU. Each run reads the shape inputs; if one has changed, the call is bound again.
    ``outputs``: name -> array of the last run."""

    def __init__(self, context: ByValueContext, given: Binding):
        self._context, self._inputs, self._outputs = context, dict(given.inputs), given.outputs
        self._bind()

    def _bind(self) -> None:
        context, feeds = self._context._dispatch(self._inputs)
        self._bound = context.bind(feeds, self._outputs)
        self._read = self._values()
        self.outputs: dict[str, Any] = self._bound.outputs

    def _values(self) -> tuple[bytes, ...]:
        names = self._context._runner.by_value.inputs
        return tuple(host_array(self._inputs[n]).tobytes() for n in names if n in self._inputs)

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream``; see the plan's own binding."""
        if self._values() != self._read:
            self._bind()
        results: dict[str, Any] = self._bound.run(stream)
        return results


def host_array(array: Any) -> Array:
    """An array in host memory, copied if it is on the GPU. Raises InputError if it cannot be read."""
    if isinstance(array, np.ndarray):
        return array
    try:
        if not on_gpu(array):
            return np.asarray(array)
    except Exception as error:  # whatever a foreign __array__ raises
        raise InputError(f"a {type(array).__name__} cannot be read as an array: {error}") from error
    cupy = import_cupy("to read a shape input; or give it as a NumPy array")
    interface = hasattr(array, "__cuda_array_interface__")
    copied: Array = cupy.asnumpy(cupy.asarray(array) if interface else cupy.from_dlpack(array))
    return copied
