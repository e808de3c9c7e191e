"""The parent's end of the GPU worker (:mod:`optdnn.runtime.cuda.trials.gpu_worker`). A build uses the GPU only through it.

A kernel that does not end can only be ended with the process that started it, and a kernel that crashes makes the GPU unusable for
the whole process. So the worker is expendable: if a program hangs, crashes or writes outside of its memory, the worker is killed,
the caller gets an error, and the next question goes to a new worker.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from optdnn import errors
from optdnn.errors import OptdnnError, RunError
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, KernelError
from optdnn.runtime.cuda.trials.gpu_worker import FAULTS, fault_text
from optdnn.runtime.cuda.trials.sent import Sender
from optdnn.runtime.cuda.trials.timer import Machine, Timer, TrialFailed
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.runtime.program import Program
from optdnn.runtime.workers.process import WorkerFailure, WorkerGone, WorkerProcess
from optdnn.types import Array

MAIN = "optdnn.runtime.cuda.trials.gpu_worker:main"
ANSWERS_S, HOST_ANSWERS_S = 60.0, 600.0
"""Seconds after which a worker that does not answer is killed; the second value if operators run on the CPU meanwhile. The worker
itself notices a hanging launch sooner: these limits are for calls in which the worker itself is stuck."""
STARTS_S = 120.0
"""Seconds after which a worker that has not started is killed."""
BYTES_S = 50e6
"""The least bytes per second at which a message is expected to arrive."""
CALL_S = 5.0
"""Seconds that a library may take to plan each of its calls."""
LOSSES = 20
"""After this many workers are lost to programs, candidates are no longer tried: the GPU is assumed to be at fault."""
REPLAYS, REPLAYS_S, REPLAYED = 20, 3.0, 100.0
"""First runs of a finished program's graph: the most replays, the most seconds, and the limit of their time as a
multiple of one run launch by launch."""
NO_ROOM = "CUDA_ERROR_OUT_OF_MEMORY"


class CandidateLost(TrialFailed):
    """A candidate that hung, crashed or wrote outside of its memory during its trial. The GPU's state may have been the cause: no
    timing cache may remember it."""


class NetworkLost(RunError):
    """A network hung, crashed or wrote outside of its memory. Other networks can still be measured."""

    def __init__(self, network: Network, why: str):
        super().__init__(why)
        self.network = network


class GraphFault(RunError):
    """The launches of a program run one by one, but their graph does not."""


class StepFault(RunError):
    """A launch of a program hangs, crashes or writes outside of its memory when it runs alone. ``step``: its number, None if
    the worker could not report it."""

    def __init__(self, message: str, step: int | None):
        super().__init__(message)
        self.step = step


@dataclass
class FirstRun:
    """The first runs of a finished program: ``replays`` of its graph; ``same``: its launches, one by one, repeat to the bit.
    ``skipped``: why it did not run at all (an operator on the CPU refuses random inputs, no room on the GPU)."""

    replays: int = 0
    same: bool = True
    skipped: str | None = None


class GpuProcess:
    """The worker of a build; started for the first question, and again after a loss. One thread at a time uses it.

    The process runs ``main`` ("module:function"). ``generation`` counts the workers so far.
    """

    def __init__(self, main: str = MAIN):
        self._main = main
        self.losses: list[str] = []
        self.generation = 0
        self._worker: WorkerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._libraries: list[str] | None = None
        self._opened: tuple[int, list[str]] | None = None
        self._facts: dict[str, Any] = {}
        self._cubins: dict[tuple[Any, ...], Array] = {}
        self.cache = KernelCache()
        self.sender = Sender(self.cache, self._cubins)

    def begin(self) -> None:
        """Start the worker without waiting for it."""
        with self._lock:
            if self._worker is None and not self._closed:
                self._worker = WorkerProcess(usable_cores(), STARTS_S, self._main, alone=True)
                self.sender = Sender(self.cache, self._cubins)
                self.generation += 1

    def open(self, libraries: Collection[str] = ()) -> dict[str, Any]:
        """Facts of the GPU, with the versions of ``libraries``. Raises RunError if the GPU cannot be used."""
        self._libraries = sorted({*libraries, *(self._libraries or ())})
        self._ready()
        return self._facts

    def _ready(self) -> WorkerProcess:
        """The worker, with its GPU opened."""
        self.begin()
        assert self._worker is not None
        wanted = (self.generation, list(self._libraries or ()))
        if self._opened != wanted:
            try:
                self._facts, _ = self._worker.ask({"command": "open", "libraries": wanted[1]})
            except WorkerFailure as failure:
                self.lose()
                raise RunError(f"the process that tries GPU programs cannot use the GPU: {failure}") from failure
            self._opened = wanted
        return self._worker

    def ask(
        self,
        command: str,
        message: Mapping[str, Any] | None = None,
        program: Program | None = None,
        limit_s: float = ANSWERS_S,
    ) -> Any:
        """The worker's answer. ``program`` is sent with the question.

        Raises WorkerFailure; if it is a :func:`fault`, the worker has ended. Raises KernelError or EngineStale for a program
        whose kernels do not compile or belong to another version, RunError if no worker can be started.
        """
        worker = self._ready()
        parts, arrays = ({}, {}) if program is None else self.sender.pack(program)
        limit_s += sum(a.nbytes for a in arrays.values()) / BYTES_S
        limit_s += CALL_S * (0 if program is None else sum("call" in s.params for s in program.steps))
        try:
            reply, _ = worker.ask({"command": command, **parts, **(message or {})}, arrays, limit_s)
        except WorkerFailure as failure:
            if (why := fault(failure)) is not None:
                self.lose(why)
            raise
        except BaseException:
            self.lose()
            raise
        return reply

    def lose(self, why: str | None = None) -> None:
        """End the worker. ``why``: the program's fault."""
        if why is not None:
            self.losses.append(why)
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()  # it holds nothing of value

    def alive(self, generation: int) -> bool:
        """Whether the present worker has this number."""
        return self._worker is not None and self.generation == generation

    def close(self) -> None:
        """End the worker; no other one is started."""
        self._closed = True
        self.lose()


