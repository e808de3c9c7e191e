"""take_rows: a few rows are taken before the operators that compute each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.index import PadAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.gathered_products import TABLE
from optdnn.passes.take_rows import TakeRows
from optdnn.types import INT8


def row(n: Net, x: Value, axis: int = 1) -> Value:
    return n.op("Gather", x, n.const(0, np.int64), attrs=GatherAttrs(axis))


def rows(n: Net, x: Value, start: int, end: int, axis: int = 1) -> Value:
    return n.op("Slice", x, n.ints(start), n.ints(end), n.ints(axis))


def normalized(n: Net, x: Value) -> Value:
    return n.op("LayerNormalization", x, n.positive(8), n.random(8), attrs=LayerNormAttrs(-1))


def heads(n: Net, x: Value) -> Value:
    split = n.op("Reshape", x, n.ints(2, 6, 2, 4))
    return n.op("Transpose", split, attrs=TransposeAttrs((0, 2, 1, 3)))


def last_layer(read_all: bool = False) -> Graph:
    """The end of a vision transformer, whose classifier reads the class token."""
    n = Net(np.float64)
    x = n.op("Relu", n.input(2, 6, 8))
    y = normalized(n, x)
    q, k, v = (heads(n, n.op("Add", n.matmul(y, 8), n.random(8))) for _ in range(3))
    y = n.op("Attention", q, k, v, attrs=AttentionAttrs())
    y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(2, 6, 8))
    x = n.op("Add", x, n.op("Add", n.matmul(y, 8), n.random(8)))
    x = n.op("Add", x, n.matmul(n.op("Gelu", n.matmul(normalized(n, x), 16)), 8))
    y = normalized(n, x)
    return n.done(n.gemm(row(n, y), 5), *([n.op("Tanh", y)] if read_all else []))


def test_a_classifier_of_the_class_token_computes_one_row() -> None:
    graph = last_layer()
    after, _ = check_pass(TakeRows(), graph, changes=17)
    for op in after.ops():
        if op.kind in ("Gelu", "Attention") or (op.kind == "LayerNormalization" and op.outputs[0].type.dims[1] == 1):
            assert 1 in op.outputs[0].type.dims[1:3]
    products = [op.outputs[0].type.dims for op in after.of_kind("MatMul")]
    assert sorted(d[1] for d in products) == [1, 1, 1, 1, 6, 6]  # keys and values are of all rows


def quantized(n: Net, x: Value, axis: int | None = None) -> Value:
    """Rounded to 8 bits and back. ``axis``: with a scale for each of its elements."""
    scale = n.const(np.float32(0.1), np.float32) if axis is None else n.positive(8)
    back = DequantizeAttrs(0 if axis is None else axis)
    q = n.op("QuantizeLinear", x, scale, attrs=QuantizeAttrs(INT8, 0 if axis is None else axis))
    return n.op("DequantizeLinear", q, scale, attrs=back)


def test_rows_of_a_quantized_network() -> None:
    """Scores and their softmax are operators of their own there."""
    n = Net()
    x = quantized(n, n.op("Relu", n.input(2, 6, 8)))
    q, k, v = (quantized(n, n.matmul(x, 8)) for _ in range(3))
    scores = quantized(n, n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1)))))
    y = n.op("MatMul", quantized(n, n.op("Softmax", scores, attrs=SoftmaxAttrs(-1))), v)
    y = quantized(n, n.op("Add", x, quantized(n, y)))
    after, _ = check_pass(TakeRows(), n.done(n.gemm(row(n, normalized(n, y)), 5)), changes=19, promoted_changes=24)
    assert sorted(op.outputs[0].type.dims[1] for op in after.of_kind("MatMul")) == [1, 1, 1, 6, 6]
    assert [op.outputs[0].type.dims for op in after.of_kind("Softmax")] == [(2, 1, 6)]
    whole = [op.outputs[0].type.dims for op in after.of_kind("DequantizeLinear")].count((2, 6, 8))
    assert whole == 3, "of the data, the keys and the values: the rows of the data are dequantized apart"


def test_rows_that_are_quantized_at_once_stay() -> None:
    n = Net()
    y = rows(n, quantized(n, n.op("Relu", n.input(2, 6, 8))), 0, 1)
    check_untouched(TakeRows(), n.done(n.op("Tanh", quantized(n, y))))


def test_rows_with_scales_of_their_own_stay() -> None:
    n = Net()
    check_untouched(TakeRows(), n.done(rows(n, quantized(n, n.op("Relu", n.input(2, 8, 8)), 1), 0, 1)))


def test_a_softmax_over_the_rows_stays() -> None:
    n = Net(np.float64)
    check_untouched(TakeRows(), n.done(rows(n, n.op("Softmax", n.input(2, 6, 8), attrs=SoftmaxAttrs(1)), 0, 1)))


def test_rows_with_other_readers_stay() -> None:
    check_untouched(TakeRows(), last_layer(read_all=True))
    n = Net(np.float64)
    y = n.op("Relu", n.input(2, 6, 8))
    check_refused(TakeRows(), n.done(rows(n, y, 0, 1), rows(n, y, 1, 3)), because="has readers of other rows")


def test_equal_slices_move_together() -> None:
    n = Net(np.float64)
    y = n.matmul(n.input(2, 6, 8), 4)
    graph = n.done(n.op("Tanh", rows(n, y, 2, 5)), n.op("Relu", rows(n, y, 2, 5)))
    kinds = {"Slice": 1, "MatMul": 1, "Tanh": 1, "Relu": 1}
    check_pass(TakeRows(), graph, changes=1, kinds=kinds)


def best(n: Net, y: Value, count: int = 2, axis: int = 1) -> Value:
    """Rows by indices that are computed."""
    indices = n.op("Cast", n.op("Floor", n.op("Abs", n.input(count, name="at"))), attrs=CastAttrs(np.dtype(np.int64)))
    return n.op("Gather", y, indices, attrs=GatherAttrs(axis))


def test_the_best_queries_are_computed_alone() -> None:
    n = Net(np.float64)
    x = n.op("Exp", n.input(1, 6, 8))
    y = n.op("Relu", n.op("Add", n.matmul(x, 16), n.random(16)))
    y = n.op("Add", n.matmul(y, 4), n.random(1, 6, 4))
    graph = n.done(best(n, y), n.op("Softmax", x))
    after, _ = check_pass(TakeRows(), graph, changes=5, rules={"take_rows_by_index": 5})
    assert [op.outputs[0].type.dims for op in after.of_kind("MatMul")] == [(1, 2, 16), (1, 2, 4)]
    assert len(list(after.of_kind("Gather"))) == 2, "of the rows and of the constant"


def test_rows_by_index_that_stay() -> None:
    n = Net(np.float64)
    y = n.op("Relu", n.input(1, 6, 8))
    check_untouched(TakeRows(), n.done(best(n, y, 4)))
    n = Net(np.float64)
    y = n.op("Relu", n.input(1, 6, 8))
    check_untouched(TakeRows(), n.done(best(n, y, axis=2)))
    n = Net(np.float64)
    y = n.op("Transpose", n.input(1, 8, 6), attrs=TransposeAttrs((0, 2, 1)))  # a Gather of columns would copy as much
    check_untouched(TakeRows(), n.done(best(n, y)))
    n = Net(np.float64)
    y = n.op("Relu", n.input(1, 6, 8))
    check_refused(TakeRows(), n.done(best(n, y), n.op("Exp", y)), because="has readers of other rows")
    n = Net(np.float64)
    y = n.op("Add", n.input(1, 6, 8), n.input(1, 6, 8, name="z"))
    check_refused(TakeRows(), n.done(best(n, y)), because="from several tensors")


@pytest.mark.parametrize("size", [TABLE // 4, TABLE])
def test_rows_of_a_table_that_is_known_stay(size: int) -> None:
    n = Net(np.float64)
    graph = n.done(best(n, n.op("Exp", n.random(size, 4)), axis=0))
    if size == TABLE:
        check_pass(TakeRows(), graph, changes=1, depends_on_input=False)
    else:
        check_refused(TakeRows(), graph, because="are known when the network is built")


def test_causal_queries_and_most_rows_stay() -> None:
    n = Net(np.float64)
    q, k, v = (n.input(2, 2, 6, 4, name=name) for name in "qkv")
    y = n.op("Attention", q, k, v, attrs=AttentionAttrs(is_causal=True))
    check_untouched(TakeRows(), n.done(rows(n, y, 0, 1, axis=2)))
    n = Net(np.float64)
    check_untouched(TakeRows(), n.done(rows(n, n.op("Relu", n.input(2, 6, 8)), 0, 4)))


def test_masks_have_a_row_for_each_query() -> None:
    n = Net(np.float64)
    q, k, v = (n.input(2, 2, 6, 4, name=name) for name in "qkv")
    y = n.op("Attention", q, k, v, n.random(6, 6), attrs=AttentionAttrs())
    after, _ = check_pass(TakeRows(), n.done(rows(n, y, 1, 3, axis=2)), changes=1)
    (attention,) = after.of_kind("Attention")
    assert [after.type(attention.inputs[i]).dims[-2] for i in (0, 1, 3)] == [2, 6, 2]  # type: ignore[arg-type]


def test_a_mask_of_padding_alone_goes() -> None:
    """The class token of MViT, whose scores have no bias."""
    n = Net(np.float64)
    q, k, v = (n.input(2, 2, 6, 4, name=name) for name in "qkv")
    mask = n.op("Pad", n.op("Exp", n.input(2, 2, 5, 5, name="m")), n.ints(0, 0, 1, 1, 0, 0, 0, 0), attrs=PadAttrs())
    y = n.op("Attention", q, k, v, mask, attrs=AttentionAttrs())
    rules = {"take_rows": 1, "part_of_pad": 1, "given_mask": 1}
    after, _ = check_pass(
        TakeRows(), n.done(rows(n, y, 0, 1, axis=2)), changes=3, rules=rules, drops=["Exp_1", "Pad_2"]
    )
    (attention,) = after.of_kind("Attention")
    assert len([v for v in attention.inputs if v is not None]) == 3
    assert "Exp" not in after.kinds()


@pytest.mark.parametrize("kind", ["Softmax", "LayerNormalization"])
def test_rows_that_need_one_another_stay(kind: str) -> None:
    n = Net(np.float64)
    x = n.input(2, 6, 8)
    if kind == "Softmax":
        y = n.op(
            "Transpose",
            n.op("Softmax", n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1)))),
            attrs=TransposeAttrs((0, 2, 1)),
        )
        check_pass(TakeRows(), n.done(rows(n, y, 0, 2)), changes=1)  # only in front of the transposition
    else:
        y = n.op(kind, x, n.positive(6, 8), n.random(6, 8), attrs=LayerNormAttrs(1))
        check_untouched(TakeRows(), n.done(rows(n, y, 0, 2)))


def last_tokens(length: int = 6, *, shared: bool = False, table: bool = False) -> Graph:
    """The end of a language model: the logits of one row of each of three sequences."""
    n = Net(np.float64)
    x = n.op("Relu", n.input(3, length, 8))
    x = n.op("Add", x, n.random(length, 8)) if table else n.op("Add", x, n.matmul(n.op("Gelu", n.matmul(x, 16)), 8))
    y = normalized(n, x)
    logits = n.op("Tanh", n.matmul(y, 20))
    at = n.const(np.array([[length - 1], [0], [length // 2]]), np.int64)
    taken = n.op("GatherND", logits, at, attrs=GatherNDAttrs(1))
    return n.done(taken, *([n.op("Abs", logits)] if shared else []))


def test_a_row_of_each_sequence() -> None:
    after, _ = check_pass(TakeRows(), last_tokens(), changes=7)
    assert [op.outputs[0].type.dims for op in after.of_kind("Tanh")] == [(3, 1, 20)]
    assert {op.outputs[0].type.dims[1] for op in after.of_kind("MatMul")} == {1}


def test_a_sequence_of_one_row_needs_no_gather() -> None:
    after, _ = check_pass(TakeRows(), last_tokens(1), changes=1)
    assert not list(after.of_kind("GatherND"))


def test_rows_that_are_rounded_one_by_one() -> None:
    n = Net(np.float64)
    x = n.op("Relu", n.input(2, 6, 32))
    packed = n.const(n.rng.integers(0, 256, (8, 16)), np.uint8)
    attrs = PackedMatMulAttrs("uint4", 32, 16, rounded_rows=True)
    graph = n.done(rows(n, n.op("PackedMatMul", x, packed, n.random(8, 2), attrs=attrs), 0, 1))
    after, _ = check_pass(TakeRows(), graph, changes=2)
    (op,) = after.of_kind("PackedMatMul")
    assert op.attrs.rounded_rows
    assert op.outputs[0].type.dims == (2, 1, 8)


def test_rows_of_each_that_stay() -> None:
    check_untouched(TakeRows(), last_tokens(shared=True))
    after, _ = check_pass(TakeRows(), last_tokens(table=True), changes=3)
    (gather,) = after.of_kind("GatherND")
    assert after.type(gather.inputs[0]).dims == (3, 6, 8), "behind the addition of a table of rows"  # type: ignore[arg-type]
