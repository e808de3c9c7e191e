"""Shared memory of ranks: the order of steps, sleep and wake, arrays, and ranks that do not answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.ranks import check_a_killed_rank_ends_bound_runs, decoder, mlp

import optdnn
from optdnn.errors import RankError
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import read
from optdnn.runtime.ranks import board as module
from optdnn.runtime.ranks.board import Board
from optdnn.runtime.steps.executor import LoadOptions


class Other:
    """A rank in a thread, which reads the memory like another process. It records the contents of the array ``x``."""

    def __init__(self, board: Board, rank: int, fields: dict[str, Any] | None = None, slow: float = 0.0):
        self.bell, self._other = socket.socketpair()
        self.bell.setblocking(False)
        self.found, self.contexts = [], list[int]()
        self._board, self._rank, self._slow = Board(board.descriptor, board.world), rank, slow
        self._arrays = self._board.arrays(fields or {})
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        step = 0
        while (context := self._board.wait(self._rank, step, self._other)) is not None:
            step += 1
            self.contexts.append(context)
            self.found += [a.tolist() for a in self._arrays.values()]
            time.sleep(self._slow)
            self._board.done(self._rank, step)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(3)
    yield made
    made.close()


def nothing() -> None:
    """A check of the other ranks that finds no fault."""


def test_every_step_is_seen_once_with_its_inputs(board: Board) -> None:
    types = {"x": (np.dtype(np.int64), (2,))}
    fields = board.place({}, [{}, types, types])
    others = [Other(board, r, fields[r]) for r in (1, 2)]
    mine = [board.arrays(one) for one in fields]
    for k in range(300):
        board.settle(nothing)
        for rank in (1, 2):
            mine[rank]["x"][:] = [k, rank]
        board.ring(k % 5, [other.bell for other in others])
    board.settle(nothing)
    for rank, other in enumerate(others, 1):
        assert other.found == [[k, rank] for k in range(300)]
        assert other.contexts == [k % 5 for k in range(300)]


def test_a_rank_without_work_sleeps_and_is_woken(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPIN_S", 0.001)
    others = [Other(board, r) for r in (1, 2)]
    time.sleep(0.1)
    begin = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - begin < 0.1
    for k in range(5):
        board.ring(k, [other.bell for other in others])
        start = time.monotonic()
        board.settle(nothing)
        assert time.monotonic() - start < 0.5, "it woke by its own clock"
        time.sleep(0.02)
    for other in others:
        other.bell.close()
        other.thread.join(5)
        assert not other.thread.is_alive()
        assert other.contexts == list(range(5))


def test_arrays_that_all_ranks_read_are_stored_once(board: Board) -> None:
    shared, own = (
        {"w": (np.dtype(np.float32), (3, 4))},
        {"x": (np.dtype(np.float16), ()), "e": (np.dtype(np.int8), (0, 2))},
    )
    first, second = board.place(shared, [own, own])
    assert first["w"] == second["w"]
    assert first["x"] != second["x"]
    board.arrays(first)["w"][:] = 7
    assert (Board(board.descriptor, 3).arrays(second)["w"] == 7).all()
    assert board.arrays(first)["e"].shape == (0, 2)
    third, *_ = board.place(shared, [own])
    board.arrays(third)["w"][:] = 8
    assert (board.arrays(first)["w"] == 7).all()


def test_a_rank_that_does_not_answer(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    board.ring(0, [])
    with pytest.raises(RankError, match=r"rank 1 did not answer within 0\.1 s"):
        board.settle(nothing)

    def lost() -> None:
        raise RankError("rank 2 ended")

    with pytest.raises(RankError, match="rank 2 ended"):
        board.settle(lost)


# ---------------------------------------------------------------- bound runs of processes


def apart(model: onnx.ModelProto, folder: Path, **options: Any) -> Engine:
    """An engine with a process for each rank."""
    optdnn.build(model, target="simulate", **options).save(folder / "m.engine")
    return Engine(read(folder / "m.engine"), options=LoadOptions(processes=True))


@pytest.mark.slow
def test_the_places_of_a_call_are_used_again(tmp_path: Path) -> None:
    engine = apart(mlp(4), tmp_path, devices=2, split="batch")
    context, team = engine.context(), engine._runner.team  # type: ignore[attr-defined]
    x = np.ones((4, 64), np.float32)
    want = context.run({"x": x})["y"]
    bound = context.bind({"x": x})
    size, count = os.fstat(team._board.descriptor).st_size, team._count
    for k in range(3):
        np.testing.assert_array_equal(context.run({"x": x})["y"], want)
        bound = context.bind({"x": (k + 1) * x})
        np.testing.assert_array_equal(bound.run()["y"], context.run({"x": (k + 1) * x})["y"])
    assert (os.fstat(team._board.descriptor).st_size, team._count) == (size, count)
    team.close()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["weights", "batch"])
def test_bound_runs_follow_their_inputs(split: str, tmp_path: Path) -> None:
    engine = apart(mlp(4), tmp_path, devices=2, split=split)
    x = np.zeros((4, 64), np.float32)
    bounds = [engine.context().bind({"x": x}) for _ in range(2)]
    for seed in range(6):
        x[:] = np.random.default_rng(seed).standard_normal(x.shape)
        found = bounds[seed % 2].run()["y"]
        np.testing.assert_allclose(found, engine.run({"x": x})["y"], rtol=1e-6)
        kept = found.copy()
        x[:] = 0
        bounds[seed % 2].run()
        np.testing.assert_array_equal(found, kept, "results are the caller's")
    engine._runner.team.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_state_stays_with_processes_and_begins_again(tmp_path: Path) -> None:
    model, feeds, state = decoder()
    found = []
    for kind in ("threads", "processes"):
        if kind == "threads":
            engine = optdnn.build(model, target="simulate", precision="fp16", devices=2)
        else:
            engine = apart(model, tmp_path, precision="fp16", devices=2)
        given = {n: a.copy() for n, a in feeds.items()}
        bound = engine.context().bind(given, state=state)
        logits = []
        for k in range(6):
            if k == 3:
                bound.reset()
            logits.append(bound.run()["logits"])
            given["at"] += 1
        found.append((logits, bound.state))
    engine._runner.team.close()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for name, array in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][name], array)


@pytest.mark.parametrize("split", ["weights", "batch"])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_rank_that_is_killed_ends_bound_runs(asleep: bool, split: str, tmp_path: Path) -> None:
    engine = apart(mlp(4), tmp_path, devices=2, split=split)
    bound = engine.context().bind({"x": np.zeros((4, 64), np.float32)})
    bound.run()
    check_a_killed_rank_ends_bound_runs(engine, bound, asleep)
    with pytest.raises(RankError, match="rank 1"):
        bound.run()
    engine._runner.team.close()  # type: ignore[attr-defined]


def test_a_rank_that_fails_in_a_step_gives_the_reason(tmp_path: Path) -> None:
    engine = apart(mlp(4), tmp_path, devices=2, split="weights")
    bound = engine.context().bind({"x": np.zeros((4, 64), np.float32)})
    team: Any = engine._runner.team  # type: ignore[attr-defined]
    team._board.ring(99, team._bells)  # a context that no rank has
    with pytest.raises(RankError, match="rank 1 failed"):
        bound.run()
    team.close()


@pytest.mark.slow
def test_nothing_of_the_shared_memory_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        engine = apart(mlp(4), tmp_path, devices=2, split="weights")
        engine.context().bind({"x": np.zeros((4, 64), np.float32)}).run()
        team: Any = engine._runner.team  # type: ignore[attr-defined]
        team.close()
        del engine, team
    assert len(os.listdir("/proc/self/fd")) <= before + 2
