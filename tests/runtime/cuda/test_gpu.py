"""Kernels on a GPU, compared with the definition in float64 on the same 16-bit operands. Outputs are poisoned with NaN."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.bound import bound
from support.conv_cases import CASES, GENERAL, apply_stages, convolve, in_reverse, plain_launch
from support.device_memory import Memory
from support.traps import trapping

from optdnn.kernels.conv import general_kernel as conv_general
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv.patch_kernel import PatchConfig
from optdnn.runtime.cuda.allocator import fill
from optdnn.runtime.cuda.compile.nvrtc import KernelCache
from optdnn.runtime.cuda.device import Launch
from optdnn.runtime.cuda.launches import graphs
from optdnn.types import to_tf32

pytestmark = pytest.mark.hopper
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
TOLERANCE = {
    "float16": 4e-4,
    "bfloat16": 3e-3,
    "float32": 2e-5,  # tf32: the kernel rounds ties away from zero, NumPy to even
}  # relative to the norm; rounding the result once costs half of it


@pytest.fixture
def memory() -> Any:
    made = Memory()
    yield made
    made.free()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, memory: Memory, cache: KernelCache) -> None:
    problem, config = CASES[name]
    family: Any = conv_patch if isinstance(config, PatchConfig) else conv
    rng = np.random.default_rng(0)
    dtype = DTYPES[problem.dtype]
    n, (h, w), channels = problem.batch, problem.out_size, problem.channels
    images = [rng.standard_normal((n, s.height, s.width, s.channels)).astype(dtype) for s in problem.sources]
    fan_in = sum(s.channels * s.kernel[0] * s.kernel[1] for s in problem.sources)
    weights = [
        (rng.standard_normal((channels, s.channels, *s.kernel)) / fan_in**0.5).astype(dtype) for s in problem.sources
    ]
    bias = rng.standard_normal(-(-channels // 4) * 4).astype(np.float32)
    residual = rng.standard_normal((n, h, w, channels)).astype(dtype)
    precise = np.float64 if problem.flops < 2e8 else np.float32
    total = sum(
        convolve(image.astype(precise), weight.astype(precise), source)
        for image, weight, source in zip(images, weights, problem.sources, strict=True)
    )
    expected = apply_stages(total, problem.epilogue, bias[:channels].astype(precise), residual.astype(precise))

    fence = 4096  # bytes around the output that the kernel must not change
    size = n * h * w * channels * 2
    raw = memory.put(np.full(size + 2 * fence, 0xFF, np.uint8))
    at = {f"pixels{i}": memory.put(image) for i, image in enumerate(images)}
    at |= {"weights": memory.put(conv_params.pack_weights(problem, weights)), "channel": memory.put(bias)}
    at |= {"output": raw + fence, "residual": memory.put(residual)}
    made = plain_launch(problem, config, memory.device, weights)
    made = replace(made, recipe=trapping(family.recipe(problem, config)))
    stream = getattr(config, "stream", False)
    if stream:
        partial, arrived = conv.workspace(problem, config, memory.device)
        at |= {
            "partial": memory.put(np.full(partial, 0xFF, np.uint8)),
            "arrived": memory.put(np.zeros(arrived, np.uint8)),
        }
    results = []
    for reverse in (False, not stream, False):  # the order decides which tiles are divided
        fill(raw, 0xFF, size + 2 * fence)
        memory.run(bound(in_reverse(made) if reverse else made, at, cache))
        around = memory.get(raw, (size + 2 * fence,), np.dtype(np.uint8))
        assert (around[:fence] == 0xFF).all()
        assert (around[-fence:] == 0xFF).all()
        results.append(around[fence:-fence].copy())
        if stream:
            assert not memory.get(at["arrived"], (arrived,), np.dtype(np.uint8)).any()
    assert all((result == results[0]).all() for result in results), "runs differ, or the order of the tiles matters"
    got = results[0].view(dtype).reshape(expected.shape).astype(precise)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE[problem.dtype], f"{config}: {error}"
    assert np.abs(got - expected).max() < 60 * TOLERANCE[problem.dtype] * np.abs(expected).std()


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("config", conv_general.CONFIGS, ids=str)
def test_general_convolution(name: str, config: conv_general.GeneralConfig, memory: Memory, cache: KernelCache) -> None:
    case, rng = GENERAL[name], np.random.default_rng(6)
    if (why := conv_general.refuse(case.problem, config)) is not None:
        assert config.split > 1, why
        return
    problem, source = case.problem, case.problem.sources[0]
    dtype = DTYPES[problem.out_dtype]
    channels, inside = case.channels or problem.channels, case.inside or source.channels
    shape = (problem.batch, *problem.out_size, channels)
    pitched = (*shape[:3], -(-channels // 8) * 8)
    fan_in = inside * source.kernel[0] * source.kernel[1]
    image = rng.standard_normal((problem.batch, source.height, source.width, source.channels * problem.bands))
    weight = rng.standard_normal((channels, inside, *source.kernel)) / fan_in**0.5
    image, weight = image.astype(dtype), weight.astype(dtype)
    image[..., inside * problem.bands :] = np.nan  # after the channels
    bias = rng.standard_normal(channels).astype(np.float32)
    residual = rng.standard_normal(pitched).astype(dtype)
    read = image[..., : inside * problem.bands]
    factors = [to_tf32(f) if problem.dtype == "tfloat32" else f for f in (read, weight)]
    total = convolve(factors[0].astype(np.float64), factors[1].astype(np.float64), source)
    added = residual[..., :channels].astype(np.float64)
    expected = apply_stages(total, problem.epilogue, bias.astype(np.float64), added)
    output = memory.put(np.full(pitched, 7.0, dtype))
    packed = memory.put(conv_general.pack_weights(factors[1]))
    padded = np.zeros(-(-channels // 4) * 4, np.float32)
    padded[:channels] = bias
    at = {
        "pixels": memory.put(image), "weights": packed, "channel": memory.put(padded), "output": output,
        "residual": memory.put(residual),
    }  # fmt: skip
    partial, arrived = conv_general.workspace(problem, config, channels)
    if partial:
        at |= {
            "partial": memory.put(np.full(partial, 0xFF, np.uint8)),
            "arrived": memory.put(np.zeros(arrived, np.uint8)),
        }
    made = conv_general.launch(problem, config, memory.device, channels=channels, inside=inside, pitch=pitched[3])
    runs = []
    for _ in range(3 if partial else 1):
        memory.run(bound(made, at, cache))
        runs.append(memory.get(output, pitched, dtype))
    assert all((one.view(np.uint8) == runs[0].view(np.uint8)).all() for one in runs), "runs differ"
    found = runs[0].astype(np.float64)
    assert (found[..., channels:] == 7.0).all(), "nothing is written after the channels"
    error = np.linalg.norm(found[..., :channels] - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE[problem.out_dtype], error


def test_a_graph_of_dependent_launches_replays_the_same(memory: Memory, cache: KernelCache) -> None:
    problem, config = CASES["1x1 split"]
    rng = np.random.default_rng(4)
    image = rng.standard_normal((1, 14, 14, 1024)).astype(np.float16)
    weight = (rng.standard_normal((256, 1024, 1, 1)) / 32).astype(np.float16)
    shape = (1, 14, 14, 256)
    one, two = (memory.put(np.zeros(shape, np.float16)) for _ in range(2))
    source, packed, bias = (
        memory.put(image),
        memory.put(conv_params.pack_weights(problem, [weight])),
        memory.put(np.ones(256, np.float32)),
    )
    made = plain_launch(problem, config, memory.device, [weight])
    made = replace(made, recipe=trapping(conv.recipe(problem, config)))

    def launch(residual: int, output: int) -> Launch:
        at = {"pixels0": source, "weights": packed, "channel": bias, "output": output, "residual": residual}
        return bound(made, at, cache)

    chain = [launch(one, two), launch(two, one), launch(one, two)]  # each launch adds the result of the one before
    for step in chain:
        memory.run(step)
    expected = memory.get(two, shape, np.dtype(np.float16))
    graph = graphs.Graph(chain, memory.stream)
    for _ in range(3):
        for buffer in (one, two):
            fill(buffer, 0, 2 * expected.size)
        graph.replay(memory.stream)
        memory.stream.synchronize()
        np.testing.assert_array_equal(memory.get(two, shape, np.dtype(np.float16)), expected)
    times = graphs.time_runs(lambda: graph.replay(memory.stream), memory.stream, repeats=5)
    assert 0 < statistics.median(times) < 10
    graph.close()
