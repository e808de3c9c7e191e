"""Sweeps: a few cases run with the quick tests, all of them with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
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
