"""hoist_views: views after products of rows with a matrix move in front of them, and merge there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net, built

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.passes.hoist_views import HoistViews
from optdnn.passes.support.views import View, groups


def vision_transformer(batch: int = 2) -> Graph:
    """(B, H, L, D) -> (L, B, H D) -> product -> (B, L, C), as torchvision's MultiheadAttention has it."""
    n = Net(np.float64)
    x = n.op("Reshape", n.transposed(n.input(batch, 3, 5, 4), 2, 0, 1, 3), n.ints(5, batch, 12))
    y = n.op("Add", n.matmul(x, 7), n.random(7))
    return n.done(n.transposed(y, 1, 0, 2))


def test_a_transposition_merges_with_that_of_the_heads() -> None:
    graph, _ = check_pass(
        HoistViews(), vision_transformer(), changes=1, kinds={"Transpose": 1, "Reshape": 1, "MatMul": 1, "Add": 1}
    )
    (op,) = graph.of_kind("Transpose")
    assert op.attrs.perm == (0, 2, 1, 3)
    assert graph.op(graph.of_kind("MatMul")[0].inputs[0]).kind == "Reshape"  # type: ignore[arg-type]


def joint(*, turn: bool = True, axis: int = 0, merged: tuple[int, ...] = (3, 8, 5, 6), readers: int = 1) -> Graph:
    """Queries, keys and values of one projection, batch and heads merged, as SAM has them."""
    n = Net()
    x = n.op("Reshape", n.input(2, 5, 72), n.ints(2, 5, 3, 4, 6)) if turn else n.input(3, 2, 4, 5, 6)
    x = n.transposed(x, 2, 0, 3, 1, 4) if turn else x
    flat = n.op("Reshape", x, n.ints(*merged))
    count = n.dims(flat)[axis]
    assert isinstance(count, int)
    parts = n.op("Split", flat, attrs=SplitAttrs(axis=axis, num_outputs=count), outputs=count)
    return n.done(
        *(n.op("Reshape", part, n.ints(-1)) for part in parts), *(n.op("Relu", flat) for _ in range(readers - 1))
    )


def test_a_split_moves_in_front_of_a_reshape_that_would_copy_all() -> None:
    graph, _ = check_pass(HoistViews(), joint(), changes=1, rules={"split_before_reshape": 1})
    (split,) = graph.of_kind("Split")
    assert graph.op(split.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]
    assert split.outputs[0].type.shape == (1, 2, 4, 5, 6)


@pytest.mark.parametrize("options", [{"turn": False}, {"readers": 2}])
def test_other_splits_stay(options: dict[str, Any]) -> None:
    check_untouched(HoistViews(), joint(**options))


@pytest.mark.parametrize("options", [{"axis": 1}, {"merged": (6, 4, 5, 6)}])
def test_a_split_of_a_merged_axis_stays(options: dict[str, Any]) -> None:
    check_refused(HoistViews(), joint(**options), because="changes the axis that is split", rule="split_before_reshape")


def test_a_split_of_unknown_sizes_stays() -> None:
    n = Net()
    x = n.transposed(n.input(symbol("N"), 5, 3, 4, 6), 2, 0, 3, 1, 4)
    parts = n.op("Split", n.op("Reshape", x, n.ints(3, -1, 5, 6)), attrs=SplitAttrs(axis=0, num_outputs=3), outputs=3)
    check_refused(HoistViews(), n.done(*parts), because="sizes are not known")


