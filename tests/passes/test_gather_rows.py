"""gather_rows: chains of operators that only move rows of one tensor become one Gather of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes import gather_rows
from optdnn.passes.gather_rows import GatherRows

CHANNELS = 8


def part(n: Net, x: Value, axis: int, start: int, end: int, step: int = 1) -> Value:
    return n.op("Slice", x, n.ints(start), n.ints(end), n.ints(axis), n.ints(step))


def rolled(n: Net, x: Value, axis: int, by: int) -> Value:
    """torch.roll: elements that leave at one end enter at the other."""
    size = n.dims(x)[axis]
    assert isinstance(size, int)
    return n.op("Concat", part(n, x, axis, by, size), part(n, x, axis, 0, by), attrs=ConcatAttrs(axis))


def windows(n: Net, x: Value, rows: Sequence[int] = (2, 3, 2, 2)) -> Value:
    """Windows of an image (B, H, W, C) of 2 x 2 positions."""
    split = n.op("Reshape", x, n.ints(0, rows[0], rows[2], rows[1], rows[3], CHANNELS))
    turned = n.op("Transpose", split, attrs=TransposeAttrs((0, 1, 3, 2, 4, 5)))
    return n.op("Reshape", turned, n.ints(-1, rows[2] * rows[3], CHANNELS))


def shifted(batch: int = 2, dtype: type = np.float64, readers: int = 1) -> Graph:
    """Swin's shifted windows, and the product that reads them."""
    n = Net(dtype)
    both = rolled(n, rolled(n, n.op("Relu", n.input(batch, 4, 6, CHANNELS)), 1, 1), 2, 2)
    return n.done(n.matmul(windows(n, both), 5), *(n.op("Gelu", both) for _ in range(readers - 1)))


@pytest.mark.parametrize("batch", [1, 2])
def test_rolls_and_windows_are_one_gather_of_rows_of_a_batch(batch: int) -> None:
    graph, _ = check_pass(
        GatherRows(), shifted(batch), changes=1, rules={"gather_rows": 1},
        kinds={"Relu": 1, "Reshape": 2, "Gather": 1, "MatMul": 1},
    )  # fmt: skip
    (op,) = graph.of_kind("Gather")
    assert graph.type(op.inputs[0]).shape == (batch, 24, CHANNELS)  # type: ignore[arg-type]
    table = graph.constant_value(op.inputs[1])  # type: ignore[arg-type]
    assert table is not None
    assert sorted(table) == list(range(24))
    assert table[0] == 1 * 6 + 2


def test_windows_rolled_back_beside_others() -> None:
    """DAT: half of the heads have windows of another shape. Each half is one Gather."""
    n = Net(np.float64)
    halves = []
    for by in (1, 2):
        rows = n.op(
            "Reshape", n.matmul(n.input(12, 4, CHANNELS, name=f"x{by}"), CHANNELS), n.ints(2, 2, 3, 2, 2, CHANNELS)
        )
        turned = n.op("Transpose", rows, attrs=TransposeAttrs((0, 1, 3, 2, 4, 5)))
        halves.append(rolled(n, n.op("Reshape", turned, n.ints(2, 4, 6, CHANNELS)), 1, by))
    joined = n.op("Reshape", n.op("Concat", *halves, attrs=ConcatAttrs(3)), n.ints(2, 24, 2 * CHANNELS))
    graph = n.done(n.op("Relu", joined))
    kinds = {"MatMul": 2, "Reshape": 5, "Gather": 2, "Concat": 1, "Relu": 1}
    check_pass(GatherRows(), graph, changes=2, kinds=kinds)


def test_windows_rolled_back() -> None:
    n = Net(np.float64)
    rows = n.op("Reshape", n.matmul(n.input(12, 4, CHANNELS), CHANNELS), n.ints(2, 2, 3, 2, 2, CHANNELS))
    image = n.op(
        "Reshape", n.op("Transpose", rows, attrs=TransposeAttrs((0, 1, 3, 2, 4, 5))), n.ints(2, 4, 6, CHANNELS)
    )
    graph = n.done(n.op("Relu", rolled(n, rolled(n, image, 1, 3), 2, 4)))
    check_pass(GatherRows(), graph, changes=1, kinds={"MatMul": 1, "Reshape": 2, "Gather": 1, "Relu": 1})


