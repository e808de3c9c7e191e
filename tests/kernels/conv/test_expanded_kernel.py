"""A 1x1 and a depthwise convolution in one launch: plans without a GPU, the kernel on the processor and through NVRTC, and each
case on a GPU compared with the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import compiler_cache, emulated
from support.conv_cases import same
from support.expanded_cases import CASES, RELU6, operands, problem
from support.fenced import run_fenced
from support.host import needs_compiler
from support.layout import compile_checks
from support.sweep import every
from support.traps import trapping

from optdnn.errors import InternalError
from optdnn.kernels.conv import expanded_kernel as expanded
from optdnn.kernels.conv.expanded_kernel import Config, Problem
from optdnn.kernels.conv.problem import Source
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}
"""The largest error, relative to the largest magnitude: two roundings."""
P = problem(2, 24, same(14, 14, 96), RELU6, RELU6)
C = Config(2, 16, 1, 7, 48, 2)


@pytest.mark.parametrize("name", CASES)
def test_cases_can_run(name: str) -> None:
    made, config = CASES[name]
    assert expanded.refuse(made, config) is None


def filtered(**more: Any) -> Problem:
    return replace(P, filtered=replace(P.filtered, **more))


@pytest.mark.parametrize(
    ("made", "config", "reason"),
    [
        (filtered(dtype="int8"), C, "16-bit floats"),
        (filtered(epilogue=(("relu",),)), C, "do not begin with a bias"),
        (replace(P, between=(("bias",), ("add",))), C, "or add a residual"),
        (filtered(relu=True), C, "a ReLU stands before"),
        (filtered(source=same(14, 14, 96, (7, 7))), C, "49 taps"),
        (filtered(source=Source(14, 14, 96, (3, 3), (2, 2), (2, 2, 2, 2), (2, 2))), C, "a stride and a dilation"),
        (replace(P, depth=20), C, "20 channels: not a multiple of 8"),
        (replace(P, depth=328), C, "or more than 320"),
        (filtered(source=same(14, 14, 100)), C, "its number of channels is not a multiple of 8"),
        (filtered(source=Source(2, 2, 96, (3, 3))), C, "its result is empty"),
        (P, replace(C, strips=3), "not a tile"),
        (P, replace(C, channels=40), "not a tile"),
        (P, replace(C, channels=96, warps=4), "no block of 768 threads"),
        (P, replace(C, stages=5), "5 stages"),
        (filtered(source=same(999, 999, 96)), replace(C, grid_x=17), "exceeds a TMA box"),
        (P, replace(C, blocks=4, stages=4), "that many blocks"),
        (P, replace(C, warps=5, blocks=2, strips=4, grid_y=1), "registers per thread"),
        (filtered(batch=1 << 30), C, "more tiles"),
    ],
)
def test_refused(made: Problem, config: Config, reason: str) -> None:
    assert expanded.refuse(P, C) is None
    assert reason in (expanded.refuse(made, config) or "")


@pytest.mark.parametrize("batch", [1, 128])
def test_candidates_can_run_and_are_ranked(batch: int) -> None:
    for size, depth, inner, stride in ((112, 16, 96, 2), (56, 24, 144, 1), (7, 192, 1152, 1)):
        made = problem(batch, depth, same(size, size, inner, stride=stride), squeeze=True)
        found = expanded.candidates(made, DEVICE)
        assert len(found) > 5
        assert all(expanded.refuse(made, c) is None for c in found)
        seconds = [expanded.estimate(made, c, DEVICE) for c in found]
        assert seconds == sorted(seconds)
        assert seconds[0] > made.bytes / 4.8e12
    assert expanded.candidates(filtered(dtype="int8"), DEVICE) == []
    assert expanded.candidates(P, of_arch("sm_80")) == []


def test_packing() -> None:
    packed = expanded.pack_expansion(np.ones((24, 40, 1, 1), np.float16))
    assert packed.shape == (24, 48)
    assert packed[:, :40].all()
    assert not packed[:, 40:].any()
    with pytest.raises(InternalError, match="one tap"):
        expanded.pack_expansion(np.ones((4, 2, 3, 3), np.float16))


def _assembly_aside(text: str) -> str:
    """Generated text that the processor can run: bounds of pairs in plain C++."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return "\n".join(
        "    pair = pack2(min(max(low_float(pair), 0.0f), 6.0f), min(max(high_float(pair), 0.0f), 6.0f));"
        if "asm(" in line
        else line
        for line in lines
    )


