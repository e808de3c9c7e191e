"""Arithmetic in the names of dimensions: accepted forms, their meaning, and texts that stay names."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optdnn.dim import Dim, DimLike, dim_max, dim_min, evaluate, floordiv, mod, symbol
from optdnn.dim_text import TEXT_LIMIT, expressions, lone, parse_dim
from optdnn.errors import ShapeError

A, B = symbol("a"), symbol("b")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a", A),
        ("past_sequence_length + 1", symbol("past_sequence_length") + 1),
        ("past_sequence_length + sequence_length", symbol("past_sequence_length") + symbol("sequence_length")),
        ("batch*heads", symbol("batch") * symbol("heads")),
        ("2*s0", 2 * symbol("s0")),
        ("a+2*b", A + 2 * B),
        ("(a + 2) * b", A * B + 2 * B),
        ("a - b - 1", A - B - 1),
        ("a - (b - 1)", A - B + 1),
        ("-a + b", B - A),
        ("8 - -a", A + 8),
        ("-a**2", -(A * A)),
        ("2*a**3", 2 * A * A * A),
        ("a // 2 * b", (A // 2) * B),
        ("a*b//2", (A * B) // 2),
        ("a % 4 + 1", mod(A, 4) + 1),
        ("floor(a/2)", A // 2),
        ("floor((a - 1)/2) + 1", (A - 1) // 2 + 1),
        ("floor(2*a/(b + 1))", floordiv(2 * A, B + 1)),
        ("ceil(a/2)", (A + 1) // 2),
        ("ceiling(a/4)*4", -((-A) // 4) * 4),
        ("Max(1, a)", dim_max(1, A)),
        ("min(a, b, 7)", dim_min(dim_min(A, B), 7)),
        ("FloorDiv(a, 3)", A // 3),
        ("Mod(a, 3)", mod(A, 3)),
        ("x.0 + past_key_values.1.key.2", symbol("x.0") + symbol("past_key_values.1.key.2")),
        ("floor + 1", symbol("floor") + 1),
        ("größe + 1", symbol("größe") + 1),
    ],
)
def test_texts_that_are_read(text: str, wanted: DimLike) -> None:
    for spaced in (text, f"  {text} ", text.replace(" ", ""), text.replace("*", " * ").replace(" *  * ", " ** ")):
        found = parse_dim(spaced)
        for a in range(6):  # forms with the same meaning: ceil
            sizes = {s.name: a + k for k, s in enumerate(sorted(wanted.symbols(), key=str))}  # type: ignore[union-attr]
            assert found is not None
            assert evaluate(found, sizes) == evaluate(wanted, sizes)
    if "ceil" not in text:
        assert found == wanted


NONSENSE = [
    "",
    " ",
    "a b",
    "a +",
    "+ a",
    "* a",
    "(a",
    "a)",
    "a))(",
    "()",
    "2a",
    "a/2",
    "a + b/2",
    "floor(a/2 + 1)",
    "floor(a/2*3)",
    "floor(a, b)",
    "floor()",
    "round(a)",
    "a(b)",
    "min()",
    "min(a,)",
    "mod(a)",
    "floordiv(a, b, 2)",
    "a // 0",
    "a % 0",
    "a ** b",
    "a ** 0",
    "a ** 9",
    "a ** -1",
    "1.5*a",
    "1e3*a",
    "a = b",
    "a > 1",
    "a, b",
    "batch_size x num_heads",
    "onnx::Shape_1 + 1",
    "a; import os",
    "__import__('os')",
    "17",
    "2*3",
    "a - a",
    f"a + {1 << 70}",
    "(" * 60 + "a" + ")" * 60 + " +",
    "(" * TEXT_LIMIT + "a" + ")" * TEXT_LIMIT,
    "a" + " + 1" * TEXT_LIMIT,
]


@pytest.mark.parametrize("text", NONSENSE)
def test_texts_that_are_no_expression(text: str) -> None:
    assert parse_dim(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "((((((a**8)**8)**8)**8)**8)**8)**8",
        "a*(((((9**8)**8)**8)**8)**8)**8",
        "(a+b+c+d+e)**8*(f+g+h+i+j)**8",
        "(a+b)*(c+d)*(e+f)*(g+h)*(i+j)*(k+l)*(m+n)*(o+p)*(q+r)*(s+t)",
        "floor(" * 10 + "a" + "**2/3)" * 10,
    ],
)
def test_a_short_text_of_a_huge_expression_is_none(text: str) -> None:
    begun = time.perf_counter()
    assert len(text) <= TEXT_LIMIT
    assert parse_dim(text) is None
    assert time.perf_counter() - begun < 2


def _dims() -> st.SearchStrategy[DimLike]:
    leaves = st.sampled_from([A, B, symbol("s.0"), 1, 2, 3])
    joined = {
        "+": lambda x, y: x + y,
        "-": lambda x, y: x - y,
        "*": lambda x, y: x * y,
        "//": lambda x, y: x if y == 0 else floordiv(x, y),
        "%": lambda x, y: x if y == 0 else mod(x, y),
        "max": dim_max,
        "min": dim_min,
    }
    return st.recursive(
        leaves,
        lambda d: st.builds(lambda o, x, y: joined[o](x, y), st.sampled_from(sorted(joined)), d, d),
        max_leaves=5,
    )


@given(_dims())
def test_the_text_of_a_dimension_reads_as_the_same(d: DimLike) -> None:
    if isinstance(d, Dim) and len(str(d)) <= TEXT_LIMIT:
        sizes = {"a": 3, "b": 5, "s.0": 4}
        found = parse_dim(str(d))
        assert found is not None
        assert str(found) == str(d)
        try:
            want = evaluate(d, sizes)
        except ShapeError:  # a division by a size that is 0
            return
        assert evaluate(found, sizes) == want


def test_expressions_are_those_of_symbols_that_stand_alone() -> None:
    dims = ["a", "b.1", 3, "a + b.1", "2*a", "a + c", "batch-size", "d + 1", "c + 1", "x:0.0"]
    assert expressions(dims) == {"a + b.1": A + symbol("b.1"), "2*a": 2 * A}
    # c occurs only in expressions: there is no equation for it
    assert "a + c" in expressions([*dims, "c"])
    # a name with a range is a symbol, even if it looks like arithmetic
    assert expressions(dims, {"2*a"}) == {"a + b.1": A + symbol("b.1")}


def test_lone() -> None:
    assert [lone(d) for d in (A, A + 1, 2 * A, A * A, A // 2, 7)] == ["a", None, None, None, None, None]