def fault(failure: WorkerFailure) -> str | None:
    """The fault of a program that ended the worker, in words; None if the worker continues."""
    if isinstance(failure, WorkerGone):
        return f"crashed: {failure.message}" if failure.limit is None else f"hung: no answer in {failure.limit:.0f} s"
    return fault_text(failure.error, failure.message) if failure.error in {f.__name__ for f in FAULTS} else None


_LENT: ContextVar[GpuProcess | None] = ContextVar("optdnn_gpu_process", default=None)


@contextmanager
def gpu_process() -> Iterator[GpuProcess]:
    """The worker of this thread's build: the one of an enclosing block, otherwise a new one that ends with this block."""
    around = _LENT.get()
    if around is not None:
        yield around
        return
    process = GpuProcess(MAIN)
    token = _LENT.set(process)
    try:
        yield process
    finally:
        _LENT.reset(token)
        process.close()


class TrialTimer(Timer):
    """Measures like :class:`optdnn.runtime.cuda.trials.timer.GpuTimer`, in the worker. Raises RunError if there is no GPU."""

    def __init__(self, process: GpuProcess, libraries: Collection[str] = ()):
        self._process, self.cache = process, process.cache
        facts = process.open(libraries)
        self.machine = Machine(**facts["machine"])
        self.device = SimpleNamespace(arch=facts["arch"], name=facts["name"])
        self._numbers = itertools.count()

    def trial(self, key: str, program: Program, *, cold: bool, give_up: float) -> float:
        """Like :meth:`~optdnn.runtime.cuda.trials.timer.GpuTimer.trial`, in the worker. A candidate never takes down this process
        or the GPU: instead, CandidateLost (a TrialFailed) is raised. Raises RunError if no worker can be started."""
        if len(self._process.losses) >= LOSSES:
            raise RunError(f"{LOSSES} programs hung or crashed, which is the GPU's fault rather than theirs")
        finite = min(give_up, 1e9)
        try:
            message = {"key": key, "cold": cold, "give_up": finite}
            return float(self._process.ask("trial", message, program, 2 * ANSWERS_S)["seconds"])
        except KernelError as error:
            raise TrialFailed(error.message.splitlines()[0]) from error
        except WorkerFailure as failure:
            why = fault(failure)
            if why is not None:
                raise CandidateLost(why) from failure
            raise TrialFailed(failure.message if failure.error in KNOWN else str(failure)) from failure

    def load(self, program: Program) -> Network:
        """A whole network, ready to be raced. Raises NetworkLost, RunError, EngineError."""
        network = Network(self._process, program, self._numbers)
        network.load()
        return network

    def first_run(self, program: Program) -> FirstRun:
        """Run a finished program: its launches one by one, then its graph. Raises StepFault, GraphFault."""
        on_host = any(s.executor != "cuda" for s in program.steps)
        try:
            answer = self._process.ask("singly", {}, program, HOST_ANSWERS_S if on_host else 2 * ANSWERS_S)
        except WorkerFailure as failure:
            why = fault(failure)
            if why is None or (on_host and isinstance(failure, WorkerGone) and failure.limit is not None):
                return FirstRun(skipped=why or failure.message)  # the CPU's part may be slow
            raise StepFault(why, None) from failure
        if (why := answer.get("fault")) is not None:
            self._process.lose(why)
            raise StepFault(f"{step_in_words(answer)}, {why}", answer["step"])
        try:
            message = {"most": REPLAYS, "seconds": REPLAYS_S, "same": answer["same"]}
            limit = ANSWERS_S + REPLAYED * answer["seconds"]
            return FirstRun(self._process.ask("replay", message, None, limit)["replays"], answer["same"])
        except WorkerFailure as failure:
            why = fault(failure)
            refused = failure.error == "CudaError" and NO_ROOM not in failure.message
            if why is None and not refused and failure.error != "ResultsDiffer":
                return FirstRun(same=answer["same"], skipped=failure.message)
            raise GraphFault(why or failure.message) from failure


