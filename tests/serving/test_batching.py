"""The queue and the batches of one model, with instances that only record their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from optdnn.errors import RunError
from optdnn.ranges import DimRange
from optdnn.serving.facts import ModelFacts
from optdnn.serving.refusals import Expired, QueueFull, RunFailed, TooLarge, Unavailable, WorkerLost
from optdnn.serving.sizes import BatchSizes, rest_of
from optdnn.serving.tensors import InferRequest, Job, Tensor, fill, pad
from optdnn.types import FP32, TensorSpec

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from optdnn.serving.batching import Batcher, QueueSettings
from optdnn.serving.metrics import Metrics
from optdnn.serving.workers.base import Instance, Outcome


def facts(plans: tuple[int, ...] = (), most: int = 8, low: int = 1, columns: int | str = 2) -> ModelFacts:
    """Facts of a model x[N, columns] -> y[N] that has plans for these batches."""
    x, y = TensorSpec("x", FP32, ("N", columns)), TensorSpec("y", FP32, ("N",))
    profile = {"N": DimRange(low, low, most)}
    return ModelFacts((x,), (y,), (profile,), tuple(((n, 2),) for n in plans), "cpu", "N", "")


class Sums(Instance):
    """An instance that returns the sums of rows when the test ends its job."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._ends: list[Callable[[], None]] = []

    def start(self, job: Job, done: Callable[[Outcome], None]) -> None:
        self.jobs.append(job)
        self._ends.append(lambda: done(self.outcome(job)))

    def outcome(self, job: Job) -> Outcome:
        feeds = {n: np.full(shape, np.nan, dtype) for n, (dtype, shape) in job.shapes.items()}
        fill(feeds, job.parts)
        pad(feeds, job.rows)
        if (feeds["x"] < 0).any():
            return RunError("a number is negative")
        return {"y": feeds["x"].sum(axis=1)}

    def end(self) -> None:
        """End the oldest job."""
        self._ends.pop(0)()

    @property
    def sizes(self) -> list[tuple[int | None, int]]:
        """The rows of each job, without and with padding."""
        return [(j.rows, j.shapes["x"][1][0]) for j in self.jobs]


def request(first: float, rows: int = 1, columns: int = 2, **more: Any) -> InferRequest:
    x = (first + np.arange(rows * columns, dtype=np.float32)).reshape(rows, columns)
    return InferRequest({"x": Tensor(FP32, x.shape, x)}, **more)


def scenario(
    play: Callable[[Batcher, Sums], Awaitable[None]],
    known: ModelFacts | None = None,
    delay: float = 0.0,
    bound: int = 9,
) -> None:
    """Run ``play`` with a batcher that has one instance."""

    async def main() -> None:
        known_facts = known or facts()
        settings = QueueSettings(delay, bound, known_facts.batch is not None)
        batcher, instance = Batcher(settings, BatchSizes(known_facts, None), Metrics().of("m")), Sums()
        batcher.add([instance])
        await play(batcher, instance)

    asyncio.run(main())


async def asked(batcher: Batcher, *requests: InferRequest) -> list[asyncio.Task[Any]]:
    """Tasks of requests. All are in the queue now."""
    tasks = [asyncio.create_task(batcher.run(r)) for r in requests]
    await asyncio.sleep(0)
    return tasks


def test_waiting_requests_share_a_batch_and_get_their_own_rows() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        tasks = await asked(batcher, request(0), request(10, rows=2), request(20, rows=3))
        instance.end()
        instance.end()
        found = [(await t)["y"].tolist() for t in tasks]
        assert found == [[1], [21, 25], [41, 45, 49]]
        assert instance.sizes == [(1, 1), (5, 5)]

    scenario(play)


def test_a_batch_is_padded_to_a_plan_and_a_long_request_is_split() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        tasks = await asked(batcher, request(0, rows=3), request(0, rows=11))
        for _ in range(3):
            instance.end()
        assert (await tasks[0])["y"].tolist() == [1, 5, 9]
        assert (await tasks[1])["y"].tolist() == [4 * k + 1 for k in range(11)]
        assert instance.sizes == [(3, 4), (8, 8), (3, 4)]

    scenario(play, facts(plans=(1, 4, 8)))


def test_inputs_of_other_sizes_run_in_separate_batches() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        await asked(batcher, request(0), request(0, columns=3), request(0), request(0, columns=3))
        for _ in range(3):
            instance.end()
        assert [j.shapes["x"][1] for j in instance.jobs] == [(1, 2), (2, 3), (1, 2)]

    scenario(play, facts(columns="M"))


