"""heads_before_parts and ordered_features: attention within parts of images, with heads before the parts (NesT)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_attention import FuseAttention

HEADS, TOKENS, SIZE = 2, 16, 8
C = HEADS * SIZE


def nest(
    images: int = 3, parts: int = 4, *, perm: tuple[int, ...] = (3, 0, 4, 1, 2, 5), features_first: bool = True, read: bool = False,
    masked: bool = False, dtype: Any = np.float64,
) -> Graph:  # fmt: skip
    """Attention of ``images * heads`` items with a head for each part, as it is fused. ``read``: others read its features."""
    n = Net(dtype)
    sizes = (images, parts, TOKENS, 3, HEADS, SIZE) if perm[0] == 3 else (3, images, HEADS, parts, TOKENS, SIZE)
    joint = n.op("Reshape", n.matmul(n.op("Tanh", n.input(images, parts, TOKENS, C)), 3 * C), n.ints(*sizes))
    turned = n.op("Transpose", joint, attrs=TransposeAttrs(perm))
    split = n.op("Split", turned, n.ints(1, 1, 1), attrs=SplitAttrs(0), outputs=3)
    q, k, v = (n.op("Reshape", p, n.ints(images * HEADS, parts, TOKENS, SIZE)) for p in split)
    more = [n.op("Tanh", n.input(1, 1, TOKENS, TOKENS, name="mask"))] if masked else []
    y = n.op("Attention", q, k, v, *more, attrs=AttentionAttrs(scale=0.5))
    y = n.op("Reshape", y, n.ints(images, HEADS, parts, TOKENS, SIZE))
    order = (0, 2, 3, 4, 1) if features_first else (0, 2, 3, 1, 4)
    rows = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs(order)), n.ints(images, parts, TOKENS, C))
    return n.done(n.matmul(rows, C), *([n.op("Exp", rows)] if read else []))


@pytest.mark.parametrize("parts", [1, 4])
def test_heads_and_parts_change_places(parts: int) -> None:
    graph = nest(parts=parts, features_first=False)
    after, _ = check_pass(FuseAttention(), graph, changes=1, rules={"heads_before_parts": 1})
    (op,) = after.of_kind("Attention")
    assert after.type(op.value).static_shape == (3 * parts, HEADS, TOKENS, SIZE)


def test_features_are_joined_in_the_order_of_the_heads() -> None:
    rules = {"heads_before_parts": 1, "ordered_features": 1}
    after, _ = check_pass(FuseAttention(), nest(), changes=2, rules=rules)
    assert after.of_kind("MatMul")[-1].inputs[1] is not None
    assert (0, 2, 3, 1, 4) in {op.attrs.perm for op in after.of_kind("Transpose")}


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("parts", [1, 4])
def test_nothing_is_copied(images: int, parts: int) -> None:
    program = check_simulated(nest(images, parts, dtype=np.float32), "fp16")
    assert not any(s.params["op"]["kind"] in ("Copy", "Copies") for s in program.steps)


def test_masks_and_parts_that_are_not_neighbors_of_images_stay() -> None:
    check_untouched(FuseAttention(), nest(features_first=False, masked=True))
    check_untouched(FuseAttention(), nest(features_first=False, perm=(0, 1, 2, 3, 4, 5)))
    check_untouched(FuseAttention(), nest(1, features_first=False))  # the items are the heads


def test_features_that_others_read_stay() -> None:
    check_refused(FuseAttention(), nest(1, read=True), because="read elsewhere, in the order of its features")
