"""The sizes of batches: how many rows run at once, and to which size they are padded."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.serving.facts import ModelFacts, Shapes

DEFAULT_ROWS = 32
"""Most rows of a batch, where neither the engine nor the user says."""


class BatchSizes:
    """The sizes of one model's batches."""

    def __init__(self, facts: ModelFacts, max_batch: int | None):
        self._asked = max_batch
        ranges = [p[facts.batch] for p in facts.profiles if facts.batch is not None and facts.batch in p]
        self._largest = max((r.max for r in ranges), default=DEFAULT_ROWS)
        self._least = min((r.min for r in ranges), default=1)
        self._by_plan = bool(facts.plans)
        self._planned: dict[Shapes, list[int]] = {}
        for shapes in facts.plans if facts.batch is not None else ():
            self._planned.setdefault(rest_of(shapes), []).append(shapes[0][0])

    def most(self, rest: Shapes) -> int:
        """Most rows of a batch of inputs whose further dimensions are ``rest``."""
        held = self._planned.get(rest)
        limit = max(held) if held else self._largest
        return max(1, limit if self._asked is None else min(limit, self._asked))

    def padded(self, rows: int, rest: Shapes) -> int:
        """The size at which ``rows`` rows run: the least that the engine has a plan for.

        Without a plan for ``rest``, an engine of plans takes powers of two, so that few are made; another one takes every size.
        """
        held = self._planned.get(rest, ())
        fitting = [n for n in held if n >= rows]
        if fitting:
            return min(fitting)
        size = 1 << (rows - 1).bit_length() if self._by_plan else rows
        return max(rows, self._least, min(size, self.most(rest)))


def rest_of(shapes: Sequence[Sequence[int]]) -> Shapes:
    """The dimensions of the inputs behind their rows."""
    return tuple(tuple(shape[1:]) for shape in shapes)