SMALL = [name for name, (p, c) in CASES.items() if p.filtered.batch <= 3 and p.filtered.source.height < 100]


@needs_compiler
@pytest.mark.parametrize("name", every(4, SMALL))
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    made, config = CASES[name]
    few = replace(DEVICE, multiprocessors=3)  # so that blocks take several tiles
    launch = expanded.launch(made, config, few)
    text = launch.recipe.generated["generated.cuh"].replace(render.mma(made.filtered.dtype), "")
    library = emulated.compiled(
        launch.recipe, launch.function, tmp_path, rendered=_assembly_aside(text), headers=["strips.cuh"]
    )
    arrays, want = operands(made)
    out, sums = results(made, config)
    held = {key: emulated.aligned(a) for key, a in {**arrays, "output": out, **sums}.items()}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    check(made, config, want, held["output"], {key: held[key] for key in sums})


def results(made: Problem, config: Config) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The memory of the result, filled with NaN, and of its sums or means."""
    f = made.filtered
    dtype = np.dtype(ml_dtypes.bfloat16 if f.dtype == "bfloat16" else np.float16)
    _, x, y = expanded.tiles(made, config)
    out = np.full((f.batch, *f.out_size, f.pitch[1]), np.nan, dtype)
    sums = np.full((f.batch, x * y, made.channels), np.nan, np.float32)
    means = np.full((f.batch, made.channels), np.nan, dtype)
    return out, {0: {}, 1: {"sums": sums}, 2: {"means": means}}[expanded.squeeze_mode(made, config)]


def check(made: Problem, config: Config, want: np.ndarray, out: np.ndarray, more: dict[str, np.ndarray]) -> None:
    """Whether the results are right, and no other bytes are written."""
    tolerance = TOLERANCE[made.filtered.dtype]
    got = out[..., : made.channels].astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())
    assert np.isnan(out[..., made.channels :].astype(np.float32)).all(), "nothing else is written"
    if "sums" in more:
        (_, across, _), (high, wide) = expanded.tiles(made, config), config.tile
        for i in range(more["sums"].shape[1]):
            y, x = i // across * high, i % across * wide
            tile = got[:, y : y + high, x : x + wide].sum((1, 2))
            np.testing.assert_allclose(more["sums"][:, i], tile, rtol=0, atol=1e-4 * np.abs(tile).max())
    if "means" in more:
        mean = got.mean((1, 2))
        np.testing.assert_allclose(more["means"].astype(np.float32), mean, rtol=0, atol=tolerance * np.abs(mean).max())


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "name",
    every(2, ["one step", "many channels", "5x5, stride 2", "means", "bf16", "ReLU6, bf16", "persistent", "wide"]),
)
def test_kernels_compile_without_spills(name: str) -> None:
    made, config = CASES[name]
    log = compiler_cache.log(expanded.recipe(made, config))
    assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    made, config = CASES["means"]
    launch = expanded.launch(made, config, DEVICE)
    places = {p.operand: p.at for p in launch.pointers} | {m.operand: m.at for m in launch.maps}
    assert len(places) == 7
    size = f"sizeof(Params) - {len(launch.parameters)} < 64"
    compile_checks(launch, places, size, f"STAGE_BYTES == {expanded.stage_bytes(made, config)}")


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    made, config = CASES[name]
    arrays, want = operands(made)
    out, more = results(made, config)
    launch = replace(expanded.launch(made, config, DEVICE), recipe=trapping(expanded.recipe(made, config)))
    found = run_fenced(launch, {**arrays, **more}, {"output": out}, tmp_path)
    check(made, config, want, found["output"], {key: found[key] for key in more})
