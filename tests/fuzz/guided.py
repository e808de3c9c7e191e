"""Fuzzing by coverage, with atheris (libFuzzer for Python): a process for each target, whose modules are instrumented."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random

from fuzz.judge import BYTES, timed
from fuzz.table import target
from fuzz.unguided import Result

TESTS = Path(__file__).parents[1]
LONGEST = 1 << 17
"""Bytes of the longest input."""
MOST_SEEDS = 300
"""Each seed is tried before the first mutation. Of more, a sample leaves time for mutations, which draw from all of them."""
WALL = 600
"""Seconds by the clock after which one input hangs: its process may get a small share of a processor."""


def fuzz(name: str, out: Path, *, runs: int, seconds: float, first: int = 0) -> Result:
    """Try inputs until ``runs`` are done, ``seconds`` are over, or one has a fault: it goes into ``out``. ``first`` is the seed."""
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("--guided needs atheris: pip install atheris")
    faults = out / name
    faults.mkdir(parents=True, exist_ok=True)
    before, start = {*faults.iterdir()}, time.monotonic()
    options = [
        f"-runs={runs}", f"-max_total_time={int(seconds)}", f"-seed={first + 1}", f"-artifact_prefix={faults}/",
        f"-max_len={LONGEST}", f"-timeout={WALL}", f"-rss_limit_mb={2 * (BYTES >> 20)}", "-print_final_stats=1", "-reload=0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        seeds = target(name).seeds()  # here, where nothing is instrumented: builds take their time
        for k, data in enumerate(Random(first).sample(seeds, min(len(seeds), MOST_SEEDS))):
            Path(folder, f"{k:05}").write_bytes(data)
        command = [sys.executable, "-m", "fuzz.guided", name, folder, *options]
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent, os.environ.get("PYTHONPATH", ""))))}
        done = subprocess.run(
            command, env={**os.environ, **paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            check=False,
        )  # fmt: skip
    result = Result(name, seconds=time.monotonic() - start, faults=sorted(map(str, {*faults.iterdir()} - before)))
    counted = re.findall(r"number_of_executed_units: (\d+)|^#(\d+)", done.stdout, re.M)
    result.count = max([int(a or b) for a, b in counted], default=0)
    if done.returncode and not result.faults:
        result.faults.append(f"exit code {done.returncode}")
    if result.faults:
        print(done.stdout[-4000:])
    return result


def _run(name: str, corpus: Path, options: list[str]) -> None:
    """The process of one target."""
    import atheris

    with atheris.instrument_imports(include=_covered(name)):
        tried = target(name)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        made = tried.mutate(bytes(data), rng)
        return made if len(made) <= most else bytes(data[:most])

    run = timed(tried.one_input)
    atheris.Setup([name, str(corpus), *options], lambda data: run(bytes(data)), custom_mutator=mutate)
    atheris.Fuzz()


def _covered(name: str) -> list[str]:
    """The packages that a target covers, read without importing it: modules that are imported before are not instrumented."""
    source = (Path(__file__).parent / "targets" / f"{name}.py").read_text()
    found = re.search(r"^COVERED = (\(.*?\))$", source, re.M | re.S)
    assert found, name
    return list(eval(found[1], {}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
