"""The checks of engines on a GPU: an engine passes, and an engine with a fault of each kind fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.runner import CudaRunner
from optdnn.runtime.cuda.trials.check import check_arena, check_steps, run_singly
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions

pytestmark = pytest.mark.hopper


def network() -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 24, 24), 32, 3, bias=True))
    return n.done(n.gemm(n.op("Flatten", n.op("GlobalAveragePool", n.op("Tanh", n.conv(x, 24, 1, pads=0)))), 10))


def runner(program: Program) -> CudaRunner:
    return CudaRunner(program, LoadOptions())


def test_an_engine_passes() -> None:
    graph = network()
    made, feeds = runner(lowered(graph, target="cuda:sm_90a")), feeds_of(graph)
    assert check_arena(made, feeds) == []
    context: Any = made.context()
    assert all(e.error < 4e-3 for e in check_steps(context, feeds))
    np.testing.assert_array_equal(run_singly(context, feeds)["y0"], context.run(feeds)["y0"])


def test_a_step_left_out_shows_as_a_result_that_depends_on_old_memory() -> None:
    graph = network()
    program = lowered(graph, target="cuda:sm_90a")
    k = next(k for k, s in enumerate(program.steps) if s.params["op"]["kind"] == "Conv")
    short = replace(program, steps=(*program.steps[:k], *program.steps[k + 1 :]))
    assert any(
        "depends on the earlier contents of memory" in fault for fault in check_arena(runner(short), feeds_of(graph))
    )


def test_a_write_outside_of_the_arena_shows() -> None:
    graph = network()
    program = lowered(graph, target="cuda:sm_90a")
    last = max(b.offset + (b.nbytes or 0) for b in program.buffers if b.offset is not None)
    short = replace(program, arena_bytes=last - 512)
    assert "something is written outside of the arena" in check_arena(runner(short), feeds_of(graph))
