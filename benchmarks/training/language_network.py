"""The small language model that is shipped trained: layers of grouped-query attention with rotary positions, and gated MLPs.

The ONNX file has the form of onnxruntime-genai's exports: ``input_ids`` [batch, length], ``attention_mask`` [batch, total] and the
caches ``past_key_values.N.key`` and ``.value`` [batch, groups, past, size] in, ``logits`` [batch, length, vocabulary] and
``present.N.key`` and ``.value`` out. Weights are stored as fp16 and computed with as fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optdnn.types import Array

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Sizes:
    """Of the model. ``positions``: the longest sequence."""

    vocabulary: int = 768
    layers: int = 4
    heads: int = 3
    groups: int = 1
    size: int = 32
    inner: int = 192
    positions: int = 256

    @property
    def width(self) -> int:
        return self.heads * self.size


def angles(sizes: Sizes) -> Array:
    """Of each position and pair of features, [positions, size / 2]."""
    steps = 10000.0 ** (-np.arange(sizes.size // 2) / (sizes.size // 2))
    return np.arange(sizes.positions)[:, None] * steps


class _Writer:
    """Nodes and weights of the model in the making."""

    def __init__(self, sizes: Sizes, state: Mapping[str, Array]):
        self.sizes, self.state = sizes, state
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, kind: str, name: str, *inputs: str, outputs: list[str] | None = None, **attrs: Any) -> str:
        made = outputs or [f"{name}/output"]
        self.nodes.append(helper.make_node(kind, inputs, made, name, **attrs))
        return made[0]

    def const(self, name: str, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, name: str) -> str:
        """A parameter, stored as fp16."""
        stored = self.const(name, self.state[name].astype(np.float16))
        return self.node("Cast", f"{name}/wide", stored, to=TensorProto.FLOAT)

    def linear(self, name: str, x: str) -> str:
        """A torch Linear without bias, whose weight is [out, in]."""
        self.const(f"{name}.weight", self.state[f"{name}.weight"].T.astype(np.float16))
        return self.node("MatMul", name, x, self.node("Cast", f"{name}/wide", f"{name}.weight", to=TensorProto.FLOAT))

    def norm(self, name: str, x: str) -> str:
        return self.node("SimplifiedLayerNormalization", name, x, self.weight(f"{name}.weight"), axis=-1, epsilon=1e-5)

    def layer(self, i: int, x: str, lengths: list[str]) -> str:
        s, name = self.sizes, f"layers.{i}"
        y = self.norm(f"{name}.norm1", x)
        parts = [self.linear(f"{name}.{part}", y) for part in "qkv"]
        past, present = ([f"{at}.{i}.{part}" for part in ("key", "value")] for at in ("past_key_values", "present"))
        y = self.node(
            "GroupQueryAttention", f"{name}.attention", *parts, *past, *lengths, "cos_cache", "sin_cache", domain=MICROSOFT,
            outputs=[f"{name}.attention/output", *present], num_heads=s.heads, kv_num_heads=s.groups, do_rotary=1,
        )  # fmt: skip
        x = self.node("Add", f"{name}.attended", x, self.linear(f"{name}.out", y))
        y = self.norm(f"{name}.norm2", x)
        gate = self.linear(f"{name}.gate", y)
        gate = self.node("Mul", f"{name}.silu", gate, self.node("Sigmoid", f"{name}.sigmoid", gate))
        y = self.node("Mul", f"{name}.gated", gate, self.linear(f"{name}.up", y))
        return self.node("Add", f"{name}.residual", x, self.linear(f"{name}.down", y))

    def model(self) -> onnx.ModelProto:
        s = self.sizes
        self.const("cos_cache", np.cos(angles(s)).astype(np.float32))
        self.const("sin_cache", np.sin(angles(s)).astype(np.float32))
        total = self.node("ReduceSum", "mask/sum", "attention_mask", self.const("axis", np.array([1])), keepdims=0)
        last = self.node("Sub", "mask/last", total, self.const("one", np.array([1])))
        width = self.node(
            "Gather",
            "mask/width",
            self.node("Shape", "mask/shape", "attention_mask"),
            self.const("second", np.array(1)),
        )
        lengths = [
            self.node("Cast", n, x, to=TensorProto.INT32) for n, x in (("mask/last32", last), ("mask/width32", width))
        ]
        words = self.weight("words.weight")
        x = self.node("Gather", "embedded", words, "input_ids")
        for i in range(s.layers):
            x = self.layer(i, x, lengths)
        y = self.norm("norm", x)
        self.node("MatMul", "head", y, self.node("Transpose", "head/turned", words, perm=[1, 0]), outputs=["logits"])
        graph = helper.make_graph(self.nodes, "language", self.inputs(), self.outputs(), self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, doc_string=(__doc__ or "").strip())

    def inputs(self) -> list[onnx.ValueInfoProto]:
        found = [_port("input_ids", "batch", "length"), _port("attention_mask", "batch", "total")]
        return found + self.caches("past_key_values", "past")

    def outputs(self) -> list[onnx.ValueInfoProto]:
        return [_port("logits", "batch", "length", self.sizes.vocabulary, kind=1), *self.caches("present", "total")]

    def caches(self, name: str, length: str) -> list[onnx.ValueInfoProto]:
        s = self.sizes
        names = [f"{name}.{i}.{part}" for i in range(s.layers) for part in ("key", "value")]
        return [_port(n, "batch", s.groups, length, s.size, kind=TensorProto.FLOAT) for n in names]


def _port(name: str, *dims: int | str, kind: int = TensorProto.INT64) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(dims))


def build(sizes: Sizes, state: Mapping[str, Array]) -> onnx.ModelProto:
    """The model with the parameters ``state`` (a torch state_dict as arrays)."""
    return _Writer(sizes, state).model()
