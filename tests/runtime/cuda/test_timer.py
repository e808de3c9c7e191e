"""The GPU timer, as far as it works without a GPU: samples of batches, errors, kernels that hang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.runtime.cuda.compile.nvrtc import KernelError, Recipe, compile_recipe
from optdnn.runtime.cuda.launches.plan import CudaStep, parse
from optdnn.runtime.cuda.trials import timer
from optdnn.runtime.cuda.trials.check import relative_error
from optdnn.runtime.cuda.trials.timer import KernelHangs, _sample, wait


def convolution(batch: int) -> CudaStep:
    n = Net()
    program = lowered(n.done(n.op("Relu", n.conv(n.input(batch, 16, 32, 32), 16, 3))))
    step = next(s for s in program.steps if s.params["op"]["kind"] == "Conv")
    return parse(step, program)


def test_large_batches_are_sampled_the_last_image_included() -> None:
    step = convolution(64)
    rows = _sample(step, {1, 2})
    (n,) = rows.pop(-1)
    assert n == 64
    assert set(rows) == {v.operand for v in (*step.meaning.reads, *step.meaning.writes) if v is not None} - {1, 2}
    for chosen in rows.values():
        assert chosen[-1] == 63
        assert len(chosen) == timer.SAMPLE // (16 * 32 * 32)


def test_small_results_are_looked_at_as_a_whole() -> None:
    assert _sample(convolution(2), set()) == {-1: [-1]}


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([np.nan, 2.0], [1.0, 2.0], np.inf),
        ([np.nan, 2.0], [np.nan, 2.0], 0.0),
        ([np.inf, 2.0], [1.0, 2.0], np.inf),
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([0.0, 0.5], [0.0, 0.0], 0.5),
        ([0.0, 6e-8], [0.0, 1.2e-7], 2**-10),  # one step of the subnormal numbers, below 2**-14
    ],
)
def test_relative_error(got: list[float], want: list[float], error: float) -> None:
    assert relative_error(np.array(got, np.float16), np.array(want, np.float32)) == pytest.approx(error)


def test_doubles_are_compared_as_such() -> None:
    assert relative_error(np.array([1.0, 1.0 + 1e-9]), np.array([1.0, 1.0])) == pytest.approx(1e-9, rel=1e-3)


def test_integers_are_equal_or_not() -> None:
    assert relative_error(np.array([1, 2]), np.array([1, 2])) == 0.0
    assert relative_error(np.array([1, 2]), np.array([1, 3])) == np.inf


def test_a_kernel_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = SimpleNamespace(CUDA_ERROR_NOT_READY=1, CUDA_SUCCESS=0)
    fake = SimpleNamespace(CUresult=busy, cuStreamQuery=lambda handle: (handle,))
    monkeypatch.setattr(timer, "driver", lambda: fake)
    seen: list[Any] = []
    monkeypatch.setattr(timer, "check", lambda call, result: seen.append(result))
    stream: Any = SimpleNamespace(handle=1)
    with pytest.raises(KernelHangs, match="has not ended after 0 s"):
        wait(stream, 0.0)
    assert seen == []
    wait(SimpleNamespace(handle=0), 0.0)  # type: ignore[arg-type]
    assert seen == [(0,)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("element", sorted(timer._CPP.values()))
@pytest.mark.nvrtc
def test_its_kernels_compile(element: str, arch: str) -> None:
    recipe = Recipe("timer.cu", arch, {"generated.cuh": f"typedef {element} Element;\n"}, ("--std=c++17",))
    assert compile_recipe(recipe)[0]
    with pytest.raises(KernelError):
        compile_recipe(Recipe("timer.cu", arch, {"generated.cuh": ""}, ("--std=c++17",)))
