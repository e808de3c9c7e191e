"""Compiles kernels under NVRTC and checks that their resources suffice."""

from __future__ import annotations

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import GpuFacts

REGISTERS = 65536
"""Registers of a multiprocessor."""


def check_spills(recipe: nvrtc.Recipe, function: str | None = None, threads: int = 0) -> nvrtc.Resources:
    """The resources of ``function`` (None: the recipe's only one), which neither spills registers nor has a stack, and whose
    registers suffice for so many threads of a multiprocessor."""
    found = nvrtc.resources(recipe)
    (kernel,) = found.values() if function is None else [found[function]]
    assert kernel.spill_bytes == kernel.stack_bytes == 0, (recipe.name, recipe.arch, recipe.generated, kernel)
    assert kernel.registers * threads <= REGISTERS, (recipe.name, recipe.arch, recipe.generated, kernel)
    return kernel


def check_launch(made: Launch, gpu: GpuFacts, blocks: int = 1) -> None:
    """The kernel does not spill; registers suffice for so many blocks of a multiprocessor, shared memory for one."""
    kernel = check_spills(made.recipe, made.function, made.block * blocks)
    assert made.shared + kernel.shared_bytes <= gpu.shared_per_block
