"""rows_of_one_index: gathers from several computed tensors by the same indices become one."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import CumulativeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import FuseSiblings
from optdnn.types import FP32, INT64

GPU = PassContext("cuda:sm_90a")
SIBLINGS = FuseSiblings()


def sorted_rows(
    widths: tuple[int, ...] = (0, 3, 4), *, rows: int = 12, axis: int = 0, chained: bool = False, constant: bool = False,
    twice: bool = False, pointwise: bool = False, wide: tuple[int, ...] = (),
) -> Graph:  # fmt: skip
    """Rows of tensors, taken in the order of an input. ``widths``: of the tensors (0: a vector). ``wide``: tensors in fp64."""
    n = Net()
    first = n.const(np.array(0), INT64)
    index = n.op("Mod", n.input(rows, dtype=INT64, name="order"), n.ints(rows))
    values = [n.op("Exp", n.input(rows, *([w] if w else []), name=f"x{k}")) for k, w in enumerate(widths)]
    values += [n.op("Exp", n.input(rows, w, dtype=np.dtype(np.float64), name=f"w{k}")) for k, w in enumerate(wide)]
    if constant:
        values[-1] = n.random(rows, widths[-1])
    taken = [n.op("Gather", x, index, attrs=GatherAttrs(axis if x == values[-1] else 0)) for x in values]
    if twice:
        taken[-1] = n.op("Gather", values[0], index, attrs=GatherAttrs(0))
    if chained:
        taken.append(n.op("Gather", n.op("Neg", taken[0]), index, attrs=GatherAttrs(0)))
    return n.done(*(n.op("Abs", y) if pointwise else n.op("CumSum", y, first, attrs=CumulativeAttrs()) for y in taken))


@pytest.mark.parametrize("widths", [(0, 3, 4), (2, 2, 2, 1)])
def test_gathers_by_one_list_are_one(widths: tuple[int, ...]) -> None:
    graph, _ = check_pass(SIBLINGS, sorted_rows(widths), changes=1, rules={"rows_of_one_index": 1}, context=GPU)
    assert (len(graph.of_kind("Gather")), len(graph.of_kind("Concat"))) == (1, 1)


def test_other_types_stay_apart() -> None:
    graph, _ = check_pass(SIBLINGS, sorted_rows(wide=(2,)), changes=1, context=GPU, promoted_changes=1)
    assert {graph.type(op.value).dtype for op in graph.of_kind("Gather")} == {FP32, np.dtype(np.float64)}


@pytest.mark.parametrize(
    "graph",
    [sorted_rows((3, 4)), sorted_rows((3, 4, 12), axis=1), sorted_rows(constant=True), sorted_rows(twice=True)],
    ids=["two", "columns", "a constant", "the same rows twice"],
)
def test_others_are_no_candidates(graph: Graph) -> None:
    check_untouched(SIBLINGS, graph, GPU)


def test_rows_whose_number_depends_on_data_stay() -> None:
    """Such Gathers run on the CPU, where a Split of their columns is a step of its own."""
    n = Net()
    index = n.op("Reshape", n.op("NonZero", n.input(12, name="mask")), n.ints(-1))
    values = [n.op("Exp", n.input(12, name=f"x{k}")) for k in range(3)]
    graph = n.done(*(n.op("Gather", x, index, attrs=GatherAttrs(0)) for x in values))
    check_untouched(SIBLINGS, graph, GPU)


def test_other_targets_stay() -> None:
    check_untouched(SIBLINGS, sorted_rows(), PassContext("cpu"))


def test_refusals() -> None:
    check_refused(
        SIBLINGS, sorted_rows((0, 3, 0), chained=True), because="computed from those of another one", context=GPU
    )
    reads = "pointwise operators take most of the rows"
    check_refused(SIBLINGS, sorted_rows((3, 4, 5), pointwise=True), because=reads, context=GPU)
    check_refused(SIBLINGS, sorted_rows((64, 64, 64), rows=4096), because="would take longer", context=GPU)


def test_producers_write_side_by_side() -> None:
    assert kinds(check_simulated(sorted_rows(), "fp32")).count("Gather") == 1
