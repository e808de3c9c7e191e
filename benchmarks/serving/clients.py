"""A process of clients: threads that send requests one by one until the time is over.

``python -m benchmarks.serving.clients`` reads a JSON object from its arguments and prints one: the latencies of all requests in
milliseconds, their errors, and the first answer of each client.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import numpy as np

from optdnn.serving.datatypes import DTYPE_OF
from optdnn.serving.malloc import keep_freed_memory

Order = dict[str, Any]


def rows_of(order: Order, number: int) -> np.ndarray[Any, Any]:
    """The input of client ``number``."""
    rng = np.random.default_rng(number)
    dtype = DTYPE_OF[order["datatype"]]
    if dtype.kind in "iu":
        return rng.integers(0, 2, order["shape"]).astype(dtype)
    return rng.standard_normal(order["shape"], np.float32).astype(dtype)


def grpc_client(order: Order, x: np.ndarray[Any, Any], region: str | None) -> Callable[[], bytes]:
    """A function that sends one request by gRPC, its tensors in the message, in shared memory, or in that of the GPU.

    The message is written once, since the server is measured and not the client."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    channel = grpc.insecure_channel(order["address"], [*limits, ("grpc.use_local_subchannel_pool", 1)])
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = service_pb2.ModelInferRequest(model_name=order["model"])
    row = request.inputs.add(name=order["input"], datatype=order["datatype"], shape=x.shape)
    answer = None
    if order["protocol"] == "cuda":
        answer = cuda_region(stub, request, x, order)
    elif region is None:
        request.raw_input_contents.append(x.tobytes())
    else:
        message = service_pb2.SystemSharedMemoryRegisterRequest(name=region, key=f"/{region}", byte_size=x.nbytes)
        stub.SystemSharedMemoryRegister(message)
        row.parameters["shared_memory_region"].string_param = region
        row.parameters["shared_memory_byte_size"].int64_param = x.nbytes
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    infer = channel.unary_unary(f"/{service}/ModelInfer", None, service_pb2.ModelInferResponse.FromString)
    data = request.SerializeToString()
    if answer is not None:
        return lambda: (infer(data), answer())[1]
    return lambda: bytes(infer(data).raw_output_contents[0])


def cuda_region(stub: Any, request: Any, x: np.ndarray[Any, Any], order: Order) -> Callable[[], bytes]:
    """Name memory of the GPU in a request, for its input and the output. Returns a function that gives the output's bytes."""
    import cupy
    from tritonclient.grpc import service_pb2

    size = -(-x.nbytes // 256) * 256
    memory = cupy.cuda.Memory(-(-(size + order["answer_bytes"]) >> 21) << 21)
    array = cupy.ndarray(memory.size, np.uint8, cupy.cuda.MemoryPointer(memory, 0))
    array[: x.nbytes] = cupy.asarray(x.reshape(-1).view(np.uint8))
    cupy.cuda.Device().synchronize()
    name, handle = f"bench-{os.getpid()}-{id(array)}", cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)
    message = service_pb2.CudaSharedMemoryRegisterRequest(name=name, raw_handle=handle, byte_size=memory.size)
    stub.CudaSharedMemoryRegister(message)
    output = request.outputs.add(name=order["output"])
    for row, offset, nbytes in ((request.inputs[0], 0, x.nbytes), (output, size, order["answer_bytes"])):
        row.parameters["shared_memory_region"].string_param = name
        row.parameters["shared_memory_offset"].int64_param = offset
        row.parameters["shared_memory_byte_size"].int64_param = nbytes
    return lambda: bytes(cupy.asnumpy(array[size : size + order["answer_bytes"]]))


def http_client(order: Order, x: np.ndarray[Any, Any]) -> Callable[[], bytes]:
    """A function that sends one request by HTTP, its tensors as bytes."""
    host, port = order["address"].split(":")
    connection = HTTPConnection(host, int(port), timeout=120)
    size = {"binary_data_size": x.nbytes}
    row = {"name": order["input"], "datatype": order["datatype"], "shape": x.shape, "parameters": size}
    head = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    body = head + x.tobytes()
    path, headers = f"/v2/models/{order['model']}/infer", {"Inference-Header-Content-Length": str(len(head))}
    if order["protocol"] == "plain":
        path, headers, body = "/infer", {}, x.tobytes()

    def send() -> bytes:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise OSError(f"status {response.status}: {answer[:200]!r}")
        return answer[int(response.headers.get("Inference-Header-Content-Length", 0)) :]

    return send


class Client(threading.Thread):
    """One client. ``first``: the bytes of its first answer. ``others``: the number of answers that differ from it, since an engine
    that is not ``row_invariant`` rounds differently in another batch."""

    def __init__(self, order: Order, number: int, ready: threading.Barrier):
        super().__init__(daemon=True)
        self._order, self._number, self._ready = order, number, ready
        self.times: list[float] = []
        self.errors: Counter[str] = Counter()
        self.first = b""
        self.others = 0

    def run(self) -> None:
        x = rows_of(self._order, self._number)
        region = f"optdnn-bench-{os.getpid()}-{self._number}" if self._order["protocol"] == "shared" else None
        try:
            if region is not None:
                put(region, x)
            by_grpc = self._order["protocol"] in ("grpc", "shared", "cuda", "echo")
            send = grpc_client(self._order, x, region) if by_grpc else http_client(self._order, x)
            self.first = send()
            self._ready.wait()
            end = time.monotonic() + self._order["seconds"]
            while time.monotonic() < end:
                began = time.perf_counter()
                try:
                    self.others += send() != self.first
                except Exception as error:
                    self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                self.times.append(1e3 * (time.perf_counter() - began))
        except Exception as error:
            self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
            self._ready.abort()
        finally:
            if region is not None:
                os.unlink(f"/dev/shm/{region}")


def put(region: str, x: np.ndarray[Any, Any]) -> None:
    """Put an array into system shared memory."""
    with open(f"/dev/shm/{region}", "w+b") as file:
        file.truncate(x.nbytes)
        with mmap.mmap(file.fileno(), x.nbytes) as mapped:
            mapped[:] = x.tobytes()


def main() -> None:
    """The process."""
    order = json.loads(sys.argv[1])
    keep_freed_memory()
    ready = threading.Barrier(len(order["numbers"]))
    clients = [Client(order, n, ready) for n in order["numbers"]]
    for c in clients:
        c.start()
    for c in clients:
        c.join()
    errors: Counter[str] = sum((c.errors for c in clients), Counter())
    times = [t for c in clients for t in c.times]
    firsts = {c._number: c.first.hex() for c in clients}
    others, cpu_s = sum(c.others for c in clients), time.process_time()
    print(json.dumps({"times": times, "errors": errors, "firsts": firsts, "others": others, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
