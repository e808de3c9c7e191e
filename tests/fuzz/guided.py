"""Fuzzing by coverage, with atheris (libFuzzer for Python): a process for each target, whose modules are instrumented."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from fuzz.judge import BYTES, timed
from fuzz.table import target
from fuzz.unguided import Result

TESTS = Path(__file__).parents[1]
LONGEST = 1 << 17
"""The length of the longest input in bytes."""
MOST_SEEDS = 300
"""A sample of the seeds is tried before the first mutation. Mutations draw from all of them."""
WALL = 600
"""The time in seconds after which an input counts as hanging. It is long, since a process may get a small share of a processor.
libFuzzer would store an input as slow after 10 seconds."""
STATE = struct.Struct("<QQ")
"""The number of inputs that were tried, and the number of mutated ones."""


def fuzz(name: str, out: Path, *, runs: int, seconds: float, first: int = 0) -> Result:
    """Try inputs until ``runs`` are done, ``seconds`` of processor time are over, or one has a fault, which is stored in
    ``out``. ``first`` is the seed."""
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("--guided needs atheris: pip install atheris")
    faults = out / name
    faults.mkdir(parents=True, exist_ok=True)
    before, start = {*faults.iterdir()}, time.monotonic()
    options = [
        f"-runs={runs}", f"-seed={first + 1}", f"-artifact_prefix={faults}/", f"-max_len={LONGEST}", f"-timeout={WALL}",
        f"-report_slow_units={WALL}", f"-rss_limit_mb={2 * (BYTES >> 20)}", "-reload=0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as state:
        state.write(bytes(STATE.size))
        state.flush()
        seeds = target(name).seeds()  # without instrumentation: builds take their time
        corpus = _stored(Random(first).sample(seeds, min(len(seeds), MOST_SEEDS)), Path(folder, "corpus"))
        every = _stored(seeds, Path(folder, "seeds"))
        command = [
            sys.executable,
            "-m",
            "fuzz.guided",
            name,
            str(corpus),
            str(every),
            state.name,
            str(seconds),
            *options,
        ]
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent, os.environ.get("PYTHONPATH", ""))))}
        done = subprocess.run(
            command, env={**os.environ, **paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            check=False,
        )  # fmt: skip
        state.seek(0)
        count, mutated = STATE.unpack(state.read())
    result = Result(name, count, time.monotonic() - start, sorted(map(str, {*faults.iterdir()} - before)), mutated)
    if done.returncode and not result.faults:
        result.faults.append(f"exit code {done.returncode}")
    if result.faults:
        print(done.stdout[-4000:])
    return result


def _stored(inputs: Sequence[bytes], folder: Path) -> Path:
    """A new folder with a file for each input, in order."""
    folder.mkdir()
    for k, data in enumerate(inputs):
        (folder / f"{k:05}").write_bytes(data)
    return folder


class Budget:
    """Tries inputs for a limited processor time. Seeds, which may be many, take at most half of it."""

    def __init__(self, run: Callable[[bytes], None], seconds: float, state: mmap.mmap, stop: Callable[[], None]):
        self._run, self._seconds, self._state, self._stop = run, seconds, state, stop
        self._start, self._count, self._mutated, self._mutates = time.process_time(), 0, 0, False

    def mutates(self) -> None:
        """From now on, inputs are mutated."""
        self._mutates = True

    def __call__(self, data: bytes) -> None:
        used = time.process_time() - self._start
        if used > self._seconds:
            self._stop()
        if used > self._seconds * (1.0 if self._mutates else 0.5):
            return
        self._count += 1
        self._mutated += self._mutates
        STATE.pack_into(self._state, 0, self._count, self._mutated)
        self._run(data)


def _run(name: str, corpus: Path, every: Path, state: Path, seconds: float, options: list[str]) -> None:
    """The process of one target. ``every`` holds all seeds, from which mutations draw."""
    import atheris

    with atheris.instrument_imports(include=_covered(name)):
        tried = target(name)
    seeds = [path.read_bytes() for path in sorted(every.iterdir())]
    tried.seeds = lambda: seeds  # to make them again here would take instrumented builds
    with state.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), STATE.size)
    budget = Budget(timed(tried.one_input), seconds, shared, lambda: os.kill(os.getpid(), signal.SIGUSR1))

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        budget.mutates()
        rng = Random(seed)
        made = tried.mutate(bytes(data), rng)
        return made if len(made) <= most else bytes(data[:most])

    atheris.Setup([name, str(corpus), *options], lambda data: budget(bytes(data)), custom_mutator=mutate)
    atheris.Fuzz()  # SIGUSR1 requests the end


def _covered(name: str) -> list[str]:
    """The packages that a target covers, found without an import: modules that are imported before are not instrumented."""
    source = (Path(__file__).parent / "targets" / f"{name}.py").read_text()
    found = re.search(r"^COVERED = (\(.*?\))$", source, re.M | re.S)
    assert found, name
    return list(eval(found[1], {}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _run(sys.argv[1], *map(Path, sys.argv[2:5]), float(sys.argv[5]), sys.argv[6:])
