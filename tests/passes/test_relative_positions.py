"""relative_positions: biases of disentangled attention without gathers and copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.passes.relative_positions import RelativePositions

PASS = RelativePositions()
BATCH, HEADS, LENGTH, SIZE, POSITIONS = 2, 3, 8, 16, 32


def heads(n: Net, name: str) -> Value:
    """(B, H, M, K) of an input (B, M, H * K)."""
    rows = n.op("Reshape", n.input(BATCH, LENGTH, HEADS * SIZE, name=name), n.ints(BATCH, LENGTH, HEADS, SIZE))
    return n.transposed(rows, 0, 2, 1, 3)


def merged(n: Net, x: Value) -> Value:
    """(B, H, …) as (B * H, …)."""
    return n.op("Reshape", x, n.ints(BATCH * HEADS, *map(int, n.dims(x)[2:])))  # type: ignore[no-any-return, arg-type]


def positions(n: Net) -> Value:
    """(B * H, K, P): embeddings of positions, repeated for each of the batch."""
    return n.transposed(n.op("Tile", n.random(HEADS, POSITIONS, SIZE), n.ints(BATCH, 1, 1)), 0, 2, 1)


def indices(n: Net, step: int = 1, first: int = 9, rows: int = LENGTH) -> Value:
    """Column ``first + step * (j - i)`` for row i and column j, of each matrix."""
    i, j = np.indices((rows, LENGTH))
    return n.op("Expand", n.const((first + step * (j - i))[None], np.int64), n.ints(BATCH * HEADS, rows, LENGTH))  # type: ignore[no-any-return]


def bias(*, steps: tuple[int, int] = (1, -1), readers: int = 1) -> Graph:
    """Both terms of a bias as DeBERTa's exports have them: (B, H, L, L)."""
    n = Net()
    terms = []
    for name, step in zip("qk", steps, strict=True):
        product = n.op("MatMul", merged(n, heads(n, name)), positions(n))
        terms.append(n.op("GatherElements", product, indices(n, step), attrs=GatherAttrs(2)))
    total = n.op("Add", n.op("Mul", terms[0], 0.5), n.op("Mul", n.transposed(terms[1], 0, 2, 1), 0.5))
    results = [n.op("Reshape", total, n.ints(BATCH, HEADS, LENGTH, LENGTH))]
    return n.done(*results, *(n.op("Relu", terms[0]) for _ in range(readers - 1)))


@pytest.mark.parametrize("steps", [(1, -1), (-1, 1), (1, 1)])
def test_a_bias_is_two_products_and_views(steps: tuple[int, int]) -> None:
    rules = {"split_leading": 1, "shifted_columns": 2, "scaled_view": 2}
    graph, _ = check_pass(PASS, bias(steps=steps), changes=5, rules=rules)
    assert not {"GatherElements", "Tile", "Expand"} & set(graph.kinds())
    shapes = [[graph.type(v).shape for v in op.inputs if v is not None] for op in graph.of_kind("MatMul")]
    assert shapes == [[(BATCH, HEADS, LENGTH, SIZE), (1, HEADS, SIZE, 2 * LENGTH)]] * 2


def test_the_views_are_no_launches() -> None:
    program = check_simulated(bias())
    assert sorted(set(kinds(program))) == ["Copies", "MatMul", "Pointwise"]  # two inputs are converted in one launch


def gathered(
    *, step: int = 1, first: int = 9, rows: int = LENGTH, constant: bool = True, axis: int = 2, log: bool = False
) -> Graph:
    """Columns of a product."""
    n = Net()
    left, right = (
        n.input(BATCH, rows, SIZE),
        n.random(1, SIZE, POSITIONS) if constant else n.input(BATCH, SIZE, POSITIONS, name="w"),
    )
    i, j = np.indices((rows, LENGTH if axis == 2 else POSITIONS))
    columns = first + step * (np.sign(j - i) * np.abs(j - i) // 2 if log else j - i)
    spread = n.op(
        "Expand",
        n.const(np.abs(columns)[None] % rows if axis == 1 else columns[None], np.int64),
        n.ints(BATCH, *i.shape),
    )
    y = n.op("GatherElements", n.op("MatMul", left, right), spread, attrs=GatherAttrs(axis))
    return n.done(y)


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, 16),  # 15 columns are needed for 8 rows and 8 columns; one more makes rows of 16
        ({"rows": 5}, 16),
        ({"first": 24, "rows": 8}, 16),  # there is no column after the last one, so a column of zeros is added
        ({"step": -1, "first": 9}, 16),
        ({"step": -1, "first": 7}, 16),
    ],
)
def test_only_columns_that_are_taken_are_computed(options: dict[str, Any], columns: int) -> None:
    graph, _ = check_pass(PASS, gathered(**options), changes=1, rules={"shifted_columns": 1})
    (product,) = graph.of_kind("MatMul")
    assert graph.type(product.value).shape == (BATCH, options.get("rows", LENGTH), columns)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"constant": False}, "the other factor of MatMul_.* is not constant"),
        ({"log": True}, "do not move by one"),
        ({"step": 2, "first": 16}, "do not move by one"),
        ({"rows": 1}, "do not move by one"),
    ],
)
def test_other_gathers_stay(options: dict[str, Any], because: str) -> None:
    check_refused(PASS, gathered(**options), because=because, rule="shifted_columns")


