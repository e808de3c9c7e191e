"""Weights of 8 bits on processors whose sums of 8-bit products saturate."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.eight_bits import REASON, saturating, with_float_weights
from optdnn.lowering.cpu.unsafe import onnxruntime_must_not, openvino_must_not
from optdnn.ops.quant import QuantizeAttrs
from optdnn.passes.support.quantize import SMALL_WEIGHT
from optdnn.runtime.file import requires
from optdnn.runtime.file.requires import EXACT_BYTES, bytes_saturate
from optdnn.types import INT8, UINT8


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without VNNI."""
    monkeypatch.setattr(requires, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(requires.platform, "machine", lambda: "x86_64")


def quantized(largest: int = 127) -> Graph:
    """A product of quantized data with constant weights of up to ``largest``."""
    n = Net()
    x = n.op("QuantizeLinear", n.input(3, 16), 0.02, n.const(128, np.uint8), attrs=QuantizeAttrs(UINT8))
    data = n.op("DequantizeLinear", x, 0.02, n.const(128, np.uint8))
    w = n.rng.integers(-largest, largest, (16, 5), endpoint=True).astype(np.int8)
    w[0, 0] = largest
    return n.done(n.op("MatMul", data, n.op("DequantizeLinear", n.const(w, np.int8), 0.01, n.const(0, np.int8))))


@pytest.mark.parametrize("flag", sorted(EXACT_BYTES))
def test_processors_with_exact_sums_keep_integers(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requires, "cpu_flags", lambda: frozenset({"avx2", flag}))
    monkeypatch.setattr(requires.platform, "machine", lambda: "x86_64")
    graph = quantized()
    assert not bytes_saturate()
    assert with_float_weights(graph) is graph
    assert not saturating(graph)


@pytest.mark.parametrize(("machine", "flags"), [("aarch64", frozenset({"asimd"})), ("x86_64", None)])
def test_other_and_unknown_processors_do_not_saturate(
    machine: str, flags: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requires, "cpu_flags", lambda: flags)
    monkeypatch.setattr(requires.platform, "machine", lambda: machine)
    assert not bytes_saturate()


@pytest.mark.usefixtures("old")
def test_large_weights_become_floats_with_the_same_results() -> None:
    graph = quantized()
    changed = with_float_weights(graph)
    assert graph.kinds()["DequantizeLinear"] == 2, "the graph itself is left alone"
    assert changed.kinds()["DequantizeLinear"] == 1
    assert not saturating(changed)
    x = {"x": np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)}
    (want,), (got,) = evaluate(graph, x).values(), evaluate(changed, x).values()
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.usefixtures("old")
def test_small_weights_stay_integers() -> None:
    graph = quantized(SMALL_WEIGHT)
    assert with_float_weights(graph) is graph
    assert not saturating(graph)
    assert saturating(quantized(SMALL_WEIGHT + 1))


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("must_not", [openvino_must_not, onnxruntime_must_not])
def test_integer_products_with_large_weights_run_elsewhere(must_not: object) -> None:
    n = Net()
    w = np.full((6, 5), -100, np.int8)
    graph = n.done(n.op("MatMulInteger", n.input(4, 6, dtype=np.uint8), n.const(w, np.int8)))
    (product,) = graph.of_kind("MatMulInteger")
    assert must_not(graph)[product.id] == REASON  # type: ignore[operator]
    n = Net()
    small = n.done(n.op("MatMulInteger", n.input(4, 6, dtype=np.uint8), n.const(w // 2, np.int8)))
    assert REASON not in must_not(small).values()  # type: ignore[operator]


@pytest.mark.usefixtures("old")
def test_products_of_two_computed_integers_run_elsewhere() -> None:
    n = Net()
    sides = []
    for name in "ab":
        q = n.op("QuantizeLinear", n.input(8, 8, name=name), 0.02, n.const(0, np.int8), attrs=QuantizeAttrs(INT8))
        sides.append(n.op("DequantizeLinear", q, 0.02, n.const(0, np.int8)))
    graph = n.done(n.op("MatMul", *sides))
    (product,) = graph.of_kind("MatMul")
    assert saturating(graph) == {product.id: REASON}


@pytest.mark.usefixtures("old")
def test_weights_that_no_integers_are_multiplied_by_stay_packed() -> None:
    n = Net()
    w = n.op("DequantizeLinear", n.const(np.full((16, 5), -100), np.int8), 0.01, n.const(0, np.int8))
    graph = n.done(n.op("MatMul", n.input(3, 16), w))
    assert with_float_weights(graph) is graph
    assert not saturating(graph)
