"""A GPU shared with others: threads with separate contexts, PyTorch's tensors and streams, DLPack, builds without memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import feeds_of, lowered
from support.whole_gpu import full_gpu

import optdnn
from optdnn.errors import RunError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.runtime.engine import Engine

pytestmark = pytest.mark.hopper


def network(channels: int = 32) -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 24, 24), channels, 3, bias=True))
    return n.done(n.gemm(n.op("Flatten", n.op("GlobalAveragePool", n.op("Tanh", n.conv(x, 24, 1, pads=0)))), 10))


def engine_of(graph: Graph, precision: str = "fp16") -> Engine:
    return Engine(lowered(graph, precision, target="cuda:sm_90a"))


def test_threads_with_contexts_of_their_own_over_two_engines() -> None:
    graphs = [network(), network(48)]
    engines = [engine_of(graphs[0]), engine_of(graphs[1], "fp32")]
    feeds = [[feeds_of(g, seed=s) for s in range(6)] for g in graphs]
    wanted = [[e.run(f)["y0"] for f in fs] for e, fs in zip(engines, feeds, strict=True)]
    together = Barrier(6)

    def work(k: int) -> list[int]:
        which, context = k % 2, engines[k % 2].context()
        together.wait()
        order = np.random.default_rng(k).integers(0, 6, 60)
        return [i for i in order if not np.array_equal(context.run(feeds[which][i])["y0"], wanted[which][i])]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [[]] * 6


def test_tensors_and_streams_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    graph = network()
    feeds, context = feeds_of(graph), engine_of(graph).context()
    want = context.run(feeds)["y0"]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given = {k: torch.from_numpy(v).cuda() for k, v in feeds.items()}
        out = torch.empty(want.shape, device="cuda")
        pointers = {k: v.data_ptr() for k, v in given.items()}
        got = context.run(given, out={"y0": out}, stream=stream)["y0"]
    stream.synchronize()
    assert got is out
    assert {k: v.data_ptr() for k, v in given.items()} == pointers
    np.testing.assert_array_equal(out.cpu().numpy(), want)


def test_arrays_that_support_only_dlpack() -> None:
    cupy = pytest.importorskip("cupy")
    graph = network()
    feeds, context = feeds_of(graph), engine_of(graph).context()
    want = context.run(feeds)["y0"]

    class Capsule:
        def __init__(self, array: Any):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    got = context.run({k: Capsule(cupy.asarray(v)) for k, v in feeds.items()})["y0"]
    np.testing.assert_array_equal(cupy.asnumpy(got), want)


@pytest.mark.whole_gpu
def test_a_build_without_memory_raises_a_typed_error_and_frees_its_memory(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    graph = network(64)
    path, feeds = tmp_path / "net.onnx", feeds_of(graph)
    export_model(graph).save(path)
    options: dict[str, Any] = {"target": "cuda:sm_90a", "precision": "fp16", "tactics": "own", "budget": 4.0}
    want = optdnn.build(path, **options).run(feeds)["y0"]
    before = cupy.cuda.runtime.memGetInfo()[0]
    with full_gpu(cupy), pytest.raises(RunError, match=r"no room|out of memory|OUT_OF_MEMORY"):
        optdnn.build(path, **options).run(feeds)
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (64 << 20)
    got = optdnn.build(path, **options).run(feeds)["y0"]
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3 * np.abs(want).max())
