"""The queue of one model, and the batches that its requests share.

A request waits as one piece, or as several where it has more rows than a batch. Pieces run together when their inputs agree in all
dimensions but the first; the highest priority goes first. A batch begins when an instance is free, and the batch is full or its
oldest piece has waited for the delay. All of this happens in the event loop's thread; instances run elsewhere.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np

from optdnn.serving.facts import Shapes
from optdnn.serving.metrics import ModelMetrics
from optdnn.serving.refusals import Expired, QueueFull, TooLarge, Unavailable, WorkerLost, refusal_of
from optdnn.serving.sizes import BatchSizes, rest_of
from optdnn.serving.tensors import DeviceTarget, InferRequest, Job
from optdnn.serving.workers.base import Instance, Outcome
from optdnn.types import Array

Outputs = dict[str, Array]
MOST_PIECES = 1024
"""Most pieces of a request, since the queue is searched for each, and of a batch, since the message to a worker names each."""


@dataclass(eq=False)
class Waiting:
    """A request in the queue or in work."""

    request: InferRequest
    future: asyncio.Future[Outputs]
    arrived: float
    rest: Shapes
    results: dict[int, Outputs] = field(default_factory=dict)
    """First row -> outputs, of the pieces that have run."""
    pieces: int = 1
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Piece:
    """Rows ``start`` to ``stop`` of a request; ``alone``: in a batch of its own, since a batch with it has failed."""

    owner: Waiting
    start: int
    stop: int
    rank: tuple[float, int]
    alone: bool = False

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class QueueSettings:
    """``delay_s``: how long a piece waits for others. ``bound``: most pieces that wait. ``batched``: requests share batches."""

    delay_s: float
    bound: int
    batched: bool


class Batcher:
    """The queue of one model."""

    def __init__(self, settings: QueueSettings, sizes: BatchSizes, metrics: ModelMetrics):
        self._settings, self._sizes, self._metrics = settings, sizes, metrics
        self._loop = asyncio.get_running_loop()
        self._queue: list[Piece] = []
        self._free: list[Instance] = []
        self._running = 0
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------------ instances

    def add(self, instances: Iterable[Instance]) -> None:
        """Give it further instances."""
        self._free.extend(instances)
        self._dispatch()

    def remove(self, instances: Iterable[Instance]) -> None:
        """Take away instances that are lost. Their jobs have ended."""
        lost = set(map(id, instances))
        self._free = [i for i in self._free if id(i) not in lost]

    # ------------------------------------------------------------------ requests

    async def run(self, request: InferRequest) -> Outputs:
        """The outputs of a request. One that is canceled meanwhile leaves the queue.

        Raises TooLarge, QueueFull, Expired, Unavailable, or the refusal that its run ended with.
        """
        if self._closing:
            raise Unavailable("the model is being unloaded")
        if len(self._queue) >= self._settings.bound:
            raise QueueFull(f"{len(self._queue)} requests wait for this model already", hint="try again later")
        waiting = Waiting(request, self._loop.create_future(), self._loop.time(), self._rest(request))
        cuts = self._cuts(waiting)
        if request.timeout_s is not None:
            waiting.timer = self._loop.call_later(request.timeout_s, self._expire, waiting)
        self._push(waiting, cuts)
        self._dispatch()
        try:
            return await waiting.future
        finally:
            if waiting.timer is not None:
                waiting.timer.cancel()
            self._drop(waiting)

    def _rest(self, request: InferRequest) -> Shapes:
        shapes = [t.shape for t in request.tensors.values()]
        return rest_of(shapes) if self._settings.batched else tuple(shapes)

    def _cuts(self, waiting: Waiting) -> list[int]:
        """The rows between which a request is cut into pieces. Raises TooLarge."""
        if not self._settings.batched:
            return [0, 1]
        rows = next(iter(waiting.request.tensors.values())).shape[0]
        most = self._sizes.most(waiting.rest)
        if rows > most * MOST_PIECES:
            raise TooLarge(
                f"the request has {rows} rows; {most * MOST_PIECES} are the most", hint="send several requests"
            )
        return [*range(0, rows, most), rows]

    def _push(self, waiting: Waiting, cuts: list[int]) -> None:
        rank = (waiting.request.order, next(self._numbers))
        waiting.pieces = len(cuts) - 1
        for start, stop in pairwise(cuts):
            bisect.insort(self._queue, Piece(waiting, start, stop, rank), key=lambda p: p.rank)
        self._note()

    def _drop(self, waiting: Waiting) -> None:
        """Take the waiting pieces of a request out of the queue."""
        if any(p.owner is waiting for p in self._queue):
            self._queue = [p for p in self._queue if p.owner is not waiting]
            self._note()

    def _expire(self, waiting: Waiting) -> None:
        """Refuse a request that has waited too long, unless all of it is in work."""
        if any(p.owner is waiting for p in self._queue) and not waiting.future.done():
            waiting.future.set_exception(Expired(f"it waited for {waiting.request.timeout_s:g} s"))
            self._drop(waiting)

    def _note(self) -> None:
        self._metrics.queue(len(self._queue))
        if self._queue or self._running:
            self._idle.clear()
        else:
            self._idle.set()

    # ------------------------------------------------------------------ batches

    def _dispatch(self) -> None:
        """Begin as many batches as there are free instances."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free and self._queue:
            batch, due = self._next_batch()
            if not batch:
                self._timer = self._loop.call_at(due, self._dispatch)
                break
            chosen = set(map(id, batch))
            self._queue = [p for p in self._queue if id(p) not in chosen]
            self._begin(self._free.pop(), batch)
        self._note()

    def _next_batch(self) -> tuple[list[Piece], float]:
        """The pieces that run next; or none, and the time at which there will be some."""
        now = self._loop.time()
        due = np.inf
        groups: dict[object, list[Piece]] = {}
        for piece in self._queue:
            key: object = piece.owner.rest if self._settings.batched and not piece.alone else id(piece)
            groups.setdefault(key, []).append(piece)
        for pieces in groups.values():
            batch, full = self._fitting(pieces)
            time = min(p.owner.arrived for p in pieces) + self._settings.delay_s
            if full or time <= now or self._closing or pieces[0].alone or not self._settings.batched:
                return batch, now
            due = min(due, time)
        return [], float(due)

    def _fitting(self, pieces: list[Piece]) -> tuple[list[Piece], bool]:
        """The first pieces of a group that fit in one batch, and whether no more would."""
        most = self._sizes.most(pieces[0].owner.rest)
        batch, rows = [pieces[0]], pieces[0].rows
        for piece in pieces[1:MOST_PIECES]:
            if rows + piece.rows > most:
                return batch, True
            batch.append(piece)
            rows += piece.rows
        return batch, rows >= most

    def _begin(self, instance: Instance, batch: list[Piece]) -> None:
        self._running += 1
        began = self._loop.time()
        for piece in batch:
            self._metrics.waited(began - piece.owner.arrived)

        def done(outcome: Outcome) -> None:
            self._running -= 1
            self._metrics.ran(self._loop.time() - began)
            self._finish(batch, outcome)
            if not isinstance(outcome, WorkerLost):  # its instances are gone
                self._free.append(instance)
            self._dispatch()

        try:
            job = self._job(batch)
            instance.start(job, done)
        except Exception as error:  # the memory of a batch, a region that is gone
            done(error)

    def _job(self, batch: list[Piece]) -> Job:
        tensors = batch[0].owner.request.tensors
        if not self._settings.batched:
            whole = {name: (t.dtype, t.shape) for name, t in tensors.items()}
            targets = [DeviceTarget(name, 0, 1, 0, to) for name, to in batch[0].owner.request.targets.items()]
            return Job(whole, None, [(name, 0, t.data) for name, t in tensors.items()], targets)
        rows = sum(p.rows for p in batch)
        size = self._sizes.padded(rows, batch[0].owner.rest)
        self._metrics.batch(rows, size)
        job = Job({name: (t.dtype, (size, *t.shape[1:])) for name, t in tensors.items()}, rows)
        row = 0
        for piece in batch:
            for name, tensor in piece.owner.request.tensors.items():
                job.parts.append((name, row, tensor.rows(piece.start, piece.stop)))
            for name, to in piece.owner.request.targets.items():
                job.targets.append(DeviceTarget(name, row, piece.rows, piece.start, to))
            row += piece.rows
        return job

    def _finish(self, batch: list[Piece], outcome: Outcome) -> None:
        """Give each piece its rows of the outputs, or the error."""
        if isinstance(outcome, Exception):
            self._fail(batch, outcome)
            return
        row = 0
        for piece in batch:
            waiting = piece.owner
            if not waiting.future.done():
                part = slice(row, row + piece.rows) if self._settings.batched else ...
                waiting.results[piece.start] = {name: a[part].copy() for name, a in outcome.items()}
                if len(waiting.results) == waiting.pieces:
                    waiting.future.set_result(joined(waiting.results))
            row += piece.rows

    def _fail(self, batch: list[Piece], error: Exception) -> None:
        """Run each piece of a failed batch again by itself: the error may come from one request alone."""
        if not isinstance(error, WorkerLost) and len(batch) > 1:
            for piece in batch:
                if not piece.owner.future.done():
                    piece.alone = True
                    bisect.insort(self._queue, piece, key=lambda p: p.rank)
            return
        for piece in batch:
            if not piece.owner.future.done():
                piece.owner.future.set_exception(refusal_of(error))
            self._drop(piece.owner)

    # ------------------------------------------------------------------ the end

    async def drain(self, seconds: float) -> None:
        """Take no further requests, and wait until the current ones have run, for at most ``seconds``."""
        self._closing = True
        self._dispatch()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.refuse_waiting("the server is shutting down")

    def refuse_waiting(self, why: str) -> None:
        """Refuse all requests in the queue."""
        for piece in self._queue:
            if not piece.owner.future.done():
                piece.owner.future.set_exception(Unavailable(why))
        self._queue.clear()
        self._note()


def joined(results: dict[int, Outputs]) -> Outputs:
    """The outputs of a request from those of its pieces, by their first rows."""
    pieces = [results[start] for start in sorted(results)]
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}
