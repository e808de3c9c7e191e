"""Engines of several ranks: who runs them, and how their inputs and outputs are put together.

The caller gives whole inputs and gets whole outputs. On GPUs each rank is a process: this one is rank 0 and starts the others, or
a launcher started all of them, and then each calls ``run`` with the same inputs. Engines for ``reference`` and ``simulate``
run all ranks in threads of this process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from optdnn.errors import InputError, OptdnnError, RankError, UsageError
from optdnn.runtime.contexts.base import BaseContext, Runner, hand_over
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.state import Binding, checked_values
from optdnn.runtime.file.format import write
from optdnn.runtime.file.validate import collectives
from optdnn.runtime.plans.runners import open_plan
from optdnn.runtime.program import Program, Ranks
from optdnn.runtime.ranks.exchange import Threads, together
from optdnn.runtime.ranks.group import Group, Hub
from optdnn.runtime.ranks.member import Member, on_gpu, program_of
from optdnn.runtime.ranks.place import Place, meet, place_of
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.workers.process import WorkerFailure, WorkerProcess
from optdnn.types import Array, TensorSpec

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
    def times(self, context: int, repeats: int) -> list[float]: ...
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

    def times(self, context: int, repeats: int) -> list[float]:
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

    def times(self, context: int, repeats: int) -> list[float]:
        return self.member.times(context, repeats)

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
                for one in starting:
                    _result(one)
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
                    _result(one)
            raise
        return [first, *(_result(one) for one in asked)]

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

    def times(self, context: int, repeats: int) -> list[float]:
        found: list[float] = self._all(lambda: self.member.times(context, repeats), "times", context, repeats=repeats)[
            0
        ]
        return found

    def close(self) -> None:
        self.member.close()
        self._finalizer()


def _end(processes: Sequence[WorkerProcess], pool: ThreadPoolExecutor) -> None:
    for process in processes:
        with contextlib.suppress(Exception):
            process.kill()
    pool.shutdown(wait=False)


def _result(future: Future[Any]) -> Any:
    return future.result()


def _check(futures: Sequence[Future[Any]]) -> None:
    """Raise the error of a process that failed before it came."""
    for one in futures:
        if one.done():
            _result(one)


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


def of_one_rank(program: Program) -> Ranks | None:
    """The ranks of a model that was written for one of them, with collectives of its own: each process of a launcher has its own
    engine. None for other programs."""
    found = collectives(program)
    if not found:
        return None
    others = (program,) * (found[0].world - 1)
    return Ranks(others, (-1,) * len(program.inputs), (-1,) * len(program.outputs))


def open_ranks(program: Program, ranks: Ranks, options: LoadOptions) -> RanksRunner:
    """Make an engine of several ranks ready; a GPU is touched when the first context is made."""
    return RanksRunner(program, ranks, options)


class RanksRunner(Runner):
    """An engine of several ranks, shared by threads: one run goes on at a time."""

    def __init__(self, program: Program, ranks: Ranks, options: LoadOptions):
        self.program, self.ranks, self._options = program, ranks, options
        own = Signature.of(program)
        self.signature = Signature(
            _whole(own.inputs, ranks.inputs, ranks.world),
            _whole(own.outputs, ranks.outputs, ranks.world),
            own.profiles,
            own.bounds,
        )
        self.lock = threading.Lock()
        self._team: Team | None = None

    @property
    def team(self) -> Team:
        """All ranks; started when they are first asked for."""
        with self.lock:
            if self._team is None:
                self._team = self._start()
            return self._team

    def _start(self) -> Team:
        place = place_of()
        if place is not None:
            return LauncherTeam(self.program, self.ranks, self._options, place)
        apart = on_gpu(self.program, self._options) if self._options.processes is None else self._options.processes
        kind = ProcessTeam if apart else ThreadTeam
        return kind(self.program, self.ranks, self._options)

    @property
    def facts(self) -> tuple[Mapping[str, Any], ...]:
        """Those of rank 0's steps; none before the ranks are started."""
        team: Any = self._team
        return () if team is None else tuple(team.runners[0].facts)

    def context(self, arena: Any = None) -> RanksContext:
        return RanksContext(self)


def _whole(specs: Sequence[TensorSpec], axes: Sequence[int], world: int) -> list[TensorSpec]:
    """Ports of the network from those of a rank."""
    made = []
    for spec, axis in zip(specs, axes, strict=True):
        shape = tuple(d * world if k == axis and isinstance(d, int) else d for k, d in enumerate(spec.shape))
        made.append(replace(spec, shape=shape))
    return made


