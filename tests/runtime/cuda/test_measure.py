"""Measuring on the GPU, the parts that need no GPU: statistics, remarks, the work of steps, clocks, and the tables."""

from __future__ import annotations

import ctypes
import statistics
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.net import Net
from support.simulated import lowered

from optdnn.cli import bench as cli_bench
from optdnn.errors import UsageError
from optdnn.ops.gather import GatherNDAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.packed_layout import PackedGatherAttrs
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.cuda.launches import nvtx
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.cuda.measuring import measure
from optdnn.runtime.cuda.measuring.clocks import ClockSample, Monitor
from optdnn.runtime.cuda.measuring.measure import GpuSamples, _rising, report_of
from optdnn.runtime.cuda.measuring.work import Ceilings, Work, work_of
from optdnn.runtime.cuda.runner import CudaContext
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.bench import bench, cuda_context
from optdnn.runtime.plans.runners import Dispatching
from optdnn.types import FP16, FP32, INT64

STEADY = ClockSample(1980, 3201, 300.0, 40)


def samples(
    compute: int = 200_000, n: int = 100, clocks: tuple[ClockSample, ...] = (STEADY,), **changed: int
) -> GpuSamples:
    figures = {"gpu_compute": compute, "enqueue": 4_000, "h2d": 20_000, "d2h": 5_000, "latency": 230_000}
    figures |= {"host_latency": 250_000, **changed}
    rows = {f"{name}_ms": array("q", [ns] * n) for name, ns in figures.items()}
    return GpuSamples(rows, busy_ns=compute * n, clocks=list(clocks))


def remarks(given: GpuSamples) -> list[str]:
    found: list[str] = report_of(given, "GPU", flushed=False, monitor=None)["remarks"]
    return found


def test_report() -> None:
    report = report_of(samples(), "NVIDIA H200", flushed=False, monitor=None)
    assert report["gpu_compute_ms"]["median"] == pytest.approx(0.2)
    assert report["enqueue_ms"]["p99"] == pytest.approx(0.004)
    assert report["throughput_per_s"] == pytest.approx(5000)
    assert (report["l2"], report["iterations"], report["remarks"]) == ("warm", 100, [])
    assert report["clocks"]["sm_mhz"] == {"min": 1980, "median": 1980, "max": 1980}
    paused = replace(samples(), busy_ns=100 * 400_000)  # the same again between the runs
    assert report_of(paused, "", flushed=False, monitor=None)["throughput_per_s"] == pytest.approx(2500)
    assert report_of(paused, "", flushed=True, monitor=None)["throughput_per_s"] == pytest.approx(5000)


@pytest.mark.parametrize(
    ("given", "because"),
    [
        (samples(n=20), "only 20 runs"),
        (samples(clocks=(STEADY, replace(STEADY, sm_mhz=1600))), "moved between 1600 and 1980 MHz"),
        (samples(clocks=(replace(STEADY, held_by=("power cap",)),)), "held down by: power cap"),
        (samples(clocks=()), "could not be read"),
        (samples(enqueue=190_000), "bound by the host"),
        (samples(h2d=190_000, d2h=20_000), "copies to and from the GPU take longer"),
    ],
)
def test_remarks(given: GpuSamples, because: str) -> None:
    (found,) = remarks(given)
    assert because in found


def test_drift_is_remarked_on() -> None:
    drifting = {"gpu_compute_ms": array("q", [200_000 + 1000 * k for k in range(100)])}
    slowing = replace(samples(), times={**samples().times, **drifting})
    (found,) = remarks(slowing)
    assert "drifted" in found


class Clock:
    """A GPU's events and stream. Runs take longer from ``slow_after`` on, as if the clock fell."""

    def __init__(self, slow_after: float):
        self.now, self.slow_after, self.marks = 0.0, slow_after, dict[int, float]()

    def run(self, ms: float) -> None:
        self.now += ms * (2 if self.now > self.slow_after else 1)

    def record(self, k: int, stream: Any) -> None:
        self.marks[k] = self.now

    def milliseconds(self, a: int, b: int) -> float:
        return self.marks[b] - self.marks[a]

    def synchronize(self) -> None: ...
    def close(self) -> None: ...


