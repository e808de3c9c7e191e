"""Import and passes take seconds of processor time for thousands of nodes, and the time is linear in their number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.net import Net
from support.processor import assert_linear, assert_quick, seconds

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import run_pipeline
from optdnn.passes.pipelines import PIPELINE

SECONDS_PER_2000 = 2.0
GROWTH = 1.8
"""How much more a node of 2,000 may cost than one of 250: for a quadratic pass it is 8."""


def residual_model(count: int) -> bytes:
    """Residual blocks with separate batch norms, SiLU written out, reshapes over a computed symbolic batch, no-ops."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    channels = 8

    def weight(array: np.ndarray) -> str:  # type: ignore[type-arg]
        weights.append(numpy_helper.from_array(array, f"w{len(weights)}"))
        return weights[-1].name

    def node(kind: str, *inputs: str, **attrs: object) -> str:
        name = f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], name=name, **attrs))
        return name

    def conv_bn(x: str) -> str:
        w = weight(rng.standard_normal((channels, channels, 3, 3)).astype(np.float32) / 9)
        stats = (weight(rng.uniform(0.5, 1.5, channels).astype(np.float32)) for _ in range(4))
        return node("BatchNormalization", node("Conv", x, w, pads=[1] * 4), *stats)

    x = "x"
    while len(nodes) < count:
        y = node("Relu", node("Add", conv_bn(node("Relu", conv_bn(x))), x))
        y = node("Mul", y, node("Sigmoid", y))
        batch = node("Gather", node("Shape", y), weight(np.array([0])))
        y = node("Reshape", y, node("Concat", batch, weight(np.array([channels, -1])), axis=0))
        x = node("Identity", node("Reshape", y, weight(np.array([0, channels, 8, 8]))))
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, 8, 8])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def wide(count: int) -> Graph:
    """Hundreds of convolutions of one value, and one Concat of all of them."""
    n = Net()
    x = n.op("Relu", n.input(1, 8, 4, 4))
    branches = [n.op("Tanh", n.op("Relu", n.bn(n.conv(x, 4)))) for _ in range(count // 4)]
    return n.done(n.op("Concat", *branches, attrs=ConcatAttrs(1)))


def transposed(count: int) -> Graph:
    """Runs of pointwise ops between transposes that cancel."""
    n = Net()
    x = n.input(2, 4, 8, 8)
    for _ in range(count // 10):
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 3, 1)))
        for _ in range(4):
            x = n.op("Tanh", n.op("Mul", x, n.random(4)))
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 3, 1, 2)))
    return n.done(x)


@pytest.mark.slow
def test_import_and_passes_are_fast_and_linear() -> None:
    def work(data: bytes) -> object:
        return run_pipeline(import_model(data), PIPELINE(3, "reference"))

    models = {count: residual_model(count) for count in (250, 2000)}
    assert_quick(lambda: seconds(partial(work, models[2000])), SECONDS_PER_2000)
    assert_linear({count: partial(work, data) for count, data in models.items()}, GROWTH)


@pytest.mark.slow
@pytest.mark.parametrize("make", [wide, transposed])
def test_unusual_shapes_of_graphs_are_linear_too(make: Callable[[int], Graph]) -> None:
    def work(graph: Graph) -> object:
        return run_pipeline(graph.copy(), PIPELINE(3, "reference"))

    assert_linear({count: partial(work, make(count)) for count in (250, 1000)}, GROWTH)
