"""Plans of the convolution kernels without a GPU: shapes, packing, refusals, candidates, the parameter block."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.conv_cases import ADD, CASES, RELU, convolve, plain_launch, same
from support.layout import compile_checks

from optdnn.errors import InternalError
from optdnn.kernels.conv import configs, cost, product_cost
from optdnn.kernels.conv import general_kernel as conv_general
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv.general_kernel import GeneralConfig
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.patch_kernel import PatchConfig
from optdnn.kernels.conv.problem import Depth, Problem, Source
from optdnn.kernels.conv.space_to_depth import space_to_depth, space_to_depth_weights
from optdnn.runtime.cuda.compile import nvrtc, render
from optdnn.runtime.cuda.gpu_facts import of_arch

DEVICE = of_arch("sm_90a")


@pytest.mark.parametrize(
    "source",
    [
        Source(12, 10, 3, (7, 7), (2, 2), (3, 3, 3, 3)),
        Source(11, 13, 3, (3, 3), (2, 2), (1, 1, 1, 1)),
        Source(12, 12, 3, (3, 3), (2, 2), (0, 0, 1, 1)),
        Source(9, 8, 3, (3, 3), (1, 1), (1, 1, 1, 1)),
        Source(16, 16, 3, (4, 4), (4, 4)),
        Source(15, 14, 1, (5, 5), (3, 3), (2, 1, 2, 1)),
    ],
)
def test_space_to_depth_is_the_same_convolution(source: Source) -> None:
    rng = np.random.default_rng(0)
    image = rng.standard_normal((2, source.height, source.width, source.channels))
    weight = rng.standard_normal((5, source.channels, *source.kernel))
    made, stride = space_to_depth(source), source.stride[0]
    moved = np.zeros((2, made.height, stride, made.width, stride, source.channels))
    moved.reshape(2, made.height * stride, made.width * stride, -1)[:, : source.height, : source.width] = image
    deep = np.zeros((2, made.height, made.width, made.channels))
    deep[..., : stride * stride * source.channels] = moved.transpose(0, 1, 3, 2, 4, 5).reshape(
        2, made.height, made.width, -1
    )
    packed = space_to_depth_weights(source, weight)
    assert made.output() == source.output()
    assert np.count_nonzero(packed) == weight.size
    np.testing.assert_allclose(convolve(deep, packed, made), convolve(image, weight, source), atol=1e-12)


def test_refusals_of_space_to_depth() -> None:
    with pytest.raises(InternalError, match="equal strides"):
        space_to_depth(Source(8, 8, 3, (3, 3), (2, 1)))


def test_weights_lie_in_the_order_the_kernel_walks_k() -> None:
    sources = (same(6, 6, 72), Source(12, 12, 128, (1, 1), (2, 2)))
    problem = Problem(1, 8, sources, RELU)
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((8, s.channels, *s.kernel)) for s in sources]
    packed = conv_params.pack_weights(problem, weights)
    assert packed.shape == (8, problem.k_steps * problem.block) == (8, (9 * 2 + 2) * 64)
    step = 0
    for source, weight in zip(sources, weights, strict=True):
        for r in range(source.kernel[0]):
            for s in range(source.kernel[1]):
                for block in range(-(-source.channels // 64)):
                    part = weight[:, block * 64 : (block + 1) * 64, r, s]
                    columns = packed[:, step * 64 : (step + 1) * 64]
                    np.testing.assert_array_equal(columns[:, : part.shape[1]], part)
                    assert not columns[:, part.shape[1] :].any()
                    step += 1
    assert step == problem.k_steps


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["stream-K, one tile", "patch"])
def test_the_parameter_block_has_the_kernels_layout(name: str) -> None:
    problem, config = CASES[name]
    (source,) = problem.sources
    made = plain_launch(
        problem, config, DEVICE, [np.zeros((problem.channels, source.channels, *source.kernel), np.float16)]
    )
    fields = {
        "weights": 0, "pixels0": 128, "pixels1": 256, "output": 384, "residual": 512, "channel": 640, "output_pointer": 648,
        "residual_pointer": 656, "channels": 664, "k_steps": 688, "source": 696, "scatter": 768, "requantize": 808,
        "before": 880, "partial": 912, "ahead[0]": conv_params.AHEAD[0], "ahead[1]": conv_params.AHEAD[1],
        "band_inputs": 972, "output_pitch": 976, "residual_pitch": 980,
    }  # fmt: skip
    compile_checks(made, fields, f"sizeof(Params) == {len(made.parameters)}")
    places = {p.operand: p.at for p in made.pointers}
    assert places["channel"] == fields["channel"]
    assert places["output"] == fields["output_pointer"]
    assert places.get("partial", 912) == fields["partial"]
    assert int.from_bytes(made.parameters[688:692], "little") == problem.k_steps
    assert struct.unpack_from("<3i", made.parameters, 972) == (source.channels, problem.channels, problem.channels)


@pytest.mark.nvrtc
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("name", ["1x1m1n256s2k2b1", "2x1m1n136s2k2b1", "1x1m1n104s8k3b1"])
def test_tiles_that_share_k_compile_without_spills(name: str, moments: bool) -> None:
    """Large ones finish a block of results at a time, small ones several (DirectStore)."""
    problem = Problem(8, 256, (Source(14, 14, 1024, (1, 1)),), ADD, moments=moments)
    config = Config.read(name)
    assert config is not None
    assert conv.refuse(problem, config) is None
    assert nvrtc.resources(conv.recipe(problem, config))["conv_sm90"].spill_bytes == 0


P = Problem(4, 128, (same(14, 14, 128),), RELU)
PAIRS = Problem(4, 64, (replace(same(14, 14, 64), depth=Depth(8, 8, 3, 1, -1, together=2)),), RELU)
"""A problem with two frames together."""


@pytest.mark.parametrize("config", [PatchConfig(2, 1, 4, 14, 2, 4), PatchConfig(1, 1, 4, 14, 2, 4, direct=True)])
def test_frames_that_share_a_tile_are_stored_from_shared_memory(config: PatchConfig) -> None:
    assert conv_patch.refuse(PAIRS, PatchConfig(1, 1, 4, 14, 2, 4)) is None
    assert "several frames as one image" in str(conv_patch.refuse(PAIRS, config))


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P, Config(1, 1, 1, 12, 3), "not a tile"),
        (PAIRS, Config(1, 1, 1, 64, 3), "only the patch kernel joins"),
        (P, Config(2, 2, 1, 64, 3), "not a tile"),
        (P, Config(2, 1, 1, 128, 2, blocks=2), "accumulators and addresses exceed"),
        (P, Config(2, 1, 2, 168, 2), "more than 160 accumulators"),
        (P, Config(1, 1, 2, 136, 2), "128 accumulators"),
        (P, Config(1, 1, 1, 64, 3, 17), "cannot be split"),
        (Problem(1, 64, (Source(8, 8, 64),), RELU), Config(1, 1, 1, 64, 2, 2), "cannot be split"),
        (P, Config(1, 1, 1, 64, 1), "one stage holds one K step"),
        (P, Config(1, 1, 1, 64, 30), "too many stages"),
        (
            replace(P, scatter=True, epilogue=(("bias",), ("add",))),
            Config(1, 1, 1, 64, 3),
            "nothing is added to blocks of pixels",
        ),
        (P, Config(2, 1, 1, 256, 5), "bytes of shared memory"),
        (P, Config(2, 1, 1, 128, 4, blocks=2), "does not allow that many blocks"),
        (P, Config(2, 1, 1, 192, 2, blocks=2), "that many blocks|exceed 10"),
        (P, Config(1, 1, 1, 136, 2, direct=True), "direct stores are for small tiles"),
        (P, Config(2, 1, 1, 64, 2, alternate=True), "alternating warpgroups need a block"),
        (P, Config(1, 1, 1, 64, 2, alternate=True, direct=True), "alternating warpgroups need a block"),
        (P, Config(1, 1, 1, 64, 2, share=(2, 2)), "not a cluster"),
        (replace(P, dtype="int8"), Config(1, 1, 2, 96, 4, share=(2, 1)), "have not been measured"),
        (replace(P, dtype="int8"), Config(1, 1, 1, 96, 4, stream=True), "have not been measured"),
        (P, Config(1, 1, 1, 72, 2, share=(2, 1)), "whole groups of eight rows"),
        (P, Config(1, 1, 1, 64, 2, 2, share=(2, 1)), "keep no weights"),
        (P, Config(1, 1, 1, 64, 2, stationary=True, share=(1, 2)), "keep no weights"),
        (P, Config(1, 1, 1, 64, 2, 2, stream=True), "stream-K is for single blocks"),
        (P, Config(1, 1, 1, 64, 2, direct=True, stream=True), "stream-K is for single blocks"),
        (P, Config(1, 1, 2, 96, 3, alternate=True, stream=True), "stream-K is for single blocks"),
        (P, Config(1, 1, 1, 64, 2, share=(2, 1), stream=True), "stream-K is for single blocks"),
        (
            replace(P, sources=(Source(14, 14, 64),), prologue=(("relu",),)),
            Config(1, 1, 1, 64, 2, stream=True),
            "whole tiles",
        ),
        (replace(P, out="float32"), Config(1, 1, 1, 64, 2, stream=True), "fp32 results"),
        (replace(P, sources=(same(14, 14, 16),)), Config(1, 2, 1, 8, 2, stream=True), "less than 16 bytes"),
        (
            Problem(1, 64, (Source(8, 8, 64),), RELU),
            Config(1, 1, 1, 64, 2, stream=True),
            "1 K steps in all are too few",
        ),
        (replace(P, batch=100_000), Config(1, 1, 1, 8, 2, stream=True), "too many to count"),
    ],
)
def test_refusals(problem: Problem, config: Config, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert (found := conv.refuse(problem, config)) is None, found


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P, PatchConfig(2, 2, 7, 14, 2, 4), "not a tile"),
        (replace(P, sources=(same(14, 14, 128, stride=2),)), PatchConfig(1, 1, 7, 7, 2, 4), "stride 1"),
        (replace(P, sources=(Source(14, 14, 64), Source(14, 14, 64))), PatchConfig(1, 1, 7, 14, 2, 4), "one source"),
        (P, PatchConfig(1, 1, 20, 14, 2, 4), "exceed wgmma's 256"),
        (P, PatchConfig(1, 1, 1, 255, 2, 4), "exceeds a TMA box"),
        (P, PatchConfig(2, 1, 14, 14, 4, 8), "bytes of shared memory"),
        (P, PatchConfig(2, 1, 12, 14, 1, 2, blocks=2), "registers|shared memory"),
        (P, PatchConfig(1, 1, 7, 14, 1, 1), "barrier cannot count"),
        (P, PatchConfig(1, 1, 9, 14, 1, 3, direct=True), "direct stores are for small tiles"),
        (P, PatchConfig(1, 1, 4, 14, 1, 3, split=3), "cannot be split 3 ways"),
        (replace(P, sources=(same(14, 14, 16),)), PatchConfig(1, 1, 1, 14, 1, 33), "too many stages"),
    ],
)
def test_patch_refusals(problem: Problem, config: PatchConfig, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert (found := conv_patch.refuse(problem, config)) is None, found


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(P, sources=(Source(14, 14, 64), Source(14, 14, 64))), GeneralConfig(64, 64, 3), "one source"),
        (replace(P, pooled=True), GeneralConfig(64, 64, 3), "neither scatters nor pools"),
        (P, GeneralConfig(96, 64, 3), "not a tile"),
        (P, GeneralConfig(128, 128, 7), "bytes of shared memory"),
        (P, GeneralConfig(64, 64, 3, 10), "36 K steps are too few for 10 blocks"),
    ],
)
def test_general_refusals(problem: Problem, config: GeneralConfig, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert (found := conv_general.refuse(problem, config)) is None, found
    with pytest.raises(InternalError, match=reason):
        conv_general.launch(problem, config, of_arch("sm_80"))


def test_groups_of_the_general_kernel_begin_at_sixteen_bytes() -> None:
    with pytest.raises(InternalError, match="groups of 12 channels do not begin"):
        conv_general.launch(replace(P, bands=2), GeneralConfig(64, 64, 3), of_arch("sm_80"), inside=12)


def test_parts_of_k_have_a_workspace_each() -> None:
    problem, config = replace(P, channels=136), GeneralConfig(64, 128, 4, 4)
    assert conv_general.grid(problem, config) == (-(-problem.pixels // 64), 2, 4)
    blocks = -(-problem.pixels // 64) * 2 * 4
    assert conv_general.workspace(problem, config) == (blocks * 64 * 128 * 4, blocks // 4 * 4)
    assert conv_general.workspace(problem, GeneralConfig(64, 128, 4)) == (0, 0)
    assert conv_general.launch(problem, config, of_arch("sm_80")).operands == (
        "pixels",
        "weights",
        "channel",
        "output",
        "partial",
        "arrived",
    )


def test_small_batches_share_k_and_large_ones_do_not() -> None:
    for batch, shared in ((1, True), (128, False)):
        problem = Problem(batch, 512, (same(7, 7, 512),), RELU)
        found = [c for c in conv_general.CONFIGS if conv_general.refuse(problem, c) is None]
        best = min(found, key=lambda c: conv_general.estimate(problem, c, of_arch("sm_80")))
        assert (best.split > 1) == shared, best


def test_general_weights_are_tap_by_tap() -> None:
    weight = np.random.default_rng(5).standard_normal((6, 40, 3, 2)).astype(np.float16)
    packed = conv_general.pack_weights(weight)
    assert packed.shape == (6, 6, 64)
    np.testing.assert_array_equal(packed[:, 3, :40], weight[:, :, 1, 1])
    assert not packed[..., 40:].any()


def test_a_problem_must_fit_tma() -> None:
    with pytest.raises(InternalError, match="multiples of 8"):
        Problem(1, 64, (Source(8, 8, 12),))
    with pytest.raises(InternalError, match="same output size"):
        Problem(1, 64, (Source(8, 8, 16), Source(9, 9, 16)))


@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_not_refused(name: str) -> None:
    problem, config = CASES[name]
    family = conv_patch if isinstance(config, PatchConfig) else conv
    assert family.refuse(problem, config) is None


@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_candidates_are_valid_and_distinct(batch: int) -> None:
    for source, channels in (
        (same(56, 56, 64), 64),
        (same(7, 7, 512), 512),
        (Source(14, 14, 1024), 256),
        (Source(1, 1, 2048), 1000),
    ):
        problem = Problem(batch, channels, (source,), ADD)
        found = configs.candidates(problem, DEVICE, 16)
        assert len(found) == len(set(found)) == 16
        assert all(conv.refuse(problem, config) is None for config in found)
        patches = conv_patch.candidates(problem, DEVICE)
        assert all(conv_patch.refuse(problem, config) is None for config in patches)
        assert bool(patches) == (source.kernel == (3, 3))
        assert all(Config.read(str(config)) == config for config in found)
        assert all(PatchConfig.read(str(config)) == config for config in patches)


def test_a_name_gives_the_configuration_and_no_other_text_does() -> None:
    problem = Problem(6304, 768, (Source(1, 1, 768),), (("bias",), ("gelu",)))
    found = [*configs.candidates(problem, DEVICE, 400), Config(1, 1, 1, 32, 4, 1, 1, True, 2)]
    assert {c.share for c in found} > {(1, 1)}
    assert {c.alternate for c in found} == {c.stationary for c in found} == {False, True}
    assert all(Config.read(str(config)) == config for config in found)
    for name in ("", "1x1m1n32", "1x1m1n32s4o1b2 ", "01x1m1n32s4o1b2", "patch1x1t4x4s1wo1b1", "1x1m1n32s4k4dw"):
        assert Config.read(name) is None
    for name in ("", "patch1x1t4x4s1b1", "patch1x1t4x4s1r0o1b1", "1x1m1n32s4o1b2"):
        assert PatchConfig.read(name) is None


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "stages", "tiles"),
    [
        (3152, 1536, 384, (("bias",), ("gelu",)), ["1x1m2n144s4o1b1a", "1x1m2n96s6o1b1a"]),
        (3152, 1152, 384, (("bias",),), ["1x1m2n112s5o1b1a", "1x1m2n120s5o1b1a", "1x1m2n128s5o1b1a"]),
        (1232, 512, 2048, ADD, ["1x1m1n80s12o1b1", "1x1m1n80s8o1b1a", "1x1m1n88s11o1b1", "1x1m1n88s8o1b1a"]),
        (197, 3072, 1024, (("bias",),), ["1x1m1n104s8o1b1c1x2", "1x1m1n104s8o1b1ac1x2"]),
        (2048, 768, 3072, ADD, ["2x1m1n104s6o1b1"]),
        (2048, 2304, 768, (("bias",),), ["2x1m1n152s5o1b1", "2x1m1n160s5o1b1", "1x1m2n160s4o1b1a"]),
        (257, 768, 3072, ADD, ["1x2m1n72s6k4b1", "1x1m1n56s12k2b1", "1x1m1n72s11k2b1"]),
        (257, 3072, 768, (("bias",), ("gelu",)), ["1x1m1n136s8o1b1c1x2", "1x1m1n136s7o1b1ac1x2"]),
        (197, 384, 1536, ADD, ["1x1m1n40s6k4b1", "1x1m1n40s6k4b2", "1x1m1n40s7k3b2"]),
        (197, 1024, 1024, ADD, ["1x1m1n40s12o1b1", "1x1m1n40s8o1b2"]),
        (197, 1024, 4096, ADD, ["1x1m1n104s8k3b1", "1x2m1n104s4k6b1"]),
        (128, 1024, 1024, ADD, ["1x1m1n32s8k2b1", "1x1m1n32s8k2b2"]),
        (128, 1024, 4096, ADD, ["1x1m1n128s7k6b1", "1x1m1n64s12k3b1"]),
        (256, 1024, 3584, ADD, ["1x1m1n64s12k2b1", "1x2m1n32s12k2b1"]),
        (580, 768, 3072, ADD, ["1x1m1n72s12o1b1"]),
        (580, 768, 768, ADD, ["1x1m1n72s12o1b1"]),
    ],
)
def test_products_use_fast_configurations(
    rows: int, columns: int, depth: int, stages: tuple[render.Stage, ...], tiles: list[str]
) -> None:
    """The model's first choice is among the configurations within some percent of the best one on an H200."""
    problem = Problem(rows, columns, (Source(1, 1, depth),), stages)
    assert product_cost.mid_size_product(problem)
    assert str(configs.candidates(problem, DEVICE, 1)[0]) in tiles


