"""Compiling and the kernel cache: keys, typed errors, atomic entries, damage, and folders that cannot be written."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.nvrtc import CacheWarning, KernelCache, KernelError, Recipe
from optdnn.runtime.workers import process

SOURCE = """
extern "C" __global__ void sum(const float* x, float* y) {
    __shared__ float partial[512];
    partial[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < 512; i++)
            sum += partial[i];
        *y = sum;
    }
}

extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }
"""
RECIPE = Recipe("general.cu", "sm_80", {"generated.cuh": SOURCE})


pytestmark = pytest.mark.nvrtc


def test_a_cubin_is_an_elf_file_and_repeats_bit_for_bit() -> None:
    first, _ = nvrtc.compile_recipe(RECIPE)
    second, _ = nvrtc.compile_recipe(RECIPE)
    assert first[:4] == b"\x7fELF"
    assert first == second


def test_a_kernel_that_does_not_compile_gives_the_log() -> None:
    broken = replace(RECIPE, generated={"generated.cuh": "this is no C++;"})
    with pytest.raises(KernelError, match=r"general\.cu does not compile for sm_80[\s\S]*generated\.cuh"):
        nvrtc.compile_recipe(broken)


def test_a_missing_include_names_the_file() -> None:
    with pytest.raises(KernelError, match=r"includes 'generated\.cuh'"):
        nvrtc.compile_recipe(replace(RECIPE, generated={}))


def test_the_key_depends_on_everything_that_decides_the_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {
        RECIPE.key(),
        replace(RECIPE, arch="sm_90a").key(),
        replace(RECIPE, options=("--std=c++17",)).key(),
        replace(RECIPE, generated={"generated.cuh": RECIPE.generated["generated.cuh"] + " "}).key(),
        replace(RECIPE, name="conv_sm90.cu").key(),
    }
    assert len(keys) == 5
    assert RECIPE.key() in keys
    shutil.copytree(nvrtc.KERNELS, tmp_path / "kernels")
    monkeypatch.setattr(nvrtc, "KERNELS", tmp_path / "kernels")
    changed = nvrtc.template_files()["general.cuh"]
    before = changed.read_bytes()
    assert RECIPE.key() in keys
    with changed.open("a") as header:  # a header that the main file includes
        header.write("// changed\n")
    assert RECIPE.key() not in keys
    changed.write_bytes(before)
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    assert RECIPE.key() not in keys
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "ABI", -1)
    assert RECIPE.key() not in keys


def test_the_cache_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path)
    first = cache.get(RECIPE)
    monkeypatch.delattr(nvrtc, "compile_recipe")
    assert cache.get(RECIPE) == first
    assert [file.name for file in tmp_path.iterdir()] == [f"{RECIPE.key()}.cubin"]  # no temporary file stays


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_reported_and_replaced(tmp_path: Path, damage: str) -> None:
    cache = KernelCache(tmp_path)
    good = cache.get(RECIPE)
    entry = cache.path(RECIPE.key())
    blob = entry.read_bytes()
    flipped = bytearray(blob)
    flipped[len(blob) // 2] ^= 1
    entry.write_bytes({"truncated": blob[:-7], "flipped": bytes(flipped), "empty": b"", "foreign": good}[damage])
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.get(RECIPE) == good
    assert entry.read_bytes() == blob
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(RECIPE) == good


def test_a_folder_that_cannot_be_written_warns_and_still_compiles(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    cache = KernelCache(blocker / "kernels")
    with pytest.warns(CacheWarning, match="cannot write the kernel cache"):
        assert cache.get(RECIPE)[:4] == b"\x7fELF"


def test_a_folder_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    recipes = [
        replace(RECIPE, generated={"generated.cuh": RECIPE.generated["generated.cuh"] + f"// {i}\n"}) for i in range(6)
    ]
    compiled: list[str] = []
    compile_recipe = nvrtc.compile_recipe
    monkeypatch.setattr(nvrtc, "compile_recipe", lambda r: compiled.append(r.key()) or compile_recipe(r))
    cache = KernelCache(blocker / "kernels")
    with pytest.warns(CacheWarning) as reported:
        cubins = cache.get_many(recipes, workers=2)
    assert [cubin[:4] for cubin in cubins] == [b"\x7fELF"] * 6
    assert len(reported) == 1
    assert "kept only for this process" in str(reported[0].message)
    assert capfd.readouterr().err == "", "the other process has no warnings of its own"
    assert len(compiled) == 3, "this process's share"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_many(recipes, workers=2) == cubins
    assert len(compiled) == 3


def test_entries_of_a_folder_that_cannot_be_written_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = KernelCache(tmp_path).get(RECIPE)

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc, "replace_file", full)
    cache = KernelCache(tmp_path)
    with monkeypatch.context() as without:
        without.delattr(nvrtc, "compile_recipe")
        assert cache.get(RECIPE) == good
    with pytest.warns(CacheWarning, match="No space left on device"):
        cache.get(replace(RECIPE, generated={"generated.cuh": RECIPE.generated["generated.cuh"] + "// new\n"}))
    assert [file.name for file in tmp_path.iterdir()] == [f"{RECIPE.key()}.cubin"]


def test_concurrent_processes_share_the_cache(tmp_path: Path) -> None:
    recipes = [
        replace(RECIPE, generated={"generated.cuh": RECIPE.generated["generated.cuh"] + f"// {i}\n"}) for i in range(8)
    ]
    cache = KernelCache(tmp_path)
    cubins = cache.get_many(recipes, workers=2)
    assert all(cubin[:4] == b"\x7fELF" for cubin in cubins)
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize(("count", "others"), [(3, 0), (4, 1), (6, 2), (40, 3)])
def test_few_kernels_take_few_processes(
    count: int, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(KernelCache, "_compile", lambda self, jobs, others: asked.append(others))
    monkeypatch.setattr(KernelCache, "get", lambda self, recipe: b"")
    KernelCache(tmp_path).get_many(
        [Recipe("general.cu", "sm_80", {"generated.cuh": f"// {i}\n"}) for i in range(count)], 4
    )
    assert sum(asked) == others


def test_an_error_in_a_compiling_process_is_raised_here(tmp_path: Path) -> None:
    bad = [Recipe("general.cu", "sm_80", {"generated.cuh": f"broken {i};"}) for i in range(8)]
    with pytest.raises(KernelError, match=r"general\.cu does not compile"):
        KernelCache(tmp_path).get_many(bad, workers=2)


def test_resources_report_registers_and_shared_memory() -> None:
    found = nvrtc.resources(RECIPE)
    assert set(found) == {"sum", "twice"}
    assert found["sum"].shared_bytes == 2048
    assert all(0 < kernel.registers <= 255 for kernel in found.values())


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path))
    assert nvrtc.default_folder() == tmp_path / "kernels"
    monkeypatch.delenv("OPTDNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform != "win32":
        assert nvrtc.default_folder() == tmp_path / "xdg" / "optdnn" / "kernels"


def test_an_interruption_ends_the_compiling_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = process.subprocess.Popen
    monkeypatch.setattr(process.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])

    def interrupted(recipe: Recipe) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nvrtc, "compile_recipe", interrupted)
    recipes = [Recipe("general.cu", "sm_90a", {"generated.cuh": f"// {i}\n"}) for i in range(8)]
    with pytest.raises(KeyboardInterrupt):
        KernelCache(tmp_path).get_many(recipes, 3)
    assert len(started) == 2  # and this one
    assert all(p.returncode is not None and p.returncode < 0 for p in started)


def test_processes_that_compile_the_same_kernel_concurrently_all_get_a_complete_one(tmp_path: Path) -> None:
    code = (
        "import sys, hashlib\nfrom pathlib import Path\nfrom optdnn.runtime.cuda.compile.nvrtc import KernelCache, Recipe\n"
        f"r = Recipe({RECIPE.name!r}, {RECIPE.arch!r}, {dict(RECIPE.generated)!r})\n"
        "sys.stdin.readline()\nprint(hashlib.sha256(KernelCache(Path(sys.argv[1])).get(r)).hexdigest())"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) for _ in range(3)]
    found = {one.communicate("go\n")[0] for one in running}
    assert len(found) == 1
    assert found != {""}
    assert [file.name for file in tmp_path.iterdir()] == [f"{RECIPE.key()}.cubin"]
