"""assign_precision in integers: the positions of Q and DQ, their scales, the operators between them, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.net import Net

from optdnn.errors import UsageError
from optdnn.ir.evaluate import evaluate, random_feeds, values
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.verify import verify
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.fuse_prologue import FusePrologue
from optdnn.passes.rules.split_prologue import split_all
from optdnn.passes.support import quantize
from optdnn.passes.support.precision import PrecisionPlan, key
from optdnn.passes.support.precision_choices import choices
from optdnn.passes.support.ranges import Calibration, Range, integer_parameters
from optdnn.types import DTYPES, FP16, FP32, INT8, INT32, UINT8


@pytest.fixture(autouse=True)
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have eight bits, independently of this machine's processor."""
    monkeypatch.setattr(quantize, "bytes_saturate", lambda: False)


def calibrated(graph: Graph, seeds: int = 3) -> Calibration:
    """Smallest and largest elements over a few random inputs."""
    wanted = [
        Value(op.id, i)
        for op in graph.order()
        if op.kind not in ("Constant", "Output")
        for i, o in enumerate(op.outputs)
        if o.type.dtype == FP32
    ]
    found: dict[str, Range] = {}
    for seed in range(seeds):
        for v, a in zip(wanted, values(graph, random_feeds(graph, seed), wanted), strict=True):
            name, seen = graph.output(v).name, Range(float(a.min()), float(a.max()))
            found[name] = found[name].hull(seen) if name in found else seen
    return Calibration("minmax", found, found)


def assign(graph: Graph, plan: str | PrecisionPlan = "int8", target: str = "cpu") -> PassReport:
    plan = PrecisionPlan.of_option(plan) if isinstance(plan, str) else plan
    report = AssignPrecision()(graph, PassContext(target=target, plan=plan, calibration=calibrated))
    verify(graph)
    return report


def producer(graph: Graph, op: Op, slot: int) -> Op:
    value = op.inputs[slot]
    assert value is not None
    return graph.op(value)


