"""Unary operators against ONNX's own evaluator and ONNX Runtime; erf to the last bits; symbolic values; refusals."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import pytest
from known import infer_value
from onenode import Case, check_case, import_case, normal, onnxruntime_outputs, run
from support.net import Net

from optdnn.dim import bounds, symbol
from optdnn.errors import ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ops.base import EXACT, Attrs, Call, Tol, attrs_dict
from optdnn.ops.table import OPDEFS
from optdnn.ops.unary import DEFS, AlphaAttrs, FakeQuantizeAttrs, GeluAttrs
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.runtime.reference.run import run_kernel
from optdnn.runtime.reference.unary import erf
from optdnn.types import Array, tensor

EDGES = np.array([0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-6, -1e-6, 3.0, -3.0, 20.0, -20.0, np.inf, -np.inf, np.nan])


def anywhere(dtype: type = np.float32) -> Array:
    return np.concatenate([4 * normal(24), EDGES]).astype(dtype).reshape(5, 8)


def inside(low: float, high: float) -> Array:
    return np.random.default_rng(1).uniform(low, high, (3, 7)).astype(np.float32)


CASES = [  # operator, attributes, opset, operand
    ("Relu", {}, 14, anywhere()),
    ("LeakyRelu", {}, 16, anywhere()),
    ("LeakyRelu", {"alpha": 0.3}, 7, anywhere()),
    ("Elu", {"alpha": 1.5}, 22, anywhere()),
    ("Selu", {}, 22, anywhere()),
    ("Selu", {"alpha": 2.0, "gamma": 3.0}, 7, anywhere()),
    ("Celu", {"alpha": 2.0}, 12, anywhere()),
    ("ThresholdedRelu", {"alpha": 2.0}, 10, anywhere()),
    ("Sigmoid", {}, 13, anywhere()),
    ("HardSigmoid", {}, 7, anywhere()),
    ("HardSigmoid", {"alpha": 0.5, "beta": 0.6}, 22, anywhere()),
    ("HardSwish", {}, 14, inside(-6, 6)),
    ("Tanh", {}, 13, anywhere()),
    ("Softplus", {}, 22, anywhere()),
    ("Softsign", {}, 22, inside(-9, 9)),
    ("Mish", {}, 18, inside(-9, 9)),
    ("Gelu", {}, 20, inside(-9, 9)),
    ("Gelu", {"approximate": "tanh"}, 20, inside(-9, 9)),
    ("Swish", {}, 24, inside(-9, 9)),
    ("Swish", {"alpha": 0.5}, 24, inside(-9, 9)),
    ("Shrink", {"lambd": 1.5, "bias": 1.0}, 9, inside(-4, 4)),
    ("Neg", {}, 13, anywhere()),
    ("Abs", {}, 13, anywhere()),
    ("Sign", {}, 13, inside(-4, 4)),
    ("Ceil", {}, 13, anywhere()),
    ("Floor", {}, 13, anywhere()),
    ("Round", {}, 11, anywhere()),
    ("Reciprocal", {}, 13, inside(0.2, 8)),
    ("Sqrt", {}, 13, anywhere()),
    ("Exp", {}, 13, anywhere()),
    ("Log", {}, 13, anywhere()),
    ("Erf", {}, 13, anywhere()),
    ("Sin", {}, 7, inside(-9, 9)),
    ("Cos", {}, 7, inside(-9, 9)),
    ("Tan", {}, 7, inside(-1, 1)),
    ("Asin", {}, 7, inside(-1, 1)),
    ("Acos", {}, 7, inside(-1, 1)),
    ("Atan", {}, 22, inside(-9, 9)),
    ("Sinh", {}, 9, inside(-4, 4)),
    ("Cosh", {}, 9, inside(-4, 4)),
    ("Asinh", {}, 9, inside(-9, 9)),
    ("Acosh", {}, 9, inside(1, 9)),
    ("Atanh", {}, 22, inside(-0.9, 0.9)),
    ("IsNaN", {}, 13, anywhere()),
    ("IsInf", {}, 20, anywhere()),
    ("IsInf", {"detect_negative": 0}, 10, anywhere()),
    ("IsInf", {"detect_positive": 0}, 10, anywhere()),
    ("Not", {}, 7, normal(3, 4) > 0),
    ("BitwiseNot", {}, 18, np.array([[0, 1, -5, 127]], dtype=np.int8)),
    ("Abs", {}, 13, np.array([-3, 4], dtype=np.int32)),
    ("Neg", {}, 13, np.array([-3, 4], dtype=np.int64)),
    ("Sign", {}, 13, np.array([-3, 0, 4], dtype=np.int32)),
    ("Relu", {}, 14, np.array([-3, 4], dtype=np.int32)),
]


def test_every_unary_kind_has_a_case() -> None:
    assert {c[0] for c in CASES} == {d.kind for d in DEFS} - {"FakeQuantize"}, "which ONNX does not have"


@pytest.mark.parametrize("zero", [0, 5, -128])
def test_fake_quantize_is_quantize_and_dequantize(zero: int) -> None:
    scale = np.float32(0.03)
    x = np.concatenate([EDGES[~np.isnan(EDGES)], 3 * normal(200)]).astype(np.float32)
    integers = np.clip(np.rint(x / scale) + zero, -128, 127)
    want = (integers - zero).astype(np.float32) * scale
    attrs = FakeQuantizeAttrs(float(scale), -128.0 - zero, 127.0 - zero)
    for dtype in (np.float32, np.float64):
        (got,) = run_kernel("FakeQuantize", [x.astype(dtype)], attrs_dict(attrs), [np.dtype(dtype)])
        np.testing.assert_allclose(got, want, rtol=1e-6)
    n = Net()
    graph = n.done(n.op("FakeQuantize", n.input(len(x), name="x"), attrs=attrs))
    exported = export_model(graph).proto
    assert [node.op_type for node in exported.graph.node] == ["Div", "Round", "Clip", "Mul"]
    (again,) = evaluate(import_model(exported), {"x": x}).values()
    np.testing.assert_allclose(again, want, rtol=1e-6)


@pytest.mark.parametrize(("op", "attrs", "opset", "x"), CASES, ids=[f"{c[0]}{c[1] or ''}-{c[3].dtype}" for c in CASES])
def test_against_onnx(op: str, attrs: dict, opset: int, x: Array) -> None:
    case = Case(op, [x], attrs, opset)
    with np.errstate(all="ignore"):
        check_case(case, "reference", symbolic={0: (0,)})
    if op != "Swish":  # not in every ONNX Runtime yet
        tol = Tol(2e-5, 2e-6) if OPDEFS[op].tol != EXACT else None  # its approximations of exp and tanh
        check_case(case, onnxruntime_outputs(case), tol=tol)


@pytest.mark.parametrize("op", ["Sigmoid", "Tanh", "Exp", "Softplus", "Sqrt", "Reciprocal"])
def test_float64_keeps_its_precision_and_halves_round_once(op: str) -> None:
    x = np.random.default_rng(2).uniform(0.1, 4, 64)
    exact = {
        "Sigmoid": [1 / (1 + math.exp(-v)) for v in x],
        "Tanh": [math.tanh(v) for v in x],
        "Exp": [math.exp(v) for v in x],
        "Softplus": [math.log1p(math.exp(v)) for v in x],
        "Sqrt": [math.sqrt(v) for v in x],
        "Reciprocal": [1 / v for v in x],
    }[op]
    (y,) = run(import_case(Case(op, [x])), {"x0": x})
    np.testing.assert_allclose(y, exact, rtol=4e-16)
    half = x.astype(np.float16)
    (y,) = run(import_case(Case(op, [half])), {"x0": half})
    (wide,) = run(import_case(Case(op, [half.astype(np.float32)])), {"x0": half.astype(np.float32)})
    assert y.dtype == np.float16
    assert np.array_equal(y, wide.astype(np.float16))


def test_sigmoid_and_softplus_do_not_overflow() -> None:
    x = np.array([-800.0, 800.0])
    for op, expected in (("Sigmoid", [0.0, 1.0]), ("Softplus", [0.0, 800.0]), ("Swish", [0.0, 800.0])):
        (y,) = run(import_case(Case(op, [x], opset=24)), {"x0": x})
        np.testing.assert_allclose(y, expected, atol=1e-300)


def test_erf_is_right_to_the_last_bits() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.46875, -0.46875, 4.0, 5.9999, 6.0, 1e-300, 5e-324]])
    exact = np.array([math.erf(v) for v in x])
    assert np.max(np.abs(erf(x) - exact)) <= 4e-16
    assert np.max(np.abs(erf(x) - exact) / np.maximum(np.abs(exact), 1e-300)) <= 1e-15
    assert np.array_equal(erf(np.array([np.inf, -np.inf])), [1.0, -1.0])
    assert np.isnan(erf(np.array([np.nan]))).all()
    assert np.signbit(erf(np.array(-0.0)))
    assert erf(np.float32(0.5)).dtype == np.float32


def test_symbolic_values() -> None:
    n = symbol("n", 1)
    assert list(infer_value("Neg", [n, 3])) == [-n, -3]
    assert list(infer_value("Abs", [-n, -3])) == [n, 3]
    assert list(infer_value("Relu", [n, -n])) == [n, 0]
    assert list(infer_value("Sign", [n, -n])) == [1, -1]
    assert infer_value("Sign", [symbol("m")]) is None  # 0 or 1
    assert bounds(symbol("m"))[0] == 0
    half = infer_value("Sqrt", [2.0, 4.0], dtype=np.float32)
    assert half.dtype == np.float32
    assert half[1] == 2.0
    assert infer_value("BitwiseNot", [n]) is None


REFUSED = [
    ("Exp", np.array([1, 2]), "floating-point operand"),
    ("Relu", np.array([1, 2], dtype=np.uint8), "signed numeric operand"),
    ("Not", np.array([1.0]), "bool operand"),
    ("BitwiseNot", np.array([1.0]), "integer operand"),
    ("Abs", np.array([True]), "numeric operand"),
]


@pytest.mark.parametrize(("op", "x", "because"), REFUSED)
def test_refused_types(op: str, x: Array, because: str) -> None:
    call = Call(op, Attrs(), (tensor(x.dtype, *x.shape),), (None,), 1, symbol)
    with pytest.raises(ShapeError, match=f"{op} needs an? {because}"):
        OPDEFS[op].infer(call)


def test_a_missing_operand_is_named() -> None:
    with pytest.raises(ShapeError, match="Swish needs operand 0"):
        OPDEFS["Swish"].infer(Call("Swish", AlphaAttrs(), (None,), (None,), 1, symbol))


def test_a_second_operand_is_refused() -> None:
    """ONNX has no schema for com.microsoft.Gelu that would refuse it."""
    x = tensor(np.dtype(np.float32), 3)
    with pytest.raises(ShapeError, match="Gelu takes one operand, not 2"):
        OPDEFS["Gelu"].infer(Call("Gelu", GeluAttrs(), (x, x), (None, None), 1, symbol))


def test_erfc_that_tf2onnx_leaves_is_known() -> None:
    """Keras's exact GELU uses it, and becomes one operator."""
    text = """<ir_version: 8, opset_import: ["" : 17]> gelu (float[2,5] x) => (float[2,5] y)
        <float minus_root = {-0.70710677}, float half = {0.5}>
        { a = Mul(x, minus_root) b = Erfc(a) c = Mul(x, half) y = Mul(c, b) }"""
    graph = import_model(onnx.parser.parse_model(text))
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    want = 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2))
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], want, rtol=1e-5, atol=1e-6)
    run_pipeline(graph, PIPELINE(3, "cpu"), PassContext("cpu"))
    assert graph.kinds() == {"Gelu": 1}
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("attribute", "approximate"), [("", "none"), ("<approximate=0>", "none"), ("<approximate=1>", "tanh")]
)
def test_gelu_of_a_tflite_file_is_known(attribute: str, approximate: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> gelu (float[2,5] x) => (float[2,5] y) {{ y = TFL_GELU {attribute} (x) }}"""
    graph = import_model(onnx.parser.parse_model(text))
    (op,) = graph.of_kind("Gelu")
    assert op.attrs == GeluAttrs(approximate)
