"""pad_heads: attention heads get a multiple of 8 features, by zeros in the weights around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs, RotaryAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LpNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.pad_heads import PadHeads

HALF = PassContext(target="cuda:sm_90a", precision="fp16")
B, N, H, D = 2, 16, 2, 6
"""Sequences, tokens, heads, and features of a head."""
C = H * D


def heads(n: Net, x: Value, features: int = D) -> Value:
    split = n.op("Reshape", x, n.ints(B, N, H, features))
    return n.op("Transpose", split, attrs=TransposeAttrs((0, 2, 1, 3)))


def attend(n: Net, q: Value, k: Value, v: Value, *more: Any, **attrs: Any) -> Value:
    return n.op("Attention", q, k, v, *more, attrs=AttentionAttrs(**attrs))


def merged(n: Net, y: Value, features: int = D) -> Value:
    return n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))), n.ints(B, N, H * features))


def tokens(n: Net) -> Value:
    return n.op("Relu", n.input(B, N, C))


def separate(widths: tuple[int, int, int] = (D, D, D), **attrs: Any) -> Graph:
    n = Net(np.float64)
    x = tokens(n)
    parts = [heads(n, n.op("Add", n.matmul(x, H * w), n.random(H * w)), w) for w in widths]
    y = merged(n, attend(n, *parts, **attrs), widths[2])
    return n.done(n.op("Add", n.matmul(y, C), n.random(C)))


def features(graph: Graph) -> set[int]:
    (op,) = graph.of_kind("Attention")
    return {graph.type(v).static_shape[-1] for v in (*op.inputs[:3], op.value) if v is not None}


def only_weights(graph: Graph) -> bool:
    """Whether the zeros cost no operator."""
    return not graph.of_kind("Pad", "Slice")


@pytest.mark.parametrize("attrs", [{}, {"scale": 0.3}, {"is_causal": True}])
def test_zeros_stand_in_the_weights(attrs: dict[str, Any]) -> None:
    graph = separate(**attrs)
    after, _ = check_pass(PadHeads(), graph, changes=1, context=HALF, kinds=graph.kinds())
    assert features(after) == {8}
    assert sorted(after.type(op.inputs[1]).static_shape for op in after.of_kind("MatMul")) == [(C, 16)] * 3 + [(16, C)]


@pytest.mark.parametrize("packed", ["gather", "split", "columns", "equal columns", "slices of columns"])
def test_one_projection_of_queries_keys_and_values(packed: str) -> None:
    n = Net(np.float64)
    x = n.gemm(n.op("Reshape", tokens(n), n.ints(B * N, C)), 3 * C, trans_b=True)
    if packed.endswith("columns"):
        whole = n.op("Reshape", x, n.ints(B, N, 3 * C))
        equal = packed == "equal columns"  # without sizes, as exporters write chunk()
        sizes = () if equal else (n.ints(C, C, C),)
        if packed == "slices of columns":
            parts = [n.op("Slice", whole, n.ints(C * i), n.ints(C * (i + 1)), n.ints(2)) for i in range(3)]
        else:
            parts = n.op("Split", whole, *sizes, attrs=SplitAttrs(2, num_outputs=3 if equal else None), outputs=3)
        parts = [heads(n, p) for p in parts]
    else:
        whole = n.op("Reshape", x, n.ints(B, N, 3, H, D))
        whole = n.op("Transpose", whole, attrs=TransposeAttrs((2, 0, 3, 1, 4)))
        if packed == "gather":
            parts = [n.op("Gather", whole, n.const(i, np.int64), attrs=GatherAttrs(0)) for i in range(3)]
        else:
            parts = n.op("Split", whole, n.ints(1, 1, 1), attrs=SplitAttrs(axis=0), outputs=3)
            parts = [n.op("Reshape", p, n.ints(B, H, N, D)) for p in parts]
    y = merged(n, attend(n, *parts))
    graph = n.done(n.matmul(y, C))
    after, _ = check_pass(PadHeads(), graph, changes=1, context=HALF, kinds=graph.kinds())
    assert features(after) == {8}


def test_norms_and_factors_of_heads() -> None:
    """Cosine attention."""
    n = Net(np.float64)
    x = tokens(n)
    q, k = (n.op("LpNormalization", heads(n, n.matmul(x, C)), attrs=LpNormAttrs(3, 2)) for _ in range(2))
    q = n.op("Mul", q, n.positive(H, 1, 1))
    y = attend(n, q, k, heads(n, n.matmul(x, C)), n.random(1, H, N, N), scale=1.0)
    graph = n.done(n.matmul(merged(n, y), C))
    check_pass(PadHeads(), graph, changes=1, context=HALF, kinds=graph.kinds())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [0, 4])
def test_rotary_embeddings_leave_zeros_after_a_head(turned: int, interleaved: bool, own: bool) -> None:
    """Moonshine."""
    n = Net(np.float64)
    x = tokens(n)
    tables = [n.random(1, N, (turned or D) // (1 if own else 2)) for _ in range(2)]
    attrs = RotaryAttrs(interleaved, turned, own)
    q, k = (n.op("RotaryEmbedding", heads(n, n.matmul(x, C)), *tables, attrs=attrs) for _ in range(2))
    graph = n.done(n.matmul(merged(n, attend(n, q, k, heads(n, n.matmul(x, C)))), C))
    after, _ = check_pass(PadHeads(), graph, changes=1, context=HALF, kinds=graph.kinds())
    assert features(after) == {8}
    assert {op.attrs.rotary_embedding_dim for op in after.of_kind("RotaryEmbedding")} == {turned or D}


def test_projections_of_images() -> None:
    n = Net(np.float64)
    x = n.op("Relu", n.input(B, C, 4, 4))
    whole = n.op("Reshape", n.conv(x, 3 * C, 1, pads=0), n.ints(B, 3, H, D, 16))
    parts = [n.op("Gather", whole, n.const(i, np.int64), attrs=GatherAttrs(1)) for i in range(3)]
    parts = [n.op("Transpose", p, attrs=TransposeAttrs((0, 1, 3, 2))) for p in parts]
    y = n.op("Transpose", attend(n, *parts), attrs=TransposeAttrs((0, 1, 3, 2)))
    y = n.op("Reshape", y, n.ints(B, C, 4, 4))
    graph = n.done(n.conv(y, 5, 1, pads=0))
    after, _ = check_pass(PadHeads(), graph, changes=1, context=HALF, kinds=graph.kinds())
    assert features(after) == {8}


def test_values_of_another_width() -> None:
    after, _ = check_pass(PadHeads(), separate((8, 8, 12)), changes=1, context=HALF)
    assert features(after) == {8, 16}
    assert only_weights(after)
    after, _ = check_pass(PadHeads(), separate((12, 12, 8)), changes=1, context=HALF)
    assert features(after) == {8, 16}
    assert only_weights(after)


def test_other_readers_of_the_heads_take_their_features() -> None:
    n = Net(np.float64)
    x = tokens(n)
    graph = n.done(n.op("Tanh", attend(n, *(heads(n, n.matmul(x, C)) for _ in range(3)))))
    after, _ = check_pass(PadHeads(), graph, changes=1, context=HALF)
    assert after.kinds() == {**graph.kinds(), "Slice": 1}


def test_heads_of_a_shared_projection_are_padded_by_launches() -> None:
    """Many tokens: the scores take longer than padded copies. The keys' projection is also read by another operator."""
    n = Net(np.float64)
    x = n.op("Relu", n.input(1, 1024, C))
    q, k, v = (n.matmul(x, C) for _ in range(3))

    def split(y: Value) -> Value:
        return n.op("Transpose", n.op("Reshape", y, n.ints(1, 1024, H, D)), attrs=TransposeAttrs((0, 2, 1, 3)))

    y = n.op("Transpose", attend(n, split(q), split(k), split(v)), attrs=TransposeAttrs((0, 2, 1, 3)))
    graph = n.done(n.matmul(n.op("Reshape", y, n.ints(1, 1024, C)), C), n.op("Tanh", k))
    after, _ = check_pass(PadHeads(), graph, changes=1, context=HALF)
    assert after.kinds() == {**graph.kinds(), "Pad": 1}
    assert features(after) == {8}


