"""Replays many networks thousands of times: nothing may hang, and no result may differ from the first.

    python -m benchmarks soak --shared FOLDER --out soak.jsonl

Each network is built by the cost model at fp16, int8 (calibrated on random data) and fp32; the batches, 1 to 64, alternate.
Then a child of its own replays the CUDA graph ``--replays`` times alone, and as often while another stream keeps a
random share of the multiprocessors busy for a random time. Each replay's outputs are compared on the GPU with the first
run's, bit for bit. Verdicts: ``ok``, ``hang``, ``differs``, ``crash``; a network that cannot be built has an error.
With ``--target cpu`` or ``simulate``, the engine runs ``--replays`` times, without a second stream.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind
from benchmarks.models import save_engine
from benchmarks.rows import Row
from benchmarks.workloads import Workload

DETECTORS = ("rcnn", "ssd")
"""Parts of names of networks that run only at batch 1."""
BATCHES = {"fp16": (1, 16, 2, 64, 1, 8, 4, 32), "fp32": (1, 2, 4, 1, 8), "int8": (8, 1, 32, 2, 16, 1, 64, 4)}
"""Precision -> batches that networks take turns with. True fp32 is slow, so its batches are small."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replays", type=int, default=500, help="of each kind: alone, and with another stream running")
    parser.add_argument(
        "--host-seconds", type=float, default=60.0, metavar="SECONDS",
        help="of each kind, of a network with operators on the CPU: its runs are slow (%(default)s)",
    )  # fmt: skip


def adjusted(workloads: list[Workload]) -> list[Workload]:
    """Each network at the batch whose turn it is."""
    seen: dict[str, int] = {}
    found = []
    for w in workloads:
        turn = BATCHES.get(w.precision, BATCHES["fp16"])
        k = seen[w.precision] = seen.get(w.precision, -1) + 1
        found.append(replace(w, batch=1 if any(part in w.network for part in DETECTORS) else turn[k % len(turn)]))
    return found


def prepare(job: Job) -> Row:
    """The engine, and inputs for it."""
    options = {"tactics": "heuristic"} if job.options.target != "cpu" else {}
    save_engine(job.workload, job.folder, target=job.options.target, **options)
    return {}


def measure(job: Job) -> Row:
    """The replays of one engine, and the verdict."""
    found = replay(job) if job.options.target.startswith("cuda") else rerun(job)
    differs = any(found[mode]["differing"] for mode in ("alone", "beside") if mode in found)
    return {**found, "verdict": "differs" if differs else "ok"}


def rerun(job: Job) -> Row:
    """Run an engine that is not on a GPU ``--replays`` times. Each output is compared with the first."""
    engine, feeds = optdnn.load(job.folder / "engine"), dict(np.load(job.folder / "feeds.npz"))
    feeds = {s.name: feeds[s.name].astype(s.dtype) for s in engine.inputs}
    first = {k: bits(v).copy() for k, v in engine.run(feeds).items()}
    begin = time.perf_counter()
    differing = 0
    for _ in range(job.options.replays):
        differing += any(not np.array_equal(bits(v), first[k]) for k, v in engine.run(feeds).items())
    ms = (time.perf_counter() - begin) * 1e3 / job.options.replays
    alone = {"replays": job.options.replays, "ms": round(ms, 3), "differing": differing}
    return {"steps": len(engine.program.steps), "alone": alone}


# ---------------------------------------------------------------- on a GPU

BUSY = r"""
extern "C" __global__ void busy(unsigned long long nanoseconds) {
    extern __shared__ int room[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
    if (now == 0) room[0] = 1;
}
"""


class Neighbor:
    """Kernels on a second stream. Each keeps some multiprocessors busy for a while."""

    def __init__(self) -> None:
        import cupy

        self.kernel = cupy.RawKernel(BUSY, "busy")
        self.kernel.max_dynamic_shared_size_bytes = self.shared = 200 << 10
        self.stream, self.rng = cupy.cuda.Stream(non_blocking=True), np.random.default_rng()

    def start(self) -> None:
        """Enqueue one kernel."""
        blocks, nanoseconds = int(self.rng.integers(1, 125)), int(self.rng.integers(2_000, 60_000))
        with self.stream:
            self.kernel((blocks,), (128,), (np.uint64(nanoseconds),), shared_mem=self.shared)


def replay(job: Job) -> Row:
    """Run an engine ``--replays`` times alone, and as often with a second stream. Each output is compared with the first."""
    import cupy

    engine = optdnn.load(job.folder / "engine")
    feeds = {k: cupy.asarray(v) for k, v in np.load(job.folder / "feeds.npz").items()}
    inputs = {s.name: feeds[s.name].astype(s.dtype) for s in engine.inputs}
    bound, stream = engine.context().bind(inputs), cupy.cuda.Stream(non_blocking=True)
    off = cupy.ReductionKernel("T a, T b", "uint64 n", "a != b", "a + b", "n = a", "0", "count_differences")
    found: Row = {"steps": len(engine.program.steps)}
    on_host = any(s.executor != "cuda" for s in engine.program.steps)
    cupy.cuda.Device().synchronize()  # the inputs are there: the stream does not wait for the default one
    with stream:
        first = {k: bits(v).copy() for k, v in bound.run(stream).items()}
        stream.synchronize()
        neighbor = Neighbor()
        for mode in ("alone", "beside"):
            differing, count, begin = cupy.zeros((), cupy.uint64), 0, time.perf_counter()
            while more(job.options, count, time.perf_counter() - begin, on_host=on_host):
                if mode == "beside":
                    neighbor.start()
                outputs = bound.run(stream)
                count += 1
                for k, v in outputs.items():
                    if isinstance(v, np.ndarray):  # its size depends on data, so it was copied from the host
                        differing += int(not np.array_equal(bits(v), first[k]))
                    elif v.size:
                        differing += off(bits(v), first[k])
            stream.synchronize()
            ms = (time.perf_counter() - begin) * 1e3 / count
            found[mode] = {"replays": count, "ms": round(ms, 3), "differing": int(differing)}
    finite = all(np.isfinite(cupy.asnumpy(v).astype(np.float32)).all() for v in outputs.values() if v.dtype.kind == "f")
    return {**found, "finite": bool(finite)}


def more(options: argparse.Namespace, count: int, seconds: float, *, on_host: bool) -> bool:
    """Whether to replay again after ``count`` replays in ``seconds``. ``on_host``: the network has operators on the CPU."""
    return count < options.replays and not (on_host and seconds > options.host_seconds)


def bits(array: Any) -> Any:
    """The array's bytes: a NaN equals itself."""
    return array.reshape(-1).view(np.uint8)


KIND = Kind(
    name="soak", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("soak",),
    precisions="fp16,int8,fp32", adjusted=adjusted, at_once=4, limit_s=150.0, prepare_s=400.0, fresh=True,
    faulty=lambda row: row.get("verdict") in ("differs", "hang", "crash"),
)  # fmt: skip
