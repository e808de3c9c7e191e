"""The compiled kernels of a program: each kernel of a recipe is compiled once and becomes a blob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.custom import CustomOp
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.runtime.program import Kernel, Program
from optdnn.types import Array

CubinKey = tuple[Any, ...]
"""Everything that a cubin depends on, except the compiler's version."""


def with_cubins(
    program: Program, say: Callable[[str], None], ready: Mapping[CubinKey, Array], custom_ops: Sequence[CustomOp]
) -> Program:
    """The program with the cubins of all kernels as blobs. Cubins that are not ``ready`` are compiled."""
    from optdnn.runtime.cuda.compile.nvrtc import KernelCache, version
    from optdnn.runtime.cuda.compile.recipes import compile_kernels

    kernels = {cubin_key(k): k for k in program.kernels}
    missing = {key: k for key, k in kernels.items() if key not in ready}
    say(f"compile {len(missing)} kernels")
    compiled = compile_kernels(list(missing.values()), KernelCache(), min(16, usable_cores()), custom_ops)
    cubins = {**ready, **{key: np.frombuffer(c, np.uint8) for key, c in zip(missing, compiled, strict=True)}}
    number = {key: len(program.blobs) + i for i, key in enumerate(kernels)}
    if missing:
        program.meta["nvrtc"] = ".".join(map(str, version()))
    blobs = [*program.blobs, *(cubins[key] for key in kernels)]
    return replace(program, kernels=tuple(replace(k, cubin=number[cubin_key(k)]) for k in program.kernels), blobs=blobs)


def cubins_of(plans: Iterable[Program]) -> dict[CubinKey, Array]:
    """The compiled kernels of programs."""
    return {cubin_key(k): plan.blobs[k.cubin] for plan in plans for k in plan.kernels if k.cubin is not None}


def cubin_key(k: Kernel) -> CubinKey:
    """Equal for kernels with the same cubin."""
    return (k.template, k.arch, tuple(sorted(k.generated.items())), k.options, k.source)
