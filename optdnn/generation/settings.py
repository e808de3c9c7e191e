"""How tokens are chosen: the sampling settings, checked, one value per sequence."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from optdnn.errors import UsageError
from optdnn.types import Array

Number: TypeAlias = float | Sequence[float]
Integer: TypeAlias = int | Sequence[int]


@dataclass(frozen=True)
class Settings:
    """Arrays [batch] by the names of :data:`optdnn.runtime.contexts.sampled.SETTINGS`, except the position."""

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array

    def at(self, position: Array) -> dict[str, Array]:
        """All operands of SampleToken after the logits. ``position`` [batch]: the number of tokens before the drawn one."""
        return {
            "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed,
            "position": position.astype(np.int64),
        }  # fmt: skip


def settings(count: int, batch: int, *, temperature: Number, top_k: Integer, top_p: Number, seed: Integer) -> Settings:
    """The settings of ``count`` sequences in a batch of ``batch``; the others are greedy. One seed: sequence b has ``seed + b``.

    Raises UsageError for a setting that is out of range, or does not have one value per sequence.
    """
    temperatures = _column("temperature", temperature, count, float, lambda v: 0 <= v < math.inf, "0 or more")
    ks = _column("top_k", top_k, count, operator.index, lambda v: 0 <= v < 1 << 31, "0 (all) or more")
    ps = _column("top_p", top_p, count, float, lambda v: 0 < v <= 1, "above 0 and at most 1")
    seeds = _column("seed", seed, count, operator.index, lambda v: -(1 << 63) <= v < 1 << 63, "an integer of 64 bits")
    if not isinstance(seed, Sequence):
        seeds = [((s + b + (1 << 63)) % (1 << 64)) - (1 << 63) for b, s in enumerate(seeds)]
    rest = batch - count
    return Settings(
        np.array([*temperatures, *[0.0] * rest], np.float32),
        np.array([*ks, *[0] * rest], np.int64),
        np.array([*ps, *[1.0] * rest], np.float32),
        np.array([*seeds, *[0] * rest], np.int64),
    )


def _column(
    name: str, given: Any, count: int, read: Callable[[Any], Any], fits: Callable[[Any], bool], what: str
) -> list[Any]:
    """One value per sequence."""
    values = (
        list(given) if isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str) else [given] * count
    )
    if len(values) != count:
        raise UsageError(f"{name} has {len(values)} numbers for {count} sequences")
    found = []
    for value in values:
        try:
            number = read(value)
        except (TypeError, ValueError):
            raise UsageError(f"{name} must be {what}, not {value!r}") from None
        if isinstance(value, str) or not fits(number):
            raise UsageError(f"{name} must be {what}, not {value!r}")
        found.append(number)
    return found
