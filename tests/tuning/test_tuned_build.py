"""Builds that tune: when they do, that a warm build gives the same bytes, the report and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.timer import FakeTimer, hashed, tactics_of
from support.tuned import timed_without_gpu

import optdnn
from optdnn.cli.main import run
from optdnn.errors import EngineError, UsageError
from optdnn.importers.split_weights import split_weights
from optdnn.ir.embedded_graph import held
from optdnn.ir.export_onnx import export_model
from optdnn.refitting.held_model import held_model
from optdnn.runtime.cuda import usable
from optdnn.runtime.cuda.trials.process import GraphFault, NetworkLost
from optdnn.runtime.file.format import read, write
from optdnn.runtime.program import Dynamic, Program
from optdnn.tuning.retune import options_of
from optdnn.types import Array

pytestmark = pytest.mark.nvrtc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    n = Net()
    x = n.input(1, 64, 14, 14)
    for _ in range(2):
        x = n.op("Relu", n.conv(x, 64, 3))
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    export_model(n.done(n.conv(x, 32, 1, pads=0))).save(path)
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    return timed_without_gpu(monkeypatch)


def build(model: Path, **options: Any) -> Any:
    return optdnn.build(model, target="cuda:sm_90a", precision="fp16", no_cubins=True, **options)


def test_without_a_gpu_the_cost_model_chooses_and_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "why_not", lambda: "no NVIDIA GPU")
    said: list[str] = []
    engine = build(model, progress=said.append)
    assert "tactics by the cost model: no NVIDIA GPU" in said
    assert "tuning" not in engine.report


def test_another_architecture_is_not_tuned(model: Path, gpu: FakeTimer) -> None:
    gpu.device.arch = "sm_80"
    said: list[str] = []
    build(model, progress=said.append)
    assert any("this GPU is NVIDIA A100-SXM4-40GB (sm_80, 108 multiprocessors), not sm_90a" in t for t in said)
    assert gpu.trials == []


def test_heuristic_measures_nothing(model: Path, gpu: FakeTimer) -> None:
    assert "tuning" not in build(model, tactics="heuristic").report
    assert gpu.trials == []


def test_a_warm_build_measures_nothing_and_is_the_same(model: Path, gpu: FakeTimer, tmp_path: Path) -> None:
    cache = tmp_path / "times.json"
    first = build(model, timing_cache=cache)
    count = len(gpu.trials)
    assert count > 10
    second = build(model, timing_cache=cache)
    assert len(gpu.trials) == count
    for engine, name in ((first, "a"), (second, "b")):
        engine.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert second.report["tuning"]["cached"]
    assert "own" in second.report["tuning"]["providers"]
    plain = build(model, tactics="heuristic")
    assert [t.get("config") for t in first.meta["tactics"]] != [t.get("config") for t in plain.meta["tactics"]]
    rows = first.report["tuning"]["problems"]
    assert all(row["us"] for row in rows)
    data = json.loads(cache.read_text())
    assert len(data["candidates"]) == count
    assert len(data["networks"]) == 1


def test_libraries_that_are_not_there_are_named(model: Path, gpu: FakeTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.lowering.choose.providers_here", lambda *, sure: frozenset({"own", "cublaslt"}))
    for tactics, absent in (("auto", True), ("own", False)):
        said: list[str] = []
        engine = build(model, tactics=tactics, budget=2.0, progress=said.append)
        assert any("no candidates of cudnn: not installed" in t for t in said) is absent
        assert engine.report["tuning"]["providers"] == (["cublaslt", "own"] if absent else ["own"])


def test_libraries_that_cannot_be_loaded_are_no_candidates(
    model: Path, gpu: FakeTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(*, sure: bool) -> frozenset[str]:
        return frozenset({"own"} if sure else {"own", "cudnn"})

    for module in ("optdnn.lowering.choose", "optdnn.tuning.autotuner"):
        monkeypatch.setattr(f"{module}.providers_here", here)
    said: list[str] = []
    engine = build(model, budget=2.0, progress=said.append)
    assert "tune: no candidates of cudnn: installed, but it cannot be loaded" in said
    assert engine.report["tuning"]["providers"] == ["own"]
    assert not any("cudnn" in name for _, name in gpu.trials)


def test_the_command_line(model: Path, gpu: FakeTimer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--target", "cuda:sm_90a", "--precision", "fp16", "--no-cubins", "--tactics", "own"]
    out = ["-o", str(tmp_path / "a.engine")]
    assert run(["build", str(model), *target, *out, "--budget", "1000", "--workspace", "100000000"]) == 0
    assert "tuned" in capsys.readouterr().out
    assert gpu.trials
    assert run(["build", str(model), *target, *out, "--budget", "-1"]) == 2
    assert run(["build", str(model), *target, *out, "--row-invariant"]) == 0
    made = optdnn.load(tmp_path / "a.engine", simulate=True)
    assert made.meta["options"]["row_invariant"]
    assert all("k" not in t["config"] for t in made.meta["tactics"] if t["tactic"] == "conv_sm90")


def test_each_plan_of_a_range_of_shapes_is_tuned(model: Path, gpu: FakeTimer, tmp_path: Path) -> None:
    import onnx

    dynamic = onnx.load(model)
    dynamic.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    del dynamic.graph.value_info[:]
    dynamic.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "N"
    shapes = {"x": "1..2..4x64x14x14"}
    plain = optdnn.build(
        dynamic, target="cuda:sm_90a", precision="fp16", no_cubins=True, shapes=shapes, tactics="heuristic"
    )
    assert gpu.trials == []
    tuned = optdnn.build(dynamic, target="cuda:sm_90a", precision="fp16", no_cubins=True, shapes=shapes)
    assert gpu.trials
    assert [t.get("config") for t in tuned.meta["tactics"]] != [t.get("config") for t in plain.meta["tactics"]]


# ---------------------------------------------------------------- retune


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "net.engine"
    build(model, tactics="heuristic").save(path)
    return path


def test_retune_improves_an_engine_in_place(engine: Path, gpu: FakeTimer, model: Path, tmp_path: Path) -> None:
    before = optdnn.load(engine, simulate=True)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 64, 14, 14)).astype(np.float32)}
    wanted = before.run(feeds)
    found = optdnn.retune(engine)
    assert found.replaced
    assert found.before_ms is not None
    assert found.after_ms < found.before_ms
    after = optdnn.load(engine, simulate=True)
    assert [t.get("config") for t in after.meta["tactics"]] != [t.get("config") for t in before.meta["tactics"]]
    for name, value in after.run(feeds).items():
        np.testing.assert_allclose(value, wanted[name], atol=4e-3 * np.abs(wanted[name]).max())
    report = json.loads((tmp_path / "net.engine.report.json").read_text())
    assert report["tuning"]["after_ms"] == found.tuning["after_ms"]
    assert report["passes"], "what the build said is kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.engine", "net.engine.report.json"]
    tuned = build(model, tactics="auto")
    tuned.save(tmp_path / "tuned.engine")
    assert (tmp_path / "tuned.engine").read_bytes() == engine.read_bytes(), "as a build on the GPU would have made it"


def test_retune_leaves_an_engine_that_it_cannot_improve(engine: Path, gpu: FakeTimer) -> None:
    content = engine.read_bytes()
    gpu.net = lambda tactics: 1.0
    found = optdnn.retune(engine)
    assert not found.replaced
    assert found.before_ms == found.after_ms == 1.0
    assert engine.read_bytes() == content


def test_retune_replaces_an_engine_that_hangs(engine: Path, gpu: FakeTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.net = lambda tactics: 1.0  # no candidate is faster: an engine that runs would be kept
    old = [s.params["tactic"] for s in read(engine).steps]
    load, race = gpu.load, gpu.race
    alone: list[Any] = []

    def loaded(program: Program) -> Any:
        net = load(program)
        alone.extend([net] if "graph" in program.meta and tactics_of(program) == old and not alone else [])
        return net

    def raced(networks: Any, rounds: int) -> list[float]:
        if alone and networks == alone:
            raise NetworkLost(networks[0], "hung: it has not ended after 20 s")
        return race(networks, rounds)

    monkeypatch.setattr(gpu, "load", loaded)
    monkeypatch.setattr(gpu, "race", raced)
    said: list[str] = []
    found = optdnn.retune(engine, progress=said.append)
    assert alone
    assert found.before_ms is None
    assert found.replaced
    assert "the engine as it was does not run: hung: it has not ended after 20 s" in said
    assert gpu.loaded == 0, "every network was closed"


def test_retune_reports_its_fallback(engine: Path, gpu: FakeTimer, capsys: pytest.CaptureFixture[str]) -> None:
    runs = gpu.first_run

    def first_run(program: Program) -> Any:
        if any(s.params["launch"]["dependent"] for s in program.steps):
            raise GraphFault("hung: it has not ended after 10 s")
        return runs(program)

    gpu.first_run = first_run  # type: ignore[method-assign]
    assert run(["retune", str(engine)]) == 0
    reported = capsys.readouterr().err.replace("\n", " ")
    assert (
        "warning: the program's graph does not run as it was built; it is kept with one lane, no early launches"
        in reported
    )
    assert read(engine).meta["first_run"]["form"] == "one lane, no early launches"
    report = json.loads(Path(f"{engine}.report.json").read_text())
    assert report["first_runs"][0]["refused"] == {"as built": "hung: it has not ended after 10 s"}


def test_retune_starts_from_the_engines_choices(model: Path, gpu: FakeTimer, tmp_path: Path) -> None:
    path = tmp_path / "tuned.engine"
    build(model).save(path)
    content = path.read_bytes()
    found = optdnn.retune(path, budget=1e-6)
    assert not found.replaced
    assert found.tuning["stopped"] == "the budget was spent"
    assert path.read_bytes() == content


def test_retune_keeps_the_exact_weights_of_fp32_in_parts(gpu: FakeTimer, tmp_path: Path) -> None:
    """Hopper's kernels read them as parts of fp16, of 22 bits."""
    n = Net()
    x = n.input(1, 136, 14, 14)
    model = export_model(n.done(n.op("Relu", n.conv(n.op("Relu", n.conv(x, 144, 3)), 144, 3)))).proto
    optdnn.build(model, target="cuda:sm_90a", no_cubins=True, tactics="heuristic").save(tmp_path / "a.engine")
    before = read(tmp_path / "a.engine")
    assert any(t.startswith("conv_parts_sm90") for t in tactics_of(before))
    slow = {t for t in tactics_of(before) if t.startswith("conv")}
    gpu.seconds = lambda t: hashed(t) * (1 if "parts" in t and t not in slow else 2)  # type: ignore[method-assign]
    optdnn.build(model, target="cuda:sm_90a", no_cubins=True, tactics="own").save(tmp_path / "fresh.engine")
    fresh = read(tmp_path / "fresh.engine")
    assert optdnn.retune(tmp_path / "a.engine", tactics="own").replaced
    after = read(tmp_path / "a.engine")
    assert [x.tobytes() for x in _weights(after)] == [x.tobytes() for x in _weights(before)]
    assert any(x.nbytes > 1 << 19 for x in _weights(after))
    assert (after.steps, after.buffers, after.kernels) == (fresh.steps, fresh.buffers, fresh.kernels)
    assert [x.tobytes() for x in after.blobs] == [x.tobytes() for x in fresh.blobs]


