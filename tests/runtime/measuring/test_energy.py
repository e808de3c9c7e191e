"""The energy of runs: counters that wrap, power at rest, machines without counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from optdnn.errors import RunError
from optdnn.runtime.cuda.measuring.clocks import Monitor
from optdnn.runtime.measuring import energy as module
from optdnn.runtime.measuring.energy import Counter, counters, energy


class Machine:
    """A clock, and a counter of a device that draws 10 W at rest and 30 W under load."""

    def __init__(self, start: int = 0, wraps: int = 1 << 62):
        self.now, self.used, self.wraps = 100.0, float(start), wraps

    def pass_time(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.used = (self.used + seconds * watts * 1e6) % self.wraps

    def sleep(self, seconds: float) -> None:
        self.pass_time(seconds, 10)

    def loop(self, seconds: float) -> int:
        self.pass_time(seconds, 30)
        return 40

    def counter(self) -> Counter:
        return Counter("device", lambda: int(self.used), self.wraps)


@pytest.mark.parametrize("start", [0, 999_000_000])
def test_the_power_at_rest_is_subtracted_and_reported(start: int) -> None:
    """30 W for 4 s are 120 J; at rest it would be 40 J. In one case the counter wraps."""
    m = Machine(start, 1_000_000_000)
    found = energy(m.loop, [m.counter()], idle_s=2.0, busy_s=4.0, sleep=m.sleep, clock=lambda: m.now)
    assert (found["runs"], found["seconds"]) == (40, 4.0)
    assert found["joules"] == pytest.approx(3.0)
    assert found["net_joules"] == pytest.approx(2.0)
    (row,) = found["counters"]
    assert (row["watts"], row["idle_watts"]) == (pytest.approx(30.0), pytest.approx(10.0))


def test_a_counter_that_does_not_change_is_no_measurement() -> None:
    m = Machine()
    with pytest.raises(RunError, match="no counter of energy moved"):
        energy(m.loop, [Counter("still", lambda: 7)], sleep=m.sleep, clock=lambda: m.now)


def zone(folder: Path, number: str, name: str, energy_uj: str) -> None:
    made = folder / f"intel-rapl:{number}"
    made.mkdir()
    (made / "name").write_text(name + "\n")
    (made / "energy_uj").write_text(energy_uj + "\n")
    (made / "max_energy_range_uj").write_text("262143328850\n")


def test_packages_and_memory_are_read_and_not_their_parts(tmp_path: Path) -> None:
    for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "psys")):
        zone(tmp_path, number, name, "5000000")
    found = counters(gpu=False, folder=tmp_path)
    assert [(c.name, c.read(), c.wraps) for c in found] == [
        ("package-0 (RAPL)", 5000000, 262143328850),
        ("dram (RAPL)", 5000000, 262143328850),
    ]


def test_a_machine_without_counters_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="no counter of energy can be read: there is no RAPL"):
        counters(gpu=False, folder=tmp_path)
    zone(tmp_path, "0", "package-0", "unreadable")
    with pytest.raises(RunError, match=r"can be read: .*intel-rapl:0: invalid literal"):
        counters(gpu=False, folder=tmp_path)
    monkeypatch.setattr(Monitor, "open", lambda: None)
    with pytest.raises(RunError, match="energy of the GPU cannot be read: NVML is not there"):
        counters(gpu=True, folder=tmp_path)


class OldGpu:
    def millijoules(self) -> int | None:
        return None


def test_a_gpu_without_a_counter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Monitor, "open", OldGpu)
    with pytest.raises(RunError, match="this GPU has no counter"):
        counters(gpu=True)
