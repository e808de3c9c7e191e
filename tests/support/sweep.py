"""Sweeps: a few cases run with the quick tests, all of them with the slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters of a test, those that are not ``quick`` marked slow; tuples are several arguments."""
    found = list(values)
    missing = [v for v in quick if v not in found]
    assert not missing, f"these are no cases: {missing}"
    marked = [() if v in quick else (pytest.mark.slow,) for v in found]
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=m) for v, m in zip(found, marked, strict=True)]


def in_turn(names: Iterable[str], *others: str) -> list[Any]:
    """Each name with each of the others; the quick ones: each name once, with the others in turn."""
    found = list(names)
    quick = [(name, others[k % len(others)]) for k, name in enumerate(found)]
    return sweep([(name, other) for name in found for other in others], *quick)
