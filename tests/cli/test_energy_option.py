"""``--energy`` of bench and compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import Cli, strict
from support.small_models import mlp

import optdnn
from optdnn.runtime.measuring import bench, energy


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "net.engine"
    optdnn.build(mlp(), target="reference").save(path)
    return path


def test_bench_shows_the_counters(cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(0, 1 << 40, 3_000_000))
    monkeypatch.setattr(bench, "counters", lambda gpu: [energy.Counter("package-0 (RAPL)", lambda: next(readings))])
    for name, seconds in (("REST_S", 0.0), ("IDLE_S", 0.05), ("BUSY_S", 0.05)):
        monkeypatch.setattr(energy, name, seconds)
    reported = cli("bench", engine, "--energy", "--iterations", "3")
    assert reported.code == 0
    assert "package-0 (RAPL)" in reported.out
    assert "power at rest over 2.0 s before" not in reported.out
    found = strict(cli("bench", engine, "--energy", "--iterations", "3", "--json").out)["energy"]
    assert found["joules"] == pytest.approx(3.0 / found["runs"])


def test_a_machine_without_counters_says_so_before_the_work(
    cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*, gpu: bool) -> list[energy.Counter]:
        return energy_counters(gpu=gpu, folder=tmp_path)

    energy_counters = energy.counters
    monkeypatch.setattr(energy, "counters", none)
    monkeypatch.setattr(bench, "counters", none)
    for words in (("bench", engine), ("compare", engine, "--against", engine)):
        reported = cli(*words, "--energy")
        assert (reported.code, reported.out) == (6, "")
        assert "no counter of energy can be read" in reported.err
