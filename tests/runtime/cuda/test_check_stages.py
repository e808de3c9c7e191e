"""Which launches may round floats to 8-bit integers or to their grid: the check of a step allows these to differ by one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optdnn.runtime.cuda.launches.plan import ReferenceOp
from optdnn.runtime.cuda.trials.check import INEXACT, _grid, _rounds_floats, _share_far

STAGE = {"kind": "Tanh", "args": [-1], "attrs": {}}


@pytest.mark.parametrize(
    ("kind", "stages", "rounds"),
    [
        ("Quantized", (), True),
        ("QuantizedConv", ((sorted(INEXACT)[0], 1.0),), True),
        ("QuantizedConv", (("relu",),), False),
        ("PointwiseScan", (STAGE,), False),
        ("JointPointwise", ((STAGE,), ()), False),
        ("Conv", (), False),
        ("Pointwise", (), False),
    ],
)
def test_launches_that_round_floats(kind: str, stages: Any, rounds: bool) -> None:
    assert _rounds_floats(ReferenceOp(kind, {"stages": stages}, (), ())) is rounds


def test_pointwise_launches_that_round() -> None:
    """A multiplication and an addition in front of the rounding may be one instruction."""
    stages = [{"stage": ["Mul", [-1, 1], {}]}, {"stage": ["Round", [-2], {}]}]
    assert _rounds_floats(ReferenceOp("Pointwise", {"epilogue": stages}, (), ()))
    assert not _rounds_floats(ReferenceOp("Pointwise", {"epilogue": stages[:1]}, (), ()))


def test_launches_that_round_to_a_grid() -> None:
    rounds, relu = {"stage": ["FakeQuantize", [-1], {"scale": 0.5}]}, {"stage": ["Relu", [-2], {}]}
    one: Any = (None,)
    assert _grid(ReferenceOp("MatMul", {"epilogue": [rounds]}, (), one)) == 0.5
    assert _grid(ReferenceOp("MatMul", {"epilogue": [rounds, relu]}, (), one)) is None
    assert _grid(ReferenceOp("MatMul", {"epilogue": [rounds]}, (), one * 2)) is None
    assert _grid(ReferenceOp("MatMul", {}, (), one)) is None


def test_the_share_of_elements_that_are_far_off() -> None:
    want = np.linspace(-1, 1, 100, dtype=np.float32)
    got = want.copy()
    got[:3] += 0.02
    got[3:9] += 0.005
    assert _share_far(got, want) == 0.03
    got[0] = np.nan
    assert _share_far(got, want) == 0.03
    integers = np.arange(100, dtype=np.int8)
    assert _share_far(integers + np.where(integers < 4, 2, 1).astype(np.int8), integers) == 0.04
