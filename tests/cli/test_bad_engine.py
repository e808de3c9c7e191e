"""Broken engine files, and arrays that do not fit an engine: each gives one line that names the fault, and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import Cli

from optdnn.runtime.file.format import MAGIC, read, write

MODEL, UNSUPPORTED, ENGINE, RUN, OUTPUT, USAGE = 3, 4, 5, 6, 9, 2


# ---------------------------------------------------------------- engine files


def test_absent_engines_and_files_that_are_no_engine(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.engine").touch()
    for path in (tmp_path / "absent.engine", tmp_path / "empty.engine", model):
        for command in ("run", "bench"):
            code, out, err = cli(command, path)
            assert (code, out) == (ENGINE if path.exists() else USAGE, "")
            assert path.name in err


def test_truncated_engines(cli: Cli, engine: Path, tmp_path: Path) -> None:
    whole = engine.read_bytes()
    path = tmp_path / "cut.engine"
    for n in [*range(12), *np.linspace(12, len(whole) - 1, 25, dtype=int)]:
        path.write_bytes(whole[:n])
        code, out, err = cli("run", path)
        assert (code, out) == (ENGINE, ""), n
        assert "cut.engine" in err


def test_flipped_bits_in_an_engine_are_all_found(cli: Cli, engine: Path, tmp_path: Path) -> None:
    whole = engine.read_bytes()
    path = tmp_path / "flipped.engine"
    rng = np.random.default_rng(0)
    for at in [*range(len(MAGIC) + 16), *rng.integers(0, len(whole), 150)]:
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        code, out, err = cli("run", path)
        assert (code, out) == (ENGINE, ""), at
        assert "flipped.engine" in err
    code, _, _ = cli("inspect", path)
    assert code == ENGINE


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "tpu", "'tpu'"),
        ("requires", ("cpu:no_such_feature",), "no_such_feature"),
        ("requires", ("package:onnxruntime>=999",), "999"),
    ],
)
def test_an_engine_for_another_target_or_machine(
    cli: Cli, engine: Path, tmp_path: Path, field: str, value: object, message: str
) -> None:
    program = read(engine)
    object.__setattr__(program, field, value)
    write(program, tmp_path / "other.engine")
    code, out, err = cli("run", tmp_path / "other.engine")
    assert code in (ENGINE, 8)
    assert out == ""
    assert message in err
    assert "hint: " in err
    assert cli("inspect", tmp_path / "other.engine").code == 0  # its facts can still be shown


# ---------------------------------------------------------------- inputs of a run


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((1, 3, 8, 9), np.float32), "axis 3 is 9 instead of 8"),
        (np.zeros((3, 8, 8), np.float32), "rank 3 instead of 4"),
        (np.zeros((1, 3, 8, 8), np.float64), "fp64"),
        (np.zeros((1, 3, 8, 8), np.int32), "int32"),
        (np.zeros((1, 3, 8, 8), "S4"), "S4"),
    ],
)
def test_wrong_shapes_and_dtypes(cli: Cli, engine: Path, tmp_path: Path, array: Any, message: str) -> None:
    for command in ("run", "bench"):
        code, out, err = cli(command, engine, "--input", f"x={save(tmp_path / 'x.npy', array)}")
        assert (code, out) == (RUN, "")
        assert message in err
        assert "'x'" in err


def test_wrong_names_and_files(cli: Cli, engine: Path, tmp_path: Path) -> None:
    x = save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    good = [f"x={x}"]

    def run(*inputs: object) -> tuple[int, str]:
        code, out, err = cli("run", engine, *(a for i in inputs for a in ("--input", i)))
        assert out == ""
        return code, err

    code, err = run(f"image={x}")
    assert code == RUN
    assert "'image'" in err
    code, err = run(*good, f"z={x}")
    assert code == RUN
    assert "'z'" in err
    assert run(*good, *good)[0] == USAGE
    assert run(*good, x)[0] == USAGE  # without a name it is for the only input
    assert run(f"x={tmp_path / 'absent.npy'}")[0] == USAGE
    assert run(f"x={tmp_path}")[0] == USAGE  # a folder of pictures, which this engine does not take
    np.savez(tmp_path / "x.npz", x=np.zeros(3), z=np.zeros(3))
    assert run(f"x={tmp_path / 'x.npz'}")[0] == RUN  # it has that name, but another shape
    assert run(f"y={tmp_path / 'x.npz'}")[0] == USAGE


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"\x80\x04K\x01.", b"text"])
def test_files_that_hold_no_arrays(cli: Cli, engine: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    code, out, err = cli("run", engine, "--input", f"x={tmp_path / 'x.npy'}")
    assert (code, out) == (RUN, "")
    assert "x.npy is not a .npy or .npz file" in err


def test_pickles_are_never_loaded(cli: Cli, engine: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([{}], object))
    for given in (f"x={tmp_path / 'x.npy'}", tmp_path / "x.npz"):
        code, _, err = cli("run", engine, "--input", given)
        assert code == RUN
        assert "pickle" in err


def test_broken_archives(cli: Cli, engine: Path, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32))
    whole = (tmp_path / "x.npz").read_bytes()
    for at in range(30, len(whole), 97):
        data = bytearray(whole)
        data[at] ^= 0xFF
        (tmp_path / "bad.npz").write_bytes(data)
        assert cli("run", engine, "--input", tmp_path / "bad.npz").code in (0, RUN, USAGE)
