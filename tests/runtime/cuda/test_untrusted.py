"""Engine files that are well formed and hostile: their kernels are refused before anything is compiled or reaches the driver."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.signing import key_pair
from support.untrusted import changed, convolution, program, refused, resourced

import optdnn
from optdnn import CudaKernel, CudaLaunch, custom_op
from optdnn.errors import EngineError, EngineStale
from optdnn.runtime.cuda import start
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile import recipes as kernels_of
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, KernelError, Recipe
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.kernel_text import allowed
from optdnn.runtime.cuda.kernel_text.allowed import check_kernels, without_code
from optdnn.runtime.cuda.memory import loaded
from optdnn.runtime.file import format as engine_format
from optdnn.runtime.file import header
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions

# ---------------------------------------------------------------- names and options

OPTIONS = [
    "--time=/tmp/x", "-time=/tmp/x", "--pre-include=/etc/passwd", "-I/", "--include-path=/", "-lineinfo", "-G", "--maxrregcount=1",
    "--ptxas-options=-v", "-DSEEDED_FAULT=1", "-DBARRIER_TRAP", "-Dwhile(x)=", "--std=c++17 -I/", "-DDTYPE_BF16=1", "", "\n",
    "--gpu-architecture=sm_90a", "--fdevice-time-trace=x", "--generate-line-info", "--pch-dir=/tmp", "--create-pch=x",
]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_other_compiler_options(option: str, tmp_path: Path, nothing_runs: Path) -> None:
    made = changed(program(), options=("--std=c++17", option))
    refused(made, tmp_path, "which is not an option of optdnn's kernels")


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
    with pytest.raises(EngineError, match="not an option of optdnn's kernels"):
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
def test_the_code_that_reaches_the_driver(trust: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled code of the file, if it is trusted or signed by a trusted key; otherwise that of the kernel cache."""

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
    """Retuning reads an engine's kernels by ``without_code``, runners by ``cubins``."""
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
    with pytest.raises(EngineError, match="is not one that optdnn writes"):
        check_kernels(custom(text, function), [] if op is None else [op])


# ---------------------------------------------------------------- what builds write


@pytest.mark.parametrize("make", [program, convolution])
def test_kernels_of_builds_pass(make: Callable[[], Program]) -> None:
    """Programs that other tests lower pass as well: ``support.simulated.passed`` checks them."""
    made = make()
    check_kernels(made)
    read, _ = header.parse_header(header.header_text(made, []), header.minor_of(made))
    assert read.kernels == made.kernels


def test_templates_without_a_kernel_are_those_whose_text_holds_it() -> None:
    without = {p.name for p in nvrtc.KERNELS.rglob("*.cu") if "__global__" not in p.read_text(encoding="utf-8")}
    assert without == allowed.WHOLE
