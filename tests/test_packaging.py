"""The contents of an installation: every package of the tree, and every file that the code reads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"optdnn": "optdnn", **{f"optdnn.{n}": n for n in ("passes", "runtime", "cli", "models")}}


def setuptools() -> dict[str, Any]:
    file = ROOT / "pyproject.toml"
    if not file.exists():
        pytest.skip("an installed copy has no pyproject.toml")
    table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["setuptools"]
    return table


def folder(package: str) -> Path:
    """Where a package's files are in the tree."""
    room = max((r for r in ROOMS if package == r or package.startswith(r + ".")), key=len)
    return ROOT / ROOMS[room] / package.removeprefix(room).lstrip(".").replace(".", "/")


def named(place: Path, room: str) -> str:
    parts = place.relative_to(ROOT / ROOMS[room]).parts
    return ".".join((room, *parts))


def packed() -> set[Path]:
    """The files that the patterns of package-data put into the wheel."""
    table = setuptools()
    patterns = table["package-data"]
    return {
        file
        for package in table["packages"]
        for pattern in (*patterns.get("*", ()), *patterns.get(package, ()))
        for file in folder(package).glob(pattern)
    }


def test_every_folder_of_the_tree_is_a_listed_package() -> None:
    """Also folders of data: setuptools warns about each one that it packs and that is not in its list."""
    listed = setuptools()["packages"]
    found = {
        named(place.parent, room)
        for room, top in ROOMS.items()
        for place in (ROOT / top).rglob("*")
        if place.is_file() and not {"__pycache__", ".git"} & {*place.parts} and place.suffix != ".pyc"
    }
    assert found <= set(listed), f"missing in pyproject.toml's packages: {sorted(found - set(listed))}"
    assert len(listed) == len(set(listed))
    assert [p for p in listed if not folder(p).is_dir()] == []


def test_every_file_beside_the_code_is_installed() -> None:
    beside = {
        file
        for package in setuptools()["packages"]
        for file in folder(package).iterdir()
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert beside <= packed(), f"missing in pyproject.toml's package-data: {sorted(map(str, beside - packed()))}"
    assert packed(), "no package data at all"
    assert {file.suffix for file in packed()} >= {".cu", ".cuh", ".js"}


def test_libraries_of_others_are_installed_with_their_licenses() -> None:
    setuptools()  # skips where there is no pyproject.toml
    vendor = folder("optdnn.report.vendor")
    vendored = {file.name for file in vendor.iterdir()}
    assert {vendor / name for name in vendored} <= packed()
    assert {"dagre.min.js", "dagre.min.js.LEGAL.txt", "README.md"} == vendored


@pytest.mark.slow
def test_python_started_in_the_clones_root_finds_all_of_it() -> None:
    if not (ROOT / "passes").is_dir():
        pytest.skip("an installed copy has no clone")
    code = "import optdnn.passes.pipelines as p, optdnn.runtime.engine; print(p.__file__)"
    # -S: without site-packages, only the clone can be imported (its dependencies are given by path).
    others = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {others!r}; {code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "passes" / "pipelines.py"


def test_every_module_stands_in_a_layer() -> None:
    """A module that is missing in import-linter's layers could import anything."""
    setuptools()  # skips where there is no pyproject.toml
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    free = ["optdnn.__init__", "optdnn.models"]  # the lazy public names; and example networks, which use the public API
    modules = [
        ".".join(("optdnn", *path.with_suffix("").parts[path.parts[0] == "optdnn" :]))
        for room in ("optdnn", "passes", "runtime", "cli", "models")
        for path in (p.relative_to(ROOT) for p in (ROOT / room).rglob("*.py"))
    ]
    runtime = [m for m in modules if m.startswith("optdnn.runtime.")]
    for contract, members in ((contracts[0], modules), (contracts[1], runtime)):
        known = [*free, *(name for line in contract["layers"] for name in line.split(" : "))]
        packages = {
            f"{name.rpartition('.')[0]}.__init__" for name in known
        }  # packages whose modules are in several layers
        stands = [m for m in members if any(m == name or m.startswith(f"{name}.") for name in known)]
        assert sorted({*members} - {*stands} - packages) == []
