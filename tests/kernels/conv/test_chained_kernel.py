"""Two 1x1 convolutions in one launch: its plans without a GPU, the kernel on the processor and through NVRTC, and on a GPU each case
against the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.chained_cases import ADD_RELU, CASES, RELU, operands, places
from support.fenced import run_fenced
from support.host import COMPILER, WHY_NOT
from support.layout import compile_checks
from support.needs import why_no_hopper

from optdnn.kernels.conv import chained_kernel as chained
from optdnn.kernels.conv.chained_kernel import Config, Problem
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}
"""Of the largest magnitude: two roundings."""
P = Problem(2, (14, 14), 64, 256, 64, ADD_RELU, RELU)
C = Config(2, 64, 2, 3)


@pytest.mark.parametrize("name", CASES)
def test_cases_can_run(name: str) -> None:
    made, config = CASES[name]
    assert chained.refuse(made, config) is None


@pytest.mark.parametrize(
    ("made", "config", "reason"),
    [
        (replace(P, dtype="int8"), C, "16-bit floats"),
        (replace(P, first=(("relu",),)), C, "a bias comes first"),
        (replace(P, second=(("bias",), render.SCALE_SHIFT)), C, "all that depends on a channel"),
        (replace(P, middle=100), C, "multiple of 8"),
        (replace(P, channels=264), C, "264 channels of the result exceed 256"),
        (replace(P, batch=0), C, "it is empty"),
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


SMALL = [name for name in CASES if not name.startswith("ResNet")]


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT or "")
@pytest.mark.parametrize("name", SMALL)
def test_the_kernel_on_the_processor(name: str, tmp_path: Path) -> None:
    made, config = CASES[name]
    few = replace(DEVICE, multiprocessors=2)  # so that blocks take several tiles
    launch = chained.launch(made, config, few)
    text = launch.recipe.generated["generated.cuh"].replace(render.wgmma(config.columns, made.dtype), "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    library = emulated.compiled(launch.recipe, launch.function, tmp_path, rendered=rendered)
    arrays, middle, want = operands(made)
    held = {key: emulated.aligned(a) for key, a in {**arrays, **places(made)}.items()}
    emulated.run(library, launch, {key: a.ctypes.data for key, a in held.items()})
    check(made, middle, want, held)


def check(made: Problem, middle: np.ndarray, want: np.ndarray, found: dict[str, np.ndarray]) -> None:
    """Whether the results are right, and nothing else is written."""
    for name, meant in (("middle", middle), ("output", want)):
        if name in found:
            got = found[name].astype(np.float32)
            channels = meant.shape[1]
            tolerance = TOLERANCE[made.dtype] * np.abs(meant).max()
            np.testing.assert_allclose(got[:, :channels], meant, rtol=0, atol=tolerance)
            assert np.isnan(got[:, channels:]).all(), "nothing else is written"


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["a perceptron", "bf16", *(name for name in CASES if name not in SMALL)])
def test_kernels_compile_without_spills(name: str) -> None:
    made, config = CASES[name]
    _, log = nvrtc.compile_recipe(chained.recipe(made, config), resources=True)
    assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "serialized" not in log


@pytest.mark.nvrtc
def test_the_parameter_block_has_the_kernels_layout() -> None:
    made, config = CASES["pitches"]
    launch = chained.launch(made, config, DEVICE)
    names = {"input": "pixels"}
    seen = {names.get(p.operand, p.operand): p.at for p in (*launch.pointers, *launch.maps)}
    assert len(seen) == 9
    size = f"sizeof(Params) - {len(launch.parameters)} < 64"
    compile_checks(
        launch, seen, size, f"BUFFER + BUFFERS * GROUPS * ROWS_BYTES == {chained.shared_bytes(made, config)}"
    )


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    made, config = CASES[name]
    arrays, middle, want = operands(made)
    launch = replace(chained.launch(made, config, DEVICE), recipe=chained.recipe(made, config, checked=True))
    check(made, middle, want, run_fenced(launch, arrays, places(made), tmp_path))
