"""Ranks on several GPUs: results, both kinds of sums, state, and ranks that end. Skipped with fewer than two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.ranks import check_a_killed_rank_ends_bound_runs, decoder, mlp

import optdnn
from optdnn.errors import MissingDependency, RankError

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]
"""Ranks wait for one another on the GPUs. Processes that share a GPU by time slices may never run at the same time."""


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    from optdnn.runtime.cuda.device import gpu_count

    try:
        there = gpu_count()
    except MissingDependency as error:
        pytest.skip(error.message)
    if there < 2:
        pytest.skip("there are fewer than two GPUs")
    pytest.importorskip("nccl.bindings.nccl")


def close(a: np.ndarray, b: np.ndarray, bound: float) -> None:
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize("way", ["flagged", "one_shot", "nccl"])
@pytest.mark.parametrize(
    ("precision", "bound", "rows"), [("fp32", 1e-5, 3), ("fp16", 5e-3, 1), ("bf16", 4e-2, 7), ("fp16", 5e-3, 128)]
)
def test_sums(way: str, precision: str, bound: float, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_ALL_REDUCE", way)
    model = mlp(rows, 256, 512)
    feeds = {"x": np.random.default_rng(1).standard_normal((rows, 256)).astype(np.float32)}
    want = optdnn.build(model, target="reference").run(feeds)["y"]
    engine = optdnn.build(model, target="cuda", precision=precision, devices=2, split="weights", tactics="heuristic")
    context = engine.context()
    first = context.run(feeds)["y"]
    close(first, want, bound)
    for seed in range(5):  # epochs and slots of the inboxes alternate
        x = np.random.default_rng(seed).standard_normal((rows, 256)).astype(np.float32)
        close(context.run({"x": x})["y"], optdnn.build(model, target="reference").run({"x": x})["y"], bound)
    assert np.array_equal(context.run(feeds)["y"], first)
    context.gpu_times(feeds, 50)
    assert np.array_equal(context.run(feeds)["y"], first)


@pytest.mark.parametrize("way", ["flagged", "nccl"])
def test_gathers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_ALL_REDUCE", way)
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(
        rng.standard_normal((1024, 16384), np.float32) / 32, "w"
    )  # large enough to be split alone
    ports = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, size])] for n, size in (("x", 1024), ("y", 16384))
    ]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], "head")], "head", *ports, [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    engine = optdnn.build(model, target="cuda", precision="fp16", devices=2, split="weights", tactics="heuristic")
    assert any("AllGather" in str(step.params.get("op")) for step in engine.program.steps)
    context = engine.context()
    for _ in range(4):
        x = rng.standard_normal((1, 1024), np.float32)
        close(context.run({"x": x})["y"], x @ numpy_helper.to_array(w), 5e-3)
    context.gpu_times({"x": x}, 50)
    close(context.run({"x": x})["y"], x @ numpy_helper.to_array(w), 5e-3)


def test_a_decoder_keeps_its_caches_on_each_gpu() -> None:
    model, feeds, state = decoder()
    tokens = []
    for devices in (1, 2):
        target: Any = {"target": "simulate"} if devices == 1 else {"target": "cuda", "tactics": "heuristic"}
        engine = optdnn.build(model, precision="fp16", devices=devices, **target)
        given = {n: a.copy() for n, a in feeds.items()}
        bound = engine.context().bind(given, state=state)
        found = []
        for _ in range(6):
            given["token"][:] = bound.run()["logits"].argmax()
            given["at"] += 1
            found.append(int(given["token"][0, 0]))
        tokens.append(found)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("way", ["flagged", "one_shot", "nccl"])
def test_a_rank_that_ends_is_reported_within_ten_seconds(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTDNN_ALL_REDUCE", way)  # graphs with calls of NCCL keep its communicator from being freed
    optdnn.build(mlp(4, 256, 512), target="cuda", devices=2, split="weights", tactics="heuristic").save(
        tmp_path / "m.engine"
    )
    engine = optdnn.load(tmp_path / "m.engine", trust_cubins=True)
    feeds = {"x": np.ones((4, 256), np.float32)}
    engine.run(feeds)
    engine._runner.team.processes[0]._process.kill()  # type: ignore[attr-defined]
    start = time.monotonic()

    def runs() -> None:
        for _ in range(1000):
            engine.run(feeds)

    with pytest.raises(RankError, match="rank 1"):
        runs()
    assert time.monotonic() - start < 10


KILLS = """
import sys, numpy as np, optdnn
engine = optdnn.load(sys.argv[1], trust_cubins=True)
x = {"x": np.ones((4, 256), np.float32)}
context = engine.context()  # it and its graphs live until the end
bound = context.bind(x)
context.run(x), bound.run()
if sys.argv[2] == "killed":
    engine._runner.team.processes[0]._process.kill()
    try:
        while True: bound.run()
    except optdnn.RankError as error:
        print(error)