def test_halves_of_rows_are_rows_too() -> None:
    """A roll along the channels by half of them."""
    n = Net(np.float64)
    y = rolled(n, n.input(2, 3, 4), 2, 2)
    check_pass(
        GatherRows(),
        n.done(n.op("Relu", n.op("Reshape", y, n.ints(2, 12)))),
        changes=1,
        kinds={"Gather": 1, "Reshape": 2, "Relu": 1},
    )


def test_moves_that_undo_one_another_leave_views() -> None:
    n = Net(np.float64)
    y = rolled(n, rolled(n, n.input(2, 6, CHANNELS), 1, 2), 1, 4)
    check_pass(
        GatherRows(),
        n.done(n.op("Relu", n.op("Reshape", y, n.ints(12, CHANNELS)))),
        changes=1,
        kinds={"Reshape": 2, "Relu": 1},
    )


def test_values_with_another_reader_are_computed_once() -> None:
    """The windows' reader gathers from the rolled image, which stays."""
    check_untouched(GatherRows(), shifted(readers=2))


def test_refused() -> None:
    n = Net()
    y = n.op("Transpose", rolled(n, n.input(4, 6, CHANNELS), 1, 2), attrs=TransposeAttrs((0, 2, 1)))
    check_refused(GatherRows(), n.done(n.op("Relu", y)), because="rows of 1 elements are too short")
    n = Net()
    x = n.input(symbol("N"), 6, CHANNELS)
    y = n.op("Reshape", rolled(n, x, 1, 2), n.ints(-1, CHANNELS))
    check_refused(GatherRows(), n.done(n.op("Relu", y)), because="sizes are not known")


@pytest.mark.parametrize(("most", "because"), [(20, "a table of 24 rows is too long"), (2, "too many rows")])
def test_long_tables_are_refused(most: int, because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_rows, "MOST_ROWS", most)
    check_refused(GatherRows(), shifted(), because=because)


def test_chains_of_many_operators_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_rows, "MOST_OPERATORS", 4)
    check_untouched(GatherRows(), shifted())


def test_bounds_that_are_not_known_are_refused() -> None:
    """The end is a size of at least 6, so that the shape of the Slice is known and its bounds are not."""
    n = Net()
    x, end = n.input(4, 6, CHANNELS), n.op("Shape", n.input(symbol("N", 6), name="other"))
    y = n.op("Concat", *[n.op("Slice", x, n.ints(0), end, n.ints(1), n.ints(1))] * 2, attrs=ConcatAttrs(1))
    assert n.dims(y) == (4, 12, CHANNELS)
    check_refused(
        GatherRows(), n.done(n.op("Relu", n.op("Reshape", y, n.ints(48, CHANNELS)))), because="bounds of a Slice"
    )


