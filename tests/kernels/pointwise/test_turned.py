"""Copies to another order of axes: each element is moved once, and warps read and write whole lines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise import turned
from optdnn.kernels.pointwise.turned import Turn, turn_of

AXES = 8


def view(shape: Sequence[int], order: Sequence[int], dtype: str, pitch: int = 0) -> TensorView:
    """A tensor whose axes lie in this order in memory. ``pitch``: elements of the last of them, if they are more than its size."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], step = step, step * (pitch if step == 1 and pitch else shape[axis])
    return TensorView(0, 0, tuple(shape), tuple(strides), np.dtype(dtype))


def moves(turn: Turn) -> dict[int, int]:
    """Element of the target -> the element of the source that a thread writes there."""
    found: dict[int, int] = {}
    for place in itertools.product(*map(range, turn.dims)):
        source = sum(k * s for k, s in zip(place, turn.source, strict=True))
        target = sum(k * s for k, s in zip(place, turn.target, strict=True))
        first = place[turn.along] * turn.wide if turn.limit and turn.along >= 0 else 0
        for row, column in itertools.product(range(turn.high), range(turn.wide)):
            if turn.limit and first + column >= turn.limit:
                continue
            at = target + column * turn.across + row
            assert at not in found
            found[at] = source + row * turn.down + column
    return found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("channels", "pixels"), [(64, 256), (24, 512), (40, 98), (8, 512), (96, 49), (200, 104), (24, 31)]
)
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("threads", [1, 1 << 10])
def test_each_element_is_moved_once(
    dtype: str, channels: int, pixels: int, planes: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turned, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(turned, "ENOUGH_THREADS", threads)
    shape = (2, channels, pixels)
    source, target = (view(shape, order, dtype) for order in ((0, 2, 1), (0, 1, 2))[:: 1 if planes else -1])
    turn = turn_of(source, target, AXES)
    if turn is None:
        assert not planes
        assert pixels % 4, "rows that no access of eight bytes divides"
        return
    at = np.ndindex(*shape)
    want = {int(np.dot(i, target.strides)): int(np.dot(i, source.strides)) for i in at}
    assert moves(turn) == want


def test_padding_behind_rows_is_read_but_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned, "LEAST_ELEMENTS", 1)
    shape = (2, 12, 64)
    source, target = view(shape, (0, 2, 1), "float16", 16), view(shape, (0, 1, 2), "float16")
    turn = turn_of(source, target, AXES)
    assert turn is not None
    assert (turn.wide, turn.limit) == (8, 12)
    assert len(moves(turn)) == 2 * 12 * 64


def test_a_warp_writes_whole_lines_and_reads_neighboring_tiles() -> None:
    source, target = (view((1, 64, 1 << 20), order, "float16") for order in ((0, 2, 1), (0, 1, 2)))
    turn = turn_of(source, target, AXES)
    assert turn is not None
    assert turn.dims == (1 << 14, 2, 8, 4), (
        "8 tiles of a row of the target are 128 bytes; 4 tiles beside each other are 64 bytes"
    )
    assert turn.target[2:] == (8, 8 << 20)
    assert turn.source[1:] == (32, 8 * 64, 8), "the next warp reads the rest of the same rows"


@pytest.mark.parametrize(
    ("channels", "pixels", "dims"),
    [
        (128, 3137, (16, 3137)),  # rows of the target that no access of more than an element divides
        (320, 10000, (20, 2500, 2)),  # ten tiles of eight bytes, the largest divisor up to 16, are less than a line
        (24, 1 << 16, (1024, 3, 32)),  # an odd number of tiles in a row of the source
    ],
)
def test_rows_that_no_warp_fills(channels: int, pixels: int, dims: tuple[int, ...]) -> None:
    shape = (1, channels, pixels)
    source, target = (view(shape, order, "float16") for order in ((0, 2, 1), (0, 1, 2)))
    turn = turn_of(source, target, AXES)
    assert turn is not None
    assert turn.dims == dims


def test_small_and_contiguous_copies_are_no_turns() -> None:
    source, target = (view((1, 64, 64), order, "float16") for order in ((0, 2, 1), (0, 1, 2)))
    assert turn_of(source, target, AXES) is None
    large = view((1, 64, 1 << 16), (0, 1, 2), "float16")
    assert turn_of(large, large, AXES) is None
