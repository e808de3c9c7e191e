"""The inputs of a step that describe the positions of tokens: positions, masks and counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optdnn.errors import InputError
from optdnn.generation.ports import Counter, Ports
from optdnn.generation.settings import Settings
from optdnn.runtime.contexts.sampled import PREFIX, ROW
from optdnn.types import Array


@dataclass(frozen=True)
class Step:
    """The inputs of one step.

    ``tokens`` [batch, length] int64; ``held`` [batch]: the number of positions that each sequence holds; ``row`` [batch]: the row
    whose logits count. Rows after it are padding; their positions are overwritten later. ``padding`` [batch]: rows of padding in
    front (only for growing caches; their columns before this step are ``seen`` [batch, held], true for columns that are not
    padding).
    """

    tokens: Array
    held: Array
    row: Array
    settings: Settings
    padding: Array | None = None
    seen: Array | None = None

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def places(self) -> Array:
        """[batch]: the number of tokens before the drawn one."""
        front = 0 if self.padding is None else self.padding
        return np.asarray(self.held + self.row + 1 - front, np.int64)


def feeds_of(ports: Ports, step: Step, capacity: int) -> dict[str, Array]:
    """The inputs of a step, without the caches. ``capacity``: positions of the caches; if they grow, with the step's own."""
    given: dict[str, Array] = {ports.tokens.name: step.tokens.astype(ports.tokens.dtype)}
    steps = np.arange(step.length)
    front = 0 if step.padding is None else step.padding[:, None]
    if ports.positions is not None:
        at = np.maximum(step.held[:, None] + steps - front, 0)
        given[ports.positions.name] = at.astype(ports.positions.dtype)
    if ports.mask is not None:
        if step.seen is None:
            mask = np.arange(capacity) < (step.held + step.length)[:, None]
        else:
            mask = np.concatenate([step.seen, steps >= front + np.zeros_like(step.held)[:, None]], axis=1)
        given[ports.mask.name] = mask.astype(ports.mask.dtype)
    columns = step.held if step.seen is None else np.full_like(step.held, step.seen.shape[1])
    for counter in ports.counters:
        given[counter.spec.name] = counted(counter, columns, step.length)
    if ports.row:
        given[ROW] = step.row.astype(np.int64)
    if ports.samples:
        given |= {f"{PREFIX}{name}": a for name, a in step.settings.at(step.places).items()}
    return given


def counted(counter: Counter, held: Array, length: int) -> Array:
    """The value of a counter. Raises InputError if it holds one number for sequences of different lengths."""
    values = held + (length if counter.with_length else 0) + counter.more
    shape, dtype = counter.spec.shape, counter.spec.dtype
    if counter.is_single:
        if counter.is_total:
            return np.full([1] * len(shape), values.max(), dtype)
        if (values != values[0]).any():
            raise InputError(f"{counter.spec.name!r} holds one number: the sequences of a batch must be of one length")
        values = values[:1]
    return np.asarray(values.astype(dtype).reshape([len(values), *[1] * (len(shape) - 1)] if shape else []))
