"""How a process with ranks ends: it leaves NCCL first, in a bounded time, and nothing crashes or hangs."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from optdnn.errors import RankError
from optdnn.runtime.cuda.collectives.handle import Handle
from optdnn.runtime.ranks import group as groups
from optdnn.runtime.ranks.group import Group, Hub, join

PROGRAM = """
import ctypes, sys, threading, time, weakref
from optdnn.runtime.cuda.collectives import handle
class Thing: pass
def say(text): print(text, flush=True)
early, late = Thing(), Thing()
weakref.finalize(early, say, "memory")
graphs = threading.Event()
def free(value):
    graphs.wait()  # as NCCL waits for the graphs that hold its calls
    time.sleep(0.3)
    say(f"freed {value}")
made = handle.Handle(lambda: "comm", free)
assert made.made.wait(10) and made.value == "comm"
weakref.finalize(late, lambda: (say("graph"), graphs.set()))
"""


def ended(program: str) -> tuple[int, list[str], float]:
    """The exit code of a program, the lines of its output, and its seconds."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines(), time.monotonic() - start


def test_nccl_ends_after_later_graphs_and_before_earlier_memory() -> None:
    assert ended(PROGRAM)[:2] == (0, ["graph", "freed comm", "memory"])


def test_nccl_that_was_aborted_before_is_waited_for() -> None:
    assert ended(PROGRAM + "made.free()\n")[:2] == (0, ["graph", "freed comm", "memory"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on_exit is glibc's")
def test_an_nccl_that_hangs_neither_keeps_the_process_alive_nor_crashes_it() -> None:
    """The abort stands for the driver's destructor, which would crash while the other thread still works."""
    hangs = PROGRAM.replace("graphs.wait()", "time.sleep(1000)") + (
        "handle.LEAVE_S = 0.5\nctypes.CDLL(None).on_exit(ctypes.CDLL(None).abort, None)\nsys.exit(7)\n"
    )
    code, lines, seconds = ended(hangs)
    assert (code, lines) == (7, ["graph", "memory"])
    assert seconds < 20


def test_a_communicator_that_could_not_be_created() -> None:
    def make() -> None:
        raise ValueError("no")

    freed: list[object] = []
    handle = Handle(make, freed.append)
    assert handle.made.wait(10)
    assert isinstance(handle.value, ValueError)
    handle.free()
    assert handle._done.wait(10)
    assert not freed


def test_the_last_reference_frees() -> None:
    class Owner:
        def __init__(self) -> None:
            self.handle = Handle(lambda: id(self), freed.append)

    freed: list[int] = []
    owner = Owner()
    assert owner.handle.made.wait(10)
    watch, number = weakref.ref(owner), id(owner)
    done = owner.handle._done.wait
    del owner
    gc.collect()
    assert watch() is None
    assert done(10)
    assert freed == [number]


def two() -> list[Group]:
    """The groups of two ranks."""
    hub, found = Hub(2), list[Group]()
    other = threading.Thread(target=lambda: found.append(join(hub.address, 1, 2, hub.token)))
    other.start()
    first = hub.accept(limit=10)
    other.join()
    return [first, *found]


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_leaves_ends_the_waits_of_others(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEFT_S", 0.3)
    both, aborted = two(), threading.Event()
    stays = both[1 - leaves]
    stays.when_lost(aborted.set)
    stays.begin()
    both[leaves].close()
    assert aborted.wait(10)
    with pytest.raises(RankError, match=f"rank {leaves} of 2 left while others ran"):
        stays.check()
    stays.close()


def test_a_rank_that_leaves_while_work_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Group):
        """Reads ``_left`` before the other rank has left, and continues after that."""

        @property
        def _left(self) -> str | None:
            if not self.__dict__.get("left"):
                threading.Thread(target=self._without, args=(1,), daemon=True).start()
                time.sleep(0.3)
            return None

        @_left.setter
        def _left(self, value: str | None) -> None:
            self.__dict__["left"] = value

    monkeypatch.setattr(groups, "LEFT_S", 0.6)
    slow, aborted = Slow(0, 2, [], []), threading.Event()
    slow.when_lost(aborted.set)
    slow.begin()
    assert aborted.wait(5)
    slow.close()


def test_work_that_ends_is_no_failure_where_another_rank_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEFT_S", 1.0)
    first, second = two()
    first.begin()
    second.close()
    time.sleep(0.2)
    first.end()
    time.sleep(1.2)
    first.check()
    with pytest.raises(RankError, match="rank 1 of 2 has left"):
        first.begin()
    first.close()


def test_a_rank_that_cannot_begin_notifies_ranks_that_have_begun() -> None:
    hub, found = Hub(3), list[Group]()
    others = [
        threading.Thread(target=lambda rank=rank: found.append(join(hub.address, rank, 3, hub.token)))
        for rank in (1, 2)
    ]
    for one in others:
        one.start()
    first = hub.accept(limit=10)
    for one in others:
        one.join()
    second, third = sorted(found, key=lambda group: group.rank)
    aborted = threading.Event()
    third.when_lost(aborted.set)
    third.begin()
    second.close()
    time.sleep(0.2)
    with pytest.raises(RankError, match="rank 1 of 3 has left"):
        first.begin()
    assert aborted.wait(10)
    with pytest.raises(RankError, match="rank 1 of 3 has left"):
        third.check()
    for group in (first, third):
        group.close()