def test_other_operators_before_the_heads() -> None:
    n = Net(np.float64)
    x = tokens(n)
    graph = n.done(attend(n, *(n.op("Tanh", heads(n, n.matmul(x, C))) for _ in range(3))))
    check_refused(PadHeads(), graph, because="do not all come from projections", context=HALF)


@pytest.mark.parametrize(("begin", "step"), [(3, 1), (0, 3)])
def test_slices_of_parts_of_heads(begin: int, step: int) -> None:
    n = Net(np.float64)
    x = n.matmul(tokens(n), 3 * C)
    limits = [
        [n.ints(begin + i * (C if step == 1 else 1)), n.ints(begin + C + i * C if step == 1 else 3 * C)]
        for i in range(2)
    ]
    q, k = (n.op("Slice", x, *limit, n.ints(2), n.ints(step)) for limit in limits)
    graph = n.done(attend(n, *(heads(n, part) for part in (q, k, n.matmul(tokens(n), C)))))
    check_refused(PadHeads(), graph, because="do not all come from projections", context=HALF)


def test_a_projection_with_other_readers_stays() -> None:
    n = Net(np.float64)
    x = tokens(n)
    q, k, v = (n.matmul(x, C) for _ in range(3))
    y = merged(n, attend(n, *(heads(n, p) for p in (q, k, v))))
    graph = n.done(n.matmul(y, C), n.op("Tanh", k))
    check_refused(PadHeads(), graph, because="do not all come from projections", context=HALF)


