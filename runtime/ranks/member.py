"""One rank in this process: its program, its contexts, and its connection to the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from optdnn.errors import EngineError, RankError
from optdnn.runtime.contexts.base import BaseContext, Runner
from optdnn.runtime.plans.runners import open_plan
from optdnn.runtime.program import Program, target_of
from optdnn.runtime.ranks.calls import GpuCall, HostCall, to_host
from optdnn.runtime.ranks.exchange import joined
from optdnn.runtime.ranks.group import Group
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array

_NOTHING: AbstractContextManager[None] = nullcontext()


def on_gpu(program: Program, options: LoadOptions) -> bool:
    """Whether ranks run on separate GPUs."""
    return target_of(program).family == "cuda" and not options.simulate


def program_of(program: Program, rank: int) -> Program:
    """The program of one rank."""
    if program.ranks is None:
        raise EngineError("the engine is for one device")
    return program.ranks.programs[rank - 1] if rank else program


class Member:
    """A rank with its own process. Creating it is a collective: all ranks of ``group`` do it together.

    Raises RankError if the GPUs do not fit together, and the errors of loading an engine.
    """

    def __init__(self, program: Program, group: Group, local: int, options: LoadOptions):
        """``program`` is this rank's own."""
        self.group, self._communicator = group, None
        if on_gpu(program, options):
            from optdnn.runtime.cuda.collectives.communicator import connect

            self._communicator = connect(group, local)
        self.runner: Runner = open_plan(program, options)
        self._contexts: list[BaseContext] = []
        self._bound: dict[int, Any] = {}
        self.context()
        group.exchange({"ready": True})

    def _here(self) -> AbstractContextManager[None]:
        """A ``with`` block for creating arrays and graphs on this rank's GPU, with its collectives."""
        return _NOTHING if self._communicator is None else self._communicator.here()

    def context(self) -> int:
        """The number of a new context."""
        with self._here():
            self._contexts.append(self.runner.context())
        return len(self._contexts) - 1

    def _joined(self) -> AbstractContextManager[None]:
        return _NOTHING if self._communicator is not None else joined(self.group)

    def run(self, context: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once on this rank's parts of the inputs. Raises RankError if another rank is lost."""
        found: dict[str, Array] = self._watched(lambda: self._contexts[context].run(feeds))
        return found

    def bind(self, context: int, feeds: Mapping[str, Array], state: Mapping[str, str]) -> None:
        """Bind a context to copies of these arrays, which :meth:`step` overwrites, and to state that stays in this process."""
        kind = HostCall if self._communicator is None else GpuCall
        with self._here():
            self._bound[context] = kind(self._contexts[context], feeds, state)

    def step(self, context: int, feeds: Mapping[str, Array], wanted: Container[str] | None = None) -> dict[str, Array]:
        """Run a bound context once, with these inputs. Returns the outputs ``wanted`` (None: all) that are not state."""
        call = self._bound[context]
        found: dict[str, Array] = self._watched(lambda: call.run(feeds, wanted), self._current)
        return found

    def _current(self) -> AbstractContextManager[None]:
        """Like :meth:`_here`, for work that creates no arrays and no graphs."""
        if self._communicator is not None:
            self._communicator.make_current()
        return _NOTHING

    def state(self, context: int) -> dict[str, Array]:
        """A copy of a bound context's state, by input."""
        with self._here():
            return {n: np.array(to_host(a)) for n, a in self._bound[context].bound.state.items()}

    def reset(self, context: int, values: Mapping[str, Array]) -> None:
        """Restart from the initial state, or from these values."""
        with self._here():
            self._bound[context].bound.reset(dict(values) or None)

    def times(self, context: int, repeats: int, bound: bool) -> list[float]:
        """GPU milliseconds of consecutive runs, all ranks at once: on the inputs of the last run, or (``bound``) of the
        context as it is bound."""
        from optdnn.runtime.cuda.launches.graphs import time_runs

        one: Any = self._contexts[context]

        def work() -> list[float]:
            run = self._bound[context].bound.run if bound else one.graph().replay
            return time_runs(lambda: run(one.stream), one.stream, warmup=10, repeats=repeats)

        found: list[float] = self._watched(work)
        return found

    def _watched(self, work: Callable[[], Any], here: Callable[[], AbstractContextManager[None]] | None = None) -> Any:
        """Do ``work`` together with the other ranks. Raises RankError if one of them is lost meanwhile."""
        self.group.begin()
        try:
            with (here or self._here)(), self._joined():
                found = work()
        except RankError:
            raise
        except Exception:
            self.group.check()
            raise
        finally:
            self.group.end()
        self.group.check()
        if self._communicator is not None:
            self._communicator.check()
        return found

    def close(self) -> None:
        """Leave the others."""
        self.group.close()
        if self._communicator is not None:
            self._communicator.close()
