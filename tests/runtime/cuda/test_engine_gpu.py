"""Engines on a GPU: every launch agrees with its step's meaning, runs repeat, host and device arrays agree, faults are typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.conv import test_conv_pool
from kernels.conv import test_stream_k as test_stream_k_plans
from kernels.gemm import test_matmul_stacks
from kernels.generated_cases import FAMILIES, graph_of
from kernels.pointwise import test_prologue
from support.net import Net, built
from support.on_gpu import checked_launches, checked_program
from support.simulated import feeds_of, lowered, simulate
from support.whole_gpu import full_gpu

from optdnn.errors import InputError, RunError
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import pooled as conv_pool
from optdnn.runtime.engine import Engine

pytestmark = pytest.mark.hopper


def network() -> Graph:
    n = Net()
    x = n.op("Relu", n.bn(n.conv(n.input(2, 3, 32, 32), 16, 7, strides=2, pads=3)))
    x = n.max_pool(x, pads=1)
    y = n.op("Relu", n.conv(n.op("Relu", n.conv(x, 32, 3)), 32, group=32, bias=True))
    x = n.op("Relu", n.op("Add", n.conv(y, 24, 1, pads=0), n.conv(x, 24, 1, pads=0)))
    return n.done(n.gemm(n.op("Flatten", n.op("GlobalAveragePool", x)), 10))


TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 2e-3, "bf16": 1.6e-2}
"""The largest error of a launch, relative to the largest magnitude of its result."""


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_launch_does_what_its_step_means(family: str, precision: str) -> None:
    checked_launches(graph_of(family), precision, TOLERANCE[precision])


def beginning_at(monkeypatch: pytest.MonkeyPatch, ranks: Sequence[int]) -> Iterator[int]:
    """Ranks Hopper's convolutions from each of these on in turn (from the last one, if there are fewer). Yields the rank."""
    ranked = hopper_launch.ranked
    for rank in ranks:
        monkeypatch.setattr(hopper_launch, "ranked", lambda *a, rank=rank: ranked(*a)[min(rank, len(ranked(*a)) - 1) :])
        yield rank


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", test_prologue.NETS)
def test_prologues_of_convolutions(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = built(test_prologue.NETS[name])
    tried = set()
    # whole and split K, kept weights, stores from registers and by TMA
    for _ in beginning_at(monkeypatch, (0, 1, 3, 7, 15, 31, 63, 127)):
        program = lowered(graph, precision, target="cuda:sm_90a")
        tried |= {t["config"] for t in program.meta["tactics"] if t["tactic"] == "conv_sm90"}
        checked_program(program, feeds_of(graph), TOLERANCE[precision])
    assert len(tried) >= 4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", test_matmul_stacks.NETS)
def test_products_of_computed_stacks(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in beginning_at(monkeypatch, (0, 9, 40)):
        graph, program = test_matmul_stacks.program_of(name, precision, "cuda:sm_90a")
        checked_program(program, feeds_of(graph), TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_stream_k(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_stream_k_plans.prefer_stream_k(monkeypatch)
    graph = test_stream_k_plans.network()
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert len(test_stream_k_plans.streamed(program)) == 4
    checked_program(program, feeds_of(graph), TOLERANCE[precision], runs=21)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [(28, 30), (29, 31), (56, 56)])
def test_convolutions_with_their_pools(size: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_pool, "OVERLAP", -1.0)  # fused wherever possible
    graph = test_conv_pool.net(64, 136, size)
    tried = set()
    for _ in beginning_at(monkeypatch, (0, 1, 3, 7, 15, 31)):
        program = lowered(graph, precision, target="cuda:sm_90a")
        tried |= {t["config"] for t in program.meta["tactics"] if t["tactic"] == "conv_pool_sm90"}
        checked_program(program, feeds_of(graph), TOLERANCE[precision])
    assert len(tried) >= 3


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_the_gpu_agrees_with_simulate_and_repeats(precision: str) -> None:
    graph = network()
    program, feeds = lowered(graph, precision, target="cuda:sm_90a"), feeds_of(graph)
    context: Any = Engine(program).context()
    first, second, expected = context.run(feeds), context.run(feeds), simulate(program, feeds)
    np.testing.assert_array_equal(first["y0"], second["y0"])
    bound = {"tf32": 2e-4, "fp16": 4e-3, "bf16": 3e-2}[precision] * np.abs(expected["y0"]).max()
    np.testing.assert_allclose(first["y0"], expected["y0"], rtol=0, atol=bound)


def test_products_of_tf32() -> None:
    found = checked_launches(network(), "tf32", 1e-4)
    assert sum(e.kernel.startswith("conv_") for e in found) >= 4


def test_device_arrays_and_bound_calls() -> None:
    cupy = pytest.importorskip("cupy")
    graph = network()
    context: Any = Engine(lowered(graph, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    want = context.run(feeds)["y0"]
    given = {k: cupy.asarray(v) for k, v in feeds.items()}
    np.testing.assert_array_equal(cupy.asnumpy(context.run(given)["y0"]), want)
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = context.bind(given)
    bound.run(stream)
    stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(bound.outputs["y0"]), want)
    with pytest.raises(InputError, match="is in host memory"):
        context.run(given, out={"y0": np.empty_like(want)})


def test_recompiled_kernels_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import optdnn

    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path))
    graph = network()
    feeds = feeds_of(graph)
    Engine(lowered(graph, target="cuda:sm_90a")).save(tmp_path / "e.engine")
    want = optdnn.load(tmp_path / "e.engine", trust_cubins=True).run(feeds)["y0"]
    np.testing.assert_array_equal(optdnn.load(tmp_path / "e.engine").run(feeds)["y0"], want)


def test_other_arrays_change_nodes_of_the_graph() -> None:
    cupy = pytest.importorskip("cupy")
    graph = network()
    context: Any = Engine(lowered(graph, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    rng = np.random.default_rng(5)
    tries = [{k: rng.standard_normal(v.shape).astype(v.dtype) for k, v in feeds.items()} for _ in range(12)]
    wanted = [context.run(t)["y0"] for t in tries]
    assert any(not np.array_equal(wanted[0], w) for w in wanted[1:])
    given = [{k: cupy.asarray(v) for k, v in t.items()} for t in tries]  # more arrays than graphs are kept
    for _ in range(2):
        for arrays, want in zip(given, wanted, strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(context.run(arrays)["y0"]), want)


def test_a_pointer_outside_of_all_gpus() -> None:
    cupy = pytest.importorskip("cupy")
    graph = network()
    context: Any = Engine(lowered(graph, target="cuda:sm_90a")).context()
    (name, host), *_ = feeds_of(graph).items()

    class Pretender:
        __cuda_array_interface__ = {**host.__array_interface__, "version": 3}  # noqa: RUF012

    with pytest.raises(InputError, match="is not device memory"):
        context.run({name: Pretender()})
    assert cupy.isfinite(context.run({name: cupy.asarray(host)})["y0"]).all()


@pytest.mark.whole_gpu
def test_out_of_memory_is_typed_and_leaves_the_engine_usable() -> None:
    cupy = pytest.importorskip("cupy")
    graph = network()
    engine = Engine(lowered(graph, target="cuda:sm_90a"))
    feeds = feeds_of(graph)
    want = engine.run(feeds)["y0"]
    contexts: list[Any] = []
    with full_gpu(cupy), pytest.raises(RunError, match=r"the GPU has no room|out of memory"):
        contexts.extend(engine.context() for _ in range(4096))
    contexts.clear()
    np.testing.assert_array_equal(engine.run(feeds)["y0"], want)
