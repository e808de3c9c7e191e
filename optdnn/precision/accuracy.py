"""How accurate an engine is on samples: its outputs over all of them, and what it loses in a metric against fp32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optdnn.errors import UsageError
from optdnn.precision.metrics import Metric
from optdnn.precision.samples import Samples
from optdnn.runtime.engine import Engine
from optdnn.types import Array

RUN_BATCH = 32
"""Samples to a call, where the network's batch is symbolic."""


class Judge:
    """Drops in ``metric`` on the two parts of the data. :meth:`refer` names the engine that all others are held against."""

    def __init__(self, metric: Metric, seen: Samples, unseen: Samples):
        self.metric, self.seen, self.unseen = metric, seen, unseen
        self._reference: tuple[dict[str, Array], dict[str, Array]] | None = None

    def refer(self, engine: Engine) -> None:
        """Raises what the engine raises, as does :meth:`run`."""
        self._reference = self.run(engine), self.run(engine, unseen=True)

    def run(self, engine: Engine, *, unseen: bool = False) -> dict[str, Array]:
        """The engine's outputs on one part of the data."""
        return outputs(engine, self.unseen if unseen else self.seen)

    def drop(self, found: Mapping[str, Array], *, unseen: bool = False) -> float:
        """The loss of such outputs. Raises what the metric raises."""
        assert self._reference is not None
        samples = self.unseen if unseen else self.seen
        n = len(next(iter(found.values())))
        labels = None if samples.labels is None else samples.labels[:n]
        return float(self.metric.drop(found, self._reference[unseen], labels))


def outputs(engine: Engine, samples: Samples) -> dict[str, Array]:
    """An engine's outputs by name, over all samples; of an engine of a fixed batch, over all whole batches.

    Raises UsageError where the samples do not fill one."""
    context = engine.context()
    parts = [context.run(feeds) for feeds in _batches(engine, samples)]
    return {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}


def _batches(engine: Engine, samples: Samples) -> list[Mapping[str, Array]]:
    first = engine.inputs[0].shape[0]
    size = first if isinstance(first, int) else RUN_BATCH
    dtypes = {s.name: s.dtype for s in engine.inputs}
    found: list[Mapping[str, Array]] = []
    for feeds in samples.batches(size):
        if isinstance(first, int) and len(next(iter(feeds.values()))) < size:
            break  # a network of a fixed batch takes whole batches alone
        found.append({n: a.astype(dtypes[n], copy=False) for n, a in feeds.items()})
    if not found:
        raise UsageError(
            f"the network's batch is {size}, and one part of the data has {len(samples)} samples",
            hint="give more data, or build for a smaller batch: --shape",
        )
    return found