@pytest.mark.parametrize(("image", "refused"), [("conv", True), ("turned", True), ("last", False)])
def test_parts_of_images_are_refused(image: str, refused: bool) -> None:
    """Groups of a convolution's channels are moved in channels-last order; rows of channels are gathered."""
    n = Net()
    if image == "conv":
        x = n.conv(n.input(2, 3, 5, 8), 12)
    else:
        perm = (0, 3, 1, 2) if image == "turned" else (0, 2, 3, 1)
        x = n.op("Transpose", n.op("Abs", n.input(2, 8, 8, 8)), attrs=TransposeAttrs(perm))
    x = n.op("Relu", x)
    _, channels, height, width = n.dims(x)
    y = rolled(n, n.op("Reshape", x, n.ints(2, 4, int(str(channels)) // 4, int(str(height)), int(str(width)))), 1, 2)
    graph = n.done(n.op("Abs", n.op("Reshape", y, n.ints(*(int(str(d)) for d in n.dims(x))))))
    if refused:
        check_refused(GatherRows(), graph, because="parts of a channels-last image")
    else:
        check_pass(GatherRows(), graph, changes=1)


def test_rows_in_the_opposite_order() -> None:
    """Negative axes, starts and steps."""
    n = Net(np.float64)
    x = n.input(2, 6, CHANNELS)
    y = n.op("Concat", part(n, x, -2, -1, -7, -1), part(n, x, -1, -CHANNELS, 99), attrs=ConcatAttrs(1))
    graph, _ = check_pass(
        GatherRows(),
        n.done(n.op("Relu", n.op("Reshape", y, n.ints(24, CHANNELS)))),
        changes=1,
        kinds={"Gather": 1, "Reshape": 2, "Relu": 1},
    )
    table = graph.constant_value(graph.of_kind("Gather")[0].inputs[1])  # type: ignore[arg-type]
    assert table is not None
    assert table.tolist() == [5, 4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5]


def others() -> dict[str, Graph]:
    found = {}
    n = Net(np.float64)
    twice = n.op("Concat", *[n.input(1, 1)] * 2, attrs=ConcatAttrs(0))
    found["a scalar"] = n.done(n.op("Relu", n.op("Reshape", part(n, twice, 0, 1, 2), n.const([], np.int64))))
    n = Net(np.float64)
    turned = n.op("Transpose", rolled(n, n.input(0, 6, CHANNELS), 1, 2), attrs=TransposeAttrs((1, 0, 2)))
    found["no elements"] = n.done(n.op("Relu", turned))
    n = Net(np.float64)
    both = rolled(n, n.input(2, 6, CHANNELS), 1, 2)
    found["an output of the network"] = n.done(both, n.op("Relu", n.op("Reshape", both, n.ints(12, CHANNELS))))
    n = Net(np.float64)
    found["a roll alone"] = n.done(n.op("Relu", rolled(n, n.input(2, 6, CHANNELS), 1, 2)))
    n = Net(np.float64)
    found["views alone"] = n.done(n.op("Relu", windows(n, n.input(2, 4, 6, CHANNELS))))
    n = Net(np.float64)
    joined = n.op("Concat", n.input(2, 4, CHANNELS), n.input(2, 4, CHANNELS, name="y"), attrs=ConcatAttrs(1))
    found["two tensors"] = n.done(n.op("Relu", n.op("Reshape", joined, n.ints(16, CHANNELS))))
    n = Net(np.float64)
    cut = part(n, n.input(2, 4, CHANNELS), 1, 1, 3)
    found["no Concat"] = n.done(n.op("Relu", n.op("Reshape", cut, n.ints(4, CHANNELS))))
    return found


@pytest.mark.parametrize("name", others())
def test_others_are_no_candidates(name: str) -> None:
    check_untouched(GatherRows(), others()[name])


def embedded(
    shape: tuple[int, ...] = (2, 3), back: tuple[int, ...] = (2, 3, 4), axis: int = 0, second: bool = False
) -> Graph:
    """``table(i.view(-1)).view(2, 3, -1)``. ``second``: rows of another table, by the flattened indices, are an output, too."""
    n = Net(np.float64)
    i = n.op("Abs", n.input(*shape, name="i", dtype=np.int64))
    flat = n.op("Reshape", i, n.ints(-1))
    table = n.const(np.arange(40.0).reshape(10, 4))
    other = [n.op("Gather", n.random(10, 5), flat, attrs=GatherAttrs(0))] if second else []
    return n.done(n.op("Reshape", n.op("Gather", table, flat, attrs=GatherAttrs(axis)), n.ints(*back)), *other)


def test_indices_that_are_flattened_for_a_gather() -> None:
    check_pass(GatherRows(), embedded(), changes=1, kinds={"Abs": 1, "Gather": 1}, rules={"flat_indices": 1})


def test_indices_that_are_flattened_for_two_gathers_stay_flat() -> None:
    check_refused(GatherRows(), embedded(second=True), because="by the flattened indices, and they become one")


@pytest.mark.parametrize(
    "graph", [embedded(back=(3, 2, 4)), embedded(back=(2, 12)), embedded((1, 3), (10, 1, 3), 1)], ids=["others", "rows", "columns"]
)  # fmt: skip
def test_rows_of_another_shape_stay(graph: Graph) -> None:
    check_untouched(GatherRows(), graph)


@pytest.mark.parametrize("batch", [3, symbol("N", 1)])
def test_one_index_per_row_gathers_rows(batch: Any) -> None:
    """``bias[experts]``, as torch.export writes it."""
    n = Net(np.float64)
    index = n.op("Abs", n.input(batch, 2, 1, name="i", dtype=np.int64))
    graph = n.done(n.op("GatherND", n.const(np.arange(40.0).reshape(10, 4)), index, attrs=GatherNDAttrs(0)))
    sizes = {"N": 3} if batch != 3 else None
    kinds = {"Abs": 1, "Gather": 1, "Squeeze": 1}
    check_pass(GatherRows(), graph, changes=1, kinds=kinds, rules={"row_indices": 1}, sizes=sizes)


def test_indices_whose_number_depends_on_data_stay() -> None:
    n = Net(np.float64)
    places = n.op("NonZero", n.input(10, name="i", dtype=np.int64))
    index = n.op("Transpose", places, attrs=TransposeAttrs((1, 0)))
    graph = n.done(n.op("GatherND", n.random(10, 4), index, attrs=GatherNDAttrs(0)))
    check_refused(GatherRows(), graph, because="the number of its rows depends on data", rule="row_indices")


@pytest.mark.parametrize(("shape", "batch"), [((3, 2), 0), ((10, 1), 1)])
def test_other_tuples_of_indices_stay(shape: tuple[int, ...], batch: int) -> None:
    n = Net(np.float64)
    index = n.op("Abs", n.input(*shape, name="i", dtype=np.int64))
    check_untouched(GatherRows(), n.done(n.op("GatherND", n.random(10, 4), index, attrs=GatherNDAttrs(batch))))


def added_rows(
    inner: int = 8, *, bias: bool = True, views: bool = True, index: Sequence[int] = (2, 0, 3, 1), case: str = ""
) -> Graph:
    """Rows of a product, gathered, and added to others: the end of a shifted window's attention."""
    n = Net(np.float64)
    product = n.matmul(n.input(2, 2, 2, inner), 8)
    y = n.op("Add", product, n.random(8)) if bias else product
    flat = n.op("Reshape", y, n.ints(2, 4, 8))
    at = n.input(4, name="at", dtype=np.int64) if case == "computed rows" else n.ints(*index)
    rows = n.op("Gather", flat, at, attrs=GatherAttrs(0 if case == "images" else 1))
    rows = n.op("Reshape", rows, n.ints(2, -1, 2, 8)) if views else rows
    other = n.input(*n.dims(rows), name="other")
    end = n.op("Relu" if case == "an activation" else "Add", rows, *([] if case == "an activation" else [other]))
    return n.done(end, *([n.op("Relu", product)] if case == "another reader" else []))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("index", [(2, 0, 3, 1), (1, 3)])
def test_added_rows_are_gathered_before_their_product(index: Sequence[int], views: bool, bias: bool) -> None:
    before = added_rows(bias=bias, views=views, index=index)
    graph, _ = check_pass(GatherRows(), before, changes=1, rules={"gathered_addition": 1})
    (product,), (gather,) = graph.of_kind("MatMul"), graph.of_kind("Gather")
    assert graph.constant_value(product.inputs[1]) is not None
    assert graph.op(gather.inputs[0]).kind == "Reshape"  # type: ignore[arg-type]
    assert {u.kind for u in graph.users(product.value)} == {"Add"}


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (added_rows(16), "reads more elements than Gather"),
        (added_rows(index=(0, 1, 2, 3, 2, 1)), "reads more elements than Gather"),
        (added_rows(case="another reader", bias=False), "has other readers"),
    ],
    ids=["longer rows", "repeated rows", "another reader"],
)
def test_gathered_products_that_stay(graph: Graph, because: str) -> None:
    check_refused(GatherRows(), graph, because=because)


@pytest.mark.parametrize("case", ["computed rows", "an activation", "images"])
def test_other_gathers_of_products_stay(case: str) -> None:
    check_untouched(GatherRows(), added_rows(case=case, index=(0, 1) if case == "images" else (2, 0, 3, 1)))
