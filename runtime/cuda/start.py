"""CUDA's own start, some tenths of a second without Python, beside the reading and checking of an engine."""

from __future__ import annotations

import threading
from contextlib import suppress

from optdnn.errors import OptdnnError


def begin() -> threading.Thread:
    """Start CUDA and the context that engines use, on a thread of its own. Who opens the device meanwhile waits in the driver."""
    thread = threading.Thread(target=_begin, name="optdnn-cuda-start", daemon=True)
    thread.start()
    return thread


def _begin() -> None:
    from optdnn.runtime.cuda.device import Device

    with suppress(OptdnnError):  # whoever then uses the GPU meets it, too, and says so
        Device.open()
