"""Load on ``optdnn serve``: rows per second and latencies, compared with the engine's own and plain FastAPI's, and memory over
time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from benchmarks.rows import ROOT, command_parser, say
from benchmarks.serving.clients import rows_of
from optdnn.errors import RunError
from optdnn.serving.datatypes import datatype

Samples = dict[int, tuple[str, list[tuple[float, float]]]]
"""Process -> its part in the server, and (seconds, megabytes) over time."""
PROTOCOLS = ("engine", "plain", "http", "grpc", "shared", "cuda", "echo")
SAMPLES = 180
"""Most samples of memory in a run, which are at least a second apart."""


def serving(words: Sequence[str]) -> int:
    """Measure 'optdnn serve' under load, and compare with the engine's own rows per second and with plain FastAPI.

    Protocols: engine (engine.run in this process, threads), plain (FastAPI without batching), http and grpc (binary tensors),
    shared (gRPC, tensors in system shared memory), cuda (gRPC, tensors in CUDA shared memory), echo (gRPC's floor: servers
    that read the same bytes and answer with as many, and do nothing else). Needs the extra serve, and fastapi for plain.
    """
    options = parsed(words)
    options.engine = options.engine.resolve()
    engine = optdnn.load(options.engine)
    found = []
    for protocol in options.protocols:
        row = engine_row(engine, options) if protocol == "engine" else load_row(engine, protocol, options)
        found.append({"protocol": protocol, **row})
        say(json.dumps(found[-1]))
        if options.out is not None:
            options.out.write_text("".join(json.dumps(r) + "\n" for r in found), encoding="utf-8")
    return 1 if any(r.get("errors") for r in found) else 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = command_parser("serve", serving.__doc__)
    parser.add_argument("engine", type=Path, help="an engine with one input")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS[:5]))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8, help="that the clients are spread over")
    parser.add_argument("--rows", type=int, default=8, help="of a request")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[8, 16, 32, 64], help="that the engine alone is run at"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kill", action="store_true", help="kill -9 a worker in the middle; its requests may fail")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="further options of optdnn serve, in one word")
    parser.add_argument("--echoes", type=int, default=1, help="processes of echo's servers")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    return parser.parse_args(words)


def order_of(engine: optdnn.Engine, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The facts of the engine that a client needs."""
    (spec,) = engine.inputs
    shape = [rows, *(d for d in spec.shape[1:] if isinstance(d, int))]
    order = {"input": spec.name, "datatype": datatype(spec.dtype), "shape": shape, "model": options.engine.stem}
    answer = next(iter(engine.run({spec.name: rows_of(order, 0)}).items()))
    return {**order, "output": answer[0], "answer_bytes": answer[1].nbytes}


