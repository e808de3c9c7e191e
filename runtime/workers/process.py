"""The parent's end of a worker process: starts it, sends it commands, notices if it dies or hangs, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.errors import InternalError
from optdnn.runtime.workers.wire import receive, send
from optdnn.temporary import temporary_file
from optdnn.types import Array


class WorkerFailure(Exception):
    """The worker's answer is an error: ``error`` is its type, ``message`` its first line. The text contains both."""

    def __init__(self, error: str, message: str):
        super().__init__(f"{error}: {message}" if error else message)
        self.error, self.message = error, message


class WorkerGone(WorkerFailure):
    """There is no answer: the process crashed, or took longer than ``limit`` seconds and was killed (None: it crashed)."""

    def __init__(self, message: str, limit: float | None):
        super().__init__("", message)
        self.limit = limit


def python_command(main: str, *arguments: str) -> list[str]:
    """The command line of a Python process with this one's import path. It runs ``main`` ("module:function"), with ``arguments`` as
    its ``sys.argv[1:]``."""
    module, _, function = main.partition(":")
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import {function}; {function}()"
    # -P: a folder called optdnn in the user's current folder must not be taken for the package.
    return [sys.executable, "-P", "-c", code, json.dumps(sys.path), *arguments]


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a process has ended. It is killed after ``seconds``."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WorkerProcess:
    """A new Python process with this one's import path that runs ``main`` ("module:function"), a worker of
    :func:`optdnn.runtime.workers.wire.run`. ``alone``: Ctrl-C in the terminal does not reach it. ``without``: environment variables
    that it does not get; ``files``: descriptors that it gets."""

    def __init__(
        self,
        threads: int,
        timeout_s: float,
        main: str = "optdnn.runtime.racing.worker:main",
        *,
        alone: bool = False,
        without: Sequence[str] = (),
        files: Sequence[int] = (),
    ):
        self._timeout_s = timeout_s
        self._errors = temporary_file()
        pools = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        self._process = subprocess.Popen(
            python_command(main, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={k: v for k, v in os.environ.items() if k not in without} | pools,
            start_new_session=alone,
            pass_fds=files,
        )

    def ask(
        self,
        message: Mapping[str, Any],
        arrays: Mapping[str, Array] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Any, dict[str, Array]]:
        """Send a command and wait for its answer, for at most ``timeout_s`` seconds (default: the process's limit).

        Raises WorkerFailure; WorkerGone if no answer came: then the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = self._timeout_s if timeout_s is None else timeout_s
        timer = threading.Timer(limit, self._expire)
        timer.daemon = True
        self._expired = False
        timer.start()
        try:
            send(self._process.stdin, message, arrays)  # type: ignore[arg-type]
            answer = receive(self._process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError, InternalError):
            answer = None
        except BaseException:  # interrupted: a late answer would be taken for the next question's
            self._process.kill()
            raise
        finally:
            timer.cancel()
        if answer is None:
            raise WorkerGone(self._epitaph(limit), limit if self._expired else None)
        reply, results = answer
        if not reply.pop("ok"):
            raise WorkerFailure(reply["error"], reply["message"])
        return reply, results

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _epitaph(self, limit: float) -> str:
        if self._expired:
            return f"took longer than {limit:g} s and was stopped"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
            cause = f"its process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        else:
            cause = f"its process ended with code {code}"
        said = self._last_words()
        return f"{cause}: {said}" if said else cause

    def _last_words(self) -> str:
        """The last line that the process wrote to its standard error."""
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 4000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def kill(self) -> None:
        """End the process immediately, whatever it does, and wait for it."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process and wait for it."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.poll() is None and self._process.stdin is not None:
                send(self._process.stdin, {"command": "quit"})  # type: ignore[arg-type]
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()
        wait_or_kill(self._process, 5)
        self._errors.close()
