"""Steps of a language model on a GPU: caches, positions and tokens stay there, so a token needs no round trip.

If the engine samples, it writes the token where the next step reads it. The host enqueues steps ahead, with small launches between
them that advance positions, and reads tokens later, after their events have passed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from optdnn.generation.feeds import Step, feeds_of
from optdnn.generation.ports import Ports
from optdnn.generation.steps import checked, drawn, first_positions, one_by_one, sized
from optdnn.runtime.contexts.dlpack import import_cupy
from optdnn.runtime.contexts.sampled import PREFIX, ROW, SETTINGS, TOKEN
from optdnn.runtime.engine import Engine
from optdnn.types import Array, DType

ROWS = 8
"""64-bit counters that are stored together."""
AHEAD = 4
"""Steps that are enqueued before the token of the first one is read."""


class GpuSteps:
    """Caches of fixed capacity in GPU memory.

    A cache that the network updates in place is one array. Other caches are pairs of arrays that take turns, and so are the
    tokens: a step reads one array of the pair and writes the other. Plans for other lengths share all of them.
    """

    def __init__(self, engine: Engine, ports: Ports, batch: int, capacity: int):
        self._cupy = cupy = import_cupy("to keep caches on the GPU")
        self.ports, self.batch, self.capacity = ports, batch, capacity
        self._context = engine.context()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._turn = 0
        self._inputs: dict[int, dict[str, Any]] = {}
        """Length of a step -> its inputs, without the caches and tokens of one row."""
        self._calls: dict[tuple[int, int], tuple[Any, list[tuple[Any, Any]]]] = {}
        """Length and turn -> the bound call, and caches with the arrays that are copied to them after it."""
        with self.stream:
            self._together = cupy.zeros((ROWS, batch + batch % 2), np.int64)  # each row is aligned to 16 bytes
            self._moving, self._used = [self._together], 0
            self._held = self._counter((batch,), np.dtype(np.int64))
            self._caches = self._new_caches()
            self._tokens = [cupy.zeros((batch, 1), np.int64) for _ in range(2)]
        self.stream.synchronize()
        self._mark = cupy.ElementwiseKernel(
            "int64 held, int64 width", "raw T mask", "if (held < width) mask[i * width + held] = 1", "optdnn_mark"
        )

    def _counter(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """Counters, initially zero, that advance by one with each token. 64-bit counters are stored together: one launch advances
        them."""
        size = math.prod(shape)
        if dtype != np.int64 or size > self.batch or self._used == ROWS:
            self._moving.append(self._cupy.zeros(shape, dtype))
            return self._moving[-1]
        self._used += 1
        return self._together[self._used - 1, :size].reshape(shape)

    def _new_caches(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The caches of both turns."""
        cupy, ports = self._cupy, self.ports
        first = {
            c.input.name: cupy.zeros(sized(c.input, self.batch, c.axis, self.capacity), c.input.dtype)
            for c in ports.caches
        }
        in_place = self._in_place({**self._of_length(1), **first})
        alone = {c.input.name for c in ports.caches if in_place.get(c.output.name) == c.input.name}
        return first, {n: a if n in alone else cupy.zeros_like(a) for n, a in first.items()}

    def _empty_inputs(self, length: int) -> dict[str, Any]:
        """Arrays for the inputs of a step of this length. Steps of all lengths share those without an axis for it."""
        cupy, ports, batch = self._cupy, self.ports, self.batch
        made = {ports.tokens.name: cupy.zeros((batch, length), ports.tokens.dtype)}
        if length > 1:
            if ports.positions is not None:
                made[ports.positions.name] = cupy.zeros((batch, length), ports.positions.dtype)
            return {**self._of_length(1), **made}
        if ports.positions is not None:
            made[ports.positions.name] = self._counter((batch, 1), ports.positions.dtype)
        if ports.mask is not None:
            made[ports.mask.name] = cupy.zeros((batch, self.capacity), ports.mask.dtype)
        for c in ports.counters:
            shape = tuple(d if isinstance(d, int) else batch for d in c.spec.shape)
            made[c.spec.name] = self._counter(shape, c.spec.dtype)
        if ports.row:
            made[ROW] = cupy.zeros(batch, np.int64)
        if ports.samples:
            kinds = dict.fromkeys(SETTINGS, np.int64) | dict.fromkeys(("temperature", "top_p"), np.float32)
            made |= {f"{PREFIX}{n}": cupy.zeros(batch, kinds[n]) for n in SETTINGS if n != "position"}
            made[f"{PREFIX}position"] = self._counter((batch,), np.dtype(np.int64))
        return made

    def _of_length(self, length: int) -> dict[str, Any]:
        if length not in self._inputs:
            with self.stream:  # zeros from another stream could overwrite these values
                self._inputs[length] = self._empty_inputs(length)
        return self._inputs[length]

    def _call(self, length: int) -> tuple[Any, list[tuple[Any, Any]]]:
        """The step of this length and turn, ready to be launched, and the copies after it."""
        key = (length, self._turn)
        if key not in self._calls:
            ports, turn = self.ports, self._turn
            inputs = {**self._of_length(length), **self._caches[turn]}
            if length == 1 and ports.tokens.dtype == np.int64:
                inputs[ports.tokens.name] = self._tokens[turn]
            with self.stream:  # logits are allocated on this stream: another stream may still write to its memory
                outputs, copies = self._written(inputs)
                if ports.samples:
                    outputs[TOKEN] = self._tokens[turn ^ 1]
                self._calls[key] = self._context.bind(inputs, outputs), copies
        return self._calls[key]

    def _written(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
        """The destination of a step's caches: another array if its plan, unlike the plan for one token, does not keep them in
        place."""
        in_place = self._in_place(inputs)
        outputs: dict[str, Any] = {}
        copies = []
        for c in self.ports.caches:
            before, after = (self._caches[turn][c.input.name] for turn in (self._turn, self._turn ^ 1))
            if after is before and in_place.get(c.output.name) != c.input.name:
                after = self._cupy.zeros_like(before)
                copies.append((before, after))
            outputs[c.output.name] = after
        return outputs, copies

    def _in_place(self, inputs: dict[str, Any]) -> dict[str, str]:
        """Output -> input of the caches that the plan for these inputs keeps in place."""
        context, _ = self._context.innermost(inputs)
        found: dict[str, str] = getattr(context, "in_place", {})
        return found

    def _put(self, step: Step) -> None:
        """Copy the inputs of a step, except the caches, to the GPU."""
        inputs = self._of_length(step.length)
        for name, array in feeds_of(self.ports, step, self.capacity).items():
            target = inputs[name]
            if name == self.ports.tokens.name and step.length == 1 and self.ports.tokens.dtype == np.int64:
                target = self._tokens[self._turn]
            target.set(np.ascontiguousarray(array), stream=self.stream)
        self._held.set(step.held.astype(np.int64), stream=self.stream)

    def _launch(self, length: int) -> Any:
        """Enqueue one step; the result is its outputs."""
        call, copies = self._call(length)
        outputs = call.run(self.stream)
        with self.stream:
            for cache, written in copies:
                self._cupy.copyto(cache, written)
        self._turn ^= 1
        return outputs

    def run(self, step: Step) -> Array:
        """The next tokens [batch]."""
        self._put(step)
        outputs = self._launch(step.length)
        if self.ports.logits is None:
            return checked(self._tokens[self._turn].get(stream=self.stream)[:, 0])
        logits = outputs[self.ports.logits.name]
        with self.stream:
            if logits.ndim == 3:
                rows = step.row if logits.shape[1] > 1 else np.zeros_like(step.row)
                logits = logits[self._cupy.arange(self.batch), self._cupy.asarray(rows)]
            return drawn(self.ports, logits.get(stream=self.stream), step)

    def following(self, step: Step, count: int) -> Iterator[Array]:
        """The tokens of ``count`` steps of one token, beginning with ``step``; each step reads the token of the previous one."""
        if not self.ports.samples:
            yield from one_by_one(self.run, step, count)
            return
        self._put(step)
        waiting: deque[tuple[Any, Any]] = deque()
        try:
            for k in range(count):
                self._launch(1)
                waiting.append(self._copied())
                if k + 1 < count:
                    self._advance()
                if len(waiting) >= AHEAD:
                    yield _read(*waiting.popleft())
            while waiting:
                yield _read(*waiting.popleft())
        finally:
            self.stream.synchronize()  # steps enqueued beyond a stop still write

    def _copied(self) -> tuple[Any, Any]:
        """The step's tokens while they are copied to the host, and the event after the copy."""
        cupy = self._cupy
        memory = cupy.cuda.alloc_pinned_memory(self.batch * 8)
        host = np.frombuffer(memory, np.int64, self.batch).reshape(self.batch, 1)
        self._tokens[self._turn].get(stream=self.stream, out=host, blocking=False)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return host, event

    def _advance(self) -> None:
        """Advance positions by one, and convert the tokens if the next step reads them in another type."""
        cupy, ports, inputs = self._cupy, self.ports, self._inputs[1]
        with self.stream:
            for array in self._moving:
                cupy.add(array, 1, out=array, casting="unsafe")
            if ports.mask is not None:
                self._mark(self._held, self.capacity, inputs[ports.mask.name])
            if ports.tokens.dtype != np.int64:
                cupy.copyto(inputs[ports.tokens.name], self._tokens[self._turn], casting="unsafe")

    def enlarged(self, engine: Engine, capacity: int) -> GpuSteps:
        """The same steps with caches of a larger capacity, with the contents of the present ones."""
        self.stream.synchronize()
        other = GpuSteps(engine, self.ports, self.batch, capacity)
        with other.stream:
            for c in self.ports.caches:
                before = self._caches[self._turn][c.input.name]
                other._caches[0][c.input.name][first_positions(c.axis, before.shape[c.axis])] = before
        other.stream.synchronize()
        return other


def _read(host: Any, event: Any) -> Array:
    """The tokens [batch], as soon as they have arrived."""
    event.synchronize()
    return checked(np.array(host[:, 0]))
