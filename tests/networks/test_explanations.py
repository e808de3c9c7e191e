"""The judge's knowledge of ONNX Runtime's faults and of its own blind spots: each entry explains its case, and no other error."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from random_nets.explanations import EXPLANATIONS
from random_nets.instrument import halved, in_half, instrumented, rounding
from random_nets.judge import Verdict, judged
from random_nets.oracle import Feeds, NoOracleError, Oracle, Results

pytest.importorskip("onnxruntime")


def parsed(signature: str, nodes: str, constants: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g {signature} <{constants}> {{ {nodes} }}'
    )


def verdict(
    model: onnx.ModelProto, feeds: Feeds, change: Results, precision: str, calibration: tuple[Feeds, ...] = ()
) -> Verdict:
    """The verdict on the right results after ``change`` has replaced some."""
    oracle = Oracle(model)
    want = oracle.run(feeds)
    return judged(oracle, [feeds], [{**want, **change}], [want], precision, calibration)


def name(found: Verdict) -> str:
    return found.detail.partition(":")[0] if found.kind == "explained" else found.kind


@pytest.mark.parametrize(
    ("size", "precision", "wanted"), [(0.05, "fp16", "roundings"), (1.0, "fp16", "wrong"), (0.05, "fp32", "wrong")]
)
def test_roundings_on_the_way(size: float, precision: str, wanted: str) -> None:
    """(1.245 - x) + x is constant except for its rounding, which the normalization magnifies."""
    model = parsed(
        "(float[1, 1, 64] x) => (float[1, 1, 64] y)",
        "d = Sub(c, x) f = Add(d, x) y = InstanceNormalization<epsilon = 0.001>(f, g, b)",
        "float c = {1.245}, float[1] g = {1}, float[1] b = {-0.84}",
    )
    rng = np.random.default_rng(3)
    feeds = {"x": rng.standard_normal((1, 1, 64)).astype(np.float32)}
    got = -0.84 + size * rng.uniform(-1, 1, (1, 1, 64))
    assert name(verdict(model, feeds, {"y": got.astype(np.float32)}, precision)) == wanted


def test_values_outside_of_the_calibrated_ranges() -> None:
    """A sum over 64 elements saturates at the sum over 8 elements of the calibration."""
    model = parsed(
        "(float[2, S] x) => (float[2, 1] y)", "s = ReduceSum(x, a) y = Mul(s, c)", "int64[1] a = {1}, float c = {2}"
    )
    seen, run = ({"x": np.ones((2, n), np.float32)} for n in (8, 64))
    saturated = {"y": np.full((2, 1), 16, np.float32)}
    other = {"y": np.full((2, 1), -500, np.float32)}
    assert name(verdict(model, run, saturated, "int8", (seen,))) == "outside_calibration"
    assert name(verdict(model, run, other, "int8", (seen,))) == "wrong"
    assert name(verdict(model, run, saturated, "int8", (run,))) == "wrong"
    assert name(verdict(model, run, saturated, "int8")) == "wrong"


SATURATING = parsed(
    "(float[2, S, 2] x) => (int64[2] y)",
    "s = ReduceSum<keepdims = 0>(x, a) p = MatMul(s, w) y = ArgMax<axis = 0, keepdims = 0>(p)",
    "int64[1] a = {1}, float[2, 2] w = {-1, -0.1, -1, 0.1}",
)


@pytest.mark.parametrize(("places", "wanted"), [([1, 0], "outside_calibration"), ([0, 1], "wrong"), ([1, 1], "wrong")])
def test_places_of_the_largest_after_saturated_values(places: list[int], wanted: str) -> None:
    """The sums (8, 8) and (24, 1.9) saturate at 2 as operands of the product, so the first has the larger total. Its products
    would be equal if they saturated, too. Other positions are wrong."""
    seen = {"x": np.array([[[1, 0.5]] * 2, [[0.5, 1]] * 2], np.float32)}
    run = {"x": np.array([[[1, 1]] * 8, [[3, 0.2375]] * 8], np.float32)}
    assert Oracle(SATURATING).run(run)["y"].tolist() == [0, 0]
    change = {"y": np.array(places)}
    assert name(verdict(SATURATING, run, change, "int8", (seen,))) == wanted
    assert name(verdict(SATURATING, run, change, "int8", (run,))) == "wrong"


@pytest.mark.parametrize(
    ("change", "precision", "wanted"),
    [
        ([True, False, False], "fp16", "halves"),
        ([True, False, False], "fp32", "wrong"),
        ([False, True, False], "fp16", "wrong"),  # fp16 does not round 1.002 to 1
        ([True, True, False], "fp16", "wrong"),
        ([True, True, False], "bf16", "halves"),
    ],
)  # fmt: skip
def test_values_that_are_equal_in_half_precision(change: list[bool], precision: str, wanted: str) -> None:
    model = parsed("(float[3] x) => (bool[3] y)", "s = Sign(x) y = Equal(s, x)")
    feeds = {"x": np.array([1.0002, 1.002, -0.5], np.float32)}
    assert Oracle(model).run(feeds)["y"].tolist() == [False, False, False]
    assert name(verdict(model, feeds, {"y": np.array(change)}, precision)) == wanted


@pytest.mark.parametrize(
    ("value", "precision", "wanted"),
    [
        (1.25, "bf16", "halves"), (1.25, "fp16", "halves"), (1.25, "fp32", "wrong"), (1.4, "bf16", "wrong"),
        (0.9, "bf16", "wrong"),
    ],
)  # fmt: skip
def test_floats_that_follow_from_a_decision(value: float, precision: str, wanted: str) -> None:
    model = parsed(
        "(float[3] x) => (float[3] y)",
        "d = Equal(x, c) f = Cast<to = 1>(d) y = Add(f, q)",
        "float c = {1.0003}, float q = {0.25}",
    )
    feeds = {"x": np.array([1, -1, 1], np.float32)}
    got = np.array([value, 0.25, value], np.float32)
    assert name(verdict(model, feeds, {"y": got}, precision)) == wanted


@pytest.mark.parametrize(
    ("change", "precision", "wanted"),
    [
        ([True, False, False], "fp16", "near_equals"),
        ([True, False, False], "fp32", "wrong"),
        ([False, True, False], "fp16", "wrong"),
        ([True, True, True], "bf16", "wrong"),
    ],
)
def test_values_that_the_roundings_before_them_may_make_equal(change: list[bool], precision: str, wanted: str) -> None:
    """The sum is 1.00075, which is no 1 in float16 either; a product before it with other roundings may give 1."""
    model = parsed("(float[3] x) => (bool[3] y)", "v = Add(x, q) s = Sign(v) y = Equal(s, v)", "float q = {0.25}")
    feeds = {"x": np.array([0.75075, 0.7545, -0.5], np.float32)}
    assert Oracle(model).run(feeds)["y"].tolist() == [False, False, False]
    assert name(verdict(model, feeds, {"y": np.array(change)}, precision)) == wanted


@pytest.mark.parametrize(
    ("size", "precision", "value", "wanted"),
    [
        (1e5, "bf16", np.nan, "huge_scores"),
        (1e5, "fp32", np.nan, "wrong"),
        (1e3, "bf16", np.nan, "wrong"),
        (1e5, "bf16", 0.5, "wrong"),
    ],
)
def test_scores_beyond_the_exponential(size: float, precision: str, value: float, wanted: str) -> None:
    model = parsed(
        "(float[4, 4] x) => (float[4, 4] y)",
        "s = MatMul(x, x) w = Softmax(s) y = MatMul(w, c)",
        "float[4, 1] c = {1, 2, 3, 4}",
    )
    x = (size * np.eye(4)).astype(np.float32)
    assert name(verdict(model, {"x": x}, {"y": np.full((4, 1), value, np.float32)}, precision)) == wanted


def test_half_precision_of_constants_and_of_results() -> None:
    model = parsed(
        "(float[1] x) => (float[1] y, float[1] p)", "p = Mul(x, c) y = Mul(x, d)", "float c = {1.0002}, float d = {1.5}"
    )
    x = np.array([1.0007], np.float32)
    constants = Oracle(in_half(model, "fp16", results=False)).run({"x": x})
    results = Oracle(in_half(model, "fp16", results=True)).run({"x": x})
    assert constants["p"] == x
    assert constants["y"] == np.float32(1.5) * x
    assert results["p"] == halved(x, "fp16") != x
    assert results["y"] == halved(np.float32(1.5) * x, "fp16")


LOOP = parsed(
    "(float[N, 6] x, int64 trips) => (float[?, 6] y, float[?, 6] z)",
    """l, rows = Loop (trips, go, x) <body = b (int64 i, bool c, float[?, 6] u) => (bool k, float[?, 6] v, float[?, 6] w)
        { k = Identity(c) v = Tanh(u) w = Identity(v) }>
    y = ReduceSum<keepdims = 0>(rows, a)
    z = Relu(x)""",
    "bool go = {1}, int64[1] a = {0}",
)


@pytest.mark.parametrize(
    ("trips", "output", "rows", "wanted"),
    [
        (0, "y", 2, "no_trips"),
        (1, "y", 3, "wrong"),  # the loop ran: its rows have a size
        (0, "z", 3, "wrong"),  # comes from no loop
    ],
)  # fmt: skip
def test_rows_of_a_loop_without_trips(trips: int, output: str, rows: int, wanted: str) -> None:
    feeds = {"x": np.ones((2, 6), np.float32), "trips": np.array(trips)}
    assert Oracle(LOOP).run(feeds)["y"].shape == ((0, 6) if trips == 0 else (2, 6))
    assert name(verdict(LOOP, feeds, {output: np.zeros((rows, 6), np.float32)}, "fp32")) == wanted


def test_a_dispute_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only optdnn computes in float64, its agreement with itself proves nothing, but an explanation does."""
    feeds = {"x": np.ones((2, 6), np.float32), "trips": np.array(0)}
    for output, wanted in (("y", "no_trips"), ("z", "disputed")):
        got = {output: np.zeros((2, 6), np.float32)}
        monkeypatch.setattr("random_nets.judge.in_float64", lambda *_, got=got: (got, "optdnn"))
        assert name(verdict(LOOP, feeds, got, "fp32")) == wanted


