"""Masks that are computed from constants and are too large to become constants, such as that of a long causal prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net

from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.graph import Graph, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.create import TriluAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.fuse_attention import FuseAttention
from optdnn.passes.support import attention_mask
from optdnn.passes.support.constant_rows import constant_rows

S = 12
Make = Callable[[Net], Value]


def ints(n: Net, *shape: int) -> Value:
    return n.const(np.arange(S).reshape(shape), np.int64)


def earlier(n: Net) -> Value:
    """Bool (1, 1, S, S): keys up to the query."""
    return n.op("LessOrEqual", ints(n, 1, 1, 1, S), ints(n, 1, 1, S, 1))


def near(n: Net) -> Value:
    """Also not more than 3 before it."""
    return n.op("And", earlier(n), n.op("Greater", n.op("Add", ints(n, S), n.ints(4)), ints(n, S, 1)))


def hidden(n: Net, condition: Value, fill: float = -np.inf) -> Value:
    return n.op("Where", condition, 0.0, n.const(fill))


def triangle(n: Net) -> Value:
    """As torch.triu(torch.full((S, S), -inf), 1) makes it."""
    full = n.op("Expand", n.const(-np.inf), n.ints(S, S))
    return n.op("Trilu", full, n.const(1, np.int64), attrs=TriluAttrs(upper=True))


def below(n: Net) -> Value:
    ones = n.op("Expand", n.const(True, np.bool_), n.ints(S, S))
    return hidden(n, n.op("Trilu", ones, attrs=TriluAttrs(upper=False)))


MASKS: dict[str, tuple[Make, tuple[bool, int, int]]] = {
    "comparison": (lambda n: hidden(n, earlier(n)), (True, -1, -1)),
    "large negative": (lambda n: hidden(n, earlier(n), -3e38), (True, -1, -1)),
    "window": (lambda n: hidden(n, near(n)), (True, 3, -1)),
    "upper triangle": (triangle, (True, -1, -1)),
    "lower triangle": (below, (True, -1, -1)),
    "more axes": (lambda n: n.op("Unsqueeze", triangle(n), n.ints(0, 1)), (True, -1, -1)),
    "expanded": (lambda n: n.op("Expand", hidden(n, earlier(n)), n.ints(2, 3, S, S)), (True, -1, -1)),
}


def attention(mask: Make) -> Graph:
    n = Net()
    q, k, v = (n.input(2, 3, S, 4, name=name) for name in "qkv")
    scores = n.op("Add", n.op("MatMul", q, n.transposed(k, 0, 1, 3, 2)), mask(n))
    return n.done(n.op("MatMul", n.op("Softmax", scores), v))


def fused(graph: Graph, *, limit: int = 4) -> dict[str, int]:
    """Kinds after folding, which makes no constants of more bytes than ``limit``, and the fusion of attention."""
    FoldConstants()(graph, PassContext(fold_limit_bytes=limit))
    FuseAttention()(graph)
    return graph.kinds()


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_becomes_attributes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "BLOCK", 5 * S)
    make, sight = MASKS[name]
    graph = attention(make)
    exact, feeds = promote(graph), {k: np.random.default_rng(1).standard_normal((2, 3, S, 4)) for k in "qkv"}
    assert not any(op.kind == "Constant" and op.attrs.value.size >= S * S for op in graph.ops())
    assert fused(graph).keys() == {"Attention"}
    (op,) = graph.of_kind("Attention")
    assert (op.attrs.is_causal, op.attrs.left_window_size, op.attrs.right_window_size) == sight
    assert len(op.inputs) == 3
    assert "Add" in " ".join(op.src)
    (want,), (got,) = evaluate(exact, feeds).values(), evaluate(promote(graph), feeds).values()
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    before = graph.kinds()
    FuseAttention()(graph)
    assert graph.kinds() == before


def holes(n: Net) -> Value:
    """All within a window are shown but one."""
    return hidden(
        n, n.op("And", earlier(n), n.op("Not", n.op("Equal", ints(n, S), n.op("Sub", ints(n, S, 1), n.ints(2)))))
    )


def of_heads(n: Net) -> Value:
    """The first head sees two later keys, the second one and the third none."""
    later = n.op("Add", ints(n, 1, S), n.const(np.arange(3).reshape(3, 1, 1), np.int64))
    return hidden(n, n.op("Less", later, n.op("Add", ints(n, S, 1), n.ints(3))))


OTHERS: dict[str, Make] = {
    "holes": holes,
    "own position hidden": lambda n: hidden(n, n.op("Less", ints(n, S), ints(n, S, 1))),
    "numbers": lambda n: n.op("Cast", n.op("Sub", ints(n, S), ints(n, S, 1)), attrs=CastAttrs(np.dtype(np.float32))),
    "an input": lambda n: n.op("Add", hidden(n, earlier(n)), n.input(1, 1, S, S, name="m")),
    "another operator": lambda n: n.op("Softplus", hidden(n, earlier(n))),
    "masks of heads": of_heads,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay_operands(name: str) -> None:
    graph = attention(OTHERS[name])
    fused(graph)
    (op,) = graph.of_kind("Attention")
    assert not op.attrs.is_causal
    assert op.attrs.left_window_size == op.attrs.right_window_size == -1
    assert len(op.inputs) == 4


def test_a_mask_of_too_many_elements_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_mask, "LARGEST", S * S - 1)
    graph = attention(MASKS["comparison"][0])
    fused(graph)
    assert not graph.of_kind("Attention")[0].attrs.is_causal


@pytest.mark.parametrize("name", [*MASKS, "holes", "numbers", "masks of heads"])
def test_rows_are_those_of_the_whole_matrix(name: str) -> None:
    n = Net()
    y: Any = MASKS[name][0](n) if name in MASKS else OTHERS[name](n)
    graph = n.done(y)
    (whole,) = evaluate(graph, {}).values()
    for first, stop in ((0, 5), (5, 6), (6, S)):
        rows = constant_rows(graph, y, first, stop)
        assert rows is not None
        assert rows.dtype == whole.dtype
        assert np.array_equal(np.broadcast_to(rows, whole[..., first:stop, :].shape), whole[..., first:stop, :])


def test_a_diagonal_that_is_an_input_is_not_known() -> None:
    n = Net()
    full = n.op("Expand", n.const(-np.inf), n.ints(S, S))
    y: Any = n.op("Trilu", full, n.input(name="k", dtype=np.int64), attrs=TriluAttrs(upper=True))
    assert constant_rows(n.done(y), y, 0, 2) is None
