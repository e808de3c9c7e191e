"""Kernels whose waits trap if they never end."""

from __future__ import annotations

from dataclasses import replace

from optdnn.runtime.cuda.compile.nvrtc import Recipe


def trapping(recipe: Recipe) -> Recipe:
    """The recipe of a kernel whose faults of synchronization end it with an error instead of hanging the GPU."""
    return replace(recipe, options=(*recipe.options, "-DBARRIER_TRAP"))
