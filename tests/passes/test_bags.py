"""bags: a Loop over embedding bags of one size becomes one Gather and one reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from importers.onnxtext import model
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.bags import Bags
from optdnn.passes.base import PassContext
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.pipelines import PIPELINE

GPU = PassContext(target="cuda:sm_90a")

DEPENDS = "t = ReduceMax(found)  n = Cast<to = 9>(t)  c = Squeeze(n)"
"""A condition that depends on data."""


def loop(
    starts: str = "0, 3, 6, 9", ends: str = "3, 6, 9, 12", reduce: str = "ReduceMean", step: int = 1, axis: int = 0, keep: int = 0,
    going: str = "c = Identity(true)", count: int = 12, trips: int = 4, fed: str = "", rows: bool = False, flat: bool = True,
    weights: str = "", weighed: int = 0,
) -> Graph:  # fmt: skip
    """As torch's exporters write EmbeddingBag; the table is 20 rows of x.

    ``fed``: an input, "zero" (the cut's axis) or "step". ``rows``: a run of the rows themselves. ``flat``: starts have rank 1.
    ``weights``: the product of ``found`` and the run ``part`` of the weights, which has ``weighed`` elements (0: one per index).
    """
    more = "1, " if keep else ""
    fixed = "".join(f"int64[1] {n} = {{{v}}}, " for n, v in (("zero", 0), ("step", step)) if n != fed)
    also = f", int64[1] {fed}" if fed else ""
    cut = "p = Gather(starts, i)  q = Gather(ends, i)  s = Unsqueeze(p, zero)  e = Unsqueeze(q, zero)"
    cut = cut if flat else "s = Gather(starts, i)  e = Gather(ends, i)"
    found = (
        "found = Slice(x, s, e, zero, step)" if rows else "rows = Slice(at, s, e, zero, step)  found = Gather(x, rows)"
    )
    kind = "int64[4]" if flat else "int64[4,1]"
    if weights:
        also += f", float[{weighed or count}] w"
        found += f"  run = Slice(w, s, e, zero, step)  part = Unsqueeze(run, axes_of_part)  product = {weights}"
        fixed += "int64[1] axes_of_part = {1}, "
    name = "product" if weights else "found"
    text = f"""g (float[20,6] x, int64[{count}] at{also}) => (float[{trips},{more}6] y)
        <int64 trips = {{{trips}}}, bool true = {{1}}, {kind} starts = {{{starts}}}, {kind} ends = {{{ends}}}> {{
        y = Loop<body = b (int64 i, bool go) => (bool c, float[r] v) <{fixed}int64[1] axes = {{{axis}}}> {{
            {cut}  {found}  v = {reduce}<keepdims = {keep}>({name}, axes)  {going}
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


@pytest.mark.parametrize("reduce", ["ReduceSum", "ReduceMean", "ReduceMax"])
@pytest.mark.parametrize("flat", [True, False])
def test_bags_of_rows(reduce: str, flat: bool) -> None:
    """torch's newer exporter gathers the rows before the loop, and reads each start as a list of one number."""
    after, _ = check_pass(Bags(), loop(reduce=reduce, rows=True, flat=flat), changes=1, context=GPU)
    assert {k: n for k, n in after.kinds().items() if k not in ("Constant", "Input", "Output")} == {
        "Slice": 1, reduce: 1, "Reshape": 1,
    }  # fmt: skip


@pytest.mark.parametrize("weights", ["Mul(found, part)", "Mul(part, found)"])
@pytest.mark.parametrize("starts", ["0, 3, 6, 9", "1, 4, 7, 10"])
def test_bags_with_weights(weights: str, starts: str) -> None:
    """torch's EmbeddingBag with ``per_sample_weights`` and indices of two axes: all bags have one size."""
    ends = ", ".join(str(int(s) + 3) for s in starts.split(","))
    after, _ = check_pass(Bags(), loop(starts, ends, "ReduceSum", weights=weights, count=13), changes=1, context=GPU)
    assert {k: after.kinds()[k] for k in ("Gather", "Mul", "ReduceSum")} == {"Gather": 1, "Mul": 1, "ReduceSum": 1}


@pytest.mark.parametrize(
    "options", [{"weighed": 13}, {"weights": "Mul(part, part)"}, {"weights": "Add(found, part)"}, {"rows": True}]
)
def test_weights_of_other_bags_stay(options: dict[str, Any]) -> None:
    """More weights than indices, no rows of a table, another operator, rows that are not gathered."""
    check_untouched(Bags(), loop(**{"reduce": "ReduceSum", "weights": "Mul(found, part)"} | options), GPU)


def test_a_part_of_the_indices() -> None:
    after, _ = check_pass(Bags(), loop(starts="1, 3, 5, 7", ends="3, 5, 7, 9"), changes=1, context=GPU)
    assert after.kinds()["Slice"] == 1
    check_pass(Bags(), loop(ends="3, 6, 9, 99"), changes=1, context=GPU)  # an end after the last index


@pytest.mark.parametrize(
    "bounds", [("0, 3, 6, 9", "3, 6, 9, 11"), ("0, 3, 6, 8", "3, 6, 9, 11"), ("0, 0, 0, 0", "0, 0, 0, 0")]
)
def test_bags_of_different_sizes_stay(bounds: tuple[str, str]) -> None:
    check_refused(Bags(), loop(*bounds), because="different sizes", context=GPU)


@pytest.mark.parametrize(
    "graph",
    [
        loop(step=2), loop(axis=1), loop(reduce="ReduceMin"), loop(going=DEPENDS), loop(fed="step"), loop(fed="zero"),
    ],
    ids=["step", "axis", "reduction", "condition", "unknown step", "unknown axis"],
)  # fmt: skip
def test_other_loops_stay(graph: Graph) -> None:
    check_untouched(Bags(), graph, GPU)


def parts(
    bounds: list[tuple[int, int]], kinds: list[str], other: bool = False, twelve: float = 3.0, axes: bool = True
) -> Graph:
    """Concatenated reductions: the importer writes a loop that carries a sequence in this form."""
    n = Net(np.float64)
    x = n.op("Relu", n.input(12, 6))
    rows = []
    for k, ((start, end), kind) in enumerate(zip(bounds, kinds, strict=True)):
        source = n.op("Neg", x) if other and k == 0 else x
        cut = n.op("Slice", source, n.ints(start), n.ints(end), *([n.ints(0)] if axes else []))
        y = n.op("ReduceSum" if kind == "Div" else kind, cut, n.ints(0), attrs=ReduceAttrs(keepdims=True))
        rows.append(n.op("Div", y, n.const([twelve])) if kind == "Div" else y)
    return n.done(n.op("Concat", *rows, attrs=ConcatAttrs(0)))


THREES = [(0, 3), (3, 6), (6, 9)]


@pytest.mark.parametrize("axes", [True, False])
@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMean", "ReduceMax"])
def test_reductions_side_by_side(kind: str, axes: bool) -> None:
    after, _ = check_pass(Bags(), parts(THREES, [kind] * 3, axes=axes), changes=1, context=GPU)
    assert after.kinds()[kind] == 1


def test_a_sum_over_its_count_is_a_mean() -> None:
    check_pass(Bags(), parts([*THREES, (9, 12)], ["ReduceMean"] * 3 + ["Div"]), changes=1, context=GPU)


def test_parts_that_stay() -> None:
    sums = ["ReduceSum"] * 3
    check_refused(Bags(), parts([(0, 3), (3, 6), (6, 8)], sums), because="different sizes", context=GPU)
    check_refused(
        Bags(), parts(THREES, ["ReduceSum", "ReduceMax", "ReduceSum"]), because="different values", context=GPU
    )
    check_refused(Bags(), parts(THREES, sums, other=True), because="different values", context=GPU)
    check_untouched(Bags(), parts(THREES, ["ReduceMean", "ReduceMean", "Div"], twelve=4.0), GPU)


def test_a_divisor_may_add_axes() -> None:
    n = Net(np.float64)
    x = n.op("Relu", n.input(12, 6))
    rows = []
    for start, end in THREES:
        total = n.op(
            "ReduceSum", n.op("Slice", x, n.ints(start), n.ints(end)), n.ints(0), attrs=ReduceAttrs(keepdims=True)
        )
        rows.append(n.op("Div", total, n.const([[[3.0]]])))
    check_untouched(Bags(), n.done(n.op("Concat", *rows, attrs=ConcatAttrs(0))), GPU)


@pytest.mark.parametrize("level", [2, 3])
def test_cpus_run_no_loop_for_them(level: int) -> None:
    """Without the pass, a library runs an iteration per bag: ONNX Runtime needed 0.7 s for 26 tables of 512 bags."""
    assert any(isinstance(p, Bags) for p in PIPELINE(level, "cpu"))
    check_pass(Bags(), loop(), changes=1, context=PassContext(target="cpu"))
