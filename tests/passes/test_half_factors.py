"""half_factors: products in tf32 whose rows have a known bound read fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds, tactics

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.verify import verify
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.half_factors import HalfFactors
from optdnn.types import BF16, FP16, FP32, TensorType

GPU = PassContext(precision="tf32", target="cuda:sm_90a")


def assigned(graph: Graph) -> Graph:
    """The graph with fused epilogues and products in tf32."""
    FuseEpilogue()(graph, GPU)
    AssignPrecision()(graph, GPU)
    return graph


def normed(n: Net, rows: int = 6, width: int = 32, scale: float = 1.0) -> tuple[Value, Value]:
    """An input, and its rows normalized."""
    x = n.input(2, rows, width)
    factor = n.const(scale * n.rng.uniform(0.5, 2.0, width))
    return x, n.op("LayerNormalization", x, factor, n.random(width, scale=scale), attrs=LayerNormAttrs(-1, 1e-3))


def weights(n: Net, *shape: int) -> Value:
    return n.random(*shape, scale=0.2)


def perceptron(n: Net, residual: bool = True) -> Graph:
    """A norm, two products with biases and an activation between them, and the residual."""
    x, y = normed(n)
    y = n.op("Gelu", n.op("Add", n.op("MatMul", y, weights(n, 32, 64)), n.random(64)))
    y = n.op("Add", n.op("MatMul", y, weights(n, 64, 32)), n.random(32))
    return assigned(n.done(n.op("Add", y, x) if residual else y))


def of_kind(graph: Graph, kind: str) -> list[Op]:
    return [op for op in graph.order() if op.kind == kind]


def stages(op: Op) -> list[str]:
    return [s.kind for s in op.attrs.epilogue]


def test_a_perceptron_stores_fp16_between_its_products_and_adds_its_residual_in_fp32() -> None:
    graph, _ = check_pass(HalfFactors(), perceptron(Net()), changes=2, promoted_changes=0, context=GPU)
    first, second = of_kind(graph, "MatMul")
    assert stages(first) == ["Cast", "Add", "Gelu", "Cast"]
    assert stages(second) == ["Cast", "Add", "Add"]
    assert [op.outputs[0].type.dtype for op in (first, second)] == [FP16, FP32]
    assert {graph.type(v).dtype for op in (first, second) for v in op.inputs[:2]} == {FP16}  # type: ignore[arg-type]
    assert [op.attrs.factors for op in (first, second)] == ["fp16", "fp16"]
    (cast,) = of_kind(graph, "Cast")
    assert graph.op(cast.inputs[0]).kind == "LayerNormalization"  # type: ignore[arg-type]


def test_the_bias_of_a_gemm_stays_fp32() -> None:
    n = Net()
    x = n.op("Softmax", n.input(6, 32))
    y = n.op(
        "Gemm",
        n.op("RMSNormalization", x, n.positive(32)),
        weights(n, 24, 32),
        n.random(24),
        attrs=GemmAttrs(transB=True),
    )
    graph, _ = check_pass(HalfFactors(), assigned(n.done(y)), changes=1, promoted_changes=0, context=GPU)
    (made,) = of_kind(graph, "Gemm")
    assert (stages(made), made.input(2), graph.type(made.inputs[-1]).dtype) == (["Cast", "Add"], None, FP32)  # type: ignore[arg-type]


def attention(n: Net, mask: Any = None, causal: bool = False) -> Graph:
    """A norm, a joint product of queries, keys and values, attention and the projection of its result."""
    _, y = normed(n, 8)
    y = n.op("MatMul", y, weights(n, 32, 96))
    q, k, v = n.op("Split", y, n.ints(32, 32, 32), attrs=SplitAttrs(axis=-1), outputs=3)
    heads = [n.transposed(n.reshaped(a, 2, 8, 4, 8), 0, 2, 1, 3) for a in (q, k, v)]
    more = [] if mask is None else [mask(n)]
    y = n.op("Attention", *heads, *more, attrs=AttentionAttrs(is_causal=causal))
    y = n.reshaped(n.transposed(y, 0, 2, 1, 3), 2, 8, 32)
    return assigned(n.done(n.op("MatMul", y, weights(n, 32, 16))))


@pytest.mark.parametrize(
    "mask",
    [None, lambda n: n.const(n.rng.standard_normal((8, 8))), lambda n: n.const(np.triu(np.full((8, 8), -1e9), 1))],
)
def test_attention_reads_and_stores_fp16(mask: Callable[[Net], Value] | None) -> None:
    graph, _ = check_pass(HalfFactors(), attention(Net(), mask), changes=3, promoted_changes=0, context=GPU)
    (made,) = of_kind(graph, "Attention")
    assert {graph.type(v).dtype for v in (*made.inputs, made.value) if v is not None} == {FP16}
    assert {op.outputs[0].type.dtype for op in graph.ops() if op.kind in ("Split", "Transpose")} == {FP16}


def gated(n: Net, scale: float = 0.2) -> Graph:
    """A gated linear unit and the product after it."""
    _, y = normed(n)
    a, b = (n.op("MatMul", y, n.random(32, 48, scale=scale)) for _ in range(2))
    y = n.op("Mul", a, n.op("Gelu", b))
    return assigned(n.done(n.op("MatMul", y, weights(n, 48, 32))))


def test_both_products_of_a_gated_unit_are_fp16() -> None:
    graph, _ = check_pass(HalfFactors(), gated(Net()), changes=3, promoted_changes=0, context=GPU)
    first, second, _ = of_kind(graph, "MatMul")
    assert sorted([stages(first), stages(second)]) == [["Cast", "Cast", "Mul"], ["Cast", "Gelu", "Cast"]]


def test_a_gated_unit_beyond_fp16_stays_as_it_is() -> None:
    """Its two products have bounds, but not their product."""
    report = check_refused(HalfFactors(), gated(Net(), scale=50.0), because="one launch computes it", context=GPU)
    assert any("fp16 is exact for bounds from 0.25 to 60000" in r.reason for r in report.refused)


def test_a_constant_first_factor() -> None:
    n = Net()
    _, y = normed(n, 16)
    graph, _ = check_pass(
        HalfFactors(),
        assigned(n.done(n.op("MatMul", weights(n, 24, 16), y))),
        changes=1,
        promoted_changes=0,
        context=GPU,
    )
    (made,) = of_kind(graph, "MatMul")
    assert {graph.type(v).dtype for v in made.inputs} == {FP16}  # type: ignore[arg-type]


def test_a_norm_keeps_fp32_for_other_readers() -> None:
    n = Net()
    _, y = normed(n)
    z = n.op("Add", n.op("MatMul", y, weights(n, 32, 32)), y)
    graph, _ = check_pass(HalfFactors(), assigned(n.done(z)), changes=1, promoted_changes=0, context=GPU)
    (made,) = of_kind(graph, "MatMul")
    assert graph.type(made.inputs[-1]).dtype == FP32  # type: ignore[arg-type]


def test_a_split_of_a_norm_has_one_type() -> None:
    """One part is read by a product, the other one as fp32."""
    n = Net()
    _, y = normed(n)
    a, b = n.op("Split", y, n.ints(16, 16), attrs=SplitAttrs(axis=-1), outputs=2)
    graph = assigned(n.done(n.op("MatMul", a, weights(n, 16, 16)), n.op("Erf", b)))
    check_refused(HalfFactors(), graph, because="is read as fp32, too", context=GPU)


def test_a_gate_with_other_readers_stays_fp32() -> None:
    n = Net()
    _, y = normed(n)
    a, b = (n.op("MatMul", y, weights(n, 32, 48)) for _ in range(2))
    y = n.op("MatMul", n.op("Mul", n.op("Tanh", a), b), weights(n, 48, 32))
    graph = assigned(n.done(y, n.op("ReduceMax", b)))
    HalfFactors()(graph, GPU)
    verify(graph)
    assert not [r for r in graph.of_kind("ReduceMax") if graph.type(r.inputs[0]).dtype != FP32]  # type: ignore[arg-type]


def test_a_sum_with_fp32_rows_is_stored_in_fp32() -> None:
    n = Net()
    y = product(n, n.op("RMSNormalization", n.input(6, 32), n.positive(32)), 32)
    graph = assigned(n.done(product(n, n.op("Add", y, n.op("Erf", n.input(6, 32, name="r"))))))
    report = HalfFactors()(graph, GPU)
    assert [r.reason.split("makes ")[1] for r in report.refused] == [
        "Add_4 reads rows of fp32, and stores the same type"
    ]
    assert [op.outputs[0].type.dtype for op in of_kind(graph, "MatMul")] == [FP32, FP32]
    assert report.changes == 1


@pytest.mark.parametrize("gemm", [False, True])
def test_a_sum_with_constant_rows_is_stored_in_fp32(gemm: bool) -> None:
    n = Net()
    y, rows = n.op("RMSNormalization", n.input(6, 32), n.positive(32)), n.random(6, 32)
    y = n.op("Gemm", y, weights(n, 32, 32), rows) if gemm else n.op("Add", product(n, y, 32), rows)
    report = HalfFactors()(graph := assigned(n.done(product(n, y))), GPU)
    assert ["reads rows of fp32, and stores the same type" in r.reason for r in report.refused] == [True]
    assert {op.outputs[0].type.dtype for op in graph.of_kind("Gemm", "MatMul")} == {FP32}


def test_a_gated_unit_whose_launch_adds_rows_stays_as_it_is() -> None:
    n = Net()
    x, y = normed(n)
    a, b = (n.op("MatMul", y, weights(n, 32, 32)) for _ in range(2))
    graph = assigned(n.done(product(n, n.op("Add", n.op("Mul", a, n.op("Gelu", b)), x))))
    report = check_refused(HalfFactors(), graph, because="one launch computes it and the other product", context=GPU)
    assert sum("one launch computes it" in r.reason for r in report.refused) == 2


def test_products_that_only_a_factor_bounds_are_not_rounded_before_it() -> None:
    """A product along tokens, which is larger than fp16 before the factor after it."""
    n = Net()
    _, y = normed(n, 16, scale=1e3)
    y = n.op("Mul", n.op("MatMul", n.random(16, 16, scale=90.0), y), 1e-3)
    graph = n.done(n.op("MatMul", n.random(16, 16, scale=0.1), y))
    program = check_simulated(graph, "tf32")
    assert tactics(program, "MatMul")[0] == "matmul_sm90"
    assert len(program.steps) == 3


def test_a_product_along_tokens_adds_a_bias_per_token_and_an_activation_in_its_launch() -> None:
    n = Net()
    x, y = normed(n, 16)
    y = n.op("Gelu", n.op("Add", n.op("MatMul", weights(n, 24, 16), y), n.random(24, 1)))
    program = check_simulated(n.done(n.op("Add", n.op("MatMul", weights(n, 16, 24), y), x)), "tf32")
    assert len(program.steps) == 3


def one(make: Callable[[Net], Value]) -> Graph:
    n = Net()
    return assigned(n.done(make(n)))


def product(n: Net, x: Value, columns: int = 24) -> Value:
    made: Value = n.op("MatMul", x, weights(n, int(n.dims(x)[-1]), columns))
    return made


def _read_twice(n: Net) -> Value:
    y = n.op("Sigmoid", n.input(6, 32))
    return n.op("Add", product(n, y, 32), n.op("Erf", y))


def _computed(n: Net) -> Value:
    factors = [n.op("Sigmoid", n.input(8, 8, name=name)) for name in "xy"]
    made: Value = n.op("MatMul", *factors)
    return made


def _pooled(n: Net) -> Value:
    y = n.op("GlobalMaxPool", n.op("Sigmoid", n.input(2, 8, 8, 8)))
    return product(n, n.reshaped(y, 2, 8))


def _tiny_weights(n: Net) -> Value:
    return n.op("MatMul", normed(n)[1], n.random(32, 24, scale=1e-6))


def _huge_weights(n: Net) -> Value:
    made: Value = n.op("MatMul", normed(n)[1], n.random(32, 24, scale=1e5))
    return made


def _several_axes(n: Net) -> Value:
    x = n.op("LayerNormalization", n.input(2, 6, 32), n.positive(6, 32), attrs=LayerNormAttrs(-2, 1e-3))
    return product(n, x)


def _from_bf16(n: Net) -> Value:
    y = n.op("Cast", n.op("Tanh", n.op("Cast", n.input(6, 32), attrs=CastAttrs(BF16))), attrs=CastAttrs(FP32))
    return product(n, y)


REFUSED: dict[str, tuple[Callable[[Net], Value], str]] = {
    "an input": (lambda n: product(n, n.input(6, 32)), "x has no known bound"),
    "huge": (lambda n: product(n, normed(n, scale=1e5)[1]), "fp16 is exact for bounds from 0.25 to 60000"),
    "tiny": (lambda n: product(n, normed(n, scale=1e-4)[1]), "fp16 is exact for bounds from 0.25 to 60000"),
    "tiny weights": (_tiny_weights, "fp16 rounds some of its weights more than tf32 does"),
    "huge weights": (_huge_weights, "its weights are not within 60000"),
    "columns": (lambda n: product(n, normed(n)[1], 20), "are not a multiple of 8"),
    "terms": (lambda n: product(n, normed(n, width=36)[1]), "are not a multiple of 8"),
    "computed": (_computed, "none of its factors is a constant matrix"),
    "a pool": (_pooled, "comes from a GlobalMaxPool, which does not store fp16"),
    "a norm of planes": (_several_axes, "is normalized along several axes, by a launch that stores fp32"),
    "bf16": (_from_bf16, "comes from bf16, which its launch does not convert to fp16"),
    "two readers": (_read_twice, "is read as fp32, too"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, why = REFUSED[name]
    check_refused(HalfFactors(), one(make), because=why, rule="half_factors", context=GPU)


def _cut_off(n: Net) -> Value:
    """A mask whose largest numbers are at keys after the queries."""
    made: Value = n.const(np.where(np.triu(np.ones((8, 8)), 1), 0.0, -2000.0 - n.rng.random((8, 8))))
    return made


@pytest.mark.parametrize("causal", [False, True])
def test_the_numbers_of_a_mask_count_that_causal_attention_reads(causal: bool) -> None:
    def mask(n: Net) -> Value:
        made = n.graph.constant_value(_cut_off(n)).copy()
        made[-1] = 0.0  # the last query sees all keys
        return n.const(made)

    graph = attention(Net(), mask, causal)
    report = HalfFactors()(graph, GPU)
    assert ["fp16 rounds its mask too much"] * causal == [r.reason for r in report.refused if "mask" in r.reason]


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (lambda n: n.const(np.where(np.eye(8)[:, :1], -1e30, np.zeros((8, 8)))), "fp16 rounds its mask too much"),
        (lambda n: n.const(100.0 * n.rng.uniform(0.99, 1.0, (8, 8))), "fp16 rounds its mask too much"),
        (lambda n: n.graph.add_input("mask", TensorType(FP32, (8, 8))), "its mask is computed in fp32"),
    ],
)
def test_attention_with_other_masks_stays(mask: Callable[[Net], Value], why: str) -> None:
    graph = attention(Net(), mask)
    report = HalfFactors()(graph, GPU)
    assert [r.reason for r in report.refused if "mask" in r.reason] == [why]
    assert report.changes == 1  # the joint product, which stores fp32
    assert of_kind(graph, "Attention")[0].outputs[0].type.dtype == FP32


def test_an_attention_whose_result_is_an_output_stays() -> None:
    n = Net()
    _, y = normed(n, 8)
    heads = [n.reshaped(product(n, y, 32), 2, 8, 4, 8) for _ in range(3)]
    graph = assigned(n.done(n.op("Attention", *[n.transposed(a, 0, 2, 1, 3) for a in heads], attrs=AttentionAttrs())))
    report = HalfFactors()(graph, GPU)
    assert "its result is read as fp32" in {r.reason for r in report.refused}
    assert report.changes == 3


@pytest.mark.parametrize(
    ("precision", "target"), [("fp32", "cuda:sm_90a"), ("fp16", "cuda:sm_90a"), ("tf32", "cuda:sm_80")]
)
def test_other_builds_are_untouched(precision: str, target: str) -> None:
    context = PassContext(precision=precision, target=target)
    graph = perceptron(Net())
    fresh = Net()
    x, y = normed(fresh)
    graph = fresh.done(fresh.op("Add", product(fresh, y, 32), x))
    AssignPrecision()(graph, context)
    check_untouched(HalfFactors(), graph, context)


def test_an_adaptive_norm_stores_fp16_in_one_launch() -> None:
    n = Net()
    x, y = normed(n)
    scale, shift = (n.op("Tanh", product(n, n.input(2, 1, 32, name=name), 32)) for name in "st")
    y = n.op("Add", n.op("Mul", y, n.op("Add", scale, 1.0)), shift)
    program = check_simulated(n.done(n.op("Add", product(n, y, 32), x)), "tf32")
    assert "rows_modulated" in tactics(program)
    assert kinds(program).count("ActivatedNorm") == 1
    assert "Cast" not in kinds(program)


def test_the_launches_of_a_transformer_layer() -> None:
    """The norm stores fp16, products and attention are those of fp16, and nothing is converted by a launch of its own."""
    program = check_simulated(attention(Net()), "tf32")
    assert tactics(program, "LayerNormalization") == ["rows_narrowed"]
    assert "Cast" not in kinds(program)
    assert len(program.steps) == 4
