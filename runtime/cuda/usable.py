"""Whether engines for GPUs can be built for, and run on, this machine's GPU; and the reason if they cannot."""

from __future__ import annotations

from importlib.util import find_spec

from optdnn.errors import MissingDependency, RunError

PACKAGES = {"cuda.bindings": "cuda-bindings", "cuda.bindings.nvrtc": "cuda-bindings", "cupy": "cupy-cuda13x"}
"""Module -> the package that contains it, all of the `cuda` extra."""


def why_not() -> str | None:
    """Why the GPU of this machine is not usable, and the remedy; None if it is usable."""
    missing = sorted({package for module, package in PACKAGES.items() if not _there(module)})
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'optdnn[cuda]'"
    from optdnn.runtime.cuda.compile.nvrtc import version
    from optdnn.runtime.cuda.device import gpu_count

    try:
        if gpu_count() == 0:
            return "no NVIDIA GPU or no driver"
        version()
    except (MissingDependency, RunError) as error:
        return error.message
    return None


def compiles() -> bool:
    """Whether kernels can be compiled on this machine. This needs no GPU."""
    if not _there("cuda.bindings.nvrtc"):
        return False
    from optdnn.runtime.cuda.compile.nvrtc import version

    try:
        version()
    except (MissingDependency, RunError):
        return False
    return True


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False