@pytest.mark.parametrize(
    ("channels", "size", "tiles"),
    [
        (192, 14, ["1x1m1n72s12o1b1", "1x2m1n72s6k2b1", "1x1m1n80s12o1b1"]),
        (48, 56, ["1x1m1n96s9o3wb1", "1x2m1n64s7o2wb1", "1x2m1n64s6o3wb1", "1x1m1n96s10o2wb1", "1x2m1n192s3o1b1"]),
    ],
)
def test_convolutions_use_fast_configurations(channels: int, size: int, tiles: list[str]) -> None:
    """RepVGG's two branches in one launch: deep rings, and no tiles of a few pixels."""
    sources = (Source(size, size, channels, (3, 3), (1, 1), (1, 1, 1, 1)), Source(size, size, channels))
    problem = Problem(16, channels, sources, (("bias",), ("relu",)))
    assert cost.fills(problem, DEVICE)
    assert not cost.fills(replace(problem, batch=1), DEVICE)
    assert not cost.fills(replace(problem, dtype="int8"), DEVICE)
    assert str(configs.candidates(problem, DEVICE, 1)[0]) in tiles


def test_a_last_wave_that_fills_all_multiprocessors_costs() -> None:
    """In GPT-2 at batch 16, 132 blocks of 96 rows took 2.2 us longer than 120 blocks of 104. In DeiT-S, with 384 features, they
    do not."""
    full, left = Config.read("2x1m1n96s7o1b1"), Config.read("2x1m1n104s6o1b1")
    assert full is not None
    assert left is not None
    wide = Problem(2048, 768, (Source(1, 1, 3072),), ADD)
    assert cost.estimate(wide, full, DEVICE) > 1.05 * cost.estimate(wide, left, DEVICE)
    narrow = replace(wide, sources=(Source(1, 1, 384),))
    assert cost.estimate(narrow, full, DEVICE) < 1.05 * cost.estimate(narrow, left, DEVICE)


