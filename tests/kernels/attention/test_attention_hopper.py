"""Hopper's attention kernel: its candidates compile without spills, and compute attention on a GPU, persistent or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.attention_cases import Case, apart, merged, result_on_a_gpu, wide_values
from support.covering import covering
from support.layout import check_pointers
from support.spills import check_spills
from support.sweep import every

from optdnn.kernels.attention import hopper_config
from optdnn.kernels.attention import hopper_kernel as hopper
from optdnn.kernels.attention.hopper_config import Config
from optdnn.kernels.attention.problem import Problem
from optdnn.runtime.cuda import gpu_facts

H200 = gpu_facts.named("h200")
PROBLEMS: dict[str, Problem] = {
    "ViT": merged(32, 12, 197, 64),
    "DINOv2": merged(16, 12, 257, 64, dtype="bfloat16"),
    "BERT": merged(32, 12, 128, 64, mask=(128, 0, 0)),
    "causal": merged(2, 32, 700, 128, causal=True, dtype="bfloat16"),
    "causal, small heads": merged(16, 14, 333, 32, causal=True),
    "lengths": merged(64, 6, 130, 48, lengths=True),
    "causal, lengths": merged(64, 6, 130, 64, causal=True, lengths=True),
    "causal, some see nothing": apart(40, 8, 90, 70, 40, causal=True, causal_offset=-30),
    "causal from the end": merged(64, 6, 130, 64, causal=True, lengths=True, from_end=True),
    "causal from the end of a cache": apart(12, 8, 150, 700, 128, 2, causal=True, lengths=True, from_end=True),
    "heads of 80": merged(9, 18, 100, 80, mask=(0, 100 * 100, 100)),
    "grouped": apart(40, 4, 70, 333, 64, 2, mask=(0, 0, 333)),
    "a window of both sides": merged(8, 6, 512, 64, causal=True, causal_offset=64, reach=128),
    "a narrow window": merged(40, 4, 333, 32, causal=True, reach=5),
    "a window before a position": merged(20, 4, 700, 128, reach=130, dtype="bfloat16"),
    "a window and a mask": merged(9, 18, 333, 64, reach=40, causal=True, mask=(0, 0, 333)),
    "a window from the end of a cache": apart(
        12, 8, 150, 700, 64, 2, causal=True, lengths=True, from_end=True, reach=90
    ),
    "softcap": merged(20, 8, 333, 64, softcap=1.5),
    "softcap and a mask": merged(20, 8, 333, 64, softcap=0.8, mask=(0, 0, 333)),
    "softcap and a window": merged(4, 8, 700, 128, causal=True, reach=130, softcap=30.0, dtype="bfloat16"),
    "sinks": merged(20, 10, 333, 64, causal=True, sinks=True),
    "sinks and a window": merged(4, 8, 700, 128, causal=True, reach=130, sinks=True, dtype="bfloat16"),
    "sinks and a mask of each query": merged(9, 18, 333, 64, mask=(0, 0, 333), sinks=True),
    "sinks, some see nothing": apart(40, 8, 90, 70, 40, causal=True, causal_offset=-30, sinks=True),
    "sinks, from the end of a cache": apart(
        12, 8, 150, 700, 64, 2, causal=True, lengths=True, from_end=True, softcap=9.0, sinks=True
    ),
    "bytes": merged(20, 12, 197, 64, narrow="int8"),
    "wide values": wide_values(40, 4, 196, 16, 64),
    "wide values that share no subtile": wide_values(9, 4, 49, 24, 80, dtype="bfloat16"),
    "narrow values": wide_values(20, 8, 196, 64, 16, mask=(0, 196 * 196, 196)),
    "heads of 256": merged(9, 5, 700, 256),
    "heads of 256, causal, softcap": merged(6, 8, 333, 256, causal=True, softcap=30.0, dtype="bfloat16"),
    "heads of 256, a window": apart(6, 8, 333, 700, 256, 2, causal=True, lengths=True, from_end=True, reach=130),
    "heads of 256, a mask of each query": merged(9, 8, 333, 256, mask=(0, 0, 333), sinks=True),
    "heads of 256, bytes": merged(20, 12, 197, 256, narrow="int8"),
    "heads of 160": merged(9, 12, 333, 160, mask=(333, 0, 0)),
    "heads of 192, some see nothing": apart(40, 8, 90, 70, 192, causal=True, causal_offset=-30),
    "values of 256": wide_values(20, 8, 196, 64, 256),
}


def configurations(problem: Problem) -> list[Config]:
    """The first candidates; and those that are persistent, or whose warpgroups alternate, with tiles of 64 or 128 keys."""
    found = hopper.candidates(problem, H200, limit=1000)
    return [c for k, c in enumerate(found) if k < 4 or ((c.persistent or c.turns) and c.keys in (64, 128))]


LAUNCHES: dict[str, tuple[Problem, Config]] = {
    f"{name}, {config}": (problem, config) for name, problem in PROBLEMS.items() for config in configurations(problem)
}
FEW = dict(list(LAUNCHES.items())[::40])
SPLIT_PROBLEMS: dict[str, Problem] = {
    "ViT": merged(1, 12, 197, 64),
    "of 384 x 384 pictures": merged(1, 12, 577, 64, dtype="bfloat16"),
    "heads of 80": merged(1, 5, 577, 80),
    "wide heads": apart(1, 8, 64, 700, 128),
    "BERT": merged(2, 12, 128, 64, mask=(128, 0, 0)),
    "a mask of each query": merged(1, 12, 333, 32, mask=(0, 0, 333)),
    "lengths": merged(5, 6, 230, 48, lengths=True),
    "causal, lengths": merged(5, 6, 230, 64, causal=True, lengths=True),
    "causal, some see nothing": apart(2, 8, 90, 170, 40, causal=True, causal_offset=-30),
    "a window": merged(1, 6, 512, 64, causal=True, causal_offset=64, reach=128),
    "softcap": merged(1, 12, 333, 64, softcap=2.0, causal=True),
    "sinks": merged(1, 12, 333, 64, sinks=True),
    "sinks and a window": merged(1, 6, 512, 64, causal=True, causal_offset=64, reach=128, sinks=True),
    "sinks, some see nothing": apart(2, 8, 90, 170, 40, causal=True, causal_offset=-30, sinks=True),
    "bytes": merged(1, 12, 197, 64, narrow="int8"),
    "wide values": wide_values(1, 4, 196, 16, 32),
    "heads of 160": merged(1, 4, 197, 160),
}


def split(problem: Problem) -> list[Config]:
    """The first split candidates of each number of warpgroups, and one whose ring is reused."""
    found = [c for c in hopper.candidates(problem, H200, limit=1000) if c.split]
    tiles = [-(-problem.keys // c.keys) for c in found]
    some = [next((c for c in found if c.warpgroups == n), None) for n in (2, 3, 4)]
    reused = next((c for c, n in zip(found, tiles, strict=True) if c.stages < n), None)
    return [c for c in (*some, reused) if c is not None]


SPLIT = {
    f"{name}, {c}": (problem, c) for name, problem in SPLIT_PROBLEMS.items() for c in dict.fromkeys(split(problem))
}
SHARING_PROBLEMS: dict[str, Problem] = {
    "16 queries": apart(1, 8, 16, 2000, 64),
    "a last block of one tile": apart(2, 3, 40, 1100, 64, dtype="bfloat16"),
    "two rows of queries": apart(1, 2, 100, 1500, 32),
    "wide heads of many keys": apart(1, 2, 33, 1200, 128),
    "a mask over many keys": apart(1, 3, 50, 1024, 64, mask=(1024, 0, 0)),
    "lengths of many keys": apart(4, 2, 20, 1024, 64, lengths=True),
    "causal, many keys, some queries see nothing": apart(1, 2, 300, 1024, 64, causal=True, causal_offset=-20),
    "a window in many keys": apart(1, 2, 128, 1024, 64, causal=True, causal_offset=800, reach=200),
    "sinks beside many keys": apart(1, 4, 8, 1024, 64, sinks=True),
    "bytes of many keys": apart(1, 4, 30, 1024, 64, narrow="int8"),
}


def sharing(problem: Problem) -> list[Config]:
    """The first candidates of each number of blocks in a cluster, and one without a loading warp."""
    found = [c for c in hopper.candidates(problem, H200, limit=1000) if c.sharers > 1]
    some = [next((c for c in found if c.sharers == n), None) for n in (2, 4, 8)]
    whole = next((c for c in found if not hopper_config.loader(problem, c)), None)
    return [c for c in (*some, whole) if c is not None]


SHARING = {
    f"{name}, {c}": (problem, c) for name, problem in SHARING_PROBLEMS.items() for c in dict.fromkeys(sharing(problem))
}
SPLIT |= SHARING
FEW |= dict(list(SPLIT.items())[::12])
TILED_PROBLEMS: dict[str, Problem] = {
    "a tiled mask": merged(9, 18, 336, 64, mask=(0, 0, 336)),
    "of each head": merged(40, 4, 333, 32, mask=(0, 333 * 336, 336), dtype="bfloat16"),
    "of each sample, causal": merged(16, 14, 328, 48, mask=(328 * 328, 0, 328), causal=True),
    "of windows": merged(64, 8, 49, 32, mask=(8 * 49 * 56, 49 * 56, 56), mask_period=4),
    "of heads of 128, lengths": merged(9, 16, 264, 128, mask=(0, 0, 264), lengths=True),
    "of heads of 256, sinks": merged(9, 8, 336, 256, mask=(0, 0, 336), sinks=True),
    "with a window and a softcap": merged(9, 18, 336, 64, mask=(0, 336 * 336, 336), reach=40, causal=True, softcap=0.8),
    "bytes": merged(20, 12, 200, 64, mask=(0, 0, 200), narrow="int8"),
    "of few queries": merged(1, 12, 577, 64, mask=(0, 577 * 584, 584)),
    "of queries that blocks share": apart(1, 3, 50, 1024, 64, mask=(0, 0, 1024)),
}


def tiled(problem: Problem) -> list[Config]:
    """Candidates of each form: the first one, and the first ones with further tiles and stages."""
    found = [c for c in hopper.candidates(problem, H200, limit=1000) if c.tiled]
    forms: dict[Any, Config] = {}
    for c in found:
        forms.setdefault((c.warpgroups, c.persistent, c.turns, c.split, c.sharers), c)
        forms.setdefault((c.keys, c.stages), c)
    return list(dict.fromkeys(forms.values()))


TILED = {
    f"{name}, {c}": (problem, c)
    for name, given in TILED_PROBLEMS.items()
    for problem in [replace(given, mask_aligned=True)]
    for c in tiled(problem)
}
FEW_TILED = dict(list(TILED.items())[::12])
GROWING = {name: x for name, x in list((LAUNCHES | SPLIT | TILED).items())[::7] if x[0].keys > x[1].keys}


def test_persistent_blocks_are_as_many_as_run_at_a_time() -> None:
    problem, config = merged(16, 12, 257, 64), Config(3, 128, 2, 1, True)
    made = hopper.launch(problem, config, H200)
    assert str(config) == "attn3n128s2b1p"
    assert (hopper_config.row_items(problem, config), made.grid, made.block) == (2, (132, 1, 1), 512)
    assert hopper.launch(merged(1, 12, 257, 64), config, H200).grid == (24, 1, 1)
    assert hopper_config.shared_bytes(problem, config) == 1024 + 128 * (2 * 192 + 2 * 2 * 128)


def test_wide_heads_have_one_buffer_of_queries() -> None:
    config = Config(2, 80, 2, 1, True, True)
    problem = merged(16, 1, 4096, 256)
    assert hopper.candidates(problem, H200)[0] == config
    assert hopper_config.query_places(problem, config) == 1
    assert hopper_config.shared_bytes(problem, config) == 1024 + 512 * (128 + 2 * 2 * 80) == 230400
    assert hopper_config.query_places(merged(16, 1, 4096, 128), config) == 2
    assert [merged(1, 1, 64, n).head for n in (120, 136, 192, 200, 256)] == [128, 192, 192, 256, 256]
    assert (
        hopper.refuse(merged(1, 1, 64, 264), Config(1, 64, 1))
        == "heads of 264 features (a multiple of 8 up to 256 is needed)"
    )


def test_wide_heads_need_registers() -> None:
    wide = merged(16, 8, 700, 192)
    assert hopper.refuse(wide, Config(3, 48, 2, 1, True)) == "scores and results of a thread exceed 160 registers"
    assert hopper.refuse(wide, Config(3, 16, 2, 1, True)) == (
        "a product of 192 columns does not compile for threads that start with 128 registers"
    )
    assert (
        hopper.refuse(merged(16, 8, 700, 256), Config(1, 112, 1))
        == "scores and results of a thread exceed 255 registers"
    )
    assert hopper.refuse(merged(16, 8, 700, 256), Config(1, 96, 1)) is None


def test_a_loading_warpgroup_gives_registers_to_the_others() -> None:
    problem = merged(16, 12, 257, 64)
    assert hopper_config.register_limit(problem, Config(3, 128, 2, 1, True)) == 160
    assert hopper_config.register_limit(problem, Config(2, 128, 2, 1, True)) == 240
    assert hopper_config.register_limit(problem, Config(1, 64, 2, 2, True)) == 232
    assert hopper.refuse(problem, Config(3, 176, 2, 1, True)) == "scores and results of a thread exceed 160 registers"
    refused = hopper.refuse(merged(16, 12, 257, 32), Config(1, 112, 3, 3, True))
    assert refused == "a product of 112 columns does not compile for threads that start with 80 registers"
    wide = hopper.refuse(merged(4, 8, 700, 128, reach=130), Config(1, 32, 2, 3, True))
    assert wide == "a product of 128 columns does not compile for threads that start with 80 registers"


def test_turns_are_of_several_warpgroups_and_tiles() -> None:
    found = hopper.candidates(merged(16, 12, 512, 64), H200, limit=1000)
    assert any(c.turns for c in found)
    assert all(c.warpgroups > 1 for c in found if c.turns)
    assert str(Config(3, 128, 2, 1, True, True)) == "attn3n128s2b1pt"
    one = "turns need several warpgroups and several tiles"
    assert hopper.refuse(merged(16, 12, 512, 64), Config(1, 64, 2, turns=True)) == one
    assert hopper.refuse(merged(16, 12, 64, 64), Config(2, 64, 1, turns=True)) == one


def test_warpgroups_share_the_keys_of_few_queries() -> None:
    few, many = merged(1, 12, 576, 64), merged(16, 12, 576, 64)
    first = hopper.candidates(few, H200)[0]
    assert first.split
    assert not any(c.split for c in hopper.candidates(many, H200, limit=1000))
    config = Config(3, 96, 6, split=True)
    assert (str(config), config.queries, config.own_tiles(6)) == ("attn3n96s6b1k", 64, 2)
    assert hopper.launch(few, config, H200).grid == (9, 12, 1)
    assert hopper.order_of_sums(config) != hopper.order_of_sums(replace(config, split=False))
    whole = replace(config, warpgroups=1, split=False, stages=2)
    assert hopper.estimate(few, config, H200) < hopper.estimate(few, whole, H200)
    # Results of the other warpgroups need more space than the ring: 64 x 64 results of three warpgroups, their maxima and sums.
    assert (
        hopper_config.shared_bytes(merged(1, 12, 128, 64), Config(4, 32, 4, split=True))
        == 1024 + 64 * 128 + 3 * 9 * 2048
    )


def test_blocks_of_a_cluster_share_the_keys_of_few_queries() -> None:
    few = apart(1, 8, 16, 16384, 64)
    first = hopper.candidates(few, H200)[0]
    assert (first.split, first.sharers) == (True, 8)
    assert {c.sharers for c in hopper.candidates(few, H200, limit=1000)} == {1, 2, 4, 8}
    assert {c.sharers for c in hopper.candidates(apart(1, 8, 512, 16384, 64), H200, limit=1000)} == {1, 2}
    assert {c.sharers for c in hopper.candidates(apart(1, 8, 16, 96, 64), H200, limit=1000)} == {1}
    config = Config(2, 128, 4, split=True, sharers=8)
    assert (str(config), config.block_tiles(128), config.own_tiles(128)) == ("attn2n128s4b1kc8", 16, 8)
    made = hopper.launch(few, config, H200)
    assert (made.grid, made.cluster) == ((8, 8, 1), 8)
    assert hopper.order_of_sums(config) != hopper.order_of_sums(replace(config, sharers=4))
    assert hopper.estimate(few, config, H200) < hopper.estimate(few, replace(config, sharers=2), H200)


@pytest.mark.parametrize(
    ("config", "because"),
    [
        (Config(2, 64, 2, sharers=2), "blocks share queries whose warpgroups share them, too"),
        (Config(2, 64, 2, split=True, sharers=3), "3 blocks do not form a cluster"),
        (Config(2, 144, 2, split=True, sharers=8), "4 tiles of keys for 8 blocks"),
        (Config(4, 112, 3, split=True, sharers=2), "3 tiles of keys for 4 warpgroups"),
        (
            Config(1, 64, 2, split=True),
            "warpgroups that share keys need several warpgroups, one item per block and no turns",
        ),
        (
            Config(2, 64, 2, 1, True, split=True),
            "warpgroups that share keys need several warpgroups, one item per block and no turns",
        ),
        (
            Config(2, 64, 2, turns=True, split=True),
            "warpgroups that share keys need several warpgroups, one item per block and no turns",
        ),
        (Config(4, 64, 2, split=True, sharers=4), "9 tiles of keys for 4 blocks"),
        (Config(4, 192, 3, split=True), "3 tiles of keys for 4 warpgroups"),
        (Config(2, 64, 3, split=True), "3 stages, which 2 warpgroups do not share evenly"),
    ],
)
def test_split_blocks_that_are_refused(config: Config, because: str) -> None:
    assert hopper.refuse(merged(1, 12, 576, 64), config) == because
    assert hopper.refuse(merged(1, 12, 576, 64), Config(3, 96, 6, split=True)) is None


def test_a_sink_needs_registers() -> None:
    """This configuration would spill."""
    plain = apart(12, 8, 150, 700, 128, 2, causal=True, lengths=True, from_end=True)
    config = Config(3, 48, 3, turns=True)
    assert hopper.refuse(plain, config) is None
    assert hopper.refuse(replace(plain, sinks=True), config) == "scores and results of a thread exceed 128 registers"


def test_sums_of_warpgroups_need_registers() -> None:
    problem = apart(1, 8, 64, 700, 128)
    refused = hopper.refuse(problem, Config(3, 48, 6, split=True))
    assert refused == "scores and results of a thread exceed 128 registers"
    assert hopper.refuse(problem, Config(2, 48, 4, split=True)) is None


def test_endless_softcaps_are_refused() -> None:
    assert hopper.refuse(merged(1, 2, 90, 64, softcap=float("inf")), Config(1, 64, 1)) == "a softcap of inf"


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "name", every(2, covering({k: hopper.launch(*f, H200).recipe for k, f in (FEW | FEW_TILED).items()}))
)
def test_candidates_compile_without_spills(name: str) -> None:
    problem, config = (FEW | FEW_TILED)[name]
    made = hopper.launch(problem, config, H200)
    kernel = check_spills(made.recipe, made.function)
    if config.persistent:  # otherwise setmaxnreg would wait for ever for registers that the block does not have
        assert kernel.registers == min(
            hopper_config.start_registers(config), hopper_config.register_limit(problem, config)
        )
    else:
        assert kernel.registers <= hopper_config.register_limit(problem, config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_parameter_block_has_the_kernels_layout(softcap: float) -> None:
    problem = merged(2, 4, 128, 64, mask=(128, 0, 0), lengths=True, softcap=softcap, sinks=True)
    made = hopper.launch(problem, Config(1, 64, 2), H200)
    assert {p.operand for p in made.pointers} == {"mask", "lengths", "sinks"}
    check_pointers(made, {})


@pytest.mark.hopper
@pytest.mark.parametrize("name", LAUNCHES | SPLIT | TILED)
def test_on_a_gpu(name: str, tmp_path: Any) -> None:
    problem, config = (LAUNCHES | SPLIT | TILED)[name]
    check(Case(problem), config, tmp_path)


@pytest.mark.hopper
@pytest.mark.parametrize("name", GROWING)
def test_maxima_that_grow_on_a_gpu(name: str, tmp_path: Any) -> None:
    """Weights exceed the range of 16 bits, some also that of the exponential function, so tiles are multiplied again."""
    problem, config = GROWING[name]
    check(Case(problem, growing=True), config, tmp_path)


def check(case: Case, config: Config, folder: Any) -> None:
    made = hopper.launch(case.problem, config, H200, case.narrow)
    case.check(result_on_a_gpu(made, case.operands, case.poisoned(), 32 * case.out_dtype.itemsize, folder))
