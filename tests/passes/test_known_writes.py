"""known_writes: assignments to slices, which exporters write as scatters with constant positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.ops.gather import ScatterElementsAttrs, ScatterNDAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.canonicalize import Canonicalize

BATCH = symbol("batch")
CANON = Canonicalize()


def table(*lines: Any) -> np.ndarray[Any, Any]:
    """The positions of a box, in order, in ScatterND's form."""
    return np.stack(np.meshgrid(*(np.array(line) for line in lines), indexing="ij"), -1)


def written(shape: tuple[int, ...], places: Any, *, base: Any = None, reduction: str = "none") -> Graph:
    n = Net(np.float64)
    x = n.input(*shape) if base is None else n.const(np.full(shape, base))
    given = (*places.shape[:-1], *shape[places.shape[-1] :])
    return n.done(n.op("ScatterND", x, places, n.input(*given, name="u"), attrs=ScatterNDAttrs(reduction)))


@pytest.mark.parametrize(
    ("places", "kinds"),
    [
        (table([2, 3]), {"Slice": 2, "Concat": 1}),
        (table([0, 1]), {"Slice": 1, "Concat": 1}),
        (table([-1]), {"Slice": 1, "Concat": 1}),
        (table(range(5), [1, 2, 3]), {"Slice": 2, "Concat": 1}),
        (table([1], range(6), [2]), {"Slice": 5, "Concat": 2}),
        (table(range(5), [1, 3, 5]), {"Reshape": 2, "Slice": 1, "Unsqueeze": 1, "Concat": 1}),
        (table([1, 2], [0, 2, 4]), {"Reshape": 2, "Slice": 4, "Unsqueeze": 1, "Concat": 2}),
        (table([1, 2]).reshape(2, 1, 1), {"Reshape": 1, "Slice": 2, "Concat": 1}),
    ],
    ids=["middle", "begin", "last", "second", "two_axes", "interleaved", "interleaved_rows", "reshaped"],
)
def test_a_box_is_joined(places: Any, kinds: dict[str, int]) -> None:
    after, _ = check_pass(CANON, written((5, 6, 4), places), changes=1, rules={"known_writes": 1})
    assert {op.kind: len(list(after.of_kind(op.kind))) for op in after.ops() if op.kind not in STRUCTURAL} == kinds


def test_a_write_of_all_rows_replaces_the_tensor() -> None:
    n = Net(np.float64)
    made = n.op("ScatterND", n.input(5, 4), table(range(5)), n.input(5, 4, name="u"), attrs=ScatterNDAttrs())
    check_pass(CANON, n.done(made), changes=1, kinds={}, drops=["ScatterND_1"])


def test_a_box_of_one_number_is_padding() -> None:
    check_pass(CANON, written((5, 6), table([1, 2], [3, 4]), base=0.5), changes=1, kinds={"Pad": 1})
    check_pass(CANON, written((5, 6), table([1, 2], range(6)), base=0.0, reduction="add"), changes=1, kinds={"Pad": 1})


def test_an_added_part_is_padded() -> None:
    kinds = {"Pad": 1, "Add": 1}
    check_pass(CANON, written((5, 6), table([1, 2], [3, 4]), reduction="add"), changes=1, kinds=kinds)


def test_a_symbolic_batch_stays() -> None:
    n = Net(np.float64)
    x, u = n.input(BATCH, 6, 4), n.input(BATCH, 2, 4, name="u")
    turned = [n.op("Transpose", v, attrs=TransposeAttrs((1, 0, 2))) for v in (x, u)]
    made = n.op("ScatterND", turned[0], table([3, 4]), turned[1], attrs=ScatterNDAttrs())
    graph = n.done(n.op("Transpose", made, attrs=TransposeAttrs((1, 0, 2))))
    kinds = {"Slice": 2, "Concat": 1}  # the Transposes of an export are gone
    check_pass(CANON, graph, changes=2, kinds=kinds, sizes={"batch": 3})


@pytest.mark.parametrize("axis", [0, 1])
def test_elements_of_a_line(axis: int) -> None:
    n = Net(np.float64)
    places = np.broadcast_to(np.array([1, 2]).reshape((2, 1) if axis == 0 else (1, 2)), (2, 4) if axis == 0 else (5, 2))
    u = n.input(*places.shape, name="u")
    made = n.op("ScatterElements", n.input(5, 4), np.ascontiguousarray(places), u, attrs=ScatterElementsAttrs(axis))
    check_pass(CANON, n.done(made), changes=1, kinds={"Slice": 2, "Concat": 1})