def test_an_explanation_that_cannot_be_tried_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise NoOracleError("no")

    feeds = {"x": np.ones((2, 6), np.float32), "trips": np.array(0)}
    monkeypatch.setattr("random_nets.explanations.values", refused)
    assert name(verdict(LOOP, feeds, {"y": np.zeros((2, 6), np.float32)}, "fp32")) == "wrong"
    assert len(EXPLANATIONS) == 6


def test_values_in_branches_are_moved_and_sizes_are_not() -> None:
    model = parsed(
        "(float[4] x, bool c) => (float[4] y, float[?] r)",
        """y = If (c) <then_branch = a () => (float[4] p) { p = Exp(x) }, else_branch = b () => (float[4] q) { q = Relu(x) }>
        three = Sqrt(nine) r = Range(zero, three, one)""",
        "float nine = {9}, float zero = {0}, float one = {1}",
    )
    feeds = {"x": np.arange(4, dtype=np.float32), "c": np.array(True)}
    moved = Oracle(instrumented(model, rounding(0.5, 1)))
    assert not np.allclose(moved.run(feeds)["y"], Oracle(model).run(feeds)["y"])
    np.testing.assert_array_equal(moved.run(feeds)["r"], np.arange(3))
    relu = {**feeds, "c": np.array(False)}
    np.testing.assert_array_equal(moved.run(relu)["y"], Oracle(model).run(relu)["y"])