def test_a_change_of_the_clock_does_not_become_a_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock(slow_after=300.0)
    monkeypatch.setattr(measure, "Events", lambda count: clock)
    times = measure.in_turns(lambda: clock.run(10), lambda: clock.run(11), clock, 20, 1)
    assert {b - a for a, b in times} >= {1.0, 2.0}, "the clock falls on the way"
    assert statistics.median(b - a for a, b in times) <= 2.0


def test_a_long_step_must_be_long_twice() -> None:
    first = [1.0, 200.0, 3.0, 50.0, *[2.0] * measure.MEASURED_TWICE]
    second = {1: 2.5, 3: 51.0}
    asked = []

    def again(k: int) -> float:
        asked.append(k)
        return second.get(k, 9.0)

    assert measure.shorter_of_two(first, again) == [1.0, 2.5, 3.0, 50.0, *[2.0] * measure.MEASURED_TWICE]
    assert len(asked) == measure.MEASURED_TWICE
    assert {1, 2, 3} <= set(asked)
    assert 0 not in asked


def test_rising() -> None:
    assert _rising([0.0, 2.0, 1.0, 3.0]) == [0.0, 1.5, 1.5, 3.0]
    assert _rising([0.0, 3.0, 2.0, 1.0]) == [0.0, 2.0, 2.0, 2.0]
    assert _rising([0.0, 1.0, 2.0]) == [0.0, 1.0, 2.0]


# ---------------------------------------------------------------- work


def works(precision: str = "fp16") -> dict[str, Work]:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 8, 8), 32, 3, bias=True))
    graph = n.done(n.op("GlobalAveragePool", x))
    program = lowered(graph, precision)
    return {s.params["op"]["kind"]: work_of(s, parse(s, program), program) for s in program.steps}


def test_work_of_steps() -> None:
    found = works()
    conv = found["Conv"]
    assert conv.matrix
    assert conv.dtype == FP16
    assert conv.flops == 2 * (2 * 32 * 8 * 8) * (16 * 9)
    operands = 2 * 16 * 64 + 32 * 16 * 9 + 2 * 32 * 64
    assert conv.bytes == operands * 2 + 32 * 4, "each element once; the bias is fp32"
    pool = found["GlobalAveragePool"]
    assert not pool.matrix
    assert pool.bytes == 2 * (2 * 32 * 64 + 2 * 32)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_factors_of_a_step_may_be_rounded(precision: str) -> None:
    n = Net()
    program = lowered(n.done(n.conv(n.input(1, 16, 8, 8), 32, 3)), precision)
    (step,) = (s for s in program.steps if s.params["op"]["kind"] == "Conv")
    work = work_of(step, parse(step, program), program)
    assert (work.matrix, work.dtype, work.rounded) == (True, FP32, precision == "tf32")


def test_a_gather_reads_only_the_rows_that_it_writes() -> None:
    n = Net()
    table, rows = n.const(np.zeros((5000, 64), np.float32)), n.input(6, dtype=INT64)
    program = lowered(n.done(n.op("Gather", table, rows)), "fp16")
    (step,) = (s for s in program.steps if s.params["op"]["kind"] == "Gather")
    item = program.buffers[step.outputs[0]].dtype.itemsize
    assert work_of(step, parse(step, program), program).bytes == 2 * 6 * 64 * item + 6 * 8


def test_a_packed_table_is_read_in_part_too() -> None:
    """Of 50,000 rows, six are read, with a scale and a zero point each."""
    n = Net()
    table, rows = n.const(np.full((50_000, 64), 7), np.uint8), n.input(6, dtype=INT64)
    scales, zeros = n.random(50_000, 1), n.const(np.full((50_000, 1), 3), np.uint8)
    attrs = PackedGatherAttrs("uint8", 64, 64, FP32)
    program = lowered(n.done(n.op("PackedGather", table, rows, scales, zeros, attrs=attrs)), "fp16")
    (step,) = (s for s in program.steps if s.params["op"]["kind"] == "PackedGather")
    work = work_of(step, parse(step, program), program)
    assert 6 * 64 * 3 <= work.bytes < 6 * 64 * 16
    assert work.flops == 6 * 64