def test_fewer_elements_beside_the_axis() -> None:
    n = Net(np.float64)
    u = n.input(2, 3, name="u")
    made = n.op("ScatterElements", n.input(5, 4), np.array([[1] * 3, [2] * 3]), u, attrs=ScatterElementsAttrs(0))
    check_pass(CANON, n.done(made), changes=1, kinds={"Slice": 4, "Concat": 2})


@pytest.mark.parametrize(
    ("places", "reduction", "because"),
    [
        (table([3, 2]), "none", "not a box"),
        (table([2, 2]), "none", "not a box"),
        (np.array([[0, 1], [1, 2]]), "none", "not a box"),
        (table([0, 2, 3]), "none", "not a box"),
        (table([1, 4]), "none", "gaps"),
        (table(range(5), [0, 2, 4]), "add", "gaps"),
    ],
)
def test_other_places_are_left(places: Any, reduction: str, because: str) -> None:
    check_refused(CANON, written((5, 6), places, reduction=reduction), because=because)


def test_places_that_depend_on_data_are_left() -> None:
    n = Net(np.float64)
    places = n.input(2, 1, name="i", dtype=np.int64)
    made = n.op("ScatterND", n.input(5, 4), places, n.input(2, 4, name="u"), attrs=ScatterNDAttrs())
    check_untouched(CANON, n.done(made))


def in_a_row(places: Sequence[Any], *, base: Any = None, reduction: str = "none") -> Graph:
    """Consecutive writes into one tensor (2, 8, 4)."""
    n = Net(np.float64)
    x = n.input(2, 8, 4) if base is None else n.const(np.full((2, 8, 4), base))
    for k, one in enumerate(places):
        part = n.input(*one.shape[:-1], *(2, 8, 4)[one.shape[-1] :], name=f"u{k}")
        x = n.op("ScatterND", x, one, part, attrs=ScatterNDAttrs(reduction))
    return n.done(x)


BOTH = range(2)


@pytest.mark.parametrize(
    ("places", "parts"),
    [
        ([table(BOTH, [k]) for k in range(8)], 8),
        ([table(BOTH, [k]) for k in (5, 2, 7, 0, 1)], 7),
        ([table(BOTH, [k]) for k in (1, 2, 3, 4, 5)], 7),
        ([table(BOTH, [6, 7]), *(table(BOTH, [k]) for k in (0, 1, 2, 3))], 6),
    ],
    ids=["all", "any_order", "middle", "two_at_once"],
)
def test_writes_of_the_parts_of_an_axis_are_joined(places: list[Any], parts: int) -> None:
    after, _ = check_pass(CANON, in_a_row(places), changes=1, rules={"assembled_writes": 1})
    (concat,) = after.of_kind("Concat")
    assert len(concat.inputs) == parts


def test_a_write_before_them_that_is_no_part_stays() -> None:
    graph = in_a_row([table(BOTH, [5, 7]), *(table(BOTH, [k]) for k in range(5))])
    check_pass(CANON, graph, changes=1, rules={"assembled_writes": 1}, kinds={"ScatterND": 1, "Slice": 1, "Concat": 1})


def test_parts_that_are_all_leave_nothing_of_the_tensor() -> None:
    kinds = {"Concat": 1}
    check_pass(CANON, in_a_row([table(BOTH, [k]) for k in range(8)], base=0.0), changes=1, kinds=kinds)


@pytest.mark.parametrize(
    ("places", "reduction", "because"),
    [
        ([table(BOTH, [k]) for k in (0, 1, 2, 3, 1)], "none", "positions are written more than once"),
        ([table(BOTH, [k]) for k in range(5)], "add", "not parts of one axis"),
        ([*(table(BOTH, [k]) for k in range(4)), table(BOTH, [5, 7])], "none", "not parts of one axis"),
        ([*(table(BOTH, [k]) for k in range(4)), table([0], [5])], "none", "not parts of one axis"),
        ([*(table(BOTH, [k]) for k in range(4)), table(BOTH, range(8), [1])], "none", "not parts of one axis"),
    ],
    ids=["twice", "added", "gaps", "two_axes", "another_axis"],
)
def test_other_writes_in_a_row_are_left(places: list[Any], reduction: str, because: str) -> None:
    check_refused(CANON, in_a_row(places, reduction=reduction), because=because, rule="assembled_writes")
    check_refused(CANON, in_a_row(places, reduction=reduction), because="too many writes", rule="known_writes")


