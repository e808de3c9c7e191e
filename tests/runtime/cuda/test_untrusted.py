"""Engine files that are well formed and hostile: their kernels are refused before anything is compiled or reaches the driver."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.signing import key_pair
from support.simulated import lowered

import optdnn
from optdnn import CudaKernel, CudaLaunch, custom_op
from optdnn.errors import EngineError, EngineStale
from optdnn.runtime.cuda import device, start
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile import recipes as kernels_of
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, KernelError, Recipe
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.kernel_text import allowed
from optdnn.runtime.cuda.kernel_text import check as kernel_text
from optdnn.runtime.cuda.kernel_text.allowed import check_kernels, without_code
from optdnn.runtime.cuda.kernel_text.expressions import TextRefused
from optdnn.runtime.cuda.memory import loaded
from optdnn.runtime.file import format as engine_format
from optdnn.runtime.file import header
from optdnn.runtime.program import Dynamic, Program
from optdnn.runtime.steps.executor import LoadOptions


@cache
def program() -> Program:
    """Of one pointwise kernel."""
    n = Net()
    graph = n.done(n.op("Tanh", n.op("Add", n.input(4, 8), n.input(8, name="b"))))
    return lowered(graph, "fp32", target="cuda:sm_90a", no_cubins=True)


@cache
def convolution() -> Program:
    """Of a kernel with tensor core instructions, from a template."""
    n = Net()
    graph = n.done(n.op("Relu", n.conv(n.input(1, 64, 14, 14), 64)))
    return lowered(graph, "fp16", target="cuda:sm_90a", no_cubins=True)


def changed(made: Program, of: str = "general.cu", **changes: Any) -> Program:
    """The program with its first kernel of a template changed."""
    k = next(i for i, kernel in enumerate(made.kernels) if kernel.template == of)
    kernels = list(made.kernels)
    kernels[k] = replace(kernels[k], **changes)
    return replace(made, kernels=tuple(kernels))


def text_of(made: Program, template: str = "general.cu") -> str:
    return next(k.generated["generated.cuh"] for k in made.kernels if k.template == template)


def resourced(made: Program, text: str, template: str = "general.cu") -> Program:
    """The program with another source, and its right digest."""
    kernel = next(k for k in made.kernels if k.template == template)
    generated = {"generated.cuh": text}
    try:
        digest = kernels_of.source_digest(Recipe(kernel.template, kernel.arch, generated, kernel.options))
    except KernelError:
        digest = "0" * 64
    return changed(made, template, generated=generated, source=digest)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The compiler and the driver fail the test; returns the folder of the kernel cache."""

    def reached(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("the compiler or the driver was called")

    program(), convolution()  # what is built beforehand may ask for a GPU
    for module, names in ((nvrtc, ("_call", "compile_recipe")), (device, ("driver", "gpu_count")), (start, ("begin",))):
        for name in names:
            monkeypatch.setattr(module, name, reached)
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(made: Program, folder: Path, why: str) -> None:
    """Writing takes the program, loading does not, whether it is to be compiled anew or not; nothing comes into the cache."""
    engine_format.write(made, folder / "evil.engine")
    for recompile in (False, True):
        with pytest.raises(EngineError, match=why):
            optdnn.load(folder / "evil.engine", recompile=recompile)
    assert not list(folder.rglob("*.cubin"))


# ---------------------------------------------------------------- names and options

OPTIONS = [
    "--time=/tmp/x", "-time=/tmp/x", "--pre-include=/etc/passwd", "-I/", "--include-path=/", "-lineinfo", "-G", "--maxrregcount=1",
    "--ptxas-options=-v", "-DSEEDED_FAULT=1", "-DBARRIER_TRAP", "-Dwhile(x)=", "--std=c++17 -I/", "-DDTYPE_BF16=1", "", "\n",
    "--gpu-architecture=sm_90a", "--fdevice-time-trace=x", "--generate-line-info", "--pch-dir=/tmp", "--create-pch=x",
]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_other_compiler_options(option: str, tmp_path: Path, nothing_runs: Path) -> None:
    made = changed(program(), options=("--std=c++17", option))
    refused(made, tmp_path, "which is no option of optdnn's kernels")


def test_an_option_given_twice(tmp_path: Path, nothing_runs: Path) -> None:
    refused(changed(program(), options=("--std=c++17",) * 2), tmp_path, "an option given twice")


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"template": t}
            for t in ("/etc/passwd", "../nvrtc.py", "../kernels/general.cu", "./general.cu", "general.cuh", "")
        ),
        *(
            {"template": t}
            for t in ("kernels\\general.cu", "general.cu\n", "sub/general.cu", "C:general.cu", "general.cu\0")
        ),
        *({"function": f} for f in ("", "a b", "f()", "f;g", "../f", "7f", "f" * 200, "ü")),
        *({"arch": a} for a in ("", "sm_", "sm_90a --time=x", "compute_90", "sm_9", "sm_90ab", "90", "sm_1234")),
        *(
            {"generated": {g: "int x;"}}
            for g in ("general.cuh", "machine.cuh", "general.cu", "../x.cuh", "/tmp/x.cuh", "", "x y")
        ),
    ],
    ids=lambda changes: repr(next(iter(changes.values())))[:40],
)
def test_other_names(changes: dict[str, Any], tmp_path: Path, nothing_runs: Path) -> None:
    refused(changed(program(), **changes), tmp_path, "kernel")


