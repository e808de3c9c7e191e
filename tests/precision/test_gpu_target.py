"""Automatic precision for GPUs: its choices, and times of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from precision.nets import WIDTH, data, perceptron
from support.needs import needs_libraries
from support.net import Net

import optdnn
from optdnn.calibration import calibrate
from optdnn.config import BuildOptions
from optdnn.errors import UsageError
from optdnn.importers.onnx import import_model
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.support.precision import key
from optdnn.precision import search
from optdnn.precision.gpu_target import GpuTarget
from optdnn.precision.latency import OperatorTimes
from optdnn.precision.predicted import microseconds
from optdnn.precision.search import target_of
from optdnn.precision.targets import permitted
from optdnn.refitting.options import options_again
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.engine import Engine
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.tuning.timing_cache import TimingCache

needs_libraries()

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
    found = search.search_precisions(fixed_perceptron(), options, "simulate", TimingCache())
    plain = found.report.to_plain()
    assert {p for c in plain["candidates"] for p in c["precisions"]} == {"fp32", "tf32"}
    first, *_, head = found.report.nodes
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


# ---------------------------------------------------------------- one float precision for the whole network


def with_a_shuffle() -> onnx.ModelProto:
    """Two halves of channels, one convolved, joined and shuffled. 16-bit builds make one convolution of this, by an exact pass."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 4, 6, 7), 16, 1, pads=0))
    kept, y = n.op("Split", x, n.ints(8, 8), attrs=SplitAttrs(axis=1), outputs=2)
    y = n.op("Relu", n.conv(y, 8, 1, pads=0, bias=True))
    y = n.conv(n.conv(y, 8, 3, pads=1, group=8), 8, 1, pads=0, bias=True)
    both = n.op("Concat", kept, n.op("Relu", y), attrs=ConcatAttrs(axis=1))
    parts = n.op("Reshape", both, n.ints(2, 2, 8, 6, 7))
    turned = n.op("Transpose", parts, attrs=TransposeAttrs(perm=(0, 2, 1, 3, 4)))
    last = n.conv(n.op("Reshape", turned, n.ints(2, 16, 6, 7)), 8, 1, pads=0)
    return export_model(n.done(last)).proto


@pytest.mark.slow
def test_one_float_precision_is_the_build_that_asks_for_it() -> None:
    """Its exact passes do more than those of a network whose precisions are not known yet."""
    model = with_a_shuffle()
    (name,) = (i.name for i in model.graph.input)
    rows = np.random.default_rng(0).standard_normal((16, 4, 6, 7)).astype(np.float32)
    asked: dict[str, Any] = {"calib": {name: rows}, "metric": "cosine", "max_drop": 0.1, "candidates": "fp16"}
    found = optdnn.build(model, target="cuda:sm_90a", no_cubins=True, precision="auto", **asked)
    plain = optdnn.build(model, target="cuda:sm_90a", no_cubins=True, precision="fp16")
    auto = found.meta["auto"]
    assert not auto["latency"]["measured"]
    us = {c["name"]: c["predicted_us"] for c in auto["candidates"]}
    assert auto["chosen"] == found.meta["options"]["precision"] == "fp16"
    assert us["fp16"] == pytest.approx(microseconds(found.program), abs=0.01)
    assert us["fp16"] < us["fp32"]
    assert found.program.steps == plain.program.steps
    assert found.meta["model"]["digest"] == plain.meta["model"]["digest"]
    with pytest.raises(UsageError, match="the precisions of this engine were chosen for its weights"):
        options_again(found.program)
