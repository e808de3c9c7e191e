"""Tensor parallel on several GPUs beside one, and beside PyTorch's: ``python -m benchmarks.ranks bert|llama|sums --devices 2``.

A row of JSON for each: milliseconds on the GPU of a run (CUDA graphs, one after another), the speed-up over one device, and the
microseconds of collectives. ``--rival`` adds PyTorch with torch.distributed and torch.compile, a process for each GPU.
Weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.decoders import DECODERS, _Writer
from optdnn.config import SPLITS
from optdnn.devices import memory_of
from optdnn.runtime.ranks.member import to_host
from optdnn.types import FP16, Array

Feeds = dict[str, Array]


def bert(layers: int, batch: int = 32, length: int = 384) -> tuple[onnx.ModelProto, Feeds, dict[str, str]]:
    """The encoder of BERT-large on embedded tokens."""
    width, heads, inner = 1024, 16, 4096
    rng = np.random.default_rng(0)
    nodes: list[Any] = []
    tensors: list[Any] = []

    def constant(name: str, array: Array) -> str:
        tensors.append(numpy_helper.from_array(array, name))
        return name

    def node(kind: str, out: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [out], out, **attributes))
        return out

    def linear(out: str, x: str, depth: int, columns: int) -> str:
        w = (rng.standard_normal((depth, columns), np.float32) * depth**-0.5).astype(FP16)
        y = node("MatMul", f"{out}.product", x, constant(f"{out}.weight", w))
        return node("Add", out, y, constant(f"{out}.bias", np.zeros(columns, FP16)))

    def norm(out: str, x: str) -> str:
        ones, zeros = np.ones(width, FP16), np.zeros(width, FP16)
        return node("LayerNormalization", out, x, constant(f"{out}.s", ones), constant(f"{out}.b", zeros), axis=-1)

    shape = constant("heads", np.array([batch, length, heads, width // heads]))
    joined = constant("joined", np.array([batch, length, width]))
    x = "x"
    for i in range(layers):
        q, k, v = (linear(f"{n}.{i}", x, width, width) for n in "qkv")
        q, k, v = (
            node("Transpose", f"{t}.heads", node("Reshape", f"{t}.rows", t, shape), perm=[0, 2, 1, 3])
            for t in (q, k, v)
        )
        y = node("Attention", f"attended.{i}", q, k, v)
        y = node("Reshape", f"joined.{i}", node("Transpose", f"rows.{i}", y, perm=[0, 2, 1, 3]), joined)
        x = norm(f"norm.{i}", node("Add", f"sum.{i}", x, linear(f"o.{i}", y, width, width)))
        y = linear(f"down.{i}", node("Gelu", f"gelu.{i}", linear(f"up.{i}", x, width, inner)), inner, width)
        x = norm(f"out_norm.{i}", node("Add", f"out_sum.{i}", x, y))
    node("Identity", "y", x)
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT16, [batch, length, width])] for n in ("x", "y")]
    graph = helper.make_graph(nodes, "bert", *ports, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return model, {"x": rng.standard_normal((batch, length, width), np.float32).astype(FP16)}, {}


def product(rows: int) -> tuple[onnx.ModelProto, Feeds, dict[str, str]]:
    """Two products whose result, [rows, 4096], the ranks add up: 8 KB for each row."""
    rng = np.random.default_rng(0)
    shapes = {"a": (256, 512), "b": (512, 4096)}
    tensors = [numpy_helper.from_array(rng.standard_normal(s, np.float32).astype(FP16), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "up"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], "down"),
    ]
    widths = {"x": 256, "y": 4096}
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT16, [rows, width])] for n, width in widths.items()]
    graph = helper.make_graph(nodes, "sum", *ports, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return model, {"x": rng.standard_normal((rows, 256), np.float32).astype(FP16)}, {}


def llama(layers: int, vocabulary: int = 128256) -> tuple[onnx.ModelProto, Feeds, dict[str, str]]:
    """One token of Llama 3 8B, over caches of 4096 positions, 1024 of them filled."""
    from dataclasses import replace

    d = replace(DECODERS["llama_8b"], layers=layers, vocabulary=vocabulary)
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((1, d.groups, d.capacity, d.size), np.float32).astype(FP16)
    names = [f"{n}.{i}.past" for i in range(layers) for n in ("key", "value")]
    feeds = {"token": rng.integers(0, vocabulary, (1, 1)), "at": np.full(1, d.position), **dict.fromkeys(names, cache)}
    return _Writer(d).model(), feeds, {f"new.{n.removesuffix('.past')}": n for n in names}


def one_device(engine: Any, feeds: Feeds) -> list[float]:
    from optdnn.runtime.cuda.launches.graphs import time_runs

    context = engine.context()
    context.run(feeds)
    graph = context.graph()
    return time_runs(lambda: graph.replay(context.stream), context.stream, warmup=10, repeats=60)


def _times_of(bound: Any, context: Any) -> list[float]:
    from optdnn.runtime.cuda.launches.graphs import time_runs

    return time_runs(lambda: bound.run(context.stream), context.stream, warmup=10, repeats=60)


def _say(text: str) -> None:
    print(f"{time.perf_counter() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


BEGIN = time.perf_counter()


def measured(
    name: str, model: Any, feeds: Feeds, state: dict[str, str], devices: int, split: str = "auto"
) -> dict[str, Any]:
    """Milliseconds, agreement of the results, and tokens or runs by the wall clock."""
    import optdnn

    start = time.perf_counter()
    engine = optdnn.build(
        model, target="cuda", precision="fp16", devices=devices, split=split, tactics="heuristic", progress=_say
    )
    built = time.perf_counter() - start
    _say(f"built for {devices}")
    start = time.perf_counter()
    context: Any = engine.context()
    results = context.run(feeds)
    started = time.perf_counter() - start
    _say("ran")
    times = one_device(engine, feeds) if devices == 1 else context.gpu_times(feeds, 60)
    row = {
        "name": name,
        "devices": devices,
        "split": engine.meta["options"].get("split"),
        "weights_mb": round(memory_of(engine.program)[0] / 1e6),
        "ms": round(statistics.median(times), 4),
        "build_s": round(built, 1),
        "start_s": round(started, 1),
        "steps": len(engine.program.steps),
    }
    if devices > 1:
        communicator = context.team.member._communicator
        row |= {"collectives_us": communicator.facts, "no_peers": communicator.no_peers}
        again = context.run(feeds)
        row["repeats"] = all(np.array_equal(results[n], again[n]) for n in results)
    if state:
        bound = context.bind({n: _placed(a, n in state.values() or devices > 1) for n, a in feeds.items()}, state=state)
        for _ in range(5):
            bound.run()
        start = time.perf_counter()
        for _ in range(50):
            np.asarray(to_host(bound.run()["logits"]))
        row["bound_run_ms"] = round(1000 * (time.perf_counter() - start) / 50, 3)
        bound_times = _times_of(bound, context) if devices == 1 else bound.gpu_times(60)
        row["bound_ms"] = round(statistics.median(bound_times), 4)
    row["results"] = next(iter(results.values()))
    return row


def _placed(array: Array, host: bool) -> Any:
    if host:
        return array.copy()
    import cupy

    return cupy.asarray(array)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("bert", "llama", "sums"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--split", choices=SPLITS, default="auto")
    parser.add_argument("--rival", action="store_true")
    args = parser.parse_args()
    if args.network == "sums":
        for rows in (1, 2, 8, 32):
            row = measured(f"sum of {8 * rows} KB", *product(rows), args.devices)
            row.pop("results")
            print(json.dumps(row), flush=True)
        return
    made = bert(args.layers) if args.network == "bert" else llama(args.layers, args.vocabulary)
    name = f"{args.network}:{args.layers}"
    rows = [measured(name, *made, devices, args.split) for devices in (1, args.devices)]
    one, several = (r.pop("results").astype(np.float64) for r in rows)
    for name in ("ms", "bound_ms"):
        if name in rows[0]:
            rows[1][f"speed_up_{name}"] = round(rows[0][name] / rows[1][name], 3)
    rows[1]["difference"] = float(np.abs(one - several).max() / np.abs(one).max())
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.rival:
        for devices in (1, args.devices):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}", "-m",
                       "benchmarks.torch_ranks", args.network, str(args.layers), str(args.vocabulary)]  # fmt: skip
            subprocess.run(command, check=True, timeout=400)


if __name__ == "__main__":
    main()
