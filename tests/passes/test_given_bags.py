"""bags: a Loop over embedding bags whose bounds are computed becomes one segment reduction, or a product of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from importers.onnxtext import model
from support.check import check_pass, check_refused, check_untouched
from support.on_gpu import checked_program
from support.simulated import check_simulated, lowered

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.ops import sequence_loops
from optdnn.passes.bags import Bags
from optdnn.passes.base import PassContext
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants
from optdnn.types import Array

GPU, CPU = PassContext(target="cuda:sm_90a"), PassContext(target="cpu")


def given(
    reduce: str = "ReduceSum", keep: int = 0, weights: str = "", table: str = "constant", flat: bool = True,
    count: int = 12, trips: int = 4, bounds: int = 5, indices: str = "at", more: int = 0, limits: int = 0,
) -> Graph:  # fmt: skip
    """As :func:`loop`, of a constant table, with bounds that are an input. ``limits``: they are parts of one list of this length.

    ``weights``: "run" (each row times its weight), or "other" (the weights of another run); ``more`` of them than indices.
    ``table``: "constant", "infinite" or "input".
    """
    kind, shape = f"int64[{bounds}]" if flat else f"int64[{bounds},1]", (20, 6)
    cut = "p = Gather(starts, i)  q = Gather(ends, i)  s = Unsqueeze(p, zero)  e = Unsqueeze(q, zero)"
    cut = cut if flat else "s = Gather(starts, i)  e = Gather(ends, i)"
    run = {"": "", "run": "part = Slice(w, s, e, zero)", "other": "part = Slice(w, e, s, zero)"}[weights]
    times = "one = Constant<value_ints = [1]>()  column = Unsqueeze(part, one)  found = Mul(those, column)"
    name, times = ("those", times) if weights else ("found", "")
    kept = "1, " if keep else ""
    inputs = f"int64[{count}] at" + (f", int64[{limits}] limits" if limits else f", {kind} starts, {kind} ends")
    inputs += f", float[{count + more}] w" if weights else ""
    inputs += ", float[20,6] x" if table == "input" else ""
    lists = """n0 = Constant<value_ints = [0]>()  n1 = Constant<value_ints = [1]>()  n9 = Constant<value_ints = [99]>()
        starts = Slice(limits, n0, n9)  ends = Slice(limits, n1, n9)""" if limits else ""  # fmt: skip
    text = f"""g ({inputs}) => (float[{trips},{kept}6] y) <int64 trips = {{{trips}}}, bool true = {{1}}> {{ {lists}
        y = Loop<body = b (int64 i, bool go) => (bool c, float[r] v) <int64[1] zero = {{0}}> {{
            {cut}  rows = Slice({indices}, s, e, zero)  {name} = Gather(x, rows)  {run}
            {times}
            v = {reduce}<keepdims = {keep}>(found, zero)  c = Identity(true)
        }}>(trips, true) }}"""
    proto = model(text, 18)
    if table != "input":
        numbers = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
        if table == "infinite":
            numbers[7, 2] = np.inf
        proto.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "x"))
    graph = import_model(proto)
    FoldConstants()(graph)
    DeadCode()(graph)
    return graph


def bounds_of(graph: Graph, starts: list[int], ends: list[int]) -> dict[str, Array]:
    feeds = random_feeds(graph, 5)
    shape = feeds["starts"].shape
    return {**feeds, "starts": np.array(starts).reshape(shape), "ends": np.array(ends).reshape(shape)}


BOUNDS = {
    "sorted": ([0, 3, 3, 8, 0], [3, 3, 8, 12, 0]),
    "overlapping": ([2, 0, 5, 1, 0], [9, 12, 4, 6, 0]),
    "from the end": ([-3, -12, -20, 2, 0], [12, -9, 5, -1, 0]),
    "behind the end": ([0, 10, 12, 30, 0], [99, 12, 40, 50, 0]),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("reduce", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("weights", ["", "run"])
def test_given_bounds_are_a_product(reduce: str, weights: str, name: str) -> None:
    graph = given(reduce, weights=weights)
    after, _ = check_pass(Bags(), graph, changes=1, rules={"loop_of_given_bags": 1}, context=GPU)
    assert {k: n for k, n in after.kinds().items() if k in ("MatMul", "Gather", "Loop")} == {"MatMul": 1, "Gather": 1}
    feeds = bounds_of(graph, *BOUNDS[name])
    np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limits", [[0, 3, 3, 8, 12], [2, 9, 5, -4, 30], [4, 4, 4, 4, 4]])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduce": "ReduceMean", "keep": 1}, {"reduce": "ReduceMax"}, {"weights": "run"}, {"table": "input"}],
    ids=["sum", "mean", "maximum", "weights", "computed table"],
)
def test_bounds_of_one_list_are_segments(options: dict[str, Any], limits: list[int]) -> None:
    graph = given(limits=5, **options)
    depends = "reduce" not in options
    after, _ = check_pass(
        Bags(), graph, changes=1, rules={"loop_of_given_bags": 1}, context=GPU, depends_on_input=depends
    )
    assert {k: n for k, n in after.kinds().items() if k in ("MatMul", "SegmentSum", "Loop")} == {"SegmentSum": 1}
    feeds = {**random_feeds(graph, 5), "limits": np.array(limits)}
    want = evaluate(graph, feeds)["y"]
    want = np.where(np.isnan(want), 0, want)  # the mean of no rows
    np.testing.assert_allclose(evaluate(after, feeds)["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limits", [4, 5])
def test_a_list_without_an_end_is_no_list_of_segments(limits: int) -> None:
    """Four bags need five limits; the last of five bags would begin at the last limit."""
    kinds = check_pass(Bags(), given(limits=5), changes=1, context=GPU)[0].kinds()
    assert (kinds.get("SegmentSum"), kinds.get("MatMul")) == (1, None)
    check_untouched(Bags(), given(limits=limits, trips=limits), GPU)


def test_bags_on_a_gpu_read_only_what_exists() -> None:
    """Indices and limits that are out of range are moved to the nearest one, as a kernel must not read elsewhere."""
    graph = given(limits=5)
    Bags()(graph, GPU)
    feeds = {"at": np.array([99, -99, *range(10)]), "limits": np.array([-99, 1, 2, 5, 99])}
    nearest = {"at": np.array([19, 0, *range(10)]), "limits": np.array([0, 1, 2, 5, 12])}
    np.testing.assert_array_equal(evaluate(graph, feeds)["y"], evaluate(graph, nearest)["y"])


@pytest.mark.hopper
@pytest.mark.parametrize("options", [{}, {"reduce": "ReduceMean"}, {"reduce": "ReduceMax"}, {"weights": "run"}])
def test_segments_with_computed_limits_on_a_gpu(options: dict[str, Any]) -> None:
    graph = given(limits=5, **options)
    checked_program(
        lowered(graph, "fp16", "cuda:sm_90a"), {**random_feeds(graph, 5), "limits": np.array([2, 9, 5, -4, 30])}, 1e-3
    )


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("keep", [0, 1])
def test_given_bounds_in_other_forms(keep: int, flat: bool) -> None:
    """Bounds with an axis of their own, as many as there are bags, and a result that keeps the axis."""
    check_pass(Bags(), given(keep=keep, flat=flat, bounds=4), changes=1, context=GPU)


def test_a_weight_that_is_no_number_stays_in_its_bag() -> None:
    graph = given(weights="run")
    feeds = bounds_of(graph, *BOUNDS["sorted"])
    feeds["w"][4] = np.nan  # an index of the third bag
    Bags()(graph, GPU)
    assert np.isnan(evaluate(graph, feeds)["y"]).any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"reduce": "ReduceMax"}, "maximum"),
        ({"table": "infinite"}, "finite"),
        ({"table": "input"}, "finite"),
        ({"count": 1 << 25}, "larger than"),
        ({"count": 0}, "no indices"),
    ],
)
def test_given_bounds_that_stay(options: dict[str, Any], because: str) -> None:
    check_refused(Bags(), given(**options), because=because, context=GPU)


@pytest.mark.parametrize(
    "options", [{"weights": "other"}, {"weights": "run", "more": 1}, {"bounds": 3}, {"indices": "starts"}]
)
def test_given_bounds_of_other_loops(options: dict[str, Any]) -> None:
    """Weights of another run, more weights than indices, fewer bounds than bags; indices that are bounds are still indices."""
    graph = given(**options)
    if "indices" in options:
        check_pass(Bags(), graph, changes=1, context=GPU)
    else:
        check_untouched(Bags(), graph, GPU)


def test_given_bags_run_on_the_gpu_alone() -> None:
    program = check_simulated(given())
    assert {step.executor for step in program.steps} == {"cuda"}


def chosen(
    bounds: Sequence[tuple[int, int]] = ((0, 1), (1, 2), (2, 3), (3, 4)), *, reduce: str = "ReduceSum", weights: str = "",
    empty: float = 0.0, table: str = "constant", last: bool = True, kinds: Sequence[str] = (), axes: int = 0, meet: bool = True,
) -> Graph:  # fmt: skip
    """Bags that the importer wrote out. A bag is zeros (``empty``) where its bounds are equal (``meet``).

    ``bounds``: two elements of the offsets for each bag. ``weights``: the type of factors of the rows. ``last``: whether the last
    one is a bag as well.
    """
    zeros, count = ",".join([str(empty)] * 6), len(bounds)
    parts = [
        f"""s{k} = Slice(offsets, n{start}, n{start + 1})  e{k} = Slice(offsets, n{end}, n{end + 1})
        c{k} = Equal(s{k}, {f"e{k}" if meet else "n3"})
        y{k} = If(c{k}) <then_branch = a () => (float[1,6] v) {{ v = Constant<value = float[1,6] {{{zeros}}}>() }},
            else_branch = b () => (float[1,6] v) {{ axes = Constant<value_ints = [{axes}]>()
            part = Slice(rows, s{k}, e{k})  v = {kinds[k] if kinds else reduce}<keepdims = 1>(part, axes) }}>"""
        for k, (start, end) in enumerate(bounds)
    ]
    if not last:
        parts[-1] = f"y{count - 1} = Slice(rows, n0, n1)"
    numbers = " ".join(f"n{k} = Constant<value_ints = [{k}]>()" for k in range(6))
    rows = "rows = Mul(looked, w)" if weights else "rows = Identity(looked)"
    more = (f", {weights} w" if weights else "") + (", float[20,6] x" if table == "input" else "")
    text = f"""g (int64[12] at, int64[5] offsets{more}) => (float[{count},6] y) {{
        {numbers} looked = Gather(x, at) {rows} {" ".join(parts)}
        y = Concat<axis = 0>({", ".join(f"y{k}" for k in range(count))}) }}"""
    proto = model(text, 18)
    if table != "input":
        numbers_of = np.random.default_rng(3).standard_normal((20, 6)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(numbers_of, "x"))
    graph = import_model(proto)
    for one in (FoldConstants(), Canonicalize(), DeadCode()):
        one(graph)
    return graph


@pytest.mark.parametrize("offsets", [[0, 3, 3, 8, 12], [2, 9, 5, -4, 30], [4, 4, 4, 4, 4]])
@pytest.mark.parametrize(("reduce", "weights"), [("ReduceSum", ""), ("ReduceMean", ""), ("ReduceSum", "float[12,1]")])
@pytest.mark.parametrize("context", [GPU, CPU], ids=["gpu", "cpu"])
def test_bags_that_are_chosen(context: PassContext, reduce: str, weights: str, offsets: list[int]) -> None:
    graph = chosen(reduce=reduce, weights=weights)
    after, _ = check_pass(Bags(), graph, changes=1, rules={"concat_of_given_bags": 1}, context=context)
    assert not after.of_kind("If", "Concat")
    assert len(after.of_kind("SegmentSum" if context is GPU else "MatMul")) == 1
    feeds = {**random_feeds(graph, 5), "offsets": np.array(offsets)}
    np.testing.assert_allclose(evaluate(after, feeds)["y"], evaluate(graph, feeds)["y"], rtol=1e-5, atol=1e-6)


def test_another_part_after_them_stays() -> None:
    after, _ = check_pass(Bags(), chosen(last=False), changes=1, context=GPU)
    assert [len(op.inputs) for op in after.of_kind("Concat")] == [2]


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (chosen(kinds=["ReduceSum", "ReduceMean", "ReduceSum", "ReduceSum"]), "different values"),
        (chosen(((0, 1), (2, 3), (1, 2), (3, 4))), "not in the order"),
        (chosen(((0, 2), (1, 3), (2, 4))), "do not end where the next ones begin"),
        (chosen(weights="float[12,6]"), "rows of a table"),
    ],
    ids=["kinds", "order", "overlaps", "factors"],
)
def test_chosen_bags_that_stay(graph: Graph, because: str) -> None:
    check_refused(Bags(), graph, because=because, context=GPU)


@pytest.mark.parametrize("options", [{"empty": 1.0}, {"kinds": ["ReduceMin"] * 4}, {"axes": 1}, {"meet": False}])
def test_other_choices_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(Bags(), chosen(**options), GPU)


LAST = """first = Equal(at, last)
    v = If(first) <then_branch = c () => (float[1,6] w) {{ axes = Constant<value_ints = [0]>()  total = ReduceSum(part, axes)
            d = Sub(length, s)  z = Constant<value_int = 0>()  some = Greater(d, z)  again = Abs(total)
            w = If(some) <then_branch = e () => (float[1,6] q) {{ k = Cast<to = 1>({divisor})  q = Div(total, k) }},
                else_branch = f () => (float[1,6] q) {{ q = Identity({whole}) }}> }},
        else_branch = d () => (float[1,6] w) {{ axes = Constant<value_ints = [0]>()  w = ReduceMean(part, axes) }}>"""
"""The last of several means as PyTorch's newer exporter writes it."""


