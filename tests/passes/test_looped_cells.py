"""looped_cells: cells of an LSTM, GRU or RNN in the body of a Scan or Loop become layers; others stay, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.fallback import BOOL, I64, F, body, model, node
from support.simulated import check_simulated, kinds

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext
from optdnn.passes.looped_cells import LoopedCells
from optdnn.passes.unrolled_cells import MOST_ROWS

STEPS, BATCH, WIDTH, HIDDEN = 7, 2, 3, 4
GPU = PassContext(target="cuda:sm_90a")
GATES = {"LSTM": 4, "TF": 4, "GRU": 3, "Keras": 3, "RNN": 1}
LAYER = {"LSTM": "LSTM", "TF": "LSTM", "GRU": "GRU", "Keras": "GRU", "RNN": "RNN"}


def lstm(p: str) -> list[onnx.NodeProto]:
    """The arithmetic of an LSTM after its gates' arguments ``i``, ``f``, ``g``, ``o``; its state is ``h1``, its cell ``c1``."""
    return [
        *(node("Sigmoid", p + k, p + "s" + k) for k in "ifo"), node("Tanh", p + "g", p + "tg"),
        node("Mul", f"{p}sf {p}c", p + "fc"), node("Mul", f"{p}si {p}tg", p + "ig"), node("Add", f"{p}fc {p}ig", p + "c1"),
        node("Tanh", p + "c1", p + "tc"), node("Mul", f"{p}so {p}tc", p + "h1"),
    ]  # fmt: skip


