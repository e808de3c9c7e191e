"""The waste of the arena planner, on shapes of well-known networks and on random ones, and the time of planning."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.arenas import overlaps
from support.processor import assert_quick, seconds

from optdnn.lowering.memory import ORDERS, Interval, Use, lifetimes, plan


def network(kind: str) -> tuple[list[Use], dict[int, int]]:
    """Activations of well-known shapes of networks, in bytes of fp16 at batch 1."""
    steps: list[Use] = []
    sizes: dict[int, int] = {}

    def op(inputs: Sequence[int], size: int, scratch: int = 0) -> int:
        out = len(sizes)
        sizes[out] = size
        if scratch:
            sizes[out + 1] = scratch
        steps.append(Use(inputs, (out, out + 1) if scratch else (out,)))
        return out

    def act(c: int, s: int) -> int:
        return 2 * c * s * s

    if kind == "resnet50":
        x = op((op((), act(64, 112)),), act(64, 56))
        for width, size, depth in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)):
            for i in range(depth):
                short = op((x,), act(4 * width, size)) if i == 0 else x
                y = op((op((x,), act(width, size)),), act(width, size))
                x = op((y, short), act(4 * width, size))
    elif kind == "densenet121":
        x = op((op((), act(64, 112)),), act(64, 56))
        for size, depth in ((56, 6), (28, 12), (14, 24), (7, 16)):
            parts = [x]
            for _ in range(depth):
                joined = op(tuple(parts), sum(sizes[p] for p in parts))
                parts.append(op((op((joined,), act(128, size)),), act(32, size)))
            x = op((op(tuple(parts), sum(sizes[p] for p in parts)),), sum(sizes[p] for p in parts) // 8)
    elif kind == "unet":
        skips = []
        x = op((), act(64, 512))
        for c, s in ((64, 512), (128, 256), (256, 128), (512, 64)):
            x = op((op((x,), act(c, s)),), act(c, s), scratch=act(c, s) // 2)
            skips.append(x)
            x = op((x,), act(c, s // 2))
        x = op((x,), act(1024, 32))
        for (c, s), skip in zip(((512, 64), (256, 128), (128, 256), (64, 512)), reversed(skips), strict=True):
            x = op((op((op((op((x,), act(c, s)), skip), act(2 * c, s)),), act(c, s)),), act(c, s))
    elif kind == "inception":
        x = op((), act(64, 56))
        for size in (28, 14, 7):
            for _ in range(4):
                a = op((x,), act(96, size))
                b = op((op((x,), act(48, size)),), act(128, size))
                c = op((op((op((x,), act(16, size)),), act(48, size)),), act(64, size))
                d = op((op((x,), act(256, size)),), act(64, size))
                x = op((a, b, c, d), act(352, size))
    else:
        hidden, tokens = 768, 384
        mask = op((), 2 * tokens * tokens)
        x = op((), 2 * tokens * hidden)
        for _ in range(12):
            q, k, v = (op((x,), 2 * tokens * hidden) for _ in range(3))
            scores = op((op((q, k), 2 * 12 * tokens * tokens), mask), 2 * 12 * tokens * tokens)
            y = op((op((op((scores, v), 2 * tokens * hidden),), 2 * tokens * hidden), x), 2 * tokens * hidden)
            x = op((op((op((y,), 8 * tokens * hidden),), 2 * tokens * hidden), y), 2 * tokens * hidden)
    return steps, sizes


@pytest.mark.parametrize("kind", ["resnet50", "densenet121", "unet", "inception", "bert"])
def test_networks_fit_in_a_tenth_more_than_their_live_set(kind: str) -> None:
    steps, sizes = network(kind)
    found = plan(steps, sizes)
    assert not overlaps(list(lifetimes(steps, sizes).values()), [found.offsets[i] for i in lifetimes(steps, sizes)])
    assert found.live_bytes <= found.arena_bytes <= 1.1 * found.live_bytes


def test_random_networks_waste_little() -> None:
    """Seeded networks of mixed sizes with skip connections: waste is well below the allowed tenth."""
    rng = random.Random(7)
    ratios = []
    for _ in range(20):
        steps = [Use((), (0,))]
        sizes = {0: 1 << rng.randint(10, 20)}
        for i in range(1, 150):
            back = [i - 1] + ([rng.randrange(max(0, i - 12), i)] if rng.random() < 0.3 else [])
            steps.append(Use(back, (i,)))
            sizes[i] = rng.choice([sizes[i - 1], 1 << rng.randint(10, 20), rng.randint(1000, 500_000)])
        found = plan(steps, sizes)
        ratios.append(found.arena_bytes / found.live_bytes)
    assert max(ratios) <= 1.05


@pytest.mark.slow
def test_every_order_is_worth_its_place() -> None:
    """Every order of ORDERS is useful: for each one there is an example in which only it finds the smallest arena."""
    from optdnn.lowering import memory

    rng = random.Random(1)
    winners: set[int] = set()
    for _ in range(3000):
        intervals = [
            Interval(64 * rng.randint(1, 9), s := rng.randint(0, 6), s + rng.randint(0, 4))
            for _ in range(rng.randint(3, 14))
        ]
        arenas = [memory._place(intervals, memory._neighbors(intervals), order(intervals))[1] for order in ORDERS]
        if arenas.count(min(arenas)) == 1:
            winners.add(arenas.index(min(arenas)))
    assert winners == set(range(len(ORDERS)))


@pytest.mark.slow
def test_planning_grows_gently() -> None:
    """7,000 buffers (the largest real graph) take seconds of processor time, independent of other load on the machine."""
    rng = random.Random(0)
    steps = [Use((), (0,))]
    sizes = {0: 1 << 16}
    for i in range(1, 7000):
        steps.append(Use([i - 1, rng.randrange(max(0, i - 20), i)], (i,)))
        sizes[i] = rng.randint(1, 1 << 16)
    assert_quick(lambda: seconds(lambda: plan(steps, sizes)), 6.0, tries=2)