def step_in_words(step: Mapping[str, Any]) -> str:
    """A step of the worker's answer, in words."""
    if step["step"] is None:
        return "a launch"
    nodes = f" ({' + '.join(step['nodes'])})" if step["nodes"] else ""
    return f"step {step['step']}, {step['kind']}{nodes}" + (f", by {step['tactic']}" if step["tactic"] else "")


class Network:
    """A network in the worker; loaded again if that worker was lost meanwhile."""

    def __init__(self, process: GpuProcess, program: Program, numbers: Iterator[int]):
        self._process, self._program, self._numbers = process, program, numbers
        self._number, self._generation = -1, 0

    def load(self) -> None:
        """Load it, unless the worker holds it."""
        if not self._process.alive(self._generation):
            self._number = next(self._numbers)
            self._ask("load", self._program)
            self._generation = self._process.generation

    def times(self) -> list[float]:
        self.load()
        return [float(t) for t in self._ask("times")["times"]]

    def _ask(self, command: str, program: Program | None = None) -> Any:
        try:
            return self._process.ask(command, {"net": self._number}, program, 2 * ANSWERS_S)
        except WorkerFailure as failure:
            why = fault(failure)
            if why is not None:
                raise NetworkLost(self, why) from failure
            raise KNOWN.get(failure.error, RunError)(failure.message) from failure

    def close(self) -> None:
        if self._process.alive(self._generation):
            self._generation = 0
            with suppress(WorkerFailure, RunError):  # an open network is lost with the worker
                self._process.ask("close", {"net": self._number})


KNOWN: dict[str, type[OptdnnError]] = {
    e.__name__: e for e in (RunError, TrialFailed, errors.EngineError, errors.EngineStale, errors.InputError)
}
"""Errors of the worker that are raised here with the same type."""
