"""The ranks of an engine that this process starts: rank 0 here, and a process for each other rank."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from optdnn.errors import RankError, UsageError
from optdnn.runtime.file.format import write
from optdnn.runtime.program import Program, Ranks, known_sizes
from optdnn.runtime.ranks.board import Board, Fields, Types
from optdnn.runtime.ranks.group import Group, Hub
from optdnn.runtime.ranks.member import Member, on_gpu
from optdnn.runtime.ranks.teams import Parts
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.workers.process import WorkerFailure, WorkerProcess
from optdnn.temporary import temporary_folder
from optdnn.types import Array, TensorSpec

START_S = 600.0
"""Seconds that a rank may take to load its engine: kernels may have to be compiled."""
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
"""Variables that the started processes do not get."""


class ProcessTeam:
    """Rank 0 in this process, and a process for each other rank, which this process starts and ends."""

    def __init__(self, program: Program, ranks: Ranks, options: LoadOptions):
        if options.custom_ops:
            raise UsageError("custom operators do not run on several GPUs", hint="build the engine for one device")
        if on_gpu(program, options):
            from optdnn.runtime.cuda.collectives.communicator import check_gpus

            check_gpus(ranks.world)
        self._split = {
            spec.name: spec for (spec, _), axis in zip(program.outputs, ranks.outputs, strict=True) if axis >= 0
        }
        self._cut = {spec.name for (spec, _), axis in zip(program.inputs, ranks.inputs, strict=True) if axis >= 0}
        self._bound: dict[int, _Shared] = {}
        self._count = 0
        hub = Hub(ranks.world)
        self._board = board = Board.create(ranks.world)
        self.processes, self._bells, theirs = [], list[socket.socket](), list[int]()
        for _ in ranks.programs:
            process, bell, descriptor = _process(board)
            self.processes.append(process)
            self._bells.append(bell)
            theirs.append(descriptor)
        self._askers = [_Asker() for _ in self.processes]
        self._group: Group | None = None
        self._finalizer = weakref.finalize(self, _end, self.processes, self._askers, self._bells, board)
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

    def _ask(self, message: Callable[[int], Mapping[str, Any]], parts: Parts | None = None) -> list[Future[Any]]:
        """Send each other rank a command. If one fails, the waits of all others end."""

        def ask(rank: int) -> Any:
            try:
                arrays = None if parts is None else parts[rank]
                return self.processes[rank - 1].ask(message(rank), arrays, START_S)
            except WorkerFailure as error:
                if self._group is not None:
                    self._group.fail(f"rank {rank} failed: {error.message}")
                raise RankError(f"rank {rank} failed: {error.message}", hint="load the engine again") from error

        return [asker.submit(partial(ask, rank)) for rank, asker in enumerate(self._askers, 1)]

    def _all(
        self, own: Callable[[], Any], command: str, context: int, parts: Parts | None = None, **more: Any
    ) -> list[Any]:
        """Each rank's (message, arrays); for rank 0 the result of ``own``."""
        self._ready()
        message = {"command": command, "number": context, **more}
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
        work = partial(self.member.run, context, parts[0])
        first, *others = self._all(work, "run", context, parts, split=list(self._split))
        return [first, *(arrays for _, arrays in others)]

    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None:
        kept = set(state.values())
        moving = [{n: a for n, a in arrays.items() if n not in kept} for arrays in parts]
        initial = [{n: a for n, a in arrays.items() if n in kept} for arrays in parts]
        results = {n: spec for n, spec in self._split.items() if n not in state}
        call = self._shared(_types(moving), results, self._bound.get(context))
        work = partial(self.member.bind, context, parts[0], state)
        self._all(work, "bind", context, initial, state=dict(state), call=call.number, fields=call.fields)
        self._bound[context] = call

    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        return self._rung(self._bound[context], parts, lambda: self.member.step(context, parts[0]))

    def _shared(self, types: Sequence[Types], results: Mapping[str, TensorSpec], before: _Shared | None) -> _Shared:
        """A call with inputs of these types for each rank, and these results of each rank; ``before`` is reused if it matches."""
        if before is not None and before.types == types and before.results == results.keys():
            return before
        if open_ones := [str(s) for s in results.values() if not all(isinstance(n, int) for n in s.shape)]:
            raise UsageError(f"outputs that are split between processes must have fixed sizes: {open_ones[0]}")
        whole = {n: one for n, one in types[0].items() if n not in self._cut}
        board, sizes = self._board, {n: (s.dtype, known_sizes(s.shape)) for n, s in results.items()}
        given = board.place(whole, [{n: one for n, one in each.items() if n in self._cut} for each in types])
        taken = board.place({}, [{}, *[sizes] * len(self.processes)])
        self._count += 1
        inputs = [
            (rank, name, array)
            for rank, fields in enumerate(given)
            for name, array in board.arrays(fields).items()
            if rank > 0 and (rank == 1 or name in self._cut)
        ]
        outputs = [board.arrays(fields) for fields in taken[1:]]
        return _Shared(self._count, types, list(zip(given, taken, strict=True)), inputs, outputs, set(results))

    def _rung(self, call: _Shared, parts: Parts, own: Callable[[], dict[str, Array]]) -> list[dict[str, Array]]:
        """Run a call on all ranks; ``own`` is rank 0's part. The next call overwrites the other ranks' results."""
        group = self._ready()
        for rank, name, array in call.inputs:
            np.copyto(array, parts[rank][name])
        self._board.ring(call.number, self._bells)
        try:
            first = own()
            if call.results:
                self._board.settle(group.check)
        except BaseException as error:
            self._failed(error)
            raise
        return [first, *call.outputs]

    def _ready(self) -> Group:
        """Wait until the other ranks have finished the last step: rank 0 had its results earlier."""
        group = self._group
        assert group is not None
        group.check()
        self._board.settle(group.check)
        return group

    def _failed(self, error: BaseException) -> None:
        """Tell the other ranks of an error of this rank."""
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
    """A call with arrays in memory that the ranks share."""

    number: int
    types: Sequence[Types]
    """The types of each rank's inputs."""
    fields: list[tuple[Fields, Fields]]
    """Each rank's inputs and outputs."""
    inputs: Sequence[tuple[int, str, Array]]
    """(rank, name, array): the inputs that rank 0 writes. Inputs that all ranks read are written once."""
    outputs: Sequence[dict[str, Array]]
    """The split outputs of each rank except 0."""
    results: set[str]
    """The names of these outputs."""


