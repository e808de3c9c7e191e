"""A decoder that computes one token per call, as language models are exported: with caches of fixed capacity or growing ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

VOCABULARY, POSITIONS = 128, 4096


def decoder(
    *, layers: int = 2, heads: int = 4, groups: int = 2, size: int = 16, capacity: int = 32, grows: bool = False,
    grouped: dict[str, Any] | None = None, sinks: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    """Pre-norm layers of grouped-query attention with rotary positions, and gated MLPs (opset 24), seeded.

    Inputs: ``token`` (1, 1), ``at`` (1,), the number of positions that the caches hold, and per layer ``key.N`` and ``value.N``,
    (1, groups, capacity, size), or (1, groups, held, size) for growing caches. Outputs: ``logits`` (1, 1, VOCABULARY), and
    ``new.key.N``, ``new.value.N``: written at ``at`` by TensorScatter, or one longer by Concat.
    ``grouped``: attention, rotary positions and writes are a GroupQueryAttention with these attributes, and with ``sinks``.
    """
    rng, width = np.random.default_rng(0), heads * size
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(name: str, array: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def matrix(name: str, *shape: int) -> str:
        return constant(name, (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def node(kind: str, out: str, *inputs: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [out], out, **attrs))
        return out

    def linear(out: str, x: str, *shape: int) -> str:
        return node("MatMul", out, x, matrix(f"{out}.weight", *shape))

    def split(out: str, x: str, count: int) -> str:
        shape = constant(f"{out}.shape", np.array([1, 1, count, size]))
        return node("Transpose", out, node("Reshape", f"{out}.rows", x, shape), perm=[0, 2, 1, 3])

    def norm(out: str, x: str) -> str:
        return node("RMSNormalization", out, x, constant(f"{out}.scale", np.ones(width, np.float32)))

    def attended(i: int, q: str, k: str, v: str) -> str:
        q, k, v = (split(f"{n}.{i}", x, c) for n, x, c in (("q", q, heads), ("k", k, groups), ("v", v, groups)))
        q, k = (node("RotaryEmbedding", f"turned_{a}", a, cos, sin, "place") for a in (q, k))
        new = []
        for what, value in (("key", k), ("value", v)):
            out = f"new.{what}.{i}"
            if grows:
                new.append(node("Concat", out, f"{what}.{i}", value, axis=2))
            else:
                new.append(node("TensorScatter", out, f"{what}.{i}", value, "at", axis=2))
        lengths = () if grows else ("", "", "", "total")
        y = node("Attention", f"attended.{i}", q, *new, *lengths)
        y = node("Transpose", f"heads.{i}", y, perm=[0, 2, 1, 3])
        return node("Reshape", f"joined.{i}", y, constant(f"joined.{i}.shape", np.array([1, 1, width])))

    def attended_in_groups(i: int, q: str, k: str, v: str) -> str:
        whole = constant(f"capacity.{i}", np.array(capacity, np.int32))
        operands = [q, k, v, f"key.{i}", f"value.{i}", "last", whole, cos, sin]
        operands += ["", "", constant(f"sinks.{i}", np.linspace(-1, 4, heads).astype(np.float32))] if sinks else []
        results = [f"attended.{i}", f"new.key.{i}", f"new.value.{i}"]
        attrs = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": 1, **(grouped or {})}
        nodes.append(
            helper.make_node("GroupQueryAttention", operands, results, results[0], domain="com.microsoft", **attrs)
        )
        return results[0]

    held: Any = "held" if grows else capacity
    longer: Any = "longer" if grows else capacity
    inputs = [helper.make_tensor_value_info("token", 7, [1, 1]), helper.make_tensor_value_info("at", 7, [1])]
    outputs = [helper.make_tensor_value_info("logits", 1, [1, 1, VOCABULARY])]
    angles = np.arange(POSITIONS)[:, None] / 10000 ** (np.arange(size // 2) / (size // 2))
    cos, sin = (constant(n, f(angles).astype(np.float32)) for n, f in (("cos", np.cos), ("sin", np.sin)))
    node("Reshape", "place", "at", constant("one_by_one", np.array([1, 1])))
    node("Add", "total", "at", constant("one", np.array([1])))
    if grouped is not None:
        node("Cast", "last", "at", to=onnx.TensorProto.INT32)
    x = node("Gather", "embedded", matrix("embedding", VOCABULARY, width), "token")
    for i in range(layers):
        y = norm(f"norm.{i}", x)
        for what in ("key", "value"):
            inputs.append(helper.make_tensor_value_info(f"{what}.{i}", 1, [1, groups, held, size]))
            outputs.append(helper.make_tensor_value_info(f"new.{what}.{i}", 1, [1, groups, longer, size]))
        q, k, v = (linear(f"to_{n}.{i}", y, width, c * size) for n, c in (("q", heads), ("k", groups), ("v", groups)))
        y = attended(i, q, k, v) if grouped is None else attended_in_groups(i, q, k, v)
        x = node("Add", f"attention.{i}", x, linear(f"projected.{i}", y, width, width))
        y = norm(f"mlp_norm.{i}", x)
        gate = linear(f"gate.{i}", y, width, 2 * width)
        gate = node("Mul", f"silu.{i}", gate, node("Sigmoid", f"sigmoid.{i}", gate))
        y = node("Mul", f"gated.{i}", gate, linear(f"up.{i}", y, width, 2 * width))
        x = node("Add", f"mlp.{i}", x, linear(f"down.{i}", y, 2 * width, width))
    node("Identity", "logits", linear("scores", norm("last_norm", x), width, VOCABULARY))
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)], ir_version=11
    )


def states(layers: int = 2) -> dict[str, str]:
    """Output -> input of the caches."""
    return {f"new.{what}.{i}": f"{what}.{i}" for i in range(layers) for what in ("key", "value")}


def empty(model: onnx.ModelProto, held: int, dtype: Any = np.float32) -> dict[str, Any]:
    """Caches of zeros, of ``held`` positions where they grow."""
    found = {}
    for v in model.graph.input:
        if v.name.startswith(("key.", "value.")):
            dims = v.type.tensor_type.shape.dim
            found[v.name] = np.zeros([d.dim_value or held for d in dims], dtype)
    return found


def generated(engine: Any, model: onnx.ModelProto, count: int) -> list[Any]:
    """The logits of ``count`` calls with seeded tokens, with caches passed by hand. An engine with state must give the same."""
    found, caches = [], empty(model, 0)
    for at, token in enumerate(tokens(count)):
        results = engine.run({"token": token, "at": np.array([at]), **caches})
        caches = {name: results[f"new.{name}"] for name in caches}
        found.append(results["logits"])
    return found


def tokens(count: int) -> list[Any]:
    """Seeded tokens, (1, 1) each."""
    return list(np.random.default_rng(1).integers(0, VOCABULARY, (count, 1, 1)))
