"""Kernels whose blocks go from tile to tile (narrow groups, depthwise on tensor cores): the same source on a processor with
emulated warps, plans, refusals, and each configuration of the tactics on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.conv_cases import apply_stages, convolve, same
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import launch_errors
from support.simulated import check_simulated, lowered
from support.sweep import sweep
from support.traps import trapping

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import depthwise_bands_kernel as depthwise_bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import grouped_kernel as grouped
from optdnn.kernels.conv.depthwise import TiledDepthwise
from optdnn.kernels.conv.grouped import GroupedConv, together
from optdnn.kernels.conv.problem import Source
from optdnn.lowering.choose import TacticChoice
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.target_name import TargetName

HOPPER = of_arch("sm_90a")
STAGES: tuple[render.Stage, ...] = (("bias",), ("relu",))
Case = tuple[Any, Any, Any]
"""Family, problem and configuration."""


def grouped_case(batch: int, source: Source, bands: int, config: grouped.Config, squeeze: bool = False) -> Case:
    return grouped, grouped.Problem(batch, source, bands, STAGES, squeeze=squeeze), config


def narrow_case(
    batch: int, source: Source, results: int, config: grouped.Config, *stages: render.Stage, pitch: int = 0
) -> Case:
    """Without groups. ``pitch``: elements of a pixel of all tensors; 0: their channels."""
    return (
        grouped,
        grouped.Problem(batch, source, 1, (("bias",), *stages), pitches=(pitch,) * 3, results=results),
        config,
    )


def depthwise_case(batch: int, source: Source, config: depthwise_bands.Config) -> Case:
    return depthwise_bands, depthwise.Problem(batch, source, STAGES, squeeze=True), config


CASES: dict[str, Case] = {
    "five groups": grouped_case(2, same(9, 18, 40), 5, grouped.Config(2, 8, 1, 2, 1, 5, 2)),
    "parts, squeeze": grouped_case(1, same(9, 18, 64), 4, grouped.Config(2, 16, 2, 1, 2, 4, 3), True),
    "three chunks, whole squeeze": grouped_case(1, same(9, 8, 48), 2, grouped.Config(3, 4, 3, 2, 1, 3, 2), True),
    "stride 2, half a slab": grouped_case(
        2, Source(9, 18, 72, (3, 3), (2, 2), (1, 1, 1, 1)), 9, grouped.Config(2, 4, 1, 1, 1, 8, 2), True
    ),
    "groups of 48, two chunks of a warp": grouped_case(
        1, same(9, 18, 96), 2, grouped.Config(2, 8, 2, 1, 2, 6, 2), True
    ),
    "dilation": grouped_case(
        1, Source(19, 18, 64, (5, 3), (1, 2), (4, 1, 4, 1), (2, 1)), 2, grouped.Config(1, 8, 1, 2, 1, 4, 2)
    ),
    "few channels": narrow_case(2, same(9, 18, 24), 24, grouped.Config(2, 8, 3, 1, 2, 3, 2), ("relu",)),
    "few channels, residual": narrow_case(
        2, same(9, 18, 16), 40, grouped.Config(2, 16, 2, 1, 2, 4, 2), ("silu",), ("add",)
    ),
    "18 channels in 24": narrow_case(
        2, same(7, 11, 18), 18, grouped.Config(2, 8, 1, 1, 1, 3, 2), ("add",), ("relu",), pitch=24
    ),
    "few channels, stride 2, SiLU": narrow_case(
        1, Source(18, 19, 16, (3, 3), (2, 2), (1, 1, 1, 1)), 32, grouped.Config(4, 8, 2, 1, 1, 4, 2), ("silu",)
    ),
    "few channels, 1x1": narrow_case(3, same(9, 13, 32, (1, 1)), 8, grouped.Config(1, 4, 1, 2, 2, 1, 2), ("relu",)),
    "depthwise 3x3": depthwise_case(1, same(9, 10, 24), depthwise_bands.Config(1, 4, 4, 1, 1, 2, 3, 2)),
    "depthwise 7x7, four images": depthwise_case(
        3, same(7, 7, 40, (7, 7)), depthwise_bands.Config(2, 4, 1, 4, 1, 1, 2, 2)
    ),
    "depthwise 5x5, two below": depthwise_case(
        2, same(17, 20, 40, (5, 5)), depthwise_bands.Config(2, 8, 2, 1, 2, 1, 2, 2)
    ),
    "depthwise 7x9": depthwise_case(2, same(14, 11, 72, (7, 9)), depthwise_bands.Config(1, 8, 1, 2, 1, 1, 8, 2)),
}


def result_and_means(family: Any, problem: Any, config: Any, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kernel's results on the processor for random images: results, means (None: not requested), and the expected results."""
    s, rng = problem.source, np.random.default_rng(3)
    made = family.launch(problem, config, HOPPER)
    text = made.recipe.generated["generated.cuh"].replace(render.mma(problem.dtype), "")
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    headers = [name for name in ("tile_walk.cuh", "vectors.cuh", "strips.cuh") if name in made.recipe.sources()]
    library = emulated.compiled(made.recipe, made.function, folder, rendered=rendered, headers=headers)
    bands = problem.bands if family is grouped else s.channels
    inside, out = s.channels // bands, (problem.results if family is grouped else 0) or s.channels
    x = rng.standard_normal((problem.batch, s.height, s.width, s.channels)).astype(np.float16)
    weight = (rng.standard_normal((out, inside, *s.kernel)) / (inside * np.prod(s.kernel)) ** 0.5).astype(np.float16)
    bias = rng.standard_normal(out).astype(np.float32)
    shape = (problem.batch, *problem.out_size, out)
    residual = rng.standard_normal(shape).astype(np.float16)
    summed = convolve(x.astype(np.float32), weight.astype(np.float32), s)
    want = apply_stages(summed, problem.epilogue, bias, residual.astype(np.float32))
    walk = family.walk(problem, config)
    _, tiles_x, tiles_y = walk.tiles(s)
    read, written, _ = problem.pitches if family is grouped else (0, 0, 0)
    arrays = {
        "input": spread(x, read), "weights": (grouped if family is grouped else depthwise).pack_weights(weight),
        "bias": np.pad(bias, (0, -out % 8)), "residual": spread(residual, written),
        "output": np.full((*shape[:3], written or out), np.nan, np.float16), "means": np.full((shape[0], out), np.nan, np.float16),
        "sums": np.full((shape[0], tiles_x * tiles_y, out), np.nan, np.float32),
    }  # fmt: skip
    held = {name: emulated.aligned(array) for name, array in arrays.items()}
    emulated.run(library, made, {name: a.ctypes.data for name, a in held.items()})
    mode = walk.squeeze_mode(s, problem.squeeze)
    means = held["means"] if mode == 2 else held["sums"].sum(1) / np.prod(problem.out_size)
    return held["output"][..., :out], means if mode else want.mean((1, 2)), want


