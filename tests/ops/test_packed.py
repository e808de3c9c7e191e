"""Packed weights: meaning compared with plain NumPy, export with ONNX Runtime, and every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onenode import onnxruntime_run

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.packed_layout import PackedGatherAttrs, PackedMatMulAttrs, packed_rows, row_bytes
from optdnn.types import DTYPES, FP32, INT64, Array, bits_of, is_float, tensor

F = np.float32
N = 6


class Weights:
    """Random packed weights, and their dequantized values (``dense``, [N, K] fp64)."""

    def __init__(self, code: str, K: int, block: int, zeros: str = "", rows: int = 1, n: int = N):
        rng, dtype, blocks = np.random.default_rng(K + block), DTYPES[code], -(-K // block)
        if is_float(dtype):
            numbers = rng.standard_normal((n, K)).astype(dtype)
        else:
            numbers = rng.integers(0, 1 << bits_of(dtype), (n, K), np.uint8).view(dtype)
        self.packed = packed_rows(numbers, block)
        self.scales = rng.uniform(-0.1, 0.1, (-(-n // rows), blocks)).astype(F)
        drawn = {"bytes": np.uint8, "floats": F}.get(zeros)
        bound = 1 << bits_of(dtype)
        self.zeros = None if drawn is None else rng.integers(0, bound, self.scales.shape).astype(drawn)
        if zeros == "floats":
            self.zeros = self.zeros + F(0.25)
        default = 0.0 if is_float(dtype) else bound / 2
        z = np.full(self.scales.shape, default) if self.zeros is None else self.zeros
        where = np.ix_(np.arange(n) // rows, np.arange(K) // block)
        self.dense = (numbers.astype(np.float64) - z.astype(np.float64)[where]) * self.scales[where].astype(np.float64)
        self.attrs = PackedMatMulAttrs(code, K, block, rows)

    def graph(self, *dims: Any) -> Graph:
        graph = Graph()
        x = graph.add_input("x", tensor(FP32, *dims, self.attrs.K))
        operands = [x, *(None if a is None else graph.add_constant(a) for a in (self.packed, self.scales, self.zeros))]
        graph.add_output(graph.add("PackedMatMul", operands, self.attrs).value, "y")
        return graph


def normal(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(F)


CASES = [
    *((c, 64, 16, z, 1) for c in ("uint2", "uint4", "uint8") for z in ("", "bytes", "floats")),
    ("uint4", 80, 32, "bytes", 1),
    ("uint4", 41, 41, "bytes", 1),
    ("uint2", 43, 43, "", 1),
    ("uint8", 40, 40, "", 1),
    ("uint8", 40, 64, "bytes", 1),
    ("uint4", 40, 64, "bytes", 1),
    ("uint8", 80, 32, "bytes", 2),
    ("fp8_e4m3", 64, 32, "", 4),
    ("fp8_e5m2", 40, 40, "", 1),
    ("fp4_e2m1", 64, 32, "", 1),
]
EXPORTED = [c for c in CASES if c[0] != "fp4_e2m1"]


@pytest.mark.parametrize(("code", "K", "block", "zeros", "rows"), CASES)
def test_products_follow_the_layout(code: str, K: int, block: int, zeros: str, rows: int) -> None:
    w, x = Weights(code, K, block, zeros, rows), normal(2, 3, K)
    assert w.packed.shape == (N, row_bytes(code, K, block))
    graph = w.graph(2, 3)
    expected = x.astype(np.float64) @ w.dense.T
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], expected, rtol=1e-5, atol=1e-5)
    exact = evaluate(promote(graph), {"x": x.astype(np.float64)})["y"]
    np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("code", "K", "block", "zeros", "rows"), EXPORTED)
def test_onnx_runtime_runs_the_exported_model(code: str, K: int, block: int, zeros: str, rows: int) -> None:
    w, x = Weights(code, K, block, zeros, rows), normal(2, 3, K)
    model = export_model(w.graph(2, 3)).proto
    (actual,) = onnxruntime_run(model, {"x": x})
    np.testing.assert_allclose(actual, x @ w.dense.T.astype(F), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("code", "K", "block", "zeros"), [("uint4", 64, 16, "bytes"), ("uint8", 40, 40, "")])
def test_rows_of_a_table(code: str, K: int, block: int, zeros: str) -> None:
    w = Weights(code, K, block, zeros)
    graph, indices = Graph(), np.array([[5, 0], [3, 3]])
    operands = [None if a is None else graph.add_constant(a) for a in (w.packed, w.scales, w.zeros)]
    operands.insert(1, graph.add_input("i", tensor(INT64, 2, 2)))
    graph.add_output(graph.add("PackedGather", operands, PackedGatherAttrs(code, K, block, FP32)).value, "y")
    np.testing.assert_allclose(evaluate(graph, {"i": indices})["y"], w.dense[indices], rtol=1e-6)
    (actual,) = onnxruntime_run(export_model(graph).proto, {"i": indices})
    np.testing.assert_allclose(actual, w.dense[indices], rtol=1e-6, atol=1e-6)


def _refused(**changes: Any) -> None:
    w = Weights("uint4", 64, 16, "bytes")
    for name, value in changes.items():
        setattr(w, name, value)
    w.graph(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": np.zeros((N, 31), np.uint8)}, "64 numbers of 4 bits in blocks of 16 take other rows: 31 against 32"),
        ({"packed": np.zeros((N, 32), np.int8)}, "packed weights are uint8"),
        ({"scales": np.ones((N, 3), F)}, "do not fit blocks of 16 of 64"),
        ({"scales": np.ones((N + 1, 4), F)}, "do not fit weights"),
        ({"scales": np.ones((N, 4), np.int32)}, "must be floating-point"),
        ({"zeros": np.ones((N, 3), np.uint8)}, "do not have the shape of the scales"),
        ({"zeros": np.ones((N, 4), np.int32)}, "must be uint8 or of the type of the scales"),
        ({"attrs": PackedMatMulAttrs("int4", 64, 16)}, "numbers of type 'int4'"),
        ({"attrs": PackedMatMulAttrs("uint4", 64, 24)}, "must be a power of two and at least 16"),
        ({"attrs": PackedMatMulAttrs("uint4", 64, 8)}, "must be a power of two and at least 16"),
        ({"attrs": PackedMatMulAttrs("fp8_e4m3", 32, 16)}, "floats have none"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    if "attrs" in changes and changes["attrs"].code == "fp8_e4m3":
        changes = {**changes, "scales": np.ones((N, 2), F)}
    with pytest.raises(ShapeError, match=message):
        _refused(**changes)


def gather_of(w: Weights) -> Graph:
    graph = Graph()
    operands = [None if a is None else graph.add_constant(a) for a in (w.packed, w.scales, w.zeros)]
    operands.insert(1, graph.add_input("i", tensor(INT64, 2)))
    attrs = PackedGatherAttrs(w.attrs.code, w.attrs.K, w.attrs.block_size, FP32)
    graph.add_output(graph.add("PackedGather", operands, attrs).value, "y")
    return graph


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (Weights("fp4_e2m1", 64, 32).graph(2), "products with packed fp4_e2m1"),
        (Weights("uint4", 1024, 512).graph(2), "blocks of 512; ONNX Runtime has at most 256"),
        (gather_of(Weights("fp8_e4m3", 64, 32)), "packed rows of floats"),
        (gather_of(Weights("uint4", 64, 32, "floats")), "float zero points"),
    ],
)
def test_forms_that_onnx_does_not_have(graph: Graph, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export_model(graph)


def test_weights_that_are_computed_have_no_form_in_onnx() -> None:
    graph, a = Graph(), PackedMatMulAttrs("uint4", 32, 16)
    shapes = ((FP32, 2, 32), (np.uint8, N, 16), (FP32, N, 2))
    operands = [graph.add_input(f"x{i}", tensor(*shape)) for i, shape in enumerate(shapes)]
    graph.add_output(graph.add("PackedMatMul", operands, a).value, "y")
    with pytest.raises(UnsupportedError, match="its packed weights are not constant"):
        export_model(graph)
