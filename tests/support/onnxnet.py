"""A small real network as an ONNX file: convolutions with BatchNormalization, a residual addition, a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HOSTILE = {
    "conv1": "<script>document.title='owned'</script>",
    "relu2": '"><img src=x onerror="document.title=\'owned\'">',
    "head": "a|b`*_[x](javascript:1) </summary></td> & \x1b[31m",
}
"""Node names with a special meaning in HTML, Markdown and terminals."""


def convnet(*, batch: int | str = 1, names: dict[str, str] | None = None, channels: int = 8) -> onnx.ModelProto:
    """Input "x" (batch, 3, 8, 8), output "y" (batch, 5). ``names`` renames nodes (keys: conv1, bn1, relu1, …)."""
    rng = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, *shape: int, low: float | None = None) -> str:
        array = (
            rng.uniform(low, 2, shape) if low is not None else rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        )
        weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def node(op: str, name: str, inputs: list[str], **attrs: Any) -> str:
        out = f"{name}_out"
        nodes.append(helper.make_node(op, inputs, [out], name=(names or {}).get(name, name), **attrs))
        return out

    def conv_bn(x: str, k: int, c: int) -> str:
        y = node("Conv", f"conv{k}", [x, weight(f"w{k}", channels, c, 3, 3)], pads=[1, 1, 1, 1])
        stats = [weight(f"{s}{k}", channels, low=0.5) for s in ("scale", "shift", "mean", "var")]
        return node("BatchNormalization", f"bn{k}", [y, *stats])

    first = node("Relu", "relu1", [conv_bn("x", 1, 3)])
    second = node("Relu", "relu2", [node("Add", "add", [conv_bn(first, 2, channels), first])])
    pooled = node("Flatten", "flatten", [node("GlobalAveragePool", "pool", [second])])
    nodes.append(
        helper.make_node("Gemm", [pooled, weight("fc", channels, 5)], ["y"], name=(names or {}).get("head", "head"))
    )
    graph = helper.make_graph(
        nodes,
        "convnet",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 5])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def save_convnet(path: Path, **options: Any) -> Path:
    """A file of :func:`convnet`."""
    onnx.save(convnet(**options), path)
    return path
