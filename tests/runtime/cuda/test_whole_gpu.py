"""Tests that need the whole GPU have it alone, and do not wait for a stream of other tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from support.whole_gpu import gpu_taken


def test_a_test_that_needs_the_whole_gpu_has_it_alone(tmp_path: Path) -> None:
    order: list[str] = []
    begun, free = {name: Event() for name in "abcd"}, {name: Event() for name in "abcd"}

    def work(name: str, whole: bool) -> None:
        with gpu_taken(whole, tmp_path):
            order.append(name)
            begun[name].set()
            assert free[name].wait(20)
            order.append(name.upper())

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, name, False) for name in "ab"]
        assert begun["a"].wait(20)
        assert begun["b"].wait(20), "two that share it run at the same time"
        done.append(pool.submit(work, "c", True))
        assert not begun["c"].wait(0.1)
        done.append(pool.submit(work, "d", False))
        assert not begun["d"].wait(0.1), "it waits after the test that needs the whole"
        for name in "abcd":
            free[name].set()
        for future in done:
            future.result(20)
    assert sorted(order[:2]) == ["a", "b"]
    assert sorted(order[2:4]) == ["A", "B"]
    assert order[4:] == ["c", "C", "d", "D"]
