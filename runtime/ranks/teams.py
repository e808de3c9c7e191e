"""Who runs the ranks of an engine: threads of this process, processes that this one starts, or those of a launcher."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from optdnn.errors import OptdnnError, RankError, UsageError
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.file.format import write
from optdnn.runtime.plans.runners import open_plan
from optdnn.runtime.program import Program, Ranks, known_sizes
from optdnn.runtime.ranks.board import Board
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
        others = [arrays for _, arrays in self.member.group.exchange({}, split)] if split else []
        return [results | arrays for arrays in others] or [results] * self._world

    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None:
        self.member.bind(context, parts[self._rank], state)

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
        self._split = {
            spec.name: spec for (spec, _), axis in zip(program.outputs, ranks.outputs, strict=True) if axis >= 0
        }
        self._cut = {spec.name for (spec, _), axis in zip(program.inputs, ranks.inputs, strict=True) if axis >= 0}
        self._calls: dict[int, _Shared] = {}
        hub = Hub(ranks.world)
        self._board = board = Board.create(ranks.world)
        self.processes, self._bells, theirs = [], list[socket.socket](), list[int]()
        for _ in ranks.programs:
            process, bell, descriptor = _process(board)
            self.processes.append(process)
            self._bells.append(bell)
            theirs.append(descriptor)
        self._pool = ThreadPoolExecutor(len(self.processes), "optdnn-ranks")
        self._group: Group | None = None
        self._finalizer = weakref.finalize(self, _end, self.processes, self._pool, self._bells, board)
        with _engine_file(program) as file:
            starting = self._ask(lambda rank: {
                "command": "join", "engine": file, "mmap": True, "rank": rank, "world": ranks.world, "token": hub.token,
                "host": hub.address[0], "port": hub.address[1], "options": _plain(options),
                "board": board.descriptor, "bell": theirs[rank - 1],
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
        self._ready()
        message = {"command": command, "number": context, "split": list(self._split), **more}
        asked = self._ask(lambda rank: message, parts)
        try:
            first = own()
        except BaseException as error:
            self._failed(error)
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
        kept, board = set(state.values()), self._board
        moving = [{n: a for n, a in arrays.items() if n not in kept} for arrays in parts]
        types = [{n: (a.dtype, a.shape) for n, a in arrays.items()} for arrays in moving]
        results = {n: (spec.dtype, known_sizes(spec.shape)) for n, spec in self._split.items() if n not in state}
        whole = {n: one for n, one in types[0].items() if n not in self._cut}
        given = board.place(whole, [{n: one for n, one in each.items() if n in self._cut} for each in types])
        taken = board.place({}, [{}, *[results] * len(self.processes)])
        fields = list(zip(given, taken, strict=True))
        kept_parts = [{n: a for n, a in arrays.items() if n in kept} for arrays in parts]
        work = partial(self.member.bind, context, parts[0], state)
        self._all(work, "bind", context, kept_parts, state=dict(state), fields=fields)
        inputs = [(rank, board.arrays(one)) for rank, one in enumerate(given)]
        copies = [
            (rank, n, a)
            for rank, arrays in inputs
            for n, a in arrays.items()
            if rank > 0 and (rank == 1 or n in self._cut)
        ]
        self._calls[context] = _Shared(copies, [board.arrays(one) for one in taken[1:]] if results else [])

    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        group, call = self._ready(), self._calls[context]
        for rank, name, array in call.inputs:
            np.copyto(array, parts[rank][name])
        self._board.ring(context, self._bells)
        try:
            first = self.member.step(context, parts[0])
            if call.outputs:
                self._board.settle(group.check)
        except BaseException as error:
            self._failed(error)
            raise
        return [first, *({n: a.copy() for n, a in arrays.items()} for arrays in call.outputs)]

    def _ready(self) -> Group:
        """Wait until the other ranks have done the last step: rank 0 had its results before."""
        group = self._group
        assert group is not None
        group.check()
        self._board.settle(group.check)
        return group

    def _failed(self, error: BaseException) -> None:
        """Tell the other ranks of an error of this one."""
        if self._group is not None and not isinstance(error, RankError):
            self._group.fail(f"rank 0 failed: {getattr(error, 'message', error)}")

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


@dataclass(frozen=True)
class _Shared:
    """A bound call's arrays in memory that the ranks share. ``inputs``: (rank, name, array); ``outputs``: of each rank but 0, those
    that are split."""

    inputs: Sequence[tuple[int, str, Array]]
    outputs: Sequence[Mapping[str, Array]]


def _process(board: Board) -> tuple[WorkerProcess, socket.socket, int]:
    """A process for another rank, the socket that wakes it, and the descriptor of the socket's other end there."""
    bell, other = socket.socketpair()
    bell.setblocking(False)
    with other:
        files = (board.descriptor, other.fileno())
        main = "optdnn.runtime.ranks.child:main"
        return WorkerProcess(4, START_S, main, alone=True, without=LAUNCHED, files=files), bell, files[1]


def _end(
    processes: Sequence[WorkerProcess], pool: ThreadPoolExecutor, bells: Sequence[socket.socket], board: Board
) -> None:
    for process in processes:
        with contextlib.suppress(Exception):
            process.kill()
    for bell in bells:
        bell.close()
    board.close()
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
