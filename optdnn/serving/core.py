"""The part of the server that HTTP and gRPC share: models, regions, metrics, and the path of a request through them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optdnn
from optdnn.serving.batching import Outputs
from optdnn.serving.checking import GivenTensor, WantedOutput, check_outputs, checked_request
from optdnn.serving.datatypes import datatype
from optdnn.serving.metrics import Metrics
from optdnn.serving.regions import Regions
from optdnn.serving.repository import Model, Repository
from optdnn.serving.settings import ServeSettings
from optdnn.types import TensorSpec


class Core:
    """The server behind its two protocols."""

    def __init__(self, settings: ServeSettings):
        self.metrics = Metrics()
        self.regions = Regions(settings.shared_memory)
        self.repository = Repository(settings, self.metrics)

    def metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        shared = ["system_shared_memory"] if self.regions.enabled else []
        extensions = ["binary_tensor_data", "model_repository", "schedule_policy", *shared]
        return {"name": "optdnn", "version": optdnn.__version__, "extensions": extensions}

    def model_metadata(self, model: Model) -> dict[str, Any]:
        """Name, inputs and outputs of a model; -1 stands for a symbolic dimension."""
        facts = model.facts
        return {
            "name": model.name,
            "versions": ["1"],
            "platform": f"optdnn_{facts.target}",
            "inputs": [_described(s) for s in facts.inputs],
            "outputs": [_described(s) for s in facts.outputs],
        }

    async def infer(
        self,
        model: Model,
        inputs: Sequence[GivenTensor],
        outputs: Sequence[WantedOutput],
        parameters: Mapping[str, Any],
        timeout_s: float | None = None,
    ) -> Outputs:
        """Check a request, and run it. Raises Refusal."""
        check_outputs(model, outputs)
        return await model.run(checked_request(model, inputs, parameters, timeout_s))

    @contextmanager
    def counted(self, model: str, protocol: str) -> Iterator[list[str]]:
        """Count a request and its time. What the block appends to the list is its status, where it is not "ok"."""
        began = time.perf_counter()
        status: list[str] = []
        try:
            yield status
        finally:
            known = model if self.repository.knows(model) else ""  # a label per wrong name would fill the memory
            self.metrics.requests.labels(known, protocol, *(status or ["ok"])).inc()
            if known:
                self.metrics.seconds.labels(known).observe(time.perf_counter() - began)


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    return {"name": spec.name, "datatype": datatype(spec.dtype), "shape": shape}
