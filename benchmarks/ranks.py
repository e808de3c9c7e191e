"""Tensor parallel on several GPUs compared with one GPU, and with PyTorch's: ``python -m benchmarks.ranks bert|llama|sums
--devices 2 4``.

A row of JSON for each: milliseconds on the GPU of a run (CUDA graphs, one after another), the speed-up over one device, and the
microseconds of collectives. ``run_ms`` is by the wall clock, from arrays of the host to arrays of the host. ``llama`` decodes as
well: each token is read by the host and fed back, and ``decode_ms`` is the time of a token by the wall clock, the mean of 200,
without Python's garbage collector. Two numbers of layers give the times of 32 layers. ``--rival`` adds PyTorch with
torch.distributed and torch.compile, a process for each GPU. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.decoders import DECODERS, ModelWriter
from optdnn.config import SPLITS
from optdnn.devices import memory_of
from optdnn.runtime.ranks.calls import GpuCall
from optdnn.types import FP16, Array

Feeds = dict[str, Array]


def bert(layers: int) -> tuple[onnx.ModelProto, Feeds, dict[str, str]]:
    """The encoder of BERT-large on embedded tokens."""
    batch, length, width, heads, inner = 32, 384, 1024, 16, 4096
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
    """Two products with a result of [rows, 4096], which the ranks sum up: 8 KB per row."""
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
    """One token of Llama 3 8B, over caches of 4096 positions, 1024 of them filled. The output ``next`` is the next token."""
    model = ModelWriter(replace(DECODERS["llama_8b"], layers=layers, vocabulary=vocabulary)).model()
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["next"], axis=-1, keepdims=0))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("next", TensorProto.INT64, [1, 1]))
    return model, *llama_feeds(layers)


def llama_feeds(layers: int) -> tuple[Feeds, dict[str, str]]:
    """Inputs of :func:`llama`, and its state."""
    d = DECODERS["llama_8b"]
    cache = np.random.default_rng(0).standard_normal((1, d.groups, d.capacity, d.size), np.float32).astype(FP16)
    names = [f"{n}.{i}.past" for i in range(layers) for n in ("key", "value")]
    feeds = {"token": np.full((1, 1), 7), "at": np.full(1, d.position), **dict.fromkeys(names, cache)}
    return feeds, {f"new.{n.removesuffix('.past')}": n for n in names}


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
    if "pass " not in text:
        print(f"{time.perf_counter() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


BEGIN = time.perf_counter()


def made(network: str, size: int, vocabulary: int) -> tuple[onnx.ModelProto, Feeds, dict[str, str]]:
    """The network of this size: layers, or rows of a sum."""
    if network == "sums":
        return product(size)
    return bert(size) if network == "bert" else llama(size, vocabulary)


def build(network: str, size: int, vocabulary: int, devices: int, split: str, file: str) -> float:
    """Write the engine. Returns the seconds of the build."""
    import optdnn

    model, *_ = made(network, size, vocabulary)
    start = time.perf_counter()
    say = lambda text: _say(f"{network}:{size}, {devices} devices: {text}")  # noqa: E731
    engine = optdnn.build(
        model, target="cuda", precision="fp16", devices=devices, split=split, tactics="heuristic", progress=say
    )
    seconds = time.perf_counter() - start
    say("built")
    engine.save(file)
    return seconds


def measured(name: str, file: str, built: float, feeds: Feeds, state: dict[str, str], devices: int) -> dict[str, Any]:
    """Milliseconds, and the data for checking the results: ``results``, and ``tokens`` for decoders."""
    import optdnn

    engine: Any = optdnn.load(file, trust_cubins=True)
    start = time.perf_counter()
    context: Any = engine.context()
    results = context.run(feeds)
    started = time.perf_counter() - start
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
    row["results"] = list(results.values())[-1]
    if state:
        row |= decoded(context, feeds, state, devices)
    else:
        start = time.perf_counter()
        for _ in range(20):
            context.run(feeds)
        row["run_ms"] = round(1000 * (time.perf_counter() - start) / 20, 3)
    if devices > 1:
        context.team.close()
    return row


def decoded(context: Any, feeds: Feeds, state: dict[str, str], devices: int) -> dict[str, Any]:
    """Milliseconds per token: by the wall clock, if the host reads each token and feeds it back, and on the GPU.

    A single device copies to and from its GPU in the same way as a rank does, which is faster than CuPy's copies."""
    given, tokens = {n: a.copy() for n, a in feeds.items()}, list[int]()
    moving = {n: a for n, a in given.items() if n not in state.values()}
    one = GpuCall(context, given, state) if devices == 1 else None
    bound = context.bind(given, state=state) if one is None else one.bound

    def step() -> None:
        results = bound.run() if one is None else one.run(moving)
        tokens.append(int(results["next"].item()))
        given["token"][...] = tokens[-1]
        given["at"] += 1

    gc.collect()
    gc.disable()  # as timeit does
    for _ in range(WARM):
        step()
    marks = [time.perf_counter()]
    for _ in range(TOKENS):
        step()
        marks.append(time.perf_counter())
    gc.enable()
    wall = marks[-1] - marks[0]
    gpu = _times_of(bound, context) if devices == 1 else bound.gpu_times(60)
    return {
        "decode_ms": round(1000 * wall / TOKENS, 4),
        "decode_median_ms": round(1000 * statistics.median(np.diff(marks)), 4),
        "tokens_per_s": round(TOKENS / wall, 1),
        "bound_ms": round(statistics.median(gpu), 4),
        "tokens": tokens,
    }


