"""Recurrent layers whose weights stay in registers: on the processor, refusals, plans and costs; and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import on_gpu
from support.host import needs_compiler
from support.net import Net
from support.on_processor import compare_steps
from support.sequence_cases import LBR, SIZES, SMALL, recurrent
from support.simulated import check_simulated, feeds_of, lowered
from support.spills import check_spills
from support.sweep import all_pairs, in_turn, sweep

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder
from optdnn.kernels.recurrent import grid_kernel, input_products, resident, resident_kernel
from optdnn.kernels.recurrent import kernel as rnn
from optdnn.kernels.recurrent.resident_kernel import Config, Problem
from optdnn.kernels.tactic import Offer
from optdnn.ops.rnn import LSTMAttrs, RNNAttrs
from optdnn.runtime.cuda.gpu_facts import NAMED, GpuFacts, of_arch
from optdnn.runtime.cuda.launches.plan import GRID, NOTHING, CudaStep, parse
from optdnn.runtime.program import Program

H200 = next(gpu for gpu in NAMED if gpu.slug == "h200")
SEQUENCER = Problem("LSTM", 32, 16, 192, 48, 2, wide_gates=False)
TOLERANCE = {"fp32": 3e-6, "fp16": 1.2e-3, "bf16": 9e-3}

LSTM: Callable[..., Graph] = partial(recurrent, "LSTM", peepholes=True, lengths=True, initial=True)
CONFIGS: dict[str, tuple[Callable[[], Graph], Config]] = {
    "one lane, entries in rounds": (partial(LSTM, hidden=9, batch=7), Config(1, 3, 1)),
    "more lanes than entries": (partial(recurrent, "GRU", hidden=21, batch=5), Config(1, 4, 8)),
    "a warp for each unit": (partial(recurrent, "GRU", hidden=12, batch=5, **LBR), Config(1, 2, 32)),
    "two blocks": (partial(LSTM, hidden=9, batch=3, direction="bidirectional"), Config(2, 2, 4)),
    "a gated state is exchanged": (partial(recurrent, "GRU", hidden=11, batch=4, lengths=True), Config(3, 3, 2)),
    "a unit for each block": (partial(recurrent, "RNN", hidden=5, batch=2), Config(5, 1, 2)),
    "several items": (partial(recurrent, "LSTM", hidden=12, batch=5, direction="bidirectional"), Config(6, 1, 4)),
}


def in_config(
    config: Config, graph: Graph, precision: str, target: str, patch: pytest.MonkeyPatch, **options: Any
) -> Program:
    """The program of the graph, with recurrent layers in this configuration."""
    offers = (Offer(config, 0.0, row_invariant=False),)

    def only(kernel: Any, problem: Problem, gpu: GpuFacts, row_invariant: bool) -> tuple[Offer, ...]:
        assert resident_kernel.refuse(problem, config, gpu) is None
        return offers

    patch.setattr(resident, "kernel_offers", only)
    program = lowered(graph, precision, target=target, **options)
    assert {t["config"] for t in program.meta["tactics"] if t["tactic"] == "rnn_resident"} == {str(config)}
    return program


@needs_compiler
@pytest.mark.parametrize("name", sweep(CONFIGS, *list(CONFIGS)[3:5]))
def test_configurations_on_the_processor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orin has 16 multiprocessors: a block has several items, which wait for other blocks in turn."""
    make, config = CONFIGS[name]
    target = "cuda:orin" if name == "several items" else "simulate"
    program = in_config(config, make(), "fp32", target, monkeypatch, no_cubins=True)
    compare_steps(program, feeds_of(make()), TOLERANCE["fp32"], tmp_path)


CELLS = {name: make for name, make in SMALL.items() if name != "lstm wide batch"} | {
    name: SIZES[name] for name in ("lstm of 48 both", "lstm of 7")
}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision"),
    sweep(
        [(n, p) for n in CELLS for p in TOLERANCE],
        *((n, p) for n, p in zip(list(CELLS)[::2], list(TOLERANCE) * 3, strict=False)),
    ),
)
def test_cells_on_the_processor(name: str, precision: str, tmp_path: Path) -> None:
    graph = CELLS[name]()
    program = lowered(graph, precision)
    assert any(t["tactic"] == "rnn_resident" for t in program.meta["tactics"])
    compare_steps(program, feeds_of(graph), TOLERANCE[precision], tmp_path)


