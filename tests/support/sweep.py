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
