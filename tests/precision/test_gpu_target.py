"""Automatic precision for GPUs: its choices, and times of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from precision.nets import WIDTH, data, perceptron

from optdnn.calibration import calibrate
from optdnn.config import BuildOptions
from optdnn.errors import UsageError
from optdnn.importers.onnx import import_model
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cuda import lower_cuda
from optdnn.passes.support.precision import key
from optdnn.precision import search
from optdnn.precision.gpu_target import GpuTarget
from optdnn.precision.latency import OperatorTimes
from optdnn.precision.search import target_of
from optdnn.precision.targets import permitted
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.engine import Engine
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.tuning.timing_cache import TimingCache

pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
pytest.importorskip("openvino", reason="the cpu extra is not installed")

DATA = data()


def fixed_perceptron() -> Graph:
    """A network at batch 8."""
    return import_model(export_model(perceptron()).proto, shapes={"x": (8, WIDTH)})


# ---------------------------------------------------------------- candidates


def test_tf32_is_offered_only_where_it_is_asked_for() -> None:
    offers = ("fp32", "tf32", "fp16", "int8", "int8+fp16")
    assert permitted(offers, None) == ("fp32", "fp16", "int8", "int8+fp16")
    assert permitted(offers, ("fp32", "tf32", "int8")) == ("fp32", "tf32", "int8")
    for target, asked in (("simulate", ("tf32",)), ("cpu", ("bf16",))):
        options = BuildOptions(target=target, precision="auto", calib=DATA, candidates=asked)
        driver = target_of(options, target, TimingCache(), calibrated=False)
        assert set(driver.offers) <= {"fp32", *asked}
    assert GpuTarget(BuildOptions(target="simulate"), "simulate", TimingCache(), True).offers[:3] == (
        "fp32",
        "fp16",
        "bf16",
    )
    with pytest.raises(UsageError, match="candidate 'fp12' is not one of"):
        BuildOptions(target="cpu", precision="auto", calib=DATA, candidates="fp32,fp12")
    with pytest.raises(UsageError, match="tf32 is for GPUs"):
        BuildOptions(target="cpu", precision="auto", calib=DATA, candidates="tf32")


def test_tf32_is_searched_and_pinned() -> None:
    options = BuildOptions(
        target="simulate", precision="auto", calib=DATA, candidates="tf32", metric="cosine", max_drop=1e-3,
        precision_map={"head": "tf32"},
    )  # fmt: skip
    found = search.find(fixed_perceptron(), options, "simulate", TimingCache())
    plain = found.account.to_plain()
    assert {p for c in plain["candidates"] for p in c["precisions"]} == {"fp32", "tf32"}
    first, *_, head = found.account.nodes
    assert head.precision == "tf32"
    assert "pinned" in head.reason
    assert 1e-9 < first.sensitivity["tf32"].noise < 1e-5
    assert first.times["tf32"].us <= first.times["fp32"].us


# ---------------------------------------------------------------- a GPU


def test_steps_of_a_gpu_are_joined_with_ops_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import optdnn.runtime.cuda.measuring.measure as gpu_measure
    import optdnn.runtime.measuring.bench as bench

    graph, cache = fixed_perceptron(), TimingCache()
    runs: list[Engine] = []
    engines: list[Engine] = []

    def profile(engine: Engine, feeds: Any, **options: Any) -> list[Any]:
        runs.append(engine)
        return [SimpleNamespace(src=s.src, us=float(k + 1)) for k, s in enumerate(engine.program.steps)]

    monkeypatch.setattr(bench, "cuda_context", lambda context, feeds: engines[-1])
    monkeypatch.setattr(gpu_measure, "profile_gpu", profile)
    calibration = calibrate(graph, {"x": DATA["x"][:8]}, "minmax")

    def engine_of(graph: Graph) -> Engine:
        program = lower_cuda(graph, BuildOptions(target="simulate"), of_arch("sm_90a"), {})
        engines.append(Engine(program, options=LoadOptions(simulate=True)))
        return engines[-1]

    def measured() -> OperatorTimes:
        driver = GpuTarget(BuildOptions(target="simulate"), "simulate", cache, True)
        monkeypatch.setattr(driver, "_gpu", "some GPU")
        monkeypatch.setattr(driver, "_engine", engine_of)
        (times,) = driver.operator_times(graph, calibration, lambda text: None)
        return times

    found = measured()
    assert set(found.precisions) == {"fp32", "fp16", "bf16", "int8", "fp8"}
    assert len(runs) == len(found.precisions)
    times = found.table
    assert set(times) == {key(op) for op in graph.of_kind("Gemm", "Relu")}
    assert set(times["y"]) == set(found.precisions)
    for op in graph.of_kind("Relu"):  # which has no integer form
        assert set(times[key(op)]) == {"fp32", "fp16", "bf16"}
    assert measured().table == times
    assert len(runs) == len(found.precisions), "the second time from the cache"
