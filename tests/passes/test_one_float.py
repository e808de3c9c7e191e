"""one_float: a network of 16-bit floats with parts in fp32 becomes a network of fp32, if the build rounds all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from importers.onnxtext import model
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import kinds, lowered

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes import one_float
from optdnn.passes.base import PassContext
from optdnn.passes.one_float import OneFloat
from optdnn.types import BF16, FP16, FP32, INT8, DType, dtype_name

GPU = PassContext(target="cuda:sm_90a", precision="fp16")


def cast(n: Net, x: Value, dtype: DType) -> Value:
    return n.op("Cast", x, attrs=CastAttrs(dtype))


def layer(half: DType = FP16, *, wide: DType = FP32, given: DType | None = None) -> Graph:
    """Products in 16 bits, and norms and residuals in fp32, as converters write a transformer."""
    n = Net(half)
    x = n.input(2, 8, 32, dtype=given or half)
    rows = x if given in (None, half) else cast(n, x, half)
    wider, narrower = (lambda v, to=to: cast(n, v, to) if wide != half else v for to in (wide, half))
    for _ in range(2):
        y = wider(n.op("Add", n.matmul(rows, 32), n.random(32)))
        y = n.op("Add", y, wider(rows))
        scale, shift = (n.const(n.rng.uniform(0.5, 2, 32), wide) for _ in range(2))
        rows = narrower(n.op("LayerNormalization", y, scale, shift, attrs=LayerNormAttrs()))
    return n.done(rows)


@pytest.mark.parametrize("half", [FP16, BF16])
def test_all_floats_but_those_of_inputs_and_outputs_become_fp32(half: DType) -> None:
    graph, _ = check_pass(OneFloat(), layer(half), changes=1, rules={"one_float": 1}, context=GPU, promoted_changes=0)
    assert [op.outputs[0].type.dtype for op in map(graph.op, graph.inputs)] == [half]
    assert [op.outputs[0].type.dtype for op in map(graph.op, graph.outputs)] == [half]
    inside = [op for op in graph.ops() if op.kind not in ("Input", "Output", "Cast", "Constant")]
    assert {o.type.dtype for op in inside for o in op.outputs} == {FP32}
    assert {op.attrs.value.dtype for op in graph.of_kind("Constant")} == {FP32}
    apart = [c for c in graph.of_kind("Cast") if c.outputs[0].type.dtype != graph.type(c.inputs[0]).dtype]  # type: ignore[arg-type]
    assert len(apart) == 2, "the input's and the output's"


def test_an_input_in_fp32_stays_so() -> None:
    graph, _ = check_pass(OneFloat(), layer(given=FP32), changes=1, context=GPU, promoted_changes=0)
    assert [op.outputs[0].type.dtype for op in map(graph.op, graph.inputs)] == [FP32]


def test_the_launches_are_those_of_the_network_in_fp32() -> None:
    mixed, plain = (lowered(layer(half, given=FP32), "fp16") for half in (FP16, FP32))
    assert kinds(mixed)[:-1] == kinds(plain)[:-1]  # the last norm of the other one stores fp32
    assert "Pointwise" not in kinds(mixed)[1:]


def scaled_norms(half: DType = FP16) -> Graph:
    """Norms of 16-bit floats whose scales are fp32, as PyTorch exports Gemma to opset 23."""
    n = Net(half)
    rows = n.input(2, 8, 32, dtype=half)
    for _ in range(2):
        scale = n.const(n.rng.uniform(0.5, 2, 32), FP32)
        rows = n.matmul(cast(n, n.op("RMSNormalization", rows, scale, attrs=LayerNormAttrs()), half), 32)
    return n.done(rows)


@pytest.mark.parametrize("half", [FP16, BF16])
def test_norms_with_a_scale_in_fp32_give_fp32(half: DType) -> None:
    graph, _ = check_pass(OneFloat(), scaled_norms(half), changes=1, context=GPU, promoted_changes=0)
    inside = [op for op in graph.ops() if op.kind not in ("Input", "Output", "Cast", "Constant")]
    assert {o.type.dtype for op in inside for o in op.outputs} == {FP32}
    assert "Pointwise" not in kinds(lowered(scaled_norms(half), dtype_name(half)))


@pytest.mark.parametrize(
    ("context", "options"),
    [
        (PassContext(target="cuda:sm_90a", precision="fp32"), {}),
        (PassContext(target="cpu", precision="fp16"), {}),
        (GPU, {"wide": FP16}),
        (GPU, {"half": FP32}),
    ],
    ids=["fp32", "cpu", "all in fp16", "all in fp32"],
)
def test_other_networks_and_builds_stay(context: PassContext, options: dict[str, Any]) -> None:
    check_untouched(OneFloat(), layer(**options), context)


def quantized() -> Graph:
    n = Net(FP16)
    x = n.op("Relu", n.input(4, 32))
    scale, zero = n.const(0.1), n.const(0, INT8)
    y = n.op("QuantizeLinear", x, scale, zero, attrs=QuantizeAttrs(INT8))
    y = n.op("DequantizeLinear", y, scale, zero, attrs=DequantizeAttrs())
    return n.done(n.op("Tanh", cast(n, y, FP32)))


def chosen() -> Graph:
    text = """g (float16[4] x, bool c) => (float16[4] y) { a = Relu(x)  w = Cast<to = 1>(a)  r = Tanh(w)  h = Cast<to = 10>(r)
        y = If(c) <then_branch = t () => (float16[4] v) { v = Identity(h) },
            else_branch = e () => (float16[4] v) { v = Neg(h) }> }"""
    return import_model(model(text, 18))


@pytest.mark.parametrize("build", [quantized, chosen])
def test_operators_that_compute_in_their_own_types_keep_them(build: Callable[[], Graph]) -> None:
    check_refused(OneFloat(), build(), because="computes in the types of its operands", context=GPU)


def test_many_weights_stay_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_float, "MOST_BYTES", 1000)
    check_refused(OneFloat(), layer(), because="more than 1000", context=GPU)
