"""The interface of workers to the batcher: instances that run jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from optdnn.serving.facts import ModelFacts
from optdnn.serving.tensors import Job
from optdnn.types import Array

Outcome: TypeAlias = Mapping[str, Array] | Exception
"""The outputs of a run, valid until the instance is free again, or its error."""


class Instance(ABC):
    """One context of an engine. It runs one job at a time."""

    @abstractmethod
    def start(self, job: Job, done: Callable[[Outcome], None]) -> None:
        """Begin a run; ``done`` is called in the event loop's thread, exactly once."""

    def forget(self, handles: Sequence[str]) -> None:  # noqa: B027 (most instances never open any)
        """Close memory of clients on the GPU, which no job names any more."""


class Worker(ABC):
    """A loaded engine and its instances."""

    instances: tuple[Instance, ...]
    lost = False
    """Whether it has died."""

    @abstractmethod
    async def ready(self) -> ModelFacts:
        """Wait until the engine is loaded. Raises OptdnnError where it cannot be."""

    @abstractmethod
    async def close(self) -> None:
        """End it. Jobs that still run are lost."""
