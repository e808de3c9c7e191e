"""merged_heads and its like: attention of (windows * heads, positions, features), as SAM, ViTDet and PyTorch have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_attention import FuseAttention

WINDOWS, HEADS, TOKENS, SIZE = 3, 2, 16, 8
C = HEADS * SIZE


def windows(mask: str = "", *, turned: bool = True, dtype: Any = np.float64) -> Graph:
    """Windows with a joint projection; ``mask``: of each head, or "shared" by all, or of the "rows" of all scores."""
    n = Net(dtype)
    joint = n.op(
        "Reshape", n.matmul(n.op("Tanh", n.input(WINDOWS, TOKENS, C)), 3 * C), n.ints(WINDOWS, TOKENS, 3, HEADS, SIZE)
    )
    if turned:
        joint = n.op("Transpose", joint, attrs=TransposeAttrs((2, 0, 3, 1, 4)))
    merged = n.op("Reshape", joint, n.ints(3, WINDOWS * HEADS, TOKENS, SIZE))
    parts = n.op("Split", merged, n.ints(1, 1, 1), attrs=SplitAttrs(0), outputs=3)
    q, k, v = (n.op("Reshape", p, n.ints(WINDOWS * HEADS, 1, TOKENS, SIZE)) for p in parts)
    dims = {"": (), "own": (WINDOWS * HEADS, 1, TOKENS, TOKENS), "shared": (1, 1, TOKENS, TOKENS), "rows": (TOKENS, 1)}[
        mask
    ]
    more = [n.op("Tanh", n.input(*dims, name="mask"))] if dims else []
    y: Value = n.op("Attention", q, k, v, *more, attrs=AttentionAttrs(scale=0.5))
    split = n.op("Reshape", n.op("Squeeze", y, n.ints(1)), n.ints(WINDOWS, HEADS, TOKENS, SIZE))
    rows = n.op("Reshape", n.op("Transpose", split, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(WINDOWS, TOKENS, C))
    return n.done(n.matmul(rows, C))


@pytest.mark.parametrize("mask", ["", "own", "shared"])
def test_heads_leave_the_batch(mask: str) -> None:
    after, _ = check_pass(FuseAttention(), windows(mask), changes=1, rules={"merged_heads": 1})
    (op,) = after.of_kind("Attention")
    assert after.type(op.value).static_shape == (WINDOWS, HEADS, TOKENS, SIZE)


@pytest.mark.parametrize("mask", ["", "shared"])
def test_nothing_is_copied(mask: str) -> None:
    steps = [s.params["tactic"].split()[0] for s in check_simulated(windows(mask, dtype=np.float32), "fp16").steps]
    assert not any(t == "copy" for t in steps), steps


def test_a_mask_of_as_many_rows_as_items_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TOKENS", WINDOWS * HEADS)
    check_pass(FuseAttention(), windows("rows"), changes=1, rules={"merged_heads": 1})


def test_a_batch_that_was_never_split_stays() -> None:
    assert not FuseAttention()(windows(turned=False)).changes


def test_one_item_stays() -> None:
    n = Net()
    y: Value = n.op("Attention", *(n.input(1, 1, TOKENS, SIZE, name=k) for k in "qkv"), attrs=AttentionAttrs(scale=0.5))
    check_untouched(FuseAttention(), n.done(n.reshaped(y, TOKENS, SIZE)))


def of_images(batch: int, dtype: Any = np.float64) -> Graph:
    """Attention of vit-pytorch in windows of 4 x 4 pixels: its projections are convolutions."""
    n = Net(dtype)
    x, rows = n.op("Tanh", n.input(batch, 16, 4, 4)), []
    for _ in range(3):
        heads = n.op("Reshape", n.conv(x, C, 1, pads=0), n.ints(batch, HEADS, SIZE, 4, 4))
        turned = n.op("Transpose", heads, attrs=TransposeAttrs((0, 1, 3, 4, 2)))
        rows.append(n.op("Reshape", turned, n.ints(batch * HEADS, TOKENS, SIZE)))
    weights = n.op("MatMul", rows[0], n.op("Transpose", rows[1], attrs=TransposeAttrs((0, 2, 1))))
    y = n.op("MatMul", n.op("Softmax", n.op("Mul", weights, 0.25)), rows[2])
    y = n.op(
        "Transpose", n.op("Reshape", y, n.ints(1, batch, HEADS, 4, 4, SIZE)), attrs=TransposeAttrs((0, 1, 2, 5, 3, 4))
    )
    return n.done(n.conv(n.op("Reshape", y, n.ints(batch, C, 4, 4)), 16, 1, pads=0))


def test_heads_of_images_leave_the_batch() -> None:
    after, _ = check_pass(FuseAttention(), of_images(4), changes=2, rules={"attention": 1, "merged_heads": 1})
    (op,) = after.of_kind("Attention")
    assert after.type(op.value).static_shape == (4, HEADS, TOKENS, SIZE)


@pytest.mark.parametrize("batch", [1, 4])
def test_heads_of_images_are_not_copied(batch: int) -> None:
    steps = [s.params["op"]["kind"] for s in check_simulated(of_images(batch, np.float32), "fp16").steps]
    assert steps.count("Copy") + steps.count("Copies") <= 1, steps  # into the layout of convolutions


BATCH = 3


def positions_first(mask: str = "", dtype: Any = np.float64, *, heads: int = HEADS) -> Graph:
    """PyTorch's MultiheadAttention with weights: the batch and the heads are joined behind the positions."""
    n = Net(dtype)
    x = n.op("Tanh", n.input(TOKENS, BATCH, C))
    size, items = C // heads, BATCH * heads
    q, k, v = (n.op("Reshape", n.matmul(x, C), n.ints(TOKENS, items, size)) for _ in range(3))
    q, v = (n.op("Transpose", t, attrs=TransposeAttrs((1, 0, 2))) for t in (q, v))
    scores = n.op("Mul", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((1, 2, 0)))), 0.25)
    if mask:
        scores = n.op("Add", scores, n.input(*{"own": (items, TOKENS, TOKENS), "one": (1, TOKENS, TOKENS)}[mask]))
    y = n.op("Transpose", n.op("MatMul", n.op("Softmax", scores), v), attrs=TransposeAttrs((1, 0, 2)))
    return n.done(n.matmul(n.op("Reshape", y, n.ints(TOKENS * BATCH, C)), C))