def looped(
    reduce: str = "ReduceSum", *, table: str = "constant", ends: str = "Add(j, one)", divisor: str = "", whole: str = "total",
    length: int = 12, empty: float = 0.0, weights: str = "", bags: int = 6, to_the_end: bool = False, last: int = -1,
    unrolled: bool = False,
) -> Graph:  # fmt: skip
    """A Loop over bags. A bag is zeros (``empty``) where its bounds are equal. ``divisor``: of the last mean.
    ``to_the_end``: the last bag has all rows from its start on. ``last``: the number of the bag that is written as the last one.
    ``unrolled``: whether the importer writes out the iterations."""
    zeros = ",".join([str(empty)] * 6)
    reduced = f"axes = Constant<value_ints = [0]>()  v = {reduce}<keepdims = 1>(part, axes)"
    reduced = LAST.format(divisor=divisor, whole=whole) if divisor else reduced
    part = "part = Slice(rows, s, t)"
    if to_the_end:
        part = """first = Equal(at, last)  part = If(first) <then_branch = c () => (float[u,6] w) { w = Slice(rows, s, length) },
            else_branch = d () => (float[u,6] w) { w = Slice(rows, s, t) }>"""
    rows = "rows = Mul(looked, w)" if weights else "rows = Identity(looked)"
    more = (f", {weights} w" if weights else "") + (", float[20,6] x" if table == "input" else "")
    text = f"""g (int64[12] at, int64[{bags + 1}] offsets{more}) => (float[{bags},6] y)
            <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] top = {{{bags}}}, int64 begin = {{0}}, bool on = {{1}},
             int64 number = {{{bags}}}, int64 last = {{{last % bags}}}, int64[1] length = {{{length}}}> {{
        looked = Gather(x, at)  {rows}  held = SequenceEmpty<dtype = 1>()
        s, n = Loop<body = b (int64 i, bool go, seq(float[1,6]) held, int64 at) => (bool c, seq(float[1,6]) more, int64 next) {{
            j = Unsqueeze(at, zero)  e = {ends}  f = Add(e, one)  h = Add(j, one)  s = Slice(offsets, j, h)
            t = Slice(offsets, e, f)
            same = Equal(s, t)
            r = If(same) <then_branch = p () => (float[1,6] v) {{ v = Constant<value = float[1,6] {{{zeros}}}>() }},
                else_branch = o () => (float[1,6] v) {{ {part}  {reduced} }}>
            more = SequenceInsert(held, r)  k = Squeeze(one, zero)  next = Add(at, k)  c = Less(next, number)
        }}>("", on, held, begin)
        y = ConcatFromSequence<axis = 0>(s) }}"""
    proto = model(text, 18)
    if table != "input":
        numbers_of = np.random.default_rng(3).standard_normal((20, 6)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(numbers_of, "x"))
    with pytest.MonkeyPatch.context() as patch:
        if not unrolled:
            patch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
        graph = import_model(proto)
    for one in (FoldConstants(), Canonicalize(), DeadCode()):
        one(graph)
    return graph


