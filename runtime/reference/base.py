"""Conventions of the NumPy kernels.

A kernel is ``kernel(*arrays, **attrs) -> tuple of arrays``; absent optional operands are None; attributes are the fields
of the kind's attribute dataclass. Kernels compute in the dtype they are given (so that promoted float64 runs stay exact);
half precisions are widened by :func:`optdnn.runtime.reference.run.run_kernel`, which rounds once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from optdnn.types import Array

Kernel: TypeAlias = Callable[..., tuple[Array, ...]]
