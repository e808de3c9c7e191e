"""8-bit results on a GPU: every launch agrees with its meaning; integers to the bit, rounded floats within one step."""

from __future__ import annotations

import pytest
from support.quantized_nets import FP8_GROUPS, NARROWED, NETS, STREAMS, QNet, launches
from support.simulated import feeds_of

from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.trials.check import StepError, check_steps

pytestmark = pytest.mark.hopper


def errors(graph: Graph) -> list[StepError]:
    context, _ = launches(graph)
    return check_steps(context, feeds_of(graph))


@pytest.mark.parametrize("name", NETS)
def test_integers_are_exact(name: str) -> None:
    n = QNet()
    for e in errors(n.done(*NETS[name](n))):
        assert e.error <= (1e-6 if e.kind in ("Pointwise", "Copy") else 0), e  # their results are the network's floats


@pytest.mark.parametrize("name", NARROWED | STREAMS)
def test_narrowed_floats_are_within_a_step(name: str) -> None:
    assert not [e for e in errors((NARROWED | STREAMS)[name]()) if not e.error < 4e-3]


@pytest.mark.parametrize("name", FP8_GROUPS)
def test_groups_of_fp8_are_near(name: str) -> None:
    assert not [e for e in errors(FP8_GROUPS[name]()) if not e.error < 4e-3]
