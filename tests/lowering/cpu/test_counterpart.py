"""A precision that is slower than fp32 is reported, with both times."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import needs_libraries
from support.onnxnet import save_convnet

from optdnn.cli.main import run
from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.errors import UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu import counterpart
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.report.words import problems
from optdnn.target_name import TargetName
from optdnn.targets.base import Optimized, Source
from optdnn.targets.cpu import Cpu
from optdnn.tuning.timing_cache import TimingCache

needs_libraries()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
    return save_convnet(tmp_path / "net.onnx", batch="N")


def clock(monkeypatch: pytest.MonkeyPatch, own: float, fp32: float) -> list[list[str]]:
    """Lets the last measurement give these milliseconds. Returns what was measured."""
    measured: list[list[str]] = []

    def turns(runners: Mapping[str, Callable[[float], object]], **_: Any) -> dict[str, float]:
        for go in runners.values():
            go(0.001)
        measured.append(list(runners))
        return {"own": own, "fp32": fp32}

    monkeypatch.setattr(counterpart, "take_turns", turns)
    return measured


def int8(model: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(target="cpu", precision="int8", calib=model.parent / "data.npz", threads=1, **changes)


def test_a_slower_precision_is_reported_with_both_times(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, 3.0, 2.0)
    out = model.with_suffix(".engine")
    arguments = ["build", str(model), "--target", "cpu", "--precision", "int8", "--threads", "1", "-o", str(out)]
    assert run([*arguments, "--calib", str(model.parent / "data.npz")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning"))
    assert line.startswith("warning: int8 is slower than fp32 on this machine: 3 ms (")
    assert ", fp32 2 ms (" in line
    report = json.loads(Path(f"{out}.report.json").read_text(encoding="utf-8"))
    found = report["beside_fp32"]
    assert (found["own"]["median_ms"], found["fp32"]["median_ms"], found["slower"]) == (3.0, 2.0, True)
    assert found["own"]["tactic"] == report["tactic"]["name"]
    said = problems({"build": report, "rows": [], "input_difference": None, "error_reference": None})
    assert said == [line.removesuffix("; build with --precision fp32")]


@pytest.mark.parametrize("own", [2.05])
def test_a_precision_that_is_not_slower_is_only_in_the_report(
    model: Path, own: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, own, 2.0)
    found = build_verbose(model, int8(model)).report()["beside_fp32"]
    assert (found["own"]["median_ms"], found["fp32"]["median_ms"], found["slower"]) == (own, 2.0, False)
    assert not problems(
        {"build": {"beside_fp32": found}, "rows": [], "input_difference": None, "error_reference": None}
    )


def test_fp32_itself_is_compared_with_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = clock(monkeypatch, 1.0, 1.0)
    build = build_verbose(model, BuildOptions(target="cpu", threads=1))
    assert "beside_fp32" not in build.report()
    assert measured == []


@pytest.mark.slow
def test_times_of_the_timing_cache_are_not_measured_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = clock(monkeypatch, 3.0, 2.0)
    wanted = int8(model, timing_cache=tmp_path / "times.json")
    build_verbose(model, wanted)
    assert len(measured) == 1
    first, second = (build_verbose(model, wanted).report()["beside_fp32"] for _ in range(2))
    assert len(measured) == 1
    assert first == second


def test_a_network_that_no_library_runs_in_fp32_is_compared_with_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError("no tactic runs it")

    monkeypatch.setattr(counterpart, "choose", refuse)
    assert "beside_fp32" not in build_verbose(model, int8(model)).report()


@pytest.mark.parametrize("precision", ["int8", "auto"])
def test_precision_auto_is_not_compared_with_fp32_again(model: Path, precision: str) -> None:
    """The race of whole engines has compared them already."""
    asked: list[int] = []

    def in_fp32() -> Graph:
        asked.append(1)
        return graph.copy()

    graph = import_model(model)
    options = BuildOptions(target="cpu", precision=precision, calib=model.parent / "data.npz", threads=1)
    work = Optimized(graph, Source(model), PrecisionPlan("fp32"), "int8", {}, in_fp32)
    compiled = Cpu(TargetName.parse("cpu")).compile(work, options, TimingCache.open(None), print)
    assert (compiled.beside_fp32 is None, len(asked)) == ((True, 0) if precision == "auto" else (False, 1))


def test_options_of_fp32_leave_out_those_of_other_precisions(tmp_path: Path) -> None:
    given = BuildOptions(
        target="cpu", precision="auto", calib={"x": np.ones((4, 3))}, metric="mse", max_drop=1.0, labels=np.ones(4),
        candidates=("bf16",), precision_map={"a": "fp32"}, strict_precision=True, threads=2, dump=tmp_path, opt_level=2,
    )  # fmt: skip
    assert counterpart.fp32_of(given) == BuildOptions(target="cpu", threads=2, opt_level=2)