def flattened(bias: bool = True, trans_b: bool = False) -> Graph:
    """GPT-2's Conv1D: rows flattened for a Gemm."""
    n = Net(np.float64)
    x = n.op("Reshape", n.op("Relu", n.input(2, 3, 8)), n.ints(6, 8))
    return n.done(n.op("Reshape", n.gemm(x, 5, bias=bias, trans_b=trans_b), n.ints(2, 3, 5)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trans_b", [True, False])
def test_a_gemm_of_flattened_rows_is_a_product_of_rows(bias: bool, trans_b: bool) -> None:
    kinds = {"Relu": 1, "MatMul": 1} | ({"Add": 1} if bias else {})
    check_pass(HoistViews(), flattened(bias, trans_b), changes=1, kinds=kinds)


def test_symbolic_rows() -> None:
    n = Net(np.float64)
    x = n.op("Reshape", n.op("Relu", n.input(symbol("N", 1), 3, 8)), n.ints(-1, 8))
    graph = n.done(n.op("Reshape", n.gemm(x, 5), n.ints(-1, 3, 5)))
    check_pass(HoistViews(), graph, changes=1, kinds={"Relu": 1, "MatMul": 1, "Add": 1}, sizes={"N": 4})


def test_views_that_do_not_merge_stay() -> None:
    n = Net(np.float64)
    x = n.op("Reshape", n.input(4, 3, 8), n.ints(6, 2, 8))
    check_refused(HoistViews(), n.done(n.transposed(n.matmul(x, 5), 1, 0, 2)), because="does not merge")


def untouched() -> dict[str, Graph]:
    found = {}
    n = Net(np.float64)
    found["no view before"] = n.done(n.transposed(n.matmul(n.op("Relu", n.input(4, 3, 8)), 5), 1, 0, 2))
    n = Net(np.float64)
    x = n.matmul(n.transposed(n.input(4, 3, 8), 1, 0, 2), 6)
    found["heads"] = n.done(n.op("Reshape", x, n.ints(3, 4, 2, 3)))
    n = Net(np.float64)
    y = n.matmul(n.transposed(n.input(4, 3, 8), 1, 0, 2), 6)
    found["read twice"] = n.done(n.transposed(y, 1, 0, 2), n.op("Relu", y))
    n = Net(np.float64)
    y = n.op("Add", n.matmul(n.transposed(n.input(4, 3, 8), 1, 0, 2), 6), n.random(3, 4, 6))
    found["added rows"] = n.done(n.transposed(y, 1, 0, 2))
    return found


@pytest.mark.parametrize("name", untouched())
def test_others_are_no_candidates(name: str) -> None:
    check_untouched(HoistViews(), untouched()[name])


@pytest.mark.parametrize(
    ("fine", "coarse", "lined"),
    [
        ((2, 64, 3), (128, 3), [((0, 1), (0,)), ((2,), (1,))]),
        ((24,), (2, 12), [((0,), (0, 1))]),
        ((2, 3), (3, 2), [((0, 1), (0, 1))]),
        ((2, 3, 1), (2, 3), [((0,), (0,)), ((1,), (1,)), ((2,), ())]),
        ((2, 3), (2, 4), None),
    ],
)
def test_groups_of_axes(fine: tuple[int, ...], coarse: tuple[int, ...], lined: object) -> None:
    assert groups(fine, coarse) == lined


@pytest.mark.parametrize(
    ("moves", "count"),
    [
        ([(5, 24, 4), (1, 0, 2), (2, 12, 5, 4)], 2),  # PyTorch's heads: batch and heads merged, turned, split again
        ([(5, 24, 4), (1, 0, 2), (2, 12, 5, 2, 2)], 2),
        ([(5, 24, 4), (1, 0, 2), (24, 20)], 3),  # merges
        ([(1, 0, 2), (2, 5, 3, 16)], 2),  # nothing to merge with in front of the Transpose
    ],
)
def test_a_reshape_that_splits_axes_passes_a_transpose(moves: list[tuple[int, ...]], count: int) -> None:
    n = Net(np.float64)
    value, data = n.input(5, 2, 48), np.arange(480).reshape(5, 2, 48)
    want, view = data, View(value, data.shape)
    for move in moves:
        turn = sorted(move) == list(range(len(move)))
        want = want.transpose(move) if turn else want.reshape(move)
        view = view.transpose(move) if turn else view.reshape(move)
    got = data
    for step in view.moves:
        got = got.reshape(step.shape) if step.perm is None else got.transpose(step.perm)
    assert len(view.moves) == count
    np.testing.assert_array_equal(got, want)


def heads(*bias: int, batch: int = 2, shared: bool = False) -> Graph:
    """Keras's projection to heads: the bias is added after the reshape."""
    n = Net(np.float64)
    y = n.op("Reshape", n.matmul(n.input(batch, 5, 8), 12), n.ints(batch, 5, 3, 4))
    return n.done(n.op("Add", n.random(*bias), y), *([y] if shared else []))


@pytest.mark.parametrize("bias", [(3, 4), (1, 1, 3, 4)])
def test_a_bias_with_an_axis_of_heads_is_added_to_the_product(bias: tuple[int, ...]) -> None:
    graph, _ = check_pass(HoistViews(), heads(*bias), changes=1, kinds={"MatMul": 1, "Add": 1, "Reshape": 1})
    (op,) = graph.of_kind("Reshape")
    assert graph.op(op.inputs[0]).kind == "Add"  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [heads(4), heads(3, 1), heads(5, 3, 4), heads(3, 4, shared=True)])
def test_other_additions_stay_after_the_reshape(graph: Graph) -> None:
    check_untouched(HoistViews(), graph)


def residual(image: str = "conv", *, second: bool = False, readers: int = 1, bias: bool = False) -> Graph:
    """ConvNeXt's end of a block: a product of rows, turned into an image, plus the image that the block began with."""
    n = Net(np.float64)
    x = n.input(2, 6, 4, 5)
    if image in ("conv", "sum", "other rows"):
        x = n.conv(x, 6)
    if image in ("sum", "other rows"):
        x = n.op("Add", x, n.input(2, 6, 4, 5))
    elif image == "turned":
        x = n.transposed(n.op("Relu", n.transposed(x, 0, 2, 3, 1)), 0, 3, 1, 2)
    if image == "read once":  # a Fourier layer beside a convolution (FNO)
        x = n.conv(x, 6)
    read = n.input(2, 6, 4, 5) if image in ("other rows", "read once") else x
    rows = n.op("Mul", n.matmul(n.transposed(read, 0, 2, 3, 1), 6), n.random(6))
    y = n.transposed(rows, 0, 3, 1, 2)
    other = n.random(6, 1, 1) if bias else x
    total = n.op("Add", *((other, y) if second else (y, other)))
    return n.done(total, *(n.op("Relu", y) for _ in range(readers - 1)))


@pytest.mark.parametrize("second", [False, True])
def test_a_residual_is_added_before_the_turn_to_an_image(second: bool) -> None:
    graph, _ = check_pass(HoistViews(), residual(second=second), changes=1, rules={"add_before_transpose": 1})
    (op,) = graph.of_kind("Add")
    assert {graph.op(v).kind for v in op.inputs} == {"Mul", "Transpose"}  # type: ignore[arg-type]
    assert graph.users(op.value)[0].kind == "Transpose"


@pytest.mark.parametrize("readers", [1, 2])
def test_a_residual_is_added_before_the_turn_of_a_norm(readers: int) -> None:
    """``readers`` of the norm: its kernel adds where nothing else reads its result."""
    n = Net(np.float64)
    x = n.conv(n.input(2, 6, 4, 5), 6)
    attrs = LayerNormAttrs(-1, 1e-3)
    rows = n.op("RMSNormalization", n.transposed(n.op("Relu", x), 0, 2, 3, 1), n.random(6), attrs=attrs)
    graph = n.done(n.op("Add", x, n.transposed(rows, 0, 3, 1, 2)), *(n.op("Exp", rows) for _ in range(readers - 1)))
    if readers > 1:
        check_untouched(HoistViews(), graph)
    else:
        check_pass(HoistViews(), graph, changes=1, rules={"add_before_transpose": 1}, kinds={
            "Conv": 1, "Relu": 1, "Transpose": 3, "RMSNormalization": 1, "Add": 1,
        })  # fmt: skip


def test_a_turned_residual_is_added_as_it_was() -> None:
    graph, _ = check_pass(HoistViews(), residual("turned"), changes=1, rules={"add_before_transpose": 1})
    assert {graph.op(v).kind for v in graph.of_kind("Add")[0].inputs} == {"Mul", "Relu"}  # type: ignore[arg-type]


def test_a_residual_whose_rows_are_read_is_added_in_rows() -> None:
    """VibeVoice adds the depthwise convolution to its input before the norm and the product."""
    graph, _ = check_pass(HoistViews(), residual("sum"), changes=1, rules={"add_before_transpose": 1})
    (total,) = (
        op
        for op in graph.of_kind("Add")
        if graph.users(op.value)[0].kind == "Transpose" and len(graph.users(op.value)) == 1
    )
    assert {graph.op(v).kind for v in total.inputs} == {"Mul", "Transpose"}  # type: ignore[arg-type]


@pytest.mark.parametrize(("image", "source"), [("input", "Input"), ("other rows", "Add")])
def test_a_residual_with_its_channels_second_in_memory_stays(image: str, source: str) -> None:
    check_refused(HoistViews(), residual(image), because=f"comes from {source}", rule="add_before_transpose")


def test_a_convolution_that_only_the_sum_reads_adds_the_rows() -> None:
    because = "the epilogue of Conv_1 adds the rows"
    check_refused(HoistViews(), residual("read once"), because=because, rule="add_before_transpose")


@pytest.mark.parametrize("options", [{"readers": 2}, {"bias": True}])
def test_other_additions_stay_after_the_turn(options: dict[str, Any]) -> None:
    check_untouched(HoistViews(), residual(**options))


def rows_residual(rows: str = "sum", *, readers: int = 1, second: bool = False) -> Graph:
    """Retinexformer's end of a block: the convolution's image becomes rows, to which the block's rows are added."""
    n = Net(np.float64)
    x = n.input(2, 4, 5, 6)
    x = {
        "sum": lambda: n.op("Add", n.matmul(x, 6), x),
        "input": lambda: x,
        "product": lambda: n.op("Relu", n.matmul(x, 6)),
        "norm": lambda: n.op("RMSNormalization", x, n.random(6), attrs=LayerNormAttrs(-1, 1e-3)),
        "constant": lambda: n.random(2, 4, 5, 6),
        "vector": lambda: n.input(6, name="v"),
    }[rows]()
    y = n.transposed(n.conv(n.input(2, 6, 4, 5, name="image"), 6), 0, 2, 3, 1)
    return n.done(n.op("Add", *((x, y) if second else (y, x))), *(n.op("Relu", y) for _ in range(readers - 1)))


@pytest.mark.parametrize("rows", ["sum", "input"])
@pytest.mark.parametrize("second", [False, True])
def test_rows_are_added_to_the_image_of_a_convolution(rows: str, second: bool) -> None:
    graph, _ = check_pass(HoistViews(), rows_residual(rows, second=second), changes=1, rules={"add_before_rows": 1})
    (total,) = (op for op in graph.of_kind("Add") if graph.type(op.value).dims == (2, 6, 4, 5))
    assert {graph.op(v).kind for v in total.inputs} == {"Conv", "Transpose"}  # type: ignore[arg-type]
    assert graph.users(total.value)[0].kind == "Transpose"


@pytest.mark.parametrize("rows", ["product", "norm"])
def test_rows_whose_operator_can_add_stay(rows: str) -> None:
    check_refused(HoistViews(), rows_residual(rows), because="can add the image", rule="add_before_rows")


@pytest.mark.parametrize("options", [{"readers": 2}, {"rows": "constant"}, {"rows": "vector"}])
def test_other_additions_to_rows_stay(options: dict[str, Any]) -> None:
    check_untouched(HoistViews(), rows_residual(**options))


def test_an_addition_after_another_transpose_of_a_convolution_stays() -> None:
    n = Net(np.float64)
    y = n.transposed(n.conv(n.input(2, 6, 4, 5), 6), 0, 3, 2, 1)
    check_untouched(HoistViews(), n.done(n.op("Add", y, n.input(2, 5, 4, 6, name="rows"))))


def windows(
    n: Net, *, kind: str = "LayerNormalization", perm: tuple[int, ...] = (0, 1, 3, 2, 4, 5), flat: tuple[int, ...] = (2, 36, 6),
    axis: int = -1, scale: tuple[int, ...] = (6,),
) -> Value:  # fmt: skip
    """The normalized rows of windows that were put back into their images, as Swin V2 has them."""
    x = n.op("Reshape", n.matmul(n.input(2, 36, 5), 6), n.ints(2, 3, 2, 3, 2, 6))
    x = n.op("Reshape", n.transposed(x, *perm), n.ints(*flat))
    parameters = [n.positive(*scale), n.random(*scale)][: 2 if kind == "LayerNormalization" else 1]
    return n.op(kind, x, *parameters, attrs=LayerNormAttrs(axis, 1e-3))


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_a_norm_reads_rows_where_they_lie(kind: str) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(HoistViews(), n.done(windows(n, kind=kind)), changes=1, rules={"norm_before_reshape": 1})
    (norm,) = graph.of_kind(kind)
    assert graph.op(norm.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [False, True])
def test_the_addition_goes_with_the_norm(last: bool) -> None:
    n = Net(np.float64)
    y, stream = windows(n), n.input(2, 36, 6, name="stream")
    graph = n.done(n.op("Add", *((stream, y) if last else (y, stream))))
    rules = {"norm_before_reshape": 1, "add_before_reshape_of_norm": 1}
    graph, _ = check_pass(HoistViews(), graph, changes=2, rules=rules)
    (addition,) = graph.of_kind("Add")
    assert graph.of_kind("LayerNormalization")[0].value in addition.inputs


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"perm": (0, 1, 3, 5, 4, 2), "flat": (2, 36, 6)}, "do not keep its rows together"),
        ({"flat": (2, 18, 12), "scale": (12,)}, "do not keep its rows together"),
        ({"axis": 1, "scale": (36, 6)}, "more than rows"),
        ({"scale": (36, 6)}, "differs between rows"),
        ({"perm": (4, 3, 2, 1, 0, 5), "flat": (2, 36, 6)}, "over too many axes"),
    ],
)
def test_other_norms_stay_after_their_views(changes: dict[str, Any], because: str) -> None:
    check_refused(HoistViews(), built(windows, **changes), because=because)


