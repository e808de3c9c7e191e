"""The autotuner and lanes: where parallel lanes are kept, and where they are not tried."""

from __future__ import annotations

from typing import Any

import pytest
from support.timer import FakeTimer, hashed
from support.tuned import branchy, tuned

from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.lowering.lane_choice import LaneChoice
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.tuning.timing_cache import TimingCache

pytestmark = pytest.mark.nvrtc


@pytest.mark.parametrize(("factor", "most"), [(0.9, 4), (0.995, 1), (1.2, 1)])
def test_lanes_are_kept_only_where_the_network_is_measured_to_be_faster(factor: float, most: int) -> None:
    cache = TimingCache()
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=factor)
    found, tuner = tuned(timer, cache, branchy())
    assert timer.with_lanes >= 1, "else the test says nothing"
    assert found.streams is not None
    assert found.streams.most == most
    assert found.streams.one_ms is not None
    assert found.streams.lanes_ms is not None
    assert (found.streams.lanes_ms < found.streams.one_ms) == (factor < 1)
    assert found.to_plain()["streams"]["most"] == most
    program = lower_cuda(
        tuner.session.graph,
        tuner.session.options,
        of_arch("sm_90a"),
        {},
        prepared=Prepared(found.choices, found.streams),
    )
    assert bool(program.lanes) == (most > 1)
    said = "measured faster" if most > 1 else "measured not faster"
    assert program.meta["streams"]["why"].startswith(said)
    # Times are in the order of the program's steps. Tuned operators have measured ones.
    times = program.meta["step_times"]["steps"]  # type: ignore[index,call-overload]
    assert {source for _, _, source in times} == {"measured", "predicted"}
    assert found.streams.seconds
    expected = {round(s * 1e6, 4) for s in found.streams.seconds.values()}
    assert {us for us, _, source in times if source == "measured"} <= expected
    for step, (us, _, source) in zip(program.steps, times, strict=True):
        sites = [d for d in program.meta["tactics"] if set(d["nodes"]) & set(step.src)]  # type: ignore[union-attr]
        known = {
            round(found.streams.seconds[d["signature"]] * 1e6, 4)
            for d in sites
            if d["signature"] in found.streams.seconds
        }
        assert source == "predicted" or us in known
    # Another build takes the choice from the cache and gives the same program.
    again = FakeTimer(hashed)
    known, tuner = tuned(again, cache, branchy())
    assert known.cached
    assert not again.trials
    other = lower_cuda(
        tuner.session.graph,
        tuner.session.options,
        of_arch("sm_90a"),
        {},
        prepared=Prepared(known.choices, known.streams),
    )
    assert other.lanes == program.lanes
    assert other.meta == program.meta


def test_lanes_are_not_tried_if_the_build_gives_their_number() -> None:
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=0.5)
    found, _ = tuned(timer, graph=branchy(), streams=1)
    assert timer.with_lanes == 0
    assert found.streams is None
    timer = FakeTimer(lambda name: 10 * hashed(name), lanes=0.5)
    tuned(timer, graph=branchy(), streams=2)
    assert timer.with_lanes > 1


def test_a_chain_has_no_lanes_to_try() -> None:
    timer = FakeTimer(hashed, lanes=0.5)
    found, tuner = tuned(timer)
    assert timer.with_lanes == 0
    program = lower_cuda(
        tuner.session.graph,
        tuner.session.options,
        of_arch("sm_90a"),
        {},
        prepared=Prepared(found.choices, found.streams),
    )
    assert program.meta["streams"] == {"lanes": 1, "why": "nothing is predicted to gain side by side"}


@pytest.mark.parametrize("wrong", [None, 3, {}, {"most": 9, "us": {}, "one_ms": 1, "lanes_ms": 1}])
def test_malformed_records_of_lanes_are_ignored(wrong: Any) -> None:
    assert LaneChoice.of_plain(wrong) is None
