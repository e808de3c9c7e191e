"""doubled_scans: steps that double their reach become one cumulative sum or product; neighbors stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph
from optdnn.ops.index import CumulativeAttrs, PadAttrs
from optdnn.passes.doubled_scans import DoubledScans


def scan(
    kind: str = "Mul",
    size: int = 7,
    reaches: Sequence[int] = (1, 2, 4),
    *,
    filler: float | None = None,
    mode: str = "constant",
    tapped: bool = False,
    axes: Sequence[int] = (1, 1, 1),
    dtype: type = np.float64,
) -> Graph:
    """Steps over the second axis. ``tapped``: the first step is read elsewhere."""
    n = Net(dtype)
    x = n.op("Sigmoid", n.input(2, size, 8, name="x"))
    more = []
    for reach, axis in zip(reaches, axes, strict=False):
        pads = [0] * 6
        pads[axis], pads[axis + 3] = reach, -reach
        number = (1.0 if kind == "Mul" else 0.0) if filler is None else filler
        operands = (n.ints(*pads), number) if mode == "constant" else (n.ints(*pads),)
        x = n.op(kind, x, n.op("Pad", x, *operands, attrs=PadAttrs(mode)))
        if tapped and not more:
            more.append(n.op("Exp", x))
    return n.done(n.op("Neg", x), *more)


@pytest.mark.parametrize(("kind", "made"), [("Mul", "CumProd"), ("Add", "CumSum")])
@pytest.mark.parametrize(("size", "reaches"), [(7, (1, 2, 4)), (8, (1, 2, 4)), (3, (1, 2)), (7, (-1, -2, -4))])
def test_steps_are_one_operator(kind: str, made: str, size: int, reaches: tuple[int, ...]) -> None:
    graph, _ = check_pass(DoubledScans(), scan(kind, size, reaches), changes=1, rules={"doubled_scan": 1})
    (op,) = graph.of_kind(made)
    assert op.attrs == CumulativeAttrs(reverse=reaches[0] < 0)
    assert graph.kinds() == {"Sigmoid": 1, made: 1, "Neg": 1}


@pytest.mark.parametrize(
    "graph",
    [
        scan(size=9), scan(size=6, reaches=(1, 3)), scan(reaches=(2, 4)), scan(size=2, reaches=(1,)), scan(reaches=(1, -2, 4)),
        scan(filler=0.5), scan("Add", filler=1.0), scan(mode="edge"), scan(tapped=True),
        scan(size=8, reaches=(1, 2, 4), axes=(2, 1, 1)),
    ],
    ids=[
        "a longer axis", "another reach", "no first step", "one step", "back and forth",
        "another filler", "another filler of sums", "edges", "read elsewhere",
        "two axes",
    ],
)  # fmt: skip
def test_others_stay(graph: Graph) -> None:
    check_untouched(DoubledScans(), graph)


def test_a_product_of_sums_stays() -> None:
    n = Net(np.float64)
    x = n.op("Sigmoid", n.input(2, 4))
    x = n.op("Add", x, n.op("Pad", x, n.ints(0, 1, 0, -1), 0.0, attrs=PadAttrs()))
    x = n.op("Mul", x, n.op("Pad", x, n.ints(0, 2, 0, -2), 1.0, attrs=PadAttrs()))
    check_untouched(DoubledScans(), n.done(x))


def test_they_are_one_launch() -> None:
    program = check_simulated(scan(dtype=np.float32), tolerance=2e-3)
    assert [s.params["op"]["kind"] for s in program.steps].count("CumProd") == 1


def test_pads_of_some_axes() -> None:
    """The pads are those of the axes that the Pad names: canonicalize gives known ones to all axes first."""
    n = Net(np.float64)
    x = n.op("Sigmoid", n.input(2, 3, 8, name="x"))
    for reach in (1, 2):
        x = n.op("Mul", x, n.op("Pad", x, n.ints(reach, -reach), 1.0, n.ints(1), attrs=PadAttrs("constant")))
    check_untouched(DoubledScans(), n.done(x))
