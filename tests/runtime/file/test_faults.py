"""Killed writers, full disks, folders that cannot be written, and concurrent writers.

``python -m benchmarks faults`` runs the first test at any number of moments.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import killed
from support.killed import CACHE, ENGINE, MODEL, RANGES, Say, add_time, spawn

import optdnn
from optdnn.calibration.cache import CalibrationCache, UnfinishedCalibration
from optdnn.errors import OutputError
from optdnn.runtime.engine import Engine, report_path
from optdnn.runtime.file import atomic
from optdnn.runtime.file.format import read
from optdnn.tuning.timing_cache import TimingCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    killed.prepare(tmp_path)
    return tmp_path


def ended(pids: list[tuple[int, int]]) -> list[int]:
    """The exit codes of the processes, after they have ended."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in pids]
    for _, out in pids:
        os.close(out)
    return codes


@pytest.mark.slow
def test_writers_that_are_killed_lose_nothing_and_leave_nothing(folder: Path) -> None:
    killed.moments(folder, 25, seed=0)


def test_leftovers_are_deleted_and_files_of_running_writers_are_not(tmp_path: Path) -> None:
    def die(say: Say) -> None:
        _, fd = atomic._temporary(str(tmp_path))
        os.write(fd, b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    def live(say: Say) -> None:
        def pieces() -> object:
            yield b"slow"
            say("writing")
            ready.read()
            yield b" but whole"

        os.close(go)
        atomic.write_atomic(tmp_path / "slow", pieces())  # type: ignore[arg-type]

    assert ended([spawn(die)]) == [-signal.SIGKILL]
    reader, go = os.pipe()
    ready = os.fdopen(reader, "rb")
    (tmp_path / ".optdnn-mine.tmp").touch()  # optdnn gives no such name
    writer = spawn(live)
    assert os.read(writer[1], 100) == b"writing\n"
    assert (
        len(list(tmp_path.glob(".optdnn-*.tmp"))) == 2
    )  # the second writer has deleted the leftovers of the killed one
    atomic.write_atomic(tmp_path / "other", [b"x"])
    assert len(list(tmp_path.glob(".optdnn-*.tmp"))) == 2
    os.close(go)
    assert ended([writer]) == [0]
    assert (tmp_path / "slow").read_bytes() == b"slow but whole"
    assert [p.name for p in tmp_path.glob(".optdnn-*.tmp")] == [".optdnn-mine.tmp"]


def test_a_temporary_file_that_is_deleted_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the file for a leftover, since it is not locked yet."""
    lock, calls = atomic._lock, list[int]()

    def late(fd: int) -> bool:
        calls.append(fd)
        if len(calls) == 1:
            atomic.sweep(str(tmp_path))
        return lock(fd)

    monkeypatch.setattr(atomic, "_lock", late)
    atomic.write_atomic(tmp_path / "e", [b"whole"])
    assert len(calls) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert (tmp_path / "e").read_bytes() == b"whole"


WRITERS: dict[str, Callable[[Path], None]] = {
    "engine": lambda folder: Engine(read(folder / ENGINE, mmap=False)).save(folder / ENGINE),
    "build": lambda folder: optdnn.build(folder / MODEL, target="reference").save(folder / ENGINE),
    "timing cache": lambda folder: [add_time(folder, f"{k}{'x' * 2000}") for k in range(8)] and None,
    "calibration cache": lambda folder: [
        CalibrationCache.open(folder / RANGES, f"{k}{'x' * 2000}", "d", "mse").save(UnfinishedCalibration())
        for k in range(8)
    ] and None,
}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_that_leaves_the_old_file(name: str, folder: Path) -> None:
    """The limit of a process on the size of a file makes the write fail in the middle, like a full disk."""

    def work(say: Say) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        with pytest.raises(OutputError, match=r"cannot be written: File too large\n  hint: .*free space"):
            WRITERS[name](folder)

    before = contents(folder)
    assert ended([spawn(work)]) == [0]
    after = contents(folder)
    assert after.keys() == before.keys()
    assert after[ENGINE] == before[ENGINE]
    TimingCache.open(folder / CACHE)
    CalibrationCache.open(folder / RANGES, "first", "data", "mse")


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_cannot_be_written_is_an_error(name: str, folder: Path) -> None:
    def work(say: Say) -> None:
        os.chdir(folder)  # later it may not enter the folders above
        if os.getuid() == 0:
            os.setuid(65534)  # the superuser may write anywhere
        with pytest.raises(OutputError, match="cannot be written"):
            WRITERS[name](Path())

    before = contents(folder)
    folder.chmod(0o555)
    try:
        assert ended([spawn(work)]) == [0]
    finally:
        folder.chmod(0o755)
    assert contents(folder) == before


@pytest.mark.slow
def test_several_builds_on_one_output_and_one_cache(folder: Path) -> None:
    """Each writes 10 times. All measured times are kept, and the engine is complete and comes from one of them."""

    def work(own: int) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            for k in range(10):
                add_time(folder, f"{own} {k}")
                CalibrationCache.open(folder / RANGES, f"graph {own}", "data", "mse").save(UnfinishedCalibration())
                optdnn.build(killed.network(own), target="reference").save(folder / ENGINE)

        return run

    assert ended([spawn(work(own)) for own in range(4)]) == [0] * 4
    assert TimingCache.open(folder / CACHE).entries.keys() == {
        "first",
        *(f"{a} {k}" for a in range(4) for k in range(10)),
    }
    kept = CalibrationCache.open(folder / RANGES, "other", "data", "mse").others
    assert {e["key"]["graph"] for e in kept} == {"first", *(f"graph {own}" for own in range(4))}
    found = optdnn.load(folder / ENGINE)(np.ones((4, 256), np.float32))[0, 0]
    assert found in [256.0 * own for own in range(4)]
    killed.check(folder, [])
    assert Path(report_path(folder / ENGINE)).exists()
