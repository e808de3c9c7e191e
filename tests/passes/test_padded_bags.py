"""bags: embedding bags of PyTorch's newer exporter with a padding index, whose loops list the positions that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from importers.onnxtext import model
from support.check import check_pass, check_refused, check_untouched
from support.simulated import check_simulated, lowered
from support.sweep import all_pairs

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.ops import sequence_loops
from optdnn.passes.bags import Bags
from optdnn.passes.base import PassContext
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.counted_loops import CountedLoops
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants

GPU, CPU = PassContext(target="cuda:sm_90a"), PassContext(target="cpu")
EQUAL, OTHER, PART = (0, 3, 6, 9, 12), (0, 4, 4, 5, 12), (3, 6, 9, 12)


def padded(
    bounds: tuple[int, ...] | None = EQUAL, reduce: str = "ReduceSum", *, unrolled: bool = True, moved: bool = True,
    padding: int = 1, empty: float = 0.0, end: str = "Add(at, one)", step: int = 1, appended: str = "j", joined: str = "list, k",
    before: str = "Less(s, t)", float_rows: bool = True,
) -> Graph:  # fmt: skip
    """Bags of rows whose indices are not ``padding``. ``bounds``: of the bags; None if they are an input. ``moved``: whether
    negative indices count from the end. ``unrolled``: whether the importer writes out the iterations."""
    bags = 4 if bounds is None else len(bounds) - 1
    zeros, kind = ",".join([str(empty if float_rows else 0)] * 6), "float" if float_rows else "int64"
    index = """below = Less(x, none)  i = If(below) <then_branch = c () => (int64 v5) { v5 = Add(x, twenty) },
        else_branch = d () => (int64 v6) { v6 = Identity(x) }>""" if moved else ""  # fmt: skip
    listed = "" if bounds is None else f"int64[{bags + 1}] offsets = {{{','.join(map(str, bounds))}}}, "
    given = f", int64[{bags + 1}] offsets" if bounds is None else ""
    text = f"""g (int64[12] ids{given}) => ({kind}[{bags},6] y)
            <{listed}int64 one = {{1}}, int64 none = {{0}}, int64 begin = {{0}}, bool on = {{1}}, int64 number = {{{bags}}},
             int64 pad = {{{padding}}}, int64 twenty = {{20}}, int64 step = {{{step}}}, int64[0] nothing = {{}},
             int64[1] flat = {{-1}}, int64[1] zero = {{0}}> {{
        rows = Gather(table, ids)  q = SequenceEmpty<dtype = {1 if float_rows else 7}>()
        bags, n = Loop<body = b (int64 u, bool go, seq({kind}[1,6]) held, int64 at) =>
                (bool c, seq({kind}[1,6]) more, int64 next) {{
            s = Gather(offsets, at)  e = {end}  t = Gather(offsets, e)  some = {before}
            last, kept = Loop<body = p (int64 w, bool enter, int64 j, int64[m] list) => (bool d, int64 f, int64[l] longer) {{
                x = Gather(ids, j)  {index}
                same = Equal({"i" if moved else "x"}, pad)  takes = Not(same)
                longer = If(takes) <then_branch = g () => (int64[l] v1) {{
                        k = Reshape({appended}, flat)  v1 = Concat<axis = 0>({joined}) }},
                    else_branch = h () => (int64[l] v2) {{ v2 = Identity(list) }}>
                f = Add(j, step)  d = Less(f, t)
            }}>("", some, s, nothing)
            z = Size(kept)  is_empty = Equal(z, none)
            r = If(is_empty) <then_branch = y () => ({kind}[1,6] v3) {{ v3 = Constant<value = {kind}[1,6] {{{zeros}}}>() }},
                else_branch = o () => ({kind}[1,6] v4) {{
                    part = Gather(rows, kept)  v4 = {reduce}<keepdims = 1>(part, zero) }}>
            more = SequenceInsert(held, r)  next = Add(at, one)  c = Less(next, number)
        }}>("", on, q, begin)
        y = ConcatFromSequence<axis = 0>(bags) }}"""
    proto = model(text, 18)
    numbers = np.random.default_rng(3).standard_normal((20, 6)) * (1 if float_rows else 9)
    numbers = numbers.astype(np.float32 if float_rows else np.int64)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "table"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 512 if unrolled else 0)
        graph = import_model(proto)
    for one in (FoldConstants(), Canonicalize(), CountedLoops(), DeadCode()):
        one(graph)
    return graph


def check_bags(
    graph: Graph, ids: list[int], offsets: list[int], context: PassContext, *, unrolled: bool = True
) -> Graph:
    """Check the pass: no loop is left, and the results are those of the loops."""
    rules = {"concat_of_padded_bags" if unrolled else "loop_of_padded_bags": 1}
    after, _ = check_pass(Bags(), graph, changes=1, rules=rules, context=context, depends_on_input=False)
    assert not after.of_kind("Loop", "If")
    feeds = random_feeds(graph, 5) | {"ids": np.array(ids)}
    feeds |= {"offsets": np.array(offsets)} if "offsets" in feeds else {}
    np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], rtol=1e-5, atol=1e-6)
    return after


IDS = {
    "some": [1, 4, 1, 7, 8, 9, 1, 1, 1, 3, 1, 2],
    "none": [0, 4, 5, 7, 8, 9, 3, 2, 12, 3, 19, 2],
    "all": [1] * 12,
    "negative": [-19, 4, -1, -19, -19, -19, 3, 2, -20, 3, 19, -19],
}


@all_pairs(
    {
        "context": {"gpu": GPU, "cpu": CPU},
        "unrolled": [True, False],
        "reduce": ["ReduceSum", "ReduceMean", "ReduceMax"],
        "ids": IDS.values(),
    }
)
def test_bags_of_one_size_are_rows(context: PassContext, unrolled: bool, reduce: str, ids: list[int]) -> None:
    after = check_bags(padded(reduce=reduce, unrolled=unrolled), ids, [], context, unrolled=unrolled)
    assert not after.of_kind("SegmentSum")


@all_pairs(
    {
        "bounds, unrolled": [(OTHER, True), ((3, 3, 3), True), (None, True), (None, False)],
        "reduce": ["ReduceSum", "ReduceMean", "ReduceMax"],
        "ids": IDS.values(),
    }
)
def test_other_bags_are_segments(bounds: tuple[int, ...] | None, unrolled: bool, reduce: str, ids: list[int]) -> None:
    graph = padded(bounds, reduce, unrolled=unrolled)
    for offsets in ([0, 3, 3, 8, 12], [2, 2, 2, 2, 2], [1, 2, 9, 12, 12]):
        after = check_bags(graph, ids, offsets, GPU, unrolled=unrolled)
        assert len(after.of_kind("SegmentSum")) == (1 if reduce == "ReduceSum" else 2)


@pytest.mark.parametrize(
    "options", [{"moved": False}, {"bounds": PART}, {"padding": 0}, {"padding": -1, "moved": False}]
)
def test_forms(options: dict[str, Any]) -> None:
    check_bags(padded(**options), IDS["negative"], [], GPU)


@pytest.mark.parametrize(
    ("options", "because", "context"),
    [
        ({"bounds": OTHER}, "different sizes", CPU),
        ({"bounds": None}, "different sizes", CPU),
        ({"bounds": None, "unrolled": False}, "different sizes", CPU),
        ({"bounds": None, "end": "Sub(number, at)"}, "follow one another inside", GPU),
        ({"bounds": None, "end": "Sub(number, at)", "unrolled": False}, "follow one another inside", GPU),
        ({"bounds": (0, 4, 8, 13)}, "follow one another inside", GPU),
        ({"bounds": (0, 4, 8, 13), "unrolled": False}, "follow one another inside", GPU),
        ({"float_rows": False}, "no floats", GPU),
    ],
)
def test_bags_that_stay(options: dict[str, Any], because: str, context: PassContext) -> None:
    check_refused(Bags(), padded(**options), because=because, context=context)


@pytest.mark.parametrize(
    "options",
    [{"empty": 1.0}, {"reduce": "ReduceMin"}, {"step": 2}, {"appended": "i"}, {"joined": "k, list"},
     {"bounds": None, "before": "Less(t, s)"}],
    ids=["not zeros", "minimum", "step", "another number", "order", "another test"],
)  # fmt: skip
def test_other_loops_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(Bags(), padded(**options), GPU)


@pytest.mark.parametrize("reduce", ["ReduceSum", "ReduceMean", "ReduceMax"])
@pytest.mark.parametrize("bounds", [EQUAL, None], ids=["equal", "input"])
def test_they_run_on_the_gpu_alone(bounds: tuple[int, ...] | None, reduce: str) -> None:
    graph = padded(bounds, reduce)
    check_simulated(graph)
    assert all(step.executor == "cuda" for step in lowered(graph).steps)