SHIFTS = [table(BOTH, [k], range(k, 4)) for k in range(4)]
"""What a stereo network writes: at each place of the second axis, less of the third one."""


@pytest.mark.parametrize(
    ("places", "kinds", "parts"),
    [
        ([*SHIFTS, *(table(BOTH, [k]) for k in range(4, 8))], {"Pad": 3, "Concat": 1}, 8),
        ([*SHIFTS, table(BOTH, [5, 6], [1, 2])], {"Pad": 4, "Concat": 1}, 7),
        (
            [table([half], [k], range(half * k, 4 - k + half * k)) for k in range(4) for half in (1, 0)],
            {"Pad": 6, "Concat": 3},
            2,
        ),
    ],
    ids=["shifts", "gaps", "halves"],
)
@pytest.mark.parametrize("base", [0.0, 0.5])
def test_boxes_of_one_number_are_padded_and_joined(
    places: list[Any], kinds: dict[str, int], parts: int, base: float
) -> None:
    graph = in_a_row(places, base=base)
    after, _ = check_pass(CANON, graph, changes=1, rules={"assembled_writes": 1}, kinds=kinds)
    (joined,) = (
        op
        for op in after.of_kind("Concat")
        if after.sole_user(op.value) is None or after.sole_user(op.value).kind == "Output"
    )  # type: ignore[union-attr]
    assert len(joined.inputs) == parts


@pytest.mark.parametrize(
    ("places", "base", "because"),
    [
        ([*SHIFTS, table(BOTH, [2], [3])], 0.0, "positions are written more than once"),
        ([*SHIFTS, table(BOTH, [2, 3], [0])], 0.0, "positions are written more than once"),
        ([*SHIFTS, table(BOTH, [4], [0])], None, "not parts of one axis"),
    ],
    ids=["twice", "across", "computed"],
)
def test_boxes_that_are_left(places: list[Any], base: float | None, because: str) -> None:
    check_refused(CANON, in_a_row(places, base=base), because=because, rule="assembled_writes")


def test_a_result_that_is_read_in_between_is_joined_by_itself() -> None:
    n = Net(np.float64)
    results = [n.input(10, 4)]
    for k in range(10):
        part = n.input(1, 4, name=f"u{k}")
        results.append(n.op("ScatterND", results[-1], table([k]), part, attrs=ScatterNDAttrs()))
    graph = n.done(n.op("Add", results[10], results[5]))
    after, _ = check_pass(CANON, graph, changes=2, rules={"assembled_writes": 2})
    assert [len(op.inputs) for op in after.of_kind("Concat")] == [6, 6]


def columns(n: Net, sizes: tuple[int, ...], *lines: tuple[int, list[int]], joined: int = -1) -> Any:
    """A table of positions as exporters write it: a Concat of columns, each of which an Expand repeats along the other axes.

    Each line is the axis of the table along which a column varies, and its numbers."""
    parts = []
    for axis, line in lines:
        shape = [len(line) if k == axis else 1 for k in range(axis, len(sizes))]
        column = n.const(np.array(line).reshape(shape), np.int64)
        parts.append(n.op("Unsqueeze", n.op("Expand", column, np.array(sizes)), np.array([-1])))
    return n.op("Concat", *parts, attrs=ConcatAttrs(joined))


def computed(
    sizes: tuple[int, ...], *lines: tuple[int, list[int]], twice: bool = False, shape: tuple[int, ...] = (5, 6, 4)
) -> Graph:
    """A write into x with a computed table; ``twice``: two writes to the same positions."""
    n = Net(np.float64)
    made, places = n.input(*shape), columns(n, sizes, *lines)
    for k in range(1 + twice):
        part = n.input(*sizes, *shape[len(lines) :], name=f"u{k}")
        made = n.op("ScatterND", made, places, part, attrs=ScatterNDAttrs())
    return n.done(made)


