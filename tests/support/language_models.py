"""Small language models of the form that onnxruntime-genai's model builder writes, with random packed weights.

The form is that of its builder's float32 exports for the CPU (and, with ``fused_norms``, of those for CUDA): MatMulNBits, a
GroupQueryAttention that holds rotary positions and the cache, Skip(Simplified)LayerNormalization that passes the sum on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from optdnn.types import Array

DOMAIN = "com.microsoft"
POSITIONS = 64


@dataclass(frozen=True)
class Family:
    """What differs between families. ``windows``: of each layer, -1 for all positions."""

    heads: int = 4
    groups: int = 2
    size: int = 16
    inner: int = 96
    vocabulary: int = 80
    windows: tuple[int, ...] = (-1, -1)
    packed_qkv: bool = True
    attention_bias: bool = False
    norms_of_heads: bool = False
    sinks: bool = False
    fused_norms: bool = False
    tied: bool = False
    head_bits: int = 4
    block: int = 32
    zeros: bool = True
    softcap: float = 0.0
    scale: float = 0.0
    activation: str = "silu"
    dequantized: bool = False
    """Products are written as DequantizeLinear, Transpose and MatMul (the builder's option use_qdq)."""
    sandwiched: bool = False
    """Norms also after attention and MLP, and a scaled embedding (Gemma 2)."""
    parallel: bool = False
    """Attention and an MLP of two layers in parallel, after one LayerNormalization. A part of each head is rotated (Phi 2)."""

    @property
    def width(self) -> int:
        return self.heads * self.size


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows=(3, 3), head_bits=8, zeros=False),
    "qwen2": Family(packed_qkv=False, attention_bias=True, block=16),
    "qwen3": Family(packed_qkv=False, norms_of_heads=True, tied=True, inner=112),
    "gemma2": Family(
        windows=(-1, 3), softcap=20.0, scale=0.3, activation="gelu", sandwiched=True, tied=True, head_bits=8
    ),
    "gptoss": Family(windows=(3, -1), packed_qkv=False, attention_bias=True, sinks=True),
    "phi2": Family(groups=4, attention_bias=True, activation="gelu", parallel=True),
}


