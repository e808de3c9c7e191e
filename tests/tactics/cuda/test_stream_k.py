"""Stream-K in a program: its counts keep what a launch leaves there, its partial sums are scratch, and results are what they were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.net import Net
from support.simulated import TOLERANCE, feeds_of, lowered, simulate

from optdnn.errors import EngineError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.runtime.cuda import conv, conv_problem
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program
from optdnn.tactics.cuda import conv_sm90
from optdnn.tactics.cuda.tactic import Offer

CONFIG = conv.Config(1, 1, 1, 64, 3, stream=True)


def prefer_stream_k(monkeypatch: pytest.MonkeyPatch, config: conv.Config = CONFIG) -> None:
    """Take it wherever it is not refused."""
    ranked = conv_sm90.ranked

    def first(problem: conv_problem.Problem, dense: bool) -> tuple[Offer, ...]:
        offers = ranked(problem, dense)
        return offers if conv.refuse(problem, config) else (Offer(config, row_invariant=False), *offers)

    monkeypatch.setattr(conv_sm90, "ranked", first)


def network() -> Graph:
    """A 3x3 convolution with a residual, a strided one, and a batched product."""
    n = Net()
    x = n.conv(n.input(2, 16, 20, 20), 72, 3, bias=True)
    x = n.op("Relu", n.op("Add", n.conv(n.op("Relu", x), 72, 3), x))
    y = n.conv(x, 128, 3, strides=2)
    return n.done(y, n.matmul(n.input(3, 50, 200, name="rows"), 72))


def streamed(program: Program) -> list[int]:
    """The steps that take spans of K steps."""
    return [k for k, s in enumerate(program.steps) if "kept" in s.params]


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
        counts += [operands[i] for i in step.params["kept"]]
        named = {v[0] for v in (*step.params["reads"], *step.params["writes"]) if v is not None}
        sums += [i for j, i in enumerate(operands) if j not in named and program.buffers[i].name.endswith(".partial")]
    assert len(set(counts)) == len(counts) == len(sums) == 4
    assert all(program.buffers[i].offset is None for i in counts)
    assert all(program.buffers[i].offset is not None for i in sums)


def test_a_step_may_keep_its_own_outputs_outside_of_the_arena_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_stream_k(monkeypatch)
    program = lowered(network())
    k = max(streamed(program))
    step = program.steps[k]
    (result,) = (v[0] for v in step.params["writes"])
    partial = next(
        j for j, i in enumerate((*step.inputs, *step.outputs)) if program.buffers[i].name.endswith(".partial")
    )
    operands = (*step.inputs, *step.outputs)
    own = [replace(b, offset=None) if i == operands[result] else b for i, b in enumerate(program.buffers)]
    for kept, buffers, why in (
        (0, program.buffers, "keeps what it does not write"),
        (partial, program.buffers, "keeps a part of the arena"),
        (result, tuple(own), "keeps one of its operands"),
    ):
        steps = list(program.steps)
        steps[k] = replace(step, params={**step.params, "kept": [kept]})
        with pytest.raises(EngineError, match=why):
            Engine(replace(program, buffers=buffers, steps=tuple(steps)))


def test_where_spans_cut_tiles_depends_on_the_batch() -> None:
    assert conv_sm90.in_one_order(conv.Config(1, 1, 1, 80, 3))
    assert not conv_sm90.in_one_order(conv.Config(1, 1, 1, 80, 3, stream=True))
