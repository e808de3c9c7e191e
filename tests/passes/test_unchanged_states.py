"""unchanged_states: states that no iteration changes are captured; others stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.fallback import BOOL, I64, F, body, model, node
from support.simulated import check_simulated

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.unchanged_states import UnchangedStates

GPU = PassContext(target="cuda:sm_90a")
STEPS = 5


def net(
    kind: str = "Loop", *, steps: int = STEPS, changes: bool = False, read: bool = True, given: bool = True
) -> Graph:
    """jax2onnx's form of ``lax.scan``: weights, and for a Loop the sequence, pass through each iteration.

    ``changes``: the weights do not. ``read``: whether the weights are read after the loop. ``given``: whether they are an input."""
    size: list[Any] = [2, 3]
    nodes = [
        node("MatMul", "s w", "p"), node("Add", "p x", "q"), node("Tanh", "q", "t"), node("Identity", "t", "y"),
        node("Neg" if changes else "Identity", "w", "w1"),
    ]  # fmt: skip
    states, following = [("w", F, [3, 3]), ("s", F, size)], [("w1", F, [3, 3]), ("t", F, size)]
    if kind == "Loop":
        nodes += [node("Identity", "c", "go"), node("Gather", "all i", "x"), node("Identity", "all", "all1")]
        own = [("i", I64, []), ("c", BOOL, [])]
        states, following = [*own, *states, ("all", F, [steps, 2, 3])], [*following, ("all1", F, [steps, 2, 3])]
        inner = body(nodes, states, [("go", BOOL, []), *following, ("y", F, size)])
        whole = node("Loop", "trips - weights s0 xs", "wn sn xn ys", body=inner)
    else:
        inner = body(nodes, [*states, ("x", F, size)], [*following, ("y", F, size)])
        whole = node("Scan", "weights s0 xs", "wn sn ys", body=inner, num_scan_inputs=1)
    after = [node("Add", "sn shift", "z"), *([node("Neg", "wn", "v")] if read else [])]
    inputs = [("xs", F, [steps, 2, 3]), ("s0", F, size), *([("weights", F, [3, 3])] if given else [])]
    outputs = [("ys", F, None), ("z", F, None), *([("v", F, None)] if read else [])]
    weights = {} if given else {"weights": np.arange(9.0).reshape(3, 3) / 40}
    return import_model(model([whole, *after], inputs, outputs, trips=np.array(steps), shift=0.5, **weights))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_weights_and_sequences_that_pass_through(kind: str, read: bool) -> None:
    after, _ = check_pass(UnchangedStates(), net(kind, read=read), changes=1, context=GPU)
    (loop,) = after.of_kind(kind)
    assert (loop.attrs.carried if kind == "Loop" else loop.attrs.states) == 1
    assert len(loop.outputs) == 2


def test_a_loop_without_any_result_of_its_own() -> None:
    inner = body(
        [node("Identity", "c", "go"), node("Identity", "s", "t")],
        [("i", I64, []), ("c", BOOL, []), ("s", F, [2])], [("go", BOOL, []), ("t", F, [2])],
    )  # fmt: skip
    whole = [node("Loop", "trips - x", "y", body=inner), node("Neg", "y", "z")]
    before = import_model(model(whole, [("x", F, [2])], [("z", F, None)], trips=np.array(3)))
    assert check_pass(UnchangedStates(), before, changes=1, context=GPU)[0].kinds() == {"Neg": 1}


def test_states_that_change_stay() -> None:
    check_untouched(UnchangedStates(), net("Scan", changes=True), GPU)
    check_untouched(UnchangedStates(), net("Scan"))  # no GPU


def test_a_long_loop_of_jax_is_one_layer() -> None:
    """It is too long to be unrolled."""
    n = net(steps=1100, given=False, read=False)
    program = check_simulated(n, "fp32")
    assert "host" not in {s.executor for s in program.steps}