def spread(image: np.ndarray, pitch: int) -> np.ndarray:
    """The NHWC image with ``pitch`` elements per pixel (0: its channels); those that no channel has are NaN."""
    more = max(0, pitch - image.shape[3])
    return np.pad(image, ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=np.nan)


@needs_compiler
@pytest.mark.parametrize(
    "name",
    sweep(CASES, "parts, squeeze", "stride 2, half a slab", "18 channels in 24", "depthwise 5x5, two below"),
)
def test_kernels_compute_convolutions_and_means(name: str, tmp_path: Path) -> None:
    family, problem, config = CASES[name]
    assert family.refuse(problem, config) is None
    made, means, want = result_and_means(family, problem, config, tmp_path)
    np.testing.assert_allclose(made, want, rtol=0, atol=1e-3 * np.abs(want).max())
    np.testing.assert_allclose(means, want.mean((1, 2)), rtol=0, atol=1e-3)


G, GC = CASES["five groups"][1:]
D, DC = CASES["depthwise 5x5, two below"][1:]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ((grouped, replace(G, dtype="float32"), GC), "16-bit images"),
        ((grouped, replace(G, bands=1), GC), "not multiples of 8"),
        ((grouped, G, replace(GC, strip_w=5)), "not a tile"),
        ((grouped, replace(G, source=same(9, 18, 64), bands=4), GC), "not bands of 2"),
        ((grouped, G, replace(GC, strips=8, blocks=4)), "registers per thread"),
        (
            narrow_case(1, same(80, 80, 32), 32, grouped.Config(7, 16, 2, 1, 1, 4, 2, 2), ("silu",), ("add",)),
            "about 262 registers",  # without the residual it fits
        ),
        ((grouped, G, replace(GC, chunks=12)), "same banks"),
        ((grouped, G, replace(GC, stages=1)), "not a ring"),
        (
            (grouped, G, replace(GC, stages=8, blocks=4, grid_x=1, grid_y=1, strips=7, strip_w=16)),
            "too many for 4 blocks",
        ),
        ((grouped, replace(G, source=same(400, 400, 40, (3, 3), dilation=(130, 1))), GC), "exceeds a TMA box"),
        ((grouped, replace(G, batch=1 << 30), GC), "more tiles"),
        ((grouped, replace(G, source=Source(2, 2, 40, (3, 3))), GC), "non-empty images"),
        ((depthwise_bands, replace(D, dtype="int8"), DC), "16-bit images in and out"),
        ((depthwise_bands, replace(D, source=same(17, 20, 40, (5, 11))), DC), "9 columns"),
        ((depthwise_bands, D, replace(DC, groups=4)), "not a tile of a warp"),
        ((depthwise_bands, D, replace(DC, grid_x=4, grid_y=2)), "registers per thread"),
    ],
)
def test_refused(case: Case, reason: str) -> None:
    family, problem, config = case
    assert grouped.refuse(G, GC) is None
    assert depthwise_bands.refuse(D, DC) is None
    assert reason in (family.refuse(problem, config) or "")
    assert "capability 8.0" in (family.refuse(problem, config, capability=(8, 0)) or "")


