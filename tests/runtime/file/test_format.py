"""The engine file: a program is read as it was written, and a wrong program is not written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import F32, mlp, mlp_expected, program
from support.engine_bytes import contents, decode, everything

from optdnn import Engine, load
from optdnn.errors import EngineError, InternalError, OutputError, UnsupportedError
from optdnn.runtime.file import format as fmt
from optdnn.runtime.program import Program
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.steps.reference import prepare, reference_step
from optdnn.types import DTYPES

X = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("mmap", [True, False])
def test_round_trip(tmp_path: Path, mmap: bool) -> None:
    p = everything()
    fmt.write(p, tmp_path / "e")
    q = fmt.read(tmp_path / "e", mmap=mmap)
    assert contents(q) == contents(p) == (tmp_path / "e").read_bytes()
    for name in ("target", "precision", "inputs", "outputs", "buffers", "arena_bytes", "requires"):
        assert getattr(q, name) == getattr(p, name)
    assert repr(q.meta["nan"]) == "nan"
    assert q.meta["$key"] == p.meta["$key"]
    assert str(q.meta["$key"]["$$"][2]) == "-0.0"
    assert q.steps[0].src == p.steps[0].src
    for a, b in zip(q.blobs, p.blobs, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == np.ascontiguousarray(b).tobytes()
        assert not a.flags.writeable


def test_attributes_are_read_as_they_were_written() -> None:
    p = decode(contents(everything()))
    attrs = prepare(p.steps[0], p, None)._attrs  # type: ignore[arg-type]
    assert attrs["axes"] == (0, -1)
    assert attrs["to"] == DTYPES["bf16"]
    assert attrs["value"].dtype == np.float16
    assert attrs["value"].tolist() == [1.5, np.inf]
    assert attrs["low"] == -np.inf
    assert attrs["nested"] == ((1, 2), ())
    assert attrs["epilogue"] == (PlainStage("Clip", (-1, None, 2), {"alpha": 0.1}),)


def test_attributes_without_a_plain_form_are_refused() -> None:
    for value in (object(), np.zeros(5000), np.zeros(1, np.complex64), {"a": 1}, {1, 2}):
        with pytest.raises(InternalError, match="attribute 'a' is a"):
            reference_step("Relu", {"a": value}, (0,), (1,))


def test_the_same_program_gives_the_same_bytes() -> None:
    assert contents(mlp()) == contents(mlp())
    assert contents(mlp(1)) != contents(mlp())


def test_tables_in_another_order_give_the_same_bytes() -> None:
    a, b = mlp(), mlp()
    a.meta, b.meta = {"x": 1, "y": 2}, {"y": 2, "x": 1}
    assert contents(a) == contents(b)


def test_blobs_are_aligned_and_mapped(tmp_path: Path) -> None:
    fmt.write(everything(), tmp_path / "e")
    for a in fmt.read(tmp_path / "e").blobs:
        if a.size:
            assert a.ctypes.data % (fmt.PAGE if a.nbytes >= fmt.LARGE else fmt.LINE) == 0
            with pytest.raises(ValueError, match="read-only"):
                a[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                a.flags.writeable = True


def test_an_engine_survives_the_replacement_of_its_file(tmp_path: Path) -> None:
    Engine(mlp()).save(tmp_path / "e")
    engine = load(tmp_path / "e")
    Engine(mlp(seed=1)).save(tmp_path / "e")
    np.testing.assert_array_equal(engine.run({"x": X})["y"], mlp_expected(mlp(), X)["y"])
    np.testing.assert_array_equal(load(tmp_path / "e").run({"x": X})["y"], mlp_expected(mlp(1), X)["y"])


def test_a_program_without_blobs_has_no_data() -> None:
    p = program([("x", F32, (1,))], [("y", 1)], [reference_step("Relu", {}, (0,), (1,))], [(F32, (1,))])
    data = contents(p)
    assert contents(decode(data)) == data
    with pytest.raises(EngineError, match="longer than it says"):
        decode(data + b"\0")


def test_many_large_blobs_are_digested_by_threads() -> None:
    blobs = [memoryview(os.urandom(300_000 + i)) for i in range(8)]
    assert fmt.digests(blobs) == [hashlib.sha256(b).hexdigest() for b in blobs]


# ---------------------------------------------------------------- writing refuses


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "meta.k holds a tuple, which is not plain data"),
        (np.float32(1), "meta.k holds a float32"),
        ({1: 2}, "meta.k holds a table with keys that are not text"),
        (2**80, "meta.k holds the integer"),
        (b"x", "meta.k holds a bytes"),
        ("\ud800", "text that is not Unicode"),
    ],
)
def test_values_that_are_not_plain_data_are_not_written(value: Any, message: str) -> None:
    p = mlp()
    p.meta = {"k": value}
    with pytest.raises(InternalError, match=message):
        contents(p)


def test_an_invalid_program_is_not_written() -> None:
    p = mlp()
    p.steps = ()
    with pytest.raises(InternalError, match="the program is not valid: nothing writes output 'y'"):
        contents(p)


def test_a_blob_of_an_unknown_type_is_not_written() -> None:
    p = program([("x", F32, (1,))], [("x", 0)], [], constants=[np.zeros(2, "U3")])
    with pytest.raises(InternalError, match="a blob has element type <U3"):
        contents(p)


def test_a_header_beyond_the_limit_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = contents(mlp())
    monkeypatch.setenv("OPTDNN_MAX_HEADER_BYTES", "100")
    with pytest.raises(UnsupportedError, match=r"header would take \d+ bytes\n  hint: the limit is 100 bytes"):
        contents(mlp())
    with pytest.raises(EngineError, match=r"the header has \d+ bytes\n  hint: .*OPTDNN_MAX_HEADER_BYTES=N"):
        fmt.decode(memoryview(data))


# ---------------------------------------------------------------- atomic saving


def test_unwritable_places_are_output_errors(tmp_path: Path) -> None:
    engine = Engine(mlp())
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, message in (
        (tmp_path / "missing" / "e", "No such file or directory"),
        (tmp_path / "file" / "e", "Not a directory"),
        (tmp_path / "folder", "not a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/dev/null"), "not a regular file"),
    ):
        with pytest.raises(OutputError, match=message):
            engine.save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failing_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    engine = Engine(mlp())
    engine.save(tmp_path / "e")
    before = (tmp_path / "e").read_bytes()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def pieces(p: Program) -> Any:
        yield b"partial"
        full()

    with monkeypatch.context() as m:
        if step == "write":
            m.setattr(fmt, "encode", pieces)
        else:
            m.setattr(os, step, full)
        with pytest.raises(OutputError, match=r"e cannot be written: No space left on device\n  hint:"):
            Engine(mlp(1)).save(tmp_path / "e")
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert (tmp_path / "e").read_bytes() == before


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Engine(mlp()).save(tmp_path / "e")
    assert not list(tmp_path.iterdir())


def test_a_read_only_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e").write_text("precious")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anything
    with pytest.raises(OutputError, match="read-only"):
        Engine(mlp()).save(tmp_path / "e")
    assert (tmp_path / "e").read_text() == "precious"


def test_saving_follows_links_and_honors_the_umask(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    old = os.umask(0o027)
    try:
        Engine(mlp()).save(tmp_path / "link")
    finally:
        os.umask(old)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    assert len(load(tmp_path / "real").inputs) == 1
