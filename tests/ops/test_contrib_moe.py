"""Mixtures of experts against ONNX Runtime; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onenode import normal, onnxruntime_run
from onnx import helper, numpy_helper

from optdnn.errors import OptdnnError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.types import Array

F = np.float32
EXPERTS, WIDTH, INNER = 5, 64, 32


def model(op: str, operands: list[Array | None], **attrs: Any) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A node whose first two operands are inputs."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    while not names[-1]:
        names.pop()
    feeds = {f"x{i}": x for i, x in enumerate(operands[:2]) if x is not None}
    weights = [numpy_helper.from_array(x, f"x{i}") for i, x in enumerate(operands) if i > 1 and x is not None]
    node = helper.make_node(op, names, ["y"], "n", domain="com.microsoft", **attrs)
    ports = [helper.make_tensor_value_info(name, 1, x.shape) for name, x in feeds.items()]
    graph = helper.make_graph([node], "g", ports, [onnx.ValueInfoProto(name="y")], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def same(op: str, operands: list[Array | None], tol: float, **attrs: Any) -> None:
    m, feeds = model(op, operands, **attrs)
    (actual,), (wanted,) = evaluate(import_model(m), feeds).values(), onnxruntime_run(m, feeds)
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual, wanted, rtol=tol, atol=tol * np.abs(wanted).max())


SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0}


@pytest.mark.parametrize(
    "attrs",
    [
        {"activation_type": "relu", "k": 1},
        {"activation_type": "gelu", "k": 2, "normalize_routing_weights": 1},
        {"activation_type": "silu", "k": 3},
        {**SWIGLU, "k": 2, "normalize_routing_weights": 1, "swiglu_limit": 2.0},
    ],
)
def test_experts(attrs: dict[str, Any]) -> None:
    fused = 2 if attrs["activation_type"] == "swiglu" else 1
    operands: list[Array | None] = [
        normal(2, 3, WIDTH),
        normal(6, EXPERTS, seed=1),
        normal(EXPERTS, fused * INNER, WIDTH, seed=2) / 8,
        normal(EXPERTS, fused * INNER, seed=3),
        normal(EXPERTS, WIDTH, INNER, seed=4) / 6,
        normal(EXPERTS, WIDTH, seed=5),
    ]
    same("MoE", operands, 1e-4, **attrs)


def packed(rows: int, depth: int, bits: int, block: int, zeros: bool, seed: int) -> list[Array | None]:
    """Weights, scales and zero points of all experts."""
    rng, blocks = np.random.default_rng(seed), depth // block if block else 1
    w = rng.integers(0, 256, (EXPERTS, rows, depth * bits // 8), np.uint8)
    s = rng.uniform(0.5, 1.5, (EXPERTS, rows, blocks) if block else (EXPERTS, rows)).astype(F)
    line = -(-blocks * bits // 8)
    shape = (EXPERTS, rows, line) if block else (EXPERTS, rows * bits // 8)
    return [
        w,
        (s / (1 << bits) / np.sqrt(depth) * 4).astype(F),
        rng.integers(0, 256, shape, np.uint8) if zeros else None,
    ]


@pytest.mark.parametrize(
    ("bits", "block", "zeros", "attrs"),
    [
        (4, 0, False, {"activation_type": "relu", "k": 2, "normalize_routing_weights": 1}),
        (4, 32, False, {**SWIGLU, "k": 2, "normalize_routing_weights": 1}),
        (4, 16, True, {"activation_type": "silu", "k": 1, "normalize_routing_weights": 1}),
        (4, 0, True, {"activation_type": "silu", "k": 2, "router_weights": True}),
        (8, 32, False, {"activation_type": "gelu", "k": 3, "normalize_routing_weights": 1, "router_weights": True}),
        (8, 0, True, {"activation_type": "identity", "k": 2, "normalize_routing_weights": 1}),
    ],
)
def test_packed_experts(bits: int, block: int, zeros: bool, attrs: dict[str, Any]) -> None:
    attrs, fused = dict(attrs), 2 if attrs["activation_type"] == "swiglu" else 1
    w1, s1, z1 = packed(fused * INNER, WIDTH, bits, block, zeros, 1)
    w2, s2, z2 = packed(WIDTH, INNER, bits, block, zeros, 2)
    own = normal(6, EXPERTS, seed=9) ** 2 if attrs.pop("router_weights", False) else None
    start = [normal(6, WIDTH), normal(6, EXPERTS, seed=1)]
    operands = [*start, w1, s1, None, w2, s2, None, None, None, None, z1, z2, None, own]
    sizes = {"expert_weight_bits": bits, **({"block_size": block} if block else {})}
    same("QMoE", operands, 2e-2 if bits == 8 else 2e-3, **sizes, **attrs)


def test_a_separate_gate() -> None:
    """ONNX Runtime has no third layer on the CPU. Results must equal those of a fused gate."""
    gate, line, down = (
        normal(EXPERTS, INNER, WIDTH, seed=2),
        normal(EXPERTS, INNER, WIDTH, seed=3),
        normal(EXPERTS, WIDTH, INNER),
    )
    start: list[Array | None] = [normal(4, WIDTH), normal(4, EXPERTS, seed=1)]
    attrs = {**SWIGLU, "k": 2}
    results = []
    for fusion, first, third in (
        (0, gate, line),
        (1, np.stack([gate, line], 2).reshape(EXPERTS, 2 * INNER, WIDTH), None),
        (2, np.concatenate([gate, line], 1), None),
    ):
        m, feeds = model("MoE", [*start, first, None, down, None, third], **{**attrs, "swiglu_fusion": fusion})
        results.append(evaluate(import_model(m), feeds)["y"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results[0], results[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "attrs", "error", "message"),
    [
        ({}, {"k": 6}, ShapeError, "selects 6 of 5 experts"),
        ({}, {"use_sparse_mixer": 1}, UnsupportedError, "use_sparse_mixer=1"),
        ({}, {"activation_type": "tanh"}, UnsupportedError, "the activation tanh"),
        ({}, {"quant_type": "fp4"}, UnsupportedError, "quant_type=fp4"),
        ({}, {"weights_prepacked": 1}, UnsupportedError, "weights_prepacked=1"),
        ({}, {"block_size": 24}, ShapeError, "a block must be a power of two"),
        ({2: np.zeros((EXPERTS, INNER, 3), np.uint8)}, {}, ShapeError, "are not 64 numbers of 4 bits"),
        ({3: np.zeros((EXPERTS, 3), F)}, {}, ShapeError, "scales .* do not fit"),
        ({11: np.zeros((EXPERTS, 3), np.uint8)}, {}, ShapeError, "zero points .* do not fit"),
        ({14: normal(6, 2)}, {}, ShapeError, "router_weights .* are not of the shape"),
    ],
)
def test_refusals(changes: dict[int, Array], attrs: dict[str, Any], error: type[OptdnnError], message: str) -> None:
    w1, s1, _ = packed(INNER, WIDTH, 4, 0, False, 1)
    w2, s2, _ = packed(WIDTH, INNER, 4, 0, False, 2)
    operands = [normal(6, WIDTH), normal(6, EXPERTS), w1, s1, None, w2, s2, *[None] * 8]
    for slot, array in changes.items():
        operands[slot] = array
    m, _ = model("QMoE", operands, **{"k": 2, **attrs})
    with pytest.raises(error, match=message):
        import_model(m)
