"""Stream-K in a program: counts keep their contents between launches, partial sums are scratch, and results are unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.net import Net
from support.simulated import TOLERANCE, feeds_of, lowered, simulate

from optdnn.errors import EngineError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program

CONFIG = conv.Config(1, 1, 1, 64, 3, stream=True)


def prefer_stream_k(monkeypatch: pytest.MonkeyPatch, config: conv.Config = CONFIG) -> None:
    """Takes it wherever it is not refused."""
    ranked = hopper_launch.ranked

    def first(problem: conv_problem.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
        offers = ranked(problem, gpu)
        return offers if conv.refuse(problem, config) else (Offer(config, row_invariant=False), *offers)

    monkeypatch.setattr(hopper_launch, "ranked", first)


def network() -> Graph:
    """A 3x3 convolution with a residual, a strided one, and a batched product."""
    n = Net()
    x = n.conv(n.input(2, 16, 20, 20), 72, 3, bias=True)
    x = n.op("Relu", n.op("Add", n.conv(n.op("Relu", x), 72, 3), x))
    y = n.conv(x, 128, 3, strides=2)
    return n.done(y, n.op("Softmax", n.matmul(n.input(3, 50, 200, name="rows"), 72)))


def streamed(program: Program) -> list[int]:
    """The steps whose blocks take spans of K steps."""
    return [k for k, s in enumerate(program.steps) if set(s.outputs) & set(program.retained)]


def test_results_are_those_of_other_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_stream_k(monkeypatch)
    graph = network()
    program = lowered(graph)
    assert len(streamed(program)) == 4
    feeds = feeds_of(graph)
    got, want = simulate(program, feeds), evaluate(graph, feeds)
    for name in want:
        assert float(np.abs(got[name] - want[name]).max()) <= TOLERANCE["fp16"] * float(np.abs(want[name]).max())


def test_counts_are_each_launchs_own_and_sums_lie_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_stream_k(monkeypatch)
    program = lowered(network())
    counts, sums = [], []
    for k in streamed(program):
        step = program.steps[k]
        operands = (*step.inputs, *step.outputs)
        counts += [i for i in step.outputs if i in program.retained]
        named = {v[0] for v in (*step.params["reads"], *step.params["writes"]) if v is not None}
        sums += [i for j, i in enumerate(operands) if j not in named and program.buffers[i].name.endswith(".partial")]
    assert len(set(counts)) == len(counts) == len(sums) == 4
    assert all(program.buffers[i].offset is None for i in counts)
    assert all(program.buffers[i].offset is not None for i in sums)


def test_retained_memory_belongs_to_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_stream_k(monkeypatch)
    program = lowered(network())
    count = program.retained[0]
    constant = next(i for i, b in enumerate(program.buffers) if b.blob is not None)
    inside = next(i for i, b in enumerate(program.buffers) if b.offset is not None)
    placed = tuple(replace(b, offset=0) if i == count else b for i, b in enumerate(program.buffers))
    read = [*program.steps[:-1], replace(program.steps[-1], inputs=(*program.steps[-1].inputs, count))]
    for changed, why in (
        (replace(program, retained=(count, count)), "not in ascending order"),
        (replace(program, retained=(999,)), "does not exist"),
        (replace(program, retained=(constant,)), "no memory of its own"),
        (replace(program, retained=(inside,)), "no memory of its own"),
        (replace(program, retained=(program.outputs[0][1],)), "no memory of its own"),
        (replace(program, buffers=placed), "no memory of its own"),
        (replace(program, steps=tuple(read)), "not one step's alone"),
    ):
        with pytest.raises(EngineError, match=why):
            Engine(changed)


def test_where_spans_cut_tiles_depends_on_the_batch() -> None:
    assert hopper_launch.in_one_order(conv.Config(1, 1, 1, 80, 3))
    assert not hopper_launch.in_one_order(conv.Config(1, 1, 1, 80, 3, stream=True))
