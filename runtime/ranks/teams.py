"""Who runs the ranks of an engine: threads of this process, processes that this one starts, or those of a launcher."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np

from optdnn.errors import OptdnnError, RankError, UsageError
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.file.format import write
from optdnn.runtime.plans.runners import open_plan
from optdnn.runtime.program import Program, Ranks
from optdnn.runtime.ranks.exchange import Threads, together
from optdnn.runtime.ranks.group import Group, Hub
from optdnn.runtime.ranks.member import Member, on_gpu, program_of
from optdnn.runtime.ranks.place import Place, meet
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.workers.process import WorkerFailure, WorkerProcess
from optdnn.types import Array

START_S = 600.0
"""How long a rank may take to load its engine: kernels may have to be compiled."""
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
"""Variables that a process which we start does not get."""
Parts = Sequence[Mapping[str, Array]]


class Team(Protocol):
    """All ranks of an engine. Each call is for all of them; ``parts`` holds each rank's own inputs."""

    def context(self) -> int: ...
    def run(self, context: int, parts: Parts) -> list[dict[str, Array]]: ...
    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None: ...
    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]: ...
    def state(self, context: int) -> list[dict[str, Array]]: ...
    def reset(self, context: int, parts: Parts) -> None: ...
    def times(self, context: int, repeats: int, bound: bool) -> list[float]: ...
    def close(self) -> None: ...


