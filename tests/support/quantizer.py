"""Networks of ONNX Runtime's quantizer, and each of their quantized operators alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from optdnn.types import Array

SKIPPED = ("QuantizeLinear", "DequantizeLinear")
BORDERS = frozenset({"MatMulInteger", "ConvInteger"})


class Reader:
    """The quantizer's calibration data."""

    def __init__(self, feeds: Sequence[Mapping[str, Array]]):
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


def many_operators() -> ModelProto:
    """x (2, 3, 8, 8) through one operator of each kind with an integer form in the quantizer, with residuals; y (2, 10)."""
    rng = np.random.default_rng(0)
    constants: list[TensorProto] = []
    nodes: list[NodeProto] = []

    def const(array: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(array), f"c{len(constants)}"))
        return constants[-1].name

    def weights(*shape: int) -> str:
        return const((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))

    def op(kind: str, *inputs: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"t{len(nodes)}"], name=f"{kind}_{len(nodes)}", **attrs))
        return nodes[-1].output[0]

    stem = op("Relu", op("Conv", "x", weights(8, 3, 3, 3), weights(8), pads=[1] * 4))
    deep = op("Conv", stem, weights(8, 1, 3, 3), weights(8), pads=[1] * 4, group=8)
    deep = op("Clip", deep, const(np.float32(0)), const(np.float32(6)))
    sum_ = op("Relu", op("Add", op("Conv", deep, weights(8, 8, 1, 1)), stem))
    pools = [op(kind, sum_, kernel_shape=[2, 2], strides=[2, 2]) for kind in ("MaxPool", "AveragePool")]
    both = op("Concat", *pools, axis=1)
    gate = op("Sigmoid", op("Conv", op("GlobalAveragePool", both), weights(16, 16, 1, 1), weights(16)))
    gated = op("Mul", both, gate)
    up = op("ConvTranspose", op("LeakyRelu", gated, alpha=0.1), weights(16, 8, 2, 2), strides=[2, 2])
    wide = op("Resize", gated, "", const(np.array([1, 1, 2, 2], np.float32)), mode="nearest")
    rows = op("Add", up, op("Conv", wide, weights(8, 16, 3, 3), pads=[1] * 4))
    rows = op("Reshape", op("Transpose", rows, perm=[0, 2, 3, 1]), const(np.array([2, 64, 8])))
    query = op("Add", op("MatMul", rows, weights(8, 8)), weights(8))
    scores = op("Softmax", op("MatMul", query, op("Transpose", rows, perm=[0, 2, 1])), axis=-1)
    context = op("Reshape", op("MatMul", scores, rows), const(np.array([2, 512])))
    y = op("Gemm", context, weights(10, 512), weights(10), transB=1)
    nodes.append(helper.make_node("Identity", [y], ["y"], name="last"))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "many", [value("x", 1, [2, 3, 8, 8])], [value("y", 1, [2, 10])], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def quantize(
    clean: Path,
    out: Path,
    feeds: Sequence[Mapping[str, Array]],
    layout: str,
    types: str,
    *,
    per_channel: bool,
    **extra: Any,
) -> Path:
    """``quantize_static`` of a pre-processed file. ``types``: activations and weights, "QUInt8 QInt8"."""
    from onnxruntime import quantization as q

    activation, weight = (getattr(q.QuantType, t) for t in types.split())
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        q.quantize_static(
            str(clean),
            str(out),
            Reader(feeds),
            quant_format=getattr(q.QuantFormat, layout),
            activation_type=activation,
            weight_type=weight,
            per_channel=per_channel,
            extra_options=extra,
        )
    finally:
        logging.disable(before)
    return out


def session(model: ModelProto | Path, level: str = "ORT_DISABLE_ALL") -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    content = model.SerializeToString() if isinstance(model, ModelProto) else model
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def values_of(model: ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a network, computed by ONNX Runtime without optimizations."""
    names = [v for n in model.graph.node for v in n.output if v]
    exposed = ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=v) for v in names)
    return {**feeds, **dict(zip(names, session(exposed).run(names, feeds), strict=True))}


def alone(model: ModelProto) -> Iterator[tuple[NodeProto, list[NodeProto], list[str]]]:
    """Each quantized operator with the DQ of its operands and the Q of its results: the node, all nodes, the results' names."""
    makers = {o: n for n in model.graph.node for o in n.output}
    for node in model.graph.node:
        if node.op_type in SKIPPED:
            continue
        made_by = {i: makers[i] for i in node.input if i in makers}  # each DQ once, even if it is read twice
        before = [m for m in made_by.values() if m.op_type == "DequantizeLinear"]
        after = [
            next((u for u in model.graph.node if u.op_type == "QuantizeLinear" and u.input[0] == o), None)
            for o in node.output
        ]
        results = [o if q is None else q.output[0] for o, q in zip(node.output, after, strict=True)]
        if before or any(after) or node.op_type.startswith("QLinear") or node.op_type in BORDERS:
            yield node, [*before, node, *(q for q in after if q is not None)], results


def side_by_side(
    model: ModelProto, values: Mapping[str, Array]
) -> tuple[ModelProto, dict[str, Array], dict[str, Array]]:
    """All quantized operators of a network as one network of independent parts.

    Returns the network, its feeds (the operands' values in the whole network), and ONNX Runtime's result of each operator by
    name.
    """
    constants = {t.name: t for t in model.graph.initializer}
    nodes: list[NodeProto] = []
    inputs: dict[str, Array] = {}
    outputs: dict[str, Array] = {}
    used: dict[str, TensorProto] = {}
    for k, (node, parts, results) in enumerate(alone(model)):
        made = {o for p in parts for o in p.output}
        fed = {i for p in parts for i in p.input if i and i not in made and i not in constants}
        names = {v: f"{node.name}/{k}/{v}" for v in (*made, *fed)}
        for part in parts:
            copy = NodeProto()
            copy.CopyFrom(part)
            copy.name = f"{part.name}/{k}"
            copy.input[:] = [names.get(i, i) for i in part.input]
            copy.output[:] = [names[o] for o in part.output]
            nodes.append(copy)
            used |= {i: constants[i] for i in part.input if i in constants}
        inputs |= {names[i]: values[i] for i in fed}
        outputs |= {names[o]: values[o] for o in results}

    def declared(table: Mapping[str, Array]) -> list[Any]:
        code = helper.np_dtype_to_tensor_dtype
        return [helper.make_tensor_value_info(n, code(a.dtype), list(a.shape)) for n, a in table.items()]

    graph = helper.make_graph(nodes, "parts", declared(inputs), declared(outputs), list(used.values()))
    made_of = helper.make_model(graph, opset_imports=model.opset_import, ir_version=9)
    return made_of, inputs, dict(zip(outputs, session(made_of).run(None, inputs), strict=True))