def test_norms_of_unknown_sizes_stay() -> None:
    n = Net()
    x = n.transposed(n.input(symbol("b"), 3, 4, 6), 0, 2, 1, 3)
    y = n.op("LayerNormalization", n.op("Reshape", x, n.ints(-1, 12, 6)), n.positive(6))
    check_refused(HoistViews(), n.done(y), because="its sizes are not known")


def test_an_addend_with_other_rows_stays() -> None:
    n = Net()
    y = n.op("Add", windows(n), n.op("Relu", n.input(1, 1, 6, name="row")))
    graph = n.done(y)
    HoistViews()(graph)
    check_refused(HoistViews(), graph, because="the other addend has rows of another shape")


def test_an_addition_of_unknown_sizes_stays() -> None:
    n = Net()
    batch = symbol("b")
    y = n.op("LayerNormalization", n.transposed(n.input(batch, 3, 4, 6), 0, 2, 1, 3), n.positive(6))
    y = n.op("Reshape", y, n.ints(0, 12, 6))
    check_refused(
        HoistViews(), n.done(n.op("Add", y, n.input(batch, 12, 6, name="y"))), because="its sizes are not known"
    )


def tokens(
    *, shape: tuple[int, ...] = (7, 1, 6), scale: tuple[int, ...] = (6,), axis: int = -1, made: bool = True
) -> Graph:
    """A product, its norm, and a product that reads the norm's rows in another shape. ``made``: the rows are a product's."""
    n = Net(np.float64)
    x = n.input(1, 7, 6)
    y = n.op("Add", x, n.op("MatMul", n.op("Relu", x), n.random(6, 6))) if made else n.op("Relu", x)
    rows = n.op("LayerNormalization", y, n.positive(*scale), attrs=LayerNormAttrs(axis, 1e-3))
    columns = n.random(shape[-1], 4)
    return n.done(n.op("MatMul", n.op("Reshape", rows, n.ints(*shape)), columns), n.op("Tanh", y))


