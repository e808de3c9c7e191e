"""The convolution of an image and the max pool after it on Hopper's wgmma: plans without a GPU, the kernel on the processor and
through NVRTC, and each case on a GPU compared with the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.conv.test_stem_plan import CLIP, problem
from kernels.conv.test_stem_pool_kernel import LARGE, RESNET, check, operands, place, with_pool
from support import emulated
from support.conv_cases import ADD, RELU
from support.host import HERE, needs_compiler
from support.spills import check_spills
from support.sweep import every

from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv import stem_pool_sm90_cost as cost
from optdnn.kernels.conv import stem_pool_sm90_kernel as sm90
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.stem_pool_kernel import Problem
from optdnn.kernels.conv.stem_pool_sm90_kernel import Config
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")
SILU = (("bias",), ("silu",))
BF16 = {"dtype": "bfloat16", "epilogue": RELU}


def pooled(
    batch: int, source: Source, channels: int, *more: Any, window: int = 3, pads: Any = (1, 1, 1, 1), **given: Any
) -> Problem:
    """``pads``: top, left, bottom, right."""
    return sm90.of(with_pool(problem(batch, source, channels, *more, **given), window, pads))


CASES: dict[str, tuple[Problem, Config]] = {
    "ResNet": (pooled(2, RESNET, 64, "float16", epilogue=RELU), Config(5)),
    "fp32, blocks of channels": (pooled(1, RESNET, 72, epilogue=CLIP), Config(10)),
    "no padding": (pooled(2, RESNET, 40, "float16", epilogue=RELU, pads=(0, 0, 1, 1)), Config(3)),
    "padding at the left alone": (pooled(1, RESNET, 24, epilogue=RELU, pads=(0, 1, 0, 1)), Config(4)),
    "padding above alone": (pooled(1, RESNET, 24, epilogue=RELU, pads=(1, 0, 1, 0)), Config(4)),
    "2x2": (pooled(2, Source(28, 28, 1, (5, 5), (2, 2)), 16, "float16", window=2, pads=(0, 0, 0, 0)), Config(2)),
    "odd rows, bf16": (pooled(3, Source(33, 31, 3, (3, 3), (2, 2), (1, 1, 1, 1)), 32, "bfloat16", **BF16), Config(3)),
    "bytes": (pooled(1, RESNET, 64, "uint8", normalize=True, epilogue=SILU), Config(10)),
    "bytes, channels last": (
        pooled(1, Source(16, 18, 3, (3, 3), (2, 2), (1, 1, 1, 1)), 24, "uint8", last=True, normalize=True), Config(2)
    ),
    "one row after another": (pooled(1, Source(20, 40, 4, (4, 6), (1, 2), (1, 2, 2, 2)), 16), Config(5)),
    "rows apart": (pooled(1, Source(40, 40, 2, (3, 5), (3, 2), (2, 0, 2, 0), (2, 1)), 16), Config(4)),
    "one column of a half": (pooled(1, Source(40, 34, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64, epilogue=RELU), Config(3)),
    "many": (pooled(64, LARGE, 64, "float16", epilogue=RELU), Config(14)),
    "wide": (pooled(2, Source(64, 256, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64, epilogue=RELU), Config(16)),
}  # fmt: skip
SMALL = [name for name in CASES if name not in ("many", "wide")]
P, C = CASES["ResNet"]


@pytest.mark.parametrize("name", CASES)
def test_cases_can_run(name: str) -> None:
    made, config = CASES[name]
    assert sm90.refuse(made, config) is None


def of_source(**change: Any) -> Problem:
    return pooled(1, replace(RESNET, **change), 64)


@pytest.mark.parametrize(
    ("made", "config", "reason"),
    [
        (replace(P, conv=replace(P.conv, epilogue=ADD)), C, "takes no residual"),
        (replace(P, window=4), C, "windows of 4 x 4"),
        (of_source(stride=(2, 1)), C, "not two columns apart"),
        (of_source(dilation=(1, 2)), C, "are dilated"),
        (of_source(kernel=(7, 8)), C, "more than 8 columns"),
        (of_source(stride=(1, 2)), C, "windows that begin at even rows"),
        (of_source(dilation=(2, 1)), C, "windows that begin at even rows"),
        (of_source(kernel=(12, 7)), C, "18 K steps do not stay"),
        (P, Config(0), "not a tile"),
        (P, Config(11), "not a tile"),
        (pooled(1, Source(40, 500, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64), C, "registers"),
        (pooled(1, Source(90, 300, 4, (3, 3), (1, 2), (0, 0, 1, 1), (30, 1)), 64), C, "shared memory"),
    ],
)  # fmt: skip
def test_refused(made: Problem, config: Config, reason: str) -> None:
    assert reason in (sm90.refuse(made, config) or "")


def test_other_architectures_are_refused() -> None:
    assert "needs Hopper's wgmma" in (sm90.refuse(P, C, "sm_100a") or "")
    assert cost.candidates(P, of_arch("sm_80")) == []


@pytest.mark.parametrize("batch", [1, 128])
def test_candidates_can_run_and_are_ranked(batch: int) -> None:
    made = pooled(batch, LARGE, 64, "float16", epilogue=RELU)
    found = cost.candidates(made, DEVICE)
    assert len(set(found)) == len(found) > 0
    assert all(sm90.refuse(made, c) is None for c in found)
    seconds = [cost.estimate(made, c, DEVICE) for c in found]
    assert seconds == sorted(seconds)
    assert seconds[0] > made.bytes / 4.8e12


@needs_compiler
@pytest.mark.parametrize("name", every(4, SMALL))
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    p, config = CASES[name]
    arrays, normalization, want = operands(p)
    launch = sm90.launch(p, config, DEVICE, p.conv.channels + 8, normalization)
    generated = launch.recipe.generated["generated.cuh"]
    rendered = "\n".join(
        line for line in generated[generated.index("DEVICE float epilogue") :].splitlines() if line[:1] != "#"
    )
    instructions = (HERE / "host_stem.hpp").read_text(encoding="utf-8")
    library = emulated.compiled(
        launch.recipe, launch.function, tmp_path, rendered=instructions + rendered, headers=["stem_pixels.cuh"],
        options=[] if "#define FINAL_SILU" in generated else ["-DFINAL_SILU=0"],
    )  # fmt: skip
    held = {key: emulated.aligned(a) for key, a in {**arrays, "output": place(p)}.items()}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    check(p, held["output"], want)


def test_the_packed_weights_are_a_view_of_the_convolutions() -> None:
    conv = CASES["one row after another"][0].conv
    weight = np.random.default_rng(0).standard_normal((16, 4, 4, 6))
    strides, at = stem.weight_view(conv)
    packed = stem.pack_weights(conv, weight)
    view = np.lib.stride_tricks.as_strided(packed.reshape(-1)[at:], weight.shape, [8 * x for x in strides])
    np.testing.assert_array_equal(view, weight)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["2x2", "bytes", "odd rows, bf16", "one row after another", "many", "wide"])
def test_kernels_compile_without_spills(name: str) -> None:
    p, _ = CASES[name]
    check_spills(sm90.recipe(p), threads=sm90.THREADS)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    from support.bound import bound
    from support.device_memory import Memory

    p, config = CASES[name]
    memory, (arrays, normalization, want) = Memory(), operands(p)
    out = place(p)
    at = {key: memory.put(a) for key, a in {**arrays, "output": out}.items()}
    launch = sm90.launch(p, config, memory.device, p.conv.channels + 8, normalization)
    memory.run(bound(launch, at, nvrtc.KernelCache(tmp_path)))
    check(p, memory.get(at["output"], out.shape, out.dtype), want)
    memory.free()
