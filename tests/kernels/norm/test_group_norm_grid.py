"""Group norms in one cooperative launch: refusals and candidates of the plans, and the kernel, compiled and on the processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels.norm.test_norm_tiles import LARGE, check, moved, on_host  # type: ignore[import-not-found]
from support.host_tiles import run_launches
from support.sequence_cases import group_norm
from support.simulated import check_simulated
from support.spills import check_launch
from support.sweep import sweep

from optdnn.kernels.norm import group_norm as tactic
from optdnn.kernels.norm import group_norm_grid as gridded
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.kernels.tactic import Offer
from optdnn.ops.unary import AlphaAttrs
from optdnn.runtime.cuda.gpu_facts import NAMED, GpuFacts, of_arch
from optdnn.runtime.reference.run import run_kernel

DEVICE = of_arch("sm_90a")
CONFIG = gridded.Config(128, 114, 512, 8, 20)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(LARGE, groups=7), CONFIG, "do not form 7 equal groups"),
        (replace(LARGE, epilogue=(("add",),)), CONFIG, "no operands"),
        (LARGE, replace(CONFIG, slab=44), "vectors of 8"),
        (replace(LARGE, dtype="float32"), CONFIG, "exceed an access"),
        (replace(LARGE, groups=4), replace(CONFIG, slab=16), "whole groups"),
        (LARGE, replace(CONFIG, threads=1024), "not a valid block"),
        (LARGE, replace(CONFIG, tiles=115), "115 blocks cannot run at once on 114 multiprocessors"),
        (replace(LARGE, batch=2), CONFIG, "228 blocks cannot run at once"),
        (LARGE, replace(CONFIG, held=40), "bytes of shared memory exceed"),
        (replace(LARGE, pixels=1 << 24), CONFIG, "an image is too large"),
    ],
)
def test_refusals(problem: clustered.Problem, config: gridded.Config, reason: str) -> None:
    assert gridded.refuse(LARGE, CONFIG, DEVICE) is None
    assert reason in (gridded.refuse(problem, config, DEVICE) or "")


def test_large_images_take_it_and_small_ones_do_not() -> None:
    best = tactic.group_norm_offers(LARGE, DEVICE)[0]
    assert isinstance(best.config, gridded.Config)
    assert best.config.held > 0
    assert best.seconds is not None
    assert best.seconds < tiled.estimate(LARGE, tiled.candidates(LARGE, DEVICE)[0], DEVICE)
    for problem in (replace(LARGE, pixels=64), clustered.Problem(2, 1024, 320, 32)):
        assert not isinstance(tactic.group_norm_offers(problem, DEVICE)[0].config, gridded.Config)


@pytest.mark.parametrize("gpu", NAMED, ids=lambda gpu: gpu.name)
def test_a_plan_for_one_gpu_runs_on_others_of_its_architecture(gpu: GpuFacts) -> None:
    least = min(other.multiprocessors for other in NAMED if other.arch == gpu.arch)
    found = gridded.candidates(replace(LARGE, batch=2), gpu, 99)
    assert found
    assert max(c.blocks(replace(LARGE, batch=2)) for c in found) <= least


def test_a_program_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gridded.Config(64, 5, 128, 8, 3)
    monkeypatch.setattr(tactic, "group_norm_offers", lambda problem, gpu: (Offer(config, 1e-6),))
    program = check_simulated(group_norm(channels=64, groups=8, size=(20, 20), then="Swish", attrs=AlphaAttrs(1.0)))
    (step,) = (s for s in program.steps if s.params.get("launch", {}).get("waits") == "grid")
    assert step.params["launch"]["grid"] == [10, 1, 1]
    assert not step.params["launch"]["dependent"]


CASES = {
    "one tile": ((1, 16, 5, 7), 4, gridded.Config(16, 1, 64, 8, 1)),
    "in registers": ((1, 16, 9, 7), 4, gridded.Config(16, 1, 128, 8, 0)),
    "read again": ((1, 16, 31, 29), 4, gridded.Config(16, 1, 64, 8, 4)),
    "all in shared memory": ((1, 16, 31, 29), 4, gridded.Config(16, 1, 64, 8, 32)),
    "tiles": ((2, 16, 33, 31), 4, gridded.Config(16, 6, 64, 8, 2)),
    "slabs": ((1, 48, 29, 9), 6, gridded.Config(16, 5, 96, 8, 0)),
    "idle threads": ((1, 40, 30, 17), 5, gridded.Config(40, 3, 64, 8, 5)),
    "instances": ((2, 24, 16, 50), 24, gridded.Config(24, 7, 128, 4, 3)),
    "a pixel per tile": ((1, 8, 3, 3), 2, gridded.Config(8, 9, 32, 2, 0)),
}


@on_host
@pytest.mark.parametrize(("dtype", "added"), sweep([("float16", True), ("float32", False)], ("float16", True)))
@pytest.mark.parametrize("name", CASES)
def test_blocks_keep_their_pixels(name: str, dtype: str, added: bool, tmp_path: Path) -> None:
    """On the processor, a block ends before the next begins. So the first run only stores the moments of all blocks for the
    second."""
    shape, groups, config = CASES[name]
    if dtype == "float32":
        config = replace(config, lanes=min(4, config.lanes))
    n, channels, *spatial = shape
    pitch = channels if added else None
    problem = clustered.Problem(n, int(np.prod(spatial)), channels, groups, (), dtype, 1e-3, added_pitch=pitch)
    assert gridded.refuse(problem, config, DEVICE) is None
    x, scale, bias = moved(shape, dtype), moved((channels,), "float32", 1), moved((channels,), "float32", 2)
    vectors = moved((n, channels), dtype, 5)
    image = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    out, moments = np.full_like(image, np.nan), np.full((n, groups, config.tiles, 2), np.nan, np.float32)
    memory = {"input": image, "output": out, "scale": scale, "bias": bias, "added": vectors, "moments": moments}
    memory["rounds"] = np.zeros(2, np.int32)
    for turn in "ab":
        out[...] = np.nan
        (tmp_path / turn).mkdir()
        run_launches([gridded.launch(problem, config, DEVICE)], memory, tmp_path / turn)
    total = x.astype(np.float64) + (vectors[:, :, None, None] if added else 0)
    wanted = run_kernel("GroupNormalization", [total, scale, bias], {"num_groups": groups, "epsilon": 1e-3})
    check(np.moveaxis(out, -1, 1), wanted[0])


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_candidates_compile_without_spills(dtype: str) -> None:
    problem = replace(LARGE, epilogue=(("silu",),), dtype=dtype)
    for config in gridded.candidates(problem, DEVICE, 2):
        made = gridded.launch(problem, config, DEVICE)
        check_launch(made, DEVICE)
