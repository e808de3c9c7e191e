"""The language of generated kernel texts, and its checker: the only sources that an untrusted engine file may contain.

The renderers (:mod:`optdnn.runtime.cuda.compile.render`, ``optdnn.kernels``) write a small subset of CUDA C++.
:func:`check_text` parses a text by the grammar of that subset and refuses everything else:

- Preprocessor lines are ``#pragma unroll`` (also with a number), ``#define NAME integer`` for names that templates leave open,
  and known includes.
- Inline assembly must equal the renderer's text for the same parameters.
- Calls go to a fixed list of arithmetic functions and barriers, and to functions and lambdas of the text itself. Nothing allocates,
  prints, traps or launches.
- A pointer is a field of the kernel's parameters, shared memory, or one of these plus an offset. Addresses of variables cannot be
  taken, and there are no casts between numbers and pointers.

So a text reads no file, and its code cannot call any other code. But the checker bounds neither indices and loops nor the
numbers in a launch's parameters, which come from the file. So a kernel may read and write memory of this process outside of its
buffers: on the GPU, and also on the host if GPUs share the processor's page tables. It may not terminate, and it may keep the
compiler busy for a long time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.kernel_text.expressions import TextRefused, macros
from optdnn.runtime.cuda.kernel_text.grammar import Source

INCLUDES = {f"matmul_{kind}.cu": frozenset((f"matmul_{kind}.cuh",)) for kind in ("fp32", "mma")}
"""Template -> the files that a text for it may include."""
TEXT_LIMIT, FUNCTIONS_LIMIT, INTEGER_LIMIT = 1 << 19, 16, 1 << 24
"""Longest text in characters, most functions in it, largest defined integer."""
_ELSEWHERE = re.compile(r"[^ -~\n]|\\|/\*|\?\?")
"""Characters that the compiler's lexer may read differently from :data:`_TOKEN`: control characters, spliced lines, trigraphs."""
_DEFINE = re.compile(r"#define ([A-Z][A-Z0-9_]*) (-?\d{1,10})")
_UNROLL = re.compile(r"#pragma unroll(?: \d{1,2})?")
_INCLUDE = re.compile(r'#include "([\w.]+)"')


@lru_cache(maxsize=256)
def check_text(text: str, template: str, function: str) -> None:
    """Check a generated text for ``template``. ``function``: the kernel that the text must define; "" if the template defines it.

    Raises TextRefused.
    """
    if len(text) > TEXT_LIMIT:
        raise TextRefused(f"it is longer than {TEXT_LIMIT} characters")
    if text.count("DEVICE") > FUNCTIONS_LIMIT:
        raise TextRefused(f"it has more than {FUNCTIONS_LIMIT} functions")
    if found := _ELSEWHERE.search(text):
        raise TextRefused(f"line {text.count(chr(10), 0, found.start()) + 1} has {found[0]!r}")
    rest = _preprocessed(text, template)
    try:
        Source(_ASSEMBLY.sub(_same_assembly, rest)).source(function)
    except RecursionError as error:
        raise TextRefused("it is nested too deeply") from error


def _preprocessed(text: str, template: str) -> str:
    """The text with its preprocessor lines blanked. Raises TextRefused for lines that the renderers do not write."""
    lines = text.split("\n")
    seen: set[str] = set()
    for k, line in enumerate(lines):
        bare = line.strip(" \t")
        if not bare.startswith("#"):
            if "#" in bare:
                raise TextRefused(f"line {k + 1} has a preprocessor sign")
            continue
        lines[k] = ""
        if _UNROLL.fullmatch(bare):
            continue
        if (define := _DEFINE.fullmatch(bare)) is not None:
            name, value = define[1], int(define[2])
            if name not in macros() or name in seen or abs(value) > INTEGER_LIMIT:
                raise TextRefused(f"line {k + 1} defines {name} as {value}")
            seen.add(name)
        elif (include := _INCLUDE.fullmatch(bare)) is None or include[1] not in INCLUDES.get(template, ()):
            raise TextRefused(f"line {k + 1} is {bare[:60]!r}")
    return "\n".join(lines)


# ---------------------------------------------------------------- assembly


def _same_assembly(match: re.Match[str]) -> str:
    """Blank lines in place of an assembly function that equals its renderer's text. Raises TextRefused for any other."""
    name, text = match[1], match[0]
    if text not in _RENDERED[name](text):
        raise TextRefused(f"{name} is not what this version of optdnn renders")
    return "\n" * text.count("\n")


def _columns(text: str) -> int:
    found = re.search(r"\.m64n(\d{1,3})k", text)
    return int(found[1]) if found else 0


def _both_in_memory(text: str) -> Iterable[str]:
    for dtype, across in itertools.product(render.WGMMA_KINDS, (False, True)):
        if render.wgmma_columns(_columns(text), dtype):
            made = render.wgmma(_columns(text), dtype, across=across)
            yield made
            yield from (
                made.replace("wgmma_step", name) for name in ("wgmma_scores", "first_product", "second_product")
            )


def _one_in_registers(text: str) -> Iterable[str]:
    for dtype in ("float16", "bfloat16"):
        if render.wgmma_columns(_columns(text), dtype):
            yield render.values_instruction(_columns(text), dtype)
            yield render.pixels_instruction(_columns(text), dtype)
            yield render.pixels_instruction(_columns(text), dtype, name="wgmma_kept")
            yield render.pixels_instruction(_columns(text), dtype, name="wgmma_features", across=True)


def _between(text: str) -> Iterable[str]:
    bounds = re.findall(r'asm\("(max|min)\.(bf16x2|f16x2) .*"r"\(0x([0-9a-f]{1,8})u\)', text)
    for name in ("between", "after"):
        yield render.bounded_pair([(op, kind, int(bits, 16)) for op, kind, bits in bounds], name)


_RENDERED: dict[str, Callable[[str], Iterable[str]]] = {
    "wgmma_step": _both_in_memory, "wgmma_scores": _both_in_memory, "first_product": _both_in_memory,
    "second_product": _both_in_memory,
    **dict.fromkeys(("wgmma_values", "wgmma_pixels", "wgmma_kept", "wgmma_features"), _one_in_registers),
    "multiply": lambda text: map(render.mma, render.MMA_KINDS), "between": _between,
    "after": _between,
}  # fmt: skip
"""Function with assembly -> its allowed texts."""
_ASSEMBLY = re.compile(rf"^DEVICE \w+ ({'|'.join(_RENDERED)})\([^\n]*\{{\n.*?^\}}$", re.MULTILINE | re.DOTALL)
