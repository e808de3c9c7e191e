"""Engine files with other kernel sources. Every statement, line and part of a template that no renderer writes is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.processor import assert_quick, seconds
from support.untrusted import convolution, program, refused, resourced, text_of

from optdnn.errors import EngineError
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.kernel_text import check as kernel_text
from optdnn.runtime.cuda.kernel_text.allowed import check_kernels
from optdnn.runtime.cuda.kernel_text.expressions import TextRefused
from optdnn.runtime.program import Dynamic

STATEMENTS = [
    'asm("trap;");',
    'asm volatile("st.global.u32 [%0], %1;" :: "l"(16ull), "r"(7));',
    'printf("x");',
    "printf(0);",
    "malloc(8);",
    "__trap();",
    "__nanosleep(7);",
    "__builtin_trap();",
    "assert(0);",
    "free(p.out);",
    "memcpy(p.out, p.in0, 8);",
    "clock64();",
    "atomicAdd(p.out, 1);",
    "unknown(7);",
    "pointwise(7);",
    "exp = 7.0f;",
    "unknown = 7;",
    "goto end;",
    "throw 7;",
    "new int;",
    "*reinterpret_cast<u8*>(1234ULL) = 7;",
    "*(u8*)(1234ULL) = 7;",
    "*static_cast<f32*>(p.count) = 7;",
    "u8* q = 1234;",
    "u8* q;",
    "u8* q = (u8*)(1234);",
    "const i64 q = i64(p.out);",
    "const i64 q = (i64)p.out;",
    "const i64 q = p.out;",
    "*p.count = 7;",
    "p.out += 7;",
    "p.out++;",
    "const bool q = p.out == p.in0;",
    "const i64 q = p.out - p.in0;",
    "u32* q = &rest;",
    "*&rest = 7;",
    "i64 q = i64(&rest);",
    "float q[4]; const i64 z = i64(q);",
    "float q[4]; *q = 7;",
    "float q[4]; f32* z = q;",
    "rest[7] = 7;",
    "rest.secret = 7;",
    "__shared__ f32* q = p.out;",
    "static int q = 7;",
    "volatile int q = 7;",
    "[[noreturn]] int q = 7;",
    "__attribute__((weak)) int q = 7;",
    "int __q = 7;",
    "int Q = 7;",
    "int q\u00fc = 7;",
    "int q = '7';",
    'auto q = "7";',
    "while (true) {}",
    "do {} while (true);",
    "for (;;) {}",
    "typedef int q;",
    "using q = int;",
    "struct q { int x; };",
    "struct { int x; int f() {} } q;",
    "auto q = [&](i64 a) { return a; };",
    "auto printf = [&](i64 a) { return a; };",
    "auto at_q = [=](i64 a) { return a; };",
    "if (true) auto at_q = [&](i64 a) { return a; }; at_q(7);",
    "int q = sizeof(Params);",
    "Params q;",
    "const int q = int{7};",
    "int q = 0x7g;",
    "int q = 07777777777777777777z;",
    "@",
    "$",
    "`",
    "int q = 7 ? p.out : p.in0;",
    "p = 7;",
    "p.nothing = 7;",
    "}",
    "{",
    "int q = (7;",
    "operator()(7);",
    "namespace q {}",
    "extern int q;",
    "__device__ int q;",
    "__constant__ int q;",
    "template <int N> int q;",
    "pointwise<<<1, 1>>>(p);",
    "f32 q(7);",
    "Pack<f32, 4> q(7);",
    "Pack<f32, 4>(7).store(p.out);",
    "return p.out;",
    "u64 q = *(7);",
    "meet(7);",
    "meet(rest, p.out);",
    "add_to(7, 1.0);",
    "extern __shared__ __align__(16) unsigned char q[]; const i64 z = i64(q);",
    "int q = (" * 300,
    "int q = 7 /* 8 */;",
]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: s[:40])
def test_statements_that_no_renderer_writes(statement: str, tmp_path: Path, nothing_runs: Path) -> None:
    honest = text_of(program())
    check_kernels(resourced(program(), honest.replace("u32 rest = i, k;", "u32 rest = i, k; rest = k;", 1)))
    text = honest.replace("u32 rest = i, k;", f"u32 rest = i, k; {statement}", 1)
    assert text != honest
    refused(resourced(program(), text), tmp_path, "source of kernel pointwise|too deeply")


LINES = [
    '#include "/etc/passwd"',
    "#include </etc/passwd>",
    '#include "../nvrtc.py"',
    '#include "generated.cuh"',
    '#include "conv_fp32.cu"',
    '#include "matmul_fp32.cuh"',
    '  #  include "/etc/passwd"',
    '%:include "/etc/passwd"',
    '??=include "/etc/passwd"',
    "#include_next <x>",
    '#embed "/etc/passwd"',
    '#import "/etc/passwd"',
    "#pragma once",
    "#pragma nv_diag_suppress 1",
    '_Pragma("unroll")',
    '#error "x"',
    "#define rest k",
    "#define u32 u64",
    "#define widen(x) x",
    "#define DEVICE 7",
    "#define SEEDED_FAULT 1",
    "#define BM",
    "#define BM(x) 7",
    "#define BM 7 + 7",
    "#define BM 99999999999",
    "#define UNKNOWN_NAME 7",
    "#define __CUDA_ARCH__ 700",
    "#undef DEVICE",
    "#if 1",
    "#line 7",
    "// \\",
    "\\",
    "#define BM \\",
    "__device__ int q;",
    "__device__ __forceinline__ int q() { return 7; }",
    "int q = 7;",
    "static int q;",
    "DEVICE int q(int x) { return x; }",
    "DEVICE float epilogue(float x) { return epilogue(x); }",
    'extern "C" int q(int x);',
    "enum { q };",
    'extern "C" __global__ void __launch_bounds__(1) q(const __grid_constant__ Params p) { }',
    "struct Params { int x; };",
    "using q = int;",
    "struct q { int x; };",
    "struct Params { void x; };",
    'asm("");',
    '__asm__("");',
    "template <int N> DEVICE int larger(int x) { return x; }",
    "DEVICE f32* larger(f32 x) { return x; }",
    "class q {};",
    "union q { int x; };",
    "/* */",
    "namespace { }",
    "using namespace std;",
    ";",
]


@pytest.mark.parametrize("line", LINES, ids=lambda s: s[:40])
def test_lines_that_no_renderer_writes(line: str, tmp_path: Path, nothing_runs: Path) -> None:
    for text in (f"{line}\n{text_of(program())}", f"{text_of(program())}\n{line}\n"):
        refused(resourced(program(), text), tmp_path, "source of kernel pointwise")


def test_a_source_that_is_not_the_kernels(tmp_path: Path, nothing_runs: Path) -> None:
    for text in ("", "// nothing\n", text_of(program()).replace(" pointwise(", " other(")):
        refused(resourced(program(), text), tmp_path, "source of kernel pointwise")
    long = text_of(program()) + "\n" * kernel_text.TEXT_LIMIT
    refused(resourced(program(), long), tmp_path, "longer than")


ASSEMBLY: list[tuple[str, str]] = [
    ("wgmma.mma_async", "trap; wgmma.mma_async"),
    ("m64n", "m32n"),
    ('"l"(a)', '"l"(b)'),
    ("    asm volatile", '    asm("trap;");\n    asm volatile'),
    ("DEVICE void wgmma_step", 'DEVICE void other() {\n    asm("trap;");\n}\nDEVICE void wgmma_step'),
    ("wgmma_step", "wgmma_other"),
    ("accumulate));\n}", 'accumulate));\n    asm("trap;");\n}'),
    ("#define BN ", "#define BN 7\n#define BN "),
    ("#define BN ", "#define BN -"),
    ("return x;", "return x + __trap();"),
    ("return x;", 'asm("trap;"); return x;'),
    ("return x;", "return *(float*)(16);"),
    ("DEVICE float epilogue(", "DEVICE float epilog("),
    ("#define BN ", "#define BN x"),
    ("#define BN ", "#include <x>\n#define BN "),
]


@pytest.mark.parametrize(("old", "new"), ASSEMBLY, ids=[new[:40] for _, new in ASSEMBLY])
def test_rendered_parts_of_templates(old: str, new: str, tmp_path: Path, nothing_runs: Path) -> None:
    made = convolution()
    honest = text_of(made, "conv_sm90.cu")
    assert old in honest
    text = honest.replace(old, new)
    if new == "#define BN -":
        text = re.sub(r"#define BN (\d+)", r"#define BN \1.0", honest)
    refused(resourced(made, text, "conv_sm90.cu"), tmp_path, "source of kernel conv_sm90")


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 500_000, " " * 500_000, "/ " * 250_000, "1" * 500_000 + "x", "a" * 500_000, "(" * 500_000, "#\n" * 250_000,
        "{" * 500_000, "- " * 250_000, "DEVICE void wgmma_step(x {\n" * 17_000, "1.1" * 160_000, "float " * 80_000,
        "struct Params { u32 x[" + "9" * 500_000 + "]; };",
    ],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_long_texts_are_refused_at_once(text: str, nothing_runs: Path) -> None:
    def read() -> None:
        for template in ("general.cu", "conv_sm90.cu"):
            if template == "general.cu" or text.strip():
                with pytest.raises(TextRefused):
                    kernel_text.check_text(text, template, "pointwise" if template == "general.cu" else "")
        Recipe("general.cu", "sm_90a", {"generated.cuh": text}).sources()

    assert_quick(lambda: seconds(read), 5.0, tries=2)


@pytest.mark.parametrize("kind", render.MMA_KINDS)
def test_assembly_that_no_renderer_writes(kind: str) -> None:
    """Each type's own text is taken, and any other is refused once all types have been tried."""
    text = render.mma(kind)
    kernel_text.check_text(text, "conv_sm80.cu", "")
    with pytest.raises(TextRefused, match="multiply is not what this version of optdnn renders"):
        kernel_text.check_text(text.replace("m16n8", "m16n9"), "conv_sm80.cu", "")


def test_broken_texts_are_refused_and_never_crash_the_checker() -> None:
    """Tokens dropped, repeated or exchanged: most changes are refused, always with the same error."""
    rng = np.random.default_rng(3)
    honest = re.findall(r"\w+|\s+|[^\w\s]", text_of(program()))
    count = 0
    for _ in range(300):
        tokens = list(honest)
        for _ in range(rng.integers(1, 4)):
            i, j = rng.integers(0, len(tokens), 2)
            tokens[i] = ("", tokens[i] + tokens[j], tokens[j])[rng.integers(0, 3)]
        try:
            kernel_text.check_text("".join(tokens), "general.cu", "pointwise")
        except TextRefused:
            count += 1
    assert count > 150


def test_kernels_of_further_plans(tmp_path: Path, nothing_runs: Path) -> None:
    made, evil = program(), resourced(program(), "int evil;")
    specs = (tuple(s for s, _ in made.inputs), tuple(s for s, _ in made.outputs))
    with pytest.raises(EngineError, match="source of kernel pointwise"):
        check_kernels(replace(made, dynamic=Dynamic(*specs, plans=(evil,))))
