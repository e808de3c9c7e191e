"""Every pipeline on random networks: equal results in float64, valid graphs, and idempotent passes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from random_nets.families import network
from support.check import TOLERANCE, same
from support.sweep import sweep

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.graph import Graph
from optdnn.passes.base import Pass, PassContext, PassReport, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.types import FP64, Array

SEEDS = {"conv": range(16), "attention": range(6), "recurrent": range(4), "soup": range(12), "dynamic": range(8)}
"""Of each family; quantized networks and control flow compute in types of their own."""


EVERYWHERE = {"bn_scale_shift", "epilogue_add", "reshape_chain", "transpose_chain"}
"""Rules that the networks of odd seeds exercise, too."""


def _twice(context: PassContext, fired: Counter[str]):  # type: ignore[no-untyped-def]
    def after(index: int, one: Pass, graph: Graph, report: PassReport) -> None:
        fired.update(f.rule for f in report.fired)
        again = one(graph.copy(), context)
        assert again.changes == 0, (index, one.name, [(f.rule, f.nodes) for f in again.fired])

    return after


def _doubled(family: str, seed: int) -> tuple[Graph, list[dict[str, Array]]]:
    """The network in float64, and its inputs."""
    net = network(family, seed)
    feeds = [{n: a.astype(FP64) if a.dtype == np.float32 else a for n, a in f.items()} for f in net.feeds]
    return promote(import_model(net.model)), feeds


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", sweep(["reference", "cpu", "cuda:sm_90a"], "cuda:sm_90a"))
def test_random_networks_keep_their_results(target: str, first: int) -> None:
    """The even seeds, and the odd ones."""
    fired: Counter[str] = Counter()
    context = PassContext(target)
    for family, seeds in SEEDS.items():
        for seed in seeds[first::2]:
            graph, feeds = _doubled(family, seed)
            expected = [evaluate(graph, f) for f in feeds]
            for level in (1, 3):
                optimized = graph.copy()
                run_pipeline(optimized, PIPELINE(level, target), context, verify=True, after=_twice(context, fired))
                for f, want in zip(feeds, expected, strict=True):
                    same(evaluate(optimized, f), want, TOLERANCE)
    missing = (EVERYWHERE if first else EVERYWHERE | {"conv_bn", "merge_constants"}) - set(fired)
    assert not missing, f"these networks do not exercise {sorted(missing)}"