WARM, TOKENS = 10, 200
AT_ONCE = 3
"""Most concurrent builds: each holds its model several times in memory."""


def compared(rows: list[dict[str, Any]]) -> None:
    """Add to the rows of several devices the speed-up over the first row, that of one device, and the difference of the results."""
    one = rows[0]
    for row in rows[1:] if one["devices"] == 1 else ():
        for name in ("ms", "run_ms", "bound_ms", "decode_ms", "decode_median_ms"):
            if name in row:
                row[f"speed_up_{name}"] = round(one[name] / row[name], 3)
        a, b = (r["results"].astype(np.float64) for r in (one, row))
        row["difference"] = float(np.abs(a - b).max() / np.abs(a).max())
        if "tokens" in row:
            pairs = list(zip(one["tokens"], row["tokens"], strict=True))
            row["same_tokens"] = next((k for k, (x, y) in enumerate(pairs) if x != y), len(pairs))
    for row in rows:
        row.pop("results")
        row.pop("tokens", None)
        print(json.dumps(row), flush=True)


def of_32_layers(found: dict[int, list[dict[str, Any]]]) -> None:
    """Print the times of 32 layers, extrapolated from two numbers of layers: 32 times one layer, plus everything else."""
    (few, first), (many, second) = sorted(found.items())
    one: dict[str, float] = {}
    for a, b in zip(first, second, strict=True):
        row: dict[str, Any] = {"name": "llama, 32 layers", "devices": a["devices"]}
        for name in ("bound_ms", "decode_ms", "decode_median_ms"):
            layer = (b[name] - a[name]) / (many - few)
            total = a[name] + (32 - few) * layer
            row |= {f"layer_{name}": round(layer, 4), f"layers_32_{name}": round(total, 3)}
            row[f"speed_up_{name}"] = round(one.setdefault(name, total) / total, 3)
        row["layers_32_tokens_per_s"] = round(1000 / row["layers_32_decode_ms"], 1)
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("bert", "llama", "sums"))
    parser.add_argument("--devices", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, nargs="+", default=[4], help="two numbers, for the times of 32 layers")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--split", choices=SPLITS, default="auto")
    parser.add_argument("--rival", action="store_true", help="PyTorch's tensor parallel as well")
    args = parser.parse_args()
    sums = args.network == "sums"
    sizes, counts = ((1, 2, 8, 32), args.devices) if sums else (args.layers, (1, *args.devices))
    found: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="optdnn-ranks-") as folder:
        with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as pool:
            built = {
                (n, d): pool.submit(build, args.network, n, args.vocabulary, d, args.split, f"{folder}/{n}.{d}")
                for n in sizes
                for d in counts
            }
            seconds = {key: one.result() for key, one in built.items()}
        for n in sizes:
            feeds, state = llama_feeds(n) if args.network == "llama" else made(args.network, n, 0)[1:]
            name = f"sum of {8 * n} KB" if sums else f"{args.network}:{n}"
            found[n] = [measured(name, f"{folder}/{n}.{d}", seconds[n, d], feeds, state, d) for d in counts]
            compared(found[n])
    if args.network == "llama" and len(found) == 2:
        of_32_layers(found)
    if args.rival:
        for devices in (1, *args.devices):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}", "-m",
                       "benchmarks.torch_ranks", args.network, str(args.vocabulary), *map(str, args.layers)]  # fmt: skip
            subprocess.run(command, check=True, timeout=400)


if __name__ == "__main__":
    main()
