"""folded_windows: Col2Im of windows whose channels are innermost becomes a sum of segments, without turning the windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, tactics

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.signal import Col2ImAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.folded_windows import MOST_ROWS, FoldedWindows

GPU = PassContext(target="cuda:sm_90a")
PASS = FoldedWindows()


def fold(
    n: Net,
    x: Value,
    perm: tuple[int, ...],
    sizes: tuple[int, int, int],
    image: tuple[int, ...],
    block: tuple[int, ...],
    **other: Any,
) -> Value:
    """Windows, turned by ``perm`` and viewed as ``sizes`` (batch, channels and taps, positions), folded into images."""
    given = {"strides": (1,) * len(image), "pads": (0,) * 2 * len(image), "dilations": (1,) * len(image), **other}
    turned = n.op("Reshape", n.op("Transpose", x, attrs=TransposeAttrs(perm)), n.ints(*sizes))
    return n.op("Col2Im", turned, n.ints(*image), n.ints(*block), attrs=Col2ImAttrs(**given))


def outlook(batch: Any = 2) -> Graph:
    """Two heads of 8 channels, 3 x 3 positions of windows of 3 x 3 with a stride of 2, as VOLO adds them."""
    n = Net()
    x = n.input(batch, 2, 9, 9, 8)
    return n.done(fold(n, x, (0, 1, 4, 3, 2), (2, 144, 9), (6, 6), (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)))


def flat() -> Graph:
    """Signals, with the taps before the positions, and dilated windows."""
    n = Net()
    return n.done(fold(n, n.input(3, 2, 5, 6), (0, 3, 1, 2), (3, 12, 5), (8,), (2,), dilations=(3,)))


def apart() -> Graph:
    """Taps and positions of both axes apart, and pixels that no window covers."""
    n = Net()
    x = n.input(1, 2, 2, 3, 1, 2, 4)  # rows of windows, their taps, columns of windows, their taps, channels
    return n.done(fold(n, x, (0, 5, 6, 2, 4, 1, 3), (1, 16, 6), (5, 8), (2, 1), strides=(3, 3)))


@pytest.mark.parametrize("made", [outlook, flat])
def test_windows_are_added_where_they_lie(made: Any) -> None:
    graph, _ = check_pass(PASS, made(), changes=1, rules={"folded_windows": 1}, context=GPU)
    assert not graph.of_kind("Col2Im")
    (total,) = graph.of_kind("SegmentSum")
    assert total.attrs.stages == ()


def test_axes_of_windows_may_lie_apart() -> None:
    graph, _ = check_pass(PASS, apart(), changes=1, context=GPU)
    (total,) = graph.of_kind("SegmentSum")
    begins = graph.constant_value(total.inputs[2])
    assert begins is not None
    assert (np.diff(begins) == 0).any()  # pixels between the windows


def test_the_launch_reads_the_windows_as_they_are() -> None:
    names = tactics(check_simulated(outlook()))
    assert "segments" in names
    assert "each" not in names


def test_refusals() -> None:
    n = Net()
    planar = n.done(fold(n, n.input(2, 8, 9, 9), (0, 1, 3, 2), (2, 72, 9), (5, 5), (3, 3)))
    check_refused(PASS, planar, because="their channels are not innermost", context=GPU)
    n = Net()
    x = n.op("Col2Im", n.input(2, 72, 9), n.ints(5, 5), n.ints(3, 3), attrs=Col2ImAttrs((1, 1), (0,) * 4, (1, 1)))
    check_refused(PASS, n.done(x), because="its windows are not turned before it", context=GPU)
    n = Net()
    many = MOST_ROWS // 81 + 1
    x = fold(n, n.input(many, 9, 9, 8), (0, 3, 2, 1), (many, 72, 9), (5, 5), (3, 3))
    check_refused(PASS, n.done(x), because="would have to be stored", context=GPU)


def test_it_needs_a_gpu_and_known_sizes() -> None:
    check_untouched(PASS, outlook())
    check_refused(PASS, outlook(symbol("b")), because="its windows are not turned before it", context=GPU)
