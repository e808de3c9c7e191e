"""support.views: a view that is simplified as moves are appended equals the moves, applied one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optdnn.ir.graph import Value
from optdnn.passes.support.views import Move, View
from optdnn.types import Array


def moved(array: Array, moves: tuple[Move, ...]) -> Array:
    for move in moves:
        array = array.reshape(move.shape) if move.perm is None else array.transpose(move.perm)
    return array


def random_shape(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    """Factors of ``size``, with ones among them, in any order."""
    left, factors = size, [1] * int(rng.integers(0, 3))
    while left > 1:
        factor = int(rng.choice([f for f in range(2, left + 1) if left % f == 0]))
        factors.append(factor)
        left //= factor
    return tuple(int(n) for n in rng.permutation(factors or [1]))


@pytest.mark.parametrize("seed", range(40))
def test_random_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(25):
        size = int(rng.choice([12, 24, 64, 72]))
        shape = random_shape(rng, size)
        view, want = View(Value(0, 0), shape), np.arange(size).reshape(shape)
        for _ in range(int(rng.integers(2, 8))):
            if rng.random() < 0.5:
                perm = tuple(int(p) for p in rng.permutation(want.ndim))
                view, want = view.transpose(perm), want.transpose(perm)
            else:
                target = random_shape(rng, size)
                view, want = view.reshape(target), want.reshape(target)
            assert view.shape == want.shape
            np.testing.assert_array_equal(moved(np.arange(size).reshape(shape), view.moves), want)


def test_a_second_half_of_an_axis_in_front_is_torn_off() -> None:
    """ViPTR's windows: a Reshape splits an axis, and its second half becomes the first axis."""
    view = View(Value(0, 0), (1, 64, 8)).transpose((0, 2, 1)).reshape((1, 8, 4, 16)).transpose((3, 0, 1, 2))
    found = moved(np.arange(512).reshape(1, 64, 8), view.moves)
    assert math.prod(found.shape) == 512
    want = np.arange(512).reshape(1, 64, 8).transpose(0, 2, 1).reshape(1, 8, 4, 16).transpose(3, 0, 1, 2)
    np.testing.assert_array_equal(found, want)


def test_a_batch_of_one_stays_in_front() -> None:
    """Keys of one item: a Transpose moves in front of the Reshape that removes the batch."""
    heads = View(Value(0, 0), (1, 16, 4, 4)).reshape((1, 2, 8, 4, 4)).transpose((0, 1, 3, 4, 2))
    keys = heads.reshape((2, 16, 8)).transpose((0, 2, 1)).reshape((2, 1, 8, 16)).transpose((0, 1, 3, 2))
    assert [m.perm[0] for m in keys.moves if m.perm is not None] == [0]
    want = np.arange(256).reshape(1, 2, 8, 4, 4).transpose(0, 1, 3, 4, 2).reshape(2, 1, 16, 8)
    np.testing.assert_array_equal(moved(np.arange(256).reshape(1, 16, 4, 4), keys.moves), want)
