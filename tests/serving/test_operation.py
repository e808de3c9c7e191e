"""A real server process in operation: full queues, deadlines, dead workers, loading, unloading, shutdown."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving import Server, clients, infer_body, raw_input, served

import optdnn
from optdnn.cli.main import run

grpcclient, httpclient = clients()
X = np.random.default_rng(1).standard_normal((1, 1, 8, 8)).astype(np.float32)


class Asked(threading.Thread):
    """A request in a separate thread; ``status`` is the status of its answer."""

    def __init__(self, server: Server, **parameters: int):
        super().__init__(daemon=True)
        self._server, self._parameters = server, parameters
        self.status = 0
        self.start()

    def run(self) -> None:
        body, headers = infer_body(raw_input(X), data=X.tobytes(), parameters=self._parameters)
        self.status = self._server.request("POST", "/v2/models/digits/infer", body, headers)[0]


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two front ends"])
def alone(engines: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the digits only, with batches of one row: once in one process, once behind two front ends."""
    with served(engines / "digits.engine", "--queue", 4, "--max-batch", 1, "--frontends", request.param) as running:
        yield running


@contextmanager
def busy(server: Server) -> Iterator[tuple[int, Asked]]:
    """Stops the worker of the digits within a request. Yields the worker's process id and the request."""
    (worker,) = server.workers()
    server.halt(worker)
    began = server.metric("optdnn_queue_seconds_count")
    first = Asked(server)
    try:
        server.eventually(lambda: server.metric("optdnn_queue_seconds_count") == began + 1)
        yield worker, first
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
        first.join()


def waiting(server: Server, count: int) -> None:
    server.eventually(lambda: server.metric("optdnn_queue_length") == count)


def test_a_full_queue_refuses_and_deadlines_hold(alone: Server) -> None:
    with busy(alone) as (_, first):
        late = Asked(alone, timeout=300_000)
        waiting(alone, 1)
        ordinary = Asked(alone)
        waiting(alone, 2)
        urgent = Asked(alone, priority=1)
        waiting(alone, 3)
        with grpcclient.InferenceServerClient(alone.grpc) as client:
            i = grpcclient.InferInput("x", [1, 1, 8, 8], "FP32")
            i.set_data_from_numpy(X)
            call = client.async_infer("digits", [i], lambda result, error: None)
            waiting(alone, 4)
            refused = Asked(alone)
            refused.join()
            assert refused.status == 429
            with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
                client.infer("digits", [i])
            call.cancel()  # a canceled request leaves the queue, and so does an expired one
            late.join()
            assert late.status == 504
            waiting(alone, 2)
            began = alone.metric("optdnn_batch_rows_count")
            with pytest.raises(Exception, match=r"DEADLINE_EXCEEDED|Deadline"):
                client.infer("digits", [i], client_timeout=0.2)
            waiting(alone, 2)
    for thread in (first, ordinary, urgent):
        thread.join()
        assert thread.status == 200
    assert alone.metric("optdnn_batch_rows_count") == began + 2


def test_a_client_that_goes_away_leaves_the_queue(alone: Server) -> None:
    with busy(alone):
        body, headers = infer_body(raw_input(X), data=X.tobytes())
        host, port = alone.http.split(":")
        with socket.create_connection((host, int(port))) as connection:
            lines = [f"{n}: {v}" for n, v in {**headers, "Content-Length": len(body), "Host": host}.items()]
            head = "\r\n".join(["POST /v2/models/digits/infer HTTP/1.1", *lines, "", ""])
            connection.sendall(head.encode() + body)
            waiting(alone, 1)
        waiting(alone, 0)


@pytest.mark.parametrize("end", ["canceled", "deadline", "connection closed"])
def test_a_stream_that_ends_early_leaves_the_queue(alone: Server, end: str) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc

    row = {"name": "x", "datatype": "FP32", "shape": X.shape}
    message = pb.ModelInferRequest(model_name="digits", inputs=[row], raw_input_contents=[X.tobytes()])
    ran = alone.metric("optdnn_batch_rows_count")
    with busy(alone) as (_, first), grpc.insecure_channel(alone.grpc) as channel:
        timeout = 1.0 if end == "deadline" else None
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message] * 3), timeout=timeout)
        waiting(alone, 1)
        if end == "canceled":
            call.cancel()
        elif end == "connection closed":
            channel.close()
        waiting(alone, 0)
    first.join()
    assert first.status == 200
    assert status_of_one(alone) == 200
    assert alone.metric("optdnn_batch_rows_count") == ran + 2  # no request of the stream ran


def test_a_killed_worker_costs_each_request_of_its_batch_and_no_other(engines: Path) -> None:
    with served(engines / "digits.engine", "--batch-delay", 300, "--max-batch", 4) as running:
        assert status_of_one(running) == 200
        (worker,) = running.workers()
        running.halt(worker)
        began = running.metric("optdnn_queue_seconds_count")
        together = [Asked(running) for _ in range(4)]
        running.eventually(lambda: running.metric("optdnn_queue_seconds_count") == began + 4)
        later = [Asked(running) for _ in range(3)]
        waiting(running, 3)
        os.kill(worker, signal.SIGKILL)
        for thread in (*together, *later):
            thread.join()
        assert [t.status for t in together] == [503] * 4
        assert [t.status for t in later] == [200] * 3


