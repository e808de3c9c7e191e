"""All targets by name."""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import Protocol, cast

NAMES = (
    *("model", "build", "engine", "timing_cache", "calibration_cache", "lockfile"),
    *("image_spec", "answer_spec", "dimension", "request"),
)


class Target(Protocol):
    """A module of ``fuzz.targets``."""

    COVERED: tuple[str, ...]

    def seeds(self) -> list[bytes]: ...

    def mutate(self, data: bytes, rng: Random) -> bytes: ...

    def one_input(self, data: bytes) -> None: ...


def target(name: str) -> Target:
    return cast(Target, import_module(f"fuzz.targets.{name}"))