def test_one_wave_of_small_blocks_is_lopsided(monkeypatch: pytest.MonkeyPatch) -> None:
    """132 blocks, two of which fit a multiprocessor, took 13.3 us in a network; predicted were 8.7. The model of products of up
    to 400 rows was fitted in networks."""
    small, alone = Config.read("1x1m1n56s7o1b2"), Config.read("1x1m1n72s12o1b1")
    assert small is not None
    assert alone is not None
    product = Problem(580, 768, (Source(1, 1, 3072),), ADD)
    assert cost.estimate(product, small, DEVICE) > 1.1 * cost.estimate(product, alone, DEVICE)
    few = replace(product, batch=400)
    times = [cost.estimate(p, small, DEVICE) for p in (product, few)]
    monkeypatch.setattr(product_cost, "LOPSIDED", 1.0)
    even = [cost.estimate(p, small, DEVICE) for p in (product, few)]
    assert times[0] == pytest.approx(1.3 * even[0])
    assert times[1] == even[1]


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 8},
        {"batch": 8192},
        {"dtype": "int8"},
        {"sources": (same(8, 8, 64),), "batch": 64},
        {"sources": (Source(14, 14, 1024),), "batch": 8},
        {"stack": (2, 1)},
        {"epilogue": (("bias",), ("mul",)), "beside": (("bias",),)},
    ],
    ids=str,
)
def test_other_problems_keep_the_other_model(change: dict[str, Any]) -> None:
    product = Problem(2048, 768, (Source(1, 1, 3072),), (("bias",),))
    assert product_cost.mid_size_product(product)
    assert not product_cost.mid_size_product(replace(product, **change))


