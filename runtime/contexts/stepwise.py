"""One thread's execution of a program that runs step by step: per-step sessions, the arena, and the run loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.errors import InternalError, OptdnnError, RunError
from optdnn.runtime.contexts.base import HostContext, hand_over
from optdnn.runtime.contexts.bounds import check_bounds
from optdnn.runtime.contexts.repeated import REPEATS, Repeated, fits
from optdnn.runtime.contexts.schedule import Action, Expected, Schedule
from optdnn.runtime.program import Step
from optdnn.runtime.steps.executor import Session
from optdnn.types import Array, DType

_ALIGN = 64
"""Alignment of the arena in memory, in bytes: a cache line, and the widest vector register."""


class Context(HostContext):
    """One thread's own state for running an engine; made by ``Engine.context()``.

    A context may be handed from thread to thread but is used by one at a time (a second one gets RunError).
    """

    def __init__(self, schedule: Schedule):
        super().__init__(schedule.program, schedule.signature)
        self._schedule = schedule
        self._names = [s.name for s in schedule.signature.outputs]
        self._sessions = [executor.session() for executor in schedule.executors]
        self._steps = [(session.run, action) for session, action in zip(self._sessions, schedule.actions, strict=True)]
        self._whole = self._steps[0][0] if schedule.whole else None
        self._no_outs: list[Array | None] = [None] * len(self._names)
        self._raw, self._arena = _arena(schedule)
        self._shapes: list[tuple[int, ...]] | None = None
        self._sizes: dict[str, int] = {}
        self._expected: list[Expected] = []
        self._exact: list[tuple[str, int, DType, tuple[int, ...] | None]] = []
        """Of a program that is one step, for each output: its name, its place in the step's results, its type."""
        self._repeated: Repeated | None = None
        self._alike = 0
        """Ordinary calls since the shapes changed."""

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None, stream: object = None
    ) -> dict[str, Array]:
        if self._whole is not None and out is None and stream is None:
            return self._run_whole(self._whole, feeds)
        return super().run(feeds, out, stream)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Each step's own state."""
        return tuple(self._sessions)

    def poison(self, byte: int) -> None:
        """Overwrite what earlier runs left in the arena and in results' memory that the libraries keep: for checks."""
        if self._raw is not None:
            poison(self._raw, byte)
        for session in self._sessions:
            own = getattr(session, "poison", None)
            if own is not None:
                own(byte)
        for a in [] if self._repeated is None else self._repeated.buffers():
            poison(a, byte)

    def _run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None, times: list[int] | None
    ) -> dict[str, Array]:
        try:
            arrays = self._inputs(feeds)
            schedule = self._schedule
            values = schedule.initial.copy()
            for i, a in zip(schedule.inputs, arrays, strict=True):
                values[i] = a
            offers, given = self._arena, self._no_outs
            if out is not None:
                given = self.signature.out_buffers(out, self._sizes, arrays)
                offers = offers | {i: a for i, a in zip(schedule.outputs, given, strict=True) if a is not None}
            self._run_steps(values, offers, times)
            return self._collect(values, arrays, given)
        except MemoryError as e:
            raise RunError(f"the inputs or outputs do not fit in memory: {e}", hint="use a smaller batch") from e

    def _run_whole(self, run: Callable[..., Sequence[Array]], feeds: Mapping[str, Any]) -> dict[str, Array]:
        """:meth:`_run` of a program that is one step: the same checks and errors, without the bookkeeping, which would be
        a third of a small network's time. Loops make the lists, because they cost less than calls of zip and comprehensions."""
        if not self._lock.acquire(False):
            self._alone.__enter__()  # raises the error
        try:
            if self._repeated is not None and (known := self._repeated.run(feeds)) is not None:
                return known
            arrays = self._inputs(feeds)
            try:
                results = run(arrays, self._no_outs)
            except OptdnnError:
                raise
            except Exception as e:
                raise self._failed(0, e) from e
            named: dict[str, Array] = {}
            if len(results) == len(self._exact):
                for name, k, dtype, shape in self._exact:
                    a = results[k]
                    if a.dtype != dtype or a.shape != shape:
                        break  # another size, or one that depends on data
                    named[name] = a
                else:
                    self._alike += 1
                    if self._alike == REPEATS:
                        self._repeated = self._prepare(arrays, named)
                    return named
            self._check(0, self.program.steps[0].outputs, results)
            return {name: results[k] for name, k, _, _ in self._exact}
        finally:
            self._lock.release()

    def _prepare(self, arrays: Sequence[Array], results: Mapping[str, Array]) -> Repeated | None:
        """The call for shapes that have come several times, where the session offers one; else the current one."""
        bound = getattr(self._sessions[0], "bound", None)
        if bound is None or self._schedule.bounds or not fits([*arrays, *results.values()]):
            return self._repeated
        read = [np.empty_like(a) for a in arrays]
        written = {name: np.empty_like(a) for name, a in results.items()}
        in_order = [written[name] for name, *_ in sorted(self._exact, key=lambda e: e[1])]
        names = [s.name for s in self.signature.inputs]
        return Repeated(bound(read, in_order), dict(zip(names, read, strict=True)), written)

    def _inputs(self, feeds: Mapping[str, Any]) -> list[Array]:
        """The checked arrays of ``feeds``. Sizes are checked when they differ from the last call's; positions and lengths (elements
        of arrays with bounds) in each call."""
        arrays = self.signature.arrays(feeds)
        shapes: list[tuple[int, ...]] = []
        for a in arrays:
            shapes.append(a.shape)
        if shapes != self._shapes:
            self._sizes = self.signature.sizes(arrays)
            self._expected = self._schedule.expected(self._sizes)
            self._exact = self._exact_outputs() if self._whole is not None else []
            self._shapes, self._alike = shapes, 0
        if self._schedule.bounds:
            check_bounds(self._schedule.bounds, self.signature.inputs, arrays, self._sizes)
        return arrays

    def _exact_outputs(self) -> list[tuple[str, int, DType, tuple[int, ...] | None]]:
        places = self.program.steps[0].outputs
        outputs = [(n, i, self._expected[i]) for n, i in zip(self._names, self._schedule.outputs, strict=True)]
        return [(n, places.index(i), e.dtype, e.shape) for n, i, e in outputs]

    def _run_steps(self, values: list[Array | None], offers: Mapping[int, Array], times: list[int] | None) -> None:
        k = 0
        try:
            for k, (run, action) in enumerate(self._steps):
                start = time.perf_counter_ns() if times is not None else 0
                inputs = [values[i] for i in action.inputs]
                results = run(inputs, [offers.get(i) for i in action.outputs])
                self._check(k, action.outputs, results)
                if self._arena:
                    results = self._settle(action, results)
                if times is not None:
                    times.append(time.perf_counter_ns() - start)
                for i, a in zip(action.outputs, results, strict=True):
                    values[i] = a
                values[-1] = None
                for i in action.frees:
                    values[i] = None
        except OptdnnError:
            raise
        except Exception as e:
            raise self._failed(k, e) from e

    def _check(self, k: int, outputs: Sequence[int], results: Sequence[Array]) -> None:
        """Raise RunError where results differ from what the program declares."""
        if len(results) != len(outputs):
            raise RunError(f"{self._where(k)} gave {len(results)} results, it has {len(outputs)} outputs")
        for i, a in zip(outputs, results, strict=True):
            if i >= 0 and not self._expected[i].fits(a):
                name = self.program.buffers[i].name
                raise RunError(
                    f"{self._where(k)} computed {name!r} as {a.dtype}{list(a.shape)}; it should be {self._expected[i]}",
                    hint="build the engine again; if that does not help, this is a defect of optdnn",
                )

    def _settle(self, action: Action, results: Sequence[Array]) -> list[Array]:
        """The results, with planned ones moved to their place. Views of the arena, whose memory is reused, are copied."""
        settled = []
        for i, a in zip(action.outputs, results, strict=True):
            place = self._arena.get(i)
            if place is None:
                if action.aliases and np.may_share_memory(a, self._raw):
                    a = a.copy(order="C")
            elif a is not place:
                if a.shape != place.shape:
                    raise InternalError(f"buffer {i} is planned as {list(place.shape)}, computed as {list(a.shape)}")
                np.copyto(place, a)
                a = place
            settled.append(a)
        return settled

    def _collect(
        self, values: Sequence[Array | None], arrays: Sequence[Array], given: Sequence[Array | None]
    ) -> dict[str, Array]:
        schedule = self._schedule
        results: dict[str, Array] = {}
        for k, i in enumerate(schedule.outputs):
            spec = schedule.signature.outputs[k]
            a = values[i]
            if a is None or a.dtype != spec.dtype or a.ndim != len(spec.shape):
                got = "nothing" if a is None else f"{a.dtype}{list(a.shape)}"
                raise InternalError(f"output {spec} was computed as {got}")
            buffer = given[k]
            if buffer is a:
                pass  # the step wrote into it
            elif buffer is not None:
                a = hand_over(spec, a, buffer)
            elif schedule.may_alias and self._shared(a, (*arrays, *given, *results.values())):
                a = a.copy(order="C")
            results[self._names[k]] = a
        return results

    def _shared(self, a: Array, others: Sequence[Array | None]) -> bool:
        """True if ``a`` may share memory with one of ``others``, with a constant or with the arena."""
        return any(b is not None and np.may_share_memory(a, b) for b in (*others, *self._schedule.initial, self._raw))

    def _failed(self, k: int, error: Exception) -> RunError:
        """The RunError for a foreign exception of step ``k``."""
        if isinstance(error, MemoryError):
            return RunError(f"{self._where(k)} ran out of memory: {error}", hint="use a smaller batch")
        return RunError(f"{self._where(k)} failed: {type(error).__name__}: {error}")

    def _where(self, k: int) -> str:
        step: Step = self.program.steps[k]
        src = ", ".join(step.src[:4]) + (f" and {len(step.src) - 4} more" if len(step.src) > 4 else "")
        return f"step {k} ({step.executor}{': ' + src if src else ''})"


class StepRunner(Schedule):
    """A program that runs step by step, made ready; shared by threads."""

    def context(self) -> Context:
        """One thread's own state."""
        return Context(self)


def poison(array: Array, byte: int) -> None:
    """Overwrite every byte of a contiguous array."""
    if array.size:
        array.reshape(-1).view(np.uint8)[...] = byte


def _arena(schedule: Schedule) -> tuple[Array | None, dict[int, Array]]:
    """The arena's memory, and a view of it for each planned buffer."""
    if not schedule.planned:
        return None, {}
    size = schedule.program.arena_bytes
    try:
        raw = np.empty(size + _ALIGN, np.uint8)
    except (MemoryError, ValueError) as e:  # ValueError: more than the address space holds
        raise RunError(f"there is no memory for the arena of {size} bytes") from e
    start = -raw.ctypes.data % _ALIGN
    views: dict[int, Array] = {}
    for i, offset, nbytes in schedule.planned:
        b = schedule.program.buffers[i]
        piece = raw[start + offset : start + offset + nbytes]
        views[i] = piece.view(b.dtype).reshape([d for d in b.shape or () if isinstance(d, int)])
    return raw, views
