"""Trials: candidates of the cpu target run in a separate process before this process opens them.

If a library crashes, hangs or calls exit, the build loses only that candidate. A worker process holds one candidate after
another until one ends the process. The commands are those of the race (:mod:`optdnn.runtime.racing.worker`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import numpy as np

from optdnn.errors import OutputError, RunError
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import encode
from optdnn.runtime.file.signatures import POLICY
from optdnn.runtime.program import Program
from optdnn.runtime.racing.candidates import Candidate
from optdnn.runtime.steps.executor import LoadOptions, prepare
from optdnn.runtime.workers.process import WorkerFailure, WorkerProcess
from optdnn.temporary import temporary_folder
from optdnn.types import Array, TensorSpec

LIMIT_S = 60.0
"""Time limit of a trial's command in seconds: compile a candidate, run it once, or time it for a turn."""
LIMIT_S_PER_GIB = 120.0
"""Further seconds for each GiB of weights."""
WARM_RUNS = 2
"""Runs at the start of a turn that are not counted."""


class Trials:
    """The worker processes of one build. ``threads``: the threads of NumPy's kernels in them. Close it after use."""

    opener = "engine"
    """The kind of the candidates (:data:`optdnn.runtime.racing.candidates.OPENERS`)."""

    def __init__(self, threads: int):
        self._threads = threads
        self._folder = temporary_folder("optdnn-trial-")
        self._number = itertools.count()
        self._idle: list[WorkerProcess] = _take_kept(threads)
        self._busy: list[WorkerProcess] = []

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, workers: int) -> None:
        """Start this many processes; they start up while this process continues."""
        while len(self._idle) < workers:
            self._idle.append(self._started())

    def open(self, program: Program, threads: int, *, custom: bool = False) -> Trial:
        """Compile a program in a worker process. Raises RunError with the reason if that fails.

        A program with the user's own operators (``custom``), whose Python functions only this process has, runs here. Its library
        parts are tried in a worker process first (:class:`LocalTrial`).
        """
        if custom:
            return LocalTrial(self, program, threads)
        worker = self._idle.pop() if self._idle else self._started()
        path = Path(self._folder.name) / f"{next(self._number)}.engine"
        weights = sum(blob.nbytes for blob in program.blobs)
        self._busy.append(worker)
        trial = ProcessTrial(self, worker, LIMIT_S + LIMIT_S_PER_GIB * weights / 2**30)
        try:
            with open(path, "wb") as file:
                file.writelines(encode(program))
            trial.compile(asdict(Candidate("trial", self.opener, str(path))), threads)
        except OSError as error:
            trial.close()
            raise OutputError(
                f"a candidate cannot be written to {self._folder.name}: {error.strerror}",
                hint="it needs room for the engine: set TMPDIR to another folder",
            ) from None
        except RunError:
            trial.close()
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)  # the worker has mapped it
        return trial

    def _started(self) -> WorkerProcess:
        try:
            # It loads only files that this process writes: no signatures.
            return WorkerProcess(self._threads, LIMIT_S, without=(POLICY,))
        except OSError as error:
            raise RunError(f"no process can be started to try candidates in: {error}") from None

    def free(self, worker: WorkerProcess) -> None:
        """Take back a worker whose candidate is not needed any more."""
        self._busy.remove(worker)
        try:
            worker.ask({"command": "close"})
            self._idle.append(worker)
        except WorkerFailure:
            worker.close()

    def lost(self, worker: WorkerProcess) -> None:
        """Drop a worker whose process has ended, or takes too long."""
        self._busy.remove(worker)
        worker.close()

    def close(self) -> None:
        """End all processes (except those that :func:`kept` keeps)."""
        for worker in list(self._busy):
            self.free(worker)
        _keep_or_close(self._threads, self._idle)
        self._idle = []
        self._folder.cleanup()


class TrialLost(RunError):
    """The process of a trial crashed, or took too long and was ended."""


class Trial:
    """A candidate that is ready to run."""

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        """Run once: outputs by name. ``poison``: the memory of results is overwritten first. Raises RunError with the reason."""
        raise NotImplementedError

    def turn(self, seconds: float) -> list[float]:
        """The milliseconds of each run, on the last inputs, within a turn. Raises RunError."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the candidate up."""

    def abandon(self) -> None:
        """Give up the candidate and its process: inputs that do not fit may have made the library write anywhere in memory."""


