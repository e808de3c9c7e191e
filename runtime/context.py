"""One thread's execution of an engine: per-step sessions, the arena, and the run loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optdnn.dim import Dim, DimLike, evaluate, symbol
from optdnn.dim_text import parse_dim
from optdnn.errors import InputError, InternalError, OptdnnError, RunError, ShapeError
from optdnn.runtime.bounds import bounds_of, check_bounds
from optdnn.runtime.executor import Executor, Session
from optdnn.runtime.program import Buffer, Plain, Program, Step
from optdnn.runtime.repeated import REPEATS, Repeated, fits
from optdnn.runtime.signature import Shown, Signature
from optdnn.types import Array, DType, dtype_name

if TYPE_CHECKING:
    from optdnn.runtime.state import Bound

_ALIGN = 64
"""Alignment of the arena in memory, in bytes: a cache line, and the widest vector register."""


@dataclass(frozen=True)
class _Action:
    """One step as the run loop wants it. Buffer -1 reads the spare last entry of the value list, which stays None."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    offers: tuple[bool, ...]
    """Which outputs have planned or caller-given memory to offer to the session."""
    frees: tuple[int, ...]
    """Buffers that no later step reads: dropped after the step."""
    aliases: bool


@dataclass(frozen=True)
class _Expected:
    """What the program says of a buffer in one call. ``shape`` is exact where every size is known; ``dims`` holds None for a size
    that depends on data, and is None where not even the rank is known."""

    dtype: DType
    shape: tuple[int, ...] | None
    dims: tuple[int | None, ...] | None

    @classmethod
    def of(cls, dtype: DType, dims: Sequence[DimLike | None] | None, sizes: Mapping[str, int]) -> _Expected:
        if dims is None:
            return cls(dtype, None, None)
        found = tuple(_size(d, sizes) if isinstance(d, Dim) else d for d in dims)
        return cls(dtype, None if None in found else found, found)  # type: ignore[arg-type]

    def fits(self, a: Array) -> bool:
        if a.dtype != self.dtype:
            return False
        if self.shape is not None or self.dims is None:
            return self.shape is None or a.shape == self.shape
        return len(a.shape) == len(self.dims) and all(
            d is None or d == n for d, n in zip(self.dims, a.shape, strict=True)
        )

    def __str__(self) -> str:
        shape = "?" if self.dims is None else ", ".join("?" if d is None else str(d) for d in self.dims)
        return f"{dtype_name(self.dtype)}[{shape}]"


def _size(d: Dim, sizes: Mapping[str, int]) -> int | None:
    """The size, or None where the expression has none: nothing can be divided by an empty dimension."""
    try:
        found = evaluate(d, sizes)
    except ShapeError:
        return None
    return found if found >= 0 else None


def _dims(b: Buffer, signature: Signature) -> tuple[DimLike | None, ...] | None:
    """The dimensions of a buffer over the symbols of the inputs; None for one that depends on anything else."""
    if b.shape is None:
        return None
    known = {d for s in signature.inputs for d in s.shape if isinstance(d, str)} - signature.derived.keys()
    found: list[DimLike | None] = []
    for d in b.shape:
        read = d if isinstance(d, int) else symbol(d) if d in known else parse_dim(d)
        names = {s.name for s in read.symbols()} if isinstance(read, Dim) else set()
        found.append(read if names <= known else None)
    return tuple(found)


