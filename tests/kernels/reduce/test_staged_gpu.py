"""Reductions that compute their own operands, on a GPU: every launch does what its step means."""

from __future__ import annotations

import pytest
from support.on_gpu import checked_launches
from support.staged_cases import CASES, case

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_staged_reductions(name: str, precision: str) -> None:
    checked_launches(case(name), precision)
