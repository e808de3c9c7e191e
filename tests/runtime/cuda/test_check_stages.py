"""Which launches may round floats to 8-bit integers: the check of a step allows these integers to differ by one."""

from __future__ import annotations

from typing import Any

import pytest

from optdnn.runtime.cuda.launches.plan import ReferenceOp
from optdnn.runtime.cuda.trials.check import INEXACT, _rounds_floats

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
    ],
)
def test_launches_that_round_floats(kind: str, stages: Any, rounds: bool) -> None:
    assert _rounds_floats(ReferenceOp(kind, {"stages": stages}, (), ())) is rounds
