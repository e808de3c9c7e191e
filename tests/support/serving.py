"""A real server process for tests: its ports, worker processes and metrics, and plain HTTP requests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

START_SECONDS = 60.0


def clients() -> tuple[Any, Any]:
    """tritonclient's modules for gRPC and for HTTP. Skips the test module where one of them is not installed."""
    grpc = pytest.importorskip("tritonclient.grpc", reason="the extra serve is not installed")
    # Without gevent, tritonclient.http ends with a RuntimeError.
    pytest.importorskip("gevent", reason="tritonclient[http] is not installed")
    return grpc, pytest.importorskip("tritonclient.http")


class Server:
    """A running ``optdnn serve``."""

    def __init__(self, process: subprocess.Popen[str], http: int, grpc: int):
        self.process = process
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, HTTPResponse]:
        """Status, body and the response itself of one request, on a separate connection."""
        connection = HTTPConnection(self.http, timeout=30)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read(), response
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.request("GET", "/metrics")[1].decode()
        return sum(float(n) for n in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M))

    def workers(self) -> list[int]:
        """The process ids of its worker processes."""
        return self._children("workers.child")

    def frontends(self) -> list[int]:
        """The process ids of its front ends."""
        return self._children("frontends.child")

    def _children(self, module: str) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [n for n in map(int, path.read_text().split()) if module in Path(f"/proc/{n}/cmdline").read_text()]

    def eventually(self, met: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until a condition is met."""
        end = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < end, f"not met in time; {self.request('GET', '/metrics')[1].decode()}"
            time.sleep(0.02)

    def halt(self, worker: int) -> None:
        """Stop a worker process by SIGSTOP, which takes effect some time after it is sent."""
        os.kill(worker, signal.SIGSTOP)
        threads = Path(f"/proc/{worker}/task")
        self.eventually(
            lambda: all((t / "stat").read_text().rsplit(")")[-1].split()[0] == "T" for t in threads.iterdir())
        )


@contextmanager
def served(*words: object, **environment: str) -> Iterator[Server]:
    """A server process with these arguments, on free ports."""
    ports = ["--http-port", "0", "--grpc-port", "0"]
    command = [sys.executable, "-P", "-m", "optdnn", "serve", *map(str, words), *ports]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    said = ""
    try:
        for line in process.stdout:
            said += line
            if found := re.search(r"http://[^:]+:(\d+) and by gRPC on [^:]+:(\d+)", line):
                timer.cancel()
                threading.Thread(target=process.stdout.read, daemon=True).start()  # otherwise its pipe may fill
                yield Server(process, int(found[1]), int(found[2]))
                return
        raise AssertionError(f"the server did not start:\n{said}")
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def infer_body(*inputs: Mapping[str, Any], data: bytes = b"", **more: Any) -> tuple[bytes, dict[str, str]]:
    """The body and headers of an inference request with ``data`` after its JSON."""
    text = json.dumps({"inputs": list(inputs), **more}).encode()
    return text + data, {"Inference-Header-Content-Length": str(len(text))}


def raw_input(x: np.ndarray[Any, Any], **changes: Any) -> dict[str, Any]:
    """The description of an fp32 input x whose bytes follow."""
    size = {"binary_data_size": x.nbytes}
    return {"name": "x", "shape": list(x.shape), "datatype": "FP32", "parameters": size, **changes}