def _weights(program: Program) -> list[Array]:
    return [op.attrs.value for op in held(program).of_kind("Constant")]


def test_retune_keeps_the_model_that_an_engine_holds(model: Path, gpu: FakeTimer, tmp_path: Path) -> None:
    build(model, tactics="heuristic", refit=True).save(tmp_path / "a.engine")
    before = held_model(read(tmp_path / "a.engine"))
    assert before is not None
    assert optdnn.retune(tmp_path / "a.engine").replaced
    after = held_model(read(tmp_path / "a.engine"))
    assert after is not None
    assert split_weights(after)[0] == split_weights(before)[0]
    for a, b in zip(split_weights(after)[1].items(), split_weights(before)[1].items(), strict=True):
        assert a[0] == b[0]
        assert a[1].tobytes() == b[1].tobytes()
    assert read(tmp_path / "a.engine").meta.keys() >= {"graph", "held_model"}


def test_retune_of_an_interrupted_run_keeps_the_file_whole(
    engine: Path, gpu: FakeTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    content = engine.read_bytes()
    monkeypatch.setattr("optdnn.runtime.file.atomic.os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        optdnn.retune(engine)
    assert engine.read_bytes() == content


def test_engines_that_cannot_be_retuned(
    engine: Path, model: Path, gpu: FakeTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.device.arch = "sm_80"
    with pytest.raises(UsageError, match="this GPU is sm_80"):
        optdnn.retune(engine)
    gpu.device.arch = "sm_90a"
    with pytest.raises(UsageError, match="there is nothing to measure"):
        optdnn.retune(engine, tactics="heuristic")
    optdnn.build(model, target="reference").save(tmp_path / "reference.engine")
    with pytest.raises(EngineError, match="tuning is for GPUs"):
        optdnn.retune(tmp_path / "reference.engine")
    program = read(engine)
    table = program.meta.pop("graph")
    write(program, tmp_path / "bare.engine")
    with pytest.raises(EngineError, match="does not hold its graph"):
        optdnn.retune(tmp_path / "bare.engine")
    table["ops"][0][1] = "NoSuchKind"
    program.meta["graph"] = table
    write(program, tmp_path / "foreign.engine")
    with pytest.raises(EngineError, match="not one of this version"):
        optdnn.retune(tmp_path / "foreign.engine")
    with pytest.raises(EngineError, match="each of its plans has its own build"):
        options_of(replace(read(engine), dynamic=Dynamic((), ())), None, None)
    monkeypatch.setattr(usable, "why_not", lambda: "no NVIDIA GPU")
    with pytest.raises(UsageError, match="needs a GPU: no NVIDIA GPU"):
        optdnn.retune(engine)


def test_retune_on_the_command_line(engine: Path, gpu: FakeTimer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["retune", str(engine), "--budget", "100"]) == 0
    assert "replaced" in capsys.readouterr().out
    assert run(["retune", str(engine), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["replaced"]
    assert run(["retune", str(engine.with_suffix(".missing"))]) != 0
