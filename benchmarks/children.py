"""The child processes of the harness, seen from the parent, and the turns in which they have a GPU to themselves."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.rows import ROOT

START_S = 120.0
"""Seconds that a child may take to start."""
LOOK_S = 1.0
"""Seconds between two looks at how long a child was stopped."""


def environment_with(**variables: str) -> dict[str, str]:
    """This process's environment for a child that imports this package, with further variables."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


class OutOfTime(Exception):
    """A child did not answer in time."""


class Worker:
    """A child process that takes orders one by one. If it ends, a new process takes its place."""

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._log: Any = None
        self._state = threading.Lock()
        self._stopped_s, self._stopped_at = 0.0, math.inf

    def start(self) -> None:
        """Start the process, unless it runs. Raises RuntimeError or OutOfTime if it does not start."""
        if self._process is not None:
            return
        environment = environment_with(**self._environment)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the child)
        with self._state:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks", "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._log, text=True, env=environment, start_new_session=True,
            )  # fmt: skip
            if self._stopped_at != math.inf:
                self._signal(signal.SIGSTOP)
        self._lines = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()
        self.answer(("UP",), START_S)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            lines.put(text)
        lines.put(None)

    def send(self, text: str) -> None:
        """Send the child a line."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()

    def answer(self, beginnings: tuple[str, ...], limit_s: float) -> str:
        """The child's next line that begins with one of ``beginnings``. Seconds in which it is stopped do not count.

        Raises OutOfTime, or RuntimeError if the process ended; the child is then closed."""
        end = time.monotonic() + limit_s - self.stopped_seconds()
        while True:
            left = end + self.stopped_seconds() - time.monotonic()
            try:
                text = self._lines.get(timeout=min(max(0.0, left), LOOK_S))
            except queue.Empty:
                if end + self.stopped_seconds() > time.monotonic():
                    continue
                self.close()
                raise OutOfTime(f"no end in {limit_s:.3g} s") from None
            if text is None:
                raise RuntimeError(self._died())
            if text.startswith(beginnings):
                return text

    def _died(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._log.seek(0)
        said = [line for line in self._log.read().splitlines() if line.strip()][-1:]
        self.close()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process ended with {how}: {said[0] if said else 'nothing said'}"[:400]

    def stop(self) -> None:
        """Stop the child and the processes that it started or will start, until :meth:`go_on`."""
        with self._state:
            if self._stopped_at == math.inf:
                self._stopped_at = time.monotonic()
                self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume a child that was stopped."""
        with self._state:
            if self._stopped_at != math.inf:
                self._stopped_s, self._stopped_at = self.stopped_seconds(), math.inf
                self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stopped_seconds(self) -> float:
        """Seconds for which the child has been stopped so far."""
        return self._stopped_s + max(0.0, time.monotonic() - self._stopped_at)

    def close(self) -> None:
        """End the child and its processes."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._log):
            with suppress(OSError):
                pipe.close()
        with self._state:
            self._process = None


class Gate:
    """Gives a process that measures times the GPU to itself. The other processes on this GPU are stopped meanwhile, even in the
    middle of a long compilation. No process begins to work while another one times or waits to."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: set[Worker] = set()
        self._waiting, self._taken = 0, False

    @contextmanager
    def shared(self, worker: Worker) -> Iterator[None]:
        """Work at the same time as others. The child is stopped while another one times."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not self._waiting)
            self._working.add(worker)
        try:
            yield
        finally:
            with self._changed:
                self._working.discard(worker)
                worker.go_on()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work alone. The others continue when no further child waits to time."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._taken)
            self._waiting -= 1
            self._taken = True
            for worker in self._working:
                worker.stop()
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                for worker in () if self._waiting else self._working:
                    worker.go_on()
                self._changed.notify_all()