def test_names_are_looked_at_when_the_header_is_read() -> None:
    text = header.header_text(changed(program(), options=("--time=x",)), [])
    with pytest.raises(EngineError, match="no option of optdnn's kernels"):
        header.parse_header(text, 1)


def test_a_template_that_is_gone(tmp_path: Path, nothing_runs: Path) -> None:
    refused(changed(program(), template="gone.cu"), tmp_path, "another version of gone.cu")
    with pytest.raises(EngineStale):
        check_kernels(changed(program(), template="gone.cu"))


@pytest.mark.parametrize("name", ["/etc/hostname", "../nvrtc.py", "link.cuh", "folder.cuh", "sub/x.cuh"])
def test_includes_stay_in_the_folder_of_the_templates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").write_text("int outside;")
    kernels = tmp_path / "kernels"
    (kernels / "sub").mkdir(parents=True)
    (kernels / "sub" / "x.cuh").write_text("int x;")
    (kernels / "folder.cuh").mkdir()
    (kernels / "link.cuh").symlink_to(tmp_path / "outside")
    (kernels / "general.cu").write_text('#include "generated.cuh"\n')
    monkeypatch.setattr(nvrtc, "KERNELS", kernels)
    assert len(Recipe("general.cu", "sm_90a", {"generated.cuh": "int x;"}).sources()) == 2
    with pytest.raises(KernelError, match="includes"):
        Recipe("general.cu", "sm_90a", {"generated.cuh": f'#include "{name}"\n'}).sources()


# ---------------------------------------------------------------- sources

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
    begun = time.process_time()
    for template in ("general.cu", "conv_sm90.cu"):
        if template == "general.cu" or text.strip():
            with pytest.raises(TextRefused):
                kernel_text.check_text(text, template, "pointwise" if template == "general.cu" else "")
    Recipe("general.cu", "sm_90a", {"generated.cuh": text}).sources()
    assert time.process_time() - begun < 5.0


def test_broken_texts_are_refused_and_never_crash_the_checker() -> None:
    """Tokens dropped, repeated, exchanged: most of it is refused, by the one error."""
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


# ---------------------------------------------------------------- compiled code


def test_compiled_code_is_used_when_it_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = program()
    evil = np.frombuffer(b"\x7fELF any code", np.uint8)
    made = replace(made, blobs=[*made.blobs, evil])
    made = replace(made, kernels=tuple(replace(k, cubin=len(made.blobs) - 1) for k in made.kernels))
    monkeypatch.setattr(KernelCache, "get_many", lambda self, recipes, workers: [b"own"] * len(recipes))
    assert kernels_of.cubins(made) == [b"own"]
    assert kernels_of.cubins(made, trust=True, recompile=True) == [b"own"]
    assert kernels_of.cubins(made, trust=True) == [evil.tobytes()]
    assert all(k.cubin is None for k in without_code(made).kernels)


