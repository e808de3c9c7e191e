"""Front ends: their memory, their calls, processes that die, and the bytes of gRPC messages."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="the extra serve is not installed")
from support.serving import Server, infer_body, raw_input, served
from tritonclient.grpc import service_pb2 as pb

from optdnn.errors import UsageError
from optdnn.serving import settings, wire
from optdnn.serving.frontends import arena
from optdnn.serving.frontends.arena import Arena, new_arena
from optdnn.serving.frontends.channel import Channel
from optdnn.serving.grpc_service import raw_of
from optdnn.serving.listeners import listen, reserve
from optdnn.serving.refusals import QueueFull, Refusal, TooLarge, Unavailable
from optdnn.serving.tensors import ARENA_KEPT
from optdnn.serving.wire import read_request

X = np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)
INFER = "/v2/models/digits/infer"


# ---------------------------------------------------------------- memory


def test_parts_of_an_arena_are_taken_and_free_again() -> None:
    ours, theirs = Arena(new_arena()), None
    first, second = ours.take(5000), ours.put(memoryview(b"abc"))
    assert [ours.place(v) for v in (first, second, second[1:], memoryview(b""))] == [0, 8192, 8193, 0]
    assert ours.place(memoryview(b"elsewhere")) is None
    theirs = Arena(ours.descriptor)
    assert bytes(theirs.show(8192, 3)) == b"abc"
    within = first[100:200]
    del first
    assert ours.place(ours.take(1)) == 12288, "a slice still shows the first part"
    del within
    assert ours.place(ours.take(8192)) == 0
    assert bytes(second) == b"abc"


def test_an_arena_gives_pages_back_when_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Arena(new_arena())
    blocks = lambda: os.fstat(ours.descriptor).st_blocks * 512  # noqa: E731
    part = ours.take(ARENA_KEPT + (16 << 20))
    part[:] = bytes(len(part))
    assert blocks() == len(part)
    del part
    assert ours.place(ours.take(10)) == 0
    assert blocks() == ARENA_KEPT
    monkeypatch.setattr(arena, "NBYTES", 8192)
    with pytest.raises(Unavailable, match="no memory"):
        ours.take(8193)


# ---------------------------------------------------------------- calls


async def _channels(answer: Any, unclaimed: list[Any]) -> tuple[Channel, Channel, list[str]]:
    ends, gone = socket.socketpair(), []
    one = await Channel.over(ends[0], answer, lambda: gone.append("one"), unclaimed.append)
    two = await Channel.over(ends[1], answer, lambda: gone.append("two"))
    return one, two, gone


def test_calls_have_values_and_errors_in_any_order() -> None:
    async def answer(method: str, arguments: Sequence[Any]) -> Any:
        if method == "wait":
            await asyncio.sleep(arguments[0])
        if method == "full":
            raise QueueFull("too many", hint="later")
        if method == "broken":
            raise ZeroDivisionError("by zero")
        return [method, *arguments]

    async def main() -> None:
        one, two, _ = await _channels(answer, [])
        late = asyncio.create_task(one.call("wait", 0.05, "line\nbreak"))
        assert await one.call("now") == ["now"]
        assert await two.call("back", "é" * 300_000) == ["back", "é" * 300_000]
        assert await late == ["wait", 0.05, "line\nbreak"]
        with pytest.raises(QueueFull, match="too many") as caught:
            await one.call("full")
        assert caught.value.hint == "later"
        with pytest.raises(Refusal, match="ZeroDivisionError: by zero") as failed:
            await one.call("broken")
        assert failed.value.http == 500

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_canceled_call_is_canceled_at_the_other_end_and_its_value_is_not_lost() -> None:
    async def main() -> None:
        begun, canceled, unclaimed = asyncio.Event(), asyncio.Event(), []

        async def answer(method: str, arguments: Sequence[Any]) -> Any:
            begun.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                canceled.set()
                if method == "stop":
                    raise
                return "too late"

        one, _, _ = await _channels(answer, unclaimed)
        for method in ("stop", "ends"):
            call = asyncio.create_task(one.call(method))
            await begun.wait()
            call.cancel()
            await canceled.wait()
            begun.clear()
            canceled.clear()
        while not unclaimed:
            await asyncio.sleep(0.01)
        assert unclaimed == ["too late"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_calls_fail_when_the_other_end_is_gone() -> None:
    async def main() -> None:
        running: list[str] = []

        async def answer(method: str, arguments: Sequence[Any]) -> None:
            running.append("begun")
            try:
                await asyncio.sleep(30)
            finally:
                running.append("ended")

        one, two, gone = await _channels(answer, [])
        call = asyncio.create_task(one.call("wait"))
        while not running:
            await asyncio.sleep(0.01)
        one.close()
        with pytest.raises(Unavailable, match="is gone"):
            await call
        while len(gone) < 2 or len(running) < 2:
            await asyncio.sleep(0.01)
        assert running == ["begun", "ended"]
        with pytest.raises(Unavailable, match="is gone"):
            await two.call("more")
        two.tell("more")

    asyncio.run(asyncio.wait_for(main(), 20))


# ---------------------------------------------------------------- messages of gRPC


def _message() -> Any:
    row = {"name": "x", "datatype": "FP32", "shape": [1, 300], "parameters": {"a": {"int64_param": 1 << 40}}}
    raw = [b"\x01" * 300, b"", b"\xff"]
    return pb.ModelInferRequest(
        model_name="m", id="7", inputs=[row, row], outputs=[{"name": "y"}], raw_input_contents=raw
    )


def test_a_message_is_cut_at_its_tensors() -> None:
    message = _message()
    data = message.SerializeToString()
    unknown = bytes([15 << 3 | 0, 0x80, 1, 14 << 3 | 1, *range(8), 13 << 3 | 5, *range(4)])
    for text in (data, unknown + data, data + unknown):
        found, raw = read_request(text)
        assert list(map(bytes, raw)) == list(message.raw_input_contents)
        found.DiscardUnknownFields()
        found.raw_input_contents.extend(map(bytes, raw))
        assert found == message


def test_malformed_messages_are_refused() -> None:
    data = _message().SerializeToString()
    whole = {len(data)} | {n for n in range(len(data)) if _parses(data[:n])}
    for n in range(len(data)):
        if n not in whole:
            with pytest.raises(Refusal, match="not a ModelInferRequest"):
                read_request(data[:n])
    for bad in (b"\x3b", b"\xff" * 12, b"\x0a\x01\xff", bytes([7 << 3 | 2]) + b"\xff" * 9 + b"\x01"):
        with pytest.raises(Refusal, match="not a ModelInferRequest"):
            read_request(bad)


def test_a_message_has_a_bounded_number_of_fields_and_of_bytes_to_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _message().SerializeToString()
    count = 8
    monkeypatch.setattr(wire, "FIELDS", count)
    assert len(read_request(data)[1]) == 3
    monkeypatch.setattr(wire, "FIELDS", count - 1)
    with pytest.raises(Refusal, match="more than 7 fields"):
        read_request(data)
    monkeypatch.undo()
    monkeypatch.setenv("OPTDNN_MAX_REQUEST_JSON_BYTES", "100")
    assert read_request(data)[0].model_name == "m"  # raw tensors of a message are not parsed
    row = {"name": "x", "datatype": "FP32", "shape": [30], "contents": {"fp32_contents": [1.0] * 30}}
    message = pb.ModelInferRequest(inputs=[row])
    for read in (lambda: read_request(message.SerializeToString()), lambda: raw_of(message)):
        with pytest.raises(TooLarge, match=r"bytes outside of raw_input_contents(.|\n)*OPTDNN_MAX_REQUEST_JSON_BYTES"):
            read()


def test_values_that_nest_too_deeply_are_refused_at_this_end() -> None:
    async def main() -> None:
        async def answer(method: str, arguments: Sequence[Any]) -> Any:
            return None

        one, _, _ = await _channels(answer, [])
        deep: Any = 1
        for _ in range(400):
            deep = [deep]
        with pytest.raises(Refusal, match="nested too deeply") as caught:
            await one.call("infer", deep)
        assert caught.value.http == 400
        assert await one.call("more") is None

    asyncio.run(asyncio.wait_for(main(), 20))


def test_memory_for_a_body_comes_with_its_bytes() -> None:
    """A client that announces a large body and sends few bytes gets little memory: the memory of all front ends is limited."""
    from starlette.requests import Request

    from optdnn.serving.http_app import AT_ONCE, body_of

    announced = 10 * AT_ONCE
    asked: list[int] = []

    def memory(nbytes: int) -> memoryview:
        asked.append(nbytes)
        return memoryview(bytearray(nbytes))

    pieces = [b"a" * AT_ONCE, b"b" * 10, b"c" * (9 * AT_ONCE - 10)]
    seen: list[int] = []

    async def receive() -> Any:
        seen.append(asked[-1])
        return {"type": "http.request", "body": pieces[len(seen) - 1], "more_body": len(seen) < len(pieces)}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", str(announced).encode())]}
    body = asyncio.run(body_of(Request(scope, receive), memory))
    assert seen == [AT_ONCE, AT_ONCE, 2 * AT_ONCE + 20]
    assert asked[-1] == announced
    assert bytes(body[AT_ONCE - 1 : AT_ONCE + 11]) == b"abbbbbbbbbbc"
    assert len(body) == announced


def _parses(data: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(data)
    except Exception:
        return False
    return True


# ---------------------------------------------------------------- ports and processes


def test_a_port_is_reserved_for_this_server_alone() -> None:
    kept = reserve("127.0.0.1", 0)
    port = kept.getsockname()[1]
    with pytest.raises(UsageError, match=f"cannot listen on port {port} of '127.0.0.1'"):
        reserve("127.0.0.1", port)
    ends = [listen("127.0.0.1", port, shared=True) for _ in range(2)]
    for end in (kept, *ends):
        end.close()


@pytest.mark.parametrize(("cores", "count"), [(1, 0), (3, 0), (4, 2), (16, 8), (64, 8)])
def test_front_ends_by_cores(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert settings.usual_frontends() == count


def _status(server: Server) -> int:
    body, headers = infer_body(raw_input(X), data=X.tobytes())
    try:
        return server.request("POST", INFER, body, headers)[0]
    except OSError:
        return 0


@pytest.mark.slow
def test_a_front_end_that_is_killed_loses_only_its_own_connections(engines: Path) -> None:
    with served(engines / "digits.engine", "--frontends", 2) as running:
        before, worker = running.frontends(), running.workers()
        assert len(before) == 2
        held, other = before
        os.kill(held, signal.SIGSTOP)
        asked = [threading.Thread(target=_status, args=(running,), daemon=True) for _ in range(4)]
        for thread in asked:
            thread.start()
        os.kill(held, signal.SIGKILL)
        for thread in asked:
            thread.join(30)
        running.eventually(lambda: len(running.frontends()) == 2 and held not in running.frontends())
        assert other in running.frontends()
        running.eventually(lambda: all(_status(running) == 200 for _ in range(8)))
        assert running.workers() == worker
        assert running.request("GET", "/v2/health/ready")[0] == 200


def test_memory_that_is_freed_stays_with_the_process() -> None:
    """8 MB are freed and allocated again. With the setting, the pages are still mapped."""
    text = """
