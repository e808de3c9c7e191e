"""The interface between the protocols and the models: HTTP and gRPC talk to it, wherever the models are.

:class:`optdnn.serving.core.Core` holds the models in this process. :class:`optdnn.serving.frontends.remote.RemoteCore` asks the
process that holds them.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from optdnn.serving.refusals import Refusal
from optdnn.serving.regions import NamedPart
from optdnn.serving.tensors import DeviceSlice, RegionSlice
from optdnn.types import Array, DType


@dataclass(frozen=True)
class GivenTensor:
    """An input as a client describes it. ``data``: its bytes, where they lie, or the part of a region that the client named."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: memoryview | RegionSlice | DeviceSlice | NamedPart


@dataclass(frozen=True)
class WantedOutput:
    """An output that a client asks for; ``region``: the part of shared memory to write it to."""

    name: str
    region: NamedPart | None = None

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any]) -> WantedOutput:
        """The output with its parameters of a request. Raises Refusal for those that no engine can follow."""
        if parameters.get("classification"):
            raise Refusal("this server does not support the classification extension", hint="ask for the output itself")
        return cls(name, NamedPart.of(parameters))


@dataclass(frozen=True)
class InferCall:
    """A request as a protocol reads it; nothing of it is checked against the model. No ``outputs``: all of them."""

    model: str
    version: str
    inputs: Sequence[GivenTensor]
    outputs: Sequence[WantedOutput] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    """That of the call itself."""


@dataclass(frozen=True)
class OutputTensor:
    """An output of an answer. ``data`` is None where it was written into a region."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: Array | None

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Service(ABC):
    """The operations that the protocols need. Every method may raise Refusal."""

    @abstractmethod
    async def metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""

    @abstractmethod
    async def ready(self) -> bool:
        """Whether every model that is loaded can run requests."""

    @abstractmethod
    async def model_metadata(self, model: str, version: str) -> dict[str, Any]:
        """Name, inputs and outputs of a model; -1 stands for a symbolic dimension."""

    @abstractmethod
    async def model_ready(self, model: str, version: str) -> bool:
        """Whether a model can run requests."""

    @abstractmethod
    async def index(self) -> list[dict[str, str]]:
        """Name, version, state and reason of each model there is."""

    @abstractmethod
    async def load(self, model: str) -> None:
        """Load a model, or load it again."""

    @abstractmethod
    async def unload(self, model: str) -> None:
        """Unload a model after its last request."""

    @abstractmethod
    async def register(self, region: str, key: Any, offset: Any, nbytes: Any) -> None:
        """Register a region of system shared memory."""

    @abstractmethod
    async def unregister(self, region: str) -> None:
        """Forget one region, or all for ""."""

    @abstractmethod
    async def region_status(self, region: str) -> list[dict[str, Any]]:
        """The registered regions, or one."""

    @abstractmethod
    async def register_cuda(self, region: str, handle: Any, device: Any, nbytes: Any) -> None:
        """Register a region of a GPU's memory."""

    @abstractmethod
    async def unregister_cuda(self, region: str) -> None:
        """Forget one region of a GPU, or all for ""."""

    @abstractmethod
    async def cuda_status(self, region: str) -> list[dict[str, Any]]:
        """The registered regions of GPUs, or one."""

    @abstractmethod
    async def metrics_text(self) -> str:
        """The metrics, as Prometheus reads them."""

    @abstractmethod
    async def infer(self, call: InferCall) -> list[OutputTensor]:
        """Check a request, and run it."""

    @abstractmethod
    def buffer(self, nbytes: int) -> memoryview:
        """Memory for the bytes of a request. It is free again when nothing shows it."""

    @abstractmethod
    def count(self, model: str, protocol: str, status: str, seconds: float) -> None:
        """Count a request and its time."""

    @contextmanager
    def counted(self, model: str, protocol: str) -> Iterator[list[str]]:
        """Count a request and its time. The block may append a status to the list; without one, it is "ok"."""
        began = time.perf_counter()
        status: list[str] = []
        try:
            yield status
        finally:
            self.count(model, protocol, status[0] if status else "ok", time.perf_counter() - began)
