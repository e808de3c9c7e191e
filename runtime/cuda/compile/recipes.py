"""From a program's table of kernels to recipes and compiled code."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.custom import CustomOp
from optdnn.errors import EngineStale, UsageError
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, KernelError, Recipe
from optdnn.runtime.cuda.kernel_text.allowed import check_kernels, is_of
from optdnn.runtime.program import Kernel, Program


def recipe_of(kernel: Kernel) -> Recipe:
    """The recipe of an entry of the table."""
    return Recipe(kernel.template, kernel.arch, dict(kernel.generated), tuple(kernel.options))


def cubins(
    program: Program,
    *,
    trust: bool = False,
    recompile: bool = False,
    cache: KernelCache | None = None,
    custom_ops: Sequence[CustomOp] = (),
) -> list[bytes]:
    """The compiled code of every kernel. With ``trust``, the engine's code is used if it has any. Otherwise
    :func:`check_kernels` checks the sources, and the code is compiled from the recipes or comes from the cache.

    Raises EngineError for a refused source, EngineStale for a recipe with other templates than the build's (unless
    ``recompile``), MissingDependency if NVRTC is needed and missing.
    """
    if not trust:
        check_kernels(program, custom_ops)
    code: list[bytes | None] = [
        program.blobs[k.cubin].tobytes() if k.cubin is not None and trust and not recompile else None
        for k in program.kernels
    ]
    missing = [i for i, c in enumerate(code) if c is None]
    kernels = [program.kernels[i] for i in missing]
    if not recompile:
        for kernel in kernels:
            _check_fresh(kernel, recipe_of(kernel))
    compiled = compile_kernels(kernels, cache or KernelCache(), 4, custom_ops)
    for i, cubin in zip(missing, compiled, strict=True):
        code[i] = cubin
    return [c for c in code if c is not None]


def compile_kernels(
    kernels: Sequence[Kernel], cache: KernelCache, workers: int, custom_ops: Sequence[CustomOp]
) -> list[bytes]:
    """The cubins of kernels, in order (:meth:`KernelCache.get_many`).

    Raises UsageError if the kernel of one of ``custom_ops`` does not compile, KernelError for any other kernel.
    """
    if not kernels:
        return []
    try:
        return cache.get_many([recipe_of(k) for k in kernels], workers)
    except KernelError:
        for kernel in kernels:
            for op in (op for op in custom_ops if is_of(op, kernel)):
                _compile_custom(op, kernel, cache)
        raise


def _compile_custom(op: CustomOp, kernel: Kernel, cache: KernelCache) -> None:
    """Raise UsageError with the compiler's log if the operator's own kernel does not compile."""
    try:
        cache.get(recipe_of(kernel))
    except KernelError as error:
        raise UsageError(
            f"the CUDA source of the custom operator {op.name}: {error.message}",
            hint="generated.cuh is this source, after a line for each operand and result",
        ) from error


def _check_fresh(kernel: Kernel, recipe: Recipe) -> None:
    try:
        fresh = recipe.digest() == kernel.source
    except KernelError:  # the template is gone
        fresh = False
    if not fresh:
        raise EngineStale(
            f"the engine's kernel {kernel.function} was made from another version of {kernel.template}",
            hint="rebuild the engine, or load it with recompile=True to use this version's template",
        )
