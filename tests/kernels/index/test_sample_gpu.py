"""Sampling on a GPU: the tokens are those of the meaning at each size, and runs repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.needs import why_no_hopper
from support.sampling_cases import feeds, graph
from support.simulated import lowered, simulate

from optdnn.runtime.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]

SIZES = [
    (3, "fp32"),
    (1003, "fp16"),
    (8193, "bf16"),
    (32000, "fp32"),
    (128256, "fp16"),
    (262144, "bf16"),
    (262144, "fp32"),
]


@pytest.mark.parametrize(("vocabulary", "precision"), SIZES)
def test_tokens_are_those_of_the_meaning(vocabulary: int, precision: str) -> None:
    """Exponentials may be rounded differently: one token in a hundred may be its neighbor."""
    program = lowered(graph(vocabulary, precision), "fp32", target="cuda:sm_90a")
    context: Any = Engine(program).context()
    same = []
    for position in range(20):
        given = feeds(vocabulary, precision, position)
        token, again = (context.run(given)["token"] for _ in range(2))
        np.testing.assert_array_equal(token, again)
        same.append(token == simulate(program, given)["token"])
    assert np.mean(same) > 0.98
    assert all(s[0, 0] and s[5, 0] for s in same), "greedy rows compute nothing"
