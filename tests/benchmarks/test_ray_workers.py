"""How the Ray benchmark evaluates the calls of its workers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.ray_workers import Call, calls_of, idle, summary


def test_only_the_time_in_which_all_workers_run_counts() -> None:
    """The second worker starts four calls late. The first one is idle at the end."""
    early = [Call(1, t, t + 1.0, 10) for t in range(8)]
    late = [Call(2, t, t + 1.0, 10) for t in range(4, 12)]
    found = summary(sorted(early + late, key=lambda c: c.began))
    assert (
        found["seconds"] == 2
    )  # from 5, the end of the late worker's first call, to 7, the start of the early worker's last one
    assert found["pictures_per_second"] == 20
    assert (found["rows_per_call"], found["call_ms"], found["idle_ms"]) == (10, 1000.0, 0.0)


def test_time_without_a_call_is_idle() -> None:
    assert idle([Call(1, 0, 1, 1), Call(1, 3, 4, 1), Call(1, 3.5, 6, 1), Call(1, 5, 5.5, 1), Call(1, 7, 8, 1)]) == 3


def test_rows_are_put_together_by_their_call() -> None:
    part = {"process": np.array([7, 7, 8]), "began": np.array([1.0, 1.0, 0.5]), "ended": np.array([2.0, 2.0, 3.0])}
    assert calls_of([part, {n: a[:1] for n, a in part.items()}]) == [Call(8, 0.5, 3.0, 1), Call(7, 1.0, 2.0, 3)]


def test_too_few_calls_are_no_measurement() -> None:
    with pytest.raises(SystemExit, match="more --batches"):
        summary([Call(1, 0.0, 1.0, 10), Call(2, 2.0, 3.0, 10)])
