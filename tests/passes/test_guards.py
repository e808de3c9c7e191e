"""Constants that fp16 cannot hold: only operators that depend on them compute in fp32."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text
from support.net import Net
from support.simulated import check_simulated, lowered, simulate

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.errors import NotMet
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.ops.reduce import ReduceAttrs
from optdnn.optimize import optimize
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.support.guards import guards
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.types import FP16, FP32

FP16_PLAN = PrecisionPlan.of_option("fp16")
X = np.concatenate([np.zeros((2, 8)), np.random.default_rng(3).normal(0, 1, (4, 8))]).astype(np.float32)
"""Two rows of zeros, as padding makes them, and four that are none."""


def model(body: str, **constants: float) -> Graph:
    numbers = "".join(f", float {k} = {{{v!r}}}" for k, v in constants.items())
    return from_text(
        f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[6,8] x) => (float[6,8] y) <int64[1] last = {{-1}}, int64[2] full = {{6, 8}}{numbers}> {{ {body} }}"""
    )


NORMALIZE = "n = ReduceL1(x, last) c = Clip(n, eps) e = Expand(c, full) y = Div(x, e)"
SQUARES = "q = Mul(x, x) m = ReduceMean(q, last) a = Add(m, eps) s = Sqrt(a) y = Div(x, s)"

GUARDED = {
    "bound of a norm": (NORMALIZE, 1e-12, "c e y"),
    "largest of two": ("n = ReduceL2(x, last) c = Max(n, eps) y = Div(x, c)", 1e-12, "c y"),
    "added to a sum": ("n = ReduceL1(x, last) c = Add(n, eps) y = Div(x, c)", 1e-8, "c y"),
    "subtracted": ("n = ReduceL1(x, last) m = Neg(n) c = Sub(m, eps) y = Div(x, c)", 1e-8, "c y"),
    "instead of zero": ("n = ReduceL1(x, last) b = Equal(n, o) c = Where(b, eps, n) y = Div(x, c)", 1e-9, "c y"),
    "mean of squares": (SQUARES, 1e-6, "q m a s y"),
    "squares by a power": (SQUARES.replace("Mul(x, x)", "Pow(x, two)"), 1e-12, "q m a s y"),
    "sum of squares": ("m = ReduceSumSquare(x, last) a = Add(m, eps) s = Sqrt(a) y = Div(x, s)", 1e-12, "m a s y"),
    "reciprocal": ("n = ReduceL2(x, last) c = Max(n, eps) r = Reciprocal(c) y = Mul(x, r)", 1e-12, "c r y"),
    "one over it": ("n = ReduceL2(x, last) c = Max(n, eps) r = Div(o, c) e = Expand(r, full) y = Mul(e, x)", 1e-12, "c r e y"),
    "root by a power": ("q = Mul(x, x) m = ReduceMean(q, last) a = Add(m, eps) r = Pow(a, low) y = Mul(x, r)", 1e-10, "q m a r y"),
    "logarithm": ("p = Abs(x) c = Add(p, eps) y = Log(c)", 1e-9, "c y"),
}  # fmt: skip
"""What guards -> the ONNX text, the epsilon, and the values that are fp32 for its sake."""


def with_epsilon(body: str, epsilon: float) -> Graph:
    return model(body, eps=epsilon, o=1.0 if "o," in body and "Equal" not in body else 0.0, two=2.0, low=-0.5)


def assigned(graph: Graph, plan: PrecisionPlan = FP16_PLAN) -> PassReport:
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=plan))
    verify(graph)
    return report


def kept(graph: Graph) -> set[str]:
    return {graph.op(i).outputs[0].name for i in guards(graph).reasons}


@pytest.mark.parametrize("form", GUARDED)
def test_operators_guarded_by_an_epsilon_are_fp32(form: str) -> None:
    body, epsilon, names = GUARDED[form]
    graph = with_epsilon(body, epsilon)
    assert kept(graph) == set(names.split())
    want = evaluate(graph, {"x": X})["y"]
    got = simulate(lowered(graph, io_dtype="fp16"), {"x": X.astype(np.float16)})["y"]
    assert got.dtype == FP16
    assert np.abs(got - want).max() < 4e-3 * np.abs(want).max()
    assert np.isfinite(got).all()


@pytest.mark.parametrize("form", GUARDED)
def test_one_that_fp16_holds_is_left_alone(form: str) -> None:
    body, _, _ = GUARDED[form]
    graph = with_epsilon(body, 1e-3)
    assert kept(graph) == set()
    assigned(graph)
    assert all(
        o.type.dtype != FP32 for op in graph.ops() if op.kind not in ("Input", "Output", "Cast") for o in op.outputs
    )


