"""A real server process, and the answers that tritonclient and plain HTTP requests get from it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.serving import Server, clients, infer_body, raw_input

import optdnn
from optdnn.types import Array

HEAD_BYTES = 1 << 16
grpcclient, httpclient = clients()
X = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
INFER = "/v2/models/digits/infer"


def given(module: Any, x: Array = X) -> list[Any]:
    """``x`` as the input of the digits."""
    made = module.InferInput("x", list(x.shape), "FP32")
    made.set_data_from_numpy(x)
    return [made]


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    """A client of each protocol. Its module is its attribute ``module``."""
    module, address = (httpclient, server.http) if request.param == "http" else (grpcclient, server.grpc)
    made = module.InferenceServerClient(address)
    made.module = module
    yield made
    made.close()


def test_a_client_finds_the_models_and_runs_them(client: Any, digits: optdnn.Engine) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    as_json = {} if client.module is httpclient else {"as_json": True}
    found = client.get_model_metadata("digits", **as_json)
    assert [int(d) for d in found["inputs"][0]["shape"]] == [-1, 1, 8, 8]
    assert found["outputs"][0] == {**found["outputs"][0], "name": "logits", "datatype": "FP32"}
    assert "system_shared_memory" in client.get_server_metadata(**as_json)["extensions"]
    wanted = [client.module.InferRequestedOutput("logits")]
    result = client.infer("digits", given(client.module), request_id="seven", outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("logits"), digits.run(X)["logits"], rtol=1e-5, atol=1e-5)
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "seven"


def test_a_request_of_more_rows_than_a_batch_is_split(client: Any, digits: optdnn.Engine) -> None:
    x = np.concatenate([X] * 13)
    got = client.infer("digits", given(client.module, x)).as_numpy("logits")
    np.testing.assert_allclose(got, np.concatenate([digits.run(X)["logits"]] * 13), rtol=1e-5, atol=1e-5)


def test_integers_and_booleans_without_a_batch(client: Any) -> None:
    a, flag = np.arange(6).reshape(2, 3), np.array([True, False])
    inputs = [client.module.InferInput("flag", [2], "BOOL"), client.module.InferInput("a", [2, 3], "INT64")]
    for i, array in zip(inputs, (flag, a), strict=True):
        i.set_data_from_numpy(array)
    result = client.infer("mixed", inputs)
    np.testing.assert_array_equal(result.as_numpy("total"), 2 * a)
    np.testing.assert_array_equal(result.as_numpy("other"), ~flag)


def test_asynchronous_clients_share_batches(server: Server, digits: optdnn.Engine) -> None:
    import tritonclient.grpc.aio
    import tritonclient.http.aio

    async def ask(module: Any, address: str) -> list[Any]:
        async with module.InferenceServerClient(address) as client:
            return [await client.infer("digits", given(module, X[:1])) for _ in range(8)]

    async def both() -> list[list[Any]]:
        ends = [(tritonclient.http.aio, server.http), (tritonclient.grpc.aio, server.grpc)]
        return await asyncio.gather(*(ask(*end) for end in ends for _ in range(2)))

    want = digits.run(X[:1])["logits"]
    for result in (r for found in asyncio.run(both()) for r in found):
        np.testing.assert_allclose(result.as_numpy("logits"), want, rtol=1e-5, atol=1e-5)


def test_a_stream_of_grpc(server: Server) -> None:
    answers: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer("digits", given(grpcclient))
        client.async_stream_infer("nothing", given(grpcclient))
        server.eventually(lambda: len(answers) == 2)
        client.stop_stream()
    assert answers[0][0].as_numpy("logits").shape == (3, 10)
    assert "there is no model 'nothing'" in str(answers[1][1])


def test_json_without_binary_tensors(server: Server, digits: optdnn.Engine) -> None:
    row = {"name": "x", "shape": list(X.shape), "datatype": "FP32", "data": X.tolist()}
    status, body, _ = server.request("POST", INFER, json.dumps({"inputs": [row]}))
    assert status == 200
    (output,) = json.loads(body)["outputs"]
    assert output["shape"] == [3, 10]
    np.testing.assert_allclose(output["data"], digits.run(X)["logits"].ravel(), rtol=1e-4, atol=1e-5)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


LONG = {"Content-Length": str(10 << 30)}
MALFORMED: dict[str, tuple[int, str, Any]] = {
    "no JSON": (400, "not JSON", b"{"),
    "an array": (400, "must be a JSON object", b"[]"),
    "deeply nested": (400, "not JSON", b"[" * 100_000),
    "no inputs": (400, "inputs must be a JSON array", b"{}"),
    "wrong name": (400, "there is no input 'y'", infer_body(raw_input(X, name="y"), data=X.tobytes())),
    "twice": (400, "given twice", infer_body(raw_input(X[:1]), raw_input(X[:1]), data=X[:2].tobytes())),
    "wrong type": (400, "takes FP32", infer_body(raw_input(X, datatype="INT64"), data=X.tobytes())),
    "no type": (400, "takes FP32", infer_body(raw_input(X, datatype="FP33"), data=X.tobytes())),
    "wrong rank": (400, "rank 2 instead of 4", infer_body(raw_input(X, shape=[3, 64]), data=X.tobytes())),
    "wrong size": (400, "axis 2 is 4 instead of 8", infer_body(raw_input(X, shape=[3, 1, 4, 16]), data=X.tobytes())),
    "no rows": (400, "at least 1", infer_body(raw_input(X[:0]))),
    "negative": (400, "is not valid", infer_body(raw_input(X, shape=[-3, 1, 8, 8]), data=X.tobytes())),
    "fraction": (400, "is not valid", infer_body(raw_input(X, shape=[3.0, 1, 8, 8]), data=X.tobytes())),
    "shape of 2**80": (400, "is not valid", infer_body(raw_input(X, shape=[1 << 80, 1, 8, 8]), data=X.tobytes())),
    "deep shape": (400, "is not valid", infer_body(raw_input(X, shape=nested(300)), data=X.tobytes())),
    "long shape": (400, "is not valid", infer_body(raw_input(X, shape=[1] * 100_000), data=X.tobytes())),
    "deep parameters": (400, "strings, numbers or booleans",
                        infer_body(raw_input(X), data=X.tobytes(), parameters={"priority": nested(300)})),
    "deep parameters of an input": (400, "strings, numbers or booleans",
                                    infer_body(raw_input(X, parameters={"a": {"b": 1}}), data=X.tobytes())),
    "shape that lies": (400, "takes 256000", infer_body(raw_input(X, shape=[1000, 1, 8, 8]), data=X.tobytes())),
    "bytes that lie": (400, "has 4 left", infer_body(raw_input(X, parameters={"binary_data_size": 1 << 40}), data=b"1234")),
    "bytes left over": (400, "belong to no input", infer_body(raw_input(X), data=X.tobytes() + b"!")),
    "ragged": (400, "not an array", infer_body({**raw_input(X), "parameters": {}, "data": [[1], [2, 3]]})),
    "texts": (400, "not an array", infer_body({**raw_input(X), "parameters": {}, "data": ["a"] * 192})),
    "a long text among many": (
        400, "not an array",
        infer_body({**raw_input(X), "parameters": {}, "data": ["a" * 500_000, *[""] * 100_000]})),
    "no data": (400, "needs either", infer_body({**raw_input(X), "parameters": {}})),
    "header that lies": (400, "the body has", (b"{}", {"Inference-Header-Content-Length": "99"})),
    "header": (400, "whole number", (b"{}", {"Inference-Header-Content-Length": "-1"})),
    "priority": (400, "priority", infer_body(raw_input(X), data=X.tobytes(), parameters={"priority": -1})),
    "sequence": (400, "no sequences", infer_body(raw_input(X), data=X.tobytes(), parameters={"sequence_id": 1})),
    "output": (404, "did you mean 'logits'", infer_body(raw_input(X), data=X.tobytes(), outputs=[{"name": "logit"}])),
    "region": (400, "not registered",
               infer_body({**raw_input(X), "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 768}})),
    "10 GB announced": (413, "raise it", (b"", LONG)),
    "10 GB of an input": (413, "raise it", (b"{}", {**LONG, "Inference-Header-Content-Length": "2"})),
    "chunks without end": (413, "more than", ([b"x" * 65536] * 32, {})),
    "compressed": (415, "compressed", (b"x", {"Content-Encoding": "gzip"})),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_gets_its_status_and_runs_nothing(server: Server, what: str) -> None:
    status, because, content = MALFORMED[what]
    body, headers = content if isinstance(content, tuple) else (content, {})
    before, workers = server.metric("optdnn_batch_rows_count"), server.workers()
    found, text, _ = server.request("POST", INFER, body, headers)
    assert (found, because in json.loads(text)["error"]) == (status, True), text
    assert server.metric("optdnn_batch_rows_count") == before
    assert server.workers() == workers


@pytest.mark.parametrize("where", ["line", "header", "headers", "trailers", "chunk"])
def test_a_head_without_end_is_refused(server: Server, where: str) -> None:
    host, port = server.http.split(":")
    first = {
        "line": b"POST /v2/", "header": b"POST /v2 HTTP/1.1\r\nHost: x\r\nA: ", "headers": b"POST /v2 HTTP/1.1\r\n",
        "trailers": b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: ",
        "chunk": b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;a=",
    }[where]  # fmt: skip
    piece = b"a: b\r\n" * 16384 if where == "headers" else b"x" * 98304
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(first)
        sent, answer = 0, b""
        with contextlib.suppress(ConnectionError):
            while sent < 64 * HEAD_BYTES:
                connection.sendall(piece)
                sent += len(piece)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(4096):
                answer += part
    assert sent < 64 * HEAD_BYTES, "the server took all of it"
    assert not answer or re.match(rb"HTTP/1.1 (400|405) ", answer), answer
    assert server.request("GET", "/v2/health/ready")[0] == 200


def test_a_head_of_the_largest_allowed_size_is_accepted(server: Server) -> None:
    headers = {f"a{k}": "b" * 1000 for k in range(60)}
    for _ in range(3):
        assert server.request("GET", "/v2/health/live", None, headers)[0] == 200
    body, more = infer_body(raw_input(X), data=X.tobytes())
    assert server.request("POST", INFER, body, {**headers, **more})[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("nothing/infer", 404), ("digits/versions/2/infer", 404), ("..%2Fdigits/infer", 404), ("digits/nothing", 404)],
)
def test_an_unknown_model_or_path(server: Server, path: str, status: int) -> None:
    body, headers = infer_body(raw_input(X), data=X.tobytes())
    assert server.request("POST", f"/v2/models/{path}", body, headers)[0] == status


def test_a_client_gets_an_error_for_features_that_the_server_lacks(client: Any) -> None:
    http = client.module is httpclient
    said = "there is no GET /v2/models/digits/config; a request goes by POST" if http else "does not have ModelConfig"
    with pytest.raises(Exception, match=re.escape(said)) as raised:
        client.get_model_config("digits")
    assert str(raised.value.status()) == ("404" if http else "StatusCode.UNIMPLEMENTED")


def test_a_wrong_method_is_answered_in_json(server: Server) -> None:
    status, body, _ = server.request("GET", INFER)
    assert (status, json.loads(body)["error"].split(";")[0]) == (405, f"there is no GET {INFER}")


def test_malformed_requests_of_grpc(server: Server) -> None:
    cases = [
        ("there is no input 'y'", "INVALID_ARGUMENT", lambda r: setattr(r.inputs[0], "name", "y")),
        ("takes FP32", "INVALID_ARGUMENT", lambda r: setattr(r.inputs[0], "datatype", "INT8")),
        ("takes 256000", "INVALID_ARGUMENT", lambda r: r.inputs[0].shape.__setitem__(0, 1000)),
        ("each input", "INVALID_ARGUMENT", lambda r: r.inputs[0].contents.fp32_contents.append(1)),
        ("more raw_input_contents", "INVALID_ARGUMENT", lambda r: r.raw_input_contents.append(b"1")),
        ("has 0 bytes|shape", "INVALID_ARGUMENT", lambda r: r.ClearField("raw_input_contents")),
        ("there is no model", "NOT_FOUND", lambda r: setattr(r, "model_name", "other")),
        ("larger than max", "RESOURCE_EXHAUSTED", lambda r: r.raw_input_contents.append(bytes(2 << 20))),
    ]
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        before = server.metric("optdnn_batch_rows_count")
        for because, status, change in cases:
            row = {"name": "x", "datatype": "FP32", "shape": X.shape}
            request = service_pb2.ModelInferRequest(model_name="digits", inputs=[row], raw_input_contents=[X.tobytes()])
            change(request)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request)
            assert caught.value.code().name == status, caught.value
            assert re.search(because, caught.value.details()), caught.value.details()
        assert server.metric("optdnn_batch_rows_count") == before


def test_costly_messages_of_grpc_are_refused_or_answered_quickly(server: Server) -> None:
    """Each message has at most 1 MB. None takes long or causes an internal error of the server."""
    import grpc
    from tritonclient.grpc import service_pb2 as pb

    row = {"name": "x", "datatype": "FP32", "shape": X.shape}
    good = pb.ModelInferRequest(model_name="digits", inputs=[row], raw_input_contents=[X.tobytes()]).SerializeToString()
    long = pb.ModelInferRequest(model_name="digits", inputs=[{**row, "shape": [1] * 500_000}], raw_input_contents=[b""])
    full = pb.ModelInferRequest(model_name="digits", inputs=[{"name": "x", "datatype": "INT8", "shape": [1]}])
    full.inputs[0].contents.int_contents.extend([0] * 900_000)
    cases = {
        "no message": (b"\xff" * 100, "INVALID_ARGUMENT", "not a ModelInferRequest"),
        "cut off": (good[:-1], "INVALID_ARGUMENT", "not a ModelInferRequest"),
        "many tensors": (good + b":\0" * 400_000, "INVALID_ARGUMENT", "more than 16384 fields"),
        "many unknown fields": (good + b"x\0" * 400_000, "INVALID_ARGUMENT", "more than 16384 fields"),
        "a long shape": (long.SerializeToString(), "INVALID_ARGUMENT", "is not valid"),
        "numbers instead of bytes": (full.SerializeToString(), "INVALID_ARGUMENT", "has shape"),
    }
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for what, (data, status, because) in cases.items():
            began = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                ask(data)
            assert (caught.value.code().name, because in caught.value.details()) == (status, True), (what, caught.value)
            assert time.monotonic() - began < 5, what
        packed = pb.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(8 << 20)]).SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            ask(packed, compression=grpc.Compression.Gzip)
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"
        assert pb.ModelInferResponse.FromString(ask(good)).outputs[0].name == "logits"


def test_a_wrong_value_fails_only_its_own_request(server: Server) -> None:
    async def ask(values: list[int]) -> Any:
        import tritonclient.http.aio as aio

        async with aio.InferenceServerClient(server.http) as client:
            i = aio.InferInput("at", [len(values)], "INT64")
            i.set_data_from_numpy(np.array(values))
            try:
                return (await client.infer("looked_up", [i])).as_numpy("y").tolist()
            except Exception as error:
                return str(error)

    async def together() -> list[Any]:
        return await asyncio.gather(ask([0, 3]), ask([9]), ask([2]))

    for _ in range(5):
        right, wrong, other = asyncio.run(together())
        assert (right, other) == ([1.0, 4.0], [3.0])
        assert "index 9 is out of bounds" in wrong


def test_regions_of_gpus_are_listed_and_refused_by_a_model_without_one(client: Any, server: Server) -> None:
    handle = base64.b64encode(bytes(range(64)))
    try:
        client.register_cuda_shared_memory("gpu", handle, 1, X.nbytes)
        status = str(client.get_cuda_shared_memory_status())
        assert "gpu" in status
        assert str(X.nbytes) in status
        assert "gpu" not in str(client.get_system_shared_memory_status())
        for because, change in {
            "is registered already": ("gpu", handle, 0, 4),
            "must be the 64 bytes": ("other", base64.b64encode(b"short"), 0, 4),
            "must be whole numbers": ("other", handle, 0, 0),
        }.items():
            with pytest.raises(Exception, match=because):
                client.register_cuda_shared_memory(*change)
        i = client.module.InferInput("x", list(X.shape), "FP32")
        i.set_shared_memory("gpu", X.nbytes)
        with pytest.raises(Exception, match="'digits' takes no CUDA shared memory"):
            client.infer("digits", [i])
        i.set_shared_memory("gpu", X.nbytes, offset=4)
        with pytest.raises(Exception, match="bytes, not"):
            client.infer("digits", [i])
        client.unregister_system_shared_memory("gpu")
        assert "gpu" in str(client.get_cuda_shared_memory_status("gpu"))
        client.unregister_cuda_shared_memory("gpu")
        with pytest.raises(Exception, match="not registered"):
            client.get_cuda_shared_memory_status("gpu")
        assert len(server.workers()) == 3
    finally:
        client.unregister_cuda_shared_memory()


def test_tensors_in_system_shared_memory(client: Any, server: Server, digits: optdnn.Engine) -> None:
    from tritonclient.utils import shared_memory as shm

    key = f"/optdnn-test-{os.getpid()}"
    want = digits.run(X)["logits"]
    handle = shm.create_shared_memory_region("region", key, X.nbytes + want.nbytes)
    try:
        shm.set_shared_memory_region(handle, [X])
        client.register_system_shared_memory("region", key, X.nbytes + want.nbytes)
        status = client.get_system_shared_memory_status()
        assert "region" in str(status)
        i = client.module.InferInput("x", list(X.shape), "FP32")
        i.set_shared_memory("region", X.nbytes)
        o = client.module.InferRequestedOutput("logits")
        o.set_shared_memory("region", want.nbytes, offset=X.nbytes)
        client.infer("digits", [i], outputs=[o])
        got = shm.get_contents_as_numpy(handle, np.float32, want.shape, offset=X.nbytes)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        os.truncate(f"/dev/shm{key}", 16)
        workers = server.workers()
        with pytest.raises(Exception, match="shorter than it was registered"):
            client.infer("digits", [i])
        assert server.workers() == workers
        client.unregister_system_shared_memory("region")
        with pytest.raises(Exception, match="not registered"):
            client.infer("digits", [i])
        with pytest.raises(Exception, match="must be a name"):
            client.register_system_shared_memory("other", "/../etc/passwd", 1)
    finally:
        client.unregister_system_shared_memory()
        os.unlink(f"/dev/shm{key}")