def test_a_killed_worker_loses_only_its_own_request_and_is_replaced(alone: Server) -> None:
    lost = alone.metric("optdnn_workers_lost_total")
    with busy(alone) as (worker, first):
        second = Asked(alone)
        waiting(alone, 1)
        os.kill(worker, signal.SIGKILL)
        first.join()
        assert first.status == 503
        third = Asked(alone)  # there is no worker yet
        for thread in (second, third):
            thread.join()
            assert thread.status == 200
    assert alone.metric("optdnn_workers_lost_total") == lost + 1
    assert len(alone.workers()) == 1
    assert alone.workers() != [worker]
    assert alone.request("GET", "/v2/health/ready")[0] == 200


def test_a_worker_that_cannot_be_replaced_is_tried_again(engines: Path, tmp_path: Path) -> None:
    engine, aside = tmp_path / "digits.engine", tmp_path / "aside"
    engine.write_bytes((engines / "digits.engine").read_bytes())
    with served(engine) as running:
        engine.rename(aside)
        os.kill(running.workers()[0], signal.SIGKILL)
        running.eventually(lambda: status_of_one(running) == 503)
        assert running.request("GET", "/v2/health/ready")[0] == 503
        aside.rename(engine)
        running.eventually(lambda: running.request("GET", "/v2/health/ready")[0] == 200)
        assert status_of_one(running) == 200


def test_models_are_loaded_and_unloaded(alone: Server, engines: Path) -> None:
    client = httpclient.InferenceServerClient(alone.http)
    assert [(m["name"], m["state"]) for m in client.get_model_repository_index()] == [("digits", "READY")]
    client.unload_model("digits")
    assert not client.is_model_ready("digits")
    assert status_of_one(alone) == 503
    assert client.get_model_repository_index()[0]["state"] == "UNAVAILABLE"
    client.load_model("digits")
    assert status_of_one(alone) == 200
    before = alone.workers()
    client.load_model("digits")  # loaded again in place of the old one
    assert status_of_one(alone) == 200
    alone.eventually(lambda: len(alone.workers()) == 1)
    assert alone.workers() != before
    for name in ("mixed", "../digits"):
        with pytest.raises(Exception, match=r"there is no model|404|Not Found"):
            client.load_model(name)
    client.close()


def status_of_one(server: Server) -> int:
    thread = Asked(server)
    thread.join()
    return thread.status


def test_a_folder_gains_models_and_refuses_broken_ones(engines: Path, tmp_path: Path) -> None:
    with served(tmp_path, "--workers", 0) as running:
        client: Any = grpcclient.InferenceServerClient(running.grpc)
        (tmp_path / "late.engine").write_bytes((engines / "digits.engine").read_bytes())
        client.load_model("late")
        assert client.is_model_ready("late")
        (tmp_path / "broken.engine").write_bytes(b"no engine")
        with pytest.raises(Exception, match=r"broken\.engine"):
            client.load_model("broken")
        states = {m["name"]: m["state"] for m in client.get_model_repository_index(as_json=True)["models"]}
        assert states == {"late": "READY", "broken": "UNAVAILABLE"}
        client.close()


def test_the_end_waits_for_requests(engines: Path, digits: optdnn.Engine) -> None:
    with served(engines / "digits.engine", "--max-batch", 1, "--workers", 2, "--instances", 2) as running:
        threads = [Asked(running) for _ in range(8)]
        assert len(running.workers()) == 2
        running.eventually(lambda: running.metric("optdnn_queue_seconds_count") > 0)
        for worker in running.workers():
            running.halt(worker)
        last = Asked(running)
        time.sleep(0.2)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        workers = running.workers()
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        assert running.process.wait(30) == 0
        for thread in (*threads, last):
            thread.join()
            assert thread.status == 200
        assert not any(os.path.exists(f"/proc/{w}") for w in workers)


def test_refusals_of_the_command(engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines / "mixed.engine"
    (tmp_path / "mixed.engine").write_bytes(engine.read_bytes())
    (tmp_path / "broken.engine").write_bytes(b"no engine")
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    ports = ["--http-port", "0", "--grpc-port", "0"]
    for words, code, said in (
        ([engines / "mixd.engine"], 2, "did you mean 'mixed.engine'"),
        ([engines, engine], 2, "is a folder"),
        ([engine, tmp_path / "mixed.engine"], 2, "would both be the model 'mixed'"),
        ([engine, "--http-port", "70000"], 2, "http_port must be 0 to 65535"),
        ([engine, "--http-port", port, "--grpc-port", port], 2, "cannot both listen"),
        ([engine, "--http-port", port, "--grpc-port", "0"], 2, f"cannot listen on port {port} of '127.0.0.1'"),
        ([engine, "--http-port", "0", "--grpc-port", port], 2, f"cannot listen on port {port} of '127.0.0.1'"),
        ([engine, "--max-batch", "0"], 2, "max_batch must be 1 or more"),
        ([engine, "--batch-delay", "nan"], 2, "batch_delay_ms must be"),
        ([engine, "--gpus", "a"], 2, "is not a list of numbers"),
        ([engine, "--gpus", "0", "--workers", "0"], 2, "run on one GPU"),
        ([tmp_path / "broken.engine", *ports], 5, "broken.engine"),
    ):
        assert run(["serve", *map(str, words)]) == code
        assert said in capsys.readouterr().err
    taken.close()
