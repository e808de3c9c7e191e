"""SegmentSum on a GPU: every launch agrees with its meaning in two runs, and writes nothing else."""

from __future__ import annotations

import pytest
from support.needs import why_no_hopper
from support.on_gpu import TOLERANCE, checked_launches
from support.segment_cases import CASES, graph_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_each_form(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert "SegmentSum" in {e.kind for e in found}
