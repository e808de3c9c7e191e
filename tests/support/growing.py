"""A small language model in the form of Optimum's exports: caches grow by Concat, and the mask marks padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

VOCABULARY, HEADS, SIZE, POSITIONS = 50, 2, 8, 64
WIDTH = HEADS * SIZE


def growing() -> onnx.ModelProto:
    """One layer of causal attention, with learned positions.

    Inputs: ``input_ids``, ``position_ids`` [batch, length], ``attention_mask`` [batch, past + length], and
    ``past_key_values.0.key`` and ``.value`` [batch, heads, past, size]. Outputs: ``logits`` [batch, length, vocabulary],
    ``present.0.key`` and ``present.0.value``.
    """
    rng = np.random.default_rng(4)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def const(name: str, array: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def matrix(name: str, *shape: int) -> str:
        return const(name, rng.standard_normal(shape).astype(np.float32) / np.float32(2))

    def node(kind: str, out: str, *inputs: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [out], out, **attrs))
        return out

    embedded = node("Gather", "embedded", matrix("words", VOCABULARY, WIDTH), "input_ids")
    x = node("Add", "x", embedded, node("Gather", "placed", matrix("places", POSITIONS, WIDTH), "position_ids"))
    split = const("split", np.array([0, 0, HEADS, SIZE]))

    def heads(name: str) -> str:
        whole = node("MatMul", f"{name}.all", x, matrix(f"{name}.weight", WIDTH, WIDTH))
        return node("Transpose", name, node("Reshape", f"{name}.rows", whole, split), perm=[0, 2, 1, 3])

    q, k, v = map(heads, "qkv")
    for name, new in (("key", k), ("value", v)):
        node("Concat", f"present.0.{name}", f"past_key_values.0.{name}", new, axis=2)
    scores = node("MatMul", "scores", q, node("Transpose", "turned", "present.0.key", perm=[0, 1, 3, 2]))
    zero, one, two = (const(n, np.array(i)) for n, i in (("zero", 0), ("one", 1), ("two", 2)))
    total = node("Gather", "total", node("Shape", "shape", "present.0.key"), two)
    past = node("Gather", "past", node("Shape", "past.shape", "past_key_values.0.key"), two)
    columns = node("Range", "columns", zero, total, one)
    rows = node("Unsqueeze", "rows", node("Range", "own", past, total, one), const("last", np.array([1])))
    causal = node("LessOrEqual", "causal", columns, rows)
    real = node("Unsqueeze", "real", node("Cast", "is_real", "attention_mask", to=9), const("middle", np.array([1, 2])))
    kept = node("And", "kept", causal, real)
    masked = node("Where", "masked", kept, scores, const("low", np.float32(-1e9)))
    mixed = node("MatMul", "mixed", node("Softmax", "shares", masked, axis=-1), "present.0.value")
    joined = node(
        "Reshape",
        "joined",
        node("Transpose", "rows.first", mixed, perm=[0, 2, 1, 3]),
        const("join", np.array([0, 0, WIDTH])),
    )
    node("MatMul", "logits", node("Add", "y", x, joined), matrix("head", WIDTH, VOCABULARY))

    def port(name: str, kind: int, *dims: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, list(dims))

    inputs = [port("input_ids", 7, "batch", "length"), port("attention_mask", 7, "batch", "past + length"),
              port("position_ids", 7, "batch", "length")]  # fmt: skip
    inputs += [port(f"past_key_values.0.{n}", 1, "batch", HEADS, "past", SIZE) for n in ("key", "value")]
    outputs = [port("logits", 1, "batch", "length", VOCABULARY)]
    outputs += [port(f"present.0.{n}", 1, "batch", HEADS, "past + length", SIZE) for n in ("key", "value")]
    graph = helper.make_graph(nodes, "growing", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
