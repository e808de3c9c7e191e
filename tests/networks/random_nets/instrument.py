"""Changes float values inside of a network: a rule puts nodes after the results of nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from random_nets.draw import Array

Rule = Callable[[NodeProto, str, str], Sequence[NodeProto]]
"""(node that computes a value, current name of the value, name for the last node's result) -> nodes. Without nodes, the value
stays."""

EXACT = frozenset(
    {
        "Abs",
        "BatchToSpace",
        "Ceil",
        "Clip",
        "Compress",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "DepthToSpace",
        "Expand",
    }
    | {"EyeLike", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "Identity", "If", "Loop"}
    | {
        "Max",
        "MaxPool",
        "MaxUnpool",
        "Min",
        "Neg",
        "OneHot",
        "Pad",
        "Range",
        "ReduceMax",
        "ReduceMin",
        "Relu",
        "Reshape",
    }
    | {"ReverseSequence", "Round", "Scan", "ScatterElements", "ScatterND", "Sign", "Slice", "SpaceToDepth", "Split"}
    | {"Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where"}
)
"""Operators that select or move elements, without rounding."""

PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose operands calibration quantizes in any case."""


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from graphs(a.g)


def sizing(graph: GraphProto) -> set[str]:
    """Names of values that determine sizes: operands of Resize and Range."""
    every = [n for g in graphs(graph) for n in g.node]
    return {i for n in every if n.op_type == "Resize" for i in n.input[1:3]} | {
        i for n in every if n.op_type == "Range" for i in n.input
    }


def instrumented(model: onnx.ModelProto, rule: Rule) -> onnx.ModelProto:
    """A copy with the rule's nodes after every float32 result, including those in subgraphs."""
    changed = shape_inference.infer_shapes(copy.deepcopy(model))
    sizes = sizing(changed.graph)
    for graph in reversed(list(graphs(changed.graph))):  # inner ones first: nodes are copied
        floats = {
            v.name for v in (*graph.value_info, *graph.output) if v.type.tensor_type.elem_type == TensorProto.FLOAT
        } - sizes
        nodes: list[NodeProto] = []
        for node in graph.node:
            nodes.append(node)
            for k, name in enumerate(node.output):
                before = f"{name}/before"
                added = rule(node, before, name) if name in floats else []
                if added:
                    node.output[k] = before
                    nodes += added
        copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return changed


def rounding(by: float, seed: int) -> Rule:
    """Each result of an operator that rounds is changed by up to ``by`` of its size."""
    count = seed << 12

    def rule(node: NodeProto, before: str, after: str) -> list[NodeProto]:
        nonlocal count
        if node.op_type in EXACT:
            return []
        count += 1
        factor = f"{after}/factor"
        drawn = {"low": 1 - by, "high": 1 + by, "seed": float(count)}
        return [
            helper.make_node("RandomUniformLike", [before], [factor], **drawn),
            helper.make_node("Mul", [before, factor], [after]),
        ]

    return rule


def clipping(ranges: dict[str, tuple[float, float]]) -> Rule:
    """Each value of these names is clipped to its range."""

    def rule(node: NodeProto, before: str, after: str) -> list[NodeProto]:
        if after not in ranges:
            return []
        bounds = [f"{after}/low", f"{after}/high"]
        made = [
            helper.make_node("Constant", [], [b], value_float=v) for b, v in zip(bounds, ranges[after], strict=True)
        ]
        return [*made, helper.make_node("Clip", [before, *bounds], [after])]

    return rule


HALVES = {"fp16": (np.float16, TensorProto.FLOAT16), "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16)}
"""Precision -> its type in NumPy and in ONNX."""


def halved(array: Array, precision: str) -> Array:
    """float32 rounded to 16 bits; other types as they are."""
    return array.astype(HALVES[precision][0]).astype(np.float32) if array.dtype == np.float32 else array


def in_half(model: onnx.ModelProto, precision: str, *, results: bool) -> onnx.ModelProto:
    """A copy whose constants, and with ``results`` all results of nodes, are rounded to 16 bits."""

    def rule(node: NodeProto, before: str, after: str) -> list[NodeProto]:
        if not results and node.op_type != "Constant":
            return []
        half = f"{after}/half"
        return [
            helper.make_node("Cast", [before], [half], to=HALVES[precision][1]),
            helper.make_node("Cast", [half], [after], to=TensorProto.FLOAT),
        ]

    changed = instrumented(model, rule)
    sizes = sizing(changed.graph)
    for t in changed.graph.initializer:
        if t.data_type == TensorProto.FLOAT and t.name not in sizes:
            t.CopyFrom(numpy_helper.from_array(halved(numpy_helper.to_array(t), precision), t.name))
    return changed


def decided(model: onnx.ModelProto, results: dict[str, Array]) -> onnx.ModelProto:
    """A copy in which these results, outside of subgraphs, are constants."""
    changed = copy.deepcopy(model)
    for node in changed.graph.node:
        if node.output[0] in results:
            value = numpy_helper.from_array(results[node.output[0]])
            node.CopyFrom(helper.make_node("Constant", [], list(node.output), value=value))
    return changed