def test_a_product_reads_only_the_matrices_that_rows_select() -> None:
    n = Net()
    index = n.op("GatherND", n.random(9, 16, 8), n.input(2, 1, name="index", dtype=INT64), attrs=GatherNDAttrs(0))
    program = lowered(n.done(n.op("MatMul", index, n.input(2, 8, 1), attrs=MatMulAttrs())), "fp16")
    (step,) = (s for s in program.steps if s.params["op"]["kind"] == "SelectedProduct")
    item = program.buffers[step.outputs[0]].dtype.itemsize
    work = work_of(step, parse(step, program), program)
    assert work.bytes == 2 * 16 * 8 * 2 + 2 * 8 * 2 + 2 * 16 * item + 2 * 8, (
        "two of nine matrices, rows, results, indices"
    )
    assert work.flops == 2 * 2 * 16 * 8


def test_every_step_names_its_tactic() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 8, 8), 32, 3, bias=True))
    program = lowered(n.done(n.op("GlobalAveragePool", x)), "fp16")
    named = {s.params["op"]["kind"]: parse(s, program).tactic for s in program.steps}
    assert named["Conv"].startswith("conv_")
    assert all(named.values())


def test_ceilings() -> None:
    ceilings = Ceilings(memory=4e12, half=1e15, single=5e13)
    assert ceilings.seconds(Work(10**12, 10**6, True, FP16)) == pytest.approx(1e-3)
    assert ceilings.seconds(Work(10**12, 10**6, True, FP32)) == pytest.approx(6e-3), "three products of tf32"
    assert ceilings.seconds(Work(10**12, 10**6, True, FP32, rounded=True)) == pytest.approx(2e-3)
    assert replace(ceilings, single=5e14).seconds(Work(10**12, 10**6, True, FP32)) == pytest.approx(2e-3), (
        "scalar units"
    )
    assert ceilings.seconds(Work(10**6, 4 * 10**9, False, FP16)) == pytest.approx(1e-3)


# ---------------------------------------------------------------- clocks, ranges


class Nvml:
    """A library with a GPU at 1200 MHz under a power cap, with two processes and without a thermometer."""

    def __init__(self) -> None:
        def set_(value: int) -> Any:
            def call(*arguments: Any) -> int:
                arguments[-1]._obj.value = value
                return 0

            return call

        self.nvmlDeviceGetPowerUsage = set_(650_000)
        self.nvmlDeviceGetClockInfo = set_(1200)
        self.nvmlDeviceGetMaxClockInfo = set_(1980)
        self.nvmlDeviceGetCurrentClocksEventReasons = set_(0x4 | 0x1)

        def processes(handle: Any, count: Any, rows: Any) -> int:
            count._obj.value = 2
            return 7

        self.nvmlDeviceGetComputeRunningProcesses_v3 = processes


def test_monitor() -> None:
    monitor = Monitor(Nvml(), ctypes.c_void_p())
    assert monitor.sample() == ClockSample(1200, 1200, 650.0, None, ("power cap",))
    assert (monitor.most(), monitor.processes()) == (1980, 2)
    report = report_of(samples(clocks=(monitor.sample(),)), "", flushed=False, monitor=monitor)
    assert [r for r in report["remarks"] if "2 processes" in r]
    assert [r for r in report["remarks"] if "power cap" in r]


