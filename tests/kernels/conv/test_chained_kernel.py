"""Two 1x1 convolutions in one launch: plans without a GPU, the kernel on the processor and through NVRTC, and each case on a
GPU compared with the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import compiler_cache, emulated
from support.chained_cases import (
    ADD,
    ADD_RELU,
    BIAS,
    BYTES,
    CASES,
    RELU,
    byte_operands,
    byte_places,
    numbers,
    operands,
    places,
)
from support.covering import covering
from support.fenced import run_fenced
from support.host import needs_compiler
from support.layout import compile_checks
from support.sweep import every
from support.traps import trapping

from optdnn.kernels.conv import chained_kernel as chained
from optdnn.kernels.conv.chained_kernel import Config, Integers, Problem
from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}
"""The largest error, relative to the largest magnitude: two roundings."""
P = Problem(2, (14, 14), 64, 256, 64, ADD_RELU, RELU)
B = Problem(2, (14, 14), 64, 256, 64, ADD, BIAS, integers=Integers(added="int8"))
MANY: tuple[render.Stage, ...] = (("clip", 0.0, 1.0),) * 7
C = Config(2, 64, 2, 3)


@pytest.mark.parametrize(("made", "config"), [*CASES.values(), *BYTES.values()], ids=str)
def test_cases_can_run(made: Problem, config: Config) -> None:
    assert chained.refuse(made, config) is None


@pytest.mark.parametrize(
    ("made", "config", "reason"),
    [
        (replace(P, dtype="int8"), C, "16-bit floats"),
        (replace(P, first=(("relu",),)), C, "do not begin with a bias"),
        (replace(P, second=(("bias",), render.SCALE_SHIFT)), C, "have a scale per channel"),
        (replace(P, middle=100), C, "multiple of 8"),
        (replace(P, channels=264), C, "264 channels of the result exceed 256"),
        (replace(P, batch=0), C, "it is empty"),
        (replace(B, middle=72), C, "multiple of 16"),
        (replace(B, first=(*ADD, *MANY)), C, "more than 12 constants"),
        (B, replace(C, columns=48), "not a tile"),
        (P, replace(C, groups=4), "not a tile"),
        (P, replace(C, columns=40), "not a tile"),
        (P, replace(C, buffers=1), "too few buffers"),
        (P, replace(C, stages=1), "too few buffers"),
        (replace(P, channels=256), replace(C, columns=128), "320 accumulators per thread exceed"),
        (replace(P, middle=64 * 60), C, "more barriers"),
        (replace(P, middle=1024), C, "bytes of shared memory"),
        (replace(P, batch=1 << 30), C, "more pixels"),
    ],
)
def test_refused(made: Problem, config: Config, reason: str) -> None:
    assert chained.refuse(P, C) is None
    assert chained.refuse(B, C) is None
    assert reason in (chained.refuse(made, config) or "")


@pytest.mark.parametrize("batch", [1, 128])
def test_candidates_can_run_and_are_ranked(batch: int) -> None:
    for size, depth, middle, channels in ((56, 64, 256, 64), (28, 128, 512, 256), (14, 256, 1024, 256)):
        made = Problem(batch, (size, size), depth, middle, channels, ADD_RELU, RELU)
        found = chained.candidates(made, DEVICE)
        assert len(found) > 3
        assert all(chained.refuse(made, c) is None for c in found)
        seconds = [chained.estimate(made, c, DEVICE) for c in found]
        assert seconds == sorted(seconds)
        assert seconds[0] > made.bytes / 4.8e12
    assert chained.candidates(replace(P, dtype="int8"), DEVICE) == []
    assert chained.candidates(P, of_arch("sm_80")) == []


PRODUCT = "template <class D> static void {}(D& d, u64 a, u64 b, int accumulate) {{ {}(d, a, b, accumulate); }}"
STEPS = {"int8": "wgmma_bytes<false>", "uint8": "wgmma_bytes<true>"}
SMALL = [name for name in CASES if not name.startswith("ResNet")]


@needs_compiler
@pytest.mark.parametrize("name", every(4, SMALL))
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    made, config = CASES[name]
    few = replace(DEVICE, multiprocessors=2)  # so that blocks take several tiles
    arrays, middle, want = operands(made)
    held = on_the_processor(made, config, chained.launch(made, config, few), {**arrays, **places(made)}, tmp_path)
    check(made, middle, want, held)


@needs_compiler
@pytest.mark.parametrize("name", every(4, (name for name in BYTES if not name.startswith("ResNet"))))
def test_bytes_on_the_processor(name: str, tmp_path: Path) -> None:
    made, config = BYTES[name]
    arrays, middle, want = byte_operands(made)
    assert len(np.unique(middle)) > 80, "a case that tells results apart"
    assert len(np.unique(want)) > 50, "a case that tells results apart"
    launch = chained.launch(made, config, replace(DEVICE, multiprocessors=2), numbers(made))
    held = on_the_processor(made, config, launch, {**arrays, **byte_places(made)}, tmp_path)
    check_bytes(middle, want, held)


def on_the_processor(
    made: Problem, config: Config, launch: Launch, arrays: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """All operands and results after the emulated launch."""
    text = launch.recipe.generated["generated.cuh"]
    types = (made.dtype,) * 2 if made.integers is None else (made.integers.image, made.integers.middle)
    for name, dtype in zip(("first_product", "second_product"), types, strict=True):
        text = text.replace(
            render.wgmma(config.columns, dtype, name=name), PRODUCT.format(name, STEPS.get(dtype, "wgmma_step"))
        )
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    library = emulated.compiled(
        launch.recipe, launch.function, folder, rendered=rendered, headers=["chained_results.cuh"]
    )
    held = {key: emulated.aligned(a) for key, a in arrays.items()}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    return held


def check_bytes(middle: np.ndarray, want: np.ndarray, found: dict[str, np.ndarray], untouched: int = 85) -> None:
    """Whether the results are right to the bit, and no other bytes are written."""
    for name, meant in (("middle", middle), ("output", want)):
        if name in found:
            np.testing.assert_array_equal(found[name][:, : meant.shape[1]], meant)
            assert (found[name][:, meant.shape[1] :].view(np.uint8) == untouched).all(), "nothing else is written"


def check(made: Problem, middle: np.ndarray, want: np.ndarray, found: dict[str, np.ndarray]) -> None:
    """Whether the results are right, and no other bytes are written."""
    for name, meant in (("middle", middle), ("output", want)):
        if name in found:
            got = found[name].astype(np.float32)
            channels = meant.shape[1]
            tolerance = TOLERANCE[made.dtype] * np.abs(meant).max()
            np.testing.assert_allclose(got[:, :channels], meant, rtol=0, atol=tolerance)
            assert np.isnan(got[:, channels:]).all(), "nothing else is written"


COMPILED = {
    name: chained.recipe(*case)
    for name, case in {
        **{name: CASES[name] for name in ("a perceptron", "bf16", *(name for name in CASES if name not in SMALL))},
        **{f"bytes, {name}": BYTES[name] for name in BYTES},
    }.items()
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(2, covering(COMPILED)))
def test_kernels_compile_without_spills(name: str) -> None:
    log = compiler_cache.log(COMPILED[name])
    assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "serialized" not in log


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    made, config = CASES["pitches"]
    launch = chained.launch(made, config, DEVICE)
    check_layout(made, config, launch)
    made, config = BYTES["pitches"]
    check_layout(made, config, chained.launch(made, config, DEVICE, numbers(made)))


def check_layout(made: Problem, config: Config, launch: Launch) -> None:
    names = {"input": "pixels"}
    seen = {names.get(p.operand, p.operand): p.at for p in (*launch.pointers, *launch.maps)}
    assert len(seen) == 9
    size = f"sizeof(Params) - {len(launch.parameters)} < 64"
    compile_checks(
        launch, seen, size, f"BUFFER + BUFFERS * GROUPS * ROWS_BYTES == {chained.shared_bytes(made, config)}"
    )


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    made, config = CASES[name]
    arrays, middle, want = operands(made)
    launch = replace(chained.launch(made, config, DEVICE), recipe=trapping(chained.recipe(made, config)))
    check(made, middle, want, run_fenced(launch, arrays, places(made), tmp_path))


@pytest.mark.hopper
@pytest.mark.parametrize("name", BYTES)
def test_bytes_on_a_gpu(name: str, tmp_path: Any) -> None:
    made, config = BYTES[name]
    arrays, middle, want = byte_operands(made)
    launch = chained.launch(made, config, DEVICE, numbers(made))
    launch = replace(launch, recipe=trapping(chained.recipe(made, config)))
    check_bytes(middle, want, run_fenced(launch, arrays, byte_places(made), tmp_path), 255)
