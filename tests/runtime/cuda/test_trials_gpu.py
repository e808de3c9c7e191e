"""Real faults on a GPU: kernels that loop, trap, or write elsewhere. Each costs the worker, and this process continues."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.net import Net
from support.simulated import feeds_of

import optdnn
from optdnn import CudaKernel, CudaLaunch, custom_op
from optdnn.config import BuildOptions
from optdnn.errors import GpuFault
from optdnn.importers.onnx import import_model
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cuda import lower_cuda
from optdnn.optimize import optimize
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials.process import CandidateLost, TrialTimer, gpu_process
from optdnn.runtime.program import Program
from optdnn.tuning import candidates as trials
from optdnn.tuning.autotuner import Tuner
from optdnn.tuning.timing_cache import TimingCache

pytestmark = pytest.mark.hopper
TARGET = "cuda:sm_90a"
SPIN = "for (;;) __nanosleep(1000);"
FAULTS = {
    "hangs": (SPIN, r"hung: it has not ended after 10 s"),
    "traps": ('asm volatile("trap;");', r"crashed: .*\(CUDA_ERROR_[A-Z_]+\)"),
    "strays": ("*(volatile float*)64 = 1.0f;", r"crashed: .*CUDA_ERROR_ILLEGAL_ADDRESS"),
    "overruns": ("p.y[p.count + threadIdx.x] = Y0(v);", r"it writes outside of its buffers"),
}
LIMIT_S = 120.0
"""Each test of a fault ends long before: a hang is reported after 10 s, and each worker takes some seconds."""
X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def infer(types: Any, attributes: Any) -> Any:
    return types[0]


def launch(inputs: Any, outputs: Any, attributes: Any) -> CudaLaunch:
    return CudaLaunch((1, 1, 1), 256, (("u32", int(np.prod(inputs[0].static_shape))),))


def operator(name: str, body: str, reference: Any) -> Any:
    source = f"""
struct Params {{ const X0* x; Y0* y; u32 count; }};

extern "C" __global__ void run(const __grid_constant__ Params p) {{
    const u32 i = threadIdx.x;
    {body}
}}
"""
    return custom_op(name, infer=infer, reference=reference, cuda=CudaKernel(source, "run", launch))


def copies(fault: str) -> Any:
    """y = x, followed by the fault."""
    body = f"""launch_dependents();
    wait_for_predecessor();
    const float v = i < p.count ? widen(p.x[i]) : 0.0f;
    if (i < p.count) p.y[i] = v;
    {fault}"""
    return operator("com.example.Copy", body, np.copy)


COPY = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17, "com.example": 1]>
    g (float[4, 8] x) => (float[4, 8] y) { y = com.example.Copy(x) }"""
)


