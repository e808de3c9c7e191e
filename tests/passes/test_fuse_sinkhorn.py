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
    size: tuple[int, int] = (4, 4),
    epsilons: Sequence[float] = (1e-3,),
    tapped: bool = False,
    dtype: type = np.float64,
) -> Graph:
    """Matrices of each token, divided by their sums along ``axes``. ``tapped``: the second result is read elsewhere too."""
    n = Net(dtype)
    y = n.op("Exp", n.input(2, 6, *size))
    more = []
    for k, axis in enumerate(axes):
        total = n.op("ReduceSum", y, n.ints(axis), attrs=ReduceAttrs())
        if epsilon := epsilons[k % len(epsilons)]:
            total = n.op("Add", total, epsilon)
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
    ],
    ids=["few", "one axis", "another axis", "two epsilons", "a negative epsilon", "an outer axis"],
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
