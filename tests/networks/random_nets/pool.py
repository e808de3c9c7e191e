"""Worker processes that try networks. A process that dies or hangs costs its network, not the run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
Task = Mapping[str, Any]
"""``setting``: [target, precision, tactics], and ``family`` with ``seed``, or ``file``."""
Row = dict[str, Any]
COMMAND = (sys.executable, "-m", "random_nets.pool")
START_SECONDS = 120.0
"""A worker imports its libraries within this time."""


class Worker:
    """One process that runs one task after another. It starts with the first task, and again after a death or ``most`` tasks."""

    def __init__(self, timeout: float, most: int = 300, command: Sequence[str] = COMMAND):
        self.timeout, self.most, self.command = timeout, most, command
        self._process: subprocess.Popen[bytes] | None = None
        self._done, self._buffer = 0, b""

    def ask(self, task: Task) -> Row:
        """The row of a task; "crashed" or "hung" with its stage if the process did not answer."""
        if self._process is None or self._done >= self.most:
            self.close()
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._done += 1
        try:
            self._process.stdin.write(json.dumps(dict(task)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._died(task, "start")
        stage, end = "start", time.monotonic() + self.timeout
        while True:
            line = self._line(end - time.monotonic())
            if line is None:
                self.close()
                return _row(task, "hung", f"{stage}: no end within {self.timeout:g} s")
            if line == b"":
                return self._died(task, stage)
            answer = json.loads(line)
            if isinstance(answer, dict):
                if answer["verdict"] != "right" and task["setting"][0] == "cuda":
                    self.close()  # a GPU context that saw a fault fails in all later calls
                return {**_named(task), **answer}
            stage = answer

    def _start(self) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [environment.get("PYTHONPATH")])])
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, "1")
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        self._done, self._buffer = 0, b""
        if (line := self._line(START_SECONDS)) != b'"ready"':
            self.close()
            raise RuntimeError(f"a worker did not start: {line!r}")

    def _line(self, seconds: float) -> bytes | None:
        """The next line; b"" at the end of the process, None if none came in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self, task: Task, stage: str) -> Row:
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return _row(task, "no_oracle" if stage == "oracle" else "crashed", f"{stage}: the process ended with {how}")

    def close(self) -> None:
        """End the process and its children."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue  # input that was not sent to a dead process
            self._process = None


def _named(task: Task) -> Row:
    name = task.get("name") or (Path(task["file"]).stem if "file" in task else f"{task['family']}-{task['seed']}")
    return {"name": name, "setting": " ".join(filter(None, task["setting"]))} | {
        k: task[k] for k in ("family", "seed") if k in task
    }


def _row(task: Task, verdict: str, detail: str) -> Row:
    return {**_named(task), "verdict": verdict, "detail": detail}


def tried(
    tasks: Iterable[Task], jobs: int, timeout: float, most: int = 300, command: Sequence[str] = COMMAND
) -> Iterator[Row]:
    """The rows of tasks in the order in which they end, from ``jobs`` concurrent processes."""
    source, rows = iter(tasks), _Rows()
    lock = threading.Lock()

    def work() -> None:
        worker = Worker(timeout, most, command)
        try:
            while True:
                with lock:
                    task = next(source, None)
                if task is None or rows.stopped:
                    break
                rows.put(worker.ask(task))
        except BaseException as error:
            rows.put(error)
        finally:
            worker.close()
            rows.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for t in threads:
        t.start()
    try:
        yield from rows.until(jobs)
    finally:
        rows.stopped = True
        for t in threads:
            t.join()


class _Rows:
    """Rows from several threads; an exception of one is raised in the reader."""

    def __init__(self) -> None:
        self._ready: list[Row | BaseException | None] = []
        self._changed = threading.Condition()
        self.stopped = False

    def put(self, row: Row | BaseException | None) -> None:
        with self._changed:
            self._ready.append(row)
            self._changed.notify()

    def until(self, ends: int) -> Iterator[Row]:
        while ends:
            with self._changed:
                while not self._ready:
                    self._changed.wait()
                row = self._ready.pop(0)
            if row is None:
                ends -= 1
            elif isinstance(row, BaseException):
                raise row
            else:
                yield row


def serve(answer: Callable[[Any], None]) -> None:
    """The loop of a worker: read tasks from stdin, write stages and rows."""
    from optdnn.lowering.cpu.trials import kept
    from optdnn.runtime.cuda.trials.process import gpu_process
    from random_nets.targets import Setting
    from random_nets.trial import drawn_trial, filed_trial

    answer("ready")
    with gpu_process(), kept():  # the builds of this worker share the processes that try their candidates
        for line in sys.stdin:
            task = json.loads(line)
            setting = Setting(*task["setting"])
            if "file" in task:
                answer(filed_trial(Path(task["file"]), setting, answer))
            else:
                answer(drawn_trial(task["family"], task["seed"], setting, answer))


def main() -> None:
    """Answers go to the original stdout; output of libraries is discarded."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    serve(answer)


if __name__ == "__main__":
    main()
