"""NumPy kernels. Operators that the user brought (:mod:`optdnn.custom`)."""

from __future__ import annotations

from optdnn.custom import run_custom
from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {"Custom": run_custom}
