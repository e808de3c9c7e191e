"""roll_scans: unrolled recurrences of pointwise steps become one PointwiseScan."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net, built
from support.scan_cases import CASES, STEPS, graph_of, multiplied, stacked, taken, zeros

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes import roll_scans
from optdnn.passes.roll_scans import RollScans

PASS = RollScans()


@pytest.mark.parametrize("name", CASES)
def test_steps_become_one_scan(name: str) -> None:
    changes = 2 if "other" in name else 1 + STEPS if "multiplied" in name else 1
    graph, _ = check_pass(PASS, graph_of(name), changes=changes)
    (scan,) = graph.of_kind("PointwiseScan")
    assert scan.attrs.steps >= STEPS - 2
    assert scan.attrs.backward == ("backward" in name)


def test_the_results_of_steps_that_stay_are_joined_with_the_others() -> None:
    """Odd steps at the beginning are not part of the scan; the last of them computes the scan's first state."""
    for backward in (False, True):
        graph, _ = check_pass(PASS, graph_of("", odd=8 if backward else 2, backward=backward), changes=1)
        (scan,) = graph.of_kind("PointwiseScan")
        assert scan.attrs.steps == STEPS - 3
        assert len(graph.of_kind("Concat")) == 1


def test_states_may_be_equal_at_first() -> None:
    """Where the first step computes one value for both, it is no part of the scan unless the states after it differ."""
    for name, steps in (("two_sums", STEPS), ("equal_sums", STEPS - 1)):
        graph, _ = check_pass(PASS, graph_of(name), changes=1)
        assert [op.attrs.steps for op in graph.of_kind("PointwiseScan")] == [steps]


def test_the_batch_may_be_symbolic() -> None:
    n = Net()
    x = n.input(symbol("N"), STEPS, 4)
    state, rows = taken(n, x, 1, 0), []
    for t in range(1, STEPS):
        state = n.op("Tanh", n.op("Add", n.op("Mul", state, 0.9), taken(n, x, 1, t)))
        rows.append(state)
    check_pass(PASS, n.done(stacked(n, rows, 1)), changes=1, sizes={"N": 3})


@pytest.mark.parametrize("kind", ["Relu", "Exp"])
def test_steps_that_read_no_state_stay(kind: str) -> None:
    n = Net()
    x = n.input(2, STEPS, 4)
    rows = [n.op(kind, taken(n, x, 1, t)) for t in range(STEPS)]
    check_refused(PASS, n.done(stacked(n, rows, 1)), because="no step reads a result of the previous step")


def test_a_different_step_near_the_end_stops_it() -> None:
    check_refused(PASS, graph_of("", odd=8), because="only 2 steps at its end do the same")


def test_steps_of_other_shapes_stay() -> None:
    n = Net()
    x, state, rows = n.input(2, STEPS, 4), zeros(n, 2, 4), []
    for t in range(STEPS):
        state = n.op("Tanh", n.op("Add", state, taken(n, x, 1, t)))
        rows.append(n.op("Mul", state, n.random(3, 1, 1)))
    graph = n.done(stacked(n, rows, 0))
    check_refused(PASS, graph, because="only 1 steps at its end")  # each has a factor of its own
    n = Net()
    x, state, rows, w = n.input(2, STEPS, 4), zeros(n, 2, 4), [], n.random(3, 1, 1)
    for t in range(STEPS):
        state = n.op("Tanh", n.op("Add", state, taken(n, x, 1, t)))
        rows.append(n.op("Mul", state, w))
    check_refused(PASS, n.done(stacked(n, rows, 0)), because=r"differ in shape: \[2, 4\], \[3, 2, 4\]")


def test_states_that_move_along_stay() -> None:
    """Each step reads a state that the previous step copied from another state: there are as many states as steps."""
    n = Net()
    x, rows = n.input(2, STEPS, 4), []
    cells = [n.input(2, 4, name=f"c{k}") for k in range(STEPS + 1)]
    for t in range(STEPS):
        now = taken(n, x, 1, t)
        cells = [n.op("Mul", c, now) for c in cells[1 : STEPS + 1 - t]]
        rows.append(n.op("Add", cells[0], now))
    check_refused(PASS, n.done(stacked(n, rows, 1)), because="read other states than the later steps")


def test_products_with_other_rows_stay() -> None:
    graph, _ = check_pass(PASS, built(multiplied, mixed=True), changes=STEPS, rules={"outer_step": STEPS})
    assert len(graph.of_kind("MatMul")) == STEPS


def test_large_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_scans, "MOST_ELEMENTS", 500)
    check_refused(PASS, graph_of("reduced"), because="take longer than a launch for each step")


