"""Depthwise convolutions of 8-bit images whose padding is a zero point other than 0: both kernels on a processor with emulated warps,
and their choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.conv_cases import convolve, same
from support.depthwise_runs import images_of
from support.host import needs_compiler
from support.net import Net
from support.simulated import calibrated, feeds_of

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as tma
from optdnn.kernels.conv.problem import Source
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions

HOPPER = of_arch("sm_90a")
IMAGE = depthwise.Problem(2, same(9, 10, 32), (("bias",),), "uint8", out="int8", outside=17)
STRIDED = replace(IMAGE, source=Source(11, 9, 32, (5, 5), (2, 2), (2, 1, 2, 2), (1, 1)), dtype="int8", outside=-128)
BY_TMA, BY_THREADS = tma.Config(2, 2, 4, 5, 5, 8, 2), depthwise.Config(2, 2, 4, 5, 5)
CASES: dict[str, tuple[Any, depthwise.Problem, Any]] = {
    "TMA": (tma, IMAGE, BY_TMA),
    "TMA, four lanes": (tma, IMAGE, tma.Config(1, 4, 8, 3, 3, 4, 2)),
    "TMA, 5x5, strided": (tma, STRIDED, tma.Config(2, 2, 8, 3, 3, 4, 2)),
    "TMA, dilated": (tma, replace(IMAGE, source=same(9, 10, 32, dilation=(2, 2))), BY_TMA),
    "TMA, padded by 0": (tma, replace(IMAGE, outside=0), BY_TMA),
    "threads": (depthwise, IMAGE, BY_THREADS),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_padding_is_the_zero_point(name: str, tmp_path: Path) -> None:
    family, problem, config = CASES[name]
    assert family.refuse(problem, config) is None
    s, rng, scale = problem.source, np.random.default_rng(5), np.float32(2.0**-9)
    made = family.launch(problem, config, HOPPER, Requantize())
    text = made.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    library = emulated.compiled(
        made.recipe, made.function, tmp_path, rendered=rendered, headers=("conv_element.cuh", "depthwise_core.cuh"),
        first=("vectors.cuh",),
    )  # fmt: skip
    info = np.iinfo(problem.dtype)
    x = rng.integers(info.min, info.max, (2, s.height, s.width, s.channels), problem.dtype, endpoint=True)
    weight = rng.integers(-127, 128, (s.channels, 1, *s.kernel)).astype(np.int8)
    pairs = np.stack([np.full(s.channels, scale), rng.integers(-3, 4, s.channels)], 1).astype(np.float32)
    (out_h, out_w), packed = problem.out_size, depthwise.pack_weights(weight).astype(np.float16)
    output = np.full(2 * problem.apart[1], 7, np.int8)
    arrays = {"input": x.reshape(-1), "weights": packed, "bias": pairs, "output": output}
    held = {key: emulated.aligned(array) for key, array in arrays.items()}
    emulated.run(library, made, {key: held[key].ctypes.data for key in made.operands})
    moved = x.astype(np.float64) - problem.outside  # zeros around it are the zero point
    total = convolve(moved, weight.astype(np.float64), s) + problem.outside * weight.sum(axis=(1, 2, 3), dtype=np.int64)
    want = np.clip(np.rint(total * scale + pairs[:, 1]), -128, 127)
    found = images_of(held["output"], 2, (out_h, out_w), (problem.pitch[1], problem.apart[1]), s.channels)
    np.testing.assert_array_equal(found.astype(np.float64), want)


def test_only_images_with_a_zero_point_replace_their_padding() -> None:
    unpadded = replace(IMAGE, source=replace(IMAGE.source, padding=(0, 0, 0, 0)))
    for problem, replaced in ((IMAGE, 1), (replace(IMAGE, outside=0), 0), (unpadded, 0)):
        text = tma.recipe(problem, BY_TMA).generated["generated.cuh"]
        assert f"PADDED_ZERO {replaced}" in text
    plain = tma.launch(replace(IMAGE, outside=0), BY_TMA, HOPPER)
    assert len(tma.launch(IMAGE, BY_TMA, HOPPER).parameters) > len(plain.parameters)


def test_a_large_batch_takes_tma_whatever_the_zero_point_is() -> None:
    """Replaced padding costs little, and loads by threads take much longer (predicted)."""
    problem = depthwise.Problem(16, same(112, 112, 32), (("silu",),), "int8", True, "int8", outside=-100)
    found = tma.estimate(problem, tma.candidates(problem, HOPPER)[0], HOPPER)
    assert found < 0.6 * depthwise.estimate(problem, depthwise.candidates(problem, HOPPER)[0], HOPPER)
    assert found == pytest.approx(
        tma.estimate(replace(problem, outside=0), tma.candidates(problem, HOPPER)[0], HOPPER), rel=0.1
    )


@pytest.mark.nvrtc
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (3, 2), (5, 2)])
def test_candidates_compile_without_spills(kernel: int, stride: int) -> None:
    source = same(56, 56, 96, (kernel, kernel), stride=stride)
    problem = depthwise.Problem(16, source, (("silu",),), "int8", True, "int8", zero_point=True, outside=-100)
    for config in tma.candidates(problem, HOPPER)[:2]:
        (made,) = nvrtc.resources(tma.recipe(problem, config)).values()
        assert made.spill_bytes == 0, config


def separable(n: Net) -> Value:
    """Swish leaves numbers of both signs, so its grid has a zero point."""

    def swish(x: Value) -> Value:
        made: Value = n.op("Mul", x, n.op("Sigmoid", x))
        return made

    x = swish(n.conv(n.input(8, 16, 57, 59), 96, 1, pads=0, bias=True))
    for size, strides in ((3, 1), (5, 1), (3, 2), (5, 2)):
        x = swish(n.conv(x, 96, size, group=96, strides=strides, bias=True))
        x = swish(n.conv(x, 96, 1, pads=0, bias=True))
    return x


def separable_program(target: str) -> tuple[Graph, Program]:
    n = Net()
    graph = n.done(separable(n))
    return graph, calibrated(graph, "int8", target)[1]


def test_separable_convolutions_of_8_bits_take_tma() -> None:
    _, program = separable_program("simulate")
    chosen = [t["config"] for t in program.meta["tactics"] if t["tactic"] == "depthwise_8bit"]
    assert len(chosen) == 4
    assert all(config.startswith("dwt") for config in chosen)
    replaced = ["PADDED_ZERO 1" in "".join(k.generated.values()) for k in program.kernels]
    assert replaced.count(True) == 4


@pytest.mark.hopper
def test_separable_convolutions_on_a_gpu() -> None:
    """Each tile's launch has the results of its meaning, up to one step of the grid where a rounding is a tie."""
    graph, program = separable_program("cuda:sm_90a")
    context: Any = CudaRunner(program, LoadOptions()).context()
    errors = [e for e in check_steps(context, feeds_of(graph)) if e.kind != "Copy"]
    assert len(errors) >= 9
    assert not [e for e in errors if not e.error < 2e-2]
