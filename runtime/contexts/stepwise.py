"""Programs that run step by step: executors, the order of work, and one thread's sessions, arena and run loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from optdnn.dim import Dim, DimLike, evaluate, symbol
from optdnn.dim_text import parse_dim
from optdnn.errors import InternalError, OptdnnError, RunError, ShapeError
from optdnn.runtime.contexts.base import HostContext, Runner, hand_over
from optdnn.runtime.contexts.repeated import REPEATS, Repeated, fits
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.program import Buffer, Plain, Program, Step
from optdnn.runtime.steps.executor import Executor, Session
from optdnn.types import Array, DType, dtype_name

_ALIGN = 64
"""Alignment of the arena in memory, in bytes: a cache line, and the widest vector register."""


@dataclass(frozen=True)
class Action:
    """One step in the form of the run loop. Buffer -1 refers to the spare last entry of the value list, which stays None."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    """Buffers that no later step reads: freed after the step."""
    aliases: bool


@dataclass(frozen=True)
class Expected:
    """The type of a buffer in one call, as the program declares it.

    ``dims`` holds None for a size that depends on data, and is itself None if the rank is unknown. ``shape`` is set if every
    size is known.
    """

    dtype: DType
    dims: tuple[int | None, ...] | None
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, dtype: DType, dims: Sequence[DimLike | None] | None, sizes: Mapping[str, int]) -> Expected:
        """``dims`` at these sizes of their symbols."""
        if dims is None:
            return cls(dtype, None, None)
        known = tuple(_size(d, sizes) if isinstance(d, Dim) else d for d in dims)
        return cls(dtype, known, None if None in known else known)  # type: ignore[arg-type]

    def fits(self, a: Array) -> bool:
        """Whether an array has this type, as far as the type is known."""
        if a.dtype != self.dtype:
            return False
        if self.shape is not None or self.dims is None:
            return self.dims is None or a.shape == self.shape
        return len(a.shape) == len(self.dims) and all(
            d is None or d == n for d, n in zip(self.dims, a.shape, strict=True)
        )

    def of_empty(self, a: Array) -> tuple[int, ...] | None:
        """This shape for an array without elements, whose own sizes stand for unknown ones; None if it would have elements."""
        if self.dims is None or a.size or a.dtype != self.dtype or a.ndim != len(self.dims):
            return None
        shape = tuple(n if d is None else d for d, n in zip(self.dims, a.shape, strict=True))
        return shape if 0 in shape else None

    def __str__(self) -> str:
        shape = "?" if self.dims is None else ", ".join("?" if d is None else str(d) for d in self.dims)
        return f"{dtype_name(self.dtype)}[{shape}]"


def _size(d: Dim, sizes: Mapping[str, int]) -> int | None:
    """The size, or None if the expression has none: nothing can be divided by an empty dimension."""
    try:
        size = evaluate(d, sizes)
    except ShapeError:
        return None
    return size if size >= 0 else None


def _dims(b: Buffer, signature: Signature) -> tuple[DimLike | None, ...] | None:
    """The dimensions of a buffer over the symbols of the inputs; None for a dimension that depends on anything else."""
    if b.shape is None:
        return None
    known = {d for s in signature.inputs for d in s.shape if isinstance(d, str)} - signature.derived.keys()
    dims: list[DimLike | None] = []
    for d in b.shape:
        dim = d if isinstance(d, int) else symbol(d) if d in known else parse_dim(d)
        names = {s.name for s in dim.symbols()} if isinstance(dim, Dim) else set()
        dims.append(dim if names <= known else None)
    return tuple(dims)


class StepRunner(Runner):
    """A prepared program that runs step by step. Immutable; shared by threads."""

    def __init__(self, program: Program, executors: Sequence[Executor]):
        self.program = program
        self.executors = tuple(executors)
        self.signature = Signature.of(program)
        self.inputs = tuple(i for _, i in program.inputs)
        self.outputs = tuple(i for _, i in program.outputs)
        self.initial: list[Array | None] = [None if b.blob is None else program.blobs[b.blob] for b in program.buffers]
        self.initial.append(None)
        self.planned = tuple(
            (i, b.offset, b.nbytes or 0)
            for i, b in enumerate(program.buffers)
            if b.offset is not None and i not in self.outputs
        )
        """Buffers in the arena. Outputs of the network are never in it: the arrays that run() returns belong to the caller."""
        self._dims = [_dims(b, self.signature) for b in program.buffers]
        self.actions = _actions(program, [e.aliases for e in executors])
        self.may_alias = self._may_alias()

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        return tuple(e.facts for e in self.executors)

    def context(self, arena: object = None) -> Context:
        """The state of one thread, with its own arena."""
        return Context(self)

    def expected(self, sizes: Mapping[str, int]) -> list[Expected]:
        """The types of the buffers in a call with these sizes."""
        return [Expected.of(b.dtype, d, sizes) for b, d in zip(self.program.buffers, self._dims, strict=True)]

    @property
    def whole(self) -> bool:
        """True if one step reads all inputs and produces all outputs: there is nothing to schedule, place or free."""
        steps = self.program.steps
        single = len(steps) == 1 and steps[0].inputs == self.inputs and sorted(steps[0].outputs) == sorted(self.outputs)
        return single and not self.planned and not self.may_alias

    def _may_alias(self) -> bool:
        """True if an output could share memory with an input, a constant or another output."""
        written = {i: e for step, e in zip(self.program.steps, self.executors, strict=True) for i in step.outputs}
        distinct = len(set(self.outputs)) == len(self.outputs)
        return not distinct or any(i not in written or written[i].aliases for i in self.outputs)


def _actions(program: Program, aliases: Sequence[bool]) -> tuple[Action, ...]:
    held = {i for _, i in program.outputs} | {i for i, b in enumerate(program.buffers) if b.blob is not None}
    last: dict[int, int] = {}
    for k, step in enumerate(program.steps):
        for i in (*step.inputs, *step.outputs):
            last[i] = k
    frees: list[list[int]] = [[] for _ in program.steps]
    for i, k in sorted(last.items()):
        if i >= 0 and i not in held:
            frees[k].append(i)
    return tuple(Action(step.inputs, step.outputs, tuple(frees[k]), aliases[k]) for k, step in enumerate(program.steps))


class Context(HostContext):
    """One thread's own state for running an engine; made by ``Engine.context()``.

    A context may be handed from thread to thread but only one at a time may use it (a second one gets RunError).
    """

    def __init__(self, runner: StepRunner):
        super().__init__(runner.program, runner.signature)
        self._runner = runner
        self._names = [s.name for s in runner.signature.outputs]
        self._sessions = [executor.session() for executor in runner.executors]
        self._steps = [(session.run, action) for session, action in zip(self._sessions, runner.actions, strict=True)]
        self._whole = self._steps[0][0] if runner.whole else None
        self._no_outs: list[Array | None] = [None] * len(self._names)
        self._raw, self._arena = _arena(runner)
        self._shapes: list[tuple[int, ...]] | None = None
        self._sizes: dict[str, int] = {}
        self._expected: list[Expected] = []
        self._exact: list[tuple[str, int, DType, tuple[int, ...] | None]] = []
        """For each output of a program with a single step: its name, its index in the step's results, its type."""
        self._repeated: Repeated | None = None
        self._alike = 0
        """Ordinary calls since the shapes last changed."""

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None
    ) -> dict[str, Array]:
        if self._whole is not None and stream is None:
            if self.program.file is not None:
                self.program.file.check()
            return self._run_whole(self._whole, feeds, out)
        return super().run(feeds, out, stream)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Each step's own state."""
        return tuple(self._sessions)

    def poison(self, byte: int) -> None:
        """Overwrite the results of earlier runs in the arena and in memory that the libraries keep: for checks."""
        if self._raw is not None:
            poison(self._raw, byte)
        for session in self._sessions:
            own = getattr(session, "poison", None)
            if own is not None:
                own(byte)
        for a in [] if self._repeated is None else self._repeated.buffers():
            poison(a, byte)

    def _run_timed(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, times: list[int] | None
    ) -> dict[str, Array]:
        try:
            arrays = self._inputs(feeds)
            runner = self._runner
            values = runner.initial.copy()
            for i, a in zip(runner.inputs, arrays, strict=True):
                values[i] = a
            offers, given = self._arena, self._no_outs
            if out is not None:
                given = self.signature.out_buffers(out, self._sizes, arrays)
                offers = offers | {i: a for i, a in zip(runner.outputs, given, strict=True) if self._takes(a, i)}
            self._run_steps(values, offers, times)
            return self._collect(values, arrays, given)
        except MemoryError as e:
            raise RunError(f"the inputs or outputs do not fit in memory: {e}", hint="use a smaller batch") from e

    def _run_whole(
        self, run: Callable[..., Sequence[Array]], feeds: Mapping[str, Any], out: Mapping[str, Any] | None
    ) -> dict[str, Array]:
        """:meth:`run` of a program with a single step: the same checks and errors, without the bookkeeping, which would take a
        third of a small network's time. The lists are made by loops, which are faster here than zip and comprehensions."""
        lock = self._alone.lock
        if not lock.acquire(False):
            self._alone.__enter__()  # this raises the error
        try:
            if out is None and self._repeated is not None and (known := self._repeated.run(feeds)) is not None:
                return known
            arrays = self._inputs(feeds)
            outs = self._no_outs if out is None else self._outs(out, arrays)
            try:
                results = run(arrays, outs if out is None else self._offers(outs))
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
                    if out is not None:
                        return self._handed(results, outs)
                    self._alike += 1
                    if self._alike == REPEATS:
                        self._repeated = self._prepare(arrays, named)
                    return named
            return self._handed(self._checked(0, self.program.steps[0].outputs, results), outs)
        finally:
            lock.release()

    def _outs(self, out: Mapping[str, Any], arrays: Sequence[Array]) -> list[Array | None]:
        """The caller's buffers, checked, in the order of the single step's results."""
        given = self.signature.out_buffers(out, self._sizes, arrays)
        outs: list[Array | None] = [None] * len(given)
        for (_, k, _, _), buffer in zip(self._exact, given, strict=True):
            outs[k] = buffer
        return outs

    def _offers(self, outs: Sequence[Array | None]) -> list[Array | None]:
        """The buffers of the caller that the single step writes in place."""
        return [a if self._takes(a, i) else None for i, a in zip(self.program.steps[0].outputs, outs, strict=True)]

    def _takes(self, buffer: Array | None, i: int) -> TypeGuard[Array]:
        """Whether a step may write a result in the caller's buffer: its sizes are certain, and it has elements."""
        return buffer is not None and buffer.size > 0 and self._expected[i].shape == buffer.shape

    def _handed(self, results: Sequence[Array], outs: Sequence[Array | None]) -> dict[str, Array]:
        """The single step's results by name, those with a buffer of the caller in it."""
        named: dict[str, Array] = {}
        for spec, (name, k, _, _) in zip(self.signature.outputs, self._exact, strict=True):
            a, buffer = results[k], outs[k]
            named[name] = a if buffer is None or buffer is a else hand_over(spec, a, buffer)
        return named

    def _prepare(self, arrays: Sequence[Array], results: Mapping[str, Array]) -> Repeated | None:
        """The repeated call for shapes that have come several times, if the session offers one; otherwise the current one."""
        bound = getattr(self._sessions[0], "bound", None)
        if bound is None or self.signature.bounds or not fits([*arrays, *results.values()]):
            return self._repeated
        read = [np.empty_like(a) for a in arrays]
        written = {name: np.empty_like(a) for name, a in results.items()}
        in_order = [written[name] for name, *_ in sorted(self._exact, key=lambda e: e[1])]
        names = [s.name for s in self.signature.inputs]
        return Repeated(bound(read, in_order), dict(zip(names, read, strict=True)), written)

    def _inputs(self, feeds: Mapping[str, Any]) -> list[Array]:
        """The checked arrays of ``feeds``. Sizes are checked if they differ from the last call's; positions and lengths (elements
        of arrays with bounds) in each call."""
        arrays = self.signature.arrays(feeds)
        shapes: list[tuple[int, ...]] = []
        for a in arrays:
            shapes.append(a.shape)
        if shapes != self._shapes:
            self._sizes = self.signature.sizes(arrays)
            self._expected = self._runner.expected(self._sizes)
            self._exact = self._exact_outputs() if self._whole is not None else []
            self._shapes, self._alike = shapes, 0
        if self.signature.bounds:
            self.signature.check_bounds(arrays, self._sizes)
        return arrays

    def _exact_outputs(self) -> list[tuple[str, int, DType, tuple[int, ...] | None]]:
        places = self.program.steps[0].outputs
        outputs = [(n, i, self._expected[i]) for n, i in zip(self._names, self._runner.outputs, strict=True)]
        return [(n, places.index(i), e.dtype, e.shape) for n, i, e in outputs]

    def _run_steps(self, values: list[Array | None], offers: Mapping[int, Array], times: list[int] | None) -> None:
        k = 0
        try:
            for k, (run, action) in enumerate(self._steps):
                start = time.perf_counter_ns() if times is not None else 0
                inputs = [values[i] for i in action.inputs]
                results = run(inputs, [offers.get(i) for i in action.outputs])
                results = self._checked(k, action.outputs, results)
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

    def _checked(self, k: int, outputs: Sequence[int], results: Sequence[Array]) -> Sequence[Array]:
        """The results, those without elements in their declared sizes. Raises RunError if results differ from the program's
        declarations."""
        if len(results) != len(outputs):
            raise RunError(f"{self._where(k)} gave {len(results)} results, it has {len(outputs)} outputs")
        wrong = {
            n: i
            for n, (i, a) in enumerate(zip(outputs, results, strict=True))
            if i >= 0 and not self._expected[i].fits(a)
        }
        if not wrong:
            return results
        found = list(results)
        for n, i in wrong.items():
            # ONNX Runtime knows no sizes of the rows that a Loop without iterations stacks, and gives them as 0.
            shape = self._expected[i].of_empty(results[n])
            if shape is None:
                raise self._contradicts(k, i, results[n])
            found[n] = np.empty(shape, results[n].dtype)
        return found

    def _contradicts(self, k: int, i: int, a: Array) -> RunError:
        own = self.program.steps[k].params.get("kind") == "Custom"
        return RunError(
            f"{self._where(k)} computed {self.program.buffers[i].name!r} as {a.dtype}{list(a.shape)}; it should be "
            f"{self._expected[i]}",
            hint="the custom operator's infer and reference disagree"
            if own
            else "the model may declare another shape than its nodes compute for such inputs; if it does not, build the engine "
            "again, and if that does not help, this is a defect of optdnn",
        )

    def _settle(self, action: Action, results: Sequence[Array]) -> list[Array]:
        """The results, with planned ones moved to their buffers. Views of the arena, whose memory is reused, are copied."""
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
        runner = self._runner
        results: dict[str, Array] = {}
        for k, i in enumerate(runner.outputs):
            spec = runner.signature.outputs[k]
            a = values[i]
            if a is None or a.dtype != spec.dtype or a.ndim != len(spec.shape):
                got = "nothing" if a is None else f"{a.dtype}{list(a.shape)}"
                why = "a model may declare a shape that it does not compute if the shape depends on data"
                raise RunError(f"output {spec} was computed as {got}", hint=why)
            buffer = given[k]
            if buffer is a:
                pass  # the step wrote into it
            elif buffer is not None:
                a = hand_over(spec, a, buffer)
            elif runner.may_alias and self._shared(a, (*arrays, *given, *results.values())):
                a = a.copy(order="C")
            results[self._names[k]] = a
        return results

    def _shared(self, a: Array, others: Sequence[Array | None]) -> bool:
        """True if ``a`` may share memory with one of ``others``, with a constant or with the arena."""
        return any(b is not None and np.may_share_memory(a, b) for b in (*others, *self._runner.initial, self._raw))

    def _failed(self, k: int, error: Exception) -> RunError:
        """The RunError for a foreign exception of step ``k``."""
        if isinstance(error, MemoryError):
            return RunError(f"{self._where(k)} ran out of memory: {error}", hint="use a smaller batch")
        return RunError(f"{self._where(k)} failed: {type(error).__name__}: {error}")

    def _where(self, k: int) -> str:
        step: Step = self.program.steps[k]
        src = ", ".join(step.src[:4]) + (f" and {len(step.src) - 4} more" if len(step.src) > 4 else "")
        return f"step {k} ({step.executor}{': ' + src if src else ''})"


def poison(array: Array, byte: int) -> None:
    """Overwrite every byte of a contiguous array."""
    if array.size:
        array.reshape(-1).view(np.uint8)[...] = byte


def _arena(runner: StepRunner) -> tuple[Array | None, dict[int, Array]]:
    """The arena's memory, and a view of it for each planned buffer."""
    if not runner.planned:
        return None, {}
    size = runner.program.arena_bytes
    try:
        raw = np.empty(size + _ALIGN, np.uint8)
    except (MemoryError, ValueError) as e:  # ValueError: larger than the address space
        raise RunError(f"there is no memory for the arena of {size} bytes") from e
    start = -raw.ctypes.data % _ALIGN
    views: dict[int, Array] = {}
    for i, offset, nbytes in runner.planned:
        b = runner.program.buffers[i]
        piece = raw[start + offset : start + offset + nbytes]
        views[i] = piece.view(b.dtype).reshape(b.sizes)
    return raw, views
