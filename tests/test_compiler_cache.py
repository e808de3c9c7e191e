"""What compilers made is kept between runs, and made again where it is missing, empty or old."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import compiler_cache, host


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(compiler_cache, "FOLDER", tmp_path / "cache")
    compiler_cache._folder.cache_clear()
    yield tmp_path / "cache"
    compiler_cache._folder.cache_clear()


def counted(made: list[bytes]) -> Callable[[], bytes]:
    """A compiler that returns other bytes at each call, and keeps them in ``made``."""

    def make() -> bytes:
        made.append(b"%d" % len(made))
        return made[-1]

    return make


def test_a_file_is_made_once(folder: Path) -> None:
    made: list[bytes] = []
    paths = [compiler_cache.cached("a.so", counted(made)) for _ in range(3)]
    assert paths == [folder / "a.so"] * 3
    assert (made, paths[0].read_bytes()) == ([b"0"], b"0")
    assert list(folder.iterdir()) == [paths[0]]


def test_an_empty_file_is_made_again(folder: Path) -> None:
    path = compiler_cache.cached("a.so", lambda: b"")
    assert compiler_cache.cached("a.so", lambda: b"1") == path
    assert path.read_bytes() == b"1"


def test_a_compiler_that_fails_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        compiler_cache.cached("a.so", lambda: b"%d" % (1 // 0))
    assert list(folder.iterdir()) == []


def test_files_that_no_run_uses_are_deleted(folder: Path) -> None:
    folder.mkdir()
    for name, days in (("old", 20), ("used", 10)):
        (folder / name).write_bytes(b"0")
        os.utime(folder / name, (time.time() - days * 24 * 3600,) * 2)
    path = compiler_cache.cached("used", lambda: b"1")
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == b"0"
    assert path.stat().st_mtime > time.time() - 3600


def test_a_folder_that_cannot_be_written_is_replaced(folder: Path) -> None:
    folder.write_bytes(b"a file")
    path = compiler_cache.cached("a.so", lambda: b"0")
    assert path.parent.name.startswith("optdnn-compiled-")
    assert path.read_bytes() == b"0"


@host.needs_compiler
def test_a_library_of_another_source_option_or_compiler_is_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'extern "C" int value() { return NUMBER; }'
    assert host.library(text, tmp_path, "-O0", ["-DNUMBER=1"]).value() == 1
    assert host.library(text, tmp_path, "-O0", ["-DNUMBER=2"]).value() == 2
    assert host.library(text.replace("NUMBER", "-NUMBER"), tmp_path, "-O0", ["-DNUMBER=2"]).value() == -2
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(host, "_surroundings", lambda: ("another compiler",))
    host.library(text, tmp_path, "-O0", ["-DNUMBER=1"])
    assert len(list(folder.iterdir())) == 4
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert host.library(text, tmp_path, "-O0", ["-DNUMBER=1"]).value() == 1


@pytest.mark.nvrtc
def test_the_report_on_a_kernel_is_the_compilers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.runtime.cuda.compile import nvrtc

    recipe = nvrtc.Recipe("k.cu", "sm_90a", {"k.cu": 'extern "C" __global__ void k(int* x) { *x = 1; }'})
    found = compiler_cache.resources(recipe)
    assert found == nvrtc.reported(recipe, nvrtc.compile_recipe(recipe, resources=True)[1])
    compiled = nvrtc.compile_recipe
    monkeypatch.setattr(nvrtc, "compile_recipe", lambda *arguments, **more: pytest.fail("compiled again"))
    assert compiler_cache.resources(recipe) == found
    monkeypatch.setattr(compiler_cache, "_nvrtc_build", lambda: "another")
    monkeypatch.setattr(nvrtc, "compile_recipe", compiled)
    assert compiler_cache.resources(recipe) == found
    assert len(list(folder.iterdir())) == 2, "another compiler may report something else"