def test_ranges_are_marked_where_something_can(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(nvtx, "_marks", lambda: (said.append, lambda: said.append("end")))
    with pytest.raises(ValueError, match="x"), nvtx.marked("conv1"):
        raise ValueError("x")
    assert said == ["conv1", "end"]
    monkeypatch.setattr(nvtx, "_marks", lambda: None)
    with nvtx.marked("conv1"):
        pass
    assert said == ["conv1", "end"]


# ---------------------------------------------------------------- the command


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = report_of(samples(clocks=()), "NVIDIA H200", flushed=False, monitor=None)
    steps = [
        {"step": 0, "us": 12.5, "share": 0.8, "tflops": 412.3, "flops": 5, "gbs": 900.0, "roofline": 0.41,
         "tactic": "conv_sm90 n64", "kind": "Conv", "src": ["/conv1/Conv"]},
        {"step": 1, "us": 0.0, "share": 0.0, "tflops": None, "flops": 0, "gbs": None, "roofline": None,
         "tactic": "", "kind": "Copy", "src": []},
    ]  # fmt: skip
    report = {"gpu": gpu, "latency_ms": gpu["latency_ms"], "facts": [{"kernel": "conv_sm90"}] * 2,
              "target": "cuda:sm_90a", "precision": "fp16", "profile": steps, "cliffs": [
                  {"step": 0, "src": ["/conv1/Conv"], "tactic": "conv_sm90 n64", "us": 12.5, "share": 0.8, "roofline": 0.05,
                   "gain_us": 10.0, "why": "8 blocks do not fill 132"}]}  # fmt: skip
    cli_bench.show_gpu(report)
    shown = capsys.readouterr()
    lines = {line.split("  ")[0].strip(): line for line in shown.out.splitlines()}
    assert "0.2000" in lines["GPU compute"]
    assert "0.0040" in lines["enqueue (host)"]
    assert "throughput 5000.0 inferences per second" in shown.out
    assert "L2 warm" in shown.out
    assert "0 12.50 80.0% 412.3 900 41% conv_sm90 n64 /conv1/Conv" in " ".join(shown.out.split())
    assert "0 12.5 80% 5% 10.0 /conv1/Conv 8 blocks do not fill 132" in " ".join(shown.out.split())
    assert "warning: the clocks could not be read" in shown.err


def test_calls_that_need_a_gpu_are_refused_elsewhere(tmp_path: Any) -> None:
    n = Net()
    engine = Engine(lowered(n.done(n.op("Relu", n.input(2, 3))), "fp32"))
    with pytest.raises(UsageError, match="no L2 of a GPU"):
        bench(engine, random_feeds(engine.inputs), iterations=1, flush_l2=True)
    engine.save(tmp_path / "e.engine")
    done = CliRunner().invoke(cli_bench.command, [str(tmp_path / "e.engine"), "--trace"])
    assert isinstance(done.exception, UsageError)
    assert "cuda" in str(done.exception)


def test_an_engine_for_several_shapes_is_measured_by_its_plan() -> None:
    n = Net()
    program = lowered(n.done(n.op("Relu", n.input(2, 3))), "fp32", target="cuda:sm_90a")
    asked: list[Any] = []

    signature = Signature.of(program)

    class Plans(Dispatching):
        def __init__(self, plan: object):
            super().__init__(program, signature)
            self.plan: Any = plan

        def _dispatch(self, feeds: Any) -> Any:
            asked.append(feeds)
            return self.plan, {"own": 1}

    assert cuda_context(Plans(BaseContext(program, signature)), {"x": 1}) is None, (
        "a plan that runs in NumPy is none on a GPU"
    )
    on_gpu = CudaContext.__new__(CudaContext)
    assert cuda_context(Plans(on_gpu), {"x": 2}) is on_gpu
    assert Plans(on_gpu).innermost({"x": 3})[1] == {"own": 1}
    assert asked == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_gpus_are_named_without_starting_cuda() -> None:
    from optdnn.runtime.measuring.machine import gpu_facts as facts

    class Library:
        def __init__(self, works: bool = True):
            self.works, self.ended = works, False

        def nvmlInit_v2(self) -> int:
            return 0 if self.works else 9

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
            return index  # the second one is not available

        def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:
            name.value = b"NVIDIA H200"
            return 0

        def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
            text.value = b"580.159"
            return 0

        def nvmlShutdown(self) -> None:
            self.ended = True

    library = Library()
    assert facts(library) == {"names": ["NVIDIA H200"], "driver": "580.159"}
    assert library.ended
    assert facts(Library(works=False)) is None
