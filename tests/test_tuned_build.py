"""Builds that tune: when they do, that a warm one is the same, what the report and the command line say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.net import Net

import optdnn
from optdnn.cli.main import run
from optdnn.ir.export_onnx import export_model
from optdnn.runtime.cuda import timer as timer_module
from optdnn.runtime.cuda import usable
from optdnn.runtime.cuda.timer import Machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    n = Net()
    x = n.input(1, 64, 14, 14)
    for _ in range(2):
        x = n.op("Relu", n.conv(x, 64, 3))
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    export_model(n.done(n.conv(x, 32, 1, pads=0))).save(path)
    return path


class Timer:
    """A GPU that was made up: candidates take longer, the longer their names."""

    count = 0

    class device:
        arch = "sm_90a"

    machine = Machine("GPU", 60 << 20, {"driver": "1"})

    def compile(self, recipes: Any, workers: int) -> None:
        pass

    def trial(self, key: str, program: Any, *, cold: bool, give_up: float) -> float:
        Timer.count += 1
        name = program.steps[-1].params["tactic"]
        return 1e-6 + len(name) * 1e-8 + sum(map(ord, name)) * 1e-10

    def load(self, program: Any) -> Any:
        class Net:
            def close(self) -> None:
                pass

        return Net()

    def race(self, networks: Any, rounds: int) -> list[float]:
        return [1.0] * len(networks)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "why_not", lambda: None)
    monkeypatch.setattr(timer_module, "GpuTimer", Timer)
    monkeypatch.setattr(Timer, "count", 0)


def build(model: Path, **options: Any) -> Any:
    return optdnn.build(model, target="cuda:sm_90a", precision="fp16", no_cubins=True, **options)


def test_without_a_gpu_the_cost_model_chooses_and_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "why_not", lambda: "no NVIDIA GPU")
    said: list[str] = []
    engine = build(model, progress=said.append)
    assert "tactics by the cost model: no NVIDIA GPU" in said
    assert "tuning" not in engine.report


def test_another_architecture_is_not_tuned(model: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timer.device, "arch", "sm_80")
    said: list[str] = []
    build(model, progress=said.append)
    assert any("this GPU is sm_80, not sm_90a" in t for t in said)
    assert Timer.count == 0


def test_heuristic_measures_nothing(model: Path, gpu: None) -> None:
    assert "tuning" not in build(model, tactics="heuristic").report
    assert Timer.count == 0


def test_a_warm_build_measures_nothing_and_is_the_same(model: Path, gpu: None, tmp_path: Path) -> None:
    cache = tmp_path / "times.json"
    first = build(model, timing_cache=cache)
    count = Timer.count
    assert count > 10
    second = build(model, timing_cache=cache)
    assert Timer.count == count
    for engine, name in ((first, "a"), (second, "b")):
        engine.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert second.report["tuning"]["cached"]
    plain = build(model, tactics="heuristic")
    assert [t.get("config") for t in first.meta["tactics"]] != [t.get("config") for t in plain.meta["tactics"]]
    rows = first.report["tuning"]["problems"]
    assert all(row["us"] for row in rows)
    data = json.loads(cache.read_text())
    assert len(data["candidates"]) == count
    assert len(data["networks"]) == 1


def test_the_command_line(model: Path, gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--target", "cuda:sm_90a", "--precision", "fp16", "--no-cubins", "--tactics", "own"]
    out = ["-o", str(tmp_path / "a.engine")]
    assert run(["build", str(model), *target, *out, "--budget", "1000", "--workspace", "100000000"]) == 0
    assert "tuned" in capsys.readouterr().out
    assert Timer.count > 0
    assert run(["build", str(model), *target, *out, "--budget", "-1"]) == 2
    assert run(["build", str(model), *target, *out, "--row-invariant"]) == 0
    made = optdnn.load(tmp_path / "a.engine", simulate=True)
    assert made.meta["options"]["row_invariant"]
    assert all("k" not in t["config"] for t in made.meta["tactics"] if t["tactic"] == "conv_sm90")
