"""Language models of public shapes with seeded weights: the cost of decoding, one token per sequence and call.

A workload is ``decoders/NAME:BATCH`` with settings:

- ``layers``: fewer layers than the model has, for a short measurement.
- ``bits``: 16 (MatMul), or 4 or 8 (MatMulNBits in blocks of 128).
- ``row_bits``: with 8, the rows of these products may be rounded to int8.
- ``capacity``: the capacity of the caches. ``position``: the number of tokens that they hold.
- ``tokens``: the length of a prompt that one call reads from position 0 on; logits are those of its last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.workloads import Workload
from optdnn.types import FP16, Array

BLOCK = 128
POOL = 1 << 24
"""Elements of the pool of random numbers from which all weights are taken."""


@dataclass(frozen=True)
class Decoder:
    """Grouped-query attention with rotary positions, and gated MLPs. ``heads`` of ``size`` features share ``groups`` of keys."""

    hidden: int
    inner: int
    heads: int
    groups: int
    size: int
    layers: int
    vocabulary: int
    capacity: int = 4096
    position: int = 1024
    bits: int = 16
    row_bits: int = 16
    batch: int = 1
    tokens: int = 1

    @classmethod
    def of(cls, workload: Workload) -> Decoder:
        """The decoder of a workload of this source."""
        found = replace(DECODERS[workload.short], batch=workload.batch, **dict(workload.settings))
        return found if found.tokens == 1 else replace(found, position=0)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Name -> (depth, columns) of the products of a layer."""
        return {
            "q": (self.hidden, self.heads * self.size),
            "k": (self.hidden, self.groups * self.size),
            "v": (self.hidden, self.groups * self.size),
            "o": (self.heads * self.size, self.hidden),
            "gate": (self.hidden, self.inner),
            "up": (self.hidden, self.inner),
            "down": (self.inner, self.hidden),
        }

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads: each weight once (the table of embeddings is not read), and the filled part of the caches."""
        weights = self.layers * sum(k * n for k, n in self.products.values()) + self.hidden * self.vocabulary
        scales = 0.0 if self.bits == 16 else 2 / BLOCK
        cache = 4 * self.layers * self.batch * self.groups * self.size * (self.position + self.tokens)
        return int(weights * (self.bits / 8 + scales)) + cache

    @property
    def flops(self) -> int:
        """Operations of a call: products, and attention of each token to the tokens up to itself.

        The last layer counts only what the last logits need: keys and values of all tokens, and everything else for one token."""
        product = {n: k * columns for n, (k, columns) in self.products.items()}
        layer, keys = sum(product.values()), product["k"] + product["v"]
        products = self.tokens * ((self.layers - 1) * layer + keys) + layer - keys + self.hidden * self.vocabulary
        pairs = self.tokens * self.position + self.tokens * (self.tokens + 1) // 2
        attention = 2 * self.heads * self.size * ((self.layers - 1) * pairs + self.position + self.tokens)
        return 2 * self.batch * (products + attention)


DECODERS = {
    "llama_8b": Decoder(4096, 14336, 32, 8, 128, 32, 128256),
    "llama_1b": Decoder(2048, 8192, 32, 8, 64, 16, 128256),
    "small_16x2048": Decoder(2048, 4096, 32, 8, 64, 16, 128, position=16),
}
"""Llama 3 8B, Llama 3.2 1B, and a small one of 16 layers."""


@lru_cache(maxsize=1)
def _pool() -> Array:
    return np.random.default_rng(0).standard_normal(POOL, np.float32).astype(FP16)


class ModelWriter:
    """Writes the model node by node. Each weight is a different part of one pool of random numbers."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.rng = decoder, np.random.default_rng(1)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def constant(self, name: str, array: Array) -> str:
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, out: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [out], out, domain=domain, **attributes))
        return out

    def drawn(self, *shape: int, scale: float = 1.0) -> Array:
        """Normal numbers, times ``scale``."""
        few = np.roll(_pool(), -int(self.rng.integers(1 << 20)))[: math.prod(shape)]
        return np.resize(few * FP16.type(scale), shape)

    def linear(self, out: str, x: str, depth: int, columns: int) -> str:
        bits = self.decoder.bits
        if bits == 16:
            weights = self.drawn(depth, columns, scale=depth**-0.5)
            return self.node("MatMul", out, x, self.constant(f"{out}.weight", weights))
        packed = self.rng.integers(0, 256, (columns, depth // BLOCK, BLOCK * bits // 8), np.uint8)
        scales = self.rng.uniform(3, 4, (columns, depth // BLOCK)) / ((1 << bits) * depth**0.5)
        scales *= self.rng.choice((-1, 1), scales.shape)
        weights = [self.constant(f"{out}.{n}", a) for n, a in (("weight", packed), ("scale", scales.astype(FP16)))]
        sizes = {"K": depth, "N": columns, "bits": bits, "block_size": BLOCK}
        sizes |= {"accuracy_level": 4} if self.decoder.row_bits == 8 else {}
        return self.node("MatMulNBits", out, x, *weights, domain="com.microsoft", **sizes)

    def norm(self, out: str, x: str) -> str:
        scale = self.constant(f"{out}.scale", np.ones(self.decoder.hidden, FP16))
        return self.node("RMSNormalization", out, x, scale, axis=-1, epsilon=1e-5)

    def heads(self, out: str, x: str, count: int) -> str:
        shape = self.constant(
            f"{out}.shape", np.array([self.decoder.batch, self.decoder.tokens, count, self.decoder.size])
        )
        return self.node("Transpose", out, self.node("Reshape", f"{out}.rows", x, shape), perm=[0, 2, 1, 3])

    def layer(self, i: int, x: str, angles: tuple[str, str]) -> str:
        d = self.decoder
        y = self.norm(f"norm.{i}", x)
        projected = {n: self.linear(f"{n}.{i}", y, *d.products[n]) for n in "qkv"}
        counts = {"q": d.heads, "k": d.groups, "v": d.groups}
        q, k, v = (self.heads(f"{n}.{i}.heads", projected[n], counts[n]) for n in "qkv")
        q, k = (self.node("RotaryEmbedding", f"{t}.turned", t, *angles, "place") for t in (q, k))
        caches = [
            self.node("TensorScatter", f"new.{n}.{i}", f"{n}.{i}.past", t, "at", axis=2)
            for n, t in (("key", k), ("value", v))
        ]
        y = self.node("Attention", f"attended.{i}", q, *caches, "", "", "", "total", is_causal=int(d.tokens > 1))
        y = self.node("Transpose", f"attended.{i}.rows", y, perm=[0, 2, 1, 3])
        joined = self.constant(f"joined.{i}.shape", np.array([d.batch, d.tokens, d.heads * d.size]))
        y = self.node("Reshape", f"joined.{i}", y, joined)
        x = self.node("Add", f"attention.{i}", x, self.linear(f"o.{i}", y, *d.products["o"]))
        y = self.norm(f"mlp_norm.{i}", x)
        gate, up = (self.linear(f"{n}.{i}", y, *d.products[n]) for n in ("gate", "up"))
        gate = self.node("Mul", f"silu.{i}", gate, self.node("Sigmoid", f"sigmoid.{i}", gate))
        y = self.linear(f"down.{i}", self.node("Mul", f"gated.{i}", gate, up), *d.products["down"])
        return self.node("Add", f"mlp.{i}", x, y)

    def model(self) -> onnx.ModelProto:
        d = self.decoder
        self.node("Reshape", "place", "at", self.constant("column", np.array([d.batch, 1])))
        if d.tokens > 1:
            self.nodes[-1].output[0] = "begin"
            self.node("Add", "place", "begin", self.constant("following", np.arange(d.tokens)[None]))
        self.node("Add", "total", "at", self.constant("count", np.array([d.tokens])))
        turns = np.arange(d.capacity)[:, None] / 500000 ** (np.arange(d.size // 2) / (d.size // 2))
        angles = self.constant("cos", np.cos(turns).astype(FP16)), self.constant("sin", np.sin(turns).astype(FP16))
        x = self.node("Gather", "embedded", self.constant("embedding", self.drawn(d.vocabulary, d.hidden)), "token")
        for i in range(d.layers):
            x = self.layer(i, x, angles)
        if d.tokens > 1:
            x = self.node("Gather", "last", x, self.constant("last_one", np.array([d.tokens - 1])), axis=1)
        self.node("Identity", "logits", self.linear("head", self.norm("last_norm", x), d.hidden, d.vocabulary))
        cache = [d.batch, d.groups, d.capacity, d.size]
        names = [f"{n}.{i}" for i in range(d.layers) for n in ("key", "value")]
        inputs = [("token", TensorProto.INT64, [d.batch, d.tokens]), ("at", TensorProto.INT64, [d.batch])]
        inputs += [(f"{n}.past", TensorProto.FLOAT16, cache) for n in names]
        outputs = [("logits", TensorProto.FLOAT16, [d.batch, 1, d.vocabulary])]
        outputs += [(f"new.{n}", TensorProto.FLOAT16, cache) for n in names]
        ports = [[helper.make_tensor_value_info(*port) for port in each] for each in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, "decoder", *ports, self.tensors)
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def model(workload: Workload) -> onnx.ModelProto:
    """The ONNX model (opset 24, fp16). Inputs: ``token`` [batch, tokens], ``at`` [batch], ``key.N.past`` and ``value.N.past``."""
    return ModelWriter(Decoder.of(workload)).model()


def feeds(workload: Workload, seed: int) -> dict[str, Array]:
    """Random tokens at the workload's position, and caches of random numbers."""
    d, rng = Decoder.of(workload), np.random.default_rng(seed)
    cache = rng.standard_normal((d.batch, d.groups, d.capacity, d.size), np.float32).astype(FP16)
    names = [f"{n}.{i}.past" for i in range(d.layers) for n in ("key", "value")]
    given = {"token": rng.integers(0, d.vocabulary, (d.batch, d.tokens)), "at": np.full(d.batch, d.position)}
    return {**given, **dict.fromkeys(names, cache)}


def states(workload: Workload) -> Mapping[str, str]:
    """Output -> input of the caches."""
    layers = range(Decoder.of(workload).layers)
    return {f"new.{n}.{i}": f"{n}.{i}.past" for i in layers for n in ("key", "value")}
