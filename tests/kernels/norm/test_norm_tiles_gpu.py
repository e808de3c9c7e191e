"""Norms of any size on a GPU: every launch, in every configuration, agrees with its meaning and writes all results, and nothing
else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.on_gpu import checked_launches
from support.sequence_cases import group_norm, plain_norm
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import group_norm as group_norm_tactic
from optdnn.kernels.norm import row_tiles as row_tactic
from optdnn.kernels.norm.group_norm_grid import Config as Grid
from optdnn.kernels.norm.group_norm_grid import candidates
from optdnn.kernels.norm.group_norm_kernel import Problem
from optdnn.kernels.tactic import Offer
from optdnn.ops.unary import AlphaAttrs
from optdnn.runtime.engine import Engine

pytestmark = pytest.mark.hopper

LAST: dict[str, Callable[[], Graph]] = {
    "8 channels": lambda: group_norm(channels=8, groups=2, size=(33, 47)),
    "24 channels": lambda: group_norm(channels=24, groups=3, size=(64, 65)),
    "one group": lambda: group_norm(channels=64, groups=1, size=(60, 50)),
    "320 channels": lambda: group_norm(channels=320, groups=32, size=(64, 64)),
    "2560 channels": lambda: group_norm(channels=2560, groups=32, size=(9, 8)),
    "few pixels": lambda: group_norm(channels=128, groups=32, size=(3, 2)),
    "instances": lambda: group_norm("InstanceNormalization", channels=64, size=(112, 112)),
    "relu": lambda: group_norm(channels=64, groups=8, size=(100, 100), then="Relu"),
    "swish": lambda: group_norm(channels=128, groups=32, size=(256, 250), then="Swish", attrs=AlphaAttrs(1.0)),
    "larger than L2": lambda: group_norm(channels=128, groups=32, size=(512, 512), then="Swish", attrs=AlphaAttrs(1.0)),
}
PLAIN: dict[str, Callable[[], Graph]] = {
    "tiny": lambda: plain_norm("GroupNormalization", (2, 6, 3, 5), 3),
    "odd": lambda: plain_norm("InstanceNormalization", (2, 5, 77, 31), then="Relu"),
    "rows of a block": lambda: plain_norm("GroupNormalization", (3, 32, 40, 40), 8, then="Sigmoid"),
    "long": lambda: plain_norm("GroupNormalization", (2, 64, 200, 160), 4),
    "volumes": lambda: plain_norm("InstanceNormalization", (1, 32, 64, 64, 64)),
    "larger than L2": lambda: plain_norm("GroupNormalization", (1, 256, 512, 512), 32),
    "layer norm": lambda: plain_norm("LayerNormalization", (7, 100_000)),
    "layer norm of images": lambda: plain_norm("LayerNormalization", (3, 64, 56, 56), axis=-3),
    "layer norm without bias": lambda: plain_norm("LayerNormalization", (33, 40_001), bias=False),
}


@contextmanager
def only(tactic: Any, name: str, choice: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes builds use configuration number ``choice`` of the tiles."""
    every = getattr(tactic, name)

    def offers(problem: Any, gpu: Any) -> tuple[Offer, ...]:
        found = [o for o in every(problem, gpu) if hasattr(o.config, "tiles") and not isinstance(o.config, Grid)]
        return (found[choice % len(found)],)

    with monkeypatch.context() as patch:
        patch.setattr(tactic, name, offers)
        yield


def check(graph: Graph, precision: str, kinds: set[str]) -> None:
    """Every launch against its meaning, memory between fences, and a second run with the same bits."""
    assert kinds & {e.kind for e in checked_launches(graph, precision)}


@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", LAST)
def test_tiles_of_images(name: str, precision: str, choice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with only(group_norm_tactic, "group_norm_offers", choice, monkeypatch):
        check(LAST[name](), precision, {"GroupApply"})


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", LAST)
def test_grids_that_keep_their_pixels(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offers(problem: Problem, gpu: Any) -> tuple[Offer, ...]:
        return tuple(Offer(c, 1e-6) for c in candidates(problem, gpu)[:1])

    monkeypatch.setattr(group_norm_tactic, "group_norm_offers", offers)
    check(LAST[name](), precision, {"GroupNormalization", "InstanceNormalization", "ActivatedNorm"})


@pytest.mark.parametrize("name", [n for n in LAST if n not in ("larger than L2", "2560 channels")])
def test_tiles_of_fp32_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with only(group_norm_tactic, "group_norm_offers", 0, monkeypatch):
        check(LAST[name](), "fp32", {"GroupApply"})


@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", PLAIN)
def test_tiles_of_rows(name: str, precision: str, choice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = {"GroupApply", "ActivatedNorm", "GroupNormalization", "InstanceNormalization", "LayerNormalization"}
    with only(row_tactic, "row_tile_offers", choice, monkeypatch):
        check(PLAIN[name](), precision, norms)


def test_a_large_mean_does_not_cancel_the_deviations() -> None:
    graph = plain_norm("InstanceNormalization", (1, 8, 512, 512))
    feeds = {k: (v * 0.01 + 1000).astype(v.dtype) for k, v in feeds_of(graph).items()}
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
    (found,) = context.run(feeds).values()
    (x,) = feeds.values()
    wide = x.astype(np.float64)
    centered = wide - wide.mean((2, 3), keepdims=True)
    deviation = np.sqrt(centered.var((2, 3), keepdims=True) + 1e-3)
    ops = {o.kind: o for o in graph.ops()}
    scale, bias = (graph.constant_value(v) for v in ops["InstanceNormalization"].inputs[1:])
    assert scale is not None
    assert bias is not None
    wanted = centered / deviation * scale.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)
    assert np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max()
