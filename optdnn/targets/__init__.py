"""Targets: machines that engines are built for. Each target compiles optimized graphs and loads programs.

Their passes are in :mod:`optdnn.passes.pipelines`.
"""

from __future__ import annotations

from optdnn.config import BuildOptions
from optdnn.errors import UsageError
from optdnn.target_name import TargetName
from optdnn.targets.base import Target

__all__ = ["Target", "resolve_target", "target_for"]


def target_for(options: BuildOptions) -> Target:
    """The target of options whose target is resolved."""
    name = TargetName.parse(options.target)
    match name.family:
        case "cuda":
            from optdnn.targets.cuda import Cuda

            return Cuda(name)
        case "simulate":
            from optdnn.targets.simulate import Simulate

            return Simulate(name)
        case "reference":
            from optdnn.targets.reference import Reference

            return Reference(name)
        case _:
            from optdnn.targets.cpu import Cpu

            return Cpu(name)


def resolve_target(target: str) -> str:
    """Resolves ``cuda`` to cuda for the GPU of this machine, and ``auto`` likewise if that GPU is usable, otherwise to cpu.

    Raises UsageError for an unknown target and for ``cuda`` on a machine without a GPU, MissingDependency if the bindings
    of the driver are missing.
    """
    if TargetName.parse(target).family == "auto":
        from optdnn.runtime.cuda.usable import why_not

        target = "cpu" if why_not() else "cuda"
    if target == "cuda":
        from optdnn.runtime.cuda.device import arch_here, gpu_count

        if gpu_count() == 0:
            raise UsageError(
                "there is no usable NVIDIA GPU here to build for", hint="name the architecture: --target cuda:sm_90a"
            )
        return f"cuda:{arch_here()}"
    return target