def engine_row(engine: optdnn.Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Rows per second of engine.run by itself, arrays in host memory: at each batch, in one thread and in two."""
    found: dict[str, float] = {}
    for rows in options.batches:
        x = rows_of(order_of(engine, options, rows), 0)
        for threads in (1, 2):
            found[f"{rows} rows, {threads} threads"] = round(
                runs_per_second(engine, x, threads, options.seconds / 4) * rows, 1
            )
    one = rows_of(order_of(engine, options, 1), 0)
    return {"rows_per_s": max(found.values()), "each": found, "ms_of_1": 1e3 / runs_per_second(engine, one, 1, 1.0)}


def runs_per_second(engine: optdnn.Engine, x: Any, threads: int, seconds: float) -> float:
    """Runs per second of several threads."""
    feeds = {engine.inputs[0].name: x}
    engine.run(feeds)
    counts = [0] * threads
    end = time.monotonic() + seconds

    def work(k: int) -> None:
        while time.monotonic() < end:
            engine.run(feeds)
            counts[k] += 1

    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return sum(counts) / seconds


def load_row(engine: optdnn.Engine, protocol: str, options: argparse.Namespace) -> dict[str, Any]:
    """One server under the load of all clients."""
    order = {**order_of(engine, options, options.rows), "protocol": protocol, "seconds": options.seconds}
    with server(protocol, order, options) as (address, pid):
        samples: Samples = {}
        done = threading.Event()
        watchers = [threading.Thread(target=sample, args=(pid, done, samples, max(1.0, options.seconds / SAMPLES)))]
        if options.kill:
            watchers.append(threading.Thread(target=kill_worker, args=(pid, done, options.seconds / 2)))
        for watcher in watchers:
            watcher.start()
        began = cpu_seconds(pid)
        answers = clients({**order, "address": address}, options)
        spent = {n: (role, s - began.get(n, (role, 0.0))[1]) for n, (role, s) in cpu_seconds(pid).items()}
        done.set()
        for watcher in watchers:
            watcher.join()
    times = np.sort([t for a in answers for t in a["times"]])
    errors: dict[str, int] = {}
    for a in answers:
        for text, count in a["errors"].items():
            errors[text] = errors.get(text, 0) + count
    firsts = {int(n): bytes.fromhex(h) for a in answers for n, h in a["firsts"].items()}
    ok = len(times) - sum(errors.values())
    like = like_single_runs(engine, order, {} if protocol == "echo" else firsts)
    if like["row_invariant"] and (others := sum(a["others"] for a in answers)):
        errors["another answer than the first"] = others
    return {
        "rows_per_s": round(ok * options.rows / options.seconds, 1),
        "ms": {f"p{q}": round(float(np.percentile(times, q)), 3) for q in (50, 90, 99)} if len(times) else {},
        "cpu_ms": {
            "clients": round(1e3 * sum(a["cpu_s"] for a in answers) / max(ok, 1), 3),
            **{f"{role} {n}": round(1e3 * s / max(ok, 1), 3) for n, (role, s) in spent.items()},
        },
        "errors": errors,
        "like_single_runs": like,
        "memory_mb": {f"{role} {n}": growth(found) for n, (role, found) in samples.items()},
    }


def like_single_runs(engine: optdnn.Engine, order: dict[str, Any], firsts: dict[int, bytes]) -> dict[str, Any]:
    """The first answers, of requests that shared batches, compared with runs of each request alone."""
    same, worst = 0, 0.0
    for number, got in firsts.items():
        want = next(iter(engine.run({order["input"]: rows_of(order, number)}).values()))
        found = np.frombuffer(got, want.dtype)
        same += want.tobytes() == got
        if found.size == want.size:
            worst = max(worst, float(np.abs(found.astype(np.float64) - want.reshape(-1)).max(initial=0.0)))
        else:
            worst = float("inf")
    promised = bool(engine.meta.get("options", {}).get("row_invariant"))
    return {"requests": len(firsts), "same_bits": same, "worst": worst, "row_invariant": promised}


@contextmanager
def server(protocol: str, order: dict[str, Any], options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A server process: its address for the protocol, and its number."""
    environment = {**os.environ, "OPTDNN_PLAIN": str(options.engine)}
    if protocol == "plain":
        words = ["-m", "uvicorn", "benchmarks.serving.plain:app", "--port", "18123", "--log-level", "warning"]
    elif protocol == "echo":
        words = ["-m", "benchmarks.serving.echo", str(order["answer_bytes"]), str(options.echoes)]
    else:
        more = [*options.serve.split(), *(["--shared-memory"] if protocol in ("shared", "cuda") else [])]
        words = ["-m", "optdnn", "serve", str(options.engine), "--http-port", "0", "--grpc-port", "0", *more]
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        if protocol == "plain":
            wait_for_port(18123, process)
            yield "127.0.0.1:18123", process.pid
        else:
            found = re.search(r"http://([^ ]+) and by gRPC on ([^ \n]+)", process.stdout.readline())
            if found is None:
                raise RunError("the server did not start")
            yield (found[1] if protocol == "http" else found[2]), process.pid
    finally:
        if protocol == "echo":
            process.communicate()
        process.terminate()
        process.wait(60)


def wait_for_port(port: int, process: subprocess.Popen[str]) -> None:
    """Wait until the process listens there."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RunError("the server did not start")


def clients(order: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of the processes of clients."""
    shares = [list(range(k, options.clients, options.processes)) for k in range(options.processes)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.clients", json.dumps({**order, "numbers": share})],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for share in shares
        if share
    ]
    return [json.loads(p.communicate()[0]) for p in processes]


def sample(pid: int, done: threading.Event, samples: Samples, pause: float) -> None:
    """Note (seconds, megabytes) of a process and its children until ``done``."""
    began = time.monotonic()
    while not done.wait(pause):
        for number, role in processes(pid).items():
            if resident := resident_mb(number):  # a killed process has none
                samples.setdefault(number, (role, []))[1].append((time.monotonic() - began, resident))


def kill_worker(pid: int, done: threading.Event, seconds: float) -> None:
    """Kill a worker of a server after some seconds."""
    if not done.wait(seconds):
        os.kill(next(n for n, role in processes(pid).items() if role == "worker"), signal.SIGKILL)


def processes(pid: int) -> dict[int, str]:
    """The processes of a server, and their parts in it.

    Between fork and exec, a new process still has the command line of its parent; it is left out until it has its own.
    """
    found = {pid: "server"}
    with contextlib.suppress(OSError):
        for n in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            words = Path(f"/proc/{n}/cmdline").read_text()
            for module, role in (("workers.child", "worker"), ("frontends.child", "front end")):
                if module in words:
                    found[n] = role
    return found


def cpu_seconds(pid: int) -> dict[int, tuple[str, float]]:
    """The processor time of a process and its children: process -> its part in the server, and seconds."""
    found = {}
    for number, role in processes(pid).items():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{number}/stat").read_text().rsplit(")")[-1].split()
            found[number] = (role, (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def resident_mb(pid: int) -> float:
    """Resident memory, shared pages included."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def growth(samples: list[tuple[float, float]]) -> dict[str, float]:
    """Memory a third of the way in and at the end, and the slope between them in megabytes per minute."""
    later = samples[len(samples) // 3 :]
    if len(later) < 2:
        return {}
    (began, first), (ended, last) = later[0], later[-1]
    slope = float(np.polyfit([t for t, _ in later], [m for _, m in later], 1)[0]) * 60
    return {
        "after_s": round(began),
        "first": round(first),
        "at_s": round(ended),
        "last": round(last),
        "per_minute": round(slope, 3),
    }