@pytest.mark.parametrize(
    "body",
    [
        "y = Add(x, eps)",
        "a = Add(x, eps) s = Sigmoid(a) y = Div(x, s)",  # which is no zero
        "c = Clip(x, eps) y = Mul(x, c)",
        "c = Max(x, eps) y = Div(c, x)",  # above the line, it guards nothing
        "n = ReduceL2(x, last) c = Clip(n, eps) r = Pow(c, two) y = Add(x, r)",
        "y = LayerNormalization<epsilon = 1e-12>(x, ones)",
    ],
)
def test_small_constants_that_guard_nothing_are_left_alone(body: str) -> None:
    graph = from_text(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[6,8] x) => (float[6,8] y)
        <int64[1] last = {{-1}}, float eps = {{1e-12}}, float two = {{2}}, float[8] ones = {{1,1,1,1,1,1,1,1}}> {{ {body} }}"""
    )
    assert kept(graph) == set()


@pytest.mark.parametrize("weight", ["float w = {0.5}", "float[1] w = {0.5}", "float[6,1] w = {1, 2, 3, 4, 5, 6}"])
def test_a_constant_factor_before_the_epsilon_is_no_square(weight: str) -> None:
    graph = from_text(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[6,8] x) => (float[6,8] y)
        <int64[1] last = {{-1}}, float eps = {{1e-8}}, {weight}>
        {{ n = ReduceL1(x, last) m = Mul(n, w) c = Add(m, eps) y = Div(x, c) }}"""
    )
    assert kept(graph) == {"c", "y"}


def test_a_small_shift_after_a_scale_per_channel_guards_nothing() -> None:
    """BatchNormalization parallel to a convolution (a block of FastViT), with small means."""
    n = Net(seed=2)
    x = n.input(1, 8, 6, 6)
    y = n.op("Add", n.op("Mul", x, np.full((8, 1, 1), 0.9)), np.full((8, 1, 1), 1e-5))
    graph = n.done(n.op("Relu", n.op("Sub", n.conv(x, 8, 3), y)))
    assert kept(graph) == set()
    check_simulated(graph)


def test_casts_run_in_the_registers_of_fp32_operators() -> None:
    graph = with_epsilon(NORMALIZE, 1e-12)
    options = BuildOptions(target="simulate", precision="fp16", io_dtype="fp16")
    optimize(graph, options, "simulate")
    assert graph.kinds().get("Cast", 0) == 0
    assert graph.kinds().get("Expand", 0) == 0, "the kernel broadcasts what it would have read in fp32"
    (quotient,) = (op for op in graph.order() if op.kind == "Pointwise")
    assert [s.kind for s in quotient.attrs.epilogue] == ["Cast", "Cast", "Clip", "Div", "Cast"]
    assert [graph.type(v).dtype for v in quotient.inputs[:2] if v is not None] == [FP16, FP16]
    assert quotient.outputs[0].type.dtype == FP16


def test_casts_stay_where_no_operand_has_the_shape_of_the_result() -> None:
    graph = from_text("""<ir_version: 9, opset_import: ["": 18]> g (float[6,1] x, float[1,8] z) => (float[6,8] y)
        <float eps = {1e-12}> { a = Exp(z) c = Max(a, eps) y = Div(x, c) }""")
    feeds = {"x": np.ones((6, 1), np.float32), "z": np.full((1, 8), -40, np.float32)}
    feeds["x"][2] = 0
    want = evaluate(graph, feeds)["y"][2]
    assigned(graph)
    (division,) = graph.of_kind("Div")
    assert [graph.type(v).dtype for v in division.inputs if v is not None] == [FP32, FP32]
    assert (evaluate(graph, feeds)["y"][2] == want).all()


def test_another_reader_of_the_guarded_value_gets_fp16() -> None:
    graph = with_epsilon(NORMALIZE.replace("y =", "d =") + " t = Tanh(c) y = Add(d, t)", 1e-12)
    assigned(graph)
    (tanh,) = graph.of_kind("Tanh")
    assert graph.type(tanh.inputs[0]).dtype == FP16  # type: ignore[arg-type]


def test_neither_bf16_nor_pinned_nodes_need_guards() -> None:
    for plan in (PrecisionPlan.of_option("bf16"), PrecisionPlan("fp16", dict.fromkeys("ceny", "fp16"), "fp16")):
        graph = with_epsilon(NORMALIZE, 1e-12)
        assert not assigned(graph, plan).refused
        assert graph.of_kind("Clip")[0].outputs[0].type.dtype != FP32


