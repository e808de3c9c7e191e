"""NVIDIA DALI: the batches of a pipeline as inputs of an engine, without a copy. Needs the extra ``dali``.

    batches = DaliBatches(pipeline, ["x", "labels"], reader="files")
    context = engine.context()
    for batch in batches:
        results = context.run(batch.feeds(engine), stream=batches.stream)
        right = results["y"][: batch.count].argmax(axis=1) == batch["labels"]

A pipeline on the GPU delivers its batches on :attr:`DaliBatches.stream`, and the engine runs on the same stream: nothing waits on
the host. A pipeline on the CPU delivers arrays in host memory, which the engine reads in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.errors import InputError, MissingDependency, UsageError
from optdnn.runtime.contexts.dlpack import from_dlpack, import_cupy
from optdnn.runtime.engine import Engine


@dataclass(frozen=True)
class DaliBatch(Mapping[str, Any]):
    """The outputs of one run of a pipeline, by name: NumPy arrays in DALI's memory, or DALI's tensors on the GPU.

    ``count`` is the number of samples that belong to the epoch; in its last batch, the samples after them begin the next epoch. The
    arrays are valid as long as this object, on the stream that it was made on."""

    tensors: Mapping[str, Any]
    count: int

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def feeds(self, engine: Engine) -> dict[str, Any]:
        """The outputs of the pipeline that are inputs of the engine. Raises InputError if one is missing."""
        wanted = [s.name for s in engine.inputs]
        if missing := [n for n in wanted if n not in self.tensors]:
            raise InputError(
                f"the pipeline has no output for input {missing[0]!r}",
                hint=f"its outputs are {', '.join(self.tensors)}",
            )
        return {n: self.tensors[n] for n in wanted}


class DaliBatches:
    """An epoch of a DALI pipeline in batches; each iteration is one epoch."""

    def __init__(self, pipeline: Any, names: Sequence[str], *, reader: str | None = None, stream: Any = None):
        """``names`` are the names of the pipeline's outputs, in order. ``reader`` names the reader that defines the epoch; without
        one, an epoch ends when the pipeline's source raises StopIteration. ``stream`` is the CUDA stream of batches on the GPU
        (default: a new one).

        Raises MissingDependency without DALI, UsageError for a pipeline that has other outputs or no such reader.
        """
        try:
            from nvidia.dali.pipeline import Pipeline
        except ImportError as error:
            raise MissingDependency("nvidia-dali-cuda130", "dali", "to run DALI pipelines") from error
        if not isinstance(pipeline, Pipeline):
            raise UsageError(f"a pipeline of DALI is needed, not {type(pipeline).__name__}")
        pipeline.build()
        if len(names) != pipeline.num_outputs or len(set(names)) < len(names):
            raise UsageError(f"the pipeline has {pipeline.num_outputs} outputs; their names are given as {list(names)}")
        if reader is not None and reader not in pipeline.reader_meta():
            had = ", ".join(pipeline.reader_meta()) or "none"
            raise UsageError(f"the pipeline has no reader {reader!r}", hint=f"its readers are {had}")
        self.pipeline, self.names, self.stream = pipeline, tuple(names), stream
        self.samples = None if reader is None else int(pipeline.reader_meta(reader)["epoch_size"])
        """Samples per epoch, if a reader knows them."""

    def __iter__(self) -> Iterator[DaliBatch]:
        done = 0
        while self.samples is None or done < self.samples:
            try:
                outputs = self.pipeline.run() if self._on_host() else self.pipeline.run(self.stream)
            except StopIteration:
                self.pipeline.reset()
                return
            size = len(outputs[0])
            count = size if self.samples is None else min(size, self.samples - done)
            done += size
            yield DaliBatch({n: _tensor(n, found) for n, found in zip(self.names, outputs, strict=True)}, count)

    def _on_host(self) -> bool:
        """Whether the pipeline uses no GPU. A pipeline that does gets a stream for its outputs."""
        if self.pipeline.device_id is None:
            return True
        if self.stream is None:
            self.stream = import_cupy("for the stream of batches on the GPU").cuda.Stream(non_blocking=True)
        return False


def _tensor(name: str, found: Any) -> Any:
    """One output as one array: in host memory a NumPy array over DALI's memory."""
    if not found.is_dense_tensor():
        raise InputError(
            f"the samples of {name!r} have different sizes: {found.shape()[:3]}",
            hint="bring them to one size in the pipeline: fn.resize, fn.crop",
        )
    tensor = found.as_tensor()
    return tensor if hasattr(tensor, "__cuda_array_interface__") else from_dlpack(tensor)
