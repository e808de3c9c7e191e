"""The comparisons of the operator tests can fail."""

from __future__ import annotations

import numpy as np
import pytest
from onenode import Case, assert_close, check_case, normal, onnxruntime_outputs

from optdnn.ops.base import EXACT
from optdnn.ops.definition import OpDef
from optdnn.ops.table import OPDEFS


@pytest.mark.parametrize("definition", OPDEFS.values(), ids=lambda d: d.kind)
def test_every_tolerance_sees_one_percent_of_one_element(definition: OpDef) -> None:
    expected = normal(4, 1000)
    assert_close(expected.copy(), expected, definition.tol)
    at = np.unravel_index(np.argsort(np.abs(expected), axis=None)[expected.size // 2], expected.shape)
    wrong = expected.copy()
    wrong[at] *= 1.01
    with pytest.raises(AssertionError, match="error"):
        assert_close(wrong, expected, definition.tol)


def test_types_shapes_and_non_finite_values_are_compared() -> None:
    x = np.array([1.0, np.inf, np.nan], np.float32)
    assert_close(x.copy(), x, EXACT)
    for wrong in (x.astype(np.float64), x[:, None], np.array([1.0, -np.inf, np.nan], np.float32)):
        with pytest.raises(AssertionError):
            assert_close(wrong, x, EXACT)
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(np.array([np.nan, np.inf, np.nan], np.float32), x, EXACT)
    with pytest.raises(AssertionError):
        assert_close(np.array([1, 2]), np.array([1, 3]), EXACT)


def test_a_wrong_result_and_a_wrong_type_are_seen() -> None:
    case = Case("Softmax", [normal(2, 3)])
    (y,) = onnxruntime_outputs(case)
    check_case(case, [y])
    with pytest.raises(AssertionError, match="error"):
        check_case(case, [y * np.float32(1.001)])
    with pytest.raises(AssertionError, match="dtype"):
        check_case(case, [y.astype(np.float64)])
