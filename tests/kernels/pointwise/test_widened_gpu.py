"""Results of fp32 from the launch that computes them, on a GPU: every launch does what its step means, and writes nothing else."""

from __future__ import annotations

import pytest
from support.needs import why_no_hopper
from support.on_gpu import checked_launches
from support.widened_cases import WIDENED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("name", WIDENED)
def test_each_tactic(name: str) -> None:
    assert checked_launches(WIDENED[name][1](), "fp16")
