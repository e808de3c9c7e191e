"""A program that does not run on its GPU: the build tries other forms and other candidates, or fails. The GPU is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_gpu import pretend
from support.simulated import feeds_of
from support.tuned import branchy

import optdnn
from optdnn.cli.main import run
from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.errors import GpuFault
from optdnn.ir.export_onnx import export_model
from optdnn.runtime.cuda import usable
from optdnn.runtime.file.format import read
from optdnn.tuning import candidates
from optdnn.tuning.first_run import AS_BUILT, NOT_EARLY, ONE_LANE, forms

pytestmark = pytest.mark.nvrtc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    export_model(branchy()).save(path)
    return path


def build(model: Path, **options: Any) -> Any:
    given = {"tactics": "heuristic", "precision": "fp16", "streams": 2, **options}
    return optdnn.build(model, target="cuda:sm_90a", **given)


def launches(engine: Any) -> list[dict[str, Any]]:
    return [s.params["launch"] for s in engine.program.steps]


def simulated(engine: Any, folder: Path) -> Any:
    engine.save(folder / "e.engine")
    return optdnn.load(folder / "e.engine", simulate=True).run(feeds_of(branchy()))["y0"]


# ---------------------------------------------------------------- forms


def test_the_forms_are_one_program_with_fewer_liberties(model: Path) -> None:
    program = build(model).program
    assert program.lanes
    assert any(s.params["launch"]["dependent"] for s in program.steps)
    found = dict(forms(program))
    assert list(found) == [AS_BUILT, ONE_LANE, NOT_EARLY]
    assert found[AS_BUILT] is program
    assert not found[ONE_LANE].lanes
    assert found[ONE_LANE].steps == program.steps
    assert found[ONE_LANE].meta["streams"]["lanes"] == 1
    assert program.meta["streams"]["lanes"] > 1
    assert not found[NOT_EARLY].lanes
    assert not any(s.params["launch"]["dependent"] for s in found[NOT_EARLY].steps)
    assert [name for name, _ in forms(found[NOT_EARLY])] == [AS_BUILT]
    assert [name for name, _ in forms(found[ONE_LANE])] == [AS_BUILT, NOT_EARLY]


# ---------------------------------------------------------------- builds


def test_a_program_that_runs_is_the_same_as_without_a_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build(model).save(tmp_path / "elsewhere")
    pretend(monkeypatch)
    said: list[str] = []
    engine = build(model, progress=said.append)
    engine.save(tmp_path / "here")
    assert "first run: as built" in said
    assert engine.report["first_runs"] == [{"form": "as built", "replays": 20}]
    assert (tmp_path / "here").read_bytes() == (tmp_path / "elsewhere").read_bytes()


@pytest.mark.parametrize("target", ["cuda:sm_80", "simulate"])
def test_a_program_for_another_gpu_is_not_run(target: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("open", "", "segfaults"))
    engine = optdnn.build(model, target=target, precision="fp16", tactics="heuristic")
    assert "first_runs" not in engine.report


def test_without_a_gpu_nothing_is_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("open", "", "segfaults"))
    monkeypatch.setattr(usable, "why_not", lambda: "no NVIDIA GPU or no driver")
    assert "first_runs" not in build(model).report


@pytest.mark.parametrize(("how", "pattern", "form"), [("hangs", "lanes", ONE_LANE), ("traps", "early", NOT_EARLY)])
def test_a_graph_that_does_not_run_falls_back(
    how: str, pattern: str, form: str, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = simulated(build(model), tmp_path)
    pretend(monkeypatch, ("graph", pattern, how))
    said: list[str] = []
    engine = build(model, progress=said.append)
    assert not engine.program.lanes
    assert any(launch["dependent"] for launch in launches(engine)) == (form == ONE_LANE)
    reported = engine.meta["first_run"]
    assert reported["form"] == form
    assert list(reported["refused"]) == ([AS_BUILT] if form == ONE_LANE else [AS_BUILT, ONE_LANE])
    assert engine.report["first_runs"] == [{**reported, "replays": 20}]
    assert any(line.startswith("first run: as built: ") for line in said)
    np.testing.assert_array_equal(simulated(engine, tmp_path), wanted)
    assert read(tmp_path / "e.engine").meta["first_run"] == reported


def test_a_graph_that_runs_in_no_form_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("graph", "any", "hangs"))
    with pytest.raises(
        GpuFault, match=r"one by one on this GPU, but their graph does not: as built: hung.*one lane: hung.*no early"
    ):
        build(model)


def test_a_candidate_that_does_not_run_alone_is_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = build(model)
    wanted = simulated(plain, tmp_path)
    row = next(t for t in plain.meta["tactics"] if t["kind"] == "Conv" and t.get("config"))
    name = f"{row['tactic']} {row['config']}"
    pretend(monkeypatch, ("step", name, "hangs"))
    engine = build(model)
    assert name not in [f"{t['tactic']} {t.get('config', '')}" for t in engine.meta["tactics"]]
    lost = engine.meta["first_run"]["lost"]
    assert {x["candidate"] for x in lost} == {name}
    assert any(x["nodes"] == row["nodes"] for x in lost)
    assert "hung: it has not ended after 10 s" in lost[0]["why"]
    assert engine.report["first_runs"][0]["lost"] == lost
    got = simulated(engine, tmp_path)
    np.testing.assert_allclose(got, wanted, atol=4e-3 * np.abs(wanted).max())


def test_a_launch_without_an_alternative_is_an_error_that_names_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, ("step", "", "traps"))
    with pytest.raises(
        GpuFault, match=r"does not run on this GPU: step \d+, .*crashed: an illegal instruction"
    ) as caught:
        build(model)
    assert caught.value.step is not None
    assert caught.value.exit_code == 6


def test_programs_that_could_not_be_run_are_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("graph", "any", "host"))
    found = build_verbose(
        model, BuildOptions(target="cuda:sm_90a", precision="fp16", tactics="heuristic", no_cubins=True)
    )
    (tried,) = found.compiled.first_runs
    assert tried.warnings == [
        "the program was not run before it was kept: an operator on the CPU refuses its made-up inputs"
    ]
    assert "first_run" not in found.engine.meta


def test_a_gpu_that_cannot_be_used_does_not_fail_the_build(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("open", "", "traps"))
    (reported,) = build(model).report["first_runs"]
    assert "cannot use the GPU: RunError: an illegal instruction" in reported["skipped"]


def test_each_plan_of_a_range_of_shapes_is_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    dynamic = onnx.load(model)
    dynamic.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    del dynamic.graph.value_info[:]
    dynamic.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "N"
    pretend(monkeypatch, ("graph", "lanes", "hangs"))
    shapes = [{"x": "1..2..4x16x14x14"}, {"x": "1..3..4x16x14x14"}]
    engine = build(dynamic, shapes=shapes)  # type: ignore[arg-type]
    assert [t["form"] for t in engine.report["first_runs"]] == [ONE_LANE, ONE_LANE]
    for plan in (engine.program, *engine.program.dynamic.plans):
        assert not plan.lanes
        assert plan.meta["first_run"]["form"] == ONE_LANE


# ---------------------------------------------------------------- tuned builds


def test_a_tuned_build_drops_candidates_that_hang_and_reports_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(candidates, "MOST", 4)  # each candidate is compiled, and one is lost
    times, out = tmp_path / "times.json", tmp_path / "a.engine"
    command = ["build", str(model), "--target", "cuda:sm_90a", "--precision", "fp16", "--tactics", "own"]
    command += ["--timing-cache", str(times), "-o", str(out)]
    assert run(command) == 0
    assert "not run" not in capsys.readouterr().err
    row = next(t for t in read(out).meta["tactics"] if t["kind"] == "Conv" and t.get("config"))
    name, node = f"{row['tactic']} {row['config']}", row["nodes"][0]
    times.unlink()
    pretend(monkeypatch, ("trial", name, "segfaults"), ("graph", "early", "hangs"))
    assert run(command) == 0
    reported = capsys.readouterr()
    assert f"by {name}: crashed: its process was ended by SIGSEGV" in reported.out.replace("\n", " ")
    assert "does not run as it was built; it is kept with one lane, no early launches" in reported.err.replace(
        "\n", " "
    )
    assert name not in [f"{t['tactic']} {t.get('config', '')}" for t in read(out).meta["tactics"]]
    assert not any(name in key for key in json.loads(times.read_text())["candidates"])
    report = json.loads(Path(f"{out}.report.json").read_text())
    assert any(name in line for line in report["tuning"]["lost"])
    assert run(["explain", str(out), node]) == 0
    assert f"not usable: {name}: crashed" in capsys.readouterr().out.replace("\n", " ")
    assert run(["inspect", str(out)]) == 0
    assert "on the GPU of its build it runs one lane, no early launches: as built: hung" in capsys.readouterr().out
