"""deviation_norms: divisions by a deviation that no norm of ONNX expresses become one op; other arithmetic stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.norm import DeviationNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.deviation_norms import DeviationNorms
from optdnn.types import FP32

PASS, EPS = DeviationNorms(), 1e-3


def mean(n: Net, x: Value, axis: int = -1) -> Value:
    return n.op("ReduceMean", x, n.ints(axis), attrs=ReduceAttrs())


def variance(n: Net, x: Value, axis: int = -1, corrected: float | None = None) -> Value:
    d = n.op("Sub", x, mean(n, x, axis))
    v = mean(n, n.op("Mul", d, d), axis)
    return v if corrected is None else n.op("Mul", v, corrected)


def length(n: Net, x: Value) -> Value:
    return n.op("ReduceL2", x, n.ints(-1), attrs=ReduceAttrs())


def root_of_sum(n: Net, x: Value) -> Value:
    return n.op("Sqrt", n.op("ReduceSum", n.op("Mul", x, x), n.ints(-1), attrs=ReduceAttrs()))


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("scaled", ["before", "after", "no"])
def test_an_epsilon_after_the_root(axis: int, scaled: str) -> None:
    """``g (x - mean) / (std + epsilon) + b`` of "The Annotated Transformer", over rows and over channels."""
    n = Net(np.float64)
    x, shape = n.input(2, 8, 6), (8, 1) if axis == 1 else (6,)
    d, count = n.op("Sub", x, mean(n, x, axis)), shape[0]
    std = n.op("Sqrt", n.op("Mul", mean(n, n.op("Mul", d, d), axis), count / (count - 1)))
    numerator = n.op("Mul", d, n.random(*shape)) if scaled == "before" else d
    y = n.op("Div", numerator, n.op("Add", std, EPS))
    y = n.op("Add", n.op("Mul", y, n.random(*shape)), n.random(*shape)) if scaled == "after" else y
    kinds = {"DeviationNormalization": 1} | ({"Transpose": 2} if axis == 1 else {})
    graph, _ = check_pass(PASS, n.done(y), changes=1, kinds=kinds, rules={"centered_deviation_norm": 1})
    (op,) = graph.of_kind("DeviationNormalization")
    assert len(op.inputs) == 2 + (scaled == "after")
    want = DeviationNormAttrs(-1, 0.0, EPS * ((count - 1) / count) ** 0.5)
    assert op.attrs.root_epsilon == pytest.approx(want.root_epsilon)
    assert (op.attrs.axis, op.attrs.epsilon, op.attrs.about_mean, op.attrs.centered) == (-1, 0.0, True, True)


@pytest.mark.parametrize("corrected", [None, 8 / 7])
@pytest.mark.parametrize("outside", [False, True])
def test_the_mean_stays(corrected: float | None, outside: bool) -> None:
    """``x / sqrt(var + epsilon)``: timm's SimpleNorm; and ``x / (std + epsilon)``."""
    n = Net(np.float64)
    x = n.input(2, 3, 8)
    v = variance(n, x, -1, corrected)
    root = n.op("Add", n.op("Sqrt", v), EPS) if outside else n.op("Sqrt", n.op("Add", v, EPS))
    y = n.op("Mul", n.op("Mul", x, n.op("Reciprocal", root)), n.random(8))
    graph, _ = check_pass(PASS, n.done(y), changes=1, kinds={"DeviationNormalization": 1}, rules={"deviation_norm": 1})
    (op,) = graph.of_kind("DeviationNormalization")
    assert (op.attrs.about_mean, op.attrs.centered) == (True, False)
    assert op.attrs.epsilon == pytest.approx(0 if outside else EPS / (corrected or 1))


@pytest.mark.parametrize("norm", [length, root_of_sum])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_an_epsilon_added_to_the_length(norm: Callable[[Net, Value], Value], factor: float | None) -> None:
    n = Net(np.float64)
    x = n.input(5, 16)
    spread = norm(n, x) if factor is None else n.op("Mul", norm(n, x), factor)
    y = n.op("Div", x, n.op("Add", spread, EPS))
    graph, _ = check_pass(PASS, n.done(y), changes=1, kinds={"DeviationNormalization": 1})
    (op,) = graph.of_kind("DeviationNormalization")
    assert (op.attrs.about_mean, op.attrs.centered) == (False, False)
    assert op.attrs.root_epsilon == pytest.approx(EPS / 4 / (factor or 1))


def test_other_arithmetic_stays() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    y = n.op("Div", n.input(2, 8, name="other"), n.op("Add", n.op("Sqrt", variance(n, x)), EPS))
    check_untouched(PASS, n.done(y))


def refused(name: str) -> tuple[Net, Value]:
    n = Net(np.float64)
    x = n.input(2, symbol("C") if name == "size" else 4, 8)
    axis = 0 if name == "axes" else 1 if name == "size" else -1
    d = n.op("Sub", x, mean(n, x, 1 if name == "two axes" else axis))
    square = n.op("Mul", d, d)
    if name == "fp32":
        square = n.op("Cast", square, attrs=CastAttrs(FP32))
    v = mean(n, square, axis)
    if name == "fp32":
        v = n.op("Cast", v, attrs=CastAttrs(np.dtype(np.float64)))
    if name == "correction":
        v = n.op("Mul", v, -2.0)
    epsilon = -EPS if name == "epsilon" else EPS
    return n, n.op("Div", x if name == "two axes" else d, n.op("Add", n.op("Sqrt", v), epsilon))


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("axes", "axes are neither the last ones nor the channels"),
        ("size", "the size of the normalized axes is not known"),
        ("two axes", r"the mean runs over axes \(1,\), the variance over \(2,\)"),
        ("fp32", "the squares are converted to float32"),
        ("correction", "the variance is multiplied by -2"),
        ("epsilon", "an epsilon is negative"),
    ],
)
def test_refusals(name: str, because: str) -> None:
    n, y = refused(name)
    check_refused(PASS, n.done(y), because=because)


def test_a_deviation_that_is_read_elsewhere_is_refused() -> None:
    n = Net(np.float64)
    x = n.input(2, 8)
    s = n.op("Sqrt", variance(n, x))
    check_refused(PASS, n.done(n.op("Div", x, n.op("Add", s, EPS)), s), because="an inner value is an output")