class _Writer:
    def __init__(self, family: Family):
        self.family, self.rng = family, np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def constant(self, name: str, array: Any) -> str:
        if all(t.name != name for t in self.weights):
            self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, kind: str, name: str, *inputs: str, domain: str = "", outputs: Any = None, **attrs: Any) -> str:
        outs = outputs or [f"{name}/output_0"]
        self.nodes.append(helper.make_node(kind, inputs, outs, name, domain=domain, **attrs))
        return outs[0]

    def row(self, name: str, width: int) -> str:
        return self.constant(name, self.rng.uniform(0.5, 1.5, width).astype(np.float32))

    def table(self, name: str, rows: int, width: int, bits: int) -> list[str]:
        """Adds random packed weights and returns their names."""
        f, blocks = self.family, -(-width // self.family.block)
        drawn = self.rng.integers(0, 256, (rows, blocks, f.block * bits // 8), np.uint8)
        step = 2.0 / (1 << bits) / np.sqrt(width)
        scales = (self.rng.choice([-1, 1], (rows, blocks)) * self.rng.uniform(step, 2 * step, (rows, blocks))).astype(
            np.float32
        )
        found = [
            self.constant(f"{name}_Q{bits}G{f.block}", drawn),
            self.constant(f"{name}_scale", scales),
        ]
        if f.zeros:
            half = 1 << (bits - 1)
            numbers = self.rng.integers(half - 2, half + 3, (rows, blocks)).astype(np.uint8)
            found.append(self.constant(f"{name}_zp", _packed(numbers, bits)))
        return found

    def linear(self, name: str, x: str, width: int, rows: int, *, bits: int = 4, bias: bool = False) -> str:
        weights = self.table(f"{name}.weight", rows, width, bits)
        if self.family.dequantized:
            y = self.dequantized(name, x, weights, width, rows)
        else:
            sizes = {"K": width, "N": rows, "bits": bits, "block_size": self.family.block}
            y = self.node("MatMulNBits", f"/{name}_Q{bits}", x, *weights, domain=DOMAIN, accuracy_level=0, **sizes)
        return self.node("Add", f"/{name}/Add", y, self.row(f"{name}.bias", rows)) if bias else y

    def dequantized(self, name: str, x: str, weights: list[str], width: int, rows: int) -> str:
        """The same product of 4 bits as DequantizeLinear, Transpose and MatMul."""
        packed, scales, *zeros = (numpy_helper.to_array(next(t for t in self.weights if t.name == n)) for n in weights)
        blocks = scales.shape[1]
        numbers = [_unpacked(packed.reshape(rows, -1))[:, :width], *(_unpacked(z)[:, :blocks] for z in zeros)]
        w, *zero = (numpy_helper.from_array(a.astype(ml_dtypes.uint4), f"{name}.{k}") for k, a in enumerate(numbers))
        if not zero:
            zero = [numpy_helper.from_array(np.full((rows, blocks), 8, ml_dtypes.uint4), f"{name}.zero")]
        self.weights = [t for t in self.weights if t.name not in (weights[0], *weights[2:])] + [w, *zero]
        operands = [w.name, weights[1], zero[0].name]
        wide = self.node("DequantizeLinear", f"/{name}/dq", *operands, axis=-1, block_size=self.family.block)
        return self.node("MatMul", f"/{name}", x, self.node("Transpose", f"/{name}/turned", wide, perm=[1, 0]))

    def norm(self, name: str, x: str, skip: str = "") -> tuple[str, str]:
        """The normalized values, and the sum ``x + skip`` (``x`` without one)."""
        f = self.family
        simple, operands = "" if f.parallel else "Simplified", [self.row(f"{name}.weight", f.width)]
        if f.parallel:
            operands.append(self.row(f"{name}.bias", f.width))
        if not skip:
            more = {"axis": -1, "stash_type": 1}
            return self.node(f"{simple}LayerNormalization", f"/{name}", x, *operands, epsilon=1e-5, **more), x
        outs = [f"/{name}/output_0", "", "", f"/{name}/output_3"]
        kind = f"Skip{simple}LayerNormalization"
        self.node(kind, f"/{name}", x, skip, *operands, domain=DOMAIN, outputs=outs, epsilon=1e-5)
        return outs[0], outs[3]

    def lengths(self) -> tuple[str, str]:
        """seqlens_k and total_sequence_length, from the attention mask."""
        name = "/model/attn_mask"
        total = self.node(
            "ReduceSum", f"{name}/sum", "attention_mask", self.constant("axis", np.array([1])), keepdims=0
        )
        less = self.node("Sub", f"{name}/less", total, self.constant("one", np.array([1])))
        shape = self.node("Shape", f"{name}/shape", "attention_mask")
        width = self.node("Gather", f"{name}/width", shape, self.constant("second", np.array(1)), axis=0)
        return self.node("Cast", f"{name}/k", less, to=6), self.node("Cast", f"{name}/total", width, to=6)

    def heads_norm(self, name: str, x: str, heads: int) -> str:
        f = self.family
        rows = self.node("Reshape", f"/{name}/rows", x, self.constant("by_head", np.array([0, -1, f.size])))
        y = self.node(
            "SimplifiedLayerNormalization", f"/{name}", rows, self.row(f"{name}.weight", f.size), axis=-1, epsilon=1e-6
        )
        return self.node(
            "Reshape", f"/{name}/joined", y, self.constant(f"width{heads}", np.array([0, -1, heads * f.size]))
        )

    def attention(self, i: int, x: str, lengths: tuple[str, str]) -> str:
        f, name = self.family, f"model.layers.{i}.attn"
        q, k = f.heads * f.size, f.groups * f.size
        more: dict[str, Any] = {"bias": f.attention_bias}
        if f.packed_qkv and not f.attention_bias:
            operands = [self.linear(f"{name}.qkv_proj", x, f.width, q + 2 * k), "", ""]
        else:
            parts = (("q", q), ("k", k), ("v", k))
            operands = [self.linear(f"{name}.{n}_proj", x, f.width, rows, **more) for n, rows in parts]
        normed: list[str] = []
        if f.norms_of_heads and f.fused_norms:
            normed = ["", "", "", "", "", *(self.row(f"{name}.{n}_norm.weight", f.size) for n in "qk")]
        elif f.sinks:
            normed = ["", "", self.constant(f"{name}.sinks", np.linspace(-1, 3, f.heads).astype(np.float32))]
        elif f.norms_of_heads:
            operands[:2] = [
                self.heads_norm(f"{name}.{n}_norm", y, h)
                for n, y, h in zip("qk", operands[:2], (f.heads, f.groups), strict=True)
            ]
        turned = f.size // 2 if f.parallel else f.size
        angles = np.arange(POSITIONS)[:, None] / 10000 ** (np.arange(turned // 2) / (turned // 2))
        caches = [
            self.constant(f"{n}_cache", t(angles).astype(np.float32)) for n, t in (("cos", np.cos), ("sin", np.sin))
        ]
        if f.parallel:
            operands[:2] = [
                self.node("RotaryEmbedding", f"/{name}/{n}_rotary", y, "position_ids", *caches, domain=DOMAIN,
                          num_heads=h, rotary_embedding_dim=turned)
                for n, y, h in zip("qk", operands[:2], (f.heads, f.groups), strict=True)
            ]  # fmt: skip
            caches = []
        past = [f"past_key_values.{i}.{n}" for n in ("key", "value")]
        present = [f"present.{i}.{n}" for n in ("key", "value")]
        for names, ports, length in (
            (past, self.inputs, "past_sequence_length"),
            (present, self.outputs, "total_sequence_length"),
        ):
            ports += [helper.make_tensor_value_info(n, 1, ["batch_size", f.groups, length, f.size]) for n in names]
        y = self.node(
            "GroupQueryAttention", f"/{name}/GroupQueryAttention", *operands, *past, *lengths, *caches, *normed, domain=DOMAIN,
            outputs=[f"/{name}/output_0", *present], num_heads=f.heads, kv_num_heads=f.groups, scale=f.scale,
            local_window_size=f.windows[i], softcap=f.softcap, do_rotary=int(not f.parallel), rotary_interleaved=0,
        )  # fmt: skip
        return self.linear(f"{name}.o_proj", y, q, f.width, bias=f.parallel)

    def activated(self, name: str, x: str) -> str:
        if self.family.activation == "gelu":
            return self.node("Gelu", f"/{name}/Gelu", x, approximate="tanh")
        return self.node("Mul", f"/{name}/Mul", x, self.node("Sigmoid", f"/{name}/Sigmoid", x))

    def mlp(self, i: int, x: str) -> str:
        f, name = self.family, f"model.layers.{i}.mlp"
        if f.parallel:
            y = self.activated(name, self.linear(f"{name}.fc1", x, f.width, f.inner, bias=True))
            return self.linear(f"{name}.fc2", y, f.inner, f.width, bias=True)
        gate, up = (self.linear(f"{name}.{n}_proj", x, f.width, f.inner) for n in ("gate", "up"))
        y = self.node("Mul", f"/{name}/gated", self.activated(name, gate), up)
        return self.linear(f"{name}.down_proj", y, f.inner, f.width)

    def embedding(self) -> str:
        f = self.family
        if f.tied:
            weights, *rest = self.table("lm_head.MatMul.weight", f.vocabulary, f.width, f.head_bits)
            flat = self.constant("flat", np.array([f.vocabulary, f.width * f.head_bits // 8]))
            rows = self.node("Reshape", "/model/embed_tokens/Reshape", weights, flat)
            sizes = {"bits": f.head_bits, "block_size": f.block, "gather_axis": 0, "quantize_axis": 1}
            name = "/model/embed_tokens/GatherBlockQuantized"
            x = self.node("GatherBlockQuantized", name, rows, "input_ids", *rest, domain=DOMAIN, **sizes)
        else:
            drawn = self.rng.standard_normal((f.vocabulary, f.width)).astype(np.float32)
            x = self.node(
                "Gather", "/model/embed_tokens/Gather", self.constant("embed_tokens.weight", drawn), "input_ids"
            )
        if f.sandwiched:
            scale = self.constant("embed_scale", np.float32(np.round(np.sqrt(f.width), 2)))
            x = self.node("Mul", "/model/embed_tokens/Mul", x, scale)
        return x

    def layer(self, i: int, x: str, skip: str, lengths: tuple[str, str]) -> tuple[str, str]:
        f, name = self.family, f"model.layers.{i}"
        y, x = self.norm(f"{name}.input_layernorm", x, skip)
        attended = self.attention(i, y, lengths)
        if f.parallel:
            return x, self.node("Add", f"/{name}/residual", attended, self.mlp(i, y))
        if f.sandwiched:
            attended, _ = self.norm(f"{name}.post_attention_layernorm", attended)
        y, x = self.norm(f"{name}.pre_mlp_layernorm", x, attended)
        y = self.mlp(i, y)
        return x, self.norm(f"{name}.post_mlp_layernorm", y)[0] if f.sandwiched else y

    def model(self) -> onnx.ModelProto:
        f = self.family
        for name, width in (("input_ids", "sequence_length"), ("attention_mask", "total_sequence_length")):
            self.inputs.append(helper.make_tensor_value_info(name, 7, ["batch_size", width]))
        if f.parallel:
            self.inputs.append(helper.make_tensor_value_info("position_ids", 7, ["batch_size", "sequence_length"]))
        lengths, x, skip = self.lengths(), self.embedding(), ""
        for i in range(len(f.windows)):
            x, skip = self.layer(i, x, skip, lengths)
        y, _ = self.norm("model.final_norm", x, skip)
        if f.tied:
            weights = self.table("lm_head.MatMul.weight", f.vocabulary, f.width, f.head_bits)
            sizes = {"K": f.width, "N": f.vocabulary, "bits": f.head_bits, "block_size": f.block}
            logits = self.node("MatMulNBits", "/lm_head/MatMul", y, *weights, domain=DOMAIN, **sizes)
        else:
            logits = self.linear("lm_head.MatMul", y, f.width, f.vocabulary, bits=f.head_bits)
        if f.sandwiched:
            cap = self.constant("cap", np.float32(30))
            small = self.node("Tanh", "/lm_head/softcap/Tanh", self.node("Div", "/lm_head/softcap/Div", logits, cap))
            logits = self.node("Mul", "/lm_head/softcap/Mul", small, cap)
        self.node("Identity", "/lm_head/out", logits, outputs=["logits"])
        out = helper.make_tensor_value_info("logits", 1, ["batch_size", "sequence_length", f.vocabulary])
        graph = helper.make_graph(self.nodes, "language_model", self.inputs, [out, *self.outputs], self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _unpacked(packed: Array) -> Array:
    """Rows of numbers of 4 bits."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _packed(numbers: Array, bits: int) -> Array:
    """Rows of numbers, packed from the low bits on; each row starts at a byte."""
    each = 8 // bits
    filled = np.zeros((len(numbers), -(-numbers.shape[1] // each) * each), np.uint8)
    filled[:, : numbers.shape[1]] = numbers
    parts = filled.reshape(len(numbers), -1, each) << (np.arange(each) * bits).astype(np.uint8)
    return np.bitwise_or.reduce(parts, axis=2).astype(np.uint8)


def language_model(family: str, **changes: Any) -> onnx.ModelProto:
    """A model of one of :data:`FAMILIES`, with some of its facts changed.

    Inputs: ``input_ids`` [batch, length], ``attention_mask`` [batch, total], ``past_key_values.N.key`` and ``.value``, and
    ``position_ids`` of phi2. Outputs: ``logits`` [batch, length, vocabulary], ``present.N.key`` and ``.value``.
    """
    return _Writer(replace(FAMILIES[family], **changes)).model()


def feeds_of(model: onnx.ModelProto, length: int, past: int, seed: int = 0) -> dict[str, Array]:
    """Inputs of one sequence: ``length`` new tokens after ``past`` ones."""
    rng, total = np.random.default_rng(seed), past + length
    sizes = {
        "batch_size": 1,
        "sequence_length": length,
        "past_sequence_length": past,
        "total_sequence_length": total,
    }
    feeds: dict[str, Array] = {}
    for port in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in port.type.tensor_type.shape.dim]
        feeds[port.name] = rng.standard_normal(shape).astype(np.float32)
    vocabulary = model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    feeds["input_ids"] = rng.integers(0, vocabulary, (1, length))
    feeds["attention_mask"] = np.ones((1, total), np.int64)
    if "position_ids" in feeds:
        feeds["position_ids"] = np.arange(past, total)[None]
    return feeds
