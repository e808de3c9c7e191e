"""Arrays of PyCUDA as inputs and outputs, on its streams. PyCUDA is built from source: pip install pycuda, with a CUDA toolkit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.simulated import feeds_of, lowered
from support.tuned import network

from optdnn.errors import InputError
from optdnn.runtime.engine import Engine

pytestmark = pytest.mark.hopper


@pytest.fixture(scope="module")
def gpuarray() -> Any:
    pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    import pycuda.autoprimaryctx

    assert pycuda.autoprimaryctx.context is not None
    return pytest.importorskip("pycuda.gpuarray")


def test_gpuarrays_in_and_out(gpuarray: Any) -> None:
    from pycuda import driver

    graph = network()
    context: Any = Engine(lowered(graph, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    want = context.run(feeds)["y0"]
    given = {name: gpuarray.to_gpu(a) for name, a in feeds.items()}
    out = gpuarray.empty(want.shape, want.dtype)
    stream = driver.Stream()
    assert context.run(given, out={"y0": out}, stream=stream)["y0"] is out
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), want)
    bound = context.bind(given, {"y0": gpuarray.zeros(want.shape, want.dtype)})
    bound.run()  # on the null stream, on which PyCUDA copies
    np.testing.assert_array_equal(bound.outputs["y0"].get(), want)
    fresh = context.run(given)["y0"]  # a CuPy array; PyCUDA takes its address
    view = gpuarray.GPUArray(fresh.shape, fresh.dtype, gpudata=fresh.data.ptr)
    np.testing.assert_array_equal((2 * view).get(), 2 * want)


def test_gpuarrays_that_do_not_fit(gpuarray: Any) -> None:
    graph = network()
    context: Any = Engine(lowered(graph, target="cuda:sm_90a")).context()
    (name, host), *_ = feeds_of(graph).items()
    with pytest.raises(InputError, match=r"is fp64\["):
        context.run({name: gpuarray.to_gpu(host.astype(np.float64))})
    with pytest.raises(InputError, match="not C-contiguous"):
        context.run({name: gpuarray.to_gpu(host.transpose(0, 1, 3, 2).copy()).transpose((0, 1, 3, 2))})