@pytest.mark.parametrize("trust", ["no", "yes", "signed"])
def test_what_reaches_the_driver(trust: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file's compiled code does where it is trusted or signed by a trusted key, and the kernel cache's otherwise."""

    class Reached(Exception):
        pass

    def function(cubin: bytes, name: str, **more: Any) -> Any:
        raise Reached(cubin)

    made = program()
    made = replace(made, blobs=[*made.blobs, np.frombuffer(b"any code", np.uint8)])
    made = replace(made, kernels=tuple(replace(k, cubin=len(made.blobs) - 1) for k in made.kernels))
    engine_format.write(made, tmp_path / "e.engine")
    monkeypatch.setattr(start, "begin", lambda: None)
    monkeypatch.setattr(loaded, "gpu_count", lambda: 1)
    monkeypatch.setattr(loaded, "version", lambda: (13, 0))
    gpu = Device(**vars(replace(of_arch("sm_90a"), name="GPU", capability=(9, 0))), index=0, driver_version=(13, 0))
    monkeypatch.setattr(loaded.Device, "open", lambda: gpu)
    monkeypatch.setattr(loaded, "Function", function)
    monkeypatch.setattr(KernelCache, "get_many", lambda self, recipes, workers: [b"own"] * len(recipes))
    options: dict[str, Any] = {"trust_cubins": trust == "yes"}
    if trust == "signed":
        pytest.importorskip("model_signing.signing", reason="needs the extra sign")
        private, options["signed_by"] = key_pair(tmp_path)
        optdnn.sign(tmp_path / "e.engine", private)
    with pytest.raises(Reached) as found:
        optdnn.load(tmp_path / "e.engine", **options)
    assert found.value.args == (b"own" if trust == "no" else b"any code",)


def test_nothing_is_trusted_by_default() -> None:
    assert LoadOptions().trust_cubins is False
    assert inspect.signature(optdnn.load).parameters["trust_cubins"].default is False


@pytest.mark.parametrize("how", [check_kernels, without_code, kernels_of.cubins])
def test_every_way_to_the_compiler_is_guarded(how: Callable[[Program], Any], nothing_runs: Path) -> None:
    """Retuning takes an engine's kernels by ``without_code``, runners by ``cubins``."""
    with pytest.raises(EngineError, match="source of kernel pointwise"):
        how(resourced(program(), "int evil;"))


# ---------------------------------------------------------------- custom operators

SOURCE = """struct Params { const X0* x; Y0* y; u32 count; };
extern "C" __global__ void own(const __grid_constant__ Params p) { asm("trap;"); }
"""


def operator(source: str = SOURCE, function: str = "own") -> optdnn.CustomOp:
    kernel = CudaKernel(source, function, lambda i, o, a: CudaLaunch((1, 1, 1), 32))
    return custom_op("com.example.Own", infer=lambda t, a: t[0], reference=lambda x: x, cuda=kernel)


def custom(text: str, function: str = "own") -> Program:
    return changed(resourced(program(), text), function=function)


def test_the_source_of_an_operator_that_is_given() -> None:
    check_kernels(custom(f"using X0 = f32;\nusing Y0 = f16;\n{SOURCE}\n"), [operator()])


@pytest.mark.parametrize(
    ("text", "function", "op"),
    [
        (f"using X0 = f32;\n{SOURCE}\n", "own", None),
        (f"using X0 = f32;\n{SOURCE}\n", "own", operator(SOURCE.replace("trap", "exit"))),
        (f"using X0 = f32;\n{SOURCE}\n", "other", operator()),
        (f"using X0 = f32;\n{SOURCE}\nint more;\n", "own", operator()),
        (f"int more;\n{SOURCE}\n", "own", operator()),
        (f"using X0 = decltype(7);\n{SOURCE}\n", "own", operator()),
        (f'#include "/etc/passwd"\n{SOURCE}\n', "own", operator()),
    ],
)
def test_other_sources_of_custom_operators(text: str, function: str, op: Any, nothing_runs: Path) -> None:
    with pytest.raises(EngineError, match="is none that optdnn writes"):
        check_kernels(custom(text, function), [] if op is None else [op])


# ---------------------------------------------------------------- what builds write


@pytest.mark.parametrize("make", [program, convolution])
def test_kernels_of_builds_pass(make: Callable[[], Program]) -> None:
    """So do all that other tests lower: ``support.simulated.passed`` checks them."""
    made = make()
    check_kernels(made)
    read, _ = header.parse_header(header.header_text(made, []), header.minor_of(made))
    assert read.kernels == made.kernels


def test_templates_without_a_kernel_are_those_whose_text_holds_it() -> None:
    without = {p.name for p in nvrtc.KERNELS.glob("*.cu") if "__global__" not in p.read_text(encoding="utf-8")}
    assert without == allowed.WHOLE
