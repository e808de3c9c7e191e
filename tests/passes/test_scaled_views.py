"""scaled_views: scores by position that are scaled and cut after a product with constants become a view of it (XLNet)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.relative_positions import RelativePositions

H, L, D = 3, 8, 16


def shifted(n: Net, q: Value, rows: int = L) -> Value:
    """``q`` times embeddings of 2 L positions; each row is shifted by one position from the previous one."""
    y = n.op("MatMul", q, n.random(1, H, D, 2 * rows))
    y = n.op("Reshape", y, n.ints(1, H, 2 * rows, rows), attrs=ReshapeAttrs())
    y = n.op("Slice", y, n.ints(1), n.ints(2 * rows), n.ints(2))
    y = n.op("Reshape", y, n.ints(1, H, rows, 2 * rows - 1), attrs=ReshapeAttrs())
    return n.op("Gather", y, n.const(np.arange(rows), np.int64), attrs=GatherAttrs(3))


def test_scores_by_position_become_a_view() -> None:
    n = Net(np.float64)
    y = n.op("Mul", shifted(n, n.input(1, H, L, D)), 0.125)
    rules = {"consecutive_rows": 1, "scaled_view": 1}
    graph, _ = check_pass(RelativePositions(), n.done(y), changes=2, rules=rules)
    assert not {"Gather", "Mul"} & set(graph.kinds())


def test_attention_reads_them_where_they_lie() -> None:
    n = Net()
    q, k, v = (
        n.op("Transpose", n.matmul(n.input(1, L, H, 24, name=x), D), attrs=TransposeAttrs((0, 2, 1, 3))) for x in "qkv"
    )
    y = n.op("Attention", q, k, v, n.op("Mul", shifted(n, q), 0.125))
    program = check_simulated(n.done(y), tolerance=1e-2)
    assert not {"Copy", "Gather", "Slice"} & set(kinds(program)[3:-1])


def gathered(*rows: int, axis: int = 1, size: object = L, constant: bool = False) -> Graph:
    n = Net(np.float64)
    x = n.random(2, L) if constant else n.input(2, size)
    y = n.op("Gather", x, n.const(np.array(rows), np.int64), attrs=GatherAttrs(axis))
    return n.done(n.op("Mul", y, n.input(len(rows), name="f")))


def scaled(
    *,
    factor: Callable[[Net], object] = lambda n: 0.5,
    view: bool = True,
    twice: bool = False,
    computed: bool = False,
    broadcast: bool = False,
) -> Graph:
    n = Net(np.float64)
    y = n.op("MatMul", n.input(2, 1, D), n.input(D, L, name="w") if computed else n.random(D, L))
    x = n.op("Reshape", y, n.ints(2, L), attrs=ReshapeAttrs()) if view else y
    z = n.op("Mul", x, n.const([[[0.5]]])) if broadcast else n.op("Mul", x, factor(n))
    return n.done(z, *([n.op("Exp", x)] if twice else []))


@pytest.mark.parametrize("rows", [(2, 3, 4), (-2, -1)])
def test_gathers_of_neighbors_are_slices(rows: tuple[int, ...]) -> None:
    graph, _ = check_pass(RelativePositions(), gathered(*rows), changes=1)
    assert "Slice" in graph.kinds()


UNTOUCHED = {
    "rows in another order": gathered(3, 2),
    "rows around the end": gathered(-1, 0),
    "constant rows": gathered(1, 2, constant=True),
    "unknown rows": gathered(0, 1, size=symbol("N")),
    "no view between": scaled(view=False),
    "a factor for each column": scaled(factor=lambda n: n.random(L)),
    "a second reader": scaled(twice=True),
    "no constant": scaled(computed=True),
    "a factor of more axes": scaled(broadcast=True),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_others_stay(name: str) -> None:
    check_untouched(RelativePositions(), UNTOUCHED[name])
