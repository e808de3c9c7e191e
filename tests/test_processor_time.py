"""The limits of processor time in tests (support.processor): they fail where they should, and measure again where they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import processor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The processor's time; ``clock(s)`` works for that many seconds."""
    now = [0.0]
    monkeypatch.setattr(processor.time, "process_time", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(processor, "_loop", lambda: work(2 * processor.LOOP_S))
    return work


def test_a_limit_grows_on_a_slow_processor_and_then_holds(clock: Callable[[float], None]) -> None:
    assert processor.slowness() == pytest.approx(2)
    processor.assert_quick(lambda: 1.9, 1.0)
    with pytest.raises(AssertionError, match=r"the limit then: \[\(2.1, 2.0"):
        processor.assert_quick(lambda: 2.1, 1.0)


def test_a_fast_processor_does_not_lower_a_limit(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_loop", lambda: clock(processor.LOOP_S / 4))
    assert processor.slowness() == 1


def test_a_slow_measurement_is_repeated() -> None:
    times = [1e9, 1e9, 0.0]
    processor.assert_quick(lambda: times.pop(0), 1.0)
    assert not times


def test_the_least_of_some_runs_counts(clock: Callable[[float], None]) -> None:
    waits = [3.0, 1.0, 2.0]
    assert processor.seconds(lambda: clock(waits.pop(0)), 3) == 1


def test_quadratic_work_is_not_linear(clock: Callable[[float], None]) -> None:
    processor.assert_linear({n: lambda n=n: clock(1e-3 * n) for n in (10, 40)}, 1.8)
    with pytest.raises(AssertionError, match=r"seconds: \{10: 0.*, 40: 1\."):
        processor.assert_linear({n: lambda n=n: clock(1e-3 * n * n) for n in (10, 40)}, 1.8)


def test_linear_work_passes_where_one_measurement_was_slow(clock: Callable[[float], None]) -> None:
    slow = [10.0, 10.0]

    def many() -> None:
        clock(0.04 * (slow.pop() if slow else 1))

    processor.assert_linear({10: lambda: clock(0.01), 40: many}, 1.8)
    assert not slow
