"""Large matrices in another order: copies and comparisons equal NumPy's, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from optdnn.ir.strips import LARGE, contiguous, equal


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rows", [1030, 77])
def test_strips(dtype: type, rows: int) -> None:
    columns = LARGE // rows + 5
    stored = np.random.default_rng(0).integers(0, 200, (columns, rows)).astype(dtype)
    for a in (stored.T, stored, stored[:, ::2], stored.T[3:], stored.reshape(-1)):
        made = contiguous(a)
        assert made.flags.c_contiguous
        np.testing.assert_array_equal(made, a)
        assert equal(a, made)
        assert equal(made, a)
    for place in ((0, 0), (rows - 1, columns - 1), (rows // 2, 17)):
        other = contiguous(stored.T)
        other[place] += 1
        assert not equal(stored.T, other)
        assert not equal(other, stored.T)
    assert not equal(stored.T, stored)


@pytest.mark.parametrize("rows", [130, 50])
def test_strips_of_columns_in_blocks(rows: int) -> None:
    """Blocks of eight columns of a matrix alternate with those of another one."""
    stored = np.random.default_rng(0).random((LARGE // rows // 16, 2, 8, rows)).astype(np.float32)
    a = stored[:, 1].transpose(2, 0, 1)
    made = contiguous(a)
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, a)
    assert equal(a, made)
    made[rows - 1, 3, 7] += 1
    assert not equal(a, made)
    assert not equal(made, a)