class _Asker:
    """A thread that waits for the answers of a process. The end of the interpreter does not wait for it, as it would for a pool's
    thread: it ends the process, which may hang."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._works,), name="optdnn-ranks", daemon=True).start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        found: Future[Any] = Future()
        self._works.put((found, work))
        return found

    def close(self) -> None:
        """End the thread after its present work."""
        self._works.put(None)


def _serve(works: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (one := works.get()) is not None:
        found, work = one
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)
        del one, found, work


def _types(parts: Parts) -> list[Types]:
    return [{n: (a.dtype, a.shape) for n, a in arrays.items()} for arrays in parts]


def _process(board: Board) -> tuple[WorkerProcess, socket.socket, int]:
    """A process for another rank, the socket that wakes it, and the descriptor of the socket's other end there."""
    bell, other = socket.socketpair()
    bell.setblocking(False)
    with other:
        files = (board.descriptor, other.fileno())
        main = "optdnn.runtime.ranks.child:main"
        return WorkerProcess(4, START_S, main, alone=True, without=LAUNCHED, files=files), bell, files[1]


def _end(
    processes: Sequence[WorkerProcess], askers: Sequence[_Asker], bells: Sequence[socket.socket], board: Board
) -> None:
    for process in processes:
        with contextlib.suppress(Exception):
            process.kill()
    for bell in bells:
        bell.close()
    board.close()
    for asker in askers:
        asker.close()


def _check(futures: Sequence[Future[Any]]) -> None:
    """Raise the error of a process that failed before it connected."""
    for one in futures:
        if one.done():
            one.result()


@contextlib.contextmanager
def _engine_file(program: Program) -> Any:
    """A file with the engine, for the other ranks: its own, or a temporary one."""
    descriptor = None if program.file is None else program.file.descriptor
    if descriptor is not None:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
        return
    with temporary_folder("optdnn-ranks-") as folder:
        path = os.path.join(folder, "ranks.engine")
        write(program, path)
        yield path


def _plain(options: LoadOptions) -> dict[str, Any]:
    """The load options of the other ranks: this process has already checked the file."""
    return {"simulate": options.simulate, "trust_cubins": options.trust_cubins, "recompile": options.recompile}
