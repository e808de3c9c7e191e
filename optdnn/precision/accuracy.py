"""The accuracy of an engine on samples: its loss in a metric against fp32, batch by batch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from optdnn.calibration.data import Batch, batch_of
from optdnn.errors import OptdnnError, RunError, UsageError
from optdnn.precision.margins import Margins, merged
from optdnn.precision.metrics import Metric
from optdnn.precision.samples import HELD_BYTES, Samples
from optdnn.runtime.engine import Engine
from optdnn.types import Array, DType

RUN_BATCH = 32
"""Samples per call if the network's batch is symbolic."""


class DoesNotRun(RunError):
    """An engine failed on the samples; ``__cause__`` is its error."""


class Loss(NamedTuple):
    """The loss of an engine on one part of the data: the metric's drop, and its margins if the metric counts predictions."""

    drop: float
    margins: Margins | None = None


class Judge:
    """Drops in ``metric`` on the two parts of the data, against the engine of :meth:`refer`.

    Only the reference's outputs are kept, beyond HELD_BYTES in temporary files. A user's metric gets all outputs of a part at once.
    """

    def __init__(self, metric: Metric, seen: Samples, unseen: Samples):
        self.metric, self.seen, self.unseen = metric, seen, unseen
        self._reference: tuple[Outputs, Outputs] | None = None

    @property
    def refers(self) -> bool:
        """Whether there is a reference."""
        return self._reference is not None

    def refer(self, engine: Engine) -> None:
        """Make an engine the reference. Its errors pass through. Raises UsageError if a part of the data does not fill its
        batch."""
        try:
            self._reference = Outputs(outputs(engine, self.seen)), Outputs(outputs(engine, self.unseen))
        except DoesNotRun as error:
            raise error.__cause__ or error from None

    def loss(self, engine: Engine, *, unseen: bool = False) -> Loss:
        """The loss of an engine on one part of the data. Raises DoesNotRun, and the errors of the metric."""
        assert self._reference is not None
        samples, reference = self.unseen if unseen else self.seen, self._reference[unseen]
        pairs = zip(outputs(engine, samples), reference, strict=True)
        if not self.metric.by_batch:
            parts = list(pairs)
            found, wanted = _joined([y for y, _ in parts]), _joined([y for _, y in parts])
            count = len(next(iter(wanted.values())))
            return Loss(float(self.metric.drop(found, wanted, samples.take(slice(count)).labels)))
        lost, start = 0.0, 0
        near: list[Margins] = []
        for part, wanted in pairs:
            end = min(start + _batch(engine, samples).size, len(samples))
            labels = None if samples.labels is None else samples.labels[start:end]
            lost += self.metric.drop(part, wanted, labels) * (end - start)
            if self.metric.margins is not None:
                near.append(self.metric.margins(part, wanted, labels))
            start = end
        share = len(samples) / (len(self.seen) + len(self.unseen))
        # Round: the roundoff of a sum must not count as a loss beyond the bound.
        return Loss(float(f"{lost / start:.12g}"), merged(near, share) if near else None)


class Outputs:
    """An engine's outputs, batch by batch; they can be read repeatedly."""

    def __init__(self, batches: Iterable[Mapping[str, Array]]):
        self._file = tempfile.SpooledTemporaryFile(max_size=HELD_BYTES, prefix="optdnn-outputs-")  # noqa: SIM115 - kept
        self._forms: list[dict[str, tuple[DType, tuple[int, ...]]]] = []
        for batch in batches:
            self._forms.append({n: (a.dtype, a.shape) for n, a in batch.items()})
            for a in batch.values():
                self._file.write(a.tobytes())

    def __iter__(self) -> Iterator[dict[str, Array]]:
        self._file.seek(0)
        for forms in self._forms:
            yield {n: self._read(*form) for n, form in forms.items()}

    def _read(self, dtype: DType, shape: tuple[int, ...]) -> Array:
        return np.frombuffer(self._file.read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def outputs(engine: Engine, samples: Samples) -> Iterator[dict[str, Array]]:
    """An engine's outputs by name, batch by batch, without a last batch that is too small for the engine.

    Raises UsageError if the samples do not fill one batch, DoesNotRun if the engine fails."""
    batch, dtypes = _batch(engine, samples), {s.name: s.dtype for s in engine.inputs}
    if len(samples) < batch.least:
        raise UsageError(
            f"the network's batch is {batch.least}, and one part of the data has {len(samples)} samples",
            hint="give more data, or build for a smaller batch: --shape",
        )
    try:
        context = engine.context()
        for feeds in samples.batches(batch.size):
            if len(next(iter(feeds.values()))) < batch.least:
                return
            yield dict(context.run({n: a.astype(dtypes[n], copy=False) for n, a in feeds.items()}))
    except OptdnnError as error:
        raise DoesNotRun(error.message, hint=error.hint) from error


def _joined(batches: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}


def _batch(engine: Engine, samples: Samples) -> Batch:
    return batch_of(engine.inputs, engine.profiles, RUN_BATCH, {n: a.shape for n, a in samples.feeds.items()})