@pytest.mark.parametrize(
    ("changes", "config", "because"),
    [
        ({"steps": 0}, Config(1, 1, 4), "nothing to compute"),
        ({"hidden": 0}, Config(1, 1, 4), "nothing to compute"),
        ({"hidden": 300}, Config(1, 1, 4), "300 hidden units do not fit the registers of 1 blocks"),
        ({"hidden": 120}, Config(1, 1, 1), "120 hidden units do not fit the registers"),
        ({"batch": 2}, Config(1, 4, 4), "its batch of 2 does not suit 4 entries per block"),
        ({}, Config(1, 16, 4), None),
        ({"hidden": 16, "cell": "RNN"}, Config(1, 16, 2), "does not suit 16 entries"),
        ({"hidden": 8}, Config(5, 1, 4), "one of 5 blocks would have none of 8 hidden units"),
        ({"hidden": 1000, "batch": 64}, Config(125, 64, 32), "64 entries do not fit the shared memory"),
        ({"hidden": 1064}, Config(133, 1, 32), "its 133 blocks cannot run at once"),
    ],
)
def test_problems_that_a_configuration_refuses(changes: dict[str, Any], config: Config, because: str | None) -> None:
    reason = resident_kernel.refuse(replace(SEQUENCER, **changes), config, H200)
    assert reason is None if because is None else because in str(reason)


def tried(graph: Graph, precision: str = "fp16") -> tuple[str, str]:
    """The tactic of the recurrent layer, and the reason for which this one was refused."""
    program = lowered(graph, precision)
    (row,) = [t for t in program.meta["tactics"] if t["kind"] in ("RNN", "GRU", "LSTM")]
    return row["tactic"], next((r["reason"] for r in row.get("refused", ()) if r["tactic"] == "rnn_resident"), "")


def test_other_tactics_are_preferred_where_they_are_predicted_to_be_faster() -> None:
    tactic, reason = tried(recurrent("LSTM", hidden=256, steps=64))
    assert tactic == "rnn_sm90"
    assert "rnn_sm90" in reason
    assert "it is predicted to take" in reason


def test_the_tactic_refuses_computed_weights_and_larger_matrices() -> None:
    assert tried(recurrent("LSTM", computed=True)) == ("rnn", "its weights are not constant")
    n = Net()
    y = n.op("RNN", n.input(4, 1, 16), n.random(1, 2500, 16), n.random(1, 2500, 2500), attrs=RNNAttrs(2500), outputs=2)[
        0
    ]
    tactic, reason = tried(n.done(y), "fp32")
    assert tactic == "rnn"
    assert "2500 hidden units do not fit the registers of 132 blocks" in reason


def launches(graph: Graph, precision: str = "fp16") -> Iterator[CudaStep]:
    program = lowered(graph, precision, target="cuda:sm_90a")
    for step in (parse(s, program) for s in program.steps if s.executor == "cuda"):
        if isinstance(step, CudaStep) and step.meaning.kind == "Recurrence":
            yield step


def test_both_directions_are_one_launch() -> None:
    (step,) = launches(SIZES["lstm of 48 both"]())
    assert step.launch.waits == NOTHING  # type: ignore[union-attr]
    assert step.launch.grid[0] == 32  # type: ignore[union-attr]
    (step,) = launches(SIZES["rnn of 500"](), "fp32")
    assert step.launch.waits == GRID  # type: ignore[union-attr]
    assert step.launch.grid[0] <= H200.multiprocessors  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("graph", "precision", "target", "kernel"),
    [
        (partial(recurrent, "LSTM", hidden=12, batch=7), "fp32", "cuda:sm_90a", "conv_parts_sm90"),
        (partial(recurrent, "LSTM", hidden=12, batch=7), "fp16", "cuda:sm_90a", "conv_sm90"),
        (partial(recurrent, "LSTM", hidden=12, batch=7), "fp32", "cuda:sm_80", "conv_fp32"),
        (partial(recurrent, "GRU", hidden=9, batch=7), "fp32", "cuda:sm_90a", "conv_fp32"),
        (partial(recurrent, "GRU", hidden=9, batch=40), "fp16", "cuda:sm_90a", "matmul"),
        (partial(recurrent, "LSTM", hidden=12, batch=7), "bf16", "cuda:sm_80", "matmul"),
    ],
    ids=["parts", "tensor cores", "older GPU", "odd columns", "odd columns of fp16", "16 bits on an older GPU"],
)
def test_kernels_of_ordinary_products_multiply_the_inputs(
    graph: Callable[[], Graph], precision: str, target: str, kernel: str
) -> None:
    program = lowered(graph(), precision, target=target)
    launches = [s.params["launch"] for s in program.steps if "launch" in s.params]
    names = [program.kernels[launch["kernel"]].function for launch in launches]
    assert names[names.index("rnn_resident") - 1] == kernel


