"""The energy of an inference: by NVML's counter of a GPU, and by RAPL's counters of processors and memory if they can be read.

The counters include everything that the device does, for any process. So the power at rest, with the engine loaded, is measured
first; reports show the energy with and without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from optdnn.errors import RunError
from optdnn.runtime.cuda.measuring.clocks import Monitor
from optdnn.runtime.program import Plain

POWERCAP = Path("/sys/class/powercap")
REST_S, IDLE_S, BUSY_S = 0.5, 2.0, 4.0
"""Seconds for the device to become idle, to measure its power at rest, and to measure runs."""


@dataclass(frozen=True)
class Counter:
    """A counter of energy. ``read`` returns microjoules, which wrap to 0 beyond ``wraps`` (None: never)."""

    name: str
    read: Callable[[], int]
    wraps: int | None = None

    def joules(self, before: int, after: int) -> float:
        """The energy between two readings less than one wrap apart."""
        used = after - before
        return (used + (self.wraps if used < 0 and self.wraps else 0)) / 1e6


@dataclass(frozen=True)
class Drawn:
    """The measurement of runs by one counter. ``joules`` and ``net_joules`` are per run, with the energy at rest and without it;
    ``watts`` and ``idle_watts`` are the power during runs and at rest."""

    counter: str
    joules: float
    net_joules: float
    watts: float
    idle_watts: float


def counters(*, gpu: bool, folder: Path = POWERCAP) -> list[Counter]:
    """The readable counters: of the GPU (``gpu``: if one runs the engine), of processors and memory.

    Raises RunError if there is none, or none for the GPU that runs the engine.
    """
    found: list[Counter] = []
    refused: list[str] = []
    if gpu:
        monitor = Monitor.open()
        if monitor is None or monitor.millijoules() is None:
            why = "NVML is not there" if monitor is None else "this GPU has no counter (they begin with Volta)"
            raise RunError(
                f"the energy of the GPU cannot be read: {why}", hint="nvidia-smi -q -d POWER shows what it has"
            )
        found.append(Counter("GPU (NVML)", lambda: 1000 * (monitor.millijoules() or 0)))
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith(("package", "dram")):  # cores and psys are parts of these, or hold them
                int((zone / "energy_uj").read_text())
                wraps = int((zone / "max_energy_range_uj").read_text())
                found.append(Counter(f"{name} (RAPL)", _reader(zone / "energy_uj"), wraps))
        except (OSError, ValueError) as error:
            refused.append(f"{zone}: {error}")
    if not found:
        why = refused[0] if refused else f"there is no RAPL in {folder}"
        raise RunError(
            f"no counter of energy can be read: {why}",
            hint="RAPL is often only for root, and absent in virtual machines",
        )
    return found


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text())


def energy(
    loop: Callable[[float], int],
    read: Sequence[Counter],
    *,
    idle_s: float | None = None,
    busy_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Plain]:
    """Measure the power at rest (``idle_s`` seconds), then runs (``busy_s`` seconds).

    ``loop(seconds)`` runs for about this long, and returns the number of runs. Returns plain data: ``runs``, ``seconds``,
    ``joules`` and ``net_joules`` per run over all counters, and ``counters`` (:class:`Drawn`). Raises RunError if no counter
    moved.
    """
    sleep(REST_S)
    idle, idle_seconds, _ = _used(read, clock, lambda: sleep(IDLE_S if idle_s is None else idle_s))
    busy, seconds, runs = _used(read, clock, lambda: loop(BUSY_S if busy_s is None else busy_s))
    runs = runs or 1
    if not any(busy):
        raise RunError(
            "no counter of energy moved while the engine ran",
            hint="a virtual machine may show counters that do not change",
        )
    rows = []
    for counter, rest, used in zip(read, idle, busy, strict=True):
        watts_at_rest = rest / idle_seconds
        net = (used - watts_at_rest * seconds) / runs
        rows.append(Drawn(counter.name, used / runs, net, used / seconds, watts_at_rest))
    return {
        "runs": runs,
        "seconds": round(seconds, 3),
        "idle_seconds": round(idle_seconds, 3),
        "joules": sum(r.joules for r in rows),
        "net_joules": sum(r.net_joules for r in rows),
        "counters": [asdict(r) for r in rows],
    }


def _used(
    read: Sequence[Counter], clock: Callable[[], float], work: Callable[[], int | None]
) -> tuple[list[float], float, int | None]:
    """The joules of each counter during ``work``, its duration in seconds, and its return value."""
    before, begin = [c.read() for c in read], clock()
    result = work()
    after, end = [c.read() for c in read], clock()
    return [c.joules(a, b) for c, a, b in zip(read, before, after, strict=True)], max(end - begin, 1e-9), result
