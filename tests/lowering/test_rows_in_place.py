"""Products and attention write their rows in place into a concatenation."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.layout import copies as small
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs


def copies(graph: Graph) -> int:
    """The number of copied tensors, alone or in a concatenation."""
    steps = [s for s in check_simulated(graph, "fp16").steps if s.params["tactic"].split()[0] == "copy"]
    return sum(len(s.params["reads"]) for s in steps)


def image(n: Net, rows: Value, height: int) -> Value:
    """Rows of pixels as an image, with the channels second."""
    batch, count, channels = n.dims(rows)
    shaped = n.op("Reshape", rows, n.ints(batch, height, count // height, channels))
    return n.op("Transpose", shaped, attrs=TransposeAttrs(perm=(0, 3, 1, 2)))


def fused(readers: int = 1) -> Graph:
    """A convolution's image and an image of a product's rows, concatenated, and a convolution of both, as in SegFormer's head."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 8, 8, 8), 16, bias=True))
    rows = n.matmul(n.op("Tanh", n.input(1, 64, 24, name="rows")), 32)
    joined = n.op("Concat", x, image(n, rows, 8), attrs=ConcatAttrs(axis=1))
    y = n.op("Relu", n.conv(joined, 16, 1, pads=0))
    return n.done(y) if readers == 1 else n.done(y, n.op("Softmax", rows))


def test_a_product_writes_an_image_of_rows() -> None:
    assert copies(fused()) == copies(fused(readers=2)) - 1


def heads(columns: int = 64, *, others: int = 0) -> Graph:
    """Rows of two products, concatenated along an inner axis, with ``others`` parts that another kernel computes."""
    n = Net()
    a = n.op("Reshape", n.matmul(n.op("Tanh", n.input(2, 16, 32, name="a")), 2 * columns), n.ints(2, 16, 2, columns))
    b = n.op("Reshape", n.matmul(n.op("Tanh", n.input(2, 16, 24, name="b")), 3 * columns), n.ints(2, 16, 3, columns))
    parts = [a, b, *(n.op("Softmax", n.input(2, 16, 1, columns, name=f"other {k}")) for k in range(others))]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(axis=2))
    rows = n.op("Reshape", joined, n.ints(2, 16, -1))
    return n.done(n.matmul(rows, 16))


def test_products_write_rows_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [copies(heads(others=k)) for k in range(3)] == [0, 3, 4]  # one launch copies all parts
    monkeypatch.setattr(small, "MOST_ELEMENTS", 0)
    assert [copies(heads(others=k)) for k in range(3)] == [0, 1, 4]


@pytest.mark.parametrize("columns", [12, 20])
def test_rows_that_begin_between_vectors_are_copied(columns: int) -> None:
    assert copies(heads(columns)) > copies(heads())


def cache(columns: int = 64) -> Graph:
    """A cache of fp32 and new keys with rotary embeddings: the keys of an attention, and the next cache."""
    n = Net()
    past, mask = n.input(2, 3, 31, columns, name="past"), n.input(2, 1, 1, 32, name="mask")
    q, k, v = (n.op("Abs", n.input(2, 3, c, columns, name=x)) for x, c in zip("qkv", (1, 1, 32), strict=True))
    angles = [n.input(2, 1, columns // 2, name=x) for x in ("cos", "sin")]
    q, k = (n.op("RotaryEmbedding", x, *angles, attrs=RotaryAttrs()) for x in (q, k))
    keys = n.op("Concat", past, k, attrs=ConcatAttrs(axis=2))
    return n.done(n.op("Attention", q, keys, v, mask, attrs=AttentionAttrs()), keys)


def test_a_converted_cache_and_rotated_keys_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies(cache()) > 0  # small: one launch for all parts, whose copies read the first sources
    monkeypatch.setattr(small, "MOST_ELEMENTS", 0)
    assert copies(cache()) == 0
    assert copies(cache(columns=36)) == 2  # rows that are no vectors


def padded(constant: bool) -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 8, 8, 8), 16))
    more = n.const(np.zeros((1, 8, 8, 8), np.float32)) if constant else n.input(1, 8, 8, 8, name="more")
    y = n.conv(n.op("Concat", x, more, attrs=ConcatAttrs(axis=1)), 24, group=3)
    return n.done(n.op("Relu", y))


def test_a_constant_does_not_keep_another_part_from_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "MOST_ELEMENTS", 0)  # otherwise the part is copied from the image at once
    assert copies(padded(True)) == 2  # the conversion of the first image's layout, and the zeros
    assert copies(padded(False)) == 3


def halves(*, columns: int = 24, joined: bool = True) -> Graph:
    """Windows of two shapes, back in the order of the image, side by side (CSWin, DAT)."""
    n = Net()
    parts = []
    for i, (h, w) in enumerate(((2, 4), (4, 2))):
        rows = n.matmul(n.op("Tanh", n.input(8 * 8 // h // w, h * w, 32, name=f"x{i}")), columns)
        split = n.op("Reshape", rows, n.ints(8 // h, 8 // w, h, w, columns))
        turned = n.op("Transpose", split, attrs=TransposeAttrs((0, 2, 1, 3, 4)))
        parts.append(n.op("Reshape", turned, n.ints(1, 64, columns)))
    if not joined:
        return n.done(*(n.op("Softmax", p) for p in parts))
    return n.done(n.op("Softmax", n.op("Concat", *parts, attrs=ConcatAttrs(axis=2))))


@pytest.mark.parametrize("columns", [24, 30])
def test_copied_parts_are_copied_into_their_places(columns: int) -> None:
    """No part is copied twice."""
    assert copies(halves(columns=columns)) == copies(halves(columns=columns, joined=False)) == 2


def gated() -> Graph:
    """A product of rows of 60 elements that a pointwise operator computes."""
    n = Net()
    a, b = (n.op("Tanh", n.input(1, 256, 60, name=name)) for name in "ab")
    return n.done(n.matmul(n.op("Sin", n.op("Mul", a, b)), 64))


def test_pointwise_operators_write_rows_for_products() -> None:
    """A product reads rows that begin at multiples of 16 bytes, without a copy."""
    assert [s.params["tactic"].split()[0] for s in check_simulated(gated(), "fp16").steps] == ["pointwise", "gemm_sm90"]


def gated_heads(perm: tuple[int, ...] = (0, 2, 1, 3), features: int = 16) -> Graph:
    """Attention whose heads are multiplied by gates before they are joined (BS-RoFormer: Lu et al., 2023)."""
    n = Net()
    q, k, v = (n.op("Tanh", n.input(2, 4, 8, features, name=name)) for name in "qkv")
    heads = n.op("Attention", q, k, v, attrs=AttentionAttrs())
    heads = n.op("Mul", heads, n.op("Sigmoid", n.input(2, 4, 8, 1, name="gates")))
    return n.done(n.matmul(n.op("Reshape", n.op("Transpose", heads, attrs=TransposeAttrs(perm)), n.ints(2, 8, -1)), 32))


def test_pointwise_operators_write_in_the_order_of_a_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Transpose after them is a view, if it moves whole vectors."""
    monkeypatch.setattr(small, "MOST_ELEMENTS", 0)
    assert copies(gated_heads()) == 0
    assert copies(gated_heads(perm=(0, 2, 3, 1))) == 1
    assert copies(gated_heads(features=12)) == 1