@pytest.mark.parametrize(
    ("inputs", "limit", "because"),
    [(0, input_products.LARGEST, "its inputs have no elements"), (24, 100, "more elements than 32-bit offsets")],
)
def test_products_that_no_ordinary_kernel_takes(
    inputs: int, limit: int, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = recurrent("LSTM", steps=5, batch=7, inputs=inputs, hidden=12)
    monkeypatch.setattr(input_products, "LARGEST", limit)
    (op,) = graph.of_kind("LSTM")
    assert because in str(input_products.refuse(Builder(graph, H200), op))


def test_inputs_that_lie_far_apart_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has 32-bit offsets; the layer reads 24 of 4,000 features."""
    n = Net()
    x = n.sliced(n.input(5, 7, 4000), 0, 24, 2)
    weights = [n.random(1, 48, k, scale=0.2) for k in (24, 12)]
    y, *_ = n.op("LSTM", x, *weights, attrs=LSTMAttrs(12), outputs=3)
    graph = n.done(y)

    def functions() -> list[str]:
        return [k.function for k in lowered(graph, "fp32", target="cuda:sm_80").kernels]

    assert functions() == ["conv_fp32", "rnn_resident"]
    monkeypatch.setattr(input_products, "LARGEST", 5 * 7 * 4000)
    assert functions() == ["pointwise", "conv_fp32", "rnn_resident"]
    check_simulated(graph, "fp32", target="cuda:sm_80")


def best(problem: Problem) -> float:
    """Predicted seconds of the fastest kernel."""
    found = [resident_kernel.estimate(problem, c, H200) for c in resident_kernel.candidates(problem, H200)]
    if problem.dtype != "float32":
        stacked = rnn.Problem(problem.cell.lower(), problem.steps, problem.batch, 256, problem.hidden)
        found += [rnn.estimate(stacked, c, H200) for c in rnn.candidates(stacked, H200)]
        grid = grid_kernel.Problem(problem.cell, problem.steps, problem.batch, problem.hidden)
        found += [grid_kernel.estimate(grid, c, H200) for c in grid_kernel.candidates(grid, H200)]
    return min(found)


@all_pairs(
    {
        "cell": ["LSTM", "GRU", "RNN"],
        "batch": [1, 32],
        "dtype": ["float16", "float32"],
    }
)
def test_no_hidden_size_is_a_cliff(cell: str, batch: int, dtype: str) -> None:
    """A layer takes at most three times as long as one of the next larger size; one entry of the batch takes 2 us per step."""
    sizes = [*range(1, 129, 9), *range(130, 1025, 63)]
    times = [best(Problem(cell, 32, batch, 256, n, dtype=dtype, wide_gates=n % 2 > 0)) for n in sizes]
    assert all(a < 3 * b for a, b in pairwise(times))
    assert batch > 1 or max(times) < 32 * 2.2e-6 + 12e-6


def test_a_step_of_few_units_takes_less_than_a_microsecond() -> None:
    long, short = (best(replace(SEQUENCER, steps=n)) for n in (1032, 32))
    assert (long - short) / 1000 < 1e-6


FUNCTIONS = "\n".join(f"DEVICE float {name}(float x, int d) {{ return tanh(x); }}" for name in resident.FUNCTIONS)
COMPILED = {
    "48 units": SEQUENCER,
    "96 units, peepholes": replace(SEQUENCER, hidden=96, peepholes=True, lengths=True, initial=True),
    "GRU, gated": replace(
        SEQUENCER, cell="GRU", hidden=100, reset_first=True, lengths=True, dtype="float32", wide_gates=True
    ),
    "RNN": replace(SEQUENCER, cell="RNN", hidden=130, dtype="bfloat16"),
    "many blocks": replace(SEQUENCER, hidden=800, dtype="float32", wide_gates=True, batch=32),
    "many entries": replace(SEQUENCER, hidden=300, batch=512),
}


@pytest.mark.nvrtc
@pytest.mark.parametrize(("name", "arch"), in_turn(COMPILED, "sm_90a", "sm_80"))
def test_compiles_without_spills(name: str, arch: str) -> None:
    gpu, problem = of_arch(arch), replace(COMPILED[name], functions=FUNCTIONS)
    config = resident_kernel.candidates(problem, gpu)[0]
    launch = resident_kernel.launch(problem, config, gpu)
    kernel = check_spills(launch.recipe, launch.function)
    assert kernel.registers * launch.block <= resident_kernel.REGISTERS


ON_GPU = CONFIGS | {
    "48 units, a lane of each": (partial(LSTM, hidden=48, batch=20, direction="bidirectional"), Config(1, 4, 4)),
    "all registers": (partial(recurrent, "GRU", hidden=100, batch=3), Config(1, 3, 2)),
    "every multiprocessor": (
        partial(recurrent, "LSTM", hidden=1000, batch=9, steps=30, lengths=True),
        Config(125, 4, 32),
    ),
    "many items": (
        partial(recurrent, "GRU", hidden=300, batch=90, steps=20, direction="bidirectional"),
        Config(30, 2, 16),
    ),
}


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ON_GPU)
def test_configurations_on_a_gpu(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, with the same bits in a second run, whose tags continue those of the first."""
    make, config = ON_GPU[name]
    feeds, program = feeds_of(make()), in_config(config, make(), precision, "cuda:sm_90a", monkeypatch)
    on_gpu.checked_program(program, feeds, on_gpu.TOLERANCE[precision])
