"""Slices leave out the axes that they take as a whole."""

from __future__ import annotations

import pytest
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph
from optdnn.passes.canonicalize import Canonicalize

CANON, LARGE = Canonicalize(), 2**31 - 1


def sliced(shape: tuple[object, ...], limits: tuple[tuple[int, int, int, int], ...]) -> Graph:
    n = Net()
    numbers = [n.ints(*each) for each in zip(*limits, strict=True)]
    return n.done(n.op("Slice", n.op("Exp", n.input(*shape)), *numbers))  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [(0, 4, 0, 1), (0, LARGE, 0, 1), (-4, LARGE, -2, 1)])
def test_one_axis_remains(whole: tuple[int, int, int, int]) -> None:
    """TensorFlow's ``x[:, 2:5]``."""
    before = sliced((4, 6), (whole, (2, 5, 1, 1)))
    graph, _ = check_pass(CANON, before, changes=1, kinds={"Exp": 1, "Slice": 1}, rules={"whole_axes": 1})
    (op,) = graph.of_kind("Slice")
    assert [graph.constant_value(v).tolist() for v in op.inputs[1:]] == [[2], [5], [1]]  # type: ignore[union-attr]


def test_steps_remain() -> None:
    graph, _ = check_pass(CANON, sliced((4, 6), ((0, 4, 0, 1), (0, 6, 1, 2))), changes=1)
    (op,) = graph.of_kind("Slice")
    assert [graph.constant_value(v).tolist() for v in op.inputs[1:]] == [[0], [6], [1], [2]]  # type: ignore[union-attr]


def test_a_symbolic_axis_is_whole_up_to_the_largest_end() -> None:
    before = sliced((symbol("n"), 6), ((0, LARGE, 0, 1), (2, 5, 1, 1)))
    check_pass(CANON, before, changes=1, kinds={"Exp": 1, "Slice": 1}, sizes={"n": 3})


@pytest.mark.parametrize(
    ("shape", "limits"),
    [
        ((4, 6), ((1, 4, 0, 1), (2, 5, 1, 1))),
        ((4, 6), ((3, -5, 0, -1), (2, 5, 1, 1))),
        ((symbol("n"), 6), ((0, 4, 0, 1), (2, 5, 1, 1))),
        ((4, 6), ((2, 3, 0, 1),)),
    ],
)
def test_parts_and_reversals_stay(shape: tuple[object, ...], limits: tuple[tuple[int, int, int, int], ...]) -> None:
    check_untouched(CANON, sliced(shape, limits))
