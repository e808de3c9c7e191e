"""Products of a few rows on a GPU, with norms in front of them and products beside them: each launch does what its step means."""

from __future__ import annotations

import pytest
from kernels.gemm.test_row_product import NETS  # type: ignore[import-not-found]
from support.net import Net
from support.on_gpu import checked_launches

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_each_form(name: str, precision: str) -> None:
    n = Net()
    graph = n.done(NETS[name](n))
    found = checked_launches(graph, precision)
    assert "RowProduct" in {e.kind for e in found}