def test_between_integers_too() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 16, 8, 8), 16))
    bound = n.op("Clip", n.op("ReduceL1", x, n.ints(1), attrs=ReduceAttrs()), 1e-12)
    proto = export_model(n.done(n.conv(n.op("Div", x, bound), 16))).proto
    feeds = {"x": n.rng.standard_normal((1, 16, 8, 8)).astype(np.float32)}
    feeds["x"][..., :4] = 0  # so that all channels of the first layer are zero in places
    # In int8, the zeros of Conv_1 are no zeros: the mean error is taken out of its bias.
    pins = {"Conv_1": "fp16", "Conv_*": "int8"}
    built = build_verbose(
        proto, BuildOptions(target="simulate", precision="int8+fp16", calib=[feeds], precision_map=pins)
    )
    runs = {r.asked.key: r.runs for r in built.precisions}
    assert runs == {"Relu_2": "fp16", "ReduceL1_3": "fp16", "y0": "int8"}
    (got,) = built.engine.run(feeds).values()
    (want,) = build_verbose(proto, BuildOptions(target="reference")).engine.run(feeds).values()
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


# ---------------------------------------------------------------- factors


FACTORS = [
    *(("y = Mul(x, f)", f, x) for f, x in ((1e5, 0.03), (-3e6, 1e-3), (1e-6, 3e4), (2e-5, 50.0))),
    ("s = Mul(x, f) y = Tanh(s)", 1e5, 1e-5),
    ("s = Mul(x, f) y = Mul(s, g)", 1e-9, 3.0),
    ("y = Div(f, x)", 1e5, 5e4),
    ("y = Div(f, x)", 1e-6, 1e-5),
    ("y = Div(x, f)", 1e5, 5e4),
    ("y = Div(x, f)", 1e-6, 1e-5),
]


@pytest.mark.parametrize(("body", "factor", "size"), FACTORS)
def test_factors_that_fp16_has_not(body: str, factor: float, size: float) -> None:
    graph = model(body, f=factor, g=1e6)
    x = np.random.default_rng(0).uniform(0.5 * size, size, (6, 8)).astype(np.float16)
    want = evaluate(graph, {"x": x.astype(np.float32)})["y"]
    got = simulate(lowered(graph, io_dtype="fp16"), {"x": x})["y"]
    assert kept(graph)
    assert np.allclose(got, want, rtol=2e-3, atol=0)


@pytest.mark.parametrize("factor", [-1e9, -3.4e38, 60000.0, 1e-4, 0.0])
def test_masks_and_factors_that_fp16_has_are_left_alone(factor: float) -> None:
    assert kept(model("y = Mul(x, f)", f=factor)) == set()


def test_a_large_factor_does_not_make_infinities_of_a_mask() -> None:
    graph = model("m = Mul(x, f) y = Softmax(m)", f=-1e6)
    x = np.zeros((6, 8), np.float16)
    x[1] = 1  # a fully masked row: its values are equal
    x[2, 1:] = 1
    got = simulate(lowered(graph, io_dtype="fp16"), {"x": x})["y"]
    assert np.array_equal(got[1], np.full(8, 0.125, np.float16))
    assert np.array_equal(got[2], np.eye(8, dtype=np.float16)[0])


def test_one_number_in_an_epilogue_does_not_become_zero() -> None:
    ones = ", ".join("1" if i % 9 == 0 else "0" for i in range(64))
    graph = from_text(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[6,8] x) => (float[6,8] y)
        <float[8,8] w = {{{ones}}}, float eps = {{1e-12}}> {{ m = MatMul(x, w) c = Add(m, eps) y = Div(x, c) }}"""
    )
    feeds = {"x": X.astype(np.float16)}
    want = evaluate(graph, {"x": feeds["x"].astype(np.float32)})["y"]
    got = simulate(lowered(graph, io_dtype="fp16"), feeds)["y"]
    assert np.abs(got - want).max() < 4e-3


# ---------------------------------------------------------------- reports


def test_the_contract_names_them_with_the_reason() -> None:
    model_ = export_model(with_epsilon(NORMALIZE, 1e-12)).proto
    built = build_verbose(model_, BuildOptions(target="simulate", precision="fp16"))
    rows = {r.asked.key: (r.asked.precision, r.runs, r.reason) for r in built.precisions}
    why = "the constant 1e-12 that guards Div y is zero in fp16"
    assert rows == {"n": ("fp16", "fp16", None), "y": ("fp16", "fp32", why)}, "the bound is a part of y's kernel"
    assert built.engine.meta["precision"]["risks"] == [], "the constant is not lost"
    with pytest.raises(NotMet, match=why):
        build_verbose(model_, BuildOptions(target="simulate", precision="fp16", strict_precision=True))


def test_a_named_one_is_a_risk() -> None:
    graph = with_epsilon(NORMALIZE, 1e-12)
    log = PrecisionLog()
    plan = PrecisionPlan("fp16", {"c": "fp16"}, "fp16")
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=plan, precision_log=log))
    (risk,) = log.risks
    assert (risk.key, risk.what) == ("c", "underflow: the constant 'eps' is 1e-12, fp16 has nothing below 6e-08")
