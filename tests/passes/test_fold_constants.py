"""fold_constants: known values become constants, once rounded, within its bound."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate
from optdnn.ops.binary import CastAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.create import ConstantOfShapeAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.ops.signal import BitCastAttrs
from optdnn.ops.table import OPDEFS
from optdnn.passes.base import PassContext
from optdnn.passes.fold_constants import FoldConstants
from optdnn.types import DTYPES, FP16, FP32, INT64

FOLD = FoldConstants()


def test_a_chain_of_constants_becomes_one() -> None:
    n = Net()
    x = n.input(2, 3)
    k = n.op("Add", n.op("Mul", n.random(3), n.random(3)), n.random(2, 3))
    graph, _ = check_pass(FOLD, n.done(n.op("Mul", x, k)), changes=2, kinds={"Mul": 1}, drops=["Mul_1", "Add_2"])
    (mul,) = graph.of_kind("Mul")
    assert graph.constant_value(mul.inputs[1]).shape == (2, 3)


def test_a_chain_is_rounded_once() -> None:
    """(1 + 2^-30) - 1 is 0 when the sum is rounded to fp32, 2^-30 when only the result is."""
    n = Net()
    x = n.input(2)
    k = n.op("Sub", n.op("Add", 1.0, 2.0**-30), 1.0)
    graph, _ = check_pass(FOLD, n.done(n.op("Add", x, k)), changes=2, drops=["Add_1", "Sub_2"])
    (add,) = graph.of_kind("Add")
    value = graph.constant_value(add.inputs[1])
    assert value.dtype == np.float32
    assert float(value) == 2.0**-30


def test_a_cast_of_the_user_rounds_where_it_stands() -> None:
    n = Net()
    x = n.input(2)
    half = n.op("Cast", n.op("Add", 1.0, 2.0**-14), attrs=CastAttrs(FP16))
    k = n.op("Sub", n.op("Cast", half, attrs=CastAttrs(FP32)), 1.0)
    graph = n.done(n.op("Add", x, k))
    FOLD(graph)
    (add,) = graph.of_kind("Add")
    assert float(graph.constant_value(add.inputs[1])) == 0.0  # 1 + 2^-14 is 1 in fp16


def test_shape_arithmetic_over_static_dimensions_disappears() -> None:
    n = Net()
    x = n.input(2, 3, 4)
    shape = n.op("Shape", x)
    rows = n.op("Gather", shape, n.ints(0))
    target = n.op("Concat", rows, n.ints(-1), attrs=OPDEFS["Concat"].attrs(axis=0))
    y = n.op("Reshape", x, target, attrs=ReshapeAttrs())
    gone = ["Shape_1", "Gather_2", "Concat_3"]
    graph, _ = check_pass(FOLD, n.done(y), changes=3, kinds={"Reshape": 1}, drops=gone)
    assert graph.type(graph.of_kind("Reshape")[0].value).dims == (2, 12)


def test_symbolic_shape_arithmetic_stays() -> None:
    n = Net()
    x = n.input(symbol("n"), 3, 4)
    target = n.op(
        "Concat", n.op("Gather", n.op("Shape", x), n.ints(0)), n.ints(12), attrs=OPDEFS["Concat"].attrs(axis=0)
    )
    check_untouched(FOLD, n.done(n.op("Reshape", x, target, attrs=ReshapeAttrs())))


def test_values_found_by_folding_reach_later_ops() -> None:
    """The target shape is too long a computation for inference (its constant is over the limit of known values)."""
    n = Net()
    x = n.input(2, 6)
    table = n.const(np.arange(300), np.int64)
    picked = n.op("Gather", table, n.ints(3, 4))
    y = n.op("Reshape", x, picked, attrs=ReshapeAttrs())
    z = n.op("Shape", n.op("Relu", y))
    graph = n.done(n.op("Relu", y), z)
    assert graph.type(y).dims != (3, 4)
    after, _ = check_pass(FOLD, graph, changes=2, drops=["Gather_1", "Shape_4", "Relu_3"], depends_on_input=False)
    assert after.type(after.of_kind("Reshape")[0].value).dims == (3, 4)
    assert after.type(after.of_kind("Relu")[0].value).dims == (3, 4)
    assert [d.outputs[0].type.dims for d in map(after.op, after.outputs)] == [(3, 4), (2,)]


def test_weights_of_a_convolution_are_prepared_once() -> None:
    n = Net()
    x = n.input(1, 3, 5, 5)
    w = n.op("Transpose", n.random(3, 3, 3, 4), attrs=OPDEFS["Transpose"].attrs((3, 2, 0, 1)))
    y = n.op("Conv", x, w, attrs=ConvAttrs((1, 1), (0,) * 4, (1, 1)))
    check_pass(FOLD, n.done(y), changes=1, kinds={"Conv": 1}, drops=["Transpose_1"])


def test_a_filled_tensor_over_the_bound_is_left_to_run_time() -> None:
    n = Net()
    x = n.input(64)
    filled = n.op("ConstantOfShape", n.ints(64), attrs=ConstantOfShapeAttrs(2.0, FP32))
    graph = n.done(n.op("Mul", x, filled))
    check_refused(FOLD, graph, because="0.0 MB is over the bound", context=PassContext(fold_limit_bytes=255))
    check_pass(FOLD, graph, changes=1, drops=["ConstantOfShape_1"], context=PassContext(fold_limit_bytes=512))


@pytest.mark.parametrize(("rows", "folds"), [(16, True), (17, False)])
def test_large_positions_of_random_numbers_are_left_to_run_time(rows: int, folds: bool) -> None:
    n = Net()
    x = n.input(rows, 1024, dtype=DTYPES["uint32"])
    starts, columns = (n.const(np.arange(k).reshape(s), np.uint32) for k, s in ((rows, (-1, 1)), (1024, -1)))
    graph = n.done(n.op("Mul", x, n.op("Add", starts, columns)))
    if folds:
        check_pass(FOLD, graph, changes=1, drops=["Add_1"])
    else:
        check_refused(FOLD, graph, because="random numbers of these positions are cheaper to compute than to store")


def test_a_large_constant_that_shrinks_is_folded() -> None:
    n = Net()
    x = n.input(4)
    total = n.op("ReduceSum", n.random(100, 4), n.ints(0), attrs=OPDEFS["ReduceSum"].attrs(keepdims=False))
    graph = n.done(n.op("Mul", x, total))
    check_pass(FOLD, graph, changes=1, drops=["ReduceSum_1"], context=PassContext(fold_limit_bytes=1))


def test_an_index_out_of_range_stays_a_failure_at_run_time() -> None:
    n = Net()
    graph = n.done(n.op("Mul", n.input(1), n.op("Gather", n.random(300), n.ints(7))))
    gather = graph.of_kind("Gather")[0]
    bad = graph.make_constant(np.array([999], dtype=np.int64), "bad")
    graph.insert(bad)
    graph.set_op(_with_input(gather, 1, bad.value))
    check_refused(FOLD, graph, because="cannot be evaluated.*out of")


def test_a_network_that_is_constant() -> None:
    n = Net()
    n.input(3)
    after, _ = check_pass(
        FOLD, n.done(n.op("Relu", n.random(3))), changes=1, kinds={}, drops=["Relu_1"], depends_on_input=False
    )
    assert len(evaluate(after, {"x": np.zeros(3, np.float32)})["y0"]) == 3


def _with_input(op, slot, value):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(op, inputs=tuple(value if i == slot else v for i, v in enumerate(op.inputs)))


def test_nothing_to_fold() -> None:
    n = Net()
    check_untouched(FOLD, n.done(n.op("Mul", n.input(3), n.random(3))))


def test_quantization_and_bit_casts_fold_in_the_precision_of_the_model() -> None:
    n = Net()
    x = n.input(4)
    third = n.op("Mul", np.array([1.0, 2.5, 3.5, 0.3], np.float32), np.float32(1 / 3))
    q = n.op("QuantizeLinear", third, 0.5, attrs=QuantizeAttrs(DTYPES["fp8_e4m3"]))
    d = n.op("DequantizeLinear", q, 0.5, attrs=DequantizeAttrs())
    bits = n.op("Cast", n.op("BitCast", third, attrs=BitCastAttrs(np.dtype(np.int32))), attrs=CastAttrs(FP32))
    graph = n.done(n.op("Add", n.op("Add", x, d), n.op("Mul", bits, 2.0**-30)))
    feeds = {graph.op(graph.inputs[0]).outputs[0].name: np.zeros(4, np.float32)}
    (before,) = evaluate(graph, feeds).values()
    dropped = ["BitCast_4", "Cast_5", "DequantizeLinear_3", "Mul_1", "Mul_7", "QuantizeLinear_2"]
    done, _ = check_pass(FOLD, graph, changes=6, promoted_changes=10, kinds={"Add": 2}, drops=dropped)
    (after,) = evaluate(done, feeds).values()
    assert np.array_equal(before, after)


def test_discontinuous_operators_decide_in_the_networks_own_types() -> None:
    """0.1 + 0.7 is 0.8 in fp32; the same fp32 numbers give less in float64. Ten times the sum must be 8 as an integer, not 7."""
    n = Net()
    total = n.op("Mul", n.op("Add", n.const([0.1]), n.const([0.7])), n.const([10.0]))
    whole = n.op("Cast", total, attrs=CastAttrs(INT64))
    below = n.op("Less", total, n.const([8.0]))
    x = n.input(1)
    scaled = n.op("Mul", x, n.op("Cast", whole, attrs=CastAttrs(FP32)))
    graph = n.done(scaled, n.op("Where", below, x, scaled))
    FoldConstants()(graph)
    assert [op.kind for op in graph.of_kind("Cast", "Less")] == []
    values = [op.attrs.value.tolist() for op in graph.of_kind("Constant")]
    assert [8.0] in values
    assert [False] in values
    assert [7.0] not in values
