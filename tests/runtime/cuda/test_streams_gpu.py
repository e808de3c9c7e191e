"""Lanes on a GPU: the graph has the edges of the program, and every way to run it gives the same bits as one lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.branches import inception, products
from support.simulated import feeds_of, lowered

from optdnn.lowering import lanes as lanes
from optdnn.runtime.cuda.allocator import fill
from optdnn.runtime.cuda.device import check, driver
from optdnn.runtime.cuda.libraries.find import present
from optdnn.runtime.cuda.measuring.measure import profile_gpu
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program
from optdnn.runtime.steps.lanes import waits_of

pytestmark = pytest.mark.hopper


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins cost nothing, so small networks have lanes as well."""
    monkeypatch.setattr(lanes, "JOIN", 0.0)
    monkeypatch.setattr(lanes, "FORK", 0.0)


def program(streams: int, **options: Any) -> Program:
    return lowered(inception(64, size=28), target="cuda:sm_90a", streams=streams, **options)


def poison(context: Any) -> None:
    fill(context.memory.arena.pointer, 0xFF, context.runner.program.arena_bytes)


def test_the_graph_has_the_edges_of_the_program() -> None:
    made = program(4)
    context: Any = Engine(made).context()
    context.run(feeds_of(inception(64, size=28)))
    *_, edges, count = check("cuGraphGetEdges", driver().cuGraphGetEdges(context.graph()._template.graph, 4096))
    waits = waits_of(made.lanes) or []
    assert count == sum(map(len, waits))
    assert max(map(len, waits)) > 1
    assert all(int(e.type) == 1 for e in edges[:count]), "every step is launched early, also one that waits for several"


def test_lanes_give_the_bits_of_one_lane() -> None:
    feeds = feeds_of(inception(64, size=28))
    want = Engine(program(1)).context().run(feeds)["y0"]
    assert np.isfinite(want).all()
    for streams in (2, 4):
        made = program(streams)
        assert made.lanes
        context: Any = Engine(made).context()
        for _ in range(50):
            poison(context)
            np.testing.assert_array_equal(context.run(feeds)["y0"], want)
        poison(context)
        _, times = context.profile(feeds)  # single launches on one stream
        assert len(times) == len(made.steps)
        np.testing.assert_array_equal(context.profile(feeds)[0]["y0"], want)


def test_other_arrays_change_nodes_of_a_graph_with_lanes() -> None:
    cupy = pytest.importorskip("cupy")
    context: Any = Engine(program(4)).context()
    feeds = feeds_of(inception(64, size=28))
    rng = np.random.default_rng(5)
    tries = [{k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in feeds.items()} for _ in range(10)]
    one: Any = Engine(program(1)).context()
    wanted = [one.run(t)["y0"] for t in tries]
    given = [{k: cupy.asarray(v) for k, v in t.items()} for t in tries]
    for arrays, want in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(context.run(arrays)["y0"]), want)


def test_libraries_run_in_lanes_as_well() -> None:
    if not present("cublaslt"):
        pytest.skip("no cuBLASLt")
    graph = products()
    one, several = (lowered(graph, target="cuda:sm_90a", streams=n, tactics="heuristic,cublaslt") for n in (1, 4))
    calls = [s.lane for s, step in zip(several.lanes, several.steps, strict=True) if "call" in step.params]
    assert len(set(calls)) > 1, "calls in several lanes, each with scratch memory of its own"
    feeds = feeds_of(graph)
    want = Engine(one).context().run(feeds)["y0"]
    context: Any = Engine(several).context()
    assert len(context._caller.scratch) == len(set(calls))
    for _ in range(20):
        poison(context)
        np.testing.assert_array_equal(context.run(feeds)["y0"], want)


def test_a_profile_shows_the_lanes() -> None:
    made = program(4)
    context: Any = Engine(made).context()
    rows = profile_gpu(context, feeds_of(inception(64, size=28)), repeats=3)
    assert [r.lane for r in rows] == [s.lane for s in made.lanes]
    assert sum(r.share for r in rows) == pytest.approx(1.0)
