"""Runs in separate threads: the caller continues, and gets the results by a callback, a future or an await."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")
THREADS = 4
"""Concurrent runs; further ones wait. Each has its own context, and with it its own memory."""

Callback = Callable[[Any, Any, str], None]
"""Called with the results (None after an error), the caller's ``user_data``, and the error's text ("" without one)."""


class Runs:
    """The threads of one engine or session; they start with the first run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def start(
        self, run: Callable[[], Result], callback: Callback | None = None, user_data: object = None
    ) -> Future[Result]:
        """Begin ``run()`` in a thread, which then calls ``callback``. An error of the callback itself is logged."""
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(THREADS, "optdnn-run")
            return self._pool.submit(_run, run, callback, user_data)


def _run(run: Callable[[], Result], callback: Callback | None, user_data: object) -> Result:
    callback = callback or (lambda result, data, error: None)
    try:
        result = run()
    except Exception as error:
        _call(callback, None, user_data, str(error))
        raise
    _call(callback, result, user_data, "")
    return result


def _call(callback: Callback, result: object, user_data: object, error: str) -> None:
    try:
        callback(result, user_data, error)
    except Exception:
        logging.getLogger("optdnn").exception("the callback of run_async failed")
