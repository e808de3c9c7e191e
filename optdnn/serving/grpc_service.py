"""The gRPC end of the protocol. The messages and the service's description are those of ``tritonclient``."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from optdnn.serving.datatypes import datatype
from optdnn.serving.lists import bytes_of_list
from optdnn.serving.refusals import Refusal, refusal_of
from optdnn.serving.regions import NamedPart
from optdnn.serving.service import GivenTensor, InferCall, OutputTensor, Service, WantedOutput
from optdnn.serving.wire import FIELDS, check_parsed, read_request
from optdnn.types import RANK_LIMIT

log = logging.getLogger("optdnn.serve")
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
"""Datatype -> the field of a tensor's contents."""


Method = Callable[["GrpcService", Any, Any], Awaitable[Any]]


def answered(method: Method) -> Method:
    """A method of the service whose errors become statuses of the call."""

    async def answer(self: GrpcService, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.grpc == "INTERNAL":
                log.error("%s", refusal.message, exc_info=not isinstance(error, Refusal))
            await context.abort(grpc.StatusCode[refusal.grpc], str(refusal))

    return answer


class GrpcService(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The methods of the service. Those of the description that are not here are answered with UNIMPLEMENTED."""

    def __init__(self, service: Service):
        self._service = service

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._service.ready())

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(**await self._service.metadata())

    @answered
    async def ModelReady(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=await self._service.model_ready(request.name, request.version))

    @answered
    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        return pb.ModelMetadataResponse(**await self._service.model_metadata(request.name, request.version))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        rows = [r for r in await self._service.index() if not request.ready or r["state"] == "READY"]
        return pb.RepositoryIndexResponse(models=rows)

    @answered
    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        if request.parameters:
            raise Refusal("a model is loaded only from its file: load takes no parameters")
        await self._service.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    @answered
    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        await self._service.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    @answered
    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        await self._service.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @answered
    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        await self._service.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @answered
    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        rows = await self._service.region_status(request.name)
        return pb.SystemSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

    @answered
    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        handle = base64.b64encode(request.raw_handle).decode()
        await self._service.register_cuda(request.name, handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    @answered
    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        await self._service.unregister_cuda(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    @answered
    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        rows = await self._service.cuda_status(request.name)
        return pb.CudaSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

    @answered
    async def ModelInfer(self, request: Any, context: Any) -> Any:
        return await self._counted(request, raw_of(request), context.time_remaining())

    @answered
    async def infer_bytes(self, data: bytes, context: Any) -> Any:
        """As ModelInfer, from the bytes of its message."""
        return await self._counted(*read_request(data), context.time_remaining())

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """The answers of a stream of requests, in their order."""
        async for request in requests:
            try:
                yield pb.ModelStreamInferResponse(infer_response=await self._counted(request, raw_of(request), None))
            except Exception as error:
                failed = pb.ModelInferResponse(id=request.id)
                yield pb.ModelStreamInferResponse(error_message=str(refusal_of(error)), infer_response=failed)

    async def _counted(self, request: Any, raw: Sequence[memoryview], remaining: float | None) -> Any:
        with self._service.counted(request.model_name, "grpc") as status:
            try:
                return await self._infer(request, raw, remaining)
            except asyncio.CancelledError:
                status.append("CANCELLED")
                raise
            except Exception as error:
                status.append(refusal_of(error).grpc)
                raise

    async def _infer(self, request: Any, raw: Sequence[memoryview], remaining: float | None) -> Any:
        inputs = given_inputs(request, raw)
        outputs = [WantedOutput.of(o.name, parameters_of(o)) for o in request.outputs]
        parameters = parameters_of(request)
        call = InferCall(request.model_name, request.model_version, inputs, outputs, parameters, remaining)
        return grpc_answer(request, await self._service.infer(call))


def _absent(name: str) -> Any:
    """A method that answers UNIMPLEMENTED. (The method of the generated class raises, which fills the server's log.)"""

    async def answer(self: GrpcService, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"optdnn serve does not have {name}")

    return answer


for _method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
    if _method.name not in vars(GrpcService):
        setattr(GrpcService, _method.name, _absent(_method.name))


def add_to_server(service: Service, server: Any) -> None:
    """Let a gRPC server answer for ``service``."""
    made = GrpcService(service)
    of_bytes = grpc.unary_unary_rpc_method_handler(
        made.infer_bytes, response_serializer=pb.ModelInferResponse.SerializeToString
    )
    name = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(made, server)
    server.add_registered_method_handlers(name, {"ModelInfer": of_bytes})  # replaces the handler of parsed messages


def raw_of(request: Any) -> list[memoryview]:
    """The bytes of its tensors. Raises as :func:`read_request`."""
    if len(request.raw_input_contents) > FIELDS:
        raise Refusal(f"the request has more than {FIELDS} fields")
    check_parsed(sum(i.ByteSize() for i in request.inputs))
    return [memoryview(content) for content in request.raw_input_contents]


def given_inputs(request: Any, raw: Sequence[memoryview]) -> list[GivenTensor]:
    """The inputs of a request, whose bytes are ``raw``. Raises Refusal where contents are missing, or there are too many."""
    contents = iter(raw)
    found = []
    for i in request.inputs:
        data: memoryview | NamedPart | None = NamedPart.of(parameters_of(i))
        if data is None and raw:
            data = next(contents, None)
            if data is None or i.HasField("contents"):
                raise Refusal("raw_input_contents must hold the bytes of each input")
        elif data is None:
            field = CONTENTS.get(i.datatype)
            if field is None:
                raise Refusal(f"input {i.name!r} of {i.datatype!r:.40} needs raw_input_contents")
            data = bytes_of_list(i.name, i.datatype, list(getattr(i.contents, field)), list(i.shape[: RANK_LIMIT + 1]))
        found.append(GivenTensor(i.name, i.datatype, list(i.shape[: RANK_LIMIT + 1]), data))
    if next(contents, None) is not None:
        raise Refusal("there are more raw_input_contents than inputs")
    return found


def grpc_answer(request: Any, outputs: Sequence[OutputTensor]) -> Any:
    """The answer's message. raw_output_contents holds the bytes of the outputs that are not in regions."""
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for o in outputs:
        row = answer.outputs.add(name=o.name, datatype=datatype(o.dtype), shape=o.shape)
        if o.data is None:
            row.parameters["shared_memory_region_size"].int64_param = o.nbytes
        else:
            answer.raw_output_contents.append(o.data.tobytes())
    return answer


def parameters_of(message: Any) -> dict[str, Any]:
    """The parameters of a request or tensor, as Python values."""
    return {
        name: getattr(p, p.WhichOneof("parameter_choice") or "int64_param") for name, p in message.parameters.items()
    }