class RanksContext(BaseContext):
    """One caller's state on every rank."""

    def __init__(self, runner: RanksRunner):
        super().__init__(runner.program, runner.signature)
        self.runner, self.team = runner, runner.team
        ranks = runner.ranks
        self.world = ranks.world
        self._inputs = {s.name: a for s, a in zip(self.signature.inputs, ranks.inputs, strict=True)}
        self._outputs = {s.name: a for s, a in zip(self.signature.outputs, ranks.outputs, strict=True)}
        with runner.lock:
            self.number = self.team.context()

    def parts(self, arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
        """Each rank's inputs."""
        return split(arrays, self._inputs, self.world)

    def joined(self, results: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """The outputs of the network, of those that the ranks give."""
        found = {}
        for name in results[0]:
            axis = self._outputs[name]
            found[name] = results[0][name] if axis < 0 else np.concatenate([r[name] for r in results], axis)
        return found

    def _run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Any]:
        if stream is not None:
            raise InputError("an engine of several devices takes no stream", hint="leave stream out")
        arrays, given = self.signature.checked(feeds, out)
        named = {s.name: a for s, a in zip(self.signature.inputs, arrays, strict=True)}
        with self.runner.lock:
            results = self.joined(self.team.run(self.number, self.parts(named)))
        pairs = zip(self.signature.outputs, given, strict=True)
        return {
            s.name: results[s.name] if buffer is None else hand_over(s, results[s.name], buffer) for s, buffer in pairs
        }

    def gpu_times(self, feeds: Mapping[str, Any], repeats: int = 100) -> list[float]:
        """Milliseconds on rank 0's GPU of runs one after another, all ranks at once."""
        self.run(feeds)
        with self.runner.lock:
            return self.team.times(self.number, repeats)

    @property
    def on_gpu(self) -> bool:
        """Whether each rank runs on a GPU of its own."""
        return on_gpu(self.program, self.runner._options)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Steps of ranks are not timed one by one."""
        raise UsageError(
            "steps are timed on one device", hint="leave --profile out, or build the engine for one device"
        )

    def _bind(self, given: Binding) -> RanksBound:
        return RanksBound(self, given)


class RanksBound:
    """A call that is repeated on every rank. State stays with the ranks; other inputs are read in each run."""

    def __init__(self, context: RanksContext, given: Binding):
        signature = context.signature
        if given.outputs:
            raise InputError("an engine of several devices gives fresh outputs", hint="leave the buffers out")
        self._context, self._pairs = context, given.checked_state(signature)
        arrays = signature.arrays(given.inputs)
        signature.sizes(arrays)
        self._inputs = {s.name: a for s, a in zip(signature.inputs, arrays, strict=True)}
        self._initial = {target: self._inputs[target] for target in self._pairs.values()}
        self.outputs: dict[str, Array] = {}
        with context.runner.lock:
            context.team.bind(context.number, context.parts(self._inputs), self._pairs)

    @property
    def state(self) -> dict[str, Array]:
        """Input -> a copy of what the next run reads there."""
        c = self._context
        with c.runner.lock:
            states = c.team.state(c.number)
        return {
            n: states[0][n] if c._inputs[n] < 0 else np.concatenate([s[n] for s in states], c._inputs[n])
            for n in states[0]
        }

    def run(self, stream: object = None) -> dict[str, Array]:
        """Run once on the bound arrays as they are now; results that are state stay with the ranks."""
        if stream is not None:
            raise InputError("an engine of several devices takes no stream", hint="leave stream out")
        c = self._context
        c.signature.check_bounds(list(self._inputs.values()), {})
        moving = {n: a for n, a in self._inputs.items() if n not in self._initial}
        with c._alone, c.runner.lock:
            results = c.team.step(c.number, c.parts(moving))
        self.outputs = c.joined([{n: a for n, a in r.items() if n not in self._pairs} for r in results])
        return self.outputs

    def reset(self, values: Mapping[str, Array] | None = None) -> None:
        """Begin again from the initial state; ``values`` (by input name) are the initial state from now on."""
        checked = checked_values(self._initial, values)
        c = self._context
        with c.runner.lock:
            c.team.reset(c.number, c.parts(checked))


def split(arrays: Mapping[str, Array], axes: Mapping[str, int], world: int) -> list[dict[str, Array]]:
    """Each rank's parts of arrays."""
    found: list[dict[str, Array]] = [{} for _ in range(world)]
    for name, array in arrays.items():
        pieces = [array] * world if axes[name] < 0 else np.split(array, world, axes[name])
        for rank, piece in enumerate(pieces):
            found[rank][name] = np.ascontiguousarray(piece)
    return found
