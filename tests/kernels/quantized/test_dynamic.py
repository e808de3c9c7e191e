"""Networks whose data are quantized to the range that they have in a run (ONNX Runtime's dynamic quantization)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.ops.quant import IntegerConvAttrs
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine


def scaled(n: Net, kind: str, x: Value, weights: Any, zero: int, **more: Any) -> Value:
    """What the tools write for a product: ``Cast(kind(q, w, p, zero)) * (s * scale)``."""
    q, s, p = n.op("DynamicQuantizeLinear", x, outputs=3)
    dtype = weights.dtype
    total = n.op(kind, q, n.const(weights, dtype), p, n.const(np.array(zero, dtype), dtype), **more)
    return n.op("Mul", n.op("Cast", total), n.op("Mul", s, 0.01))


def drawn(n: Net, *shape: int, dtype: Any = np.int8) -> Any:
    info = np.iinfo(dtype)
    return n.rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)


def rows(n: Net) -> Value:
    x = n.op("Relu", n.op("Add", scaled(n, "MatMulInteger", n.input(3, 20, 64), drawn(n, 64, 96), 0), n.random(96)))
    return scaled(n, "MatMulInteger", x, drawn(n, 96, 40, dtype=np.uint8), 121)


def image(n: Net) -> Value:
    padded, plain = IntegerConvAttrs((2, 2), (1, 1, 1, 1), (1, 1)), IntegerConvAttrs((1, 1), (0, 0, 0, 0), (1, 1))
    x = scaled(n, "ConvInteger", n.input(2, 16, 12, 10), drawn(n, 32, 16, 3, 3), 0, attrs=padded)
    return scaled(n, "ConvInteger", n.op("Relu", x), drawn(n, 24, 32, 1, 1, dtype=np.uint8), 130, attrs=plain)


NETS = {"rows": rows, "image": image}


def network(name: str) -> Graph:
    n = Net()
    return n.done(NETS[name](n))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NETS)
def test_their_products_run_on_tensor_cores(name: str, precision: str) -> None:
    found = kinds(check_simulated(network(name), precision, tolerance=2e-2 if precision == "fp16" else 2e-6))
    assert found.count("QuantizedConv") == 3  # a product is a 1 x 1 convolution; one adds up the data of a row
    assert not {"MatMulInteger", "ConvInteger"} & set(found)


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("name", NETS)
def test_launches_on_a_gpu_give_what_they_mean(name: str) -> None:
    graph = network(name)
    context: Any = Engine(lowered(graph, "fp32", target="cuda:sm_90a")).context()
    assert not [e for e in check_steps(context, feeds_of(graph)) if not e.error < 1e-5]
