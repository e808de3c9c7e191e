"""fuse_attention on attention with sinks (gpt-oss): a further column of the scores, a number per head, dropped after softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.fuse_attention import FuseAttention

B, H, L, D = 2, 3, 5, 4
SINKS = np.array([2.0, -1.0, 3.5])
PASS = FuseAttention()


def net(
    *, column: Callable[[Net, Value], Value] | None = None, mask: Any = None, batch: Any = B, length: Any = L, keys: int = 0,
    dtype: Any = np.float64, shared: int = H, wide: bool = False, shifted: bool = False, dropped: int = 1, axis: int = -1,
    begin: int = 0, kept: int = 0, shown: bool = False, softcap: float = 0.0,
) -> Graph:  # fmt: skip
    """``softmax([mask(q k^T / 2), column])`` without its last weights, times v.

    ``column`` makes it from the scores. ``kept``: number of columns that have a value."""
    n = Net(dtype)
    q = n.input(batch, H, length, D, name="q")
    k, v = (n.input(batch, shared, (keys or length) + more, D, name=name) for name, more in (("k", 0), ("v", kept)))
    if shared != H:
        k, v = (n.op("Expand", x, n.ints(1, H, 1, 1)) for x in (k, v))
    s = n.op("Mul", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))), 0.5)
    if softcap:
        s = n.op("Mul", n.op("Tanh", n.op("Div", s, softcap)), softcap)
    if mask is not None:
        s = n.op("Add", s, n.const(mask))
    joined = n.op("Concat", s, (column or full)(n, s), attrs=ConcatAttrs(axis))
    if shifted:
        top = n.op("ReduceMax", joined, n.ints(-1), attrs=ReduceAttrs(True))
        joined = n.op("Sub", joined, top)
    if wide:
        joined = n.op("Cast", joined, attrs=cast(np.float64))
    p = n.op("Softmax", joined, attrs=SoftmaxAttrs(-1))
    weights = n.op("Slice", p, n.ints(begin), n.ints(-dropped if begin == 0 else 100), n.ints(-1))
    weights = n.op("Cast", weights, attrs=cast(dtype)) if wide else weights
    return n.done(n.op("MatMul", weights, v), *([p] if shown else []))


def cast(dtype: Any) -> Any:
    return CastAttrs(np.dtype(dtype))


def full(n: Net, s: Value) -> Value:
    """As constant folding leaves it: a number for each row."""
    return n.const(np.broadcast_to(SINKS[:, None, None], (B, H, L, 1)))


def expanded(n: Net, s: Value) -> Value:
    q = next(op.value for op in (n.graph.op(i) for i in n.graph.inputs) if op.outputs[0].name == "q")
    rows = n.op("Slice", n.op("Shape", q), n.ints(0), n.ints(3), n.ints(0))
    shape = n.op("Concat", rows, n.ints(1), attrs=ConcatAttrs(0))
    return n.op("Expand", n.const(SINKS.reshape(1, H, 1, 1)), shape)  # type: ignore[no-any-return]


def computed(n: Net, s: Value) -> Value:
    given = n.op("Reshape", n.op("Tanh", n.input(H, name="sinks")), n.ints(1, H, 1, 1))
    return n.op("Expand", given, n.ints(B, H, L, 1))  # type: ignore[no-any-return]


def alone(n: Net, s: Value) -> Value:
    return n.op("Reshape", n.op("Tanh", n.input(H, name="sinks")), n.ints(1, H, 1, 1))  # type: ignore[no-any-return]


def per_query(n: Net, s: Value) -> Value:
    return n.const(np.arange(B * H * L).reshape(B, H, L, 1))


def two(n: Net, s: Value) -> Value:
    return n.const(np.zeros((B, H, L, 2)))


def attention(graph: Graph) -> Op:
    (op,) = graph.of_kind("Attention")
    return op


TAKEN: dict[str, dict[str, Any]] = {
    "a constant of each row": {},
    "expanded, sizes unknown": {"column": expanded, "batch": symbol("b"), "length": symbol("n")},
    "computed": {"column": computed},
    "one query": {"column": alone, "batch": 1, "length": 1, "keys": 7},
    "a softcap": {"softcap": 3.0},
    "shared keys": {"shared": 1},
    "a mask": {"mask": np.random.default_rng(0).standard_normal((B, 1, L, L))},
}


@pytest.mark.parametrize("name", TAKEN)
def test_forms(name: str) -> None:
    graph, _ = check_pass(PASS, net(**TAKEN[name]), changes=1)
    sinks = attention(graph).input(7)
    assert sinks is not None
    assert graph.type(sinks).shape == (H,)
    known = graph.constant_value(sinks)
    assert known is None or (known == SINKS).all()
    assert not {"Softmax", "MatMul"} & graph.kinds().keys()


def test_a_window_needs_no_mask() -> None:
    behind = np.arange(L)[:, None] - np.arange(L)
    mask = np.where((behind < 0) | (behind > 2), np.finfo(np.float32).min, 0.0)
    graph, _ = check_pass(PASS, net(mask=mask, dtype=np.float32), changes=1, kinds={"Attention": 1})
    a = attention(graph).attrs
    assert (a.is_causal, a.left_window_size) == (True, 2)
    assert attention(graph).input(3) is None


def test_a_large_bias_is_not_moved_against_the_sinks() -> None:
    """Without sinks, the largest number of each row would be subtracted from it."""
    bias = 100.0 * np.arange(L) - 400.0
    mask = np.where(np.triu(np.ones((L, L)), 1), -1e9, bias)
    graph, _ = check_pass(PASS, net(mask=mask), changes=1)
    assert attention(graph).attrs.is_causal
    rest = graph.constant_value(attention(graph).input(3))
    assert rest is not None
    assert (rest[..., -1, :] == bias).all()


def test_a_query_without_keys_gives_zeros() -> None:
    """Without sinks this is refused: exporters' attention would give NaN."""
    mask = np.zeros((L, L))
    mask[1] = -np.inf
    graph, _ = check_pass(PASS, net(mask=mask), changes=1)
    assert attention(graph).input(7) is not None


