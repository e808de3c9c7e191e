"""Fuzzing without coverage: numbered mutations of the seeds, in a watched process. It needs no package.

Number N of a target is always the same input, as long as its seeds and mutations stay the same. So an input that ends the
process can be made again from its number.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random

from fuzz.judge import BYTES, SECONDS, timed
from fuzz.table import Target, target

POLL = 0.2
WALL = 10
"""A process hangs if its input takes this many times SECONDS by the clock, including waits."""
_STATE = struct.Struct("<QQ")
"""The number of the current input, and the number of tried inputs."""


@dataclass
class Result:
    """The number of tried inputs of a target, and its faults: a text each, with the file of the input."""

    name: str
    count: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    mutated: int | None = None

    def __str__(self) -> str:
        rate = self.count / max(self.seconds, 1e-9)
        mutated = "" if self.mutated is None else f", {self.mutated} of them mutated,"
        return f"{self.name}: {self.count} inputs{mutated} in {self.seconds:.0f} s ({rate:.0f}/s), {len(self.faults)} faults"


def numbered(tried: Target, number: int) -> bytes:
    """Input ``number`` of a target. The first ones are its seeds."""
    seeds = tried.seeds()
    if number < len(seeds):
        return seeds[number]
    rng = Random(number)
    data = tried.mutate(rng.choices(seeds, cum_weights=_weights(tried))[0], rng)
    while rng.random() < 0.25:
        data = tried.mutate(data, rng)
    return data


@cache
def _weights(tried: Target) -> list[float]:
    """Half of the inputs start from any seed, the others from a short one, so that more inputs are tried."""
    lengths = [1 / (len(data) + 64) for data in tried.seeds()]
    return list(accumulate(w / sum(lengths) + 1 / len(lengths) for w in lengths))


def fuzz(name: str, out: Path, *, runs: int, seconds: float, first: int = 0) -> Result:
    """Try inputs from number ``first`` on, until ``runs`` are done or ``seconds`` of processor time are over. Inputs with
    faults are stored in ``out``."""
    return fuzz_target(target(name), name, out, runs=runs, seconds=seconds, first=first)


def fuzz_target(tried: Target, name: str, out: Path, *, runs: int, seconds: float, first: int = 0) -> Result:
    """:func:`fuzz` of the target ``name``."""
    result = Result(name)
    tried.seeds()  # once, before processes share them
    start, used = time.monotonic(), 0.0
    state, number = mmap.mmap(-1, _STATE.size), first
    known = mmap.mmap(-1, 1 << 16)  # digests of stored faults, for processes that continue after one that ended
    while result.count < runs and used < seconds:
        _STATE.pack_into(state, 0, number, 0)
        child = os.fork()
        if not child:
            _child(tried, name, state, known, range(number, first + runs), seconds - used, out)
        ended, taken = _watch(child, state)
        used += taken
        number, count = _STATE.unpack_from(state)
        result.count += count
        if ended is None:
            break
        saved = _saved(out / name, "ended", numbered(tried, number))
        print(f"{name}: input {number} {ended}: {saved}", flush=True)
        number, result.count = number + 1, result.count + 1
    result.seconds = time.monotonic() - start
    result.faults = sorted(str(p) for p in (out / name).glob("*")) if (out / name).exists() else []
    return result


def _watch(child: int, state: mmap.mmap) -> tuple[str | None, float]:
    """Wait for the process. Returns how it ended early, or None; and its processor time."""
    number, since, used = -1, time.monotonic(), 0.0
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            how = None if code == 0 else f"ended the process ({signal.Signals(-code).name if code < 0 else code})"
            return how, usage.ru_utime + usage.ru_stime
        now = _STATE.unpack_from(state)[0]
        if now != number:
            number, since, used = now, time.monotonic(), _processor_seconds(child)
        elif _processor_seconds(child) - used > SECONDS or time.monotonic() - since > WALL * SECONDS:
            os.kill(child, signal.SIGKILL)
            usage = os.wait4(child, 0)[2]
            return "hangs", usage.ru_utime + usage.ru_stime
        time.sleep(POLL)


def _processor_seconds(process: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _child(
    tried: Target, name: str, state: mmap.mmap, known: mmap.mmap, numbers: range, seconds: float, out: Path
) -> None:
    """The process that tries inputs. It never returns."""
    code = 1
    try:
        limit_memory()
        run = timed(tried.one_input)
        for count, number in enumerate(numbers):
            _STATE.pack_into(state, 0, number, count)
            if time.process_time() > seconds:
                break
            data = numbered(tried, number)
            try:
                run(data)
            except Exception as error:
                _tell(name, number, error, data, known, out)
        else:
            _STATE.pack_into(state, 0, numbers.stop, len(numbers))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def limit_memory() -> None:
    """Let this process use BYTES more memory than now. A further byte is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _tell(name: str, number: int, error: Exception, data: bytes, known: mmap.mmap, out: Path) -> None:
    """Report and store a fault, once for each place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
    digest = hashlib.sha256(place.encode()).digest()[:8]
    table = known[:]
    held = [table[k : k + 8] for k in range(0, len(table), 8)]
    if digest in held:
        return
    at = held.index(bytes(8)) * 8
    known[at : at + 8] = digest
    print(f"{name}: input {number}: {place}: {error!s:.200}: {_saved(out / name, place, data)}", flush=True)


def _saved(folder: Path, what: str, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words = "".join(c if c.isalnum() else "-" for c in what)
    path = folder / f"{words}-{hashlib.sha256(data).hexdigest()[:8]}"
    path.write_bytes(data)
    return path
