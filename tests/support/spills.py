"""Compiles kernels under NVRTC and checks that their registers suffice."""

from __future__ import annotations

from optdnn.runtime.cuda.compile import nvrtc


def check_spills(recipe: nvrtc.Recipe, function: str | None = None) -> nvrtc.Resources:
    """The resources of ``function`` (None: the recipe's only one), which neither spills registers nor has a stack."""
    found = nvrtc.resources(recipe)
    (kernel,) = found.values() if function is None else [found[function]]
    assert kernel.spill_bytes == kernel.stack_bytes == 0, (recipe.name, recipe.arch, recipe.generated, kernel)
    return kernel