@pytest.mark.parametrize(
    ("sizes", "lines", "kinds"),
    [
        ((5, 3), [(0, [0, 1, 2, 3, 4]), (1, [1, 2, 3])], {"Slice": 2, "Concat": 1}),
        ((2, 3), [(0, [1, 2]), (1, [3, 4, -1])], {"Slice": 4, "Concat": 2}),
        ((1, 3), [(0, [2]), (1, [1, 2, 3])], {"Slice": 5, "Concat": 2}),
        ((2, 2, 3), [(0, [1, 2]), (1, [0, 1]), (2, [1, 2, 3])], {"Slice": 6, "Concat": 3}),
    ],
    ids=["all_rows", "two_axes", "one_row", "three_axes"],
)
def test_a_computed_table_of_a_box(sizes: Any, lines: Any, kinds: dict[str, int]) -> None:
    check_pass(CANON, computed(sizes, *lines), changes=1, rules={"known_writes": 1}, kinds=kinds)


def test_a_write_that_a_write_with_the_same_computed_table_hides() -> None:
    graph = computed((2, 3), (0, [1, 2]), (1, [1, 2, 3]), twice=True)
    check_pass(CANON, graph, changes=2, rules={"hidden_write": 1, "known_writes": 1}, kinds={"Slice": 5, "Concat": 2})


@pytest.mark.parametrize(
    ("sizes", "lines"),
    [
        ((3, 2), [(1, [1, 2]), (0, [1, 2, 3])]),
        ((2, 3), [(0, [1, 2]), (0, [1, 2])]),
    ],
    ids=["columns_first", "diagonal"],
)
def test_other_computed_tables_are_left(sizes: Any, lines: Any) -> None:
    check_untouched(CANON, computed(sizes, *lines))


def test_a_computed_table_that_descends_is_refused() -> None:
    check_refused(CANON, computed((2, 3), (0, [1, 2]), (1, [3, 2, 1])), because="not a box of the tensor, in order")


def column_written(*, first: int = 0, step: int = 1, of: int = 0, written: Sequence[int] = (1,)) -> Graph:
    """``x[:, k] = u`` for a number of rows that is not known, as exporters write it: the column of row numbers is a Range.

    ``of``: the input whose rows are counted. ``written``: the columns."""
    n = Net(np.float64)
    x, other = n.input(BATCH, 5), n.input(symbol("other"), 5, name="other")
    counted = n.op("Gather", n.op("Shape", (x, other)[of]), n.const(0, np.int64))
    numbers = n.op("Range", n.const(first, np.int64), counted, n.const(step, np.int64))
    u = n.input(*n.dims(numbers), 1, name="u")
    rows = n.op("Reshape", numbers, np.array([-1, 1, 1]))
    y = x
    for k in written:
        columns = n.op("Expand", n.const([k], np.int64), n.op("Shape", rows))
        table_of_rows = n.op("Concat", rows, columns, attrs=ConcatAttrs(-1))
        y = n.op("ScatterND", y, table_of_rows, n.op("Mul", u, n.const(k + 2.0)), attrs=ScatterNDAttrs())
    return n.done(y, other)


def test_a_column_of_an_unknown_number_of_rows_is_joined() -> None:
    graph = column_written()
    rules, kinds = {"input_target": 1, "known_writes": 1}, {"Concat": 1, "Mul": 1, "Slice": 2}
    check_pass(CANON, graph, changes=2, rules=rules, kinds=kinds, sizes={"batch": 4, "other": 4})


def test_all_columns_of_an_unknown_number_of_rows_become_one_concat() -> None:
    after = column_written(written=(0, 3, 1, 4, 2))
    report = CANON(after)
    assert sum(f.rule == "assembled_writes" for f in report.fired) == 1
    assert after.kinds() == {"Concat": 1, "Mul": 5}
    feeds = {"x": np.zeros((3, 5)), "u": np.arange(3.0)[:, None], "other": np.zeros((1, 5))}
    found = next(iter(evaluate(after, feeds).values()))
    np.testing.assert_array_equal(found, np.arange(3.0)[:, None] * np.arange(2.0, 7.0))


@pytest.mark.parametrize(
    "given", [{"first": 1}, {"step": 2}, {"of": 1}], ids=["from_one", "every_second", "other_rows"]
)
def test_other_rows_of_an_unknown_number_are_left(given: dict[str, int]) -> None:
    after = column_written(**given)
    CANON(after)
    assert "ScatterND" in after.kinds()