def selective(count: int = STEPS, *, mixed: bool = False) -> Graph:
    """A selective scan (VMamba): a step's addend is multiplied before it gets the axis of states, and the sum over this axis
    keeps the axis for the Concat. ``mixed``: one factor is a matrix."""
    n = Net()
    x, d, b = n.input(2, count, 4), n.input(2, count, 4, name="d"), n.input(2, count, 3, name="b")
    x = n.op("Tanh", x)
    state, rows, w = zeros(n, 2, 4, 3), [], n.random(2, 4)
    for t in range(count):
        now = n.op("Mul", taken(n, x, 1, t), w if mixed else taken(n, d, 1, t))
        added = n.op("Mul", n.op("Unsqueeze", now, n.ints(2)), n.op("Unsqueeze", taken(n, b, 1, t), n.ints(1)))
        decay = n.op("Exp", n.op("Neg", n.op("Unsqueeze", taken(n, x, 1, t), n.ints(2))))
        state = n.op("Add", n.op("Mul", state, decay), added)
        rows.append(n.op("ReduceSum", state, n.ints(2), attrs=ReduceAttrs(True)))
    return n.done(n.op("Concat", *rows, attrs=ConcatAttrs(2)))


def test_views_inside_steps_and_sums_that_keep_their_axis() -> None:
    graph, _ = check_pass(PASS, selective(), changes=STEPS + 1, rules={"view_before_step": STEPS, "pointwise_scan": 1})
    assert (len(graph.of_kind("PointwiseScan")), len(graph.of_kind("ReduceSum"))) == (1, 1)


def test_views_of_other_arithmetic_stay() -> None:
    assert not PASS(selective(mixed=True)).fired
    assert not PASS(selective(3)).fired


def test_reductions_along_other_axes_stay() -> None:
    n = Net()
    x, state, rows = n.input(2, STEPS, 4, 4), zeros(n, 2, 4, 4), []
    for t in range(STEPS):
        state = n.op("Tanh", n.op("Add", state, taken(n, x, 1, t)))
        rows.append(n.op("ReduceSum", state, n.ints(1 + t % 2), attrs=ReduceAttrs(False)))
    graph = n.done(stacked(n, rows, 1))
    assert PASS(graph).changes == 0


@pytest.mark.parametrize("bound", ["MOST_STAGES", "MOST_OPERANDS"])
def test_long_steps_stay(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_scans, bound, 4)
    check_refused(PASS, graph_of("gated"), because="takes too many registers")


def test_steps_that_read_final_values_of_others_stay() -> None:
    """The second state of every step needs the last value of the first state, by way of a product."""
    n = Net()
    x, first, firsts = n.input(2, STEPS, 4), zeros(n, 2, 4), []
    for t in range(STEPS):
        first = n.op("Tanh", n.op("Add", n.op("Mul", first, 0.5), taken(n, x, 1, t)))
        firsts.append(first)
    whole, second, rows = n.matmul(first, 4), zeros(n, 2, 4), []
    for t in range(STEPS):
        second = n.op("Tanh", n.op("Add", n.op("Mul", second, whole), taken(n, x, 1, t)))
        rows.append(n.op("Mul", second, firsts[t]))
    check_refused(
        PASS,
        n.done(stacked(n, rows, 1)),
        because="other operands of its steps depend on their results",
        rule="pointwise_scan",
    )


def test_a_last_state_stays_where_others_are_read() -> None:
    n = Net()
    x, state, sums = n.input(2, STEPS, 4), zeros(n, 2, 4), []
    for t in range(STEPS):
        state = n.op("Tanh", n.op("Add", n.op("Mul", state, 0.5), taken(n, x, 1, t)))
        sums.append(n.op("ReduceSum", state, n.ints(1)))
    check_refused(PASS, n.done(state, *sums), because="other steps than the last one", rule="last_state")


def test_what_only_the_last_steps_compute_is_no_part_of_a_scan() -> None:
    """The sum reads twice the states of the last two steps. No other step doubles its state."""
    n = Net()
    x, state, rows = n.input(2, STEPS, 4), zeros(n, 2, 4), []
    for t in range(STEPS):
        state = n.op("Tanh", n.op("Add", n.op("Mul", state, 0.5), taken(n, x, 1, t)))
        rows.append(n.op("Mul", state, 2.0))
    graph = n.done(n.op("Add", rows[-1], rows[-2]))
    check_refused(PASS, graph, because="results of other steps than the last one have readers", rule="last_state")


def test_neighbors_are_no_candidates() -> None:
    n = Net()
    x = n.input(2, 3, 4)
    few = stacked(n, [n.op("Relu", taken(n, x, 1, t)) for t in range(3)], 1)
    y = n.input(8, 4, name="y")
    parts = [n.op("Tanh", n.op("Gather", y, n.ints(k), attrs=GatherAttrs(0))) for k in range(4)]
    unlike = n.op("Concat", *parts, n.random(4, 4), attrs=ConcatAttrs(0))
    check_untouched(PASS, n.done(few, unlike))


def test_positions_in_another_order_stay_apart() -> None:
    n = Net()
    x = n.input(2, 6, 4)
    check_untouched(PASS, n.done(stacked(n, [taken(n, x, 1, t) for t in (0, 1, 3, 2, 4, 5)], 1)))
    graph, _ = check_pass(PASS, n.done(stacked(n, [taken(n, x, 1, t) for t in range(6)], 0)), changes=1)
    assert len(graph.of_kind("Transpose")) == 1
