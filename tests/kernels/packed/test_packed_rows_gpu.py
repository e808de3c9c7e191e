"""Products of a few rows with packed weights on a GPU, with norms and products around them: each launch does what its step means."""

from __future__ import annotations

import pytest
from kernels.packed.test_packed_rows import PAIRS, SMALL_NETWORKS, only_pairs  # type: ignore[import-not-found]
from support.on_gpu import checked_launches

TOLERANCE = {"fp16": 8e-3, "bf16": 5e-2}

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", SMALL_NETWORKS | PAIRS)
def test_each_form(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_pairs(monkeypatch)
    graph = (SMALL_NETWORKS | PAIRS)[name]()
    found = checked_launches(graph, precision, TOLERANCE[precision])
    assert "PackedRowProduct" in {e.kind for e in found}
