"""The convolution of an image and the max pool after it in one launch: plans without a GPU, the kernel on the processor and
through NVRTC, and each case on a GPU compared with the definition."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernels.conv.test_stem_plan import CLIP, problem
from support import emulated
from support.conv_cases import ADD, RELU, convolve
from support.host import HERE, needs_compiler
from support.spills import check_spills
from support.sweep import every

from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv import stem_pool_kernel as pooled
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.stem_kernel import Config
from optdnn.kernels.conv.stem_pool_kernel import Problem
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import Array

DEVICE = of_arch("sm_90a")
RESNET = Source(40, 48, 3, (7, 7), (2, 2), (3, 3, 3, 3))
LARGE = Source(224, 224, 3, (7, 7), (2, 2), (3, 3, 3, 3))


def with_pool(conv: stem.Problem, window: int = 3, pads: tuple[int, int, int, int] = (1, 1, 1, 1)) -> Problem:
    """``pads``: top, left, bottom, right."""
    size = tuple((n + pads[i] + pads[i + 2] - window) // 2 + 1 for i, n in enumerate(conv.out_size))
    return Problem(conv, window, *pads[:2], size)  # type: ignore[arg-type]


CASES: dict[str, tuple[Problem, Config]] = {
    "ResNet": (with_pool(problem(2, RESNET, 64, "float16", epilogue=RELU)), Config(2, 32, 2, 8, 8)),
    "ahead": (with_pool(problem(2, RESNET, 64, "float16", epilogue=RELU)), Config(2, 32, 1, 4, 8, True)),
    "fp32, ahead": (with_pool(problem(2, RESNET, 32, epilogue=CLIP)), Config(2, 24, 1, 4, 4, True)),
    "no padding": (
        with_pool(problem(2, RESNET, 40, "float16", epilogue=RELU), 3, (0, 0, 1, 1)), Config(2, 32, 1, 5, 5)
    ),
    "padding at the left alone": (
        with_pool(problem(1, RESNET, 24, epilogue=RELU), 3, (0, 1, 0, 1)), Config(2, 32, 2, 3, 3)
    ),
    "2x2": (
        with_pool(problem(2, Source(28, 28, 1, (5, 5)), 16, "float16"), 2, (0, 0, 0, 0)), Config(2, 24, 1, 2, 2)
    ),
    "odd rows": (
        with_pool(problem(3, Source(33, 31, 3, (3, 3), (2, 2), (1, 1, 1, 1)), 32, epilogue=RELU)), Config(2, 16, 1, 4, 4)
    ),
    "blocks of channels, bytes": (
        with_pool(problem(1, RESNET, 72, "uint8", normalize=True, epilogue=(("bias",), ("silu",)))), Config(2, 24, 1, 3, 3)
    ),
    "pairs of rows": (with_pool(problem(2, RESNET, 64, "float16", epilogue=RELU)), Config(4, 32, 4, 8, 8)),
    "four pairs, ahead": (with_pool(problem(1, RESNET, 32, "float16", epilogue=RELU)), Config(8, 24, 4, 2, 4, True)),
    "bf16": (with_pool(problem(2, RESNET, 64, "bfloat16", dtype="bfloat16", epilogue=RELU)), Config(2, 32, 2, 4, 8)),
    "many": (with_pool(problem(64, LARGE, 64, "float16", epilogue=RELU)), Config(2, 112, 2, 8, 8, True)),
    "wide": (with_pool(problem(2, LARGE, 64, epilogue=RELU)), Config(2, 112, 2, 8, 8)),
}  # fmt: skip
SMALL = [name for name in CASES if name not in ("many", "wide")]
P, C = CASES["ResNet"]


@pytest.mark.parametrize("name", CASES)
def test_cases_can_run(name: str) -> None:
    made, config = CASES[name]
    assert pooled.refuse(made, config) is None


@pytest.mark.parametrize(
    ("made", "config", "reason"),
    [
        (replace(P, conv=replace(P.conv, image="float64")), C, "does not read images"),
        (replace(P, conv=replace(P.conv, epilogue=ADD)), C, "takes no residual"),
        (replace(P, window=4), C, "windows of 4 x 4"),
        (replace(P, window=2), C, "with a padding of 1"),
        (with_pool(problem(1, Source(40, 600, 3, (7, 7), (2, 2), (3, 3, 3, 3)), 64)), C, "300 columns exceed"),
        (replace(P, size=(12, 12)), C, "wholly in the padding"),
        (P, replace(C, tile_h=3), "pairs of whole rows"),
        (P, replace(C, tile_w=16), "pairs of whole rows"),
        (P, replace(C, columns=9), "not a tile"),
        (CASES["many"][0], replace(CASES["many"][1], tile_h=8, m=8, n=4), "registers"),
    ],
)
def test_refused(made: Problem, config: Config, reason: str) -> None:
    assert reason in (pooled.refuse(made, config) or "")


def test_shared_memory_counts_the_columns() -> None:
    needed = pooled.shared_bytes(P, C)
    assert pooled.refuse(P, C, needed) is None
    assert "bytes of shared memory exceed" in (pooled.refuse(P, C, needed - 1) or "")


@pytest.mark.parametrize("batch", [1, 128])
def test_candidates_can_run_and_are_ranked(batch: int) -> None:
    made = with_pool(problem(batch, LARGE, 64, "float16", epilogue=RELU))
    found = pooled.candidates(made, DEVICE)
    assert len(found) > 3
    assert all(pooled.refuse(made, c) is None for c in found)
    seconds = [pooled.estimate(made, c, DEVICE) for c in found]
    assert seconds == sorted(seconds)
    assert seconds[0] > made.bytes / 4.8e12
    assert all(1 <= pooled.band(made, c, DEVICE) <= 56 for c in found)
    assert pooled.candidates(replace(made, window=5), DEVICE) == []


def convolution(conv: stem.Problem) -> tuple[dict[str, Array], tuple[list[float], list[float]], Array]:
    """The kernel's operands, factors and shifts of the channels, and the convolution's result by its definition."""
    rng = np.random.default_rng(1)
    s, dtype = conv.source, np.dtype(ml_dtypes.bfloat16 if conv.dtype == "bfloat16" else np.float16)
    kind = dtype if conv.image == "bfloat16" else np.dtype(conv.image)
    shape = (conv.batch, s.channels, s.height, s.width)
    image = (rng.integers(0, 256, shape) if kind.kind in "iu" else rng.standard_normal(shape)).astype(kind)
    factors = rng.uniform(0.01, 0.02, s.channels).astype(np.float32) if conv.normalize else np.ones(0, np.float32)
    shifts = rng.uniform(-2, 2, s.channels).astype(np.float32) if conv.normalize else np.ones(0, np.float32)
    seen = image.astype(np.float32)
    if conv.normalize:
        seen = seen * factors.reshape(-1, 1, 1) + shifts.reshape(-1, 1, 1)
    weight = (rng.standard_normal((conv.channels, s.channels, *s.kernel)) / np.prod(s.kernel) ** 0.5).astype(dtype)
    bias = rng.standard_normal(conv.channels).astype(np.float32)
    y = convolve(seen.astype(dtype).astype(np.float32).transpose(0, 2, 3, 1), weight.astype(np.float32), s) + bias
    for name, *numbers in conv.epilogue[1:]:
        y = {
            "relu": lambda y: np.maximum(y, 0),
            "clip": lambda y, *n: np.clip(y, *n),
            "silu": lambda y: y / (1 + np.exp(-y)),
        }[str(name)](y, *numbers)
    last = conv.strides[1] == 1 and s.channels > 1
    made = {
        "image": image.transpose(0, 2, 3, 1) if last else image,
        "weights": stem.pack_weights(conv, weight),
        "bias": bias,
    }
    return made, ([float(x) for x in factors], [float(x) for x in shifts]), y


def operands(p: Problem) -> tuple[dict[str, Array], tuple[list[float], list[float]], Array]:
    """The operands of the convolution, and the pooled result."""
    made, normalization, y = convolution(p.conv)
    return made, normalization, pooled_by_definition(p, y)


def pooled_by_definition(p: Problem, y: Array) -> Array:
    """The pool of the convolution's result."""
    want = np.full((p.conv.batch, *p.size, p.conv.channels), -np.inf, np.float32)
    for row in range(p.size[0]):
        for column in range(p.size[1]):
            top, left = 2 * row - p.top, 2 * column - p.left
            window = y[:, max(top, 0) : top + p.window, max(left, 0) : left + p.window]
            want[:, row, column] = window.max((1, 2))
    return want


