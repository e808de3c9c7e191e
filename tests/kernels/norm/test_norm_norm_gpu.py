"""Two norms in one launch on a GPU: every launch does what its step means, and writes nothing else."""

from __future__ import annotations

import pytest
from support.on_gpu import checked_launches
from support.sequence_cases import NORMS_OF_NORMS

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("name", NORMS_OF_NORMS)
def test_both_results(name: str) -> None:
    assert checked_launches(NORMS_OF_NORMS[name](), "fp16")