sys.exit(3)
"""


@pytest.mark.parametrize("end", ["killed", "whole"])
@pytest.mark.parametrize("way", ["flagged", "nccl"])
def test_the_process_ends_in_order(way: str, end: str, tmp_path: Path) -> None:
    """All graphs are alive, with and without a rank that was killed a moment ago."""
    optdnn.build(mlp(4, 256, 512), target="cuda", devices=2, split="weights", tactics="heuristic").save(
        tmp_path / "m.engine"
    )
    for _ in range(2):
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", KILLS, str(tmp_path / "m.engine"), end],
            env={**os.environ, "OPTDNN_ALL_REDUCE": way},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 3, done.stderr
        assert ("rank 1" in done.stdout) == (end == "killed")
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("asleep", [False, True])
def test_a_rank_that_ends_is_reported_in_bound_runs(asleep: bool) -> None:
    engine = optdnn.build(mlp(4, 256, 512), target="cuda", devices=2, split="weights", tactics="heuristic")
    bound = engine.context().bind({"x": np.ones((4, 256), np.float32)})
    want = bound.run()["y"]
    for _ in range(200):
        assert np.array_equal(bound.run()["y"], want)
    check_a_killed_rank_ends_bound_runs(engine, bound, asleep)


def test_weights_beyond_the_memory_limit_of_one_gpu_run_on_two() -> None:
    model = mlp(4, 256, 4096)
    feeds = {"x": np.ones((4, 256), np.float32)}
    options: Any = {"target": "cuda", "tactics": "heuristic", "memory_limit": 12_000_000}
    with pytest.raises(optdnn.NotMet, match="--devices 2"):
        optdnn.build(model, **options)
    close(
        optdnn.build(model, devices=2, **options).run(feeds)["y"],
        optdnn.build(model, target="reference").run(feeds)["y"],
        1e-5,
    )


def test_the_gpu_of_an_array_is_known() -> None:
    cupy = pytest.importorskip("cupy")
    from optdnn.runtime.cuda.memory.arrays import gpu_of

    for index in (1, 0):
        with cupy.cuda.Device(index):
            assert gpu_of(cupy.zeros(4).data.ptr) == index


def test_two_engines_of_one_process_have_their_own_collectives() -> None:
    feeds = {"x": np.ones((4, 256), np.float32)}
    want = optdnn.build(mlp(4, 256, 512), target="reference").run(feeds)["y"]
    engines = [
        optdnn.build(mlp(4, 256, 512), target="cuda", devices=2, split="weights", tactics="heuristic") for _ in range(2)
    ]
    contexts = [engine.context() for engine in (*engines, engines[0])]  # the last one is made after the other engine's
    for context in contexts:
        close(context.run(feeds)["y"], want, 1e-5)


PROGRAM = """
import sys, numpy as np, optdnn
engine = optdnn.load(sys.argv[1], trust_cubins=True)
y = engine.run({"x": np.ones((4, 256), np.float32)})["y"]
print("sum", float(np.abs(y).sum()))
"""


def test_ranks_of_a_launcher_and_hidden_gpus(tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    built = optdnn.build(mlp(4, 256, 512), target="cuda", devices=2, split="weights", tactics="heuristic")
    built.save(engine)
    want = float(np.abs(built.run({"x": np.ones((4, 256), np.float32)})["y"]).sum())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(engine)],
            env={
                **os.environ,
                "RANK": str(r),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(r),
                "OPTDNN_RENDEZVOUS": str(tmp_path / "at"),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=90)
        assert process.returncode == 0
        assert abs(float(out.split()[1]) - want) < 1e-3 * want
    hidden = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(engine)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "the engine is for 2 GPUs; this machine has 1" in hidden.stderr


def test_the_model_of_one_rank_does_not_run_alone() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        agraph (float[2, 4] x) => (float[2, 4] y) { y = com.microsoft.AllReduce <group_size = 2> (x) }"""
    engine = optdnn.build(onnx.parser.parse_model(text), target="cuda", tactics="heuristic")
    with pytest.raises(optdnn.RunError, match="one rank of several"):
        engine.run({"x": np.ones((2, 4), np.float32)})