import resource, sys
import numpy as np
from optdnn.serving.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
held = [np.ones(1 << 20) for _ in range(4)]
del held
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    a, b = np.ones(1 << 20), np.ones(1 << 20)
    del a, b
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = {
        how: int(subprocess.run([sys.executable, "-c", text, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "plain")
    }
    assert found["keep"] < 100, found
    assert found["plain"] > 10 * found["keep"], found


def test_threads_share_one_heap() -> None:
    text = """
import ctypes, sys, threading
from optdnn.serving.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
gate = threading.Barrier(4)
def work():
    gate.wait()
    held = [bytes(5000) for _ in range(100)]
    gate.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""
    found = {
        how: subprocess.run([sys.executable, "-c", text, how], capture_output=True, text=True, check=True).stdout
        for how in ("keep", "plain")
    }
    assert found["keep"].count("<heap nr=") == 1, found["keep"]
    assert found["plain"].count("<heap nr=") > 1


@pytest.mark.slow
def test_all_processes_end_with_a_server_that_is_killed(engines: Path) -> None:
    with served(engines / "mixed.engine", "--frontends", 2, "--workers", 2) as running:
        ends = [*running.frontends(), *running.workers()]
        assert len(ends) == 4
        running.process.kill()
        running.process.wait()
        for end in ends:
            for _ in range(500):
                if not Path(f"/proc/{end}").exists() or ") Z" in Path(f"/proc/{end}/stat").read_text():
                    break
                threading.Event().wait(0.02)
            else:
                raise AssertionError(f"process {end} has not ended")


@pytest.mark.slow
def test_metrics_are_those_of_all_front_ends(engines: Path) -> None:
    with served(engines / "digits.engine", "--frontends", 2) as running:
        assert [_status(running) for _ in range(20)] == [200] * 20
        running.eventually(lambda: running.metric("optdnn_requests_total") == 20)
        assert running.metric("optdnn_request_seconds_count") == 20
        assert running.request("POST", INFER, b"{")[0] == 400
        running.eventually(lambda: running.metric("optdnn_requests_total") == 21)
