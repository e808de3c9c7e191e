"""Recurrent layers on the whole grid: refusals and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.net import Net
from support.sequence_cases import recurrent
from support.simulated import lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.recurrent import grid_kernel
from optdnn.kernels.recurrent.grid_kernel import Config, Problem
from optdnn.ops.rnn import RNNAttrs
from optdnn.runtime.cuda.gpu_facts import NAMED
from optdnn.runtime.cuda.launches.plan import GRID, CudaStep, parse

H200 = next(gpu for gpu in NAMED if gpu.slug == "h200")
DEEP_SPEECH = Problem("RNN", 200, 1, 2048, 2, relu=True)


def test_large_layers_fill_the_grid() -> None:
    assert grid_kernel.candidates(DEEP_SPEECH, H200) == [Config(2)]
    assert grid_kernel.blocks(DEEP_SPEECH, Config(2)) == 128
    launch = grid_kernel.launch(DEEP_SPEECH, Config(2), H200)
    assert (launch.grid, launch.waits) == ((128, 1, 1), GRID)
    assert launch.operands == ("gates", "weights", "bias", "output", "final_h", "exchange", "epoch")
    lstm = Problem("LSTM", 8, 64, 1024, 2, initial=True)
    assert {"initial_c", "final_c"} <= set(grid_kernel.launch(lstm, Config(4), H200).operands)


def test_few_blocks_take_longer() -> None:
    found = grid_kernel.candidates(Problem("RNN", 10, 1, 1024), H200)
    times = [grid_kernel.estimate(Problem("RNN", 10, 1, 1024), c, H200) for c in found]
    assert len(found) == 3
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("changes", "tiles", "because"),
    [
        ({"hidden": 384}, 1, "a multiple of 256 is needed"),
        ({"hidden": 0}, 1, "a multiple of 256 is needed"),
        ({"steps": 0}, 1, "nothing to compute"),
        ({"batch": 65}, 2, "a batch of 65 exceeds 64"),
        ({}, 4, "does not fit its registers"),
        ({}, 1, "its 256 blocks cannot run at once"),
        ({"steps": 1 << 23, "batch": 8}, 2, "more elements than the kernel can address"),
    ],
)
def test_problems_that_the_kernel_refuses(changes: dict[str, Any], tiles: int, because: str) -> None:
    assert because in str(grid_kernel.refuse(replace(DEEP_SPEECH, **changes), Config(tiles), at_once=132))


def tried(graph: Graph, target: str = "cuda:sm_90a") -> tuple[str, str]:
    """The tactic of the recurrent layer, and the reason for which the grid's was refused."""
    program = lowered(graph, "fp16", target=target)
    (row,) = [t for t in program.meta["tactics"] if t["kind"] in ("RNN", "GRU", "LSTM")]
    return row["tactic"], next((r["reason"] for r in row.get("refused", ()) if r["tactic"] == "rnn_grid"), "")


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: recurrent("RNN", hidden=256, lengths=True), "it does not support sequences of several lengths"),
        (lambda: recurrent("RNN", hidden=256, clip=0.5), "it does not support clipped or coupled gates"),
        (
            lambda: recurrent("LSTM", hidden=256, batch=40, input_forget=True),
            "it does not support clipped or coupled gates",
        ),
        (lambda: recurrent("RNN", hidden=256, activations=("Softsign",)), "it supports the default activations only"),
        (lambda: recurrent("GRU", hidden=256), "it needs a GRU with linear_before_reset"),
        (lambda: recurrent("LSTM", hidden=256, batch=40, peepholes=True), "it does not support peepholes"),
        (lambda: recurrent("RNN", hidden=128), "128 hidden units"),
    ],
)
def test_refusals(graph: Any, because: str) -> None:
    tactic, reason = tried(graph())
    assert tactic == "rnn_resident"
    assert because in reason


def test_other_architectures_and_types_are_refused() -> None:
    graph = recurrent("RNN", hidden=256)
    assert "needs Hopper's wgmma" in tried(graph, "cuda:sm_80")[1]
    program = lowered(graph, "fp32", target="cuda:sm_90a")
    assert "it is for 16-bit floats" in str(program.meta["tactics"])


def test_computed_weights_are_refused() -> None:
    n = Net()
    given = n.input(1, 256, 256, name="given")
    y = n.op("RNN", n.input(4, 1, 16), n.random(1, 256, 16), given, attrs=RNNAttrs(256), outputs=2)[0]
    graph = n.done(y)
    assert tried(graph)[1] == "its weights are not constant"


def test_the_grid_is_launched_as_a_whole_and_keeps_its_tags() -> None:
    graph = recurrent("RNN", hidden=256, direction="bidirectional", inputs=44)
    program = lowered(graph, "fp16", target="cuda:sm_90a")
    steps = [parse(s, program) for s in program.steps if s.executor == "cuda"]
    (layer,) = [s for s in steps if isinstance(s, CudaStep) and s.meaning.kind == "Recurrence"]
    assert layer.launch.waits == GRID  # type: ignore[union-attr]
    assert not layer.launch.dependent  # type: ignore[union-attr]
    kept = [program.buffers[k].name for k in program.retained]
    assert [name.rsplit(".", 1)[1] for name in kept] == ["exchange", "epoch"]
    assert "Copy" not in {s.meaning.kind for s in steps[2:]}, "states of both directions are joined where they lie"
