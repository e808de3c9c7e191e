"""Processes that are killed while they write: the files that remain must be complete."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import optdnn
from optdnn.calibration.cache import CalibrationCache, UnfinishedCalibration
from optdnn.runtime.engine import Engine, report_path
from optdnn.runtime.file.atomic import write_atomic
from optdnn.runtime.file.format import encode, read
from optdnn.runtime.file.json_file import read_json
from optdnn.tuning.timing_cache import TimingCache

ENGINE, MODEL, CACHE, RANGES = "net.engine", "net.onnx", "times.json", "ranges.json"
Say = Callable[[str], None]


def network(factor: float) -> onnx.ModelProto:
    """A network with a weight of 256 KB: its engine takes several writes."""
    weight = helper.make_tensor(
        "w", TensorProto.FLOAT, [256, 256], np.full(65536, factor, np.float32).tobytes(), raw=True
    )
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 256]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def prepare(folder: Path) -> None:
    """The files that the work of :data:`WORK` changes."""
    (folder / MODEL).write_bytes(network(1.0).SerializeToString())
    optdnn.build(folder / MODEL, target="reference").save(folder / ENGINE)
    add_time(folder, "first")
    CalibrationCache.open(folder / RANGES, "first", "data", "mse").save(UnfinishedCalibration())


def add_time(folder: Path, key: str) -> None:
    cache = TimingCache.open(folder / CACHE)
    cache.put(key, 1.0)
    cache.save()


def _build(folder: Path, number: int, say: Say) -> None:
    optdnn.build(folder / MODEL, target="reference", timing_cache=folder / CACHE).save(folder / ENGINE)


def _save(folder: Path, number: int, say: Say) -> None:
    program = read(folder / ENGINE, mmap=False)
    program.meta["number"] = number
    Engine(program).save(folder / ENGINE)


def _retune(folder: Path, number: int, say: Say) -> None:
    """Saves like retune: the engine in place, then its report."""
    engine = Engine(read(folder / ENGINE, mmap=False))
    engine.make_report = lambda e: {**read_json(Path(report_path(folder / ENGINE))), "number": number}
    engine.save(folder / ENGINE)


def _time(folder: Path, number: int, say: Say) -> None:
    add_time(folder, f"time {number}")
    say(f"time {number}")


def _ranges(folder: Path, number: int, say: Say) -> None:
    CalibrationCache.open(folder / RANGES, f"graph {number % 3}", "data", "mse").save(UnfinishedCalibration())


WORK: dict[str, Callable[[Path, int, Say], None]] = {
    "build": _build, "save": _save, "retune": _retune, "timing cache": _time, "calibration cache": _ranges,
}  # fmt: skip
"""Work that repeats until the process is killed. ``say`` reports what is safely stored."""


def spawn(work: Callable[[Say], None]) -> tuple[int, int]:
    """Begin work in a separate process. Returns its process id and a pipe with its reports."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    code = 1
    try:  # a child of a test must never return into it
        os.close(out)
        signal.alarm(120)  # a child that hangs must not hang its test
        work(lambda text: os.write(into, f"{text}\n".encode()) and None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def kill_at(name: str, folder: Path, delay: float, first: int) -> None:
    """Let a process repeat the work NAME, kill it after ``delay`` seconds, and check all of its files."""

    def again(say: Say) -> None:
        for number in range(first, first + 1_000_000):
            WORK[name](folder, number, say)

    pid, out = spawn(again)
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with open(out, encoding="utf-8") as pipe:
        said = pipe.read().split("\n")[:-1]
    assert os.WIFSIGNALED(status), f"{name}: the process ended by itself"
    check(folder, said)


def check(folder: Path, said: list[str]) -> None:
    """Every file is complete and has its contents, and the next write leaves no temporary file."""
    program = read(folder / ENGINE)
    assert b"".join(encode(program)) == (folder / ENGINE).read_bytes()
    assert set(json.loads(Path(report_path(folder / ENGINE)).read_text())) >= {"optdnn", "options"}
    times = TimingCache.open(folder / CACHE)
    assert {"first", *said} <= times.entries.keys(), sorted({"first", *said} - times.entries.keys())
    CalibrationCache.open(folder / RANGES, "first", "data", "mse")
    assert (folder / MODEL).stat().st_size > 1 << 18
    write_atomic(folder / "next", [b""])
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []


def moments(folder: Path, count: int, seed: int, say: Say = lambda text: None) -> None:
    """Kill the work of each kind in turn, ``count`` times in all, at random moments."""
    rng, names = random.Random(seed), list(WORK)
    for k in range(count):
        kill_at(names[k % len(names)], folder, rng.uniform(0.0, 0.12), 1000 * k)
        if k % 100 == 99:
            say(f"{k + 1} moments: nothing lost, no partial file, no temporary file")
