"""Independent steps side by side on the GPU: is every result the same, bit for bit, and what does it gain?

    python benchmarks/gpu/streams.py OUT.json [NETWORK ...] [--precision fp16] [--lanes auto,4] [--tactics T] [--tune SECONDS]

A NETWORK is a name of the zoo (``inception_v3``, ``resnet50@8``: batch 8), an ONNX file, or ``FOLDER/NAME``: a skeleton
``FOLDER/graphs/NAME.onnx`` with ``FOLDER/fill.py``. Each is built in one lane and in several, from the same choices of kernels.
Before every comparison the arena is filled with NaN; each variant runs 50 times through its graph and once without. Times: median
of replays, taken in turns. "auto": lanes where a clear gain is predicted; a number: as many, for any gain; "auto/1":
kernels side by side may take no more places for blocks than there are (else ``lanes.ROOM`` times as many). ``--tune``: each
network is tuned as well, for so long; what tuning measured and kept is told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from agreement import fill_module

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.lower_cuda import lower_cuda
from optdnn.optimizing import optimize
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.graphs import Graph, time_runs
from optdnn.runtime.cuda.memory import fill
from optdnn.runtime.cuda.runner import CudaContext, CudaRunner
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.feeds import random_feeds
from optdnn.streams import Streams
from optdnn.tactics.cuda import lanes as lanes_of
from optdnn.target_name import TargetName

REPLAYS, ROOM = 50, lanes_of.ROOM
NETWORKS = ("squeezenet1_1", "inception_v3", "yolox_s", "resnet50", "densenet121", "mobilenet_v2")


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A model, and sizes for its inputs."""
    path = Path(name)
    if path.suffix == ".onnx":
        return str(path), {}
    if path.parent != Path():
        fill = fill_module(path.parent)
        model = fill.fill(str(path.parent / "graphs" / f"{path.name}.onnx"))
        fixed = {i.name for i in model.graph.input if i.type.tensor_type.shape.dim[0].dim_value}
        return model, {k: v.shape if k in fixed else (1, *v.shape[1:]) for k, v in fill.feeds(model).items()}
    from optdnn.models import zoo

    plain, _, batch = name.partition("@")
    return zoo.build(plain, batch=int(batch or 1)), {}


def poison(context: CudaContext) -> None:
    """Fill the arena with NaN."""
    size = context.runner.program.arena_bytes
    if size:
        fill(context.memory.arena.pointer, 0xFF, size)


def results(context: CudaContext, feeds: dict[str, Any]) -> list[bytes]:
    """One run over a poisoned arena."""
    poison(context)
    return [np.ascontiguousarray(a).tobytes() for a in context.run(feeds).values()]


def without_graph(context: CudaContext, feeds: dict[str, Any]) -> list[bytes]:
    """The same by single launches."""
    context.run(feeds)
    poison(context)
    for launch in context.launches({}):
        launch.enqueue(context.stream.handle)
    context.memory.copy_out(context.stream.handle)
    context.stream.synchronize()
    p = context.runner.program
    return [context.memory.host[i].bytes[: p.buffers[i].nbytes or 0].tobytes() for _, i in p.outputs]


def one(name: str, lanes: list[str], precision: str, tactics: str) -> dict[str, Any]:
    model, shapes = model_of(name)
    begin = time.perf_counter()
    base = BuildOptions(target="cuda", precision=precision, tactics=tactics, shapes=shapes)
    target = "cuda:sm_90a"
    graph = import_model(model, shapes=base.shapes)
    optimize(graph, base, target)
    contexts: dict[str, CudaContext] = {}
    row: dict[str, Any] = {"network": name, "precision": precision, "variants": {}}
    for count in ["1", *lanes]:
        how, _, room = count.partition("/")
        lanes_of.ROOM = float(room) + 1e-9 if room else ROOM
        program = lower_cuda(
            graph,
            replace(base, streams=how),
            facts_for(TargetName.parse(target).arch),
            {},
            streams=Streams(4) if how == "auto" else None,
        )
        note = dict(program.meta.get("streams", {"lanes": 1}))
        runner = CudaRunner(program, LoadOptions())
        if os.environ.get("DRY"):
            print(name, count, note, len(program.steps))
            continue
        context = runner.context()
        contexts[count] = context
        row["variants"][count] = {**note, "steps": len(program.steps), "arena_bytes": program.arena_bytes}
    row["build_s"] = round(time.perf_counter() - begin, 2)
    feeds = random_feeds(contexts["1"].runner.signature.inputs, seed=1)
    want = results(contexts["1"], feeds)
    for key, context in contexts.items():
        same = sum(results(context, feeds) == want for _ in range(REPLAYS))
        row["variants"][key] |= {"same_of_50": same, "same_without_graph": without_graph(context, feeds) == want}
    other = results(contexts["1"], random_feeds(contexts["1"].runner.signature.inputs, seed=2))
    row["another_input_differs"] = other != want
    times: dict[str, list[float]] = {key: [] for key in contexts}
    for _ in range(5):
        for key, context in contexts.items():
            graph_: Any = context.graph()
            assert isinstance(graph_, Graph)
            run = lambda g=graph_, c=context: g.replay(c.stream)  # noqa: E731
            times[key] += time_runs(run, context.stream, warmup=5, repeats=8, inner=10)
    for key, found in times.items():
        row["variants"][key]["us"] = round(statistics.median(found) * 1e3, 2)
    return row


def tuned(name: str, precision: str, seconds: float) -> dict[str, Any]:
    """What a build that tunes comes to."""
    model, shapes = model_of(name)
    begin = time.perf_counter()
    options = BuildOptions(target="cuda", precision=precision, shapes=shapes, budget=seconds)
    found = build_verbose(model, options).tuning or {}
    told = {k: found.get(k) for k in ("before_ms", "after_ms", "streams", "stopped")}
    return {**told, "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--lanes", default="auto,4")
    parser.add_argument("--tune", type=float, default=0)
    parser.add_argument("--tactics", default="heuristic")
    args = parser.parse_intermixed_args()
    rows = []
    for name in args.networks or NETWORKS:
        try:
            row = one(name, args.lanes.split(","), args.precision, args.tactics)
        except Exception as error:  # a network that fails is a row
            row = {"network": name, "failed": f"{type(error).__name__}: {error}"[:800]}
        if args.tune and "failed" not in row:
            row["tuned"] = tuned(name, args.precision, args.tune)
        rows.append(row)
        print(json.dumps(row), flush=True)
        facts = {"command": " ".join(["python", *sys.argv]), "commit": os.environ.get("OPTDNN_COMMIT", "")}
        args.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
