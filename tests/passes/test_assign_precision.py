"""assign_precision: 16 bits inside, the model's own types at the borders, constants rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import from_text
from support.net import Net

from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.ops.base import Attrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.packed_layout import PackedGatherAttrs, PackedMatMulAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.support.io_dtype import convert_ports
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import BF16, FP16, FP32, INT64

PASS = AssignPrecision()


def assigned(graph: Graph, precision: str = "fp16", target: str = "cuda:sm_90a") -> PassReport:
    report = PASS(graph, PassContext(target=target, precision=precision))
    verify(graph)
    return report


def small() -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 4, 6, 6), 8, bias=True))
    return n.done(n.op("Add", n.op("GlobalAveragePool", x), 1.0))


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", FP16), ("bf16", BF16)])
def test_casts_are_at_the_borders_alone(precision: str, dtype: Any) -> None:
    graph = small()
    report = assigned(graph, precision)
    casts = graph.of_kind("Cast")
    assert [c.outputs[0].type.dtype for c in casts] == [dtype, FP32]
    assert [f.rule for f in report.fired] == ["cast", "cast"]
    for op in graph.order():
        if op.kind in ("Conv", "Relu", "GlobalAveragePool", "Add"):
            assert op.outputs[0].type.dtype == dtype
    assert graph.op(graph.inputs[0]).outputs[0].type.dtype == FP32
    assert graph.op(graph.outputs[0]).outputs[0].type.dtype == FP32
    assert all(c.src for c in casts), "a cast comes from the nodes that need it"


@pytest.mark.parametrize(("precision", "io", "left"), [("fp16", "fp16", 0), ("bf16", "fp16", 2), ("fp16", "fp32", 2)])
def test_inputs_in_the_networks_own_precision_need_no_cast(precision: str, io: str, left: int) -> None:
    graph = small()
    convert_ports(graph, io)
    assigned(graph, precision)
    assert len(graph.of_kind("Cast")) == left
    assert graph.op(graph.inputs[0]).outputs[0].type.dtype == (FP16 if io == "fp16" else FP32)
    assert graph.op(graph.outputs[0]).outputs[0].type.dtype == (FP16 if io == "fp16" else FP32)


def test_biases_stay_fp32_and_weights_are_rounded_once() -> None:
    graph = small()
    conv = graph.of_kind("Conv")[0]
    before = graph.constant_value(conv.inputs[1])
    assert before is not None
    assigned(graph)
    conv = graph.of_kind("Conv")[0]
    weight, bias = (graph.constant_value(v) for v in conv.inputs[1:3])
    assert weight is not None
    assert bias is not None
    assert bias.dtype == FP32
    np.testing.assert_array_equal(weight, before.astype(np.float16))


def test_it_is_idempotent() -> None:
    graph = small()
    assigned(graph)
    assert assigned(graph).changes == 0


@pytest.mark.parametrize(
    ("precision", "target"), [("fp32", "cuda:sm_90a"), ("fp16", "cpu"), ("bf16", "reference"), ("fp16", "")]
)
def test_it_does_nothing_elsewhere(precision: str, target: str) -> None:
    graph = small()
    assert assigned(graph, precision, target).changes == 0
    assert not graph.of_kind("Cast")


def test_finite_constants_stay_finite() -> None:
    n = Net()
    mask = n.const([0.0, -3.4e38, np.inf, 1e9])
    graph = n.done(n.op("Add", n.input(2, 4), mask))
    report = assigned(graph)
    value = graph.constant_value(graph.of_kind("Add")[0].inputs[1])
    assert value is not None
    np.testing.assert_array_equal(value.astype(np.float64), [0, -65504, np.inf, 65504])
    assert [f.rule for f in report.fired].count("saturate") == 1


def test_integers_and_their_readers() -> None:
    n = Net()
    i = n.input(2, 3, dtype=INT64)
    y = n.op("Cast", i, attrs=CastAttrs(FP32))
    graph = n.done(n.op("Mul", y, 0.5), n.op("Add", i, n.const([1], np.int64)))
    assigned(graph)
    assert graph.of_kind("Mul")[0].outputs[0].type.dtype == FP16
    assert graph.of_kind("Add")[0].outputs[0].type.dtype == INT64
    assert graph.of_kind("Cast")[0].outputs[0].type.dtype == FP16, "the user's cast gives the narrow type at once"


def test_scales_of_a_resize_stay_fp32() -> None:
    n = Net()
    graph = n.done(n.op("Resize", n.input(1, 2, 4, 4), None, n.const([1, 1, 2, 2])))
    assigned(graph)
    op = graph.of_kind("Resize")[0]
    assert op.outputs[0].type.dtype == FP16
    assert graph.type(op.inputs[2]).dtype == FP32  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "scale", "stored"), [("fp16", 1e-3, FP16), ("fp16", 1e-5, FP32), ("bf16", 1e-5, BF16)]
)
def test_scales_of_packed_weights(precision: str, scale: float, stored: Any) -> None:
    """Constants that fp16 holds only in part stay fp32."""
    n = Net(np.float32)
    packed, scales = n.const(np.zeros((4, 16)), np.uint8), n.const(np.full((4, 2), scale))
    zeros = n.const(np.full((4, 2), 7.5))
    ids = n.input(3, name="ids", dtype=INT64)
    rows = n.op("PackedGather", packed, ids, scales, zeros, attrs=PackedGatherAttrs("uint4", 32, 16, FP32))
    y = n.op("PackedMatMul", rows, packed, scales, zeros, attrs=PackedMatMulAttrs("uint4", 32, 16))
    graph = n.done(y)
    assigned(graph, precision)
    for op in graph.of_kind("PackedGather", "PackedMatMul"):
        assert op.outputs[0].type.dtype == {"fp16": FP16, "bf16": BF16}[precision]
        assert {graph.type(v).dtype for v in op.inputs[2:]} == {stored}


def test_an_output_that_is_an_input_stays_as_it_is() -> None:
    n = Net()
    x = n.input(2, 2)
    graph = n.done(x, n.op("Relu", x))
    assigned(graph)
    first = graph.op(graph.outputs[0])
    assert first.inputs[0] == graph.op(graph.inputs[0]).value


def test_operators_that_give_fp32_are_cast_afterward() -> None:
    n = Net()
    made = n.op("ConstantOfShape", n.op("Shape", n.input(2, 3)), attrs=_zeros())
    graph = n.done(n.op("Add", made, n.op("Relu", n.graph.op(n.graph.inputs[0]).value)))
    assigned(graph)
    assert graph.of_kind("Add")[0].outputs[0].type.dtype == FP16


def _zeros() -> Attrs:
    from optdnn.ops.create import ConstantOfShapeAttrs

    return ConstantOfShapeAttrs(np.zeros(1, np.float32))


def test_stages_that_cast() -> None:
    n = Net()
    x = n.conv(n.input(1, 4, 5, 5), 8)
    graph = n.done(n.op("Relu", x))
    FuseEpilogue()(graph)
    assigned(graph)
    assert graph.of_kind("Conv")[0].outputs[0].type.dtype == FP16


def test_on_the_cpu_a_mixture_is_in_the_graph_and_one_precision_is_not() -> None:
    """If all is bf16, a library rounds by itself; in a mixture, types and casts show the precision of each operator."""
    graph = from_text(
        """<ir_version: 9, opset_import: ["": 17]> g (float[1,2,4,4] x) => (float[1,2,4,4] y)
        <float[2,2,1,1] w = {1.0, 0.5, 0.25, 2.0}, float[2] b = {0.1, 0.2}>
        { a = Conv(x, w, b) y = Conv(a, w, b) }"""
    )
    alone = graph.copy()
    report = AssignPrecision()(alone, PassContext(target="cpu", plan=PrecisionPlan.of_option("bf16")))
    assert report.changes == 0
    mixed = graph.copy()
    AssignPrecision()(mixed, PassContext(target="cpu", plan=PrecisionPlan(nodes={"a": "bf16"})))
    first, second = mixed.of_kind("Conv")
    assert [mixed.type(v).dtype for v in first.inputs if v is not None] == [BF16] * 3  # the bias too: ONNX's own types
    assert [mixed.type(v).dtype for v in second.inputs if v is not None] == [FP32] * 3
    assert mixed.kinds() == {"Cast": 2, "Conv": 2}
    verify(mixed)
