"""Every pipeline on networks that nobody wrote: results stay in float64, invariants hold, each pass finds nothing twice."""

from __future__ import annotations

from collections import Counter

import pytest
from support.check import TOLERANCE, same
from support.random_nets import random_network

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.passes.base import Pass, PassContext, PassReport, run_pipeline
from optdnn.passes.pipelines import PIPELINE

SEEDS = range(48)


def _twice(context: PassContext, fired: Counter[str]):  # type: ignore[no-untyped-def]
    def after(index: int, one: Pass, graph: Graph, report: PassReport) -> None:
        fired.update(f.rule for f in report.fired)
        again = one(graph.copy(), context)
        assert again.changes == 0, (index, one.name, [(f.rule, f.nodes) for f in again.fired])

    return after


@pytest.mark.parametrize("target", ["reference", "cpu", "cuda:sm_90a"])
def test_random_networks_keep_their_results(target: str) -> None:
    fired: Counter[str] = Counter()
    context = PassContext(target)
    for seed in SEEDS:
        graph = random_network(seed, steps=10 + seed % 40)
        feeds = random_feeds(graph, seed, {"n": 2})
        expected = evaluate(graph, feeds)
        for level in (1, 3):
            optimized = graph.copy()
            run_pipeline(optimized, PIPELINE(level, target), context, verify=True, after=_twice(context, fired))
            same(evaluate(optimized, feeds), expected, TOLERANCE)
    missing = {
        "conv_bn",
        "bn_scale_shift",
        "epilogue_add",
        "merge_constants",
        "reshape_chain",
        "transpose_chain",
    } - set(fired)
    assert not missing, f"these networks do not exercise {sorted(missing)}"