def offsets_of(bags: int = 6) -> dict[str, list[int]]:
    rng = np.random.default_rng(5)
    return {
        "sorted": [*np.sort(rng.integers(0, 13, bags)).tolist(), 12],
        "any": rng.integers(-14, 15, bags + 1).tolist(),
        "empty": [4] * (bags + 1),
        "an empty last one": [*[3] * bags, 3],
    }


LOOPED: dict[str, dict[str, Any]] = {
    "sum": {}, "mean": {"reduce": "ReduceMean"}, "weights": {"weights": "float[12,1]"}, "last": {"divisor": "d"},
    "another length": {"divisor": "d", "length": 9}, "maximum": {"reduce": "ReduceMax"}, "a computed table": {"table": "input"},
    "to the end": {"reduce": "ReduceMax", "to_the_end": True},
}  # fmt: skip


def reduced(name: str, offsets: list[int], context: PassContext, kind: str, *, unrolled: bool = False) -> None:
    """Check the pass on a loop: one operator of this kind, and the results of the loop."""
    graph = looped(**LOOPED[name], unrolled=unrolled)
    depends = "reduce" not in LOOPED[name]  # maxima of few random bags may be equal
    rules = {"concat_of_given_bags" if unrolled else "loop_of_chosen_bags": 1}
    after, _ = check_pass(Bags(), graph, changes=1, rules=rules, context=context, depends_on_input=depends)
    assert (len(after.of_kind(kind)), after.of_kind("Loop", "If")) == (1, [])
    feeds = {**random_feeds(graph, 5), "offsets": np.array(offsets)}
    want = evaluate(graph, feeds)["y"]
    want = np.where(np.isnan(want), 0, want)  # the mean of no rows between bounds that are not equal
    np.testing.assert_allclose(evaluate(after, feeds)["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offsets", offsets_of().values(), ids=offsets_of())
@pytest.mark.parametrize("name", LOOPED)
def test_loops_over_bags_that_may_be_empty(name: str, offsets: list[int]) -> None:
    reduced(name, offsets, GPU, "SegmentSum")


@pytest.mark.parametrize("offsets", offsets_of().values(), ids=offsets_of())
@pytest.mark.parametrize("name", LOOPED)
def test_bags_of_a_loop_that_is_written_out(name: str, offsets: list[int]) -> None:
    reduced(name, offsets, GPU, "SegmentSum", unrolled=True)


@pytest.mark.parametrize("offsets", offsets_of().values(), ids=offsets_of())
@pytest.mark.parametrize("name", ["sum", "mean", "weights", "last", "another length"])
def test_they_are_a_product_on_a_cpu(name: str, offsets: list[int]) -> None:
    reduced(name, offsets, CPU, "MatMul")


@pytest.mark.parametrize(
    ("options", "because", "context"),
    [
        ({"table": "input"}, "finite", CPU),
        ({"reduce": "ReduceMax"}, "maximum", CPU),
        ({"weights": "float[12,6]"}, "rows of a table", GPU),
        ({"ends": "Sub(top, j)"}, "order of their bounds", GPU),
        ({"reduce": "ReduceMax", "to_the_end": True, "last": 2}, "order of their bounds", GPU),
        ({"divisor": "d", "last": 2, "unrolled": True}, "a bag before its last one", GPU),
        ({"reduce": "ReduceMax", "to_the_end": True, "last": 2, "unrolled": True}, "a bag before its last one", GPU),
    ],
)
def test_loops_over_bags_that_stay(options: dict[str, Any], because: str, context: PassContext) -> None:
    check_refused(Bags(), looped(**options), because=because, context=context)


@pytest.mark.parametrize(
    "options",
    [{"empty": 1.0}, {"reduce": "ReduceMin"}, {"divisor": "length"}, {"divisor": "d", "whole": "again"},
     {"reduce": "ReduceSum", "to_the_end": True}],
    ids=["not zeros", "minimum", "another divisor", "another total", "a sum to the end"],
)  # fmt: skip
def test_other_loops_with_choices_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(Bags(), looped(**options), GPU)
