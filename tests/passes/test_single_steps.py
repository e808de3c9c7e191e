"""single_step: a recurrent layer over one step becomes products and arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph
from optdnn.ops.rnn import GRUAttrs, LSTMAttrs, RNNAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.unroll import Unroll

GPU = PassContext(target="cuda:sm_90a")
BATCH, WIDTH, HIDDEN = 2, 6, 4
KINDS: dict[str, tuple[int, Any]] = {"RNN": (1, RNNAttrs), "GRU": (3, GRUAttrs), "LSTM": (4, LSTMAttrs)}
USUAL: dict[str, dict[str, Any]] = {"RNN": {}, "GRU": {"linear_before_reset": True}, "LSTM": {}}


def layer(
    kind: str, steps: int = 1, directions: int = 1, bias: bool = True, state: bool = True, more: int = 0, **attrs: Any
) -> Graph:
    """A layer, all of whose results are outputs. ``more``: the number of an operand that it reads besides."""
    n, (gates, made) = Net(), KINDS[kind]
    operands: list[Any] = [n.random(directions, gates * HIDDEN, width) for width in (WIDTH, HIDDEN)]
    operands += [n.random(directions, 2 * gates * HIDDEN) if bias else None, None]
    names = ("h", "c")[: 2 if kind == "LSTM" else 1]
    operands += [n.input(directions, BATCH, HIDDEN, name=name) for name in names] if state else []
    operands += [None] * (more - 1 - len(operands))
    if more == 4:
        operands[3] = n.const([1] * BATCH, np.int32)
    elif more:
        operands.append(n.random(directions, 3 * HIDDEN))
    x = n.input(steps, BATCH, WIDTH)
    count = 3 if kind == "LSTM" else 2
    return n.done(*n.op(kind, x, *operands, attrs=made(HIDDEN, **USUAL[kind] | attrs), outputs=count))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_one_step(kind: str, bias: bool) -> None:
    graph, _ = check_pass(Unroll(), layer(kind, bias=bias), changes=1, rules={"single_step": 1}, context=GPU)
    assert graph.kinds()["Gemm"] == 2
    assert kind not in graph.kinds()


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_a_state_it_starts_from_zeros(kind: str) -> None:
    check_pass(Unroll(), layer(kind, state=False), changes=1, rules={"single_step": 1}, context=GPU)


def test_other_activations() -> None:
    graph, _ = check_pass(Unroll(), layer("RNN", activations=("Relu",)), changes=1, context=GPU)
    assert graph.kinds()["Relu"] == 1
    given = layer("LSTM", direction="reverse", activations=("Sigmoid", "Softsign", "Softplus"))
    graph, _ = check_pass(Unroll(), given, changes=1, context=GPU)
    assert {graph.kinds()["Softsign"], graph.kinds()["Softplus"]} == {1}


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (layer("RNN", directions=2, direction="bidirectional", activations=("Tanh",) * 2, alphas=(0.0,) * 2, betas=(0.0,) * 2),
         "it has two directions"),
        (layer("LSTM", more=4), "its sequences have lengths of their own"),
        (layer("LSTM", more=7), "its gates read the cell"),
        (layer("LSTM", clip=0.5), "its gates are clipped"),
        (layer("RNN", activations=("Affine",), alphas=(2.0,)), "an activation has parameters"),
        (layer("LSTM", input_forget=True), "its forget gate is one minus the input gate"),
        (layer("GRU", linear_before_reset=False), "its reset gate comes before the product of the state"),
    ],
)  # fmt: skip
def test_refused(graph: Graph, because: str) -> None:
    check_refused(Unroll(), graph, because=because, rule="single_step", context=GPU)


def test_longer_sequences_and_the_cpu_keep_the_layer() -> None:
    check_untouched(Unroll(), layer("LSTM", steps=2), GPU)
    check_untouched(Unroll(), layer("LSTM"))


@pytest.mark.parametrize(("kind", "pointwise"), [("RNN", 0), ("GRU", 1), ("LSTM", 1)])
def test_a_policy_runs_few_launches(kind: str, pointwise: int) -> None:
    """The products of the input and of the state, and one launch for all gates, which also gives an LSTM's cell."""
    program = check_simulated(layer(kind), precision="fp32")
    tactics = [str(step.params.get("tactic")).split()[0] for step in program.steps]
    assert not [t for t in tactics if t.startswith("rnn")]
    assert tactics.count("pointwise") == pointwise, tactics
