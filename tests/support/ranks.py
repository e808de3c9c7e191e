"""Small networks that can be split between ranks, and a check of ranks that are killed."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.decoders import Decoder, ModelWriter
from optdnn.errors import RankError
from optdnn.types import Array


def mlp(rows: int, width: int = 64, inner: int = 256, blocks: int = 2) -> onnx.ModelProto:
    """Blocks of two products with a ReLU between them, and a residual; input ``x`` and output ``y`` [rows, width]."""
    rng = np.random.default_rng(0)
    nodes, tensors, x = [], [], "x"
    for i in range(blocks):
        for name, (depth, columns) in {"up": (width, inner), "down": (inner, width)}.items():
            w = rng.standard_normal((depth, columns), np.float32) * np.float32(depth**-0.5)
            tensors.append(numpy_helper.from_array(w, f"{name}.{i}.w"))
            tensors.append(numpy_helper.from_array(rng.standard_normal(columns, np.float32), f"{name}.{i}.b"))
        nodes += [
            helper.make_node("Gemm", [x, f"up.{i}.w", f"up.{i}.b"], [f"u{i}"], f"up.{i}"),
            helper.make_node("Relu", [f"u{i}"], [f"r{i}"], f"relu.{i}"),
            helper.make_node("Gemm", [f"r{i}", f"down.{i}.w", f"down.{i}.b"], [f"d{i}"], f"down.{i}"),
            helper.make_node("Add", [x, f"d{i}"], [f"x{i}" if i + 1 < blocks else "y"], f"add.{i}"),
        ]
        x = f"x{i}"
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, width])] for n in ("x", "y")]
    graph = helper.make_graph(nodes, "mlp", *ports, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def decoder(layers: int = 2) -> tuple[onnx.ModelProto, dict[str, Array], dict[str, str]]:
    """A small language model over caches, its inputs, and the caches: output -> input."""
    d = Decoder(128, 256, 4, 2, 32, layers, 512, capacity=32, position=5)
    rng = np.random.default_rng(0)
    names = [f"{n}.{i}.past" for i in range(layers) for n in ("key", "value")]
    cache = rng.standard_normal((1, d.groups, d.capacity, d.size), np.float32).astype(np.float16)
    feeds = {"token": rng.integers(0, d.vocabulary, (1, 1)), "at": np.full(1, d.position)}
    state = {f"new.{n.removesuffix('.past')}": n for n in names}
    return ModelWriter(d).model(), {**feeds, **dict.fromkeys(names, cache)}, state


def check_a_killed_rank_ends_bound_runs(engine: Any, bound: Any, asleep: bool) -> None:
    """Kill rank 1 while it sleeps, or while runs are in progress. Within ten seconds, runs must raise an error that names it."""
    child = engine._runner.team.processes[0]._process
    if asleep:
        time.sleep(0.1)
        child.kill()
    else:
        threading.Timer(0.3, child.kill).start()
    start = time.monotonic()

    def runs() -> None:
        for _ in range(100000):
            bound.run()

    with pytest.raises(RankError, match="rank 1"):
        runs()
    assert time.monotonic() - start < 10