@pytest.mark.parametrize("case", [CASES["five groups"], CASES["depthwise 5x5, two below"]], ids=["groups", "depthwise"])
def test_candidates_can_run_and_are_ranked(case: Case) -> None:
    family, problem, _ = case
    found = family.candidates(problem, HOPPER)
    assert len(found) > 4
    assert all(family.refuse(problem, c) is None for c in found)
    seconds = [family.estimate(problem, c, HOPPER) for c in found]
    assert seconds == sorted(seconds)
    assert family.candidates(problem, of_arch("sm_80")) == []
    if family is depthwise_bands:
        assert family.candidates(replace(problem, source=same(17, 20, 40)), HOPPER) == []


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3, 5, 7, 9])
def test_lanes_that_read_together_read_different_banks(rows: int, width: int) -> None:
    problem = depthwise.Problem(1, same(64, 64, 64, (3, width)))
    for chunks in (2, 3, 4, 5, 7, 8):
        walk = depthwise_bands.walk(problem, depthwise_bands.Config(rows, 4, 4, 1, 1, 1, chunks, 2))
        _, columns = walk.patch(problem.source)
        for quarter in (0, 2, 4, 6):
            at = {  # eight lanes each: two rows of A, four pixels each
                ((row % 4 * rows * columns + quad) * chunks * 16, 5)
                for row in (quarter, quarter + 1)
                for quad in range(4)
            }
            mask = (chunks - 1) << 4 if chunks in (2, 4, 8) else 0
            assert len({(byte ^ (byte >> 3 & mask)) % 128 for byte, _ in at}) == 8


def test_the_fewest_groups_with_channels_in_eights_are_taken_together() -> None:
    assert together(32, 8) == together(32, 24) == 1
    assert together(32, 4) == 2
    assert together(30, 12) == 2
    assert together(2, 4) is None
    assert together(9, 4) is None


def net(group: int, channels: int = 64, squeeze: bool = False, dtype: Any = np.float32) -> Graph:
    """A grouped convolution with bias and ReLU between two others, optionally with a squeeze of its result."""
    n = Net(dtype)
    x = n.op("Relu", n.conv(n.input(2, 8, 17, 18), channels, 1, pads=0))
    size = 5 if group == channels else 3
    y = n.op("Relu", n.conv(x, channels, size, pads=size // 2, group=group, bias=True))
    if squeeze:
        y = n.op("Mul", y, n.op("Sigmoid", n.conv(n.op("GlobalAveragePool", y), channels, 1, pads=0)))
    return n.done(n.conv(y, 16, 1, pads=0))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("group", "squeeze", "bands"), [(8, True, 8), (16, False, 8), (2, True, 2)])
def test_groups_with_their_means(
    group: int, squeeze: bool, bands: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupedConv, "defer", lambda *given: None)
    program = check_simulated(net(group, squeeze=squeeze), precision)
    kinds = [s.params["op"]["kind"] for s in program.steps if s.params["tactic"].startswith("conv_grouped_sm90")]
    assert kinds[0] == ("ConvSqueeze" if squeeze else "Conv")
    (attrs,) = (
        [s.params["op"]["attrs"] for s in program.steps if s.params["op"]["kind"] == kinds[0]][:1]
        if squeeze
        else [{"group": bands}]
    )
    assert attrs["group"] == bands


def test_zeros_that_cost_less_are_left_to_the_bands() -> None:
    program = check_simulated(net(2, 128), "fp16")
    row = [t for t in program.meta["tactics"] if t["kind"] == "Conv"][1]
    assert row["tactic"] == "conv_bands_sm90"
    assert any(r["tactic"] == "conv_grouped_sm90" and "predicted" in r["reason"] for r in row["refused"])


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["parts, squeeze", "stride 2, half a slab", "few channels, residual", "depthwise 3x3"])
def test_kernels_compile_without_spills(name: str) -> None:
    family, problem, config = CASES[name]
    (kernel,) = nvrtc.resources(trapping(family.recipe(problem, config))).values()
    assert kernel.spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize(("group", "squeeze"), [(8, True), (8, False), (2, True), (64, True), (64, False)])
def test_every_configuration_on_a_gpu_agrees_with_its_meaning(group: int, squeeze: bool) -> None:
    graph = net(group, squeeze=squeeze)
    facts = facts_for(TargetName.parse("cuda:sm_90a"))
    plain = lowered(graph, "fp16", "cuda:sm_90a")
    key = next(t["signature"] for t in plain.meta["tactics"] if any(n == "Conv_3" for n in t["nodes"]))
    problem: Any = depthwise.Problem(2, same(17, 18, 64, (5, 5)), STAGES, squeeze=squeeze)
    found: list[Any] = depthwise_bands.candidates(problem, facts, 8)
    name = TiledDepthwise.name
    if group < 64:
        found, name = (
            grouped.candidates(grouped.Problem(2, same(17, 18, 64), group, STAGES, squeeze=squeeze), facts, 8),
            GroupedConv.name,
        )
    for config in found:
        program = lowered(graph, "fp16", "cuda:sm_90a", choices={key: TacticChoice(name, str(config))})
        assert max(launch_errors(program, graph, "Conv", "ConvSqueeze")) < 2e-3, str(config)
