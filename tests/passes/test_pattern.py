"""The matcher: a match does not depend on the form of the expression, or on the operators around it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.ir.graph import Value
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.fuse_activation import FuseActivation
from optdnn.passes.support.pattern import Power, Scalar, Var, find, node, product, root_kinds, total

X, Y = Var("x"), Var("y")


def multiplied(n: Net, factors: list[Value | float], rng: random.Random) -> Value:
    """The product of some factors in a random order and nesting; constants also as divisors, or after a negation."""
    parts = list(factors)
    rng.shuffle(parts)
    sign = 1
    while len(parts) > 1:
        b, a = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        if isinstance(a, float) and isinstance(b, float):
            parts.append(a * b)
        elif isinstance(b, float) and rng.random() < 0.5:
            parts.append(n.op("Div", a, 1 / b))
        else:
            parts.append(n.op("Mul", a, b))
        if isinstance(parts[-1], Value) and rng.random() < 0.2:
            parts[-1], sign = n.op("Neg", parts[-1]), -sign
    result = parts[0]
    assert isinstance(result, Value)
    return result if sign == 1 else n.op("Neg", result)


def added(n: Net, terms: list[Value | float], rng: random.Random) -> Value:
    """The sum of some terms in a random order and nesting, constants also subtracted."""
    parts = list(terms)
    rng.shuffle(parts)
    while len(parts) > 1:
        a, b = parts.pop(), parts.pop()
        if isinstance(b, float) and rng.random() < 0.5:
            parts.append(n.op("Sub", a, -b))
        else:
            parts.append(n.op(rng.choice(["Add", "Sum"]), a, b))
    result = parts[0]
    assert isinstance(result, Value)
    return result


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), tanh=st.booleans(), of_product=st.booleans())
def test_a_gelu_is_found_however_it_is_written(seed: int, tanh: bool, of_product: bool) -> None:
    rng, n = random.Random(seed), Net(np.float64)
    x = n.input(3, 4)
    if of_product:
        x = n.op("Mul", x, n.random(4))
    if tanh:
        cube = (
            multiplied(n, [0.044715, x, x, x], rng)
            if rng.random() < 0.5
            else multiplied(n, [0.044715, n.op("Pow", x, 3.0)], rng)
        )
        curve = n.op("Tanh", multiplied(n, [math.sqrt(2 / math.pi), added(n, [x, cube], rng)], rng))
    else:
        curve = n.op("Erf", multiplied(n, [math.sqrt(0.5), x], rng))
    y = multiplied(n, [0.5, x, added(n, [curve, 1.0], rng)], rng)
    kinds = {"Gelu": 1, "Mul": 1} if of_product else {"Gelu": 1}
    check_pass(FuseActivation(), n.done(y), changes=1, kinds=kinds, seeds=(1, 2))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), where=st.integers(0, 2), factor=st.sampled_from([0.999, 1.001, 2.0]))
def test_a_gelu_with_a_wrong_number_is_none(seed: int, where: int, factor: float) -> None:
    rng, n = random.Random(seed), Net(np.float32)
    numbers = [0.5, 1.0, math.sqrt(0.5)]
    numbers[where] *= factor
    x = n.input(3, 4)
    curve = n.op("Erf", multiplied(n, [numbers[2], x], rng))
    check_untouched(FuseActivation(), n.done(multiplied(n, [numbers[0], x, added(n, [curve, numbers[1]], rng)], rng)))


def matches(n: Net, value: Value, pattern: object) -> int:
    return sum(1 for _ in find(n.graph, value, pattern))  # type: ignore[arg-type]


def test_exponents_are_gathered() -> None:
    n = Net(np.float64)
    x, y = n.input(4), n.input(4, name="y")
    for v in (n.op("Div", x, n.op("Sqrt", y)), n.op("Mul", n.op("Pow", y, -0.5), x)):
        assert matches(n, v, product(1.0, X, Power(Y, -0.5))) == 1
        assert matches(n, v, product(1.0, X, Power(Y, 0.5))) == 0
    assert matches(n, n.op("Div", x, n.op("Reciprocal", y)), product(1.0, X, Y)) == 2
    assert matches(n, n.op("Div", n.op("Sqrt", x), 2.0), product(0.5, Power(X, 0.5))) == 1


def test_a_root_of_a_square_is_not_taken_apart() -> None:
    n = Net(np.float64)
    x = n.input(4)
    absolute = n.op("Sqrt", n.op("Mul", x, x))  # |x|, not x
    assert matches(n, absolute, product(1.0, X)) == 1
    assert matches(n, absolute, product(1.0, Power(X, 0.5))) == 1
    assert matches(n, n.op("Mul", absolute, absolute), product(1.0, X, X)) == 1
    assert matches(n, n.op("Mul", absolute, absolute), product(1.0, X, X, X, X)) == 0


def test_an_integer_exponent_of_pow() -> None:
    n = Net(np.float64)
    square = n.op("Pow", n.input(4), n.const(2, np.int64))
    assert matches(n, square, product(1.0, X, X)) == 1


def test_signs_of_terms() -> None:
    n = Net(np.float64)
    x, y = n.input(4), n.input(4, name="y")
    minus = total(0.0, node("Exp", X), product(-1.0, node("Log", Y)))
    e, log = n.op("Exp", x), n.op("Log", y)
    assert matches(n, n.op("Sub", e, log), minus) == 1
    assert matches(n, n.op("Add", n.op("Neg", log), e), minus) == 1
    assert matches(n, n.op("Neg", n.op("Sub", log, e)), minus) == 1
    assert matches(n, n.op("Add", e, log), minus) == 0
    assert matches(n, n.op("Sub", log, e), minus) == 0


def test_a_name_is_one_value() -> None:
    n = Net(np.float64)
    x, y = n.input(4), n.input(4, name="y")
    assert matches(n, n.op("Mul", n.op("Exp", x), x), product(1.0, X, node("Exp", X))) == 1
    assert matches(n, n.op("Mul", n.op("Exp", x), y), product(1.0, X, node("Exp", X))) == 0


def test_operands_of_other_kinds_keep_their_order() -> None:
    n = Net(np.float64)
    x, y = n.input(4), n.input(4, name="y")
    pattern = node("PRelu", node("Exp", X), Y)
    assert matches(n, n.op("PRelu", n.op("Exp", x), y), pattern) == 1
    assert matches(n, n.op("PRelu", y, n.op("Exp", x)), pattern) == 0
    assert matches(n, n.op("Max", y, n.op("Exp", x)), node("Max", node("Exp", X), Y)) == 1


@pytest.mark.parametrize("kind", ["Concat", "Max", "Mean", "Min", "Sum"])
def test_all_operands_are_in_the_pattern_where_there_may_be_any_number(kind: str) -> None:
    n = Net(np.float64)
    x, y, attrs = n.input(4), n.input(4, name="y"), ConcatAttrs(0) if kind == "Concat" else None
    pattern = node(kind, node("Exp", X), Y)
    assert matches(n, n.op(kind, n.op("Exp", x), y, attrs=attrs), pattern) == 1
    assert matches(n, n.op(kind, n.op("Exp", x), y, y, attrs=attrs), pattern) == 0


def test_an_absent_operand_is_asked_for() -> None:
    n = Net(np.float64)
    x = n.input(4)
    upper = node("Clip", X, None, Scalar(6.0))
    assert matches(n, n.op("Clip", x, None, 6.0), upper) == 1
    assert matches(n, n.op("Clip", x, 0.0, 6.0), upper) == 0
    assert matches(n, n.op("Clip", x), upper) == 0


def test_constants_count_within_their_own_rounding() -> None:
    for dtype, number, expected in ((np.float32, 1.4142135, 1), (np.float64, 1.4142135, 0), (np.float16, 1.414, 1)):
        n = Net(dtype)
        assert matches(n, n.op("Mul", n.input(4), number), product(math.sqrt(2), X)) == expected


def test_integers_are_no_products() -> None:
    n = Net(np.int64)
    assert matches(n, n.op("Mul", n.input(4), n.input(4, name="y")), product(1.0, X, Y)) == 0


def test_a_bare_name_cannot_be_a_root() -> None:
    with pytest.raises(TypeError, match="cannot be the root"):
        root_kinds(X)
