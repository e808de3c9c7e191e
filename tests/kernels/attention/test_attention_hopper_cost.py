"""The cost model of Hopper's attention kernel follows measured times, and chooses the configurations that were the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.attention_cases import apart, merged

from optdnn.kernels.attention import hopper_cost
from optdnn.kernels.attention import hopper_kernel as hopper
from optdnn.kernels.attention.hopper_config import Config
from optdnn.kernels.attention.problem import Problem, bhsd
from optdnn.runtime.cuda import gpu_facts

H200 = gpu_facts.named("h200")


@pytest.mark.parametrize(
    ("heads", "tokens", "config", "measured"),
    [
        (12, 128, Config(1, 128, 1, 3), 2.60),
        (12, 128, Config(2, 128, 1, 1), 3.41),
        (12, 128, Config(2, 64, 2, 2, split=True), 2.64),
        (12, 197, Config(1, 208, 1, 2), 3.44),
        (12, 197, Config(2, 112, 2, split=True), 3.25),
        (12, 197, Config(4, 64, 4, split=True), 3.69),
        (12, 257, Config(2, 144, 2, turns=True), 4.94),
        (12, 257, Config(2, 144, 2, split=True), 3.63),
        (12, 257, Config(3, 48, 3, split=True), 5.20),
        (12, 576, Config(3, 96, 6, split=True), 5.42),
        (12, 576, Config(4, 48, 4, split=True), 10.0),
        (6, 577, Config(1, 208, 2), 6.16),
        (6, 577, Config(2, 208, 3, turns=True), 8.11),
        (6, 577, Config(2, 160, 4, split=True), 5.74),
    ],
)
def test_the_model_of_few_items_follows_measured_times(
    heads: int, tokens: int, config: Config, measured: float
) -> None:
    view = bhsd(tokens, heads, 64)
    problem = Problem(1, heads, tokens, tokens, 64, 0.1, view, view, view, view)
    assert hopper.estimate(problem, config, H200) * 1e6 == pytest.approx(measured, rel=0.2)


def test_the_busiest_of_few_items_decides() -> None:
    """In causal order, the last queries see all keys, while the multiprocessors of the others are idle."""
    config = Config(1, 64, 2)
    causal, whole = merged(1, 12, 128, 64, causal=True), merged(1, 12, 128, 64)
    assert hopper.estimate(causal, config, H200) == hopper.estimate(whole, config, H200)
    near = merged(1, 6, 512, 64, causal=True, causal_offset=64, reach=128)
    assert hopper.estimate(near, config, H200) < hopper.estimate(merged(1, 6, 512, 64), config, H200)


def test_first_choices_of_few_items() -> None:
    chosen = {
        tokens: str(hopper.candidates(merged(1, 12, tokens, 64), H200)[0]) for tokens in (49, 64, 128, 197, 257, 576)
    }
    assert chosen == {
        49: "attn1n64s1b4",
        64: "attn1n64s1b4",
        128: "attn1n128s1b3",
        197: "attn2n112s2b1k",
        257: "attn2n144s2b1k",
        576: "attn2n144s4b1k",
    }


@pytest.mark.parametrize(
    ("problem", "tiles"),
    [
        (merged(1, 1, 512, 64), 8),
        (merged(1, 1, 512, 64, causal=True, causal_offset=64, reach=128), (2 + 6 * 3 + 2) / 8),
        (merged(1, 1, 512, 64, reach=64), (8 + 8 + 7 + 6 + 5 + 4 + 3 + 2) / 8),
        (apart(1, 1, 64, 512, 64, causal=True, lengths=True, from_end=True, reach=64), 2),
    ],
)
def test_tiles_outside_of_a_window_cost_nothing(problem: Problem, tiles: float) -> None:
    config = Config(1, 64, 2, 3, True)
    assert hopper_cost.tiles_seen(problem, config) == tiles
    everything = replace(problem, reach=-1, causal=False)
    if tiles < 4:
        assert hopper.estimate(problem, config, H200) < hopper.estimate(everything, config, H200)


def test_the_model_follows_measured_times() -> None:
    """On an H200 at fp16, in us: global layers of 16 x 512 tokens take 30.2 with alternating warpgroups and three stages, 34.8
    with two stages. Layers with a window take 19.5 with tiles of 64 keys, 23.3 with tiles of 32. With masks, single warpgroups
    are faster: 41.8, and 45.3 with two."""
    whole, near = merged(16, 12, 512, 64), merged(16, 12, 512, 64, causal=True, causal_offset=64, reach=128)
    assert str(hopper.candidates(whole, H200)[0]) == "attn4n64s3b1pt"
    assert hopper.candidates(near, H200)[0].keys == 64
    assert str(hopper.candidates(merged(16, 12, 512, 64, mask=(512, 0, 0)), H200)[0]) == "attn1n64s2b3p"
    assert hopper.candidates(merged(16, 12, 257, 64), H200)[0].persistent


@pytest.mark.parametrize(
    ("heads", "tokens", "features", "config", "measured"),
    [
        (12, 3600, 64, Config(3, 128, 3, 1, True, True), 84.9),
        (12, 3600, 64, Config(3, 80, 3, turns=True), 89.7),
        (12, 2305, 64, Config(4, 48, 3, turns=True), 40.2),
        (12, 2305, 64, Config(2, 192, 2, 1, True, True), 45.1),
        (12, 4096, 64, Config(3, 128, 3, 1, True, True), 96.2),
        (12, 2048, 64, Config(3, 80, 3, turns=True), 26.4),
        (16, 4096, 72, Config(4, 48, 3, 1, True, True), 171.1),
    ],
)
def test_the_model_of_long_sequences(heads: int, tokens: int, features: int, config: Config, measured: float) -> None:
    problem = merged(1, heads, tokens, features)
    assert hopper.estimate(problem, config, H200) * 1e6 == pytest.approx(measured, rel=0.08)
    assert hopper.estimate(problem, replace(config, turns=False), H200) > hopper.estimate(problem, config, H200)


def test_few_items_have_no_persistent_blocks() -> None:
    assert not any(c.persistent for c in hopper.candidates(merged(1, 12, 257, 64), H200, limit=100))
    assert any(c.persistent for c in hopper.candidates(merged(16, 12, 257, 64), H200, limit=100))


def test_keys_that_begin_between_sectors_are_read_by_more_queries_together() -> None:
    """2 x 8 heads of 40 features over 4096 tokens: blocks of 64 queries took 333 us on an H200, blocks of 256 took 146."""
    between, aligned = merged(2, 8, 4096, 40), merged(2, 8, 4096, 48)
    assert (hopper_cost.sector_share(between), hopper_cost.sector_share(aligned)) == (2.0, 1.0)
    alone, four = (hopper.estimate(between, Config(n, 64, 3, b, True), H200) for n, b in ((1, 4), (4, 1)))
    assert alone > 1.5 * four
    assert hopper.candidates(between, H200)[0].warpgroups == 4