def place(p: Problem) -> Array:
    """The memory of the result, filled with NaN, with eight further channels per pixel that must stay unchanged."""
    dtype = np.dtype(ml_dtypes.bfloat16 if p.conv.dtype == "bfloat16" else np.float16)
    return np.full((p.conv.batch, *p.size, p.conv.channels + 8), np.nan, dtype)


def check(p: Problem, found: Array, want: Array) -> None:
    got = found.astype(np.float32)
    tolerance = 2e-2 if p.conv.dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(got[..., : p.conv.channels], want, rtol=0, atol=tolerance * np.abs(want).max())
    assert np.isnan(got[..., p.conv.channels :]).all(), "nothing else is written"


@needs_compiler
@pytest.mark.parametrize("name", every(4, SMALL))
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    p, config = CASES[name]
    arrays, normalization, want = operands(p)
    launch = pooled.launch(p, config, replace(DEVICE, multiprocessors=3), p.conv.channels + 8, normalization)
    generated = launch.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in generated.splitlines() if not line.startswith("#"))
    instructions = (HERE / "host_stem.hpp").read_text(encoding="utf-8")
    final = re.search(r"#define FINAL_SILU", generated)
    library = emulated.compiled(
        launch.recipe, launch.function, tmp_path, rendered=instructions + rendered, headers=["stem_pixels.cuh", "stem.cuh"],
        options=["-DFINAL_SILU=0"] if final is None else [],
    )  # fmt: skip
    held = {key: emulated.aligned(a) for key, a in {**arrays, "output": place(p)}.items()}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    check(p, held["output"], want)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["2x2", "blocks of channels, bytes", "bf16", "many", "wide"])
def test_kernels_compile_without_spills(name: str) -> None:
    p, config = CASES[name]
    check_spills(pooled.recipe(p, config), threads=config.threads)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    from support.bound import bound
    from support.device_memory import Memory

    p, config = CASES[name]
    memory, (arrays, normalization, want), out = Memory(), operands(p), place(p)
    for c in dict.fromkeys((config, *pooled.candidates(p, memory.device)[:2])):
        at = {key: memory.put(a) for key, a in {**arrays, "output": out}.items()}
        launch = pooled.launch(p, c, memory.device, p.conv.channels + 8, normalization)
        memory.run(bound(launch, at, nvrtc.KernelCache(tmp_path)))
        check(p, memory.get(at["output"], out.shape, out.dtype), want)
    memory.free()