def gru(p: str, kept: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The arithmetic of a GRU: products of the input in ``m``, of the state in ``r``. ``kept``: from ``n`` and ``z`` to ``h1``."""
    return [
        node("Split", p + "m", f"{p}xz {p}xr {p}xn", axis=1, num_outputs=3),
        node("Split", p + "r", f"{p}hz {p}hr {p}hn", axis=1, num_outputs=3),
        node("Add", f"{p}xz {p}hz", p + "z0"), node("Sigmoid", p + "z0", p + "z"),
        node("Add", f"{p}xr {p}hr", p + "q0"), node("Sigmoid", p + "q0", p + "q"),
        node("Mul", f"{p}q {p}hn", p + "qn"), node("Add", f"{p}xn {p}qn", p + "n0"), node("Tanh", p + "n0", p + "n"), *kept,
    ]  # fmt: skip


def cell(kind: str, x: str, p: str) -> list[onnx.NodeProto]:
    """A step with the input ``x``. Names begin with ``p``."""
    products = [
        node("MatMul", f"{x} {p}W", p + "m0"), node("Add", f"{p}m0 {p}B", p + "m"), node("MatMul", f"{p}h {p}R", p + "r"),
    ]  # fmt: skip
    if kind == "TF":  # the input and the state side by side, and a bias of the forget gate
        return [
            node("Concat", f"{x} {p}h", p + "xh", axis=1), node("MatMul", f"{p}xh {p}WR", p + "m0"),
            node("Add", f"{p}m0 {p}B", p + "a"), node("Split", p + "a", f"{p}i {p}g {p}f0 {p}o", axis=1, num_outputs=4),
            node("Add", f"{p}f0 one", p + "f"), *lstm(p),
        ]  # fmt: skip
    if kind == "LSTM":
        split = node("Split", p + "a", f"{p}i {p}f {p}g {p}o", axis=1, num_outputs=4)
        return [*products, node("Add", f"{p}m {p}r", p + "a"), split, *lstm(p)]
    if kind == "RNN":
        return [*products, node("Add", f"{p}m {p}r", p + "a"), node("Tanh", p + "a", p + "h1")]
    if kind == "GRU":  # PyTorch's h' = n + z (h - n)
        kept = [
            node("Sub", f"{p}h {p}n", p + "d"), node("Mul", f"{p}z {p}d", p + "zd"), node("Add", f"{p}n {p}zd", p + "h1"),
        ]  # fmt: skip
    else:
        kept = [
            node("Sub", f"one {p}z", p + "k"), node("Mul", f"{p}k {p}n", p + "kn"), node("Mul", f"{p}z {p}h", p + "zh"),
            node("Add", f"{p}kn {p}zh", p + "h1"),
        ]  # fmt: skip
    return [*products, *gru(p, kept)]


def constants(kind: str, p: str, width: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    sizes = {"W": (width, -1), "R": (HIDDEN, -1), "B": (-1,), "WR": (width + HIDDEN, -1)}
    names = ("WR", "B") if kind == "TF" else ("W", "R", "B")
    gates = GATES[kind] * HIDDEN
    return {p + k: rng.standard_normal([gates if n < 0 else n for n in sizes[k]]) / 3 for k in names}


def net(
    kind: str = "LSTM", *, layers: int = 1, loop: bool = False, backward: bool = False, before: Sequence[onnx.NodeProto] = (),
    after: Sequence[onnx.NodeProto] = (), reads: str = "xt", row: str = "", rows: Any = HIDDEN, batch: Any = BATCH,
    steps: Any = STEPS, more: Sequence[str] = (), largest: bool = False,
) -> Graph:  # fmt: skip
    """A loop over ``layers`` cells. ``before``: operators that make ``reads`` of the input; ``after``: those that make ``row`` of
    the states. ``more``: further results of each step, of the size of a state. ``largest``: one more state, the largest result so
    far."""
    nodes, states, following, given = list(before), list[str](), list[str](), dict[str, Any](one=1.0)
    for k in range(layers):
        p = f"l{k}_"
        nodes += cell(kind, reads if k == 0 else f"l{k - 1}_h1", p)
        given |= constants(kind, p, WIDTH if k == 0 else HIDDEN, k)
        states += [p + "h", *([p + "c"] if LAYER[kind] == "LSTM" else [])]
        following += [p + "h1", *([p + "c1"] if LAYER[kind] == "LSTM" else [])]
    if largest:
        nodes.append(node("Max", "u l0_h1", "u1"))
        states, following = ["u", *states], ["u1", *following]
    last = row or f"l{layers - 1}_h1"
    nodes += [*after, *(node("Identity", name, f"y{k}") for k, name in enumerate((last, *more)))]
    size = [batch, HIDDEN]
    rest = [(s, F, size) for s in states]
    results = [*((s, F, size) for s in following), ("y0", F, [batch, rows])]
    results += [(f"y{k + 1}", F, size) for k in range(len(more))]
    begins, ends = [s + "0" for s in states], [s + "n" for s in states]
    stacks = [f"ys{k}" for k in range(1 + len(more))]
    if loop:
        nodes = [node("Identity", "c", "go"), node("Gather", "x i", "xt", axis=0), *nodes]
        inner = body(nodes, [("i", I64, []), ("c", BOOL, []), *rest], [("go", BOOL, []), *results])
        given["trips"] = steps
        whole = node("Loop", " ".join(["trips -", *begins]), " ".join([*ends, *stacks]), body=inner)
    else:
        inner, way = body(nodes, [*rest, ("xt", F, [batch, WIDTH])], results), int(backward)
        whole = node(
            "Scan", " ".join([*begins, "x"]), " ".join([*ends, *stacks]), body=inner, num_scan_inputs=1,
            scan_input_directions=[way], scan_output_directions=[way] * len(stacks),
        )  # fmt: skip
    inputs = [("x", F, [steps, batch, WIDTH]), *((s, F, size) for s in begins)]
    outputs = [(s, F, None) for s in (*ends, *stacks)]
    given |= {
        "P": np.arange(WIDTH**2, dtype=np.float32).reshape(WIDTH, WIDTH) / 9,
        "Q": np.arange(HIDDEN * 5).reshape(HIDDEN, 5) * 1.0,
    }
    return import_model(model([whole], inputs, outputs, **given))


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_a_cell(kind: str, loop: bool) -> None:
    after, _ = check_pass(LoopedCells(), net(kind, loop=loop), changes=1, rules={"looped_cells": 1}, context=GPU)
    assert after.kinds()[LAYER[kind]] == 1
    assert not after.of_kind("Loop", "Scan", "Tanh", "Sigmoid")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_backward(kind: str) -> None:
    after, _ = check_pass(LoopedCells(), net(kind, backward=True), changes=1, context=GPU)
    assert after.of_kind(kind)[0].attrs.direction == "reverse"


@pytest.mark.slow
def test_layers_of_one_loop_and_operators_around_them() -> None:
    """A projection before the first layer, and a classifier of the second one, which are computed for all steps at once."""
    around = {
        "before": [node("MatMul", "xt P", "p"), node("Relu", "p", "xr")],
        "after": [node("MatMul", "l1_h1 Q", "q"), node("Softmax", "q", "row")],
    }
    before = net(layers=2, reads="xr", row="row", rows=5, **around)  # type: ignore[arg-type]
    after, _ = check_pass(LoopedCells(), before, changes=1, context=GPU)
    assert (after.kinds()["LSTM"], after.kinds()["Softmax"]) == (2, 1)
    assert not after.of_kind("Scan")
    program = check_simulated(net(layers=2, reads="xr", row="row", rows=5, steps=1500, **around), "fp32")  # type: ignore[arg-type]
    assert "host" not in {s.executor for s in program.steps}
    assert "Scan" not in kinds(program)


def test_the_state_before_each_step() -> None:
    after, _ = check_pass(LoopedCells(), net("GRU", more=["l0_h"]), changes=1, context=GPU)
    assert after.kinds()["GRU"] == 1
    assert not after.of_kind("Scan")


@pytest.mark.parametrize(("kind", "more"), [("LSTM", ["l0_so", "l0_ig"]), ("GRU", ["l0_z", "l0_n"])])
def test_gates_of_each_step(kind: str, more: list[str]) -> None:
    """The Split of the gates, which stays in a loop, has several results that operators after the loop read."""
    after, _ = check_pass(LoopedCells(), net(kind, more=more), changes=1, context=GPU)
    assert after.kinds()[kind] == 1


@pytest.mark.slow
def test_a_state_of_another_form_stays_in_a_loop() -> None:
    after, _ = check_pass(LoopedCells(), net("LSTM", largest=True, more=["u1"]), changes=1, context=GPU)
    (scan,) = after.of_kind("Scan")
    assert (scan.attrs.states, scan.attrs.body.graph.kinds()) == (1, {"Max": 1})
    program = check_simulated(net("LSTM", largest=True, more=["u1"], steps=1500), "fp32")
    assert "PointwiseScan" in kinds(program)


def test_an_operator_that_takes_one_step_at_a_time_stays_in_a_loop() -> None:
    """A sort of the states of each step, which is not computed for all steps at once."""
    sort = [node("Constant", "", "two", value_ints=[2]), node("TopK", "l0_h1 two", "row places")]
    after, _ = check_pass(LoopedCells(), net("GRU", after=sort, row="row", rows=2), changes=1, context=GPU)
    (scan,) = after.of_kind("Scan")
    assert (scan.attrs.states, scan.attrs.body.graph.kinds()) == (0, {"TopK": 1})
    places = net("GRU", after=[*sort, node("Cast", "places", "p", to=F)], row="p", rows=2)
    check_pass(LoopedCells(), places, changes=1, context=GPU)


def test_refusals() -> None:
    cells = net("LSTM", more=["l0_c1"])
    check_refused(LoopedCells(), cells, because="cells of steps before the last one are read elsewhere", context=GPU)
    for read in (
        "l0_tc",
        "l0_fc",
    ):  # the tanh of the cell, and the kept part of it: the layer's arithmetic, read once more
        cells = net("LSTM", more=[read])
        check_refused(
            LoopedCells(), cells, because="cells of steps before the last one are read elsewhere", context=GPU
        )
    many = net("RNN", batch=MOST_ROWS + 1)
    check_refused(LoopedCells(), many, because="enough rows for a launch of its own", context=GPU)


def test_sizes_that_are_not_known() -> None:
    count = [node("Greater", "l0_h1 one", "g"), node("NonZero", "g", "nz"), node("Shape", "nz", "n")]
    count += [node("Cast", "n", "nf", to=F), node("ReduceSum", "nf", "m", keepdims=0), node("Add", "l0_h1 m", "row")]
    check_refused(LoopedCells(), net(after=count, row="row"), because="sizes in its body are not known", context=GPU)


def test_results_that_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.passes.divided_loops.MOST_BYTES", 100)
    around = net(before=[node("MatMul", "xt P", "p"), node("Relu", "p", "xr")], reads="xr")
    check_refused(LoopedCells(), around, because="would take too much memory", context=GPU)


def test_an_input_that_depends_on_the_step_before() -> None:
    """A decoder that attends to its state: here the input is weighted by the largest element of the state."""
    before = [node("ReduceMax", "l0_h axis", "most", keepdims=1), node("Mul", "xt most", "xr")]
    inner = net("GRU", before=[node("Constant", "", "axis", value_ints=[1]), *before], reads="xr")
    check_refused(LoopedCells(), inner, because="depends on the step before it", context=GPU)


def test_networks_without_a_candidate() -> None:
    check_untouched(LoopedCells(), net("RNN"))  # no GPU
    check_untouched(LoopedCells(), net("LSTM", steps=3), GPU)
    check_untouched(LoopedCells(), net("LSTM", steps="t"), GPU)
    check_untouched(LoopedCells(), net("LSTM", batch="n"), GPU)
