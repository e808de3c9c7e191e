"""The check of launches measures errors of 8-bit results in steps of their type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from optdnn.runtime.cuda.launches.plan import ReferenceOp
from optdnn.runtime.cuda.trials.check import _rounds_floats, _share_off

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
INF = float("inf")


@pytest.mark.parametrize(
    ("dtype", "got", "want", "share"),
    [
        (FP8, [1, -3, 448, 0.5], [1, -3, 448, 0.5], 0.0),
        (FP8, [1, -3, 448, 0.5], [1.125, -3.25, 448, 0.5], 0.5),
        (FP8, [1, -3, 8, 0.5], [1.25, -3, 8, 0.5], INF),  # two steps
        (FP8, [0.25, 448, 2, 8], [0.3125, 448, 2, 8], 0.25),  # the same difference, which is small compared with 448
        (FP8, [0.25, 448, 2, np.nan], [1.0, 448, 2, np.nan], INF),
        (FP8, [0.0, 2, 4, 8], [2.0**-9, 2, 4, 8], 0.25),  # zero and the smallest subnormal number
        (FP8, [0.0, 2, 4, 8], [np.nan, 2, 4, 8], INF),
        (FP8, [np.nan, 2, 4, 8], [np.nan, 2, 4, 8], 0.0),
        (np.dtype(np.int8), [1, -128, 3], [1, -127, 3], 1 / 3),
        (np.dtype(np.uint8), [1, 255, 3], [1, 253, 3], INF),
    ],
)
def test_the_share_of_elements_one_step_off(dtype: Any, got: list[float], want: list[float], share: float) -> None:
    assert _share_off(np.array(got, np.float32).astype(dtype), np.array(want, np.float32)) == pytest.approx(share)


def test_integers_are_exact_unless_a_stage_is_not() -> None:
    plain = ReferenceOp("QuantizedConv", {"stages": [["bias"], ["relu"], ["clip", 0.0, 6.0]]}, (), ())
    assert not _rounds_floats(plain)
    assert _rounds_floats(ReferenceOp("QuantizedConv", {"stages": [["bias"], ["silu"]]}, (), ()))
    assert _rounds_floats(ReferenceOp("Quantized", {}, (), ()))
    assert not _rounds_floats(ReferenceOp("MaxPool", {}, (), ()))
    scan = {"stages": [{"stage": ["Tanh", [0], {}]}]}
    assert not _rounds_floats(ReferenceOp("PointwiseScan", scan, (), ()))
