"""The contents of each network of the zoo: ``golden/zoo.json``, and the counts that it is checked against.

``python -m support.zoo_manifest`` in ``tests`` writes the file from the builders.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from optdnn.models import zoo

FILE = Path(__file__).parents[1] / "golden" / "zoo.json"
_WEIGHT_BYTES = 1024
"""Initializers beyond this size are cut off before shape inference, which would copy them; no shape depends on one."""


def load() -> dict[str, dict[str, Any]]:
    """The manifest: for each name ``source`` (the paper), ``parameters``, ``flops``, ``operators`` and ``outputs``,
    at the builder's defaults."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def describe(model: onnx.ModelProto) -> dict[str, Any]:
    """The manifest's entry for a model.

    ``parameters`` are trainable ones: float initializers but the running statistics of BatchNormalization. ``flops``
    count two for each multiply-add of Conv, ConvTranspose, Gemm, MatMul, LSTM and GRU, for one inference of the
    model's batch; every dimension must be fixed.
    """
    statistics = {name for n in model.graph.node if n.op_type == "BatchNormalization" for name in n.input[3:]}
    parameters = sum(
        math.prod(t.dims)
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and t.name not in statistics
    )
    shapes = _shapes(model)
    return {
        "source": " ".join(model.graph.doc_string.split("\n\n")[0].split()),
        "parameters": parameters,
        "flops": sum(_flops(n, shapes) for n in model.graph.node),
        "operators": dict(sorted(Counter(n.op_type for n in model.graph.node).items())),
        "outputs": {o.name: list(shapes[o.name]) for o in model.graph.output},
    }


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        if tensor.ByteSize() <= _WEIGHT_BYTES:
            graph.initializer.append(tensor)
    graph = onnx.shape_inference.infer_shapes(light, strict_mode=True, data_prop=True).graph
    values = [*graph.input, *graph.output, *graph.value_info]
    return {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


def _flops(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]) -> int:
    """Two for each multiply-add; 0 for an operator that has none."""
    first, second, out = (
        shapes.get(name, ()) for name in (*node.input[:2], *[""] * (2 - len(node.input)), node.output[0])
    )
    if node.op_type == "Conv":
        return 2 * math.prod(out) * math.prod(second[1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(first) * math.prod(second[1:])
    if node.op_type in ("Gemm", "MatMul"):
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2 * math.prod(out) * first[-2 if transposed else -1]
    if node.op_type in ("LSTM", "GRU"):
        length, batch = first[:2]
        return 2 * length * batch * sum(math.prod(shapes[name]) for name in node.input[1:3])
    return 0


def main() -> None:
    entries = {name: describe(zoo.build(name)) for name in zoo.NAMES}
    FILE.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