@pytest.mark.parametrize("shape", [(7, 1, 6), (7, 6)])
def test_a_product_reads_the_norm_of_rows_in_its_own_shape(shape: tuple[int, ...]) -> None:
    graph, _ = check_pass(HoistViews(), tokens(shape=shape), changes=1, rules={"flat_rows_before_norm": 1})
    (norm,) = graph.of_kind("LayerNormalization")
    assert graph.op(norm.inputs[0]).kind == "Reshape"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"shape": (14, 3)}, "splits or joins rows"),
        ({"axis": 1, "scale": (7, 6)}, "more than rows"),
        ({"scale": (7, 6)}, "differs between rows"),
        ({"made": False}, "no product computes the rows"),
    ],
)
def test_other_norms_stay_in_front_of_the_reshape(changes: dict[str, Any], because: str) -> None:
    check_refused(HoistViews(), tokens(**changes), because=because, rule="flat_rows_before_norm")


def test_a_norm_stays_where_a_reshape_after_the_product_brings_its_axes_back() -> None:
    n = Net(np.float64)
    y = n.op("Add", n.input(2, 7, 6), n.op("MatMul", n.input(2, 7, 6, name="x"), n.random(6, 6)))
    rows = n.op("Reshape", n.op("LayerNormalization", y, n.positive(6)), n.ints(14, 6))
    product = n.op("Gemm", rows, n.random(6, 4), n.random(4))
    graph = n.done(n.op("Reshape", product, n.ints(2, 7, 4)), n.op("Tanh", y))
    graph, _ = check_pass(HoistViews(), graph, changes=1, rules={"hoist_view": 1})
    assert graph.op(graph.of_kind("MatMul")[-1].inputs[0]).kind == "LayerNormalization"  # type: ignore[arg-type]


def test_a_norm_of_rows_of_unknown_number_stays_in_front() -> None:
    n = Net()
    y = n.op("MatMul", n.input(symbol("b"), 7, 6), n.random(6, 6))
    y = n.op("Reshape", n.op("LayerNormalization", y, n.positive(6)), n.ints(-1, 6))
    graph = n.done(n.op("MatMul", y, n.random(6, 4)))
    check_refused(HoistViews(), graph, because="its sizes are not known", rule="flat_rows_before_norm")
