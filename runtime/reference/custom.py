"""NumPy kernels. The user's own operators (:mod:`optdnn.custom`)."""

from __future__ import annotations

from optdnn.custom import run_custom
from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {"Custom": run_custom}
