"""The checks of kernels in an untrusted engine file: names, compiler options and sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from optdnn.custom import CustomOp
from optdnn.errors import EngineError, EngineStale
from optdnn.runtime.program import Kernel, Program

GENERATED = "generated.cuh"
"""The one rendered header of a kernel."""
OPTIONS = frozenset(("--std=c++17", "--use_fast_math", "--fmad=false", "-DDTYPE_BF16", "-DNARROW"))
"""The compiler options of kernels in engines. None of them names a file."""
WHOLE = frozenset(("general.cu", "matmul_fp32.cu"))
"""Templates that only include a generated text, which holds the kernel."""
REBUILD = (
    "rebuild the engine with this version of optdnn; or, where its author may run any code on this machine, load it with "
    "trust_cubins=True (optdnn run --trust-cubins)"
)
_TEMPLATE = re.compile(r"[a-z][a-z0-9_]*\.cu", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)
_ARCH = re.compile(r"sm_[1-9]\d{1,2}[af]?", re.ASCII)
_ALIASES = re.compile(r"(?:using [XY]\d+ = \w+;\n)*", re.ASCII)


def check_names(kernel: Kernel) -> Kernel:
    """The kernel, its names and options checked to be such as builds write. Raises EngineError."""
    if not _TEMPLATE.fullmatch(kernel.template):
        raise EngineError(f"a kernel's template is {kernel.template[:80]!r}, which is no name of one of optdnn's")
    if not _FUNCTION.fullmatch(kernel.function):
        raise EngineError(f"a kernel's function is {kernel.function[:80]!r}, which is no name of a function")
    where = f"the kernel {kernel.function}"
    if not _ARCH.fullmatch(kernel.arch):
        raise EngineError(f"{where} is for {kernel.arch[:80]!r}, which is no architecture")
    if strange := sorted(kernel.generated.keys() - {GENERATED}):
        raise EngineError(f"{where} brings a source called {strange[0][:80]!r}; kernels have none but {GENERATED}")
    if strange := [o for o in kernel.options if o not in OPTIONS]:
        raise EngineError(
            f"{where} is to be compiled with {strange[0][:80]!r}, which is no option of optdnn's kernels",
            hint="rebuild the engine with this version of optdnn",
        )
    if len(set(kernel.options)) != len(kernel.options):
        raise EngineError(f"{where} is to be compiled with an option given twice")
    return kernel


def check_kernels(program: Program, custom_ops: Sequence[CustomOp] = ()) -> None:
    """Check the sources of a program's kernels, and of its plans': each is of the renderers' language
    (:mod:`optdnn.runtime.cuda.kernel_text.check`), or the kernel of one of ``custom_ops``. Compiles nothing. Raises EngineError."""
    from optdnn.runtime.cuda.compile.nvrtc import KERNELS
    from optdnn.runtime.cuda.kernel_text.check import check_text
    from optdnn.runtime.cuda.kernel_text.expressions import TextRefused

    plans = (program, *(program.dynamic.plans if program.dynamic is not None else ()))
    for kernel in (k for plan in plans for k in plan.kernels):
        check_names(kernel)
        if not (KERNELS / kernel.template).is_file():
            raise EngineStale(
                f"the engine's kernel {kernel.function} was made from another version of {kernel.template}",
                hint=REBUILD,
            )
        text = kernel.generated.get(GENERATED, "")
        whole = kernel.template in WHOLE
        if whole and any(_is_of(op, kernel, text) for op in custom_ops):
            continue
        try:
            check_text(text, kernel.template, kernel.function if whole else "")
        except TextRefused as error:
            raise EngineError(
                f"the source of kernel {kernel.function} ({kernel.template}) is none that optdnn writes: {error}",
                hint=REBUILD,
            ) from error


def without_code(program: Program) -> Program:
    """The program without compiled code; its kernels' sources are checked. Raises EngineError."""
    check_kernels(program)
    return replace(program, kernels=tuple(replace(k, cubin=None) for k in program.kernels))


def _is_of(op: CustomOp, kernel: Kernel, text: str) -> bool:
    """Whether a kernel is the operator's own, behind the names of its element types."""
    aliases = _ALIASES.match(text)
    if op.cuda is None or aliases is None or kernel.template != "general.cu":
        return False
    return text[aliases.end() :] == f"{op.cuda.source}\n" and kernel.function == op.cuda.function
