"""The GPU worker: the process of a build in which GPU programs run before anybody relies on them.

It times candidates and whole networks for the tuner, and makes the first runs of a finished program. The type of the error in the
answer tells whether a kernel hangs, crashes or writes outside of its memory; the parent then ends the process and starts another
(:mod:`optdnn.runtime.cuda.trials.process`). Commands, over :mod:`optdnn.runtime.workers.wire`'s protocol:

* ``open``: libraries (whose versions matter) -> the machine and the device
* ``trial`` (with a program): key, cold, give_up -> seconds
* ``load`` (with a program): net (its number); ``times``: net -> milliseconds of some inferences; ``close``: net
* ``singly`` (with a program): its launches one by one -> same (do they repeat to the bit?), seconds; or fault: why, and the step
* ``replay``: most, seconds, same -> replays of that program's graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from optdnn.errors import RunError
from optdnn.runtime.cuda import start
from optdnn.runtime.cuda.trials.first_runs import FirstRuns
from optdnn.runtime.cuda.trials.sent import Receiver
from optdnn.runtime.cuda.trials.timer import GpuTimer, KernelCrashes, KernelHangs, MemoryCorrupted
from optdnn.runtime.program import Program
from optdnn.runtime.workers.wire import Answer, run
from optdnn.types import Array

FAULTS = (KernelHangs, KernelCrashes, MemoryCorrupted)
"""After these errors the process must not run anything else."""


class Gpu(GpuTimer):
    """The GPU as the worker uses it."""

    def first_runs(self, program: Program) -> FirstRuns:
        return FirstRuns(self, program)


class GpuWorker:
    """Answers the commands. ``make(libraries)`` opens the GPU and returns a :class:`Gpu`."""

    def __init__(self, make: Callable[[Sequence[str]], Any] = Gpu):
        self._make = make
        self._gpu: Any = None
        self._received = Receiver()
        self._nets: dict[int, Any] = {}
        self._first: Any = None

    def do_open(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        self._gpu = self._make(message["libraries"])
        device = self._gpu.device
        return {"machine": asdict(self._gpu.machine), "arch": device.arch, "name": device.name}, None

    def do_trial(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        program = self._received.unpack(message, arrays)
        with self._gpu_faults():
            seconds = self._gpu.trial(message["key"], program, cold=message["cold"], give_up=message["give_up"])
        return {"seconds": seconds}, None

    def do_load(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        program = self._received.unpack(message, arrays)
        with self._gpu_faults():
            self._nets[message["net"]] = self._gpu.load(program)
        return {}, None

    def do_times(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        with self._gpu_faults():
            return {"times": self._nets[message["net"]].times()}, None

    def do_close(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        self._nets.pop(message["net"]).close()
        return {}, None

    def do_singly(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        self._first = None  # its memory is freed before another program's is allocated
        with self._gpu_faults():
            self._first = self._gpu.first_runs(self._received.unpack(message, arrays))
        try:
            with self._gpu_faults():
                same = self._first.singly()
        except FAULTS as fault:
            return {"fault": fault_text(type(fault).__name__, fault.message), **self._first.step(self._first.at)}, None
        return {"same": same, "seconds": self._first.seconds}, None

    def do_replay(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        first, self._first = self._first, None
        with self._gpu_faults():
            return {"replays": first.replay(message["most"], message["seconds"], same=message["same"])}, None

    @contextmanager
    def _gpu_faults(self) -> Iterator[None]:
        """Turns an error that makes the GPU unusable into KernelCrashes."""
        try:
            yield
        except FAULTS:
            raise
        except RunError as error:
            if not self._gpu.usable():
                raise KernelCrashes(error.message) from error
            raise


def fault_text(error: str, message: str) -> str:
    """A fault in words, from the name of its type."""
    return {"KernelHangs": "hung: ", "KernelCrashes": "crashed: "}.get(error, "") + message


def main() -> None:
    """Serve until the parent quits or has ended."""
    start.begin()
    run(GpuWorker())
