"""The part of the server that holds the models: they, the regions, the metrics, and the path of a request through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import optdnn
from optdnn.serving.batching import Outputs
from optdnn.serving.checking import check_outputs, checked_request
from optdnn.serving.datatypes import datatype
from optdnn.serving.metrics import Metrics
from optdnn.serving.refusals import Refusal
from optdnn.serving.regions import NamedPart, Regions, write
from optdnn.serving.repository import Repository
from optdnn.serving.service import GivenTensor, InferCall, OutputTensor, Service, WantedOutput
from optdnn.serving.settings import ServeSettings
from optdnn.serving.tensors import DeviceSlice, RegionSlice
from optdnn.types import TensorSpec, raw_bytes


class Core(Service):
    """The models of a server, in this process. ``arenas``: descriptors of memory that workers read requests from."""

    def __init__(self, settings: ServeSettings, arenas: Sequence[int] = ()):
        self.metrics = Metrics()
        self.regions = Regions(settings.shared_memory)
        self.repository = Repository(settings, self.metrics, arenas)

    async def metadata(self) -> dict[str, Any]:
        shared = ["system_shared_memory", "cuda_shared_memory"] if self.regions.enabled else []
        extensions = ["binary_tensor_data", "model_repository", "schedule_policy", *shared]
        return {"name": "optdnn", "version": optdnn.__version__, "extensions": extensions}

    async def ready(self) -> bool:
        return self.repository.ready

    async def model_metadata(self, model: str, version: str) -> dict[str, Any]:
        found = self.repository.get(model, version)
        facts = found.facts
        return {
            "name": found.name,
            "versions": ["1"],
            "platform": f"optdnn_{facts.target}",
            "inputs": [_described(s) for s in facts.inputs],
            "outputs": [_described(s) for s in facts.outputs],
        }

    async def model_ready(self, model: str, version: str) -> bool:
        return self.repository.get(model, version).ready

    async def index(self) -> list[dict[str, str]]:
        return self.repository.index()

    async def load(self, model: str) -> None:
        await self.repository.load(model)

    async def unload(self, model: str) -> None:
        await self.repository.unload(model)

    async def register(self, region: str, key: Any, offset: Any, nbytes: Any) -> None:
        self.regions.register(region, key, offset, nbytes)

    async def unregister(self, region: str) -> None:
        self.regions.unregister(region)

    async def region_status(self, region: str) -> list[dict[str, Any]]:
        return self.regions.status(region)

    async def register_cuda(self, region: str, handle: Any, device: Any, nbytes: Any) -> None:
        self.regions.register_cuda(region, handle, device, nbytes)

    async def unregister_cuda(self, region: str) -> None:
        self.repository.forget(self.regions.unregister_cuda(region))

    async def cuda_status(self, region: str) -> list[dict[str, Any]]:
        return self.regions.cuda_status(region)

    async def metrics_text(self) -> str:
        return self.metrics.text().decode()

    async def infer(self, call: InferCall) -> list[OutputTensor]:
        model = self.repository.get(call.model, call.version)
        check_outputs(model, call.outputs)
        given, targets = placed(call, self.regions)
        on_gpu = {w.name: t for w, t in zip(call.outputs, targets, strict=True) if isinstance(t, DeviceSlice)}
        if not model.facts.device_memory and (on_gpu or any(isinstance(g.data, DeviceSlice) for g in given)):
            raise Refusal(f"model {model.name!r} takes no CUDA shared memory: its runs are not on a worker's GPU")
        request = checked_request(model, given, call.parameters, call.timeout_s)
        request.targets = on_gpu
        outputs = await model.run(request)
        wanted = call.outputs or [WantedOutput(s.name) for s in model.facts.outputs]
        return [
            _given(w.name, outputs, target) for w, target in zip(wanted, targets or [None] * len(wanted), strict=True)
        ]

    def buffer(self, nbytes: int) -> memoryview:
        return memoryview(np.empty(nbytes, np.uint8).data)

    def count(self, model: str, protocol: str, status: str, seconds: float) -> None:
        known = model if self.repository.knows(model) else ""  # a label per wrong name would fill the memory
        self.metrics.request(known, protocol, status, seconds)


def placed(call: InferCall, regions: Regions) -> tuple[list[GivenTensor], list[RegionSlice | DeviceSlice | None]]:
    """A call's inputs, and where its outputs go: each named part of a region is now a slice of memory. Raises Refusal."""
    given = [replace(g, data=regions.slice(g.data)) if isinstance(g.data, NamedPart) else g for g in call.inputs]
    return given, [None if w.region is None else regions.slice(w.region) for w in call.outputs]


def _given(name: str, outputs: Outputs, target: RegionSlice | DeviceSlice | None) -> OutputTensor:
    """An output of an answer, written into its region where it has one. The worker has written those of GPUs."""
    a = outputs[name]
    if isinstance(target, RegionSlice):
        write(target, raw_bytes(a))
    return OutputTensor(name, a.dtype, a.shape, a if target is None else None)


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    return {"name": spec.name, "datatype": datatype(spec.dtype), "shape": shape}