def test_gathers_of_rows_stay() -> None:
    check_untouched(PASS, gathered(axis=1))


def test_a_term_with_another_reader_is_not_split() -> None:
    report = PASS(bias(readers=2))
    (reason,) = [r.reason for r in report.refused if r.rule == "split_leading"]
    assert "GatherElements" in reason
    assert "has another reader" in reason


def test_the_rows_of_a_matrix_are_no_batch() -> None:
    """A product of (B * T, K) with a matrix of K = B * T rows."""
    n = Net()
    y = n.op("Relu", n.op("MatMul", n.input(6, 6), n.random(6, 4)))
    graph = n.done(n.op("Reshape", y, n.ints(2, 3, 4)))
    check_refused(PASS, graph, because="one matrix, whose first axis is not a batch", rule="split_leading")


def padded(
    *,
    length: int = LENGTH,
    keys: int = LENGTH,
    cut: int = LENGTH - 1,
    taken: int | None = None,
    batch: int | None = BATCH,
    constant: bool = True,
    plain: bool = True,
) -> Graph:
    """Logits by position as BoTNet and HaloNet shift them: (B * 2, L, K) from (B, 2, L, L + K - 1)."""
    n, width = Net(), length + keys - 1
    x = n.input(symbol("N", 1) if batch is None else batch, 2, length, SIZE)
    y = n.op("MatMul", x, n.random(SIZE, width) if constant else n.input(SIZE, width, name="w"))
    y = n.op("Reshape", y if plain else n.op("Relu", y), n.ints(-1, length, width))
    y = n.op("Pad", y, n.ints(0, 0, 0, 0, 0, 1))
    y = n.op("Reshape", y, n.ints(-1, length * (width + 1)))
    y = n.op("Pad", y, n.ints(0, 0, 0, width - length))
    y = n.op("Reshape", y, n.ints(-1, length + 1, width))
    y = n.op("Slice", y, n.ints(0, cut), n.ints(taken or length, cut + keys), n.ints(1, 2))
    return n.done(n.op("Reshape", y, n.ints(-1, 2, 1, taken or length, keys)))


def flattened(first: int) -> Graph:
    """Rows of 15 from all rows of 16 together, from their column ``first`` on, without a column of padding."""
    n = Net()
    y = n.op("Reshape", n.op("MatMul", n.input(BATCH, 8, SIZE), n.random(SIZE, 16)), n.ints(BATCH, 128))
    y = n.op("Reshape", n.op("Pad", y, n.ints(0, 0, 0, 7)), n.ints(BATCH, 9, 15))
    return n.done(n.op("Slice", y, n.ints(0, first), n.ints(8, first + 8), n.ints(1, 2)))


@pytest.mark.parametrize(("length", "keys", "columns"), [(8, 8, 16), (8, 12, 24), (8, 5, 16)])
def test_padding_that_shifts_rows_is_a_view(length: int, keys: int, columns: int) -> None:
    graph, _ = check_pass(PASS, padded(length=length, keys=keys), changes=1, rules={"padded_shift": 1})
    assert "Pad" not in graph.kinds()
    (product,) = graph.of_kind("MatMul")
    assert graph.type(product.value).shape == (BATCH, 2, length, columns)


def test_the_shifted_view_is_no_launch() -> None:
    first, last = "Pointwise", "Pointwise"  # casts of the network's inputs and outputs
    assert kinds(check_simulated(padded())) == [first, "Conv", last]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"constant": False}, "the other factor of MatMul_.* is not constant"),
        ({"cut": 6}, "are padding"),  # the first row would read a column of padding
        ({"taken": LENGTH - 1}, "are not those of the product"),
        ({"batch": None}, "has no known shape"),
    ],
)
def test_other_padding_stays(options: dict[str, Any], because: str) -> None:
    check_refused(PASS, padded(**options), because=because, rule="padded_shift")


def test_columns_of_one_row_are_a_view_and_those_of_two_are_not() -> None:
    check_pass(PASS, flattened(7), changes=1, rules={"padded_shift": 1})
    check_refused(PASS, flattened(0), because="come from neighboring rows", rule="padded_shift")


def test_rows_with_an_operator_in_between_stay() -> None:
    check_untouched(PASS, padded(plain=False))


def test_a_padded_product_of_a_vector_stays() -> None:
    check_untouched(
        PASS,
        """<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[1] y)
        <float[2,3] w = {1, 2, 3, 4, 5, 6}, int64[2] pads = {0, 1}, int64[1] one = {1}, int64[1] zero = {0},
         int64[1] last = {-1}>
        { product = MatMul(x, w) padded = Pad<mode = "reflect">(product, pads) y = Slice(padded, one, last, zero) }""",
    )
