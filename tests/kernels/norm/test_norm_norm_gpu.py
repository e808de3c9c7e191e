"""Two norms in one launch on a GPU: every launch agrees with its meaning, and writes nothing else."""

from __future__ import annotations

import pytest
from support.needs import why_no_hopper
from support.on_gpu import checked_launches
from support.sequence_cases import NORMS_OF_NORMS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("name", NORMS_OF_NORMS)
def test_both_results(name: str) -> None:
    assert checked_launches(NORMS_OF_NORMS[name](), "fp16")