class ThreadTeam:
    """Ranks in threads of this process, in NumPy."""

    def __init__(self, program: Program, ranks: Ranks, options: LoadOptions):
        self._threads = Threads(ranks.world)
        self.runners = [open_plan(program_of(program, r), options) for r in range(ranks.world)]
        self._contexts: list[list[BaseContext]] = []
        self._bound: dict[int, list[tuple[Any, Mapping[str, str]]]] = {}

    def context(self) -> int:
        self._contexts.append([runner.context() for runner in self.runners])
        return len(self._contexts) - 1

    def run(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        return together([partial(c.run, p) for c, p in zip(self._contexts[context], parts, strict=True)], self._threads)

    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None:
        pairs = zip(self._contexts[context], parts, strict=True)
        self._bound[context] = [(c.bind({n: a.copy() for n, a in p.items()}, state=state), state) for c, p in pairs]

    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        def work(bound: Any, given: Mapping[str, Array]) -> dict[str, Array]:
            for name, array in given.items():
                np.copyto(bound._inputs[name], array)
            results: dict[str, Array] = bound.run()
            return results

        pairs = zip(self._bound[context], parts, strict=True)
        return together([partial(work, bound, p) for (bound, _), p in pairs], self._threads)

    def state(self, context: int) -> list[dict[str, Array]]:
        return [bound.state for bound, _ in self._bound[context]]

    def reset(self, context: int, parts: Parts) -> None:
        for (bound, _), values in zip(self._bound[context], parts, strict=True):
            bound.reset(dict(values) or None)

    def times(self, context: int, repeats: int, bound: bool) -> list[float]:
        raise UsageError("ranks in threads have no times of a GPU")

    def close(self) -> None:
        """There is nothing to leave."""


class LauncherTeam:
    """Ranks that a launcher started; this process is one of them. Every process gets all results."""

    def __init__(self, program: Program, ranks: Ranks, options: LoadOptions, place: Place):
        if place.world != ranks.world:
            raise RankError(
                f"the engine is for {ranks.world} ranks, and the launcher started {place.world}",
                hint=f"start {ranks.world} processes, or build the engine with --devices {place.world}",
            )
        self._rank, self._world = place.rank, place.world
        group = meet(place)
        try:
            own = program if program.ranks is None else program_of(program, place.rank)
            self.member = Member(own, group, place.local, options)
        except OptdnnError as error:
            group.fail(f"rank {place.rank} could not start: {error.message}")
            raise
        self.runners = [self.member.runner]
        self._outputs = {spec.name: axis for (spec, _), axis in zip(program.outputs, ranks.outputs, strict=True)}
        weakref.finalize(self, self.member.close)

    def context(self) -> int:
        return self.member.context()

    def run(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        return self._shared(self.member.run(context, parts[self._rank]))

    def _shared(self, results: dict[str, Array]) -> list[dict[str, Array]]:
        split = {n: np.ascontiguousarray(a) for n, a in results.items() if self._outputs[n] >= 0}
        others = [arrays for _, arrays in self.member.group.exchange({}, split)] if split or self._any_split() else []
        return [results | arrays for arrays in others] or [results] * self._world

    def _any_split(self) -> bool:
        return any(axis >= 0 for axis in self._outputs.values())

    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None:
        self.member.bind(context, {n: a.copy() for n, a in parts[self._rank].items()}, state)

    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        return self._shared(self.member.step(context, parts[self._rank]))

    def state(self, context: int) -> list[dict[str, Array]]:
        return [arrays for _, arrays in self.member.group.exchange({}, self.member.state(context))]

    def reset(self, context: int, parts: Parts) -> None:
        self.member.reset(context, parts[self._rank])

    def times(self, context: int, repeats: int, bound: bool) -> list[float]:
        return self.member.times(context, repeats, bound)

    def close(self) -> None:
        self.member.close()


class ProcessTeam:
    """Rank 0 in this process, and a process for each other rank, which this one starts and ends."""

    def __init__(self, program: Program, ranks: Ranks, options: LoadOptions):
        if options.custom_ops:
            raise UsageError("operators of your own do not run on several GPUs", hint="build the engine for one device")
        if on_gpu(program, options):
            from optdnn.runtime.cuda.collectives.communicator import check_gpus

            check_gpus(ranks.world)
        self._split = [spec.name for (spec, _), axis in zip(program.outputs, ranks.outputs, strict=True) if axis >= 0]
        hub = Hub(ranks.world)
        main = "optdnn.runtime.ranks.child:main"
        self.processes = [WorkerProcess(4, START_S, main, alone=True, without=LAUNCHED) for _ in ranks.programs]
        self._pool = ThreadPoolExecutor(len(self.processes), "optdnn-ranks")
        self._group: Group | None = None
        self._finalizer = weakref.finalize(self, _end, self.processes, self._pool)
        with _engine_file(program) as file:
            starting = self._ask(lambda rank: {
                "command": "join", "engine": file, "mmap": True, "rank": rank, "world": ranks.world, "token": hub.token,
                "host": hub.address[0], "port": hub.address[1], "options": _plain(options),
            })  # fmt: skip
            try:
                self._group = group = hub.accept(lambda: _check(starting), START_S)
                self.member = Member(program, group, 0, options)
                weakref.finalize(self, self.member.close)
                for one in starting:
                    one.result()
            except BaseException as error:
                self._give_up(getattr(error, "message", str(error)))
                raise
        self.runners = [self.member.runner]

    def _give_up(self, why: str) -> None:
        """End all processes."""
        if self._group is not None:
            self._group.fail(f"rank 0 failed: {why}")
        for process in self.processes:
            process.kill()
        self._pool.shutdown(wait=False)

    def _ask(self, message: Callable[[int], Mapping[str, Any]], parts: Parts | None = None) -> list[Future[Any]]:
        """Give each other rank a command. One that fails ends what all others wait for."""

        def ask(rank: int) -> Any:
            try:
                arrays = None if parts is None else parts[rank]
                return self.processes[rank - 1].ask(message(rank), arrays, START_S)
            except WorkerFailure as error:
                if self._group is not None:
                    self._group.fail(f"rank {rank} failed: {error.message}")
                raise RankError(f"rank {rank} failed: {error.message}", hint="load the engine again") from error

        return [self._pool.submit(ask, rank) for rank in range(1, len(self.processes) + 1)]

    def _all(
        self, own: Callable[[], Any], command: str, context: int, parts: Parts | None = None, **more: Any
    ) -> list[Any]:
        """Each rank's (message, arrays), or for rank 0 what ``own`` gives."""
        assert self._group is not None
        self._group.check()
        message = {"command": command, "number": context, "split": self._split, **more}
        asked = self._ask(lambda rank: message, parts)
        try:
            first = own()
        except BaseException as error:
            if not isinstance(error, RankError):
                self._group.fail(f"rank 0 failed: {getattr(error, 'message', error)}")
            for one in asked:
                with contextlib.suppress(Exception):
                    one.result()
            raise
        return [first, *(one.result() for one in asked)]

    def context(self) -> int:
        found: int = self._all(self.member.context, "context", 0)[0]
        return found

    def run(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        first, *others = self._all(lambda: self.member.run(context, parts[0]), "run", context, parts)
        return [first, *(arrays for _, arrays in others)]

    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None:
        own = {n: a.copy() for n, a in parts[0].items()}
        self._all(lambda: self.member.bind(context, own, state), "bind", context, parts, state=dict(state))

    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        first, *others = self._all(lambda: self.member.step(context, parts[0]), "step", context, parts)
        return [first, *(arrays for _, arrays in others)]

    def state(self, context: int) -> list[dict[str, Array]]:
        first, *others = self._all(lambda: self.member.state(context), "state", context)
        return [first, *(arrays for _, arrays in others)]

    def reset(self, context: int, parts: Parts) -> None:
        self._all(lambda: self.member.reset(context, parts[0]), "reset", context, parts)

    def times(self, context: int, repeats: int, bound: bool) -> list[float]:
        own: list[float]
        work = partial(self.member.times, context, repeats, bound)
        own, *_ = self._all(work, "times", context, repeats=repeats, bound=bound)
        return own

    def close(self) -> None:
        self.member.close()
        self._finalizer()


def _end(processes: Sequence[WorkerProcess], pool: ThreadPoolExecutor) -> None:
    for process in processes:
        with contextlib.suppress(Exception):
            process.kill()
    pool.shutdown(wait=False)


def _check(futures: Sequence[Future[Any]]) -> None:
    """Raise the error of a process that failed before it came."""
    for one in futures:
        if one.done():
            one.result()


@contextlib.contextmanager
def _engine_file(program: Program) -> Any:
    """A file with the engine, for the other ranks: its own, or one that is written for them."""
    descriptor = None if program.file is None else program.file.descriptor
    if descriptor is not None:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
        return
    with tempfile.TemporaryDirectory(prefix="optdnn-ranks-") as folder:
        path = os.path.join(folder, "ranks.engine")
        write(program, path)
        yield path


def _plain(options: LoadOptions) -> dict[str, Any]:
    """The options that other ranks load with: the file was checked by this process."""
    return {"simulate": options.simulate, "trust_cubins": options.trust_cubins, "recompile": options.recompile}
