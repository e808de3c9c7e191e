"""Products of a few rows on a GPU, with norms before them and second products: each launch agrees with its meaning."""

from __future__ import annotations

from typing import Any

import pytest
from kernels.gemm.test_row_product import NETS  # type: ignore[import-not-found]
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", NETS)
def test_each_form(name: str, precision: str) -> None:
    n = Net()
    graph = n.done(NETS[name](n))
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert "RowProduct" in {e.kind for e in found}
    assert not [e for e in found if not e.error < TOLERANCE[precision]]
    assert not check_arena(context.runner, feeds)
    first, second = context.run(feeds), context.run(feeds)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