def test_a_wider_softmax() -> None:
    graph, _ = check_pass(PASS, net(dtype=np.float32, wide=True), changes=1, promoted_changes=0, kinds={"Attention": 1})
    assert attention(graph).attrs.softmax_precision == np.float64


REFUSED: dict[str, dict[str, Any]] = {
    "the sinks are not one number per head": {"column": per_query},
    "the weights of the last key are dropped, and it is no column of sinks": {"column": two, "kept": 1},
    "an inner value is an output of the network": {"shown": True},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(PASS, net(**REFUSED[why]), because=why)


def test_weights_without_their_last_key_are_refused() -> None:
    n = Net(np.float64)
    q, k, v = (n.input(B, H, size, D, name=name) for name, size in (("q", L), ("k", L + 1), ("v", L)))
    s = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    p = n.op("Slice", n.op("Softmax", s, attrs=SoftmaxAttrs(-1)), n.ints(0), n.ints(-1), n.ints(-1))
    check_refused(PASS, n.done(n.op("MatMul", p, v)), because="the weights of the last key are dropped")


def test_sinks_of_another_type_are_refused() -> None:
    """The scores are converted before the column is added."""
    n = Net(np.float32)
    q, k, v = (n.input(B, H, L, D, name=name) for name in "qkv")
    s = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))))
    column = n.const(np.broadcast_to(SINKS[:, None, None], (B, H, L, 1)), np.float64)
    joined = n.op("Concat", n.op("Cast", s, attrs=cast(np.float64)), column, attrs=ConcatAttrs(-1))
    p = n.op("Slice", n.op("Softmax", joined, attrs=SoftmaxAttrs(-1)), n.ints(0), n.ints(-1), n.ints(-1))
    graph = n.done(n.op("MatMul", n.op("Cast", p, attrs=cast(np.float32)), v))
    check_refused(PASS, graph, because="the sinks are float64, the values float32")


@pytest.mark.parametrize("options", [{"begin": 1}, {"column": two, "dropped": 2}], ids=["the first key", "two keys"])
def test_other_slices_are_no_candidates(options: dict[str, Any]) -> None:
    check_untouched(PASS, net(**options))


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_the_exported_form_is_one_launch(target: str) -> None:
    """As Hugging Face's gpt-oss: the largest logit is subtracted before the softmax."""
    n = Net()
    x = n.input(2, 40, 64)
    q, k, v = (
        n.op("Transpose", n.op("Reshape", n.matmul(x, 64), n.ints(2, 40, 4, 16)), attrs=TransposeAttrs((0, 2, 1, 3)))
        for _ in range(3)
    )
    s = n.op("Mul", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))), 0.25)
    s = n.op("Add", s, n.const(np.triu(np.full((40, 40), np.finfo(np.float32).min), 1)))
    column = n.op("Expand", n.random(1, 4, 1, 1, offset=2.0), n.ints(2, 4, 40, 1))
    joined = n.op("Concat", s, column, attrs=ConcatAttrs(-1))
    joined = n.op("Sub", joined, n.op("ReduceMax", joined, n.ints(-1), attrs=ReduceAttrs(True)))
    p = n.op("Slice", n.op("Softmax", joined, attrs=SoftmaxAttrs(-1)), n.ints(0), n.ints(-1), n.ints(-1))
    y = n.op("Transpose", n.op("MatMul", p, v), attrs=TransposeAttrs((0, 2, 1, 3)))
    program = check_simulated(n.done(n.matmul(n.op("Reshape", y, n.ints(2, 40, 64)), 32)), target=target)
    found = kinds(program)
    assert found.count("Attention") == 1
    assert not {"Softmax", "Concat", "MatMul"} & set(found)
