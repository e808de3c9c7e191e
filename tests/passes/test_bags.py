"""bags: a Loop over embedding bags of one size becomes one Gather and one reduction."""

from __future__ import annotations

import pytest
from importers.onnxtext import model
from support.check import check_pass, check_refused, check_untouched

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.bags import Bags
from optdnn.passes.base import PassContext
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants

GPU = PassContext(target="cuda:sm_90a")

DEPENDS = "t = ReduceMax(found)  n = Cast<to = 9>(t)  c = Squeeze(n)"
"""A condition that depends on data."""


def loop(
    starts: str = "0, 3, 6, 9", ends: str = "3, 6, 9, 12", reduce: str = "ReduceMean", step: int = 1, axis: int = 0, keep: int = 0,
    going: str = "c = Identity(true)", count: int = 12, trips: int = 4,
) -> Graph:  # fmt: skip
    """As torch's exporter writes EmbeddingBag; the table is 20 rows of x."""
    more = "1, " if keep else ""
    text = f"""g (float[20,6] x, int64[{count}] at) => (float[{trips},{more}6] y)
        <int64 trips = {{{trips}}}, bool true = {{1}}, int64[4] starts = {{{starts}}}, int64[4] ends = {{{ends}}}> {{
        y = Loop<body = b (int64 i, bool go) => (bool c, float[r] v) <int64[1] zero = {{0}}, int64[1] axes = {{{axis}}},
                int64[1] step = {{{step}}}> {{
            p = Gather(starts, i)  q = Gather(ends, i)  s = Unsqueeze(p, zero)  e = Unsqueeze(q, zero)
            rows = Slice(at, s, e, zero, step)  found = Gather(x, rows)  v = {reduce}<keepdims = {keep}>(found, axes)  {going}
        }}>(trips, true) }}"""
    graph = import_model(model(text, 18))
    FoldConstants()(graph)
    DeadCode()(graph)
    return graph


@pytest.mark.parametrize("reduce", ["ReduceSum", "ReduceMean", "ReduceMax"])
@pytest.mark.parametrize("keep", [0, 1])
def test_bags_of_one_size_are_rows(reduce: str, keep: int) -> None:
    after, _ = check_pass(Bags(), loop(reduce=reduce, keep=keep), changes=1, context=GPU)
    assert {k: n for k, n in after.kinds().items() if k not in ("Constant", "Input", "Output")} == {
        "Gather": 1, reduce: 1, "Reshape": 1,
    }  # fmt: skip


def test_a_part_of_the_indices() -> None:
    after, _ = check_pass(Bags(), loop(starts="1, 3, 5, 7", ends="3, 5, 7, 9"), changes=1, context=GPU)
    assert after.kinds()["Slice"] == 1
    check_pass(Bags(), loop(ends="3, 6, 9, 99"), changes=1, context=GPU)  # an end behind the last index


@pytest.mark.parametrize(
    "bounds", [("0, 3, 6, 9", "3, 6, 9, 11"), ("0, 3, 6, 8", "3, 6, 9, 11"), ("0, 0, 0, 0", "0, 0, 0, 0")]
)
def test_bags_of_different_sizes_stay(bounds: tuple[str, str]) -> None:
    check_refused(Bags(), loop(*bounds), because="different sizes", context=GPU)


@pytest.mark.parametrize(
    "graph",
    [loop(step=2), loop(axis=1), loop(reduce="ReduceMin"), loop(going=DEPENDS)],
    ids=["step", "axis", "reduction", "condition"],
)  # fmt: skip
def test_other_loops_stay(graph: Graph) -> None:
    check_untouched(Bags(), graph, GPU)


def test_cpus_run_loops() -> None:
    check_untouched(Bags(), loop())
