"""Attention, recurrent layers and group normalization on the simulated GPU and on a GPU: the right tactic runs each, and rightly."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.sequence_cases import ATTENTION, GROUP_NORM, RECURRENT, RESIDUAL, recurrent, windows_between
from support.simulated import check_simulated, feeds_of, kinds, lowered, refusals, simulate
from support.sweep import sweep

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs

KINDS = {"Attention", "RNN", "GRU", "LSTM", "GroupNormalization", "InstanceNormalization", "Add"}
CASES = {**ATTENTION, **RECURRENT, **GROUP_NORM, **RESIDUAL}


@pytest.mark.parametrize("name", sweep(CASES, *list(CASES)[::6], "sinks, weights", "sinks and a window"))
def test_half_precision(name: str) -> None:
    build, tactic = CASES[name]
    program = check_simulated(build())
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] in KINDS} - {"pointwise"} == {tactic}


def test_stacked_layers_are_one_launch_although_others_read_the_outputs_between_them() -> None:
    program = check_simulated(recurrent("GRU", layers=3, initial=True, skips=True, linear_before_reset=True))
    assert kinds(program).count("StackedRNN") == 1


FLOATS = [n for n in CASES if n not in ("long", "wide heads", "widest heads", "odd head")]


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(FLOATS, *FLOATS[1::4]))
def test_fp32(name: str) -> None:
    program = check_simulated(CASES[name][0](), "fp32")
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] in KINDS} <= {
        "attention_fp32",
        "attention_parts_sm90",
        "attention_steps",
        "rnn",
        "rnn_resident",
        "rows",
        "pointwise",
        "group_norm",
        "add_group_norm",
        "row_tiles",
        "rows_once",
        "norm_add",
        "norm_add_norm",
        "add_norm",
    }


@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_a_sequence_without_steps(cell: str, direction: str) -> None:
    """The final state is zero, as in ONNX Runtime."""
    for initial in (False, True):
        graph = recurrent(cell, steps=0, direction=direction, initial=initial)
        feeds = feeds_of(graph)
        got, want = simulate(lowered(graph, "fp32"), feeds), evaluate(graph, feeds)
        assert list(got) == list(want)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)


def test_rows_of_a_product_are_read_in_place() -> None:
    n = Net()
    x = n.op("Transpose", n.op("Relu", n.matmul(n.input(3, 5, 16), 24)), attrs=TransposeAttrs((1, 0, 2)))
    y = n.op(
        "Add",
        n.op("Transpose", n.op("Relu", n.matmul(x, 32)), attrs=TransposeAttrs((1, 0, 2))),
        n.input(3, 5, 32, name="r"),
    )
    program = check_simulated(n.done(n.matmul(y, 8)))
    assert "Copy" not in kinds(program)


def test_states_of_stacked_layers_are_not_copied() -> None:
    graph = recurrent("LSTM", layers=2)
    states = [graph.op(i).inputs[0] for i in graph.outputs][1:]
    for port in (0, 1):
        joined = graph.add("Concat", [states[port], states[2 + port]], ConcatAttrs(0), names=[f"all{port}"])
        graph.add_output(graph.add("Relu", [joined.value], names=[f"r{port}"]).value, f"z{port}")
    program = check_simulated(graph)
    assert "Copy" not in kinds(program)


def test_one_index_of_a_projection_is_a_view() -> None:
    n = Net()
    x = n.op("Reshape", n.matmul(n.input(4, 24), 48), n.ints(4, 3, 16))
    parts = [n.op("Relu", n.op("Gather", x, n.const(i, np.int64), attrs=GatherAttrs(1))) for i in (0, 2)]
    evens = n.op("Relu", n.op("Gather", x, n.ints(0, 2), attrs=GatherAttrs(1)))
    program = check_simulated(n.done(*parts, evens))
    assert "Gather" not in kinds(program)
    n = Net()
    x = n.op("Gather", n.matmul(n.input(4, 24), 48), n.ints(0, 3, 1), attrs=GatherAttrs(0))
    assert "PointwiseOfRows" in kinds(check_simulated(n.done(n.op("Relu", x))))


def windows(indices: np.ndarray) -> Graph:
    n = Net()
    x = n.op("Gather", n.op("Tanh", n.input(2, 3, 16)), n.const(indices, np.int64), attrs=GatherAttrs(2))
    return n.done(n.op("Relu", x))


def test_windows_are_a_view() -> None:
    """An unfold in the form of torch's export of im2col."""
    assert "Gather" not in kinds(check_simulated(windows(np.arange(9)[:, None] + 2 * np.arange(4))))
    assert "Gather" not in kinds(check_simulated(windows(np.array([[3]]))))
    assert "Gather" in kinds(check_simulated(windows(np.array([[0, 1], [1, 3]]))))


def test_attention_of_windows_stores_its_result_as_it_is_read() -> None:
    assert "Copy" not in kinds(check_simulated(windows_between()))


@pytest.mark.parametrize("norm", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_normalization_includes_the_addition_before_it(norm: str, kept: bool) -> None:
    n = Net()
    x = n.op("Softmax", n.matmul(n.input(2, 6, 32), 48))
    total = n.op("Add", x, n.op("Softmax", n.input(2, 6, 48, name="r")))
    y = n.op(norm, total, n.positive(48), *([n.random(48)] if norm == "LayerNormalization" else []))
    program = check_simulated(n.done(n.matmul(y, 8), *([n.matmul(total, 8)] if kept else [])))
    assert "AddNorm" in kinds(program)
    assert norm not in kinds(program)


def test_other_additions_are_pointwise() -> None:
    n = Net()
    x = n.op("Softmax", n.matmul(n.input(2, 6, 32), 48))
    total = n.op("Add", x, n.op("Softmax", n.input(2, 1, 48, name="r")))
    y = n.op("LayerNormalization", total, n.positive(48), n.random(48))
    program = check_simulated(n.done(n.matmul(y, 8)))
    assert "AddNorm" not in kinds(program)
    reasons = refusals(program, kind="Add")
    assert set(reasons) == {
        "an operand is broadcast, but not by repeating whole rows",
        "an operand is broadcast",
        "no group normalization is the only reader of the sum",
        "it is not the only reader of a normalization of rows",
        "nothing converts the normalized sum to fp16",
        "nothing quantizes the normalized sum",
        "it is not the sum of an image and a group normalization without other readers",
        "it reads no rows that are gathered for it alone",
        "none of its operands is a pool",
    }


@pytest.mark.parametrize("shape", [(1, 6, 48), (6, 48), (48,)])
def test_position_embeddings_are_added_where_rows_are_normalized(shape: tuple[int, ...]) -> None:
    n = Net()
    total = n.op("Add", n.random(*shape), n.op("Softmax", n.matmul(n.input(3, 6, 32), 48)))
    y = n.op("LayerNormalization", total, n.positive(48), n.random(48))
    program = check_simulated(n.done(n.op("Softmax", y), n.op("Softmax", total)))
    assert "AddNorm" in kinds(program)
    assert "LayerNormalization" not in kinds(program)


TOLERANCE = {"fp32": 2e-5, "tf32": 5e-4, "fp16": 4e-3, "bf16": 3e-2}


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    graph = CASES[name][0]()
    checked_launches(graph, precision, TOLERANCE[precision])