def chain() -> Graph:
    """conv + relu -> max pool -> conv -> global average."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 4, 8, 8), 8, bias=True))
    graph = n.done(n.op("GlobalAveragePool", n.conv(n.max_pool(x), 4, bias=True)))
    FuseEpilogue()(graph)
    return graph


def test_a_chain_is_in_integers_from_end_to_end() -> None:
    graph = chain()
    report = assign(graph)
    first, second = graph.of_kind("Conv")
    (pool,) = graph.of_kind("MaxPool")
    for op in (first, pool, second):
        assert producer(graph, op, 0).kind == "DequantizeLinear"
    assert graph.kinds() == {
        "Conv": 2, "DequantizeLinear": 3 + 4, "GlobalAveragePool": 1, "MaxPool": 1, "QuantizeLinear": 3,
    }  # fmt: skip
    assert [f.rule for f in report.fired] == ["int8"] * 3
    # Pooling keeps the scale: the very same constants before and after it.
    before, behind = producer(graph, pool, 0), producer(graph, second, 0)
    assert before.inputs[1:] == behind.inputs[1:]
    # The average reads the last convolution's float result.
    assert producer(graph, graph.of_kind("GlobalAveragePool")[0], 0).id == second.id


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("layer", ["padded", "1x1", "depthwise", "groups", "depthwise, 24 channels", "a picture"])
def test_gpus_give_zero_points_to_values_with_negative_elements(layer: str, negative: bool) -> None:
    n = Net()
    channels = 24 if "24" in layer else 3 if layer == "a picture" else 16
    x = n.input(2, channels, 6, 6)
    x = x if negative else n.op("Relu", x)
    group = 4 if layer == "groups" else channels if "depthwise" in layer else 1
    stride = 2 if layer == "a picture" else 1
    y = n.conv(x, channels, 1 if layer == "1x1" else 3, pads=int(layer != "1x1"), group=group, strides=stride)
    graph = n.done(y)
    assign(graph, target="cuda:sm_90a")
    q = producer(graph, producer(graph, graph.of_kind("Conv")[0], 0), 0)
    assert (q.kind, q.outputs[0].type.dtype) == ("QuantizeLinear", UINT8)
    zero = graph.constant_value(q.input(2))
    assert zero is not None
    assert (zero != 0) == negative


@pytest.mark.parametrize(
    ("asked", "channels", "group", "axes", "because"),
    [
        ("int8", 32, 32, 2, ""),
        ("int8", 24, 24, 2, ""),
        ("int8", 32, 4, 2, ""),
        ("int8", 32, 4, 1, ""),
        ("fp8", 32, 32, 2, ""),
        ("fp8", 32, 1, 2, ""),
        ("int8", 32, 4, 3, "3 spatial axes"),
    ],
)
def test_gpus_have_kernels_for_groups(asked: str, channels: int, group: int, axes: int, because: str) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(2, channels, *[6] * axes), channels, group=group))
    (choice,) = choices(graph, "cuda:sm_90a")
    assert (asked in choice.precisions) == (not because)
    assert because in choice.refused.get(asked, "")
    report = assign(graph, f"{asked}+fp16", "cuda:sm_90a")
    assert (graph.kinds().get("QuantizeLinear", 0) == 1) == (not because)
    assert any(because in r.reason for r in report.refused) == bool(because)


@pytest.mark.parametrize(
    ("target", "pads", "even"), [("cpu", 1, False), ("cuda:sm_90a", 0, False), ("cuda:sm_90a", 1, True)]
)
def test_padded_images_have_even_ranges_on_gpus(target: str, pads: int, even: bool) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(2, 16, 8, 8), 16, 3, pads=pads))
    given = integer_parameters(calibrated(graph).ranges["x"], even=True)
    assert given[1] == 128
    assign(graph, target=target)
    (q,) = graph.of_kind("QuantizeLinear")
    assert (graph.constant_value(q.inputs[1]) == given[0]) == even


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_operands_of_an_integer_convolution(target: str) -> None:
    graph = chain()
    weights = graph.constant_value(graph.of_kind("Conv")[0].inputs[1])
    bias = graph.constant_value(graph.of_kind("Conv")[0].inputs[2])
    ranges = calibrated(graph).ranges
    assign(graph, target=target)
    conv = graph.of_kind("Conv")[0]
    x, w, b = (producer(graph, conv, i) for i in range(3))
    q = producer(graph, x, 0)
    assert q.kind == "QuantizeLinear"
    assert q.outputs[0].type.dtype == UINT8
    scale, zero = integer_parameters(ranges["x"], even=target != "cpu")  # its image is padded
    assert graph.constant_value(q.inputs[1]) == scale
    assert graph.constant_value(q.inputs[2]) == zero
    integers, steps = (graph.constant_value(v) for v in w.inputs[:2])
    assert integers is not None
    assert steps is not None
    assert weights is not None
    assert bias is not None
    assert integers.dtype == INT8
    np.testing.assert_allclose(steps, np.abs(weights).max(axis=(1, 2, 3)) / 127, rtol=1e-6)
    assert np.abs(integers * steps.reshape(-1, 1, 1, 1) - weights).max() <= steps.max() / 2 * 1.0001
    whole, b_steps = (graph.constant_value(v) for v in b.inputs[:2])
    assert whole is not None
    assert b_steps is not None
    assert whole.dtype == INT32
    np.testing.assert_allclose(b_steps, steps * scale, rtol=1e-6)
    assert (np.abs(whole * b_steps.astype(np.float64) - bias) <= b_steps * 0.5001).all()


@pytest.mark.parametrize(("target", "largest"), [("cpu", quantize.SMALL_WEIGHT), ("cuda:sm_90a", 127)])
def test_weights_have_seven_bits_where_sums_of_bytes_saturate(
    target: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "bytes_saturate", lambda: True)
    graph = chain()
    assign(graph, target=target)
    integers = graph.constant_value(producer(graph, graph.of_kind("Conv")[0], 1).inputs[0])
    assert integers is not None
    assert np.abs(integers.astype(int)).max() == largest


def test_results_stay_near_and_a_second_run_changes_nothing() -> None:
    for target in ("cpu", "cuda:sm_90a"):
        graph = chain()
        feeds = random_feeds(graph, 1)
        (want,) = evaluate(graph, feeds).values()
        (other,) = evaluate(graph, random_feeds(graph, 2)).values()
        assign(graph, target=target)
        (got,) = evaluate(graph, feeds).values()
        assert 0 < np.abs(got - want).max() < 0.05 * np.abs(other - want).max()
        kinds = graph.kinds()
        assert assign(graph, target=target).changes == 0
        assert graph.kinds() == kinds


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5,), (1, 5)])
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("asked", ["int8", "fp8"])
def test_a_gemm_adds_a_row_or_one_number(shape: tuple[int, ...], transposed: int, asked: str) -> None:
    n = Net()
    weights = n.random(*((5, 16) if transposed else (16, 5)), scale=0.3)
    attrs = GemmAttrs(transB=bool(transposed))
    graph = n.done(n.op("Gemm", n.op("Relu", n.input(4, 16)), weights, n.random(*shape), attrs=attrs))
    feeds = random_feeds(graph, 1)
    (want,) = evaluate(graph, feeds).values()
    assert assign(graph, asked, target="cuda:sm_90a").changes == 1
    (got,) = evaluate(graph, feeds).values()
    assert 0 < np.abs(got - want).max() < (0.05 if asked == "int8" else 0.2)


def residual() -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 4, 8, 8), 8))
    y = n.op("Relu", n.op("Add", n.conv(n.op("Relu", n.conv(x, 8)), 8), x))
    graph = n.done(n.conv(y, 4))
    FuseEpilogue()(graph)
    return graph


def test_a_residual_is_read_as_integers_by_the_epilogue() -> None:
    graph = residual()
    assign(graph)
    (adds,) = [op for op in graph.of_kind("Conv") if len(op.attrs.epilogue) == 2]
    shortcut = producer(graph, adds, 3)
    assert shortcut.kind == "DequantizeLinear"
    readers = [u.id for u in graph.users(shortcut.value)]
    assert len(readers) == 2, "the pair is shared by the convolution and the addition"
    assert adds.id in readers
    assert graph.kinds()["QuantizeLinear"] == 4


def test_a_prologue_is_taken_out_of_an_integer_convolution() -> None:
    n = Net()
    x = n.input(1, 4, 6, 6)
    gate = n.op("Sigmoid", n.op("GlobalAveragePool", x))
    y = n.op("Relu", n.op("Add", n.conv(n.op("Mul", x, gate), 4, 1, pads=0, bias=True), x))
    graph = n.done(n.op("Abs", y))
    for one in (FuseEpilogue(), FusePrologue()):
        one(graph)
    (conv,) = graph.of_kind("Conv")
    assert conv.attrs.prologue
    before = graph.copy()
    split = split_all(graph)
    verify(split)
    report = AssignPrecision()(
        graph, PassContext(target="cuda:sm_90a", precision="int8", calibration=calibrated(split))
    )
    verify(graph)
    assert report.refused == []
    (conv,) = graph.of_kind("Conv")
    assert conv.attrs.prologue == ()
    assert len(conv.attrs.epilogue) == len(before.of_kind("Conv")[0].attrs.epilogue)
    for seed in (1, 2):
        feeds = random_feeds(graph, seed)
        want, exact, got = (next(iter(evaluate(g, feeds).values())) for g in (before, split, graph))
        np.testing.assert_allclose(exact, want, rtol=1e-5, atol=1e-6)
        assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_concat_has_one_scale() -> None:
    n = Net()
    x = n.input(1, 4, 6, 6)
    a, b = n.conv(x, 4), n.op("Mul", n.conv(x, 4), 10.0)
    graph = n.done(n.conv(n.op("Concat", a, b, attrs=ConcatAttrs(1)), 4))
    FuseEpilogue()(graph)
    assign(graph)
    (concat,) = graph.of_kind("Concat")
    parameters = {producer(graph, concat, i).inputs[1:] for i in (0, 1)}
    (user,) = graph.users(graph.of_kind("QuantizeLinear")[-1].value)
    assert parameters == {user.inputs[1:]}


def around(*value: float, mode: str = "constant") -> Graph:
    """conv -> pad -> conv."""
    n = Net()
    x = n.conv(n.input(2, 16, 8, 8), 16)
    y = n.op("Pad", x, n.ints(0, 0, 1, 1, 0, 0, 2, 2), *(n.const(v) for v in value), attrs=PadAttrs(mode))
    return n.done(n.conv(y, 16, pads=0))


@pytest.mark.parametrize(
    ("graph", "target", "because"),
    [
        (around(), "cuda:sm_90a", None),
        (around(0.0), "cuda:sm_90a", None),
        (around(mode="reflect"), "cuda:sm_90a", None),
        (around(1.5), "cuda:sm_90a", "it pads with a value that is not known to be 0"),
        (around(), "cpu", "the libraries pad floats"),
    ],
)
def test_padding_with_zeros_keeps_the_scale(graph: Graph, target: str, because: str | None) -> None:
    refused = {c.kind: c.refused.get("int8") for c in choices(graph, target)}
    assert refused["Pad"] == because
    graph = graph.copy()
    assign(graph, target=target)
    (pad,) = graph.of_kind("Pad")
    before, behind = producer(graph, pad, 0), producer(graph, graph.of_kind("Conv")[1], 0)
    assert behind.kind == "DequantizeLinear"
    assert (before.kind == "DequantizeLinear") == (because is None)
    assert because is not None or before.inputs[1:] == behind.inputs[1:]


def test_a_named_op_that_has_no_integer_form_is_reported() -> None:
    graph = around(1.5)
    name = key(graph.of_kind("Pad")[0])
    report = assign(graph, PrecisionPlan("int8", {name: "int8"}), "cuda:sm_90a")
    assert [r.reason for r in report.refused] == ["it pads with a value that is not known to be 0"]


def test_a_plan_names_single_ops_by_value_or_by_node() -> None:
    for name in ("Conv_4", "Conv_[4]"):
        graph = chain()
        assert [key(op) for op in graph.of_kind("Conv")] == ["Relu_2", "Conv_4"]
        assign(graph, PrecisionPlan("int8", {name: "fp32"}))
        first, second = graph.of_kind("Conv")
        assert producer(graph, first, 0).kind == "DequantizeLinear"
        assert producer(graph, second, 0).kind == "MaxPool"
        assert graph.kinds()["QuantizeLinear"] == 1
    graph = chain()
    assign(graph, PrecisionPlan("fp32", {"Conv_4": "int8"}))
    first, second = graph.of_kind("Conv")
    assert producer(graph, first, 0).kind == "Input"
    assert producer(graph, second, 0).kind == "DequantizeLinear"
    (pool,) = graph.of_kind("MaxPool")
    assert producer(graph, pool, 0).kind == "DequantizeLinear", "what is not named follows its neighbors"
    graph = chain()
    assign(graph, PrecisionPlan("fp32", {"Conv_4": "int8", "MaxPool_3": "fp32"}))
    (pool,) = graph.of_kind("MaxPool")
    assert producer(graph, pool, 0).kind == "Conv"


def test_integers_within_half_precision() -> None:
    graph = chain()
    assign(graph, "int8+fp16", "cuda:sm_90a")
    for op in graph.of_kind("Conv", "MaxPool"):
        assert op.outputs[0].type.dtype == FP16
        assert producer(graph, op, 0).kind == "DequantizeLinear"
    for op in graph.of_kind("QuantizeLinear", "DequantizeLinear"):
        scale = op.inputs[1]
        assert scale is not None
        assert graph.type(scale).dtype == FP32
    assert graph.op(graph.outputs[0]).outputs[0].type.dtype == FP32


def test_mixed_floats_are_cast_once_where_they_meet() -> None:
    graph = chain()
    assign(graph, PrecisionPlan("fp16", {"MaxPool*": "fp32"}, "fp16"), "cuda:sm_90a")
    assert {op.kind: op.outputs[0].type.dtype for op in graph.of_kind("Conv", "MaxPool")} == {
        "Conv": FP16,
        "MaxPool": FP32,
    }
    assert graph.kinds()["Cast"] == 4  # in, before and after the pool, out


def test_fp8() -> None:
    graph = chain()
    assign(graph, "fp8", "cuda:sm_90a")
    types = {q.outputs[0].type.dtype for q in graph.of_kind("QuantizeLinear")}
    assert types == {DTYPES["fp8_e4m3"]}
    assert all(q.inputs[2] is None for q in graph.of_kind("QuantizeLinear"))


def test_refusals_have_reasons() -> None:
    n = Net()
    x = n.input(4, 8)
    y = n.op("Add", n.gemm(x, 4, alpha=0.5), n.op("MatMul", n.random(4, 4), n.op("MatMul", x, n.random(8, 4))))
    graph = n.done(n.op("Softmax", y))
    report = assign(graph)
    reasons = {r.reason for r in report.refused}
    assert reasons == {
        "Gemm stays float: a Gemm with alpha, beta or a transposed A has no int8 form",
        "MatMul stays float: its data operand is a constant",
    }
    offered = {c.kind: c for c in choices(graph, "cpu")}
    assert offered["Softmax"].precisions == ("fp32", "bf16")
    assert offered["Softmax"].refused["int8"] == "Softmax has no int8 form"
    assert "fp8" in {p for c in choices(chain(), "cuda:sm_90a") for p in c.precisions}


def test_a_transposed_convolution_is_in_integers_on_the_cpu_alone() -> None:
    def net() -> Graph:
        n = Net()
        return n.done(n.conv_transpose(n.input(1, 4, 5, 5), 6, bias=True))

    graph = net()
    assert assign(graph).refused == []
    assert producer(graph, graph.of_kind("ConvTranspose")[0], 1).kind == "DequantizeLinear"
    graph = net()
    (refused,) = assign(graph, target="cuda:sm_90a").refused
    assert refused.reason == "ConvTranspose stays float: there is no kernel for it on integers"
    assert graph.kinds() == {"ConvTranspose": 1}
    (offered,) = choices(net(), "cuda:sm_90a")
    assert "int8" not in offered.precisions


def test_calibration_of_another_graph_is_refused() -> None:
    context = PassContext(target="cpu", precision="int8", calibration=Calibration("minmax", {}))
    with pytest.raises(UsageError, match="calibration has no range for"):
        AssignPrecision()(chain(), context)
    with pytest.raises(UsageError, match="needs calibration data"):
        AssignPrecision()(chain(), PassContext(target="cpu", precision="int8"))


def test_values_that_calibration_saw_at_no_size_stay_float() -> None:
    graph = chain()
    found = replace(calibrated(graph), other_sizes=True)
    assert AssignPrecision()(graph.copy(), PassContext(target="cpu", precision="int8", calibration=found)).refused == []
    first = graph.of_kind("Conv")[0]
    known = {n: r for n, r in found.ranges.items() if n != graph.output(first.inputs[0]).name}
    context = PassContext(target="cpu", precision="int8", calibration=replace(found, ranges=known))
    (refused,) = AssignPrecision()(graph, context).refused
    assert "calibration saw the network at other sizes, where it does not have this operand" in refused.reason


@pytest.mark.parametrize("rows", ["n", 0])
@pytest.mark.parametrize(("lacks", "refused"), [("MatMul", True), ("Transpose", False)])
def test_values_that_calibration_saw_empty_stay_float(rows: int | str, lacks: str, refused: bool) -> None:
    """If calibration saw an empty operand, a MatMul stays float with a reason; a Transpose before it is left out without one."""
    n = Net()
    x = n.matmul(n.op("Relu", n.input(3, rows, 16)), 8)
    graph = n.done(n.matmul(n.op("Transpose", x, attrs=TransposeAttrs((1, 0, 2))), 5))
    last = next(op for op in reversed(graph.order()) if op.kind == lacks)
    names = {graph.output(v).name for op in graph.order() for v in op.values}
    ranges = {name: Range(-3.0, 3.0) for name in names - {graph.output(last.inputs[0]).name}}
    context = PassContext(target="cpu", precision="int8", calibration=Calibration("minmax", ranges))
    report = AssignPrecision()(graph, context)
    verify(graph)
    assert [r.reason for r in report.refused] == (
        ["MatMul stays float: the calibration data leaves its operand empty"] if refused else []
    )
    assert graph.kinds()["QuantizeLinear"] == (1 if refused else 2)
