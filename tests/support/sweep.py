"""Sweeps: a few cases run with the quick tests, all of them with the slow tests. Pairs: few combinations stand for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest


def sweep(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters of a test. Those that are not ``quick`` are marked slow. Tuples are several arguments."""
    found = list(values)
    missing = [v for v in quick if v not in found]
    assert not missing, f"these are no cases: {missing}"
    marked = [() if v in quick else (pytest.mark.slow,) for v in found]
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=m) for v, m in zip(found, marked, strict=True)]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, for cases of the same weight: every ``step``-th is quick."""
    found = list(values)
    return sweep(found, *found[::step])


def in_turn(cases: Iterable[Any], *ways: Any, step: int = 1) -> list[Any]:
    """Each case in each way. Quick: every ``step``-th case once, with the ways in turn. Tuples (cases or ways) are
    several arguments."""
    pairs = [(_arguments(case), k) for k, case in enumerate(cases)]
    quick = [(*case, *_arguments(ways[k // step % len(ways)])) for case, k in pairs[::step]]
    return sweep([(*case, *_arguments(way)) for case, _ in pairs for way in ways], *quick)


def _arguments(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def all_pairs(axes: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize with few combinations of the axes that together hold each pair of values of any two axes. ``axes``: values by
    the name of their parameter ("a, b": tuples of two).

    For axes that meet in pairs at most in the code under test: three of them together take no path of their own.
    """
    values = [list(v) for v in axes.values()]
    combined = list(product(*(range(len(v)) for v in values)))
    pairs = {row: {frozenset(two) for two in combinations(enumerate(row), 2)} for row in combined}
    missing, rows = set().union(*pairs.values()), []
    while missing:
        rows.append(max(combined, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[rows[-1]]
    several = ["," in name for name in axes]
    chosen = [[of[k] for of, k in zip(values, row, strict=True)] for row in rows]
    flat = [
        [x for value, more in zip(row, several, strict=True) for x in (value if more else (value,))] for row in chosen
    ]
    return pytest.mark.parametrize(", ".join(axes), flat)


def turns(cases: Iterable[Any], *ways: Any) -> list[Any]:
    """Each case once, with the ways in turn, for ways that differ alike in all cases. Tuples are several arguments."""
    return [(*_arguments(case), *_arguments(ways[k % len(ways)])) for k, case in enumerate(cases)]
