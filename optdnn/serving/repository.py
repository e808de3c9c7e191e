"""The models of a server: loading, unloading, and replacing workers that died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from optdnn.errors import InputError, OptdnnError
from optdnn.runtime.contexts.signature import Signature
from optdnn.serving.batching import Batcher, Outputs, QueueSettings
from optdnn.serving.facts import ModelFacts
from optdnn.serving.metrics import Metrics
from optdnn.serving.refusals import NotFound, Unavailable
from optdnn.serving.settings import ServeSettings, engines_in
from optdnn.serving.sizes import BatchSizes, rest_of
from optdnn.serving.tensors import InferRequest
from optdnn.serving.workers.base import Worker
from optdnn.serving.workers.process import ProcessWorker
from optdnn.serving.workers.threads import ThreadWorker

log = logging.getLogger("optdnn.serve")
LONGEST_PAUSE = 30.0
"""Most seconds between two tries to replace a worker."""


class Model:
    """A model that is loaded: its queue and its workers."""

    def __init__(self, name: str, path: Path, settings: ServeSettings, metrics: Metrics, arenas: Sequence[int] = ()):
        self.name, self.path = name, path
        self._settings, self._arenas = settings, arenas
        self._metrics = metrics.of(name)
        self._workers: dict[int, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._irreplaceable = ""
        """Why a dead worker cannot be replaced at the moment."""

    async def load(self) -> None:
        """Start the workers. Raises OptdnnError where the engine cannot be loaded; nothing is left then."""
        count = max(1, self._settings.workers)
        started: list[Worker] = []
        waits: list[asyncio.Task[ModelFacts]] = []
        try:
            for place in range(count):
                started.append(self._new_worker(place))
                waits.append(asyncio.create_task(started[-1].ready()))
            found = await asyncio.gather(*waits)
        except BaseException:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            await asyncio.gather(*(w.close() for w in started))
            raise
        self.facts: ModelFacts = found[0]
        self.signature = Signature(self.facts.inputs, self.facts.outputs, self.facts.profiles)
        s = self._settings
        queue = QueueSettings(s.batch_delay_ms / 1e3, s.queue, self.facts.batch is not None)
        self._sizes = BatchSizes(self.facts, s.max_batch)
        self._batcher = Batcher(queue, self._sizes, self._metrics)
        for place, worker in enumerate(started):
            self._workers[place] = worker
            if worker.lost:
                self._lost(place, worker)
            else:
                self._batcher.add(worker.instances)
        if self.facts.alone:
            log.warning("%s: requests run one by one: %s", self.name, self.facts.alone)

    @property
    def ready(self) -> bool:
        """Whether a worker is there to run requests."""
        return bool(self._workers) and not self._closing

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise InputError for shapes of inputs that do not fit. The rows of a batch may be more than the engine takes at once."""
        if self.facts.batch is None or not all(shapes):
            self.signature.sizes_at(shapes)
            return
        rows, rest = shapes[0][0], rest_of(shapes)
        if any(shape[0] != rows for shape in shapes) or not rows:
            counts = sorted({shape[0] for shape in shapes})
            raise InputError(f"the inputs must have one number of rows, at least 1, not {', '.join(map(str, counts))}")
        size = self._sizes.padded(min(rows, self._sizes.most(rest)), rest)
        self.signature.sizes_at([(size, *dims) for dims in rest])

    async def run(self, request: InferRequest) -> Outputs:
        """Raises as :meth:`Batcher.run`. A request waits while a worker that died is being replaced."""
        if not self._workers and self._irreplaceable:
            raise Unavailable(f"model {self.name!r} has no worker: {self._irreplaceable}", hint="try again later")
        return await self._batcher.run(request)

    def forget(self, handles: Sequence[str]) -> None:
        """Let its workers close memory of clients on their GPUs."""
        for worker in tuple(self._workers.values()):
            for instance in worker.instances:
                instance.forget(handles)

    def _new_worker(self, place: int) -> Worker:
        s = self._settings
        if not s.workers:
            return ThreadWorker(self.path, s.loading, s.instances)
        gpu = {"CUDA_VISIBLE_DEVICES": str(s.gpus[place % len(s.gpus)])} if s.gpus else {}
        lost = partial(self._lost, place)
        return ProcessWorker(self.path, s.loading, s.instances, gpu, lost, self._arenas)

    def _lost(self, place: int, worker: Worker) -> None:
        """A worker died: begin to replace it. One that dies while others still load is replaced when these are ready."""
        if self._workers.get(place) is not worker:
            return
        log.error("%s: worker %d has died", self.name, place)
        self._metrics.lost()
        self._workers.pop(place, None)
        self._batcher.remove(worker.instances)
        if not self._closing:
            task = asyncio.get_running_loop().create_task(self._replace(place, worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _replace(self, place: int, dead: Worker) -> None:
        await dead.close()
        pause = 0.1
        while not self._closing:
            try:
                worker = await self._started(place)
            except OptdnnError as error:
                log.error("%s: worker %d cannot be replaced: %s", self.name, place, error.message)
                self._irreplaceable = error.message
                if not self._workers:
                    self._batcher.refuse_waiting(f"model {self.name!r} has no worker: {error.message}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            self._workers[place] = worker
            self._irreplaceable = ""
            self._batcher.add(worker.instances)
            log.warning("%s: worker %d is replaced", self.name, place)
            return

    async def _started(self, place: int) -> Worker:
        """A new worker that is ready. Raises OptdnnError."""
        worker = self._new_worker(place)
        try:
            await worker.ready()
        except asyncio.CancelledError:
            await worker.close()
            raise
        return worker

    async def close(self, seconds: float | None = None) -> None:
        """Let its requests end, for at most ``seconds`` (default: those of the settings), then end its workers."""
        self._closing = True
        for task in tuple(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._batcher.drain(self._settings.drain_seconds if seconds is None else seconds)
        await asyncio.gather(*(w.close() for w in self._workers.values()))
        self._workers.clear()


class Repository:
    """All models by name. ``arenas``: descriptors of memory that workers read requests from."""

    def __init__(self, settings: ServeSettings, metrics: Metrics, arenas: Sequence[int] = ()):
        self._settings, self._metrics, self._arenas = settings, metrics, arenas
        self._given = settings.models()
        self._models: dict[str, Model] = {}
        self._why_not: dict[str, str] = {}
        self._loading = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self.closing = False

    async def start(self) -> None:
        """Load all models. Raises OptdnnError for the first that cannot be."""
        loads = [asyncio.create_task(self._load(name)) for name in self._given]
        try:
            await asyncio.gather(*loads)
        except BaseException:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
            await self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether every model that is loaded can run requests."""
        return not self.closing and all(m.ready for m in self._models.values())

    def get(self, name: str, version: str = "") -> Model:
        """A loaded model. The only version is 1. Raises NotFound."""
        model = self._models.get(name)
        if model is None:
            if name in self._files():
                raise Unavailable(f"model {name!r} is not loaded", hint=self._why_not.get(name))
            raise NotFound(f"there is no model {name!r}")
        if version not in ("", "1"):
            raise NotFound(f"model {name!r} has no version {version!r}, only 1")
        return model

    def forget(self, handles: Collection[str]) -> None:
        """As :meth:`Model.forget`, for all models."""
        for model in self._models.values() if handles else ():
            if model.facts.device_memory:
                model.forget(sorted(handles))

    def knows(self, name: str) -> bool:
        """Whether a model of this name is loaded."""
        return name in self._models

    def index(self) -> list[dict[str, str]]:
        """Name, version, state and reason of each model there is."""
        found = []
        for name in sorted({*self._files(), *self._models}):
            model = self._models.get(name)
            state = "READY" if model is not None and model.ready else "UNAVAILABLE"
            found.append({"name": name, "version": "1", "state": state, "reason": self._why_not.get(name, "")})
        return found

    async def load(self, name: str) -> None:
        """Load a model, or load it again: the old one serves until the new one is ready.

        Raises NotFound for a name that no file has, OptdnnError where it cannot be loaded.
        """
        async with self._loading:
            if self.closing:
                raise Unavailable("the server is shutting down")
            old = await self._load(name)
        if old is not None:
            await self._end(old)

    async def _load(self, name: str) -> Model | None:
        """Load a model. Returns the model that had its name until now."""
        path = self._files().get(name)
        if path is None:
            raise NotFound(f"there is no model {name!r}")
        model = Model(name, path, self._settings, self._metrics, self._arenas)
        try:
            await model.load()
        except OptdnnError as error:
            self._why_not[name] = error.message
            raise
        self._why_not.pop(name, None)
        old, self._models[name] = self._models.get(name), model
        return old

    async def unload(self, name: str) -> None:
        """Unload a model after its last request. Raises NotFound where it is not loaded."""
        async with self._loading:
            model = self._models.pop(name, None)
        if model is None:
            raise NotFound(f"model {name!r} is not loaded")
        self._why_not[name] = "unloaded"
        await self._end(model)

    async def close(self, seconds: float | None = None) -> None:
        """Unload all, as :meth:`Model.close` does."""
        self.closing = True
        async with self._loading:
            models, self._models = list(self._models.values()), {}
        await asyncio.gather(*(m.close(seconds) for m in models), *self._ending)

    async def _end(self, model: Model) -> None:
        """Close a model, to the end even where the client that asked for it cancels its call: else its workers would stay."""
        task = asyncio.create_task(model.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    def _files(self) -> dict[str, Path]:
        return self._given if self._settings.folder is None else engines_in(self._settings.folder)
