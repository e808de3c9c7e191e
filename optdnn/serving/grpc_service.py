"""The gRPC end of the protocol. The messages and the service's description are those of ``tritonclient``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from optdnn.serving.batching import Outputs
from optdnn.serving.checking import GivenTensor, WantedOutput
from optdnn.serving.core import Core
from optdnn.serving.datatypes import datatype
from optdnn.serving.http_messages import bytes_of
from optdnn.serving.refusals import Refusal, refusal_of
from optdnn.serving.regions import write
from optdnn.serving.repository import Model

log = logging.getLogger("optdnn.serve")
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
"""Datatype -> the field of a tensor's contents."""


class GrpcService(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The methods of the service. Those of the description that are not here are answered with UNIMPLEMENTED."""

    def __init__(self, core: Core):
        self._core = core

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._core.repository.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(**self._core.metadata())

    async def ModelReady(self, request: Any, context: Any) -> Any:
        async def ready() -> Any:
            return pb.ModelReadyResponse(ready=self._core.repository.get(request.name, request.version).ready)

        return await answered(context, ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        async def metadata() -> Any:
            model = self._core.repository.get(request.name, request.version)
            return pb.ModelMetadataResponse(**self._core.model_metadata(model))

        return await answered(context, metadata)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        rows = [r for r in self._core.repository.index() if not request.ready or r["state"] == "READY"]
        return pb.RepositoryIndexResponse(models=rows)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        async def load() -> Any:
            if request.parameters:
                raise Refusal("a model is loaded from its file alone: load takes no parameters")
            await self._core.repository.load(request.model_name)
            return pb.RepositoryModelLoadResponse()

        return await answered(context, load)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        async def unload() -> Any:
            await self._core.repository.unload(request.model_name)
            return pb.RepositoryModelUnloadResponse()

        return await answered(context, unload)

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        async def register() -> Any:
            self._core.regions.register(request.name, request.key, request.offset, request.byte_size)
            return pb.SystemSharedMemoryRegisterResponse()

        return await answered(context, register)

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        async def unregister() -> Any:
            self._core.regions.unregister(request.name)
            return pb.SystemSharedMemoryUnregisterResponse()

        return await answered(context, unregister)

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        async def status() -> Any:
            rows = self._core.regions.status(request.name)
            return pb.SystemSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

        return await answered(context, status)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        return await answered(context, lambda: self._counted(request, context.time_remaining()))

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """The answers of a stream of requests, in their order."""
        async for request in requests:
            try:
                yield pb.ModelStreamInferResponse(infer_response=await self._counted(request, None))
            except Exception as error:
                failed = pb.ModelInferResponse(id=request.id)
                yield pb.ModelStreamInferResponse(error_message=str(refusal_of(error)), infer_response=failed)

    async def _counted(self, request: Any, remaining: float | None) -> Any:
        with self._core.counted(request.model_name, "grpc") as status:
            try:
                return await self._infer(request, remaining)
            except asyncio.CancelledError:
                status.append("CANCELLED")
                raise
            except Exception as error:
                status.append(refusal_of(error).grpc)
                raise

    async def _infer(self, request: Any, remaining: float | None) -> Any:
        model = self._core.repository.get(request.model_name, request.model_version)
        inputs = self._inputs(request)
        wanted = [self._wanted(o) for o in request.outputs]
        outputs = await self._core.infer(model, inputs, wanted, parameters_of(request), remaining)
        return grpc_answer(model, request.id, wanted, outputs)

    def _inputs(self, request: Any) -> list[GivenTensor]:
        """Raises Refusal where contents are missing, or there are too many."""
        raw = iter(request.raw_input_contents)
        found = []
        for i in request.inputs:
            region = self._core.regions.slice(parameters_of(i))
            data: Any = region
            if region is None and request.raw_input_contents:
                content = next(raw, None)
                if content is None or i.HasField("contents"):
                    raise Refusal("raw_input_contents must hold the bytes of each input")
                data = memoryview(content)
            elif region is None:
                field = CONTENTS.get(i.datatype)
                if field is None:
                    raise Refusal(f"input {i.name!r} of {i.datatype!r:.40} needs raw_input_contents")
                data = list(getattr(i.contents, field))
            found.append(GivenTensor(i.name, i.datatype, list(i.shape), data))
        if next(raw, None) is not None:
            raise Refusal("there are more raw_input_contents than inputs")
        return found

    def _wanted(self, output: Any) -> WantedOutput:
        parameters = parameters_of(output)
        if parameters.get("classification"):
            raise Refusal("this server does not do the classification extension", hint="ask for the output itself")
        return WantedOutput(output.name, True, self._core.regions.slice(parameters))


def grpc_answer(model: Model, request_id: str, wanted: list[WantedOutput], outputs: Outputs) -> Any:
    """The answer's message. Outputs in regions are written; raw_output_contents holds the others' bytes."""
    answer = pb.ModelInferResponse(model_name=model.name, model_version="1", id=request_id)
    for w in wanted or [WantedOutput(s.name) for s in model.facts.outputs]:
        a = outputs[w.name]
        row = answer.outputs.add(name=w.name, datatype=datatype(a.dtype), shape=a.shape)
        if w.region is not None:
            write(w.region, bytes_of(a))
            row.parameters["shared_memory_region_size"].int64_param = a.nbytes
        else:
            answer.raw_output_contents.append(a.tobytes())
    return answer


def parameters_of(message: Any) -> dict[str, Any]:
    """The parameters of a request or tensor, as Python values."""
    return {
        name: getattr(p, p.WhichOneof("parameter_choice") or "int64_param") for name, p in message.parameters.items()
    }


async def answered(context: Any, method: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of ``method``, whose errors become statuses."""
    try:
        return await method()
    except Exception as error:
        refusal = refusal_of(error)
        if refusal.grpc == "INTERNAL":
            log.error("%s", refusal.message, exc_info=not isinstance(error, Refusal))
        await context.abort(grpc.StatusCode[refusal.grpc], str(refusal))
