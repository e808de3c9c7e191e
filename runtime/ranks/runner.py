"""Engines of several ranks: splitting their inputs, and joining their outputs.

The caller gives whole inputs and gets whole outputs. On GPUs each rank is a process: this one is rank 0 and starts the others, or
a launcher started all of them, and then each calls ``run`` with the same inputs. Engines for ``reference`` and ``simulate``
run all ranks in threads of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.errors import InputError, UsageError
from optdnn.runtime.contexts.base import BaseContext, Runner, hand_over
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.contexts.state import Binding, checked_values
from optdnn.runtime.file.validate import collectives
from optdnn.runtime.program import Program, Ranks
from optdnn.runtime.ranks.member import on_gpu
from optdnn.runtime.ranks.place import place_of
from optdnn.runtime.ranks.processes import ProcessTeam
from optdnn.runtime.ranks.teams import LauncherTeam, Team, ThreadTeam
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array, TensorSpec


def of_one_rank(program: Program) -> Ranks | None:
    """The ranks of a model that was written for one of them and contains collectives: each process of a launcher has its own
    engine. None for other programs."""
    found = collectives(program)
    if not found:
        return None
    others = (program,) * (found[0].world - 1)
    return Ranks(others, (-1,) * len(program.inputs), (-1,) * len(program.outputs))


class RanksRunner(Runner):
    """An engine of several ranks, shared by threads: one run at a time. A GPU is used only when the first context is created."""

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
        """All ranks; started on first use."""
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
        """The facts of rank 0's steps; none before the ranks are started."""
        team: Any = self._team
        return () if team is None else tuple(team.runners[0].facts)

    def context(self, arena: Any = None) -> RanksContext:
        return RanksContext(self)


def _whole(specs: Sequence[TensorSpec], axes: Sequence[int], world: int) -> list[TensorSpec]:
    """Ports of the network, computed from the ports of a rank."""
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

    def joined(self, results: Sequence[Mapping[str, Array]], leave: Container[str] = ()) -> dict[str, Array]:
        """The outputs of the network except ``leave``, joined from the ranks' results."""
        found = {}
        for name, own in results[0].items():
            if name in leave:
                continue
            axis = self._outputs[name]
            found[name] = own if axis < 0 else np.concatenate([r[name] for r in results], axis)
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
        """Milliseconds on rank 0's GPU of consecutive runs, all ranks at once."""
        self.run(feeds)
        with self.runner.lock:
            return self.team.times(self.number, repeats, bound=False)

    @property
    def on_gpu(self) -> bool:
        """Whether each rank runs on a separate GPU."""
        return on_gpu(self.program, self.runner._options)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Not supported: steps of ranks are not timed one by one."""
        raise UsageError(
            "steps are timed on one device", hint="leave --profile out, or build the engine for one device"
        )

    def _bind(self, given: Binding) -> RanksBound:
        return RanksBound(self, given)


class RanksBound:
    """A repeated call on every rank. State stays with the ranks; other inputs are read in each run."""

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
        moving = {n: a for n, a in self._inputs.items() if n not in self._initial}
        self._moving = views(moving, context._inputs, context.world)
        self._bounded = {n: a for n, a in moving.items() if n in signature.bounds}
        signature.check_bounds_of(self._initial, {})
        with context.runner.lock:
            context.team.bind(context.number, context.parts(self._inputs), self._pairs)

    @property
    def state(self) -> dict[str, Array]:
        """Input -> a copy of the array that the next run reads for it."""
        c = self._context
        with c.runner.lock:
            states = c.team.state(c.number)
        return {
            n: states[0][n] if c._inputs[n] < 0 else np.concatenate([s[n] for s in states], c._inputs[n])
            for n in states[0]
        }

    def run(self, stream: object = None) -> dict[str, Array]:
        """Run once on the bound arrays with their present contents; results that are state stay with the ranks."""
        if stream is not None:
            raise InputError("an engine of several devices takes no stream", hint="leave stream out")
        c = self._context
        c.signature.check_bounds_of(self._bounded, {})
        with c._alone, c.runner.lock:
            results = c.team.step(c.number, self._moving)
            self.outputs = c.joined(results, self._pairs)
        return self.outputs

    def gpu_times(self, repeats: int = 100) -> list[float]:
        """Milliseconds on rank 0's GPU of consecutive runs, all ranks at once. State continues with each run."""
        c = self._context
        with c._alone, c.runner.lock:
            return c.team.times(c.number, repeats, bound=True)

    def reset(self, values: Mapping[str, Array] | None = None) -> None:
        """Restart from the initial state; ``values`` (by input name) become the initial state from now on."""
        checked = checked_values(self._initial, values)
        c = self._context
        with c.runner.lock:
            c.team.reset(c.number, c.parts(checked))


def split(arrays: Mapping[str, Array], axes: Mapping[str, int], world: int) -> list[dict[str, Array]]:
    """Each rank's parts of arrays, contiguous."""
    return [{n: np.ascontiguousarray(a) for n, a in parts.items()} for parts in views(arrays, axes, world)]


def views(arrays: Mapping[str, Array], axes: Mapping[str, int], world: int) -> list[dict[str, Array]]:
    """Each rank's parts of arrays, as views of the same memory."""
    found: list[dict[str, Array]] = [{} for _ in range(world)]
    for name, array in arrays.items():
        pieces = [array] * world if axes[name] < 0 else np.split(array, world, axes[name])
        for rank, piece in enumerate(pieces):
            found[rank][name] = piece
    return found
