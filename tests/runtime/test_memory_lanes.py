"""The arena planner for parallel steps: a plan is right for each order that the lanes allow, and wastes little."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arenas import check_by_execution, lanes_of, networks

from optdnn.lowering.memory import Use, _largest_together, _Order, lifetimes, plan
from optdnn.runtime.program import Slot
from optdnn.runtime.simulate.runner import some_order
from optdnn.runtime.steps.lanes import masks_of, waits_of


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(networks(), st.integers(0, 10**6))
def test_plans_survive_execution_in_any_order_that_lanes_allow(
    network: tuple[list[Use], dict[int, int]], seed: int
) -> None:
    steps, sizes = network
    rng = random.Random(seed)
    slots = lanes_of(steps, rng)
    waits = waits_of(slots) or []
    before = masks_of(waits)
    found = plan(steps, sizes, before=before)
    for _ in range(6):
        order = some_order(waits, rng)
        check_by_execution([steps[k] for k in order], sizes, found)
    if max(s.lane for s in slots) == 0:
        assert found == plan(steps, sizes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(networks(), st.integers(0, 10**6))
def test_buffers_that_live_together_are_those_of_the_definition(
    network: tuple[list[Use], dict[int, int]], seed: int
) -> None:
    steps, sizes = network
    before = masks_of(waits_of(lanes_of(steps, random.Random(seed))) or [])
    live = lifetimes(steps, sizes)
    order, keys = _Order.of(steps, live, before), list(live)
    found = order.neighbors(keys, {i: i for i in live})

    def follows(one: int, other: int) -> bool:
        """Whether all users of one buffer have ended when the other is first written."""
        return not order.users[one] & ~order.ended[other]

    alike = [[b for b in keys if b != a and not follows(a, b) and not follows(b, a)] for a in keys]
    assert [[keys[n] for n in row] for row in found] == alike
    assert _largest_together([sizes[i] for i in keys], found) == largest_together([sizes[i] for i in keys], found)


def largest_together(sizes: Sequence[int], neighbors: Sequence[Sequence[int]]) -> int:
    """For each buffer, it and its largest neighbors in turn that are neighbors of all taken so far."""
    peak = 0
    for first in range(len(sizes)):
        taken = [first]
        for j in sorted(neighbors[first], key=lambda j: (-sizes[j], j)):
            taken += [j] if all(j in neighbors[i] for i in taken) else []
        peak = max(peak, sum(sizes[i] for i in taken))
    return peak


def test_an_order_that_lanes_do_not_allow_shows() -> None:
    """The check above finds a plan that was made for steps in sequence."""
    steps = [Use((), (0,)), Use((0,), (1,)), Use((), (2,)), Use((2,), (3,)), Use((1, 3), (4,))]
    sizes = dict.fromkeys(range(5), 64)
    slots = [Slot(0), Slot(0), Slot(1), Slot(1), Slot(0, (3,))]
    waits = waits_of(slots) or []
    apart = [0, 2, 1, 3, 4]
    with pytest.raises(AssertionError, match="was overwritten"):
        check_by_execution([steps[k] for k in apart], sizes, plan(steps, sizes))
    check_by_execution([steps[k] for k in apart], sizes, plan(steps, sizes, before=masks_of(waits)))


def test_in_place_only_where_nobody_else_can_be_reading() -> None:
    """Step 1 may write 1 over 0 if step 2, which also reads 0, comes before it, but not if both are in parallel."""
    steps = [Use((), (0,)), Use((0,), (2,)), Use((0,), (1,), [(1, 0)]), Use((1, 2), (3,))]
    sizes = dict.fromkeys(range(4), 64)
    beside = [[], [0], [0], [1, 2]]
    ordered = [[], [0], [1], [2]]
    assert plan(steps, sizes, before=masks_of(ordered)).offsets[1] == plan(steps, sizes).offsets[1] == 0
    apart = plan(steps, sizes, before=masks_of(beside))
    assert apart.offsets[1] != apart.offsets[0]
    assert apart.arena_bytes == apart.live_bytes == 256 - 64


def heaviest_antichain(steps: Sequence[Use], sizes: Mapping[int, int], before: Sequence[int]) -> int:
    """The largest sum of sizes of buffers that can be live at the same time, found by trying every set of a few buffers."""
    users = {i: {k for k, s in enumerate(steps) if i in (*s.inputs, *s.outputs)} for i in sizes}
    writer = {i: k for k, s in enumerate(steps) for i in s.outputs}

    def together(i: int, j: int) -> bool:
        return any(not before[writer[j]] >> k & 1 for k in users[i]) and any(
            not before[writer[i]] >> k & 1 for k in users[j]
        )

    best, sets = 0, [(0, ())]
    for i in sizes:
        sets += [(w + sizes[i], (*m, i)) for w, m in sets if all(together(i, j) for j in m)]
    for w, _ in sets:
        best = max(best, w)
    return best


def test_concurrent_plans_waste_little() -> None:
    """Forks and joins of random branches on lanes: the arena is within a tenth of the largest set that can be live at the same
    time."""
    rng = random.Random(11)
    ratios, exact = [], 0
    for _ in range(25):
        steps, sizes = [Use((), (0,))], {0: 64 * rng.randint(20, 200)}
        tails = [0]
        while len(sizes) < 13:
            ends = []
            for _ in range(rng.randint(1, 3)):
                last = tuple(tails)
                for _ in range(rng.randint(1, 3)):
                    new = len(sizes)
                    sizes[new] = 64 * rng.randint(5, 200)
                    steps.append(Use(last, (new,)))
                    last = (new,)
                ends.append(last[0])
            tails = ends
        slots = lanes_of(steps, rng)
        before = masks_of(waits_of(slots) or [])
        found = plan(steps, sizes, before=before)
        bound = heaviest_antichain(steps, sizes, before)
        assert found.live_bytes <= bound <= found.arena_bytes
        exact += found.live_bytes == bound
        ratios.append(found.arena_bytes / bound)
    assert max(ratios) <= 1.1
    assert exact >= 20, "the greedy bound is nearly always the true one"
