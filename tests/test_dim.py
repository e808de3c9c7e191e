"""Symbolic dimensions: one canonical form per expression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optdnn.dim import Dim, bounds, dim_max, dim_min, evaluate, floordiv, mod, substitute, symbol
from optdnn.errors import ShapeError

N, H = symbol("n", 1), symbol("h", 1)


def test_equal_expressions_have_one_form() -> None:
    assert (N + 1) * 2 == 2 * N + 2
    assert (N * 4) // 2 == 2 * N
    assert (N * H) // H == N
    assert (N * 12) % 4 == 0
    assert (H // 2) // 3 == H // 6
    assert ((N + 1) * (H - 2) * 12) // (4 * (H - 2)) == 3 * N + 3
    assert str((N * H + 1) // N) == "(h*n + 1)//n"
    assert N - N == 0
    assert hash((N + 1) * 2) == hash(2 * N + 2)


def test_padding_to_a_multiple_is_a_quotient() -> None:
    assert H + (8 - H % 8) % 8 == 8 * ((H + 7) // 8)
    assert (H + (-H) % 8) // 8 == (H + 7) // 8
    assert (H + H % 2) // 2 == (H + 1) // 2
    assert (H % 12 + 1) % 4 == (H + 1) % 4
    assert H % 12 % 5 != H % 5


def test_nested_quotients_merge() -> None:
    assert ((H + 1) // 2 + 1) // 2 == (H + 3) // 4
    assert (H // 4 + (H // 4) % 2) // 2 == (H + 4) // 8


def test_parts_of_a_rolled_axis_have_its_size() -> None:
    for size in (H, 8 * ((H + 7) // 8), N * H):
        shift = 4 % size
        assert dim_max(0, size - shift) + dim_min(shift, size) == size


def test_extremes_of_equal_expressions_are_the_shorter_one() -> None:
    assert dim_max(H - H // 2, (H + 1) // 2) == dim_max((H + 1) // 2, H - H // 2) == (H + 1) // 2


def test_extremes_use_ranges() -> None:
    assert dim_max(N, 1) == N
    assert dim_min(2 * N, 2 * N + 1) == 2 * N
    assert isinstance(dim_max(N, H), Dim)
    assert dim_max(N, H) == dim_max(H, N)


def test_bounds_relate_a_function_to_its_operand() -> None:
    assert bounds(N - N // 2)[0] == 1
    assert bounds(N // 2 * 2 - N) == (-1, 0)
    assert bounds(dim_min(N, 512) - N)[1] == 0
    assert bounds(dim_max(N, H) - H)[0] == 0
    assert bounds(dim_max(N, H) - dim_min(N, H))[0] == 0
    assert dim_max(0, N - dim_min(N, 7)) == N - dim_min(N, 7)


def test_extremes_absorb() -> None:
    both = dim_max(N, H)
    assert dim_max(both, N) == both
    assert dim_max(dim_max(both, 7), dim_max(H, 7)) == dim_max(both, 7)
    assert dim_max(N, dim_min(N, 512)) == N
    assert dim_min(dim_max(N, H), H) == H
    assert dim_max(N, dim_min(H, 512)) != N


def test_a_symbol_without_a_size_is_named() -> None:
    with pytest.raises(ShapeError, match="needs a size for h"):
        evaluate(N + H, {"n": 3})


def test_division_by_zero() -> None:
    with pytest.raises(ShapeError, match="zero"):
        floordiv(N, 0)
    with pytest.raises(ShapeError, match="zero"):
        mod(4, 0)


def test_truth_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown"):
        bool(N)


_LEAVES = st.one_of(st.integers(-6, 6), st.sampled_from([N, H]))


def _grow(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]), children, children)


@given(st.recursive(_LEAVES, _grow, max_leaves=8), st.integers(1, 40), st.integers(1, 40))
def test_arithmetic_agrees_with_integers(tree: object, n: int, h: int) -> None:
    def walk(node: object, sizes: dict[str, int] | None) -> object:
        if not isinstance(node, tuple):
            return node if sizes is None else substitute(node, sizes)  # type: ignore[arg-type]
        op, a, b = node[0], walk(node[1], sizes), walk(node[2], sizes)
        if op in ("//", "%") and (b == 0 if isinstance(b, int) else bounds(b)[0] <= 0):  # type: ignore[arg-type]
            return a
        return {
            "+": lambda: a + b,  # type: ignore[operator]
            "-": lambda: a - b,  # type: ignore[operator]
            "*": lambda: a * b,  # type: ignore[operator]
            "//": lambda: floordiv(a, b),  # type: ignore[arg-type]
            "%": lambda: mod(a, b),  # type: ignore[arg-type]
            "min": lambda: dim_min(a, b),  # type: ignore[arg-type]
            "max": lambda: dim_max(a, b),  # type: ignore[arg-type]
        }[op]()

    symbolic = walk(tree, None)
    sizes = {"n": n, "h": h}
    got = evaluate(symbolic, sizes)  # type: ignore[arg-type]
    lo, hi = bounds(symbolic)  # type: ignore[arg-type]
    assert lo <= got <= hi
    if not any(isinstance(x, tuple) and x[0] in ("//", "%") for x in _nodes(tree)):
        assert got == walk(tree, sizes)


def _nodes(tree: object) -> list[object]:
    return [tree, *(x for child in tree[1:] for x in _nodes(child))] if isinstance(tree, tuple) else [tree]