@pytest.mark.parametrize("mask", ["", "own", "one"])
def test_heads_behind_positions_become_heads(mask: str) -> None:
    rules = {"attention": 1, "merged_heads": 1}
    after, _ = check_pass(FuseAttention(), positions_first(mask), changes=2, rules=rules)
    (op,) = after.of_kind("Attention")
    assert after.type(op.value).static_shape == (BATCH, HEADS, TOKENS, SIZE)


def test_one_head_behind_positions_stays() -> None:
    check_pass(FuseAttention(), positions_first(heads=1), changes=1, rules={"attention": 1})


def test_heads_behind_positions_are_not_copied() -> None:
    steps = [s.params["op"]["kind"] for s in check_simulated(positions_first(dtype=np.float32), "fp16").steps]
    assert not {"Copy", "Copies"} & set(steps), steps


def given(perm: tuple[int, ...] = (1, 0, 2), *, heads: int = HEADS, dtype: Any = np.float64) -> Graph:
    """The same attention as one operator of ONNX, whose operands are split after they are transposed."""
    n = Net(dtype)
    x = n.op("Tanh", n.input(TOKENS, BATCH, C))
    size, items = C // heads, BATCH * heads
    rows = [n.op("Reshape", n.matmul(x, C), n.ints(TOKENS, items, size)) for _ in range(3)]
    turned = [n.op("Transpose", t, attrs=TransposeAttrs(perm)) for t in rows]
    q, k, v = (n.op("Reshape", t, n.ints(BATCH, heads, TOKENS, size)) for t in turned)
    y = n.op("Transpose", n.op("Attention", q, k, v), attrs=TransposeAttrs((2, 0, 1, 3)))
    return n.done(n.matmul(n.op("Reshape", y, n.ints(TOKENS * BATCH, C)), C))


def test_items_of_a_given_attention_are_split_before_they_are_moved() -> None:
    after, _ = check_pass(FuseAttention(), given(), changes=1, rules={"split_items": 1})
    (op,) = after.of_kind("Attention")
    for value in op.inputs[:3]:
        assert value is not None
        assert after.op(value).kind == "Transpose"
        assert after.op(value).attrs.perm == (1, 2, 0, 3)
    steps = [s.params["op"]["kind"] for s in check_simulated(given(dtype=np.float32), "fp16").steps]
    assert not {"Copy", "Copies"} & set(steps), steps


def test_items_with_one_head_or_in_another_order_stay() -> None:
    check_untouched(FuseAttention(), given(heads=1))
    check_untouched(FuseAttention(), given((0, 1, 2)))


def of_channels(mask: str = "", dtype: Any = np.float64, *, heads: int = HEADS) -> Graph:
    """BoTNet's attention over 4 x 4 pixels: heads and batch are joined in the results of a convolution."""
    n = Net(dtype)
    x, items, size = n.op("Tanh", n.input(BATCH, 16, 4, 4)), BATCH * heads, C // heads
    views = [n.op("Reshape", n.conv(x, C, 1, pads=0), n.ints(items, size, 16)) for _ in range(3)]
    q, v = (n.op("Transpose", t, attrs=TransposeAttrs((0, 2, 1))) for t in (views[0], views[2]))
    scores = n.op("Mul", n.op("MatMul", q, views[1]), 0.25)
    if mask:
        scores = n.op("Add", scores, n.input(*{"own": (items, 16, 16), "one": (1, 16, 16)}[mask]))
    y = n.op("Transpose", n.op("MatMul", n.op("Softmax", scores), v), attrs=TransposeAttrs((0, 2, 1)))
    return n.done(n.conv(n.op("Reshape", y, n.ints(BATCH, C, 4, 4)), 16, 1, pads=0))


@pytest.mark.parametrize("mask", ["", "own", "one"])
def test_heads_of_a_convolutions_channels_leave_the_batch(mask: str) -> None:
    after, _ = check_pass(FuseAttention(), of_channels(mask), changes=2, rules={"attention": 1, "merged_heads": 1})
    (op,) = after.of_kind("Attention")
    assert after.type(op.value).static_shape == (BATCH, HEADS, 16, SIZE)


def test_one_head_of_channels_stays() -> None:
    check_pass(FuseAttention(), of_channels(heads=1), changes=1, rules={"attention": 1})


def test_heads_of_channels_are_not_copied() -> None:
    steps = [s.params["op"]["kind"] for s in check_simulated(of_channels(dtype=np.float32), "fp16").steps]
    assert steps.count("Copy") + steps.count("Copies") <= 1, steps  # into the layout of convolutions
