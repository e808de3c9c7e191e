"""Inputs that once showed a fault, the range of the mutations, and the faults that the fuzzer detects."""

from __future__ import annotations

import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from fuzz import guided, unguided
from fuzz.judge import OutOfBounds, ours
from fuzz.table import NAMES, target
from fuzz.unguided import fuzz_target, numbered
from optdnn.errors import EngineError, InternalError, OptdnnError, RunError
from optdnn.importers.onnx import import_model
from optdnn.runtime.file.format import decode

ROOT = Path(__file__).parents[2]
FAULTS = sorted(Path(__file__).with_name("faults").glob("*/*"))
WITHOUT = () if importlib.util.find_spec("orjson") and importlib.util.find_spec("prometheus_client") else ("request",)
"""Targets that need an extra that is not installed."""


@pytest.mark.parametrize("path", FAULTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_that_once_showed_a_fault(path: Path) -> None:
    target(path.parent.name).one_input(path.read_bytes())


def test_each_target_has_a_module_and_faults_are_of_targets() -> None:
    modules = {p.stem for p in Path(__file__).with_name("targets").glob("[a-z]*.py")}
    assert modules == {*NAMES}
    assert {p.parent.name for p in FAULTS} <= modules
    assert sum(p.stat().st_size for p in FAULTS) < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_some_inputs_of_each_target(name: str) -> None:
    if name in WITHOUT:
        pytest.skip("the extra serve is not installed")
    tried = target(name)
    for number in (*range(3), *range(1 << 40, (1 << 40) + 40)):
        tried.one_input(numbered(tried, number))


# ---------------------------------------------------------------- what mutations reach


@pytest.mark.slow
def test_mutated_engines_have_right_digests_and_are_read_to_their_end() -> None:
    tried, met = target("engine"), Counter[str]()
    for number in range(1 << 40, (1 << 40) + 400):
        try:
            decode(memoryview(numbered(tried, number)))
            met["read"] += 1
        except EngineError as error:
            digest = any(word in error.message for word in ("checksum", "truncated", "longer than"))
            met["digest" if digest else "refused"] += 1
    assert met["read"] > 100
    assert met["refused"] > 100
    assert met["digest"] < 60, "lengths and digests are made right again"


def test_mutated_models_pass_the_parser_and_many_are_imported() -> None:
    tried, met = target("model"), Counter[str]()
    for number in range(1 << 40, (1 << 40) + 400):
        data = numbered(tried, number)
        try:
            onnx.ModelProto.FromString(data)
            import_model(data)
            met["imported"] += 1
        except OptdnnError:
            met["refused"] += 1
        except Exception:
            met["no protobuf"] += 1
    assert met["imported"] > 60
    assert met["refused"] > 100
    assert met["no protobuf"] < 40


def test_a_number_is_always_the_same_input() -> None:
    for name in ("model", "engine", "timing_cache"):
        tried = target(name)
        assert [numbered(tried, n) for n in range(5000, 5010)] == [numbered(tried, n) for n in range(5000, 5010)]


# ---------------------------------------------------------------- what counts as a fault


def faulty(one_input: Any) -> Any:
    """A target whose inputs are the texts 0, 1, 2, …"""
    return SimpleNamespace(seeds=lambda: [str(k).encode() for k in range(100)], one_input=one_input, mutate=None)


def test_other_exceptions_are_kept_once_for_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one_input(data: bytes) -> None:
        with ours():
            if data in (b"3", b"4"):
                raise KeyError(data)
            if data == b"5":
                raise EngineError("ours")
            if data == b"6":
                raise InternalError("a defect")

    result = fuzz_target(faulty(one_input), "faulty", tmp_path, runs=20, seconds=60)
    assert result.count == 20
    assert sorted(Path(p).read_bytes() for p in result.faults) == [b"3", b"6"]
    assert str(result).endswith("2 faults")


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_fault_and_the_others_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unguided, "SECONDS", 0.3)

    def one_input(data: bytes) -> None:
        if data == b"2":
            os.kill(os.getpid(), signal.SIGKILL)
        while data == b"7":
            pass
        if data == b"9":
            (tmp_path / "reached").touch()

    result = fuzz_target(faulty(one_input), "faulty", tmp_path, runs=10, seconds=120)
    assert result.count == 10
    assert sorted(Path(p).read_bytes() for p in result.faults) == [b"2", b"7"]
    assert (tmp_path / "reached").exists()


def test_the_limit_is_processor_time(tmp_path: Path) -> None:
    """Inputs that wait, or that get a small share of a processor, do not use up the limit."""

    def burns(data: bytes) -> None:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass

    def waits(data: bytes) -> None:
        time.sleep(0.02)

    assert fuzz_target(faulty(waits), "faulty", tmp_path, runs=20, seconds=0.2).count == 20
    assert 1 <= fuzz_target(faulty(burns), "faulty", tmp_path, runs=100, seconds=0.2).count <= 11


def test_the_limit_of_guided_fuzzing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that take a second each get half of the ten seconds, mutations the other half."""
    now, tried, stopped = [0.0], list[bytes](), list[int]()
    monkeypatch.setattr(guided.time, "process_time", lambda: now[0])

    def run(data: bytes) -> None:
        tried.append(data)
        now[0] += 1.0

    state = mmap.mmap(-1, guided.STATE.size)
    budget = guided.Budget(run, 10.0, state, lambda: stopped.append(len(tried)))
    for k in range(300):
        budget(b"seed %d" % k)
    assert len(tried) == 6, "the others are passed over"
    while not stopped:
        budget.mutates()
        budget(b"mutated")
    assert stopped == [11]
    assert guided.STATE.unpack(state[:]) == (11, 5)


def test_much_memory_and_much_time_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.judge.SECONDS", 0.05)

    def one_input(data: bytes) -> None:
        with ours():
            if data == b"1":
                try:
                    bytearray(3 << 30)
                except MemoryError as error:
                    raise RunError("it does not fit in memory") from error
        until = time.process_time() + (0.1 if data == b"2" else 0.0)
        while time.process_time() < until:
            pass

    result = fuzz_target(faulty(one_input), "faulty", tmp_path, runs=4, seconds=60)
    assert sorted(Path(p).read_bytes() for p in result.faults) == [b"1", b"2"]
    with pytest.raises(OutOfBounds), ours():
        raise RunError("no memory") from MemoryError()
    with ours(bounded=False):
        raise RunError("no memory") from MemoryError()


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "timing_cache", "dimension", "--runs", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "timing_cache: 20 inputs in" in done.stdout
    assert "dimension: 20 inputs in" in done.stdout
    done = subprocess.run([*command[:3], "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "there is no target 'nothing'" in done.stderr


def test_mutations_of_anything() -> None:
    """Also for inputs that coverage found and that are no valid input."""
    for name in (n for n in NAMES if n not in WITHOUT):
        tried, rng = target(name), Random(0)
        for data in (b"", b"{", b"[]", b"\x89OPTDNN\n", b"\x08\x07", bytes(100)):
            for _ in range(20):
                assert isinstance(tried.mutate(data, rng), bytes)