def test_large_tiles_share_loads_of_neighbors_and_alternate() -> None:
    problem = Problem(6304, 768, (Source(1, 1, 768),), (("bias",), ("gelu",)))
    found = configs.candidates(problem, DEVICE, 400)
    assert {c.share for c in found} >= {(1, 1), (2, 1), (1, 2)}
    assert {c.alternate for c in found} == {False, True}
    assert all(conv.refuse(problem, c) is None for c in found)
    for config in found:
        channels, tiles = config.joint_tiles(problem)
        assert channels * config.share[0] * config.tile[0] >= 768
        assert tiles // channels * config.share[1] * config.tile[1] >= 6304
        blocks = conv.grid_blocks(problem, config, DEVICE)
        assert blocks % config.cluster == 0
        assert config.stores_directly or blocks <= DEVICE.multiprocessors * config.blocks
    small = Problem(200, 768, (Source(1, 1, 768),), RELU)
    assert all(c.sharers == 1 and not c.alternate for c in configs.candidates(small, DEVICE, 60))


def test_an_expensive_epilogue_is_hidden_where_tiles_alternate() -> None:
    problems = [Problem(6304, 3072, (Source(1, 1, 768),), (("bias",), *more)) for more in ((), (("gelu",),))]
    together, alternate = Config(2, 1, 2, 144, 3), Config(1, 1, 2, 144, 4, alternate=True)
    seconds = [[cost.estimate(p, c, DEVICE) for p in problems] for c in (together, alternate)]
    assert seconds[0][1] - seconds[0][0] > 5e-6
    assert seconds[1][1] - seconds[1][0] < 2e-6