class Schedule:
    """Everything of a prepared program that contexts share. Immutable."""

    def __init__(self, program: Program, executors: Sequence[Executor]):
        self.program = program
        self.executors = tuple(executors)
        self.signature = Signature([s for s, _ in program.inputs], [s for s, _ in program.outputs], program.profiles)
        self.bounds = bounds_of(program.meta.get("bounds", {}))
        self.inputs = tuple(i for _, i in program.inputs)
        self.outputs = tuple(i for _, i in program.outputs)
        self.initial: list[Array | None] = [None if b.blob is None else program.blobs[b.blob] for b in program.buffers]
        self.initial.append(None)
        wanted = set(self.outputs)
        self.planned = tuple(
            (i, b.offset, b.nbytes or 0)
            for i, b in enumerate(program.buffers)
            if b.offset is not None and i not in wanted
        )
        """Buffers in the arena. Outputs of the network are never there: what run() returns is the caller's to keep."""
        self._dims = [_dims(b, self.signature) for b in program.buffers]
        self.actions = _actions(program, wanted | {i for i, _, _ in self.planned}, [e.aliases for e in executors])
        self.may_alias = self._may_alias()

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        """Per step, what really runs."""
        return tuple(e.facts for e in self.executors)

    def context(self) -> Context:
        """One thread's own state."""
        return Context(self)

    def expected(self, sizes: Mapping[str, int]) -> list[_Expected]:
        """What each buffer holds in a call with these sizes."""
        return [_Expected.of(b.dtype, d, sizes) for b, d in zip(self.program.buffers, self._dims, strict=True)]

    @property
    def whole(self) -> bool:
        """True where one step takes the inputs and gives the outputs: there is nothing to schedule, place or free."""
        steps = self.program.steps
        single = len(steps) == 1 and steps[0].inputs == self.inputs and sorted(steps[0].outputs) == sorted(self.outputs)
        return single and not self.planned and not self.may_alias

    def _may_alias(self) -> bool:
        """True where an output could share memory with an input, a constant or another output."""
        written = {i: e for step, e in zip(self.program.steps, self.executors, strict=True) for i in step.outputs}
        distinct = len(set(self.outputs)) == len(self.outputs)
        return not distinct or any(i not in written or written[i].aliases for i in self.outputs)


def _actions(program: Program, offered: set[int], aliases: Sequence[bool]) -> tuple[_Action, ...]:
    kept = {i for _, i in program.outputs} | {i for i, b in enumerate(program.buffers) if b.blob is not None}
    last: dict[int, int] = {}
    for k, step in enumerate(program.steps):
        for i in (*step.inputs, *step.outputs):
            last[i] = k
    frees: list[list[int]] = [[] for _ in program.steps]
    for i, k in sorted(last.items()):
        if i >= 0 and i not in kept:
            frees[k].append(i)
    return tuple(
        _Action(step.inputs, step.outputs, tuple(i in offered for i in step.outputs), tuple(frees[k]), aliases[k])
        for k, step in enumerate(program.steps)
    )


