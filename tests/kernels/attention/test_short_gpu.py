"""Items of few tokens, packed into one, on a GPU: every launch agrees with its meaning, and writes nothing else."""

from __future__ import annotations

import pytest
from support.on_gpu import checked_launches
from support.short_attention_cases import frames

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("batch", "tokens"), [(1024, 8), (1030, 13), (1024, 16)])
def test_each_size(batch: int, tokens: int, precision: str) -> None:
    found = checked_launches(frames(batch=batch, queries=tokens, keys=tokens), precision)
    assert "Attention" in {e.kind for e in found}
