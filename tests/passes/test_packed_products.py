"""assign_precision in w4, w8 and w4a8: the numbers that weights become, the products that take them, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.check import same
from support.net import Net

from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.ops.base import Stage
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs, row_bytes
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.support.block_rounding import BLOCK, CLIPS, packed_floats
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog, outcome
from optdnn.runtime.reference.packed import dequantized, row_numbers
from optdnn.types import BF16, FP16, FP32, Array, DType

K, N = 192, 64


def assign(graph: Graph, plan: str | PrecisionPlan = "w4", target: str = "cpu", log: Any = None) -> PassReport:
    plan = PrecisionPlan.of_option(plan) if isinstance(plan, str) else plan
    report = AssignPrecision()(graph, PassContext(target=target, plan=plan, precision_log=log))
    verify(graph)
    return report


def floats_of(graph: Graph) -> list[Array]:
    """The weights [N, K] of packed products, as floats."""
    found = []
    for op in graph.of_kind("PackedMatMul"):
        weights, scales, zeros = (graph.constant_value(v) for v in op.inputs[1:4])
        assert weights is not None
        assert scales is not None
        sizes = {"code": op.attrs.code, "K": op.attrs.K, "block_size": op.attrs.block_size}
        found.append(dequantized(weights, scales, zeros, **sizes))
    return found


def drawn(rows: int = 8, width: int = K, seed: int = 0) -> Array:
    """Weights with an outlier in some blocks, a block of zeros and one of positive numbers."""
    w = 0.05 * np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    w[0, 3], w[1, :BLOCK], w[2] = 0.6, 0.0, np.abs(w[2])
    return w


# ---------------------------------------------------------------- numbers


def oracle(block: Array, bits: int, dtype: DType) -> tuple[Array, float, float]:
    """Numbers, scale and zero point of one block, for each candidate."""
    levels, found = np.float32((1 << bits) - 1), []

    def tried(scale: Any, zero: Any) -> None:
        numbers = np.clip(np.rint(block / scale) + zero, 0, levels)
        found.append((float(np.square((numbers - zero) * scale - block).sum()), len(found), numbers, scale, zero))

    low, high = min(block.min(), np.float32(0)), max(block.max(), np.float32(0))
    for clip in CLIPS[bits]:
        span = (high - low) * np.float32(clip / float(levels))
        scale = np.float32((span if span > 0 else np.float32(1)).astype(dtype))
        tried(scale, np.clip(np.rint(-low * np.float32(clip) / scale), 0, levels))
    _, _, numbers, _, zero = min(found, key=lambda f: f[:2])
    steps = numbers - zero
    fitted = (steps * block).sum() / max((steps * steps).sum(), np.float32(1))
    if fitted > 0:
        tried(np.float32(np.float32(fitted).astype(dtype)), zero)
    _, _, numbers, scale, zero = min(found, key=lambda f: f[:2])
    return numbers, float(scale), float(zero)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_scales_and_zero_points(bits: int, dtype: DType) -> None:
    weights = drawn()
    made = packed_floats(weights, bits, dtype)
    assert (made.code, made.K, made.block_size) == (f"uint{bits}", K, BLOCK)
    assert made.zeros is not None
    assert made.weights.shape == (8, 2 * BLOCK * bits // 8)
    per_byte = 8 // bits
    stored = np.stack([made.weights >> np.uint8(bits * i) for i in range(per_byte)], axis=-1).reshape(8, -1)
    stored = stored & np.uint8((1 << bits) - 1)
    # Squared errors are sums in fp32. The fitted scale may be exactly as good as its starting value: either may win.
    for row in range(8):
        for b, block in enumerate((weights[row, :BLOCK], weights[row, BLOCK:])):
            numbers, scale, zero = oracle(block, bits, dtype)
            assert made.zeros[row, b] == zero
            np.testing.assert_allclose(made.scales[row, b], scale, rtol=1e-4 if dtype == FP32 else 0)
            np.testing.assert_array_equal(stored[row, b * BLOCK : b * BLOCK + len(block)], numbers)
    assert (made.scales.astype(dtype).astype(np.float32) == made.scales).all()
    assert not floats(made)[1, :BLOCK].any()


def floats(made: Any) -> Array:
    return dequantized(made.weights, made.scales, made.zeros, code=made.code, K=made.K, block_size=made.block_size)


def test_the_clip_is_never_worse_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.concatenate([drawn(64, seed=s) for s in range(3)])
    best = floats(packed_floats(weights, 4, FP16))
    monkeypatch.setitem(CLIPS, 4, (1.0,))
    monkeypatch.setattr(
        "optdnn.passes.support.block_rounding._better", lambda best, error, other, blocks: (best or other, error)
    )
    plain = floats(packed_floats(weights, 4, FP16))
    by_block = [
        [np.square(w - weights)[:, cut].sum(axis=1) for cut in (slice(BLOCK), slice(BLOCK, K))] for w in (best, plain)
    ]
    clipped, whole = map(np.concatenate, by_block)
    assert (clipped <= whole * (1 + 1e-5)).all()
    assert clipped.sum() < 0.9 * whole.sum()


def test_scales_that_fp16_holds_badly_stay_fp32() -> None:
    small = drawn() * np.float32(1e-3)
    made = packed_floats(small, 8, FP16)
    assert (made.scales.astype(FP16).astype(np.float32) != made.scales).any()
    assert np.abs(floats(made) - small).max() <= 0.51 * made.scales.max()


# ---------------------------------------------------------------- products


def network(**attrs: Any) -> Graph:
    """A MatMul with stages, a Gemm with a bias and a stage, a small Gemm, and a product of two computed values."""
    n = Net()
    x = n.input(3, K)
    stages = (Stage("Add", (-1, 2)), Stage("Relu", (-2,)))
    y = n.op("MatMul", x, n.random(K, N), n.random(N), attrs=MatMulAttrs(epilogue=stages))
    residual = (Stage("Relu", (-1,)), Stage("Add", (-2, 3)))
    z = n.op("Gemm", y, n.random(N, N), n.random(N), y, attrs=GemmAttrs(transB=True, epilogue=residual))
    small = n.op("Gemm", z, n.random(N, 8), n.random(8), attrs=GemmAttrs())
    return n.done(small, n.op("MatMul", n.op("Transpose", y, attrs=TransposeAttrs((1, 0))), z))


def test_products_keep_their_stages() -> None:
    graph, log = network(), PrecisionLog()
    exact = graph.copy()
    report = assign(graph, log=log)
    assert graph.kinds()["PackedMatMul"] == 2
    assert [r.rule for r in report.fired] == ["w4", "w4"]
    weights = floats_of(graph)
    for op, w in zip((exact.of_kind("MatMul")[0], exact.of_kind("Gemm")[0]), weights, strict=True):
        held = exact.constant_value(op.inputs[1])
        assert held is not None
        rounded = w if op.kind == "Gemm" else w.T
        assert 0 < np.abs(rounded - held).max() < 0.15 * np.abs(held).max()
        made = exact.add_constant(rounded, "rounded")
        exact.set_op(replace(op, inputs=(op.inputs[0], made, *op.inputs[2:])))
    for seed in (1, 2):
        feeds = random_feeds(graph, seed)
        same(evaluate(graph, feeds), evaluate(exact, feeds), 1e-5)
    rows = {r.asked.kind: r for r in outcome(graph, log) if r.differs}
    assert set(rows) == {"Gemm"}
    assert "packing fewer than 4096 gains nothing" in str(rows["Gemm"].reason)
    assert sorted(r.runs for r in outcome(graph, log)) == ["fp32", "fp32", "w4", "w4"]


def one(kind: str = "MatMul", attrs: Any = None, shape: tuple[int, ...] = (K, N), change: float = 1.0) -> Graph:
    n = Net()
    weights = change * n.rng.standard_normal(shape).astype(np.float32)
    x = n.input(*((2,) * (len(shape) - 2)), 3, K)
    return n.done(n.op(kind, x, weights, attrs=attrs))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (one(shape=(2, K, N)), "3 axes"),
        (one("Gemm", GemmAttrs(alpha=0.5)), "alpha, beta"),
        (one(shape=(K, 8)), "fewer than 4096"),
        (one(change=np.inf), "not finite"),
        (one(change=1e20), "larger than 1e[+]18"),
    ],
    ids=["rank", "alpha", "small", "infinite", "large"],
)
def test_refusals(graph: Graph, because: str) -> None:
    log = PrecisionLog()
    kinds = graph.kinds()
    report = assign(graph, log=log)
    assert graph.kinds() == kinds
    (refusal,) = report.refused
    assert refusal.rule == "w4"
    assert re.search(because, refusal.reason), refusal.reason
    assert list(log.refused.values()) == [refusal.reason.partition(": ")[2]]


def test_named_operators_without_such_a_form() -> None:
    graph = network()
    names = {op.kind: next(iter(op.src)) for op in graph.ops() if op.kind in ("MatMul", "Transpose")}
    report = assign(graph, PrecisionPlan("fp32", dict.fromkeys(names.values(), "w8")))
    reasons = sorted(r.reason for r in report.refused)
    assert reasons == [
        "MatMul keeps floats: its weights are not constant",
        "Transpose keeps floats: Transpose has no form with packed weights",
    ]


def test_weights_that_others_read_stay_floats() -> None:
    n = Net()
    x, table = n.input(3, K), n.random(K, N)
    y = n.op("MatMul", x, table)
    graph = n.done(y, n.op("Relu", table))
    assert "(Relu) reads its weights as floats" in assign(graph).refused[0].reason
    n = Net()
    x, table = n.input(3, K), n.random(K, N)
    graph = n.done(n.op("MatMul", x, table), n.op("MatMul", n.op("Relu", x), table))
    assert len(assign(graph, "w8").fired) == 2
    pair = [op.inputs[1:4] for op in graph.of_kind("PackedMatMul")]
    assert all(np.array_equal(graph.constant_value(a), graph.constant_value(b)) for a, b in zip(*pair, strict=True))


def test_pins() -> None:
    graph = network()
    product = graph.of_kind("MatMul")[0]
    first = next(name for name in product.src)
    assign(graph, PrecisionPlan("w4", {first: "fp16"}, "fp16"), "cuda:sm_90a")
    assert graph.kinds()["PackedMatMul"] == 1
    graph = network()
    assign(graph, PrecisionPlan("fp16", {first: "w8"}, "fp16"), "cuda:sm_90a")
    (op,) = graph.of_kind("PackedMatMul")
    assert op.attrs.code == "uint8"
    assert [graph.type(v).dtype for v in op.inputs[:3] if v is not None] == [FP16, np.uint8, FP16]


def test_networks_of_16_bits() -> None:
    n = Net(np.float16)
    graph = n.done(n.op("MatMul", n.input(3, K), n.random(K, N, scale=0.1)))
    exact, log = graph.copy(), PrecisionLog()
    assign(graph, "w4+fp16", "cuda:sm_90a", log)
    (op,) = graph.of_kind("PackedMatMul")
    assert [graph.type(v).dtype for v in (*op.inputs[:3], op.value) if v is not None] == [FP16, np.uint8, FP16, FP16]
    assert [r.runs for r in outcome(graph, log)] == ["w4"]
    feeds = random_feeds(graph, 1)
    (wanted,), (found,) = evaluate(exact, feeds).values(), evaluate(graph, feeds).values()
    error = np.linalg.norm(found.astype(np.float32) - wanted) / np.linalg.norm(wanted.astype(np.float32))
    assert 0.01 < error < 0.15


# ---------------------------------------------------------------- w4a8


@pytest.mark.parametrize(("plan", "target"), [("w4a8", "cpu"), ("w4a8", ""), ("w4a8+bf16", "cuda:sm_90a")])
def test_rows_may_be_rounded(plan: str, target: str) -> None:
    """The weights are those of w4; only the attribute differs."""
    graph, plain, log = network(), network(), PrecisionLog()
    report = assign(graph, plan, target, log)
    assign(plain, plan.replace("a8", ""), target)
    assert [r.rule for r in report.fired if r.rule != "cast"] == ["w4a8", "w4a8"]
    assert list(log.packed.values()) == ["w4a8", "w4a8"]
    pairs = list(zip(graph.of_kind("PackedMatMul"), plain.of_kind("PackedMatMul"), strict=True))
    assert len(pairs) == 2
    for op, other in pairs:
        assert op.attrs == replace(other.attrs, rounded_rows=True)
        for a, b in zip(op.inputs[1:4], other.inputs[1:4], strict=True):
            assert np.array_equal(graph.constant_value(a), plain.constant_value(b))  # type: ignore[arg-type]
    assert {r.asked.kind: r.runs for r in outcome(graph, log)}["MatMul"] == ("fp32" if "16" not in plan else "bf16")
    assert [r.runs for r in outcome(graph, log)].count("w4a8") == 2


def test_rounded_rows_are_multiplied() -> None:
    graph = one()
    assign(graph, "w4a8")
    feeds = random_feeds(graph, 1)
    (x,), (got,), (w,) = feeds.values(), evaluate(graph, feeds).values(), floats_of(graph)
    numbers, scales = row_numbers(x)
    same({"y": got}, {"y": (numbers * scales[:, None]) @ w.T}, 1e-5)
    error = np.linalg.norm(got - x @ w.T) / np.linalg.norm(got)
    assert 1e-3 < error < 0.02, "a row's numbers are off by up to half of a 127th of its largest"


@pytest.mark.parametrize(
    ("plan", "target", "because"),
    [
        ("w4a8+fp16", "cuda:sm_80", "no kernels for sm_80 that round rows to int8"),
        ("w4a8+fp16", "cuda:sm_120", "no kernels for sm_120"),
        ("w4a8", "cuda:sm_90a", "rows of 16-bit floats, not fp32"),
    ],
)
def test_targets_without_rounded_rows_run_w4(plan: str, target: str, because: str) -> None:
    graph, log = one(), PrecisionLog()
    report = assign(graph, plan, target, log)
    (op,) = graph.of_kind("PackedMatMul")
    assert not op.attrs.rounded_rows
    (row,) = outcome(graph, log)
    assert (row.asked.precision, row.runs) == ("w4a8", "w4")
    assert because in str(row.reason)
    assert [f.rule for f in report.fired if f.rule != "cast"] == ["w4"]
    (refusal,) = report.refused
    assert (refusal.rule, refusal.nodes) == ("w4a8", row.asked.nodes)


def packed_by_the_model() -> Graph:
    """Products with packed weights of 4, 8 and 2 bits."""
    n = Net()
    x = n.input(3, K)

    def product(code: str) -> Any:
        width, shape = row_bytes(code, K, 32), (N, K // 32)
        numbers = n.const(n.rng.integers(0, 256, (N, width)), np.uint8)
        return n.op("PackedMatMul", x, numbers, n.random(*shape, scale=0.01), attrs=PackedMatMulAttrs(code, K, 32))

    return n.done(*(product(code) for code in ("uint4", "uint8", "uint2")))


def test_packed_weights_of_the_model() -> None:
    graph, log = packed_by_the_model(), PrecisionLog()
    exact = graph.copy()
    report = assign(graph, "w4a8", log=log)
    assert [op.attrs.rounded_rows for op in graph.of_kind("PackedMatMul")] == [True, False, False]
    four, eight, two = outcome(graph, log)
    assert [r.runs for r in (four, eight, two)] == ["w4a8", "w8", "fp32"]
    assert not four.differs
    assert eight.reason == "its packed weights are uint8, not uint4"
    assert [f.nodes for f in report.fired] == [four.asked.nodes]
    assert [r.nodes for r in report.refused] == [eight.asked.nodes, two.asked.nodes]
    feeds = random_feeds(graph, 1)
    moved = [
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(evaluate(graph, feeds).values(), evaluate(exact, feeds).values(), strict=True)
    ]
    assert 1e-3 < moved[0] < 0.02
    assert moved[1:] == [0, 0]


def test_pins_of_packed_weights_of_the_model() -> None:
    for default, pin, wanted in (("fp32", "w4a8", True), ("w4a8", "fp32", False), ("w4", "fp32", False)):
        graph, log = packed_by_the_model(), PrecisionLog()
        name = next(iter(graph.of_kind("PackedMatMul")[0].src))
        assign(graph, PrecisionPlan(default, {name: pin}), log=log)
        assert graph.of_kind("PackedMatMul")[0].attrs.rounded_rows == wanted
        row = next(r for r in outcome(graph, log) if name in r.asked.nodes)
        assert not row.differs
        assert row.runs == pin


def test_data_are_used_as_in_w4() -> None:
    weights = {}
    for plan in ("w4", "w4a8"):
        graph = one()
        data = np.random.default_rng(0).standard_normal((64, K)).astype(np.float32)
        moments = data.T @ data

        def seen(graph: Graph, values: Any, moments: Array = moments) -> Any:
            return [(v, moments) for v in values]

        context = PassContext(target="cpu", plan=PrecisionPlan.of_option(plan), moments=seen)
        AssignPrecision()(graph, context)
        (weights[plan],) = floats_of(graph)
    nearest = one()
    assign(nearest)
    np.testing.assert_array_equal(weights["w4"], weights["w4a8"])
    assert not np.array_equal(weights["w4"], floats_of(nearest)[0])
