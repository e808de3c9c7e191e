"""The start of CUDA, which takes some tenths of a second, and the loading of the vendors' libraries, in parallel with other work.

Both are waits in the driver and the system's loader. Code that needs one of them meanwhile waits there until it is ready.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from optdnn.errors import OptdnnError

if TYPE_CHECKING:
    from optdnn.runtime.cuda.trials.process import GpuProcess


def begin() -> threading.Thread:
    """Start CUDA and the context that engines use, on a separate thread."""

    def work() -> None:
        from optdnn.runtime.cuda.device import Device

        Device.open()

    return _aside("optdnn-cuda-start", work)


def begin_trials(process: GpuProcess, target: str) -> threading.Thread:
    """Start the process that tries GPU programs, if ``target`` ("auto", "cuda" or "cuda:ARCH") is this machine's GPU, on a
    separate thread."""

    def work() -> None:
        from optdnn.runtime.cuda.device import arch_here, gpu_count

        if gpu_count() and target in ("auto", "cuda", f"cuda:{arch_here()}"):
            process.begin()

    return _aside("optdnn-trials-start", work)


def load_libraries(*names: str) -> threading.Thread:
    """Load the present libraries whose kernels a build may use ("cudnn", "cublaslt"), on a separate thread."""

    def work() -> None:
        from optdnn.runtime.cuda.device import gpu_count
        from optdnn.runtime.cuda.libraries.find import files

        if gpu_count() == 0:
            return
        # Called as a foreign function, dlopen lets other threads run; ctypes.CDLL and import do not.
        try:
            dlopen = ctypes.CDLL(None).dlopen
        except (AttributeError, OSError, TypeError):  # a system without dlopen: libraries are loaded on use
            return
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        for name in names:
            any(
                dlopen(path.encode(), os.RTLD_NOW | os.RTLD_LOCAL) for path in files(name)
            )  # up to the first that exists

    return _aside("optdnn-libraries", work)


def _aside(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` on a thread. An error is ignored: code that then uses the GPU gets the same error, and reports it."""

    def run() -> None:
        with suppress(OptdnnError):
            work()

    thread = threading.Thread(target=run, name=name)  # not a daemon: a process must not end during the driver's start
    thread.start()
    return thread
