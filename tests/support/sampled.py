"""The quick tests of a whole run. Of a test with three cases or more, every sixth case is quick, and the others are slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MANY = 3
"""A test with fewer cases is quick as a whole."""
STEP = 6
CHOSEN = ("gpu", "nvrtc", "slow")
"""Marks of tests that are selected otherwise. A test with a slow case names its quick ones itself (:mod:`support.sweep`)."""


def sample(items: Sequence[pytest.Item]) -> None:
    """Marks the other cases as slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        if len(found) < MANY or any(item.get_closest_marker(mark) for item in found for mark in CHOSEN):
            continue
        for number, item in enumerate(found):
            if number % STEP:
                item.add_marker("slow")
