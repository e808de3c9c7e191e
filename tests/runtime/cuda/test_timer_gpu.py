"""The autotuner on a GPU: candidates are right and take microseconds, wrong ones are found, builds and engines do not get
slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import feeds_of

import optdnn
from optdnn.config import BuildOptions
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import MAP_BYTES, SHARED_LIMIT
from optdnn.runtime.cuda.trials.timer import GpuTimer, TrialFailed
from optdnn.runtime.program import Program
from optdnn.tuning.autotuner import Tuner
from optdnn.tuning.timing_cache import TimingCache

pytestmark = pytest.mark.hopper
TARGET = "cuda:sm_90a"
K_STEPS = 5 * MAP_BYTES + 3 * 8 + 6 * 4
"""Offset of the number of K steps in the implicit GEMM's parameters."""


def network() -> Graph:
    n = Net()
    x = n.max_pool(n.op("Relu", n.conv(n.input(2, 64, 28, 28), 64, 3, bias=True)), pads=1)
    return n.done(n.op("Relu", n.conv(x, 128, 1, pads=0, bias=True)))


@pytest.fixture(scope="module")
def timer() -> GpuTimer:
    return GpuTimer()


@pytest.fixture(scope="module")
def tuner(timer: GpuTimer) -> Tuner:
    options = BuildOptions(target=TARGET, precision="fp16", tactics="own")
    graph = network()
    optimize(graph, options, TARGET)
    made = Tuner(graph, options, of_arch("sm_90a"), timer, TimingCache())
    made._collect({})
    return made


@pytest.mark.parametrize("cold", [False, True])
def test_candidates_are_right_and_take_microseconds(tuner: Tuner, timer: GpuTimer, cold: bool) -> None:
    count = 0
    for key, problem in tuner.session.problems.items():
        for trial in problem.trials[:4]:
            seconds = timer.trial(key, trial.program, cold=cold, give_up=1.0)
            assert 3e-7 < seconds < 1e-3, trial.choice
            count += 1
    assert count >= 9


def plain_product(tuner: Tuner) -> tuple[str, Program]:
    """An implicit GEMM that does not split K, among the candidates of the convolution with 128 filters."""
    convolutions = [p for p in tuner.session.problems.values() if p.op.kind == "Conv"]
    problem = next(p for p in convolutions if p.op.outputs[0].type.static_shape[1] == 128)
    tiles = [t for t in problem.trials if "k" not in t.choice.config and not t.choice.config.startswith("patch")]
    return problem.key, tiles[0].program


def changed(program: Program, change: Callable[[dict[str, Any]], None]) -> Program:
    """The program with a changed launch of the convolution."""
    steps = list(program.steps)
    k = next(i for i, s in enumerate(steps) if program.kernels[s.params["launch"]["kernel"]].function == "conv_sm90")
    launch = dict(steps[k].params["launch"])
    change(launch)
    steps[k] = replace(steps[k], params={**steps[k].params, "launch": launch})
    return replace(program, steps=tuple(steps))


def shorter(launch: dict[str, Any]) -> None:
    block = bytearray.fromhex(launch["parameters"])
    steps = int.from_bytes(block[K_STEPS : K_STEPS + 4], "little")
    block[K_STEPS : K_STEPS + 4] = (steps - 1).to_bytes(4, "little")
    launch["parameters"] = block.hex()


def fewer_blocks(launch: dict[str, Any]) -> None:
    launch["grid"] = [max(1, launch["grid"][0] // 2), 1, 1]


def test_wrong_results_are_found(tuner: Tuner, timer: GpuTimer) -> None:
    """The first candidate of a problem is compared with NumPy, later ones with one that passed."""
    n = Net()
    graph = n.done(n.op("Relu", n.conv(n.input(2, 256, 14, 14), 128, 1, pads=0, bias=True)))
    options = BuildOptions(target=TARGET, precision="fp16", tactics="own")
    optimize(graph, options, TARGET)
    made = Tuner(graph, options, of_arch("sm_90a"), timer, TimingCache())
    made._collect({})
    key, program = plain_product(made)
    for label in ("first", "beside"):
        for change in (shorter, fewer_blocks):
            with pytest.raises(TrialFailed, match="wrong result"):
                timer.trial(
                    f"{key} {label}" if label == "first" else key, changed(program, change), cold=False, give_up=1.0
                )
        timer.trial(key, program, cold=False, give_up=1.0)


def test_launches_that_cannot_run_fail_alone(tuner: Tuner, timer: GpuTimer) -> None:
    key, program = plain_product(tuner)
    with pytest.raises(TrialFailed, match=r"cuLaunchKernelEx|INVALID|cuFuncSetAttribute"):
        timer.trial(
            key,
            changed(program, lambda launch: launch.update(block=1024, shared=SHARED_LIMIT)),
            cold=False,
            give_up=1.0,
        )
    assert timer.trial(key, program, cold=False, give_up=1.0) > 0


def test_builds_and_engines_get_no_slower(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    export_model(network()).save(path)
    options: dict[str, Any] = {"target": TARGET, "precision": "fp16"}
    plain = optdnn.build(path, tactics="heuristic", **options)
    tuned = optdnn.build(path, tactics="own", timing_cache=tmp_path / "times.json", **options)
    report: Any = tuned.report
    tuning = report["tuning"]
    assert "stopped" not in tuning, "the GPU failed (no memory, say): nothing was measured in the whole network"
    assert tuning["after_ms"] <= tuning["before_ms"] * 1.05
    feeds = feeds_of(network())
    for name, value in plain.run(feeds).items():
        np.testing.assert_allclose(tuned.run(feeds)[name], value, atol=4e-3 * np.abs(value).max())
    again = optdnn.build(path, tactics="own", timing_cache=tmp_path / "times.json", **options)
    for engine, name in ((tuned, "a"), (again, "b")):
        engine.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    plain.save(tmp_path / "net.engine")
    found = optdnn.retune(tmp_path / "net.engine", tactics="own")
    assert found.before_ms is not None
    assert not found.replaced or found.after_ms < found.before_ms
    for name, value in optdnn.load(tmp_path / "net.engine").run(feeds).items():
        np.testing.assert_allclose(value, plain.run(feeds)[name], atol=4e-3 * np.abs(value).max())
