"""fuse_sinkhorn: alternating divisions by sums of rows and of columns become one op, and one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.sinkhorn import SinkhornAttrs
from optdnn.passes.fuse_sinkhorn import FuseSinkhorn


def divided(
    axes: Sequence[int],
    *,
    size: tuple[int, ...] = (4, 4),
    epsilons: Sequence[float] = (1e-3,),
    floor: float | None = None,
    total_kind: str = "ReduceSum",
    before: str = "Exp",
    tapped: bool = False,
    dtype: type = np.float64,
) -> Graph:
    """Matrices of each token, divided by their sums along ``axes``. ``tapped``: the second result is read elsewhere too.

    ``floor``: the least divisor. ``before``: the operator that computes the matrices.
    """
    n = Net(dtype)
    y = n.op(before, n.input(2, 6, *size))
    more = []
    for k, axis in enumerate(axes):
        total = n.op(total_kind, y, n.ints(axis), attrs=ReduceAttrs())
        if epsilon := epsilons[k % len(epsilons)]:
            total = n.op("Add", total, epsilon)
        if floor is not None:
            total = n.op("Clip", total, floor)
        y = n.op("Div", y, total)
        if tapped and k == 1:
            more.append(n.op("Exp", y))
    return n.done(y, *more)


@pytest.mark.parametrize(
    ("axes", "epsilons", "expected"),
    [
        ((-2, -1, -2, -1, -2), (1e-3,), SinkhornAttrs(-2, 5, 1e-3)),
        ((3, 2, 3, 2), (0.0,), SinkhornAttrs(-1, 4)),
    ],
)
def test_divisions_in_turn_are_one(axes: tuple[int, ...], epsilons: tuple[float, ...], expected: SinkhornAttrs) -> None:
    graph, _ = check_pass(FuseSinkhorn(), divided(axes, epsilons=epsilons), changes=1, rules={"sinkhorn": 1})
    (op,) = graph.of_kind("Sinkhorn")
    assert op.attrs == expected
    assert set(graph.kinds()) == {"Exp", "Sinkhorn"}


def test_normalize_of_magnitudes() -> None:
    """``F.normalize(x, p=1)``, over axes with others of size 1 among and behind them."""
    graph = divided((4, 2) * 3, size=(4, 1, 5, 1), epsilons=(0.0,), floor=1e-12, total_kind="ReduceL1")
    graph, _ = check_pass(FuseSinkhorn(), graph, changes=1, rules={"sinkhorn": 1})
    (op,) = graph.of_kind("Sinkhorn")
    assert op.attrs == SinkhornAttrs(-1, 6, 0.0, 1e-12)
    assert set(graph.kinds()) == {"Exp", "Squeeze", "Sinkhorn", "Unsqueeze"}


def test_a_floor_that_some_sums_are_below() -> None:
    graph = divided((-1, -2) * 3, epsilons=(0.0,), floor=3.0)
    graph, _ = check_pass(FuseSinkhorn(), graph, changes=1)
    assert set(graph.kinds()) == {"Exp", "Sinkhorn"}


def test_sums_of_magnitudes_need_a_proof_of_the_sign() -> None:
    graph = divided((-1, -2) * 2, total_kind="ReduceL1", before="Tanh")
    check_refused(FuseSinkhorn(), graph, because="divides by sums of magnitudes, and .* may be negative")


def test_a_third_axis_begins_another_chain() -> None:
    graph, _ = check_pass(FuseSinkhorn(), divided((2, *((3, 4) * 3)), size=(4, 5, 3)), changes=1)
    (op,) = graph.of_kind("Sinkhorn")
    assert op.attrs == SinkhornAttrs(-2, 6, 1e-3)


def test_operators_before_a_value_with_other_readers_stay() -> None:
    graph, _ = check_pass(FuseSinkhorn(), divided((-1, -2) * 3, tapped=True), changes=1)
    (op,) = graph.of_kind("Sinkhorn")
    assert op.attrs == SinkhornAttrs(-1, 4, 1e-3)
    assert graph.kinds()["Div"] == 2


@pytest.mark.parametrize(
    "graph",
    [
        divided((-1, -2, -1)),
        divided((-1, -1, -1, -1)),
        divided((1, 2, 1, 2), size=(6, 6)),
        divided((-1, -2) * 2, epsilons=(1e-3, 1e-2)),
        divided((-1, -2) * 2, epsilons=(-1e-3,)),
        divided((0, 3) * 2),
        divided((2, 4) * 2, size=(3, 2, 3)),
        divided((-1, -2) * 2, floor=-1.0),
    ],
    ids=[
        "few",
        "one axis",
        "another axis",
        "two epsilons",
        "a negative epsilon",
        "an outer axis",
        "an axis among",
        "a negative floor",
    ],
)
def test_others_stay(graph: Graph) -> None:
    check_untouched(FuseSinkhorn(), graph)


def test_large_matrices_are_refused() -> None:
    check_refused(
        FuseSinkhorn(), divided((-1, -2) * 2, size=(4, 40)), because="up to 32 x 32 elements, those of .* have 4 x 40"
    )


@pytest.mark.parametrize("size", [(4, 4), (12, 20)])
def test_they_are_one_launch(size: tuple[int, int]) -> None:
    program = check_simulated(divided((-2, -1) * 10, size=size, dtype=np.float32), tolerance=2e-3)
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert kinds == ["Pointwise", "Sinkhorn", "Pointwise"]  # Exp of fp32, and the cast to it


def test_a_kernel_of_larger_matrices_says_why_it_refuses() -> None:
    n = Net()
    program = lowered(n.done(n.op("Sinkhorn", n.input(2, 4, 40), attrs=SinkhornAttrs(-1, 4))))
    (row,) = program.meta["host"]["operators"]
    assert "its matrices are 4 x 40, over 32 x 32" in row["why"]
