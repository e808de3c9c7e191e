"""Arithmetic, comparison, logic, Where, Clip and Cast against ONNX's evaluator and ONNX Runtime; symbolic values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from known import infer, infer_value, shape_of
from onenode import Case, check_case, import_case, normal, onnxruntime_outputs, run
from support.net import Net

from optdnn.dim import dim_max, dim_min, symbol
from optdnn.errors import ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ops.base import Unsupported
from optdnn.ops.binary import DEFS, BitShiftAttrs, CastAttrs, ModAttrs
from optdnn.ops.exchange import NodeSpec
from optdnn.ops.table import IMPORTERS, OPDEFS
from optdnn.runtime.reference.binary import cast
from optdnn.types import BF16, BOOL, DTYPES, FP16, FP32, FP64, INT64, NARROW_INTEGERS, ONNX_TYPES, Array, DType, tensor

N, M = symbol("n", 1), symbol("m", 1)
A, B = normal(2, 3, 4), normal(3, 1, seed=1)
K, J = np.array([[7, -7, 8], [0, 5, -9]]), np.array([2, -2, 3])
P, Q = normal(2, 3) > 0, normal(3, seed=1) > 0
U, V = np.array([1, 6, 255], dtype=np.uint8), np.array([[1], [9]], dtype=np.uint8)

CASES: list[tuple[str, dict, int, list]] = [
    ("Add", {}, 14, [A, B]),
    ("Add", {}, 7, [A, A]),
    ("Sub", {}, 14, [B, A]),
    ("Mul", {}, 14, [A, B]),
    ("Div", {}, 14, [A, B]),
    ("Div", {}, 14, [K, J]),
    ("Div", {}, 14, [U, np.array([2, 4, 16], dtype=np.uint8)]),
    ("Pow", {}, 15, [np.abs(A), B]),
    ("Pow", {}, 15, [A, np.array(2.0, dtype=np.float32)]),
    ("Pow", {}, 15, [A, np.array(3)]),
    ("Pow", {}, 15, [K, np.array([2, 3, 1])]),
    ("Pow", {}, 15, [np.array([2, 3]), np.array([2.5, 0.5], dtype=np.float32)]),
    ("Mod", {}, 13, [K, J]),
    ("Mod", {"fmod": 1}, 13, [K, J]),
    ("Mod", {"fmod": 1}, 13, [A, B]),
    ("PRelu", {}, 16, [A, B]),
    ("PRelu", {}, 7, [A, normal(1, 3, 1)]),
    ("Min", {}, 13, [A, B, A[:1]]),
    ("Max", {}, 13, [A, B]),
    ("Max", {}, 13, [K]),
    ("Sum", {}, 13, [A, B, A[:1]]),
    ("Mean", {}, 13, [A, B, A[:1]]),
    ("Equal", {}, 13, [K, np.array([7, 5, 8])]),
    ("Equal", {}, 13, [P, Q]),
    ("Less", {}, 13, [A, B]),
    ("LessOrEqual", {}, 16, [K, J]),
    ("Greater", {}, 13, [A, B]),
    ("GreaterOrEqual", {}, 16, [K, J]),
    ("And", {}, 7, [P, Q]),
    ("Or", {}, 7, [P, Q]),
    ("Xor", {}, 7, [P, Q]),
    ("BitwiseAnd", {}, 18, [U, V]),
    ("BitwiseOr", {}, 18, [K.astype(np.int32), J.astype(np.int32)]),
    ("BitwiseXor", {}, 18, [U, V]),
    ("BitShift", {"direction": "LEFT"}, 11, [U, np.array([1, 2, 7], dtype=np.uint8)]),
    ("BitShift", {"direction": "RIGHT"}, 11, [U, np.array([1, 2, 7], dtype=np.uint8)]),
    ("Where", {}, 16, [Q[:, None], A, B]),
    ("Where", {}, 9, [P, K, J]),
    ("Clip", {}, 13, [A, np.array(-0.5, dtype=np.float32), np.array(0.25, dtype=np.float32)]),
    ("Clip", {}, 13, [A, None, np.array(0.25, dtype=np.float32)]),
    ("Clip", {}, 13, [A, np.array(-0.5, dtype=np.float32)]),
    ("Clip", {}, 13, [A]),
    ("Clip", {}, 13, [K, np.array(-3), np.array(4)]),
    ("Clip", {}, 13, [A, np.array(0.5, dtype=np.float32), np.array(-0.5, dtype=np.float32)]),
    ("Clip", {"min": -0.5, "max": 0.25}, 7, [A]),
    ("Clip", {"max": 0.25}, 10, [A]),
    ("Cast", {"to": 7}, 13, [10 * A]),
    ("Cast", {"to": 9}, 13, [np.array([0.0, -0.0, 0.1, np.inf], dtype=np.float32)]),
    ("Cast", {"to": 3}, 13, [np.array([200, -200, 5])]),
    ("Cast", {"to": 10}, 13, [100 * A]),
    ("Cast", {"to": 11}, 13, [A]),
    ("Cast", {"to": 1}, 13, [P]),
]


def test_every_kind_has_a_case() -> None:
    assert {c[0] for c in CASES} == {d.kind for d in DEFS} - {"Snake"}, "which ONNX does not have"


def test_snake() -> None:
    """The formula, its export, and numbers that do not fit."""
    n = Net(np.float64)
    x, rate, gain = n.input(2, 3, 5), n.input(3, 1, name="rate"), n.input(1, 1, 5, name="gain")
    graph = n.done(n.op("Snake", x, rate, gain))
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(dims) * 3 for name, dims in (("x", (2, 3, 5)), ("rate", (3, 1)), ("gain", (1, 1, 5)))
    }
    (got,) = evaluate(graph, feeds).values()
    want = feeds["x"] + feeds["gain"] * np.sin(feeds["rate"] * feeds["x"]) ** 2
    np.testing.assert_allclose(got, want, rtol=1e-12)
    (exported,) = evaluate(import_model(export_model(graph).to_bytes()), feeds).values()
    np.testing.assert_allclose(exported, want, rtol=1e-12)
    with pytest.raises(ShapeError, match="a rate and a gain that broadcast"):
        n.op("Snake", x, n.input(4, 2, 3, 5, name="more"), gain)


@pytest.mark.parametrize(("op", "attrs", "opset", "operands"), CASES)
def test_against_onnx(op: str, attrs: dict, opset: int, operands: list) -> None:
    case = Case(op, operands, attrs, opset)
    rank = max(x.ndim for x in operands if x is not None)
    first = {0: (0,)} if operands[0].ndim == rank and operands[0].shape[0] > 1 else None
    min_over_max = op == "Clip" and len(operands) == 3 and operands[1] is not None and operands[1] > operands[2]
    if op != "Clip" or (
        opset >= 13 and not min_over_max
    ):  # the evaluator's Clip of old opsets, and of min > max, differs
        check_case(case, "reference", symbolic=first)
    check_case(case, onnxruntime_outputs(case), symbolic=first)


def test_integer_division_rounds_toward_zero() -> None:
    a, b = np.array([7, -7, 7, -7, 0, -8], dtype=np.int32), np.array([2, 2, -2, -2, 5, 2], dtype=np.int32)
    (y,) = run(import_case(Case("Div", [a, b])), {"x0": a, "x1": b})
    assert list(y) == [3, -3, -3, 3, 0, -4]
    assert y.dtype == np.int32


def test_pow_takes_the_type_of_the_base() -> None:
    base, exponent = np.array([2.0, 3.0], dtype=np.float32), np.array([3.0, 2.0], dtype=np.float16)
    (y,) = run(import_case(Case("Pow", [base, exponent])), {"x0": base, "x1": exponent})
    assert y.dtype == np.float32
    base, exponent = np.array([2, 4]), np.array([-1, 2])
    (y,) = run(import_case(Case("Pow", [base, exponent])), {"x0": base, "x1": exponent})
    assert list(y) == [0, 16]


def test_shifts_past_the_width() -> None:
    x, y = np.array([-8, -8, 8, 1], dtype=np.int8), np.array([1, 9, 9, -1], dtype=np.int8)
    kernel = OPDEFS["BitShift"].kernel
    assert list(kernel(x, y, direction="RIGHT")[0]) == [-4, -1, 0, 0]
    assert list(kernel(x, y, direction="LEFT")[0]) == [-16, 0, 0, 0]


# ---------------------------------------------------------------- Cast

NUMERIC = [d for n, d in DTYPES.items() if not n.startswith("complex") and n != "fp8_e8m0"]  # which has no zero


@pytest.mark.parametrize("to", NUMERIC, ids=str)
def test_cast_between_all_types(to: DType) -> None:
    for source in NUMERIC:
        x = np.array([0, 1, 0, 1, 1]) if source == BOOL else np.array([0, 1, 2.5, 3.75, 12.0])
        x = x.astype(source)
        expected = x.astype(np.float64)
        if to in NARROW_INTEGERS:
            expected = np.trunc(expected)
        expected = expected != 0 if to == BOOL else expected.astype(to)
        number = next(n for n, d in ONNX_TYPES.items() if d == to)
        graph = import_case_of_cast(x, number)
        (y,) = run(graph, {"x": x})
        assert y.dtype == to
        assert np.array_equal(y.astype(np.float64), expected.astype(np.float64), equal_nan=True), source


def import_case_of_cast(x: Array, number: int) -> object:
    from onenode import GraphEmit

    from optdnn.ir.graph import Graph

    graph = Graph()
    ref = graph.add_input("x", tensor(x.dtype, *x.shape))
    (y,) = IMPORTERS["Cast"](NodeSpec("Cast", "", 19, "c", (ref,), ("y",), {"to": number}), GraphEmit(graph))
    graph.add_output(y, "y")
    return graph


def test_cast_saturates_fp8() -> None:
    x = np.array([1e6, -1e6, 449.0, np.inf, np.nan, 0.3], dtype=np.float32)
    for name, top in (("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        to = DTYPES[name]
        y = cast(x, to)[0].astype(np.float32)
        assert list(y[:2]) == [top, -top]
        assert y[3] == top
        assert np.isnan(y[4])
        loose = cast(x, to, saturate=False)[0].astype(np.float32)
        assert np.isnan(loose[0]) if name == "fp8_e4m3" else np.isposinf(loose[0])
    assert cast(np.array([300.0]), DTYPES["fp8_e4m3"])[0].astype(np.float32) == 288.0  # nearest even of 288 and 320


@pytest.mark.parametrize("to", [BF16, FP16, DTYPES["fp8_e4m3"], DTYPES["fp8_e5m2"]], ids=str)
def test_cast_rounds_once_to_nearest_even(to: DType) -> None:
    bits = {BF16: 8, FP16: 11}.get(to, 4 if to == DTYPES["fp8_e4m3"] else 3)
    ulp = 2.0 ** (1 - bits)
    tie, above = 1 + ulp / 2, 1 + ulp / 2 + 2.0**-45
    y = cast(np.array([tie, above, 1 + 3 * ulp / 2, -above, 1 + ulp / 2 - 2.0**-45]), to)[0].astype(np.float64)
    # ``above`` in float32 is the tie itself: rounding twice would give 1.
    assert list(y) == [1.0, 1 + ulp, 1 + 2 * ulp, -1 - ulp, 1.0]


def test_cast_to_a_type_without_storage_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="element type 8 "):
        import_case_of_cast(np.zeros(2, np.float32), 8)


def test_cast_like_imports_as_cast() -> None:
    graph = import_case(Case("CastLike", [A, np.zeros(1, np.float16)], opset=19))
    (op,) = graph.of_kind("Cast")
    assert op.attrs == CastAttrs(FP16)
    (y,) = run(graph, {"x0": A, "x1": np.zeros(1, np.float16)})
    assert np.array_equal(y, A.astype(np.float16))


def test_clip_of_old_opsets_takes_constant_bounds() -> None:
    extreme = float(np.finfo(np.float32).max)
    for attrs, count in (({"min": 0.0, "max": 6.0}, 3), ({"min": 0.0, "max": extreme}, 2), ({"min": -extreme}, 1)):
        (op,) = import_case(Case("Clip", [A], attrs, 6)).of_kind("Clip")
        assert len(op.inputs) == count


# ---------------------------------------------------------------- symbolic values


def test_symbolic_arithmetic() -> None:
    assert list(infer_value("Add", [N, 3], [1, 2])) == [N + 1, 5]
    assert list(infer_value("Sub", [N, 3], [N, 2])) == [0, 1]
    assert infer_value("Sub", [N, 3], [N, 2]).dtype == np.int64
    assert list(infer_value("Mul", [[N], [2]], [2, M]).reshape(-1)) == [2 * N, N * M, 4, 2 * M]
    assert list(infer_value("Div", [4 * N, N, 7], [2, 3, 2])) == [2 * N, N // 3, 3]
    assert list(infer_value("Mod", [4 * N, N], [2, 3])) == [0, N % 3]
    assert list(infer_value("Min", [N, N], [0, N + 2], [5, 7])) == [0, dim_min(N, 7)]
    assert list(infer_value("Max", [N], [M])) == [dim_max(N, M)]
    assert list(infer_value("Sum", [N], [M], [1])) == [N + M + 1]
    assert list(infer_value("Pow", [N, M], [2, 0])) == [N * N, 1]
    assert infer_value("Pow", [2, 2], [N, 1]) is None
    assert list(infer_value("Clip", [N, 9], 0, 7)) == [dim_min(N, 7), 7]


def test_symbolic_division_truncates() -> None:
    # (n - 4) / 3 rounds toward zero, which is not n // 3 arithmetic below zero.
    value = infer_value("Div", [N - 4], [3])[0]
    from optdnn.dim import evaluate

    assert [evaluate(value, {"n": n}) for n in (1, 2, 4, 6, 7)] == [-1, 0, 0, 0, 1]
    remainder = infer_value("Mod", [N - 4], [3], attrs=ModAttrs(fmod=True))[0]
    assert [evaluate(remainder, {"n": n}) for n in (1, 2, 3, 9)] == [0, -2, -1, 2]
    assert infer_value("Div", [N], [M - 4]) is None  # the divisor's sign is unknown


def test_symbolic_comparison_is_decided_by_ranges() -> None:
    assert list(infer_value("Equal", [N, 1, N], [0, 1, N])) == [False, True, True]
    assert infer_value("Equal", [N], [3]) is None
    assert list(infer_value("Less", [N, N], [1, N + 1])) == [False, True]
    assert list(infer_value("GreaterOrEqual", [N], [1])) == [True]
    assert list(infer_value("LessOrEqual", [N + 1], [N])) == [False]
    assert list(infer_value("Greater", [2 * N], [N - 1])) == [True]
    condition = infer_value("Equal", [-1, N], [-1, -1])
    assert list(infer_value("Where", condition, [7, 7], [N, M])) == [7, M]


def test_symbolic_cast() -> None:
    assert list(infer_value("Cast", [N, 2], attrs=CastAttrs(DTYPES["int32"]))) == [N, 2]
    assert list(infer_value("Cast", [N, 0], attrs=CastAttrs(BOOL))) == [True, False]
    assert infer_value("Cast", [N], attrs=CastAttrs(FP32)) is None
    value = infer_value("Cast", [3, 4], attrs=CastAttrs(DTYPES["int32"]))
    assert value.dtype == np.int32


def test_large_values_are_not_evaluated() -> None:
    assert infer_value("Add", np.zeros(256, np.int64), 1) is not None
    assert infer_value("Add", np.zeros(257, np.int64), 1) is None
    assert infer_value("Add", np.zeros((16, 1), np.int64), np.zeros((1, 17), np.int64)) is None


# ---------------------------------------------------------------- types


def test_broadcast_of_symbols_and_unknown_ranks() -> None:
    assert shape_of("Add", tensor(FP32, N, 1, 4), tensor(FP32, 3, 1)) == (N, 3, 4)
    assert shape_of("Where", tensor(BOOL, 1, N), tensor(FP32, M, 1), tensor(FP32)) == (M, N)
    unknown = tensor(FP32).with_shape(None)
    assert shape_of("Add", unknown, tensor(FP32, 3)) is None
    assert infer("Less", unknown, tensor(FP32, 3)).types[0].dtype == BOOL


REFUSED = [
    ("Add", [tensor(FP32, 2, 3), tensor(FP32, 2)], None, r"\[2, 3\] and \[2\] do not broadcast"),
    ("Add", [tensor(FP32, 2), tensor(FP64, 2)], None, "different types"),
    ("Add", [tensor(FP32, 2)], None, "needs 2 operands"),
    ("Mul", [tensor(BOOL, 2), tensor(BOOL, 2)], None, "numeric operands"),
    ("And", [tensor(FP32, 2), tensor(FP32, 2)], None, "bool operands"),
    ("BitwiseAnd", [tensor(FP32, 2), tensor(FP32, 2)], None, "integer operands"),
    ("BitShift", [tensor(FP32, 2), tensor(FP32, 2)], BitShiftAttrs("LEFT"), "integer operands"),
    ("Mean", [tensor(INT64, 2)], None, "floating-point operands"),
    ("Max", [], None, "needs an operand"),
    ("Pow", [tensor(BOOL, 2), tensor(FP32, 2)], None, "numeric operands"),
    ("PRelu", [tensor(FP32, 2, 3), tensor(FP32, 4, 2, 3)], None, "slope that broadcasts"),
    ("PRelu", [tensor(FP32, 2, 1), tensor(FP32, 3)], None, "slope that broadcasts"),
    ("Where", [tensor(FP32, 2), tensor(FP32, 2), tensor(FP32, 2)], None, "bool condition"),
    ("Where", [tensor(BOOL, 2), tensor(FP32, 2), tensor(FP16, 2)], None, "different types"),
    ("Clip", [tensor(FP32, 2), tensor(FP32, 2)], None, "bounds of one element"),
    ("Clip", [tensor(FP32, 2), tensor(FP16)], None, "different types"),
]


@pytest.mark.parametrize(("kind", "types", "attrs", "because"), REFUSED)
def test_refused(kind: str, types: list, attrs: object, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        infer(kind, *types, attrs=attrs)


def test_bf16_arithmetic_rounds_once() -> None:
    a, b = (normal(50, seed=s).astype(ml_dtypes.bfloat16) for s in (1, 2))
    (y,) = run(import_case(Case("Mul", [a, b])), {"x0": a, "x1": b})
    assert y.dtype == BF16
    assert np.array_equal(y, (a.astype(np.float32) * b.astype(np.float32)).astype(BF16))
