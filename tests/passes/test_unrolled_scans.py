"""unrolled_scans: linear recurrences for all steps at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes import unrolled_scans
from optdnn.passes.support import recurrences
from optdnn.passes.unrolled_scans import UnrolledScans

PASS = UnrolledScans()
BATCH, CHANNELS, SIZE = 2, 3, 4


def taken(n: Net, x: Value, axis: int, index: int) -> Value:
    return n.op("Gather", x, n.const(index, np.int64), attrs=GatherAttrs(axis))  # type: ignore[no-any-return]


def mamba(
    *, count: int = 11, start: float = 0.0, known: bool = True, order: int = 0, skip: int = -1, columns: bool = True,
    shift: int = 0,
) -> Graph:  # fmt: skip
    """A recurrence as in Mamba's exports, and the product of each state with a vector of its step. ``order``: the order of
    operands; ``skip``: a step with the term of another step; ``shift``: a shift of the vectors' positions."""
    n = Net()
    shape = (BATCH, CHANNELS, count, SIZE)
    a = n.op("Sigmoid", n.input(*shape, name="a"))
    b, c = n.input(*shape, name="b"), n.input(BATCH, count, SIZE, name="c")
    state = n.const(np.full((BATCH, CHANNELS, SIZE), start)) if known else n.input(BATCH, CHANNELS, SIZE, name="s")
    results = []
    for t in range(count):
        factors = (taken(n, a, 2, t), state)
        terms = (n.op("Mul", *(factors[::-1] if order else factors)), taken(n, b, 2, 0 if t == skip else t))
        state = n.op("Add", *(terms[::-1] if order else terms))
        column = n.op("Unsqueeze", taken(n, c, 1, (t + shift) % count), n.ints(2))
        y = taken(n, n.op("MatMul", state, column), 2, 0)
        results.append(n.op("Unsqueeze", y, n.ints(2)))
    if not columns:
        return n.done(state)
    return n.done(n.op("Concat", *results, attrs=ConcatAttrs(-1)))


@pytest.fixture
def no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recurrence is so long that rounds are faster than a loop."""
    for module in ("unrolled_scans", "rules.doubled_prefixes"):
        monkeypatch.setattr(f"optdnn.passes.{module}.is_looped", lambda count, size: False)


@pytest.mark.parametrize(("count", "rounds"), [(8, 3), (11, 4), (16, 4)])
@pytest.mark.parametrize("order", [0, 1])
def test_a_long_recurrence_takes_a_round_for_each_doubling(count: int, rounds: int, order: int, no_loops: None) -> None:
    rules = {"linear_recurrence": 1, "stacked_products": 1}
    graph, _ = check_pass(PASS, mamba(count=count, order=order), changes=2, rules=rules)
    assert len(graph.of_kind("Add")) == rounds
    assert len(graph.of_kind("Mul")) == 2 * rounds - 1
    assert (len(graph.of_kind("MatMul")), len(graph.of_kind("Gather"))) == (1, 0)


@pytest.mark.parametrize(
    ("count", "size", "loops"),
    [(16, 1 << 10, True), (1024, 1 << 10, True), (1025, 1 << 10, False), (4096, 1 << 20, False), (4096, 1 << 24, True)],
)
def test_long_recurrences_of_few_states_take_rounds(count: int, size: int, loops: bool) -> None:
    assert recurrences.is_looped(count, size) == loops


@pytest.mark.parametrize("order", [0, 1])
def test_a_recurrence_is_one_loop_over_its_steps(order: int) -> None:
    rules = {"linear_recurrence": 1, "stacked_products": 1}
    graph, _ = check_pass(PASS, mamba(order=order), changes=2, rules=rules)
    (scan,) = graph.of_kind("PointwiseScan")
    assert (scan.attrs.steps, scan.attrs.axes, scan.attrs.result_axes) == (11, (2, 2), (2,))
    assert (len(graph.of_kind("MatMul")), len(graph.of_kind("Gather"))) == (1, 0)


def test_a_last_state_alone(no_loops: None) -> None:
    graph, _ = check_pass(PASS, mamba(columns=False), changes=1, rules={"linear_recurrence": 1})
    assert len(graph.of_kind("Add")) == 4
    assert graph.op(graph.op(graph.outputs[0]).inputs[0]).kind == "Gather"  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_program_of_it_has_a_few_launches(precision: str) -> None:
    assert len(check_simulated(mamba(count=16), precision).steps) < 30


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"start": 0.5}, "first state is not zero"),
        ({"known": False}, "first state is not zero"),
        ({"count": 7}, "7 steps take no more"),
        ({"skip": 5}, "is not a step of the same recurrence"),
    ],
)
def test_other_recurrences_stay(options: dict[str, Any], because: str) -> None:
    check_refused(PASS, mamba(**options), because=because, rule="linear_recurrence")


def test_a_large_recurrence_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolled_scans, "MOST", BATCH * CHANNELS * 11 * SIZE - 1)
    check_refused(PASS, mamba(), because="so large that the rounds", rule="linear_recurrence")


def test_products_of_other_positions_stay() -> None:
    graph = mamba(shift=1)
    report = PASS(graph)
    assert any(
        "does not multiply position 0 of both" in r.reason for r in report.refused if r.rule == "stacked_products"
    )


def test_other_sums_are_no_candidates() -> None:
    n = Net()
    x = n.input(2, 9, 4)
    check_untouched(PASS, n.done(n.op("Add", n.op("Mul", taken(n, x, 1, 8), taken(n, x, 1, 7)), taken(n, x, 1, 6))))
