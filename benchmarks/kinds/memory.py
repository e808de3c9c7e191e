"""Bytes of engines: the file, weights, arena; how near the arena is to its lower bound; what loading takes of the device.

    python -m benchmarks memory --groups zoo,targets --out memory.jsonl

``live_bytes``: the most bytes of buffers that are alive at one step, which no arena can go below. On a GPU that nothing else
uses: ``device_bytes``, which the engine's loading and a run take, and ``context_bytes``, which CUDA takes before.
``host_bytes``: the largest resident set of the process.
"""

from __future__ import annotations

import resource
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind
from benchmarks.models import TORCH, engine_of, feeds_of, onnx_of
from benchmarks.rows import Row


def prepare(job: Job) -> Row:
    """The engine, inputs, and what its program says."""
    workload = job.workload
    feeds = feeds_of(workload, None if workload.source in TORCH else onnx_of(workload))
    options = {"tactics": "heuristic"} if job.options.target != "cpu" else {}
    engine = engine_of(workload, feeds, target=job.options.target, **options)
    engine.save(job.folder / "engine")
    np.savez(job.folder / "feeds.npz", **feeds)
    p = engine.program
    return {
        "engine_bytes": (job.folder / "engine").stat().st_size, "weights_bytes": sum(b.nbytes for b in p.blobs),
        "arena_bytes": p.arena_bytes, "live_bytes": live_bytes(p), "steps": len(p.steps),
    }  # fmt: skip


def live_bytes(program: Any) -> int:
    """The most bytes of arena buffers that are alive at one step of a program in order: from the first step that names a
    buffer to the last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, step in enumerate(program.steps):
        for i in (*step.inputs, *step.outputs):
            first.setdefault(i, k)
            last[i] = k
    alive = [i for i in first if program.buffers[i].offset is not None and program.buffers[i].blob is None]
    size = {i: program.buffers[i].nbytes or 0 for i in alive}
    return max((sum(size[i] for i in alive if first[i] <= k <= last[i]) for k in range(len(program.steps))), default=0)


def measure(job: Job) -> Row:
    """What loading and a run take."""
    given, found = dict(np.load(job.folder / "feeds.npz")), {}
    if job.options.target.startswith("cuda"):
        import cupy

        free, whole = cupy.cuda.runtime.memGetInfo()
        found["context_bytes"] = whole - free
    engine = optdnn.load(job.folder / "engine")
    engine.run({s.name: given[s.name].astype(s.dtype) for s in engine.inputs})
    if found:
        found["device_bytes"] = free - cupy.cuda.runtime.memGetInfo()[0]
    return {**found, "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def shown(row: Row) -> str:
    """The engine's sizes in MB."""
    keys = ("engine_bytes", "weights_bytes", "arena_bytes", "live_bytes", "device_bytes")
    return ", ".join(f"{k.removesuffix('_bytes')} {row[k] / 1e6:.1f} MB" for k in keys if k in row)


KIND = Kind(
    name="memory", about=__doc__ or "", measure=measure, prepare=prepare, groups=("zoo",), fresh=True, timed=True, shown=shown,
)  # fmt: skip