class ProcessTrial(Trial):
    """A candidate in a worker process."""

    def __init__(self, trials: Trials, worker: WorkerProcess, limit_s: float):
        self._trials, self._worker, self._limit_s = trials, worker, limit_s
        self._open = True
        self._outputs: list[str] = []

    def compile(self, candidate: Mapping[str, object], threads: int) -> None:
        """Compile the candidate."""
        message = {"command": "open", "candidate": candidate, "threads": threads}
        self._outputs = self._ask(message, None, "when it was compiled")["outputs"]

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        self._ask({"command": "feeds", "poison": poison}, feeds, "when it ran", arrays)
        return dict(zip(self._outputs, arrays.values(), strict=True))

    def turn(self, seconds: float) -> list[float]:
        arrays: dict[str, Array] = {}
        message = {"command": "turn", "warmup": WARM_RUNS, "seconds": max(seconds, 1e-6), "most": None}
        self._ask(message, None, "when it was timed", arrays, self._limit_s + seconds)
        return [float(ns) / 1e6 for ns in arrays["ns"]]

    def _ask(
        self,
        message: Mapping[str, object],
        feeds: Mapping[str, Array] | None,
        when: str,
        into: dict[str, Array] | None = None,
        limit_s: float | None = None,
    ) -> dict[str, list[str]]:
        if not self._open:
            raise TrialLost("its process has ended")
        try:
            answer, arrays = self._worker.ask(message, feeds, limit_s or self._limit_s)
        except WorkerFailure as failure:
            if failure.error:
                prefix = "" if failure.error == RunError.__name__ else f"{failure.error}: "
                raise RunError(prefix + failure.message) from None
            self._open = False
            self._trials.lost(self._worker)
            raise TrialLost(f"{failure} {when}") from None
        if into is not None:
            into.update(arrays)
        return dict(answer)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._trials.free(self._worker)

    def abandon(self) -> None:
        if self._open:
            self._open = False
            self._trials.lost(self._worker)


class LocalTrial(Trial):
    """A candidate with the user's own operators: opened here once each of its library parts has run in a worker process."""

    def __init__(self, trials: Trials, program: Program, threads: int):
        self._trials, self._program, self._threads = trials, program, threads
        for part in (_part(program, k) for k, step in enumerate(program.steps) if step.executor != "reference"):
            trials.open(part, threads).close()
        self._engine: Engine | None = None
        self._feeds: Mapping[str, Array] = {}

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        self._feeds = feeds
        if self._engine is None:
            self._rehearse(feeds)
            self._engine = Engine(self._program, threads=self._threads)
        return self._engine.run(feeds)

    def turn(self, seconds: float) -> list[float]:
        from optdnn.runtime.measuring.latency import sample

        if self._engine is None:
            raise RunError("its trial has not run")
        context, feeds = self._engine.context(), self._feeds
        taken = sample(lambda: context.run(feeds), warmup=WARM_RUNS, duration=max(seconds, 1e-6))
        return [ns / 1e6 for ns in taken]

    def _rehearse(self, feeds: Mapping[str, Array]) -> None:
        """Run the program step by step: library steps in a worker process, the others here."""
        program = self._program
        values: dict[int, Array] = {
            i: program.blobs[b.blob] for i, b in enumerate(program.buffers) if b.blob is not None
        }
        values |= {i: np.asarray(feeds[spec.name]) for spec, i in program.inputs}
        for k, step in enumerate(program.steps):
            part = _part(program, k)
            if step.executor == "reference":
                (executor,) = prepare(part, LoadOptions())
                operands = [values.get(i) for i in step.inputs]
                results = executor.session().run(operands, [None] * len(step.outputs))
                values |= dict(zip(step.outputs, results, strict=True))
                continue
            trial = self._trials.open(part, self._threads)
            found = trial.run({spec.name: values[i] for spec, i in part.inputs})
            trial.close()
            values |= {i: found[spec.name] for spec, i in part.outputs}


def _part(program: Program, k: int) -> Program:
    """One step as a separate program: its inputs are the step's buffers that are not constants."""
    step = program.steps[k]
    read = [i for i in dict.fromkeys(step.inputs) if i >= 0 and program.buffers[i].blob is None]
    written = [i for i in step.outputs if i >= 0]
    inputs, outputs = (tuple((_spec(program, i), i) for i in numbers) for numbers in (read, written))
    return Program("cpu", program.precision, inputs, outputs, program.buffers, (step,), program.blobs)


def _spec(program: Program, number: int) -> TensorSpec:
    buffer = program.buffers[number]
    if buffer.shape is None:
        raise RunError(f"{buffer.name!r} has an unknown rank: what reads or gives it cannot be tried")
    return TensorSpec(f"{number} {buffer.name}", buffer.dtype, buffer.shape)


# ---------------------------------------------------------------- processes that outlive a build

_kept: dict[int, list[WorkerProcess]] | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """A context that keeps worker processes from one build to the next: for callers that build many small networks."""
    global _kept
    with _lock:
        nested, _kept = _kept is not None, {} if _kept is None else _kept
    try:
        yield
    finally:
        if not nested:
            with _lock:
                workers, _kept = [w for found in (_kept or {}).values() for w in found], None
            for worker in workers:
                worker.close()


def _take_kept(threads: int) -> list[WorkerProcess]:
    with _lock:
        return _kept.pop(threads, []) if _kept is not None else []


def _keep_or_close(threads: int, workers: list[WorkerProcess]) -> None:
    with _lock:
        if _kept is not None:
            _kept.setdefault(threads, []).extend(workers)
            return
    for worker in workers:
        worker.close()
