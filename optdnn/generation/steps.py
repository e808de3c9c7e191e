"""Steps of a language model on host arrays: each passes its caches to the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from optdnn.errors import RunError
from optdnn.generation.feeds import Step, feeds_of
from optdnn.generation.ports import Ports
from optdnn.runtime.contexts.sampled import TOKEN
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import memory_bytes
from optdnn.runtime.reference.sampling import sample_token
from optdnn.types import Array


def drawn(ports: Ports, logits: Array, step: Step) -> Array:
    """The next tokens [batch], from logits [batch, length, vocabulary] (or [batch, vocabulary])."""
    if logits.ndim == 3:
        logits = logits[np.arange(len(logits)), step.row if logits.shape[1] > 1 else 0]
    (tokens,) = sample_token(logits, **step.settings.at(step.places))
    return checked(tokens[:, 0])


def checked(tokens: Array) -> Array:
    """The tokens. Raises RunError if a sequence has none."""
    if (tokens < 0).any():
        raise RunError(
            f"the logits of sequence {int(np.argmax(tokens < 0))} hold NaN or infinity: there is no next token",
            hint="optdnn verify ENGINE --model MODEL finds where an engine leaves the range of its precision",
        )
    return tokens


def one_by_one(run: Callable[[Step], Array], step: Step, count: int) -> Iterator[Array]:
    """The tokens of ``count`` steps of one token; the host passes each token to the next step."""
    for k in range(count):
        tokens = run(step)
        yield tokens
        if k + 1 < count:
            step = Step(tokens[:, None], step.held + 1, step.row, step.settings)


class HostSteps:
    """Caches in host memory, for every target. ``capacity``: their positions; None if they grow."""

    def __init__(self, engine: Engine, ports: Ports, batch: int, capacity: int | None):
        self.ports, self.batch, self.capacity = ports, batch, capacity
        self._context = engine.context()
        shapes = {c.input.name: sized(c.input, batch, c.axis, capacity or 0) for c in ports.caches}
        size = sum(prod(shapes[c.input.name]) * c.input.dtype.itemsize for c in ports.caches)
        room = memory_bytes()
        # Zeros take no memory until they are used: the machine would run out later.
        if room is not None and size > room:
            raise RunError(
                f"the caches of {capacity} positions take {size / 2**30:.1f} GiB; the machine has {room / 2**30:.1f} GiB",
                hint="ask for fewer tokens, or for fewer sequences at once",
            )
        self._caches = {c.input.name: np.zeros(shapes[c.input.name], c.input.dtype) for c in ports.caches}
        self._spare: dict[str, Array] = {}

    def run(self, step: Step) -> Array:
        """The next tokens [batch]."""
        ports = self.ports
        held = 0 if step.seen is None else step.seen.shape[1]
        feeds = feeds_of(ports, step, self.capacity if self.capacity is not None else held + step.length)
        out = {c.output.name: self._spare[c.input.name] for c in ports.caches if c.input.name in self._spare}
        results: dict[str, Any] = self._context.run({**feeds, **self._caches}, out or None)
        for c in ports.caches:
            before, after = self._caches[c.input.name], results[c.output.name]
            if before.shape == after.shape:
                self._spare[c.input.name] = before
            self._caches[c.input.name] = after
        return self._next_tokens(results, step)

    def _next_tokens(self, results: dict[str, Any], step: Step) -> Array:
        """The tokens in a step's results, or tokens drawn from their logits."""
        if self.ports.logits is not None:
            return drawn(self.ports, results[self.ports.logits.name], step)
        return checked(results[TOKEN][:, 0])

    def following(self, step: Step, count: int) -> Iterator[Array]:
        """The tokens of ``count`` steps of one token, beginning with ``step``; each step reads the token of the previous one."""
        return one_by_one(self.run, step, count)

    def enlarged(self, engine: Engine, capacity: int) -> HostSteps:
        """The same steps with caches of a larger capacity, with the contents of the present ones."""
        other = HostSteps(engine, self.ports, self.batch, capacity)
        for c in self.ports.caches:
            before = self._caches[c.input.name]
            other._caches[c.input.name][first_positions(c.axis, before.shape[c.axis])] = before
        return other


class BoundSteps(HostSteps):
    """Caches of a fixed capacity that stay with the ranks of an engine of several devices."""

    def __init__(self, engine: Engine, ports: Ports, batch: int, capacity: int | None):
        super().__init__(engine, ports, batch, capacity)
        self._bound: Any = None
        self._inputs: dict[str, Array] = {}

    def run(self, step: Step) -> Array:
        """The next tokens [batch]."""
        ports = self.ports
        feeds = feeds_of(ports, step, self.capacity or 0)
        if self._bound is None:
            self._inputs = {name: np.array(a) for name, a in feeds.items()}
            state = {c.output.name: c.input.name for c in ports.caches}
            self._bound = self._context.bind({**self._inputs, **self._caches}, state=state)
            self._caches = {}
        for name, array in feeds.items():
            np.copyto(self._inputs[name], array)
        results: dict[str, Any] = self._bound.run()
        return self._next_tokens(results, step)


def first_positions(axis: int, size: int) -> tuple[slice, ...]:
    """The index of the first ``size`` positions of a cache."""
    return (*[slice(None)] * axis, slice(size))


def sized(spec: Any, batch: int, axis: int, positions: int) -> tuple[int, ...]:
    """The shape of a cache of this many positions. Other symbolic axes are the batch."""
    return tuple(positions if k == axis else d if isinstance(d, int) else batch for k, d in enumerate(spec.shape))