def test_the_delay_gathers_and_a_full_batch_does_not_wait() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        (first,) = await asked(batcher, request(0))
        assert not instance.jobs
        await asyncio.sleep(0.02)
        await asked(batcher, request(1))
        await asyncio.sleep(0.1)
        assert instance.sizes == [(2, 2)]
        instance.end()
        await first
        await asked(batcher, request(2, rows=8))
        assert instance.sizes[1:] == [(8, 8)]

    scenario(play, delay=0.06)


def test_priorities_then_order_of_arrival() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        requests = [request(k, rows=8, priority=p) for k, p in enumerate((0, 0, 2, 1, 2))]
        await asked(batcher, *requests)
        for _ in requests:
            instance.end()
        order = [int(j.parts[0][2][0, 0]) for j in instance.jobs]  # type: ignore[index]
        assert order == [0, 3, 2, 4, 1]

    scenario(play)


def test_a_full_queue_a_canceled_request_and_one_that_expires() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        _, canceled, late = await asked(batcher, request(0), request(1), request(2, timeout_s=0.01))
        with pytest.raises(QueueFull, match="2 requests wait"):
            await batcher.run(request(3))
        canceled.cancel()
        with pytest.raises(Expired, match=r"waited for 0\.01 s"):
            await late
        (last,) = await asked(batcher, request(4))
        instance.end()
        instance.end()
        assert (await last)["y"].tolist() == [9]
        assert instance.sizes == [(1, 1), (1, 1)]

    scenario(play, bound=2)


def test_a_request_of_too_many_rows_is_refused() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        rows = np.zeros((8 * 1024 + 1, 2), np.float32)
        with pytest.raises(TooLarge, match="has 8193 rows; 8192 are the most"):
            await batcher.run(InferRequest({"x": Tensor(FP32, rows.shape, rows)}))
        assert not instance.jobs

    scenario(play)


def test_an_error_fails_only_its_own_request() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        first, right, wrong = await asked(batcher, request(0), request(1), request(-5))
        for _ in range(4):
            instance.end()
        await first
        assert (await right)["y"].tolist() == [3]
        with pytest.raises(RunFailed, match="is negative"):
            await wrong
        assert instance.sizes == [(1, 1), (2, 2), (1, 1), (1, 1)]

    scenario(play)


def test_a_lost_worker_is_not_used_again() -> None:
    class Lost(Sums):
        def outcome(self, job: Job) -> Outcome:
            return WorkerLost("it died")

    async def play(batcher: Batcher, instance: Sums) -> None:
        lost = Lost()
        batcher.remove([instance])
        batcher.add([lost])
        one, two, other = await asked(batcher, request(0), request(1, rows=8), request(2))
        lost.end()
        with pytest.raises(WorkerLost):
            await one
        assert len(lost.jobs) == 1
        batcher.add([instance])
        instance.end()
        instance.end()
        assert [len((await t)["y"]) for t in (two, other)] == [8, 1]

    scenario(play)


def test_closing_runs_waiting_requests_and_refuses_new_ones() -> None:
    async def play(batcher: Batcher, instance: Sums) -> None:
        tasks = await asked(batcher, request(0), request(1))
        drained = asyncio.create_task(batcher.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="unloaded"):
            await batcher.run(request(2))
        instance.end()
        await drained
        assert all(t.done() for t in tasks)
        batcher.remove([instance])

    scenario(play, delay=30.0)

    async def hangs(batcher: Batcher, instance: Sums) -> None:
        _, waits = await asked(batcher, request(0), request(1))
        await batcher.drain(0.01)
        with pytest.raises(Unavailable, match="shutting down"):
            await waits

    scenario(hangs)


def test_sizes_of_batches() -> None:
    rest = rest_of([(1, 2)])
    planned = BatchSizes(facts(plans=(1, 4), most=32), None)
    assert (planned.most(rest), [planned.padded(n, rest) for n in (1, 2, 4)]) == (4, [1, 4, 4])
    other = rest_of([(1, 7)])  # no plan: batches are powers of two, so that there are few sizes
    assert (planned.most(other), [planned.padded(n, other) for n in (3, 5, 32)]) == (32, [4, 8, 32])
    ranged = BatchSizes(facts(most=16, low=2), 10)
    assert (ranged.most(rest), [ranged.padded(n, rest) for n in (1, 3, 10)]) == (10, [2, 3, 10])
