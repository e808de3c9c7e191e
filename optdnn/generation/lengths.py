"""The number of prompt tokens that a step reads."""

from __future__ import annotations

from optdnn.errors import InputError, UsageError
from optdnn.generation.ports import Ports
from optdnn.runtime.engine import Engine

LONGEST_STEP = 512
"""Prompt tokens per step if the engine sets no bound."""


class StepLengths:
    """The numbers of tokens that steps may have. ``most`` None: any number."""

    def __init__(self, engine: Engine, ports: Ports):
        size = ports.tokens.shape[1]
        ranges = [p[size] for p in engine.profiles if isinstance(size, str) and size in p]
        self.planned = bool(engine.profiles) and not engine.target.startswith(("cpu", "reference"))
        """Whether each length has its own plan; then only a few different lengths are used."""
        self._ranges = [(size, size)] if isinstance(size, int) else sorted({(r.min, r.max) for r in ranges})
        self.most: int | None = max((last for _, last in self._ranges), default=None)
        least = min((first for first, _ in self._ranges), default=1)
        if least > 1:
            raise UsageError(
                f"the engine takes at least {least} tokens a step; a generator decodes one at a time",
                hint=f"build it with a range of lengths from 1 on: --shape {ports.tokens.name}=...x1..1..512",
            )
        symbols = {c.input.shape[c.axis] for c in ports.caches}
        found = [p[n].min for p in engine.profiles for n in symbols if isinstance(n, str) and n in p]
        self.least_capacity = max(found, default=0)

    def step(self, left: int, room: int, *, exact: bool = False) -> int:
        """The length of a step if ``left`` tokens are still to be read and caches have room for ``room``.

        Raises InputError if there is no room.
        """
        if room < 1:
            raise InputError(
                "the caches have no room to pad the shorter prompts of a batch",
                hint="generate the longest prompt by itself",
            )
        most = min(self.most or LONGEST_STEP, room)
        length = min(left, most)
        if not self.planned or exact:
            return self._taken(length, length)
        padded = 1 << (length - 1).bit_length()
        length = padded if padded <= most else length if length < 8 else 1 << (length.bit_length() - 1)
        return self._taken(length, most)

    def _taken(self, length: int, most: int) -> int:
        """A length that a profile accepts: this one, the next larger one up to ``most``, or the last one before it."""
        if not self._ranges or any(first <= length <= last for first, last in self._ranges):
            return length
        above = [first for first, _ in self._ranges if length < first <= most]
        return min(above) if above else max(last for _, last in self._ranges if last < length)
