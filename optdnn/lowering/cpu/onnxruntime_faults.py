"""Rewrites that keep ONNX Runtime's optimizers from making operators less exact.

DequantizeLinear, Softmax, QuantizeLinear become QLinearSoftmax, which rounds down: up to an eighth of the integers are one too
small (seen with ONNX Runtime 1.31; an output scale of 1/256 is exact). A Clip without an effect before the Softmax prevents that.
Optimizers that a session can do without are disabled in :mod:`optdnn.runtime.cpu.onnxruntime`.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from optdnn.lowering.cpu.loops import replace_nodes

_MOVING = frozenset(
    {"Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators that ONNX Runtime moves a DequantizeLinear past."""


def keep_softmax(model: onnx.ModelProto) -> None:
    """Put a Clip before every Softmax of dequantized float32 values, in place."""
    _keep(model.graph, set())


def _keep(graph: GraphProto, outer: set[str]) -> None:
    producers = {name: node for node in graph.node for name in node.output}
    floats = outer | {t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _keep(attribute.g, floats)
        if node.op_type == "Softmax" and _dequantized(node.input[0], producers, floats):
            clipped, least = f"{node.output[0]}/unfused", f"{node.output[0]}/least"
            graph.initializer.append(numpy_helper.from_array(np.array(-np.inf, np.float32), least))
            nodes.append(helper.make_node("Clip", [node.input[0], least], [clipped], name=f"{node.name}/unfused"))
            node.input[0] = clipped
        nodes.append(node)
    if len(nodes) > len(graph.node):
        replace_nodes(graph, nodes)


def _dequantized(name: str, producers: dict[str, NodeProto], floats: set[str]) -> bool:
    node = producers.get(name)
    while node is not None and node.op_type in _MOVING:
        node = producers.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear" and node.input[1] in floats
