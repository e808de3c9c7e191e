"""The teams that run the ranks of an engine: threads of this process, processes that it starts, or a launcher's processes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from optdnn.errors import OptdnnError, RankError, UsageError
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.plans.runners import open_plan
from optdnn.runtime.program import Program, Ranks
from optdnn.runtime.ranks.exchange import Threads, together
from optdnn.runtime.ranks.member import Member, program_of
from optdnn.runtime.ranks.place import Place, meet
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array

Parts = Sequence[Mapping[str, Array]]


class Team(Protocol):
    """All ranks of an engine. Each call concerns all of them; ``parts`` holds each rank's own inputs."""

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
        self._bound: dict[int, list[Any]] = {}

    def context(self) -> int:
        self._contexts.append([runner.context() for runner in self.runners])
        return len(self._contexts) - 1

    def run(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        return together([partial(c.run, p) for c, p in zip(self._contexts[context], parts, strict=True)], self._threads)

    def bind(self, context: int, parts: Parts, state: Mapping[str, str]) -> None:
        pairs = zip(self._contexts[context], parts, strict=True)
        self._bound[context] = [c.bind({n: a.copy() for n, a in p.items()}, state=state) for c, p in pairs]

    def step(self, context: int, parts: Parts) -> list[dict[str, Array]]:
        def work(bound: Any, given: Mapping[str, Array]) -> dict[str, Array]:
            for name, array in given.items():
                np.copyto(bound._inputs[name], array)
            results: dict[str, Array] = bound.run()
            return results

        pairs = zip(self._bound[context], parts, strict=True)
        return together([partial(work, bound, p) for bound, p in pairs], self._threads)

    def state(self, context: int) -> list[dict[str, Array]]:
        return [bound.state for bound in self._bound[context]]

    def reset(self, context: int, parts: Parts) -> None:
        for bound, values in zip(self._bound[context], parts, strict=True):
            bound.reset(dict(values) or None)

    def times(self, context: int, repeats: int, bound: bool) -> list[float]:
        raise UsageError("ranks in threads have no times of a GPU")

    def close(self) -> None:
        """Does nothing: there is nothing to leave."""


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