@pytest.mark.parametrize("width", [1, C])
def test_a_bias_of_one_element_is_none_of_features(width: int) -> None:
    """Of heads of one feature each, its last axis would be a whole number of heads."""
    n = Net(np.float64)
    x = n.op("Reshape", tokens(n), n.ints(B * N, C))
    parts = []
    for _ in range(3):
        y = n.op("Gemm", x, n.random(C, C), n.random(width), attrs=GemmAttrs())
        y = n.op("Reshape", y, n.ints(B, N, C, 1))
        parts.append(n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3))))
    y = n.op("Transpose", attend(n, *parts), attrs=TransposeAttrs((0, 2, 1, 3)))
    graph = n.done(n.matmul(n.op("Reshape", y, n.ints(B, N, C)), C))
    if width == C:
        check_pass(PadHeads(), graph, changes=1, context=HALF)
    else:
        check_refused(PadHeads(), graph, because="do not all come from projections", context=HALF)


def test_attention_between_channels_has_tokens_for_features() -> None:
    """XCiT: no weights have an axis of tokens."""
    n = Net(np.float64)
    x = n.op("Relu", n.input(B, 20, C))
    split = n.op(
        "Transpose", n.op("Reshape", n.matmul(x, 3 * C), n.ints(B, 20, 3, H, D)), attrs=TransposeAttrs((2, 0, 3, 4, 1))
    )
    parts = [n.op("Gather", split, n.const(i, np.int64), attrs=GatherAttrs(0)) for i in range(3)]
    check_refused(PadHeads(), n.done(attend(n, *parts)), because="do not all come from projections", context=HALF)


def test_few_scores_are_cheaper_than_a_copy() -> None:
    n = Net(np.float64)
    x = n.input(1, 2, 100)
    parts = [n.op("Reshape", n.matmul(x, 100), n.ints(1, 1, 2, 100)) for _ in range(3)]
    check_refused(PadHeads(), n.done(n.op("Tanh", attend(n, *parts))), because="a copy of its result", context=HALF)


def test_a_cache_stays() -> None:
    n = Net(np.float64)
    parts = [n.input(B, H, N, D, name=f"x{i}") for i in range(5)]
    graph = n.done(attend(n, *parts[:3], None, *parts[3:]))
    check_refused(PadHeads(), graph, because="also outputs", context=HALF)


def test_networks_without_a_candidate() -> None:
    check_untouched(PadHeads(), separate((8, 8, 16)), HALF)
    wide = Net()
    parts = [wide.input(B, H, N, D, name=f"x{i}") for i in range(3)]
    check_untouched(PadHeads(), wide.done(attend(wide, *parts)), PassContext(target="cuda:sm_90a"))  # attention in fp32


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_a_kernel_of_16_bits_takes_it(target: str) -> None:
    n = Net()
    x = tokens(n)
    parts = [heads(n, n.op("Add", n.matmul(x, C), n.random(C))) for _ in range(3)]
    graph = n.done(n.op("Add", n.matmul(merged(n, attend(n, *parts)), C), n.random(C)))
    program = check_simulated(graph, target=target)
    tactics = {str(s.params.get("tactic")).split()[0] for s in program.steps}
    assert "attention_steps" not in tactics
    assert {"attention_sm90", "attention_sm80"} & tactics
