"""GridSample and SampledSum on a GPU: every launch does what its step means, twice the same, and writes nothing else."""

from __future__ import annotations

import pytest
from support.on_gpu import checked_launches
from support.sampled_cases import CASES, graph_of

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_each_form(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert {"SampledSum", "GridSample"} & {e.kind for e in found}
