"""Scales, zero points and biases of quantized operators; plans as text."""

from __future__ import annotations

import numpy as np
import pytest

from optdnn.errors import UsageError
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.quantize import quantized_weights
from optdnn.passes.support.ranges import Range, integer_parameters


@pytest.mark.parametrize("text", ["int4", "fp16+int8", "int8+int8", "fp16+fp32"])
def test_plans_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        PrecisionPlan.of_option(text)


def test_a_plan_is_kept_as_json() -> None:
    plan = PrecisionPlan("int8", {"a": "fp16"}, "fp16", {"a": "overflow"})
    assert PrecisionPlan.from_json(plan.to_json()) == plan
    with pytest.raises(UsageError, match="not a precision plan"):
        PrecisionPlan.from_json([1])


def test_parameters_cover_the_range_and_zero() -> None:
    scale, zero = integer_parameters(Range(-1.0, 3.0))
    assert (float(scale), int(zero)) == (pytest.approx(4 / 255), 64)
    scale, zero = integer_parameters(Range(2.0, 3.0))
    assert (float(scale), int(zero)) == (pytest.approx(3 / 255), 0)


def test_even_parameters_where_the_step_grows_little() -> None:
    scale, zero = integer_parameters(Range(-2.1, 2.6), even=True)
    assert (float(scale), int(zero)) == (pytest.approx(2.6 / 127), 128)
    scale, zero = integer_parameters(Range(-2.6, 2.1), even=True)
    assert (float(scale), int(zero)) == (pytest.approx(2.6 / 128), 128)
    for range_ in (Range(-1.0, 3.0), Range(0.0, 1.0)):
        assert integer_parameters(range_, even=True) == integer_parameters(range_)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38])
def test_no_scale_is_zero_or_subnormal(size: float) -> None:
    scale, zero = integer_parameters(Range(-size, size))
    assert (float(scale), int(zero)) == (1.0, 0)
    with pytest.raises(UsageError, match="cannot be quantized"):
        integer_parameters(Range(0.0, float("inf")))


def test_channels_without_weights_keep_their_bias() -> None:
    w = np.zeros((3, 2, 1, 1), np.float32)
    w[0] = 0.5
    bias = np.array([1.0, -300.0, 0.0], np.float32)
    integers, scale = quantized_weights(w, 0, "int8", bias, x_scale=0.01)
    assert not integers[1:].any()
    steps = scale.astype(np.float64) * 0.01
    np.testing.assert_allclose(np.rint(bias / steps) * steps, bias, rtol=1e-3)
    assert (scale >= np.finfo(np.float32).tiny).all()


def test_a_bias_beyond_its_integers_raises_the_scale() -> None:
    w = np.full((1, 1, 1, 1), 1e-9, np.float32)
    _, scale = quantized_weights(w, 0, "int8", np.array([1e6], np.float32), x_scale=1e-4)
    assert abs(1e6 / (float(scale[0]) * 1e-4)) <= 2**30 * 1.001


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UsageError, match="not finite"):
        quantized_weights(np.array([[np.nan]], np.float32), 0, "int8")
