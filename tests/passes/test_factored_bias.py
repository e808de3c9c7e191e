"""factored_bias: biases of rows and columns that are added to scores one by one, as in SAM's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.fuse_attention import FuseAttention

SIDE, HEADS, SIZE = 4, 2, 16


def image_attention(
    lead: tuple[int, ...] = (HEADS, SIDE, SIDE),
    *,
    readers: int = 1,
    first: bool = True,
) -> Graph:
    n = Net(np.float64)
    tokens = SIDE * SIDE
    q, k, v = (n.op("Tanh", n.input(HEADS, tokens, SIZE, name=name)) for name in "qkv")
    scores = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1))))
    split = n.op("Reshape", scores, n.ints(HEADS, *[SIDE] * 4))
    a, b = n.op("Tanh", n.input(*lead, SIDE, 1, name="a")), n.op("Tanh", n.input(*lead, 1, SIDE, name="b"))
    summed = n.op("Add", n.op("Add", split, a), b) if first else n.op("Add", b, n.op("Add", a, split))
    flat: Value = n.op("Reshape", summed, n.ints(HEADS, tokens, tokens))
    y = n.op("MatMul", n.op("Softmax", flat, attrs=SoftmaxAttrs(-1)), v)
    return n.done(y, *(n.op("Neg", summed) for _ in range(readers - 1)))


@pytest.mark.parametrize("first", [True, False])
def test_both_biases_are_one_mask(first: bool) -> None:
    graph = image_attention(first=first)
    after, _ = check_pass(FuseAttention(), graph, changes=2, rules={"factored_bias": 1, "attention": 1})
    assert after.kinds()["Attention"] == 1
    assert after.kinds()["Add"] == 1


@pytest.mark.parametrize("options", [{"readers": 2}, {"lead": (HEADS, 1, SIDE)}])
def test_sums_that_others_read_or_that_repeat_stay(options: dict[str, Any]) -> None:
    report = FuseAttention()(image_attention(**options))
    assert "factored_bias" not in {f.rule for f in report.fired}


def test_one_bias_is_no_candidate() -> None:
    n = Net(np.float64)
    split = n.op("Reshape", n.op("Tanh", n.input(2, 16, 16)), n.ints(2, 4, 4, 4, 4))
    summed = n.op("Add", split, n.op("Tanh", n.input(2, 4, 4, 4, 1, name="a")))
    check_untouched(FuseAttention(), n.done(n.op("Softmax", n.op("Reshape", summed, n.ints(2, 16, 16)))))
