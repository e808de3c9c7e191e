"""Reductions that compute their own operands, on a GPU: every launch agrees with its meaning."""

from __future__ import annotations

import pytest
from support.needs import why_no_hopper
from support.on_gpu import TOLERANCE, checked_launches
from support.staged_cases import CASES, case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_staged_reductions(name: str, precision: str) -> None:
    checked_launches(case(name), precision)
