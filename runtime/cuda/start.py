"""CUDA's own start, some tenths of a second, and the loading of the vendors' libraries, beside other work.

Both are waits in the driver and the system's loader. Whoever needs the one or the other meanwhile waits there for what is left.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from optdnn.errors import OptdnnError

if TYPE_CHECKING:
    from optdnn.runtime.cuda.trials.process import GpuProcess


def begin() -> threading.Thread:
    """Start CUDA and the context that engines use, on a thread of its own."""
    return _aside("optdnn-cuda-start", _open)


def begin_trials(process: GpuProcess, target: str) -> threading.Thread:
    """Start the process that tries GPU programs, where ``target`` ("auto", "cuda" or "cuda:ARCH") is the GPU of this machine, on a
    thread of its own."""
    return _aside("optdnn-trials-start", lambda: _begin(process, target))


def load_libraries(*names: str) -> threading.Thread:
    """Load libraries whose kernels a build may use ("cudnn", "cublaslt"), as far as they are here, on a thread of its own."""
    return _aside("optdnn-libraries", lambda: _load(names))


def _aside(name: str, work: Callable[[], None]) -> threading.Thread:
    # Not a daemon: a process must not end in the midst of the driver's start.
    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def _open() -> None:
    from optdnn.runtime.cuda.device import Device

    with suppress(OptdnnError):  # whoever then uses the GPU meets it, too, and says so
        Device.open()


def _begin(process: GpuProcess, target: str) -> None:
    from optdnn.runtime.cuda.device import arch_here, gpu_count

    with suppress(OptdnnError):  # whoever then uses the GPU meets it, too, and says so
        if gpu_count() and target in ("auto", "cuda", f"cuda:{arch_here()}"):
            process.begin()


def _load(names: Sequence[str]) -> None:
    from optdnn.runtime.cuda.device import gpu_count
    from optdnn.runtime.cuda.libraries.find import files

    try:
        if gpu_count() == 0:
            return
    except OptdnnError:  # no bindings of the driver, no kernels
        return
    # Called as a foreign function, dlopen lets other threads run; ctypes.CDLL and import do not.
    try:
        dlopen = ctypes.CDLL(None).dlopen
    except (AttributeError, OSError, TypeError):  # a system without it: they are loaded when they are needed
        return
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name in names:
        any(dlopen(path.encode(), os.RTLD_NOW | os.RTLD_LOCAL) for path in files(name))  # up to the first that is there