def test_stream_k_takes_as_many_blocks_as_run_and_a_place_for_the_sums_of_each() -> None:
    problem, config = Problem(150, 256, (Source(8, 16, 512),), RELU), Config(2, 1, 1, 128, 4, stream=True)
    assert config.joint_tiles(problem) == (2, 300)
    assert conv.grid_blocks(problem, config, DEVICE) == 132
    assert conv.workspace(problem, config, DEVICE) == (132 * 128 * 128 * 4, 132 * 4)
    assert conv.workspace(problem, replace(config, stream=False), DEVICE) == (0, 0)
    few = replace(problem, batch=1, sources=(Source(8, 8, 256),))
    assert conv.grid_blocks(few, config, DEVICE) == 2 * 4 // conv.LEAST_SPAN
    assert str(config) != str(replace(config, stream=False))


def test_a_block_that_keeps_its_weights_keeps_its_channel_tile() -> None:
    problem = Problem(64, 448, (Source(28, 28, 64),), RELU)
    config = Config(1, 1, 1, 64, 3, stationary=True)
    assert conv.grid_blocks(problem, config, DEVICE) % 7 == 0
    assert conv.grid_blocks(problem, replace(config, stationary=False), DEVICE) == DEVICE.multiprocessors


def test_large_tiles_do_two_silus_at_once() -> None:
    problem = Problem(128, 96, (same(14, 14, 64, (1, 1)),), (("bias",), ("silu",)))
    for config, paired in ((Config(1, 2, 2, 56, 4), True), (Config(1, 1, 1, 8, 4), False)):
        text = conv.recipe(problem, config).generated["generated.cuh"]
        assert ("FINAL_SILU 1" in text) == paired
        assert ("__expf" in text) != paired