class Context(Shown):
    """One thread's own state for running an engine; made by ``Engine.context()``.

    A context may be handed from thread to thread but is used by one at a time (a second one gets RunError).
    """

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._signature = schedule.signature
        self._names = [s.name for s in schedule.signature.outputs]
        self._in_names = [s.name for s in schedule.signature.inputs]
        self._sessions = [executor.session() for executor in schedule.executors]
        self._steps = [(session.run, action) for session, action in zip(self._sessions, schedule.actions, strict=True)]
        self._whole = self._steps[0][0] if schedule.whole else None
        self._no_outs: list[Array | None] = [None] * len(self._names)
        self._raw, self._arena = _arena(schedule)
        self._lock = threading.Lock()
        self._shapes: list[tuple[int, ...]] | None = None
        self._sizes: dict[str, int] = {}
        self._expected: list[_Expected] = []
        self._exact: list[tuple[str, int, DType, tuple[int, ...] | None]] = []
        """Of a program that is one step, for each output: its name, its place in the step's results, what it is."""
        self._repeated: Repeated | None = None
        self._alike = 0
        """Ordinary calls since the shapes changed."""

    def _shown(self) -> tuple[Program, Signature]:
        return self._schedule.program, self._signature

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None, stream: object = None
    ) -> dict[str, Array]:
        """Run once.

        ``feeds`` maps each input's name to an array of exactly its dtype and of a shape that fits; ``out`` may map output
        names to writable C-contiguous arrays that then hold (and are) those results, all others are fresh. ``stream`` is
        for targets that have streams. Returns name -> array in ONNX output order.
        Raises InputError for what does not fit, RunError when running fails.
        """
        if self._whole is not None and out is None and stream is None:
            return self._run_whole(self._whole, feeds)
        return self._run(feeds, out, stream, None)

    def bind(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Array] | None = None,
        state: Mapping[str, str] | None = None,
    ) -> Bound:
        """A call on these arrays, to be repeated: ``run()`` reads them as they are then.

        ``outputs`` may give buffers; ``state`` maps outputs to the inputs that they are in the next run, without a copy
        (:mod:`optdnn.runtime.state`), and ``inputs`` then hold its initial value. Raises InputError for what does not fit.
        """
        from optdnn.runtime.state import Bound

        return Bound(self, self._signature, inputs, outputs, state)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once and time each step: (outputs, nanoseconds per step of the program)."""
        times: list[int] = []
        return self._run(feeds, None, None, times), times

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
        self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None, stream: object, times: list[int] | None
    ) -> dict[str, Array]:
        if stream is not None:
            raise InputError(f"target {self._schedule.program.target!r} has no streams; leave stream out")
        self._enter()
        try:
            arrays = self._inputs(feeds)
            schedule = self._schedule
            values = schedule.initial.copy()
            for i, a in zip(schedule.inputs, arrays, strict=True):
                values[i] = a
            offers: dict[int, Array] | None = self._arena
            given: list[Array | None] = []
            if out is not None:
                given = self._signature.out_buffers(out, self._sizes, arrays)
                buffers = zip(schedule.outputs, given, strict=True)
                offers = {**(offers or {}), **{i: a for i, a in buffers if a is not None}}
            self._run_steps(values, offers, times)
            return self._collect(values, arrays, given)
        except MemoryError as e:
            raise RunError(f"the inputs or outputs do not fit in memory: {e}", hint="use a smaller batch") from e
        finally:
            self._lock.release()

    def _run_whole(self, run: Callable[..., Sequence[Array]], feeds: Mapping[str, Any]) -> dict[str, Array]:
        """:meth:`_run` of a program that is one step: the same checks and errors, without the bookkeeping, which would be
        a third of a small network's time. Loops make the lists, because they cost less than calls of zip and comprehensions."""
        if not self._lock.acquire(False):
            self._enter()  # says why not
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
            found: dict[str, Array] = {}
            if len(results) == len(self._exact):
                for name, k, dtype, shape in self._exact:
                    a = results[k]
                    if a.dtype != dtype or a.shape != shape:
                        break  # another size, or one that depends on data
                    found[name] = a
                else:
                    self._alike += 1
                    if self._alike == REPEATS:
                        self._repeated = self._prepare(arrays, found)
                    return found
            self._check(0, self._schedule.program.steps[0].outputs, results)
            return {name: results[k] for name, k, _, _ in self._exact}
        finally:
            self._lock.release()

    def _prepare(self, arrays: Sequence[Array], results: Mapping[str, Array]) -> Repeated | None:
        """The call for shapes that have come several times, where the session offers one; else the one there is."""
        bound = getattr(self._sessions[0], "bound", None)
        if bound is None or self._schedule.bounds or not fits([*arrays, *results.values()]):
            return self._repeated
        read = [np.empty_like(a) for a in arrays]
        written = {name: np.empty_like(a) for name, a in results.items()}
        in_order = [written[name] for name, *_ in sorted(self._exact, key=lambda e: e[1])]
        return Repeated(bound(read, in_order), dict(zip(self._in_names, read, strict=True)), written)

    def _enter(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RunError(
                "this context is running in another thread", hint="use engine.run, or engine.context() per thread"
            )

    def _inputs(self, feeds: Mapping[str, Any]) -> list[Array]:
        """The checked arrays of ``feeds``; sizes are looked at when they differ from the last call's, the elements of those that
        say positions or lengths in each."""
        arrays = self._signature.arrays(feeds)
        shapes: list[tuple[int, ...]] = []
        for a in arrays:
            shapes.append(a.shape)
        if shapes != self._shapes:
            self._sizes = self._signature.sizes(arrays)
            self._expected = self._schedule.expected(self._sizes)
            self._exact = self._exact_outputs() if self._whole is not None else []
            self._shapes, self._alike = shapes, 0
        if self._schedule.bounds:
            check_bounds(self._schedule.bounds, self._signature.inputs, arrays, self._sizes)
        return arrays

    def _exact_outputs(self) -> list[tuple[str, int, DType, tuple[int, ...] | None]]:
        places = self._schedule.program.steps[0].outputs
        outputs = [(n, i, self._expected[i]) for n, i in zip(self._names, self._schedule.outputs, strict=True)]
        return [(n, places.index(i), e.dtype, e.shape) for n, i, e in outputs]

    def _run_steps(
        self, values: list[Array | None], offers: Mapping[int, Array] | None, times: list[int] | None
    ) -> None:
        k = 0
        try:
            for k, (run, action) in enumerate(self._steps):
                start = time.perf_counter_ns() if times is not None else 0
                inputs = [values[i] for i in action.inputs]
                if offers is None:
                    results = run(inputs, [None] * len(action.outputs))
                    self._check(k, action.outputs, results)
                else:
                    outs = [
                        offers.get(i) if offered else None
                        for i, offered in zip(action.outputs, action.offers, strict=True)
                    ]
                    results = run(inputs, outs)
                    self._check(k, action.outputs, results)
                    if self._arena is not None:
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
        """Raises RunError where a step gave something else than the program declares."""
        if len(results) != len(outputs):
            raise RunError(f"{self._where(k)} gave {len(results)} results, it has {len(outputs)} outputs")
        for i, a in zip(outputs, results, strict=True):
            if i >= 0 and not self._expected[i].fits(a):
                name = self._schedule.program.buffers[i].name
                raise RunError(
                    f"{self._where(k)} computed {name!r} as {a.dtype}{list(a.shape)}; it should be {self._expected[i]}",
                    hint="build the engine again; if that does not help, this is a defect of optdnn",
                )

    def _settle(self, action: _Action, results: Sequence[Array]) -> list[Array]:
        """Results with planned ones moved to their place, and views of the arena, whose memory is reused, copied."""
        arena = self._arena or {}
        settled = []
        for i, a in zip(action.outputs, results, strict=True):
            place = arena.get(i)
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
            buffer = given[k] if given else None
            if buffer is not None:
                if buffer is not a:
                    if buffer.shape != a.shape:
                        raise InputError(
                            f"the buffer for output {spec.name!r} has shape {list(buffer.shape)}, "
                            f"the result {list(a.shape)}"
                        )
                    np.copyto(buffer, a)
                a = buffer
            elif schedule.may_alias and self._shared(a, (*arrays, *given, *results.values())):
                a = a.copy(order="C")
            results[self._names[k]] = a
        return results

    def _shared(self, a: Array, others: Sequence[Array | None]) -> bool:
        """True if ``a`` may share memory with one of ``others``, with a constant or with the arena."""
        return any(b is not None and np.may_share_memory(a, b) for b in (*others, *self._schedule.initial, self._raw))

    def _failed(self, k: int, error: Exception) -> RunError:
        """What to raise for an exception of step ``k`` that is not our own."""
        if isinstance(error, MemoryError):
            return RunError(f"{self._where(k)} ran out of memory: {error}", hint="use a smaller batch")
        return RunError(f"{self._where(k)} failed: {type(error).__name__}: {error}")

    def _where(self, k: int) -> str:
        step: Step = self._schedule.program.steps[k]
        src = ", ".join(step.src[:4]) + (f" and {len(step.src) - 4} more" if len(step.src) > 4 else "")
        return f"step {k} ({step.executor}{': ' + src if src else ''})"


def poison(array: Array, byte: int) -> None:
    """Overwrite every byte of a contiguous array."""
    if array.size:
        array.reshape(-1).view(np.uint8)[...] = byte


def _arena(schedule: Schedule) -> tuple[Array | None, dict[int, Array] | None]:
    """The arena's memory, and a view of it for each planned buffer."""
    if not schedule.planned:
        return None, None
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
