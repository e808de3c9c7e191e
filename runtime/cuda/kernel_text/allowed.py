"""The check of the kernels in an untrusted engine file: their sources, names and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from optdnn.custom import CustomOp
from optdnn.errors import EngineError, EngineStale
from optdnn.runtime.file.validate import GENERATED, check_names
from optdnn.runtime.program import Kernel, Program, programs_of

WHOLE = frozenset(("general.cu", "matmul_fp32.cu", "matmul_mma.cu"))
"""Templates that only include a generated text; the text contains the kernel."""
REBUILD = (
    "rebuild the engine with this version of optdnn; or, if its author may run any code on this machine, load it with "
    "trust_cubins=True (optdnn run --trust-cubins)"
)
_ALIASES = re.compile(r"(?:using [XY]\d+ = \w+;\n)*", re.ASCII)


def check_kernels(program: Program, custom_ops: Sequence[CustomOp] = ()) -> None:
    """Check the sources of a program's kernels, and of its plans'. Each must be in the renderers' language
    (:mod:`optdnn.runtime.cuda.kernel_text.check`), or be the kernel of one of ``custom_ops``. Compiles nothing. Raises
    EngineError."""
    from optdnn.runtime.cuda.compile.nvrtc import template_files
    from optdnn.runtime.cuda.kernel_text.check import check_text
    from optdnn.runtime.cuda.kernel_text.expressions import TextRefused

    for kernel in (k for one in programs_of(program) for k in one.kernels):
        check_names(kernel)
        if kernel.template not in template_files():
            raise EngineStale(
                f"the engine's kernel {kernel.function} was made from another version of {kernel.template}",
                hint=REBUILD,
            )
        text = kernel.generated.get(GENERATED, "")
        whole = kernel.template in WHOLE
        if whole and any(is_of(op, kernel) for op in custom_ops):
            continue
        try:
            check_text(text, kernel.template, kernel.function if whole else "")
        except TextRefused as error:
            raise EngineError(
                f"the source of kernel {kernel.function} ({kernel.template}) is not one that optdnn writes:  {error}",
                hint=REBUILD,
            ) from error


def without_code(program: Program) -> Program:
    """The program without compiled code; its kernels' sources are checked. Raises EngineError."""
    check_kernels(program)
    return replace(program, kernels=tuple(replace(k, cubin=None) for k in program.kernels))


def is_of(op: CustomOp, kernel: Kernel) -> bool:
    """Whether a kernel is the operator's own, apart from the aliases of its element types at the beginning."""
    text = kernel.generated.get(GENERATED, "")
    aliases = _ALIASES.match(text)
    if op.cuda is None or aliases is None or kernel.template != "general.cu":
        return False
    return text[aliases.end() :] == f"{op.cuda.source}\n" and kernel.function == op.cuda.function
