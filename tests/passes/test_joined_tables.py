"""joined_tables: concatenated embeddings of the columns of one tensor become one Gather."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.passes.joined_tables import JoinedTables
from optdnn.passes.rules import joined_bags, tables_of_columns, tables_of_one_index
from optdnn.types import FP32, INT64


def by_one_index(
    widths: tuple[int, ...] = (16, 8, 3, 1), *, rows: tuple[int, ...] | None = None, rank: int = 1, shared: int = 0,
    turns: bool = False, axis: int = 0, constant: bool = False, pointwise: int = 0,
) -> Graph:  # fmt: skip
    """Rows that one index takes from tables of these widths. ``shared``: the number of tables with other readers.
    ``pointwise``: the number of tables whose rows a pointwise operator reads."""
    n = Net(np.float64)
    index = n.const(np.array([1, 4, 2]), np.int64) if constant else n.op("Abs", n.input(*[3] * rank, dtype=INT64))
    found, x = [], n.input(6, 6, name="t")
    for k, width in enumerate(widths):
        table = n.random(*(rows[k] if rows else 6, width)) if axis == 0 else n.random(width, 6)
        taken = n.op("Gather", table, index, attrs=GatherAttrs(axis))
        found.append(n.op("Tanh", taken) if k < pointwise else n.op("ReduceMax", taken, n.ints(-1)))
        if k < shared:
            found.append(n.op("MatMul", x, table))
    if turns:
        caches = [n.op("Gather", n.random(6, 4), index, attrs=GatherAttrs(0)) for _ in range(2)]
        caches = [n.op("Unsqueeze", c, n.ints(0)) for c in caches]
        found = [n.op("RotaryEmbedding", n.input(1, 2, 3, 8, name="q"), *caches)]
    return n.done(*found, n.op("Tanh", x))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("widths", [(16, 8, 3, 1), (3, 16), (8, 8)])
def test_tables_of_one_index(widths: tuple[int, ...], rank: int) -> None:
    graph, _ = check_pass(JoinedTables(), by_one_index(widths, rank=rank), changes=1, rules={"tables_of_one_index": 1})
    (gather,) = graph.of_kind("Gather")
    table = graph.constant_value(gather.inputs[0])
    assert table is not None
    assert table.shape == (6, -(-sum(widths) // 8) * 8)
    (split,) = graph.of_kind("Split")
    assert [o.type.dims[-1] for o in split.outputs][: len(widths)] == sorted(widths, key=lambda w: w % 8 != 0)


def test_one_gather_is_launched_for_them() -> None:
    assert kinds(check_simulated(by_one_index(), "fp16")).count("Gather") == 1


def test_a_small_table_may_be_shared() -> None:
    graph, _ = check_pass(JoinedTables(), by_one_index(shared=1), changes=1)
    assert len(graph.of_kind("Gather")) == 1


def test_rows_that_pointwise_operators_take_are_not_joined() -> None:
    graph, _ = check_pass(JoinedTables(), by_one_index((16, 8, 8), pointwise=1), changes=1)
    assert len(graph.of_kind("Gather")) == 2
    graph = by_one_index((16, 8, 8), pointwise=2)
    check_refused(JoinedTables(), graph, because="pointwise operators take the rows from the tables")


def test_tables_of_one_index_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    check_untouched(JoinedTables(), by_one_index((8,)))
    check_untouched(JoinedTables(), by_one_index((8, 8), rows=(6, 7)))
    check_untouched(JoinedTables(), by_one_index((8, 8), axis=1))
    check_untouched(JoinedTables(), by_one_index((8, 8), constant=True))
    check_refused(JoinedTables(), by_one_index((8,), turns=True), because="angles of rotary")
    monkeypatch.setattr(tables_of_one_index, "SHARED_BYTES", 8)
    check_refused(JoinedTables(), by_one_index((8, 8), shared=1), because="other operators also read the table")
    monkeypatch.setattr(tables_of_one_index, "MOST_BYTES", 8)
    check_refused(JoinedTables(), by_one_index((8, 8)), because="too large to be joined")


def column(n: Net, x: Value, k: int, form: str) -> Value:
    """Column ``k`` of (B, F): (B,), or (B, 1) for a Slice, as recommendation networks of deepctr take it from floats."""
    if form == "slice":
        cut = n.op("Slice", x, n.ints(k), n.ints(k + 1), n.ints(1))
        return n.op("Cast", cut, attrs=CastAttrs(INT64))
    return n.op("Gather", x, n.const(k - 5 if form == "negative" else k, np.int64), attrs=GatherAttrs(1))


def network(
    form: str = "gather", axis: int = 1, count: int = 5, dense: str = "", widths: int = 1, sources: int = 1
) -> Graph:
    """``count`` tables of 4 rows and more. ``dense``: where other features are, "first" or "last"."""
    n = Net(np.float64)
    dtype = FP32 if form == "slice" else INT64
    xs = [n.op("Abs", n.input(3, 5, name=f"x{i}", dtype=dtype)) for i in range(sources)]
    rank = 2 if form == "gather" and dense else 3
    parts = []
    for k in range(count):
        table = n.random(4 + k, 2 if k % widths == 0 else 3)
        rows = n.op("Gather", table, column(n, xs[k % sources], k, form), attrs=GatherAttrs(0))
        parts.append(n.op("Unsqueeze", rows, n.ints(1)) if rank == 3 and form != "slice" else rows)
    if dense:
        other = n.input(*((3, 7) if rank == 2 else (3, 2, 2) if axis == 1 else (3, 1, 7)), name="dense")
        parts.insert(0 if dense == "first" else len(parts), other)
    return n.done(n.op("Relu", n.op("Concat", *parts, attrs=ConcatAttrs(axis))))


@pytest.mark.parametrize("form", ["gather", "negative", "slice"])
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_embeddings_side_by_side_are_one_gather(form: str, axis: int) -> None:
    after, _ = check_pass(JoinedTables(), network(form, axis), changes=1, rules={"joined_bags": 1})
    tables = [op for op in after.of_kind("Gather") if op.attrs.axis == 0]
    assert len(tables) == 1
    assert "Concat" not in after.kinds()


@pytest.mark.parametrize("dense", ["first", "last"])
@pytest.mark.parametrize(("form", "axis"), [("gather", 1), ("slice", 1), ("slice", 2)])
def test_other_features_stay_beside_them(dense: str, form: str, axis: int) -> None:
    after, _ = check_pass(JoinedTables(), network(form, axis, dense=dense), changes=1)
    (joined,) = after.of_kind("Concat")
    assert len(joined.inputs) == 2


def test_negative_indices_count_from_the_end_of_their_own_table() -> None:
    n = Net()
    x = n.input(3, 5, name="x", dtype=np.int64)
    rows = [n.op("Gather", n.random(4 + k, 2), column(n, x, k, "gather"), attrs=GatherAttrs(0)) for k in range(5)]
    graph = n.done(n.op("Concat", *rows, attrs=ConcatAttrs(1)))
    feeds = {"x": np.array([[-1, -4, 0, 3, -2]] * 3)}
    (want,) = evaluate(graph, feeds).values()
    assert JoinedTables()(graph).changes == 1
    np.testing.assert_array_equal(next(iter(evaluate(graph, feeds).values())), want)


def test_tables_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_bags, "MOST_BYTES", 100)
    check_refused(JoinedTables(), network(), because="too large")


@pytest.mark.parametrize("graph", [network(count=3), network(widths=2, axis=2)], ids=["few", "widths"])
def test_others_stay(graph: Graph) -> None:
    check_untouched(JoinedTables(), graph)


def test_columns_of_several_tensors_are_rows_by_indices_of_their_own() -> None:
    check_pass(JoinedTables(), network(sources=2), changes=1, rules={"joined_bags": 1})


def test_rows_below_one_another_stay() -> None:
    check_untouched(JoinedTables(), network(axis=0))


def features(
    widths: tuple[int, ...] = (8, 1),
    *,
    count: int = 5,
    uneven: bool = False,
    missing: bool = False,
    form: str = "slice",
    shared: bool = False,
) -> Graph:
    """Tables of these ``widths`` for each column. The first ones are concatenated and added; the others are multiplied.

    ``shared``: the tables have other readers."""
    n = Net(np.float64)
    x = n.op("Abs", n.input(3, 5, name="x", dtype=FP32 if form == "slice" else INT64))
    found: list[list[Value]] = [[] for _ in widths]
    more: list[Value] = []
    for k in range(count):
        index = column(n, x, k, form)
        for i, width in enumerate(widths):
            if not (missing and i and k == 2):
                table = n.random(4 + k + (uneven and i), width)
                found[i].append(n.op("Gather", table, index, attrs=GatherAttrs(0)))
                more += [n.op("MatMul", n.input(2, 4 + k, name=f"t{k}"), table)] if shared else []
    wide, *rest = found
    total = wide[0]
    for rows in wide[1:]:
        total = n.op("Add", total, rows)
    parts = [n.op("Concat", *wide, attrs=ConcatAttrs(1)), total, *more]
    for narrow in rest:
        product = narrow[0]
        for rows in narrow[1:]:
            product = n.op("Mul", product, rows)
        parts.append(product)
    return n.done(*(n.op("Relu", part) for part in parts))


@pytest.mark.parametrize("widths", [(8,), (8, 1), (16, 8, 3)])
def test_tables_of_the_columns_whatever_reads_the_rows(widths: tuple[int, ...]) -> None:
    rules = {"tables_of_columns": 1, "concat_of_split": 1}
    after, _ = check_pass(JoinedTables(), features(widths), changes=2, rules=rules)
    (gather,) = (op for op in after.of_kind("Gather") if op.attrs.axis == 0)
    table = after.constant_value(gather.inputs[0])
    assert table is not None
    assert table.shape == (4 + 5 + 6 + 7 + 8, 8 if widths == (8,) else -(-sum(widths) // 8) * 8)
    assert "Concat" not in after.kinds()


def test_one_launch_gathers_all_features() -> None:
    assert kinds(check_simulated(features(), "fp16")).count("Gather") == 1


def test_features_that_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    check_untouched(JoinedTables(), features((8,), count=3))
    for graph in (features((8,), form="gather"), features(missing=True), features(uneven=True)):
        assert not {"joined_bags", "tables_of_columns"} & {found.rule for found in JoinedTables()(graph).fired}
    for limit, graph, because in (
        ("SHARED_BYTES", features((8,), shared=True), "other operators also read the table"),
        ("MOST_BYTES", features((8,)), "too large to be joined"),
    ):
        monkeypatch.setattr(tables_of_columns, limit, 8)
        check_refused(JoinedTables(), graph, because=because, rule="tables_of_columns")
