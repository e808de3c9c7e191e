"""Buffers of padded tensors: what a tensor map reads of the last row lies inside, whatever the order of the axes."""

from __future__ import annotations

import pytest

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder, channels_last
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP16


@pytest.mark.parametrize(
    ("shape", "strides", "elements"),
    [
        ((5, 3, 12), (48, 16, 1), 240),
        ((3, 5, 12), (16, 48, 1), 240),  # steps of a sequence before the batch
        ((2, 3, 4, 4), channels_last((2, 3, 4, 4), 8), 256),
        ((3, 4), (1, 3), 12),
        ((), (), 1),
    ],
)
def test_padded_rows_are_whole(shape: tuple[int, ...], strides: tuple[int, ...], elements: int) -> None:
    b = Builder(Graph("g"), of_arch("sm_90a"))
    b.new("x", FP16, shape, strides)
    (buffer,) = b.buffers
    assert buffer.nbytes == 2 * elements
