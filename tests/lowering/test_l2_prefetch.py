"""Weights are prefetched into L2: which launches prefetch which pieces, and which prefetches an engine may contain."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import lowered, simulate

from optdnn.errors import EngineError
from optdnn.lowering import l2_prefetch as ahead
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import Ahead, parse
from optdnn.runtime.program import Program

WINDOW = 96 << 10
SMALL = replace(of_arch("sm_90a"), l2_bytes=1 << 10)
"""A GPU with an L2 that is too small for the weights of almost any network."""


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller pieces, which fit the small L2."""
    monkeypatch.setattr(ahead, "LEAST", 4 << 10)
    monkeypatch.setattr(ahead, "WAITED", 0.0)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Convolutions, whose launches can prefetch, and two products, which read most weights. Nothing is prefetched yet."""
    n = Net()
    x = n.input(1, 64, 14, 14)
    for width in (64, 64, 128, 128):
        x = n.op("Relu", n.conv(x, width))
    x = n.gemm(n.op("Flatten", n.max_pool(x, 2)), 40)
    graph = n.done(n.gemm(n.op("Relu", x), 24))
    monkeypatch.setattr("optdnn.lowering.cuda.with_ahead", lambda program, gpu, seconds: program)
    return lowered(graph)


def pieces(program: Program) -> Iterator[tuple[int, Ahead]]:
    for k, step in enumerate(program.steps):
        for r in parse(step, program).launch.relocations:  # type: ignore[union-attr]
            if isinstance(r, Ahead):
                yield k, r


def readers(program: Program, buffer: int) -> list[int]:
    return [k for k, s in enumerate(program.steps) if buffer in s.inputs]


def test_pieces_are_later_constants_in_order_and_none_is_prefetched_twice(program: Program) -> None:
    after = ahead.with_ahead(program, SMALL, {}, WINDOW)
    found = list(pieces(after))
    assert len(found) >= 5
    assert after.meta["ahead_bytes"] == sum(r.bytes for _, r in found)
    brought: dict[int, int] = {}
    for k, r in found:
        function = after.kernels[after.steps[k].params["launch"]["kernel"]].function
        assert r.at in ahead.CARRIERS[function]
        assert min(readers(after, r.buffer)) > k
        assert r.offset == brought.get(r.buffer, 0)
        assert r.bytes % 16 == 0
        brought[r.buffer] = r.offset + r.bytes
        assert brought[r.buffer] <= (after.buffers[r.buffer].nbytes or 0)
    first = [min(readers(after, r.buffer)) for _, r in found]
    assert first == sorted(first)


@pytest.mark.parametrize("window", [32 << 10, WINDOW])
def test_unused_pieces_fit_the_window(program: Program, window: int) -> None:
    after = ahead.with_ahead(program, SMALL, dict.fromkeys(range(len(program.steps)), 1e-3), window)
    found = list(pieces(after))
    assert found
    for now in range(len(after.steps)):
        waiting = sum(r.bytes for k, r in found if k <= now < min(readers(after, r.buffer)))
        assert waiting <= window


def test_a_launch_prefetches_no_more_than_memory_can_deliver_meanwhile(program: Program) -> None:
    idle = ahead.with_ahead(program, SMALL, dict.fromkeys(range(len(program.steps)), 1e-7), WINDOW)
    busy = ahead.with_ahead(program, SMALL, dict.fromkeys(range(len(program.steps)), 1e-4), WINDOW)
    assert idle.meta["ahead_bytes"] < busy.meta["ahead_bytes"]


def test_constants_that_cost_no_wait_are_not_prefetched(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "WAITED", 0.1)
    assert not list(pieces(ahead.with_ahead(program, SMALL, dict.fromkeys(range(len(program.steps)), 1e-3), WINDOW)))
    assert list(pieces(ahead.with_ahead(program, SMALL, dict.fromkeys(range(len(program.steps)), 1e-7), WINDOW << 4)))


def test_results_do_not_depend_on_prefetches(program: Program) -> None:
    after = ahead.with_ahead(program, SMALL, {}, WINDOW)
    assert list(pieces(after))
    feeds = {spec.name: v for (spec, _), v in zip(program.inputs, _feeds(program), strict=True)}
    before, same = simulate(program, feeds), simulate(after, feeds)
    assert all(np.array_equal(before[name], same[name]) for name in before)


def _feeds(program: Program) -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(spec.shape).astype(spec.dtype) for spec, _ in program.inputs]


def test_networks_whose_weights_fit_l2_stay_as_they_are(program: Program) -> None:
    assert ahead.with_ahead(program, of_arch("sm_90a"), {}) is program


def test_other_architectures_stay_as_they_are(program: Program) -> None:
    other = replace(of_arch("sm_80"), l2_bytes=1 << 10)
    assert ahead.with_ahead(program, other, {}, WINDOW) is program


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({2: 10**6}, "a buffer into L2 that does not exist"),
        ({2: "an activation"}, "something other than a part of a constant"),
        ({3: 8}, "something other than a part of a constant"),
        ({4: 8}, "something other than a part of a constant"),
        ({4: 1 << 40}, "something other than a part of a constant"),
        ({1: 4090}, "outside of its parameters"),
        ({4: -16}, "for a size"),
    ],
)
def test_an_engine_cannot_name_other_memory(program: Program, change: dict[int, Any], why: str) -> None:
    after = ahead.with_ahead(program, SMALL, {}, WINDOW)
    k, _ = next(pieces(after))
    step = copy.deepcopy(after.steps[k])
    launch: Any = step.params["launch"]
    entry = next(r for r in launch["relocations"] if r[0] == "ahead")
    for at, value in change.items():
        entry[at] = step.outputs[0] if value == "an activation" else value
    with pytest.raises(EngineError, match=why):
        parse(step, after)