def network() -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 64, 28, 28), 64, 3, bias=True))
    return n.done(n.op("Relu", n.conv(x, 128, 1, pads=0, bias=True)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    export_model(network()).save(path)
    return path


def the_gpu_works() -> None:
    good = copies("")
    engine = optdnn.build(COPY, target=TARGET, tactics="heuristic", custom_ops=[good])
    np.testing.assert_array_equal(engine.run({"x": X})["y"], X)
    assert engine.report["first_runs"] == [{"form": "as built", "replays": 20}]


# ---------------------------------------------------------------- finished programs


@pytest.mark.parametrize("how", FAULTS)
def test_a_program_with_a_faulty_kernel_is_an_error_that_names_it(how: str) -> None:
    body, shown = FAULTS[how]
    begin = time.monotonic()
    with pytest.raises(GpuFault, match=rf"step 0, Custom \(.*\), by custom, {shown}"):
        optdnn.build(COPY, target=TARGET, tactics="heuristic", custom_ops=[copies(body)])
    the_gpu_works()
    assert time.monotonic() - begin < LIMIT_S


# The first launch writes 0, lets the second begin, and writes 1 after 3 ms. If the second has begun early, it sees 0 and never
# ends.
SLOWLY = """wait_for_predecessor();
    if (i < p.count) p.y[i] = Y0(0.0f);
    __threadfence();
    __syncthreads();
    launch_dependents();
    for (int k = 0; k < 30; ++k) __nanosleep(100000);
    if (i < p.count) p.y[i] = Y0(1.0f);"""
IMPATIENT = """launch_dependents();
    if (*(const volatile float*)p.x == 0.0f) for (;;) __nanosleep(1000);
    wait_for_predecessor();
    if (i < p.count) p.y[i] = Y0(2.0f * widen(p.x[i]));"""


def test_a_graph_that_hangs_is_kept_without_early_launches() -> None:
    slowly = operator("com.example.Slowly", SLOWLY, np.ones_like)
    impatient = operator("com.example.Impatient", IMPATIENT, lambda x: 2 * x)
    pair = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "com.example": 1]>
        g (float[4, 8] x) => (float[4, 8] y) { a = com.example.Slowly(x)  y = com.example.Impatient(a) }"""
    )
    begin, said = time.monotonic(), list[str]()
    given: dict[str, Any] = {"target": TARGET, "tactics": "heuristic", "custom_ops": [slowly, impatient]}
    engine = optdnn.build(pair, progress=said.append, **given)
    shown: Any = engine.meta["first_run"]
    assert shown["form"] == "one lane, no early launches"
    assert list(shown["refused"].values()) == ["hung: it has not ended after 10 s"]
    assert not any(s.params["launch"]["dependent"] for s in engine.program.steps)
    for _ in range(3):
        np.testing.assert_array_equal(engine.run({"x": X})["y"], np.full_like(X, 2.0))
    assert time.monotonic() - begin < LIMIT_S


def test_real_networks_run_first(model: Path) -> None:
    for options in ({}, {"streams": 2}, {"precision": "fp16"}):
        engine = optdnn.build(model, target=TARGET, tactics="heuristic", **options)
        assert engine.report["first_runs"] == [{"form": "as built", "replays": 20}]


# ---------------------------------------------------------------- candidates


def lowered(op: Any) -> Program:
    options = BuildOptions(target=TARGET, tactics="heuristic", custom_ops=(op,))
    graph = import_model(COPY, custom_ops=(op,))
    optimize(graph, options, TARGET)
    return lower_cuda(graph, options, of_arch("sm_90a"), {})


@pytest.mark.parametrize("how", FAULTS)
def test_a_faulty_candidate_costs_its_worker(how: str) -> None:
    body, shown = FAULTS[how]
    good = network()
    options = BuildOptions(target=TARGET, precision="fp16", tactics="own")
    optimize(good, options, TARGET)
    begin, op = time.monotonic(), copies(body)
    with gpu_process() as process:
        timer = TrialTimer(process)
        tuner = Tuner(good, options, of_arch("sm_90a"), timer, TimingCache())
        tuner._collect({})
        key, problem = next((k, p) for k, p in tuner.session.problems.items() if len(p.trials) > 1)
        before = timer.trial(key, problem.trials[0].program, cold=False, give_up=1.0)
        with pytest.raises(CandidateLost, match=shown):
            timer.trial("copy", lowered(op), cold=False, give_up=1.0)
        after = timer.trial(key, problem.trials[0].program, cold=False, give_up=1.0)
        assert process.generation == 2
    assert 0.3 < after / before < 3
    assert time.monotonic() - begin < LIMIT_S


def sabotaged(program: Program, fault: str) -> Program:
    """The candidate with another kernel in its last launch, which does nothing but the fault."""
    step = program.steps[-1]
    number, size = step.params["launch"]["kernel"], len(step.params["launch"]["parameters"]) // 2
    k = program.kernels[number]
    text = f"""struct Params {{ u64 words[{size // 8}]; }};
extern "C" __global__ void {k.function}(const __grid_constant__ Params p) {{ {fault} }}
"""
    made = replace(k, template="general.cu", generated={"generated.cuh": text}, options=("--std=c++17",))
    made = replace(made, source=recipe_of(made).digest())
    return replace(program, kernels=tuple(made if i == number else x for i, x in enumerate(program.kernels)))


def test_a_build_goes_on_without_its_faulty_candidates(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, seeded = trials.trials_of, dict[str, str]()
    bodies = {1: SPIN, 2: 'asm volatile("trap;");'}

    def seed(*given: Any) -> list[trials.Trial]:
        found: Sequence[trials.Trial] = genuine(*given)
        if seeded or len(found) < 4 or given[1].kind != "Conv":
            return list(found)
        seeded.update({str(found[k].choice): bodies[k] for k in bodies})
        return [replace(t, program=sabotaged(t.program, bodies[k])) if k in bodies else t for k, t in enumerate(found)]

    monkeypatch.setattr("optdnn.tuning.autotuner.trials_of", seed)
    begin = time.monotonic()
    engine = optdnn.build(model, target=TARGET, precision="fp16", tactics="own")
    tuning: Any = engine.report["tuning"]
    assert len(seeded) == 2
    assert "stopped" not in tuning
    assert len(tuning["lost"]) == 2
    for name, shown in zip(seeded, ("hung: it has not ended after 10 s", "crashed: "), strict=True):
        assert any(f"by {name}: {shown}" in line for line in tuning["lost"])
    monkeypatch.undo()
    plain = optdnn.build(model, target=TARGET, precision="fp16", tactics="heuristic")
    wanted = plain.run(feeds_of(network()))
    for name, value in engine.run(feeds_of(network())).items():
        np.testing.assert_allclose(value, wanted[name], atol=4e-3 * np.abs(wanted[name]).max())
    assert time.monotonic() - begin < 2 * LIMIT_S


# ---------------------------------------------------------------- who uses the GPU

ALONE = """
import sys
import optdnn
from optdnn.runtime.cuda.device import check, driver

for tactics in ("heuristic", "own"):
    engine = optdnn.build(sys.argv[1], target="cuda", precision="fp16", tactics=tactics, budget=20)
    assert engine.report["first_runs"][0]["replays"] == 20
cu = driver()
_, active = check("state", cu.cuDevicePrimaryCtxGetState(check("device", cu.cuDeviceGet(0))))
assert not active, "the build has made a context"
engine.run({"x": __import__("numpy").zeros((2, 64, 28, 28), "float32")})
"""


def test_a_build_makes_no_context_in_its_own_process(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(model)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
