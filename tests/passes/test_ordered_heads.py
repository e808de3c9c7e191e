"""ordered_heads and ordered_results: attention whose heads have alternate channels of convolutions (SuperGlue)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.fuse_attention import FuseAttention

B, H, D = 2, 4, 8
C = H * D
RULES = {"ordered_heads": 3, "ordered_results": 1}
OUTER = (0, 2, 3, 1)
"""(features, heads) -> heads, tokens, features."""


def heads(n: Net, y: Value, tokens: tuple[int, ...], first: bool = False) -> Value:
    """Heads of an image; ``first``: the channels are (heads, features)."""
    count = math.prod(tokens)
    split = n.op("Reshape", y, n.ints(B, H, D, count) if first else n.ints(B, D, H, count))
    return n.op("Transpose", split, attrs=TransposeAttrs((0, 1, 3, 2) if first else OUTER))


def joined(n: Net, y: Value, tokens: tuple[int, ...], first: bool = False) -> Value:
    back = n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 3, 2) if first else (0, 3, 1, 2)))
    return n.op("Reshape", back, n.ints(B, C, *tokens))


def network(
    n: Net, tokens: tuple[int, ...] = (10,), *, first: bool = False, bias: bool = True, group: int = 1, more: str = ""
) -> Graph:
    """``more`` is read by others, too: the heads of the queries, or the joined result."""
    x, other = n.op("Relu", n.input(B, C, *tokens)), n.op("Relu", n.input(B, C, *tokens, name="y"))
    made = [n.conv(v, C, 1, pads=0, bias=bias, group=group) for v in (x, other, other)]
    q, k, v = (heads(n, m, tokens, first) for m in made)
    y = joined(n, n.op("Attention", q, k, v, attrs=AttentionAttrs(scale=D**-0.5)), tokens, first)
    z = n.conv(y, C, 1, pads=0, bias=bias, group=group)
    return n.done(z, *([n.op("Tanh", {"q": made[0], "y": y}[more])] if more else []))


@pytest.mark.parametrize("tokens", [(10,), (3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_alternate_channels(tokens: tuple[int, ...], bias: bool) -> None:
    graph = network(Net(np.float64), tokens, bias=bias)
    after, _ = check_pass(FuseAttention(), graph, changes=4, rules=RULES)
    shapes = sorted({after.type(op.value).static_shape for op in after.of_kind("Reshape")}, key=len)
    assert (B, H, D, math.prod(tokens)) in shapes
    assert (B, D, H, math.prod(tokens)) not in shapes


def test_written_attention() -> None:
    """The attention is recognized after the convolution of its result was looked at: its matrices are transposed."""
    n = Net(np.float64)
    x, other = n.op("Relu", n.input(B, C, 10)), n.op("Relu", n.input(B, C, 12, name="y"))
    q, k, v = (n.op("Reshape", n.conv(t, C, 1, pads=0), n.ints(B, D, H, -1)) for t in (x, other, other))
    turned, keys, values = (n.transposed(t, *perm) for t, perm in ((q, OUTER), (k, (0, 2, 1, 3)), (v, (0, 2, 1, 3))))
    scores = n.op("Softmax", n.op("Mul", n.op("MatMul", turned, keys), D**-0.5), attrs=SoftmaxAttrs(3))
    y = n.transposed(n.op("MatMul", values, n.transposed(scores, 0, 1, 3, 2)), 0, 2, 1, 3)
    graph = n.done(n.conv(n.op("Reshape", y, n.ints(B, C, 10)), C, 1, pads=0))
    after, _ = check_pass(
        FuseAttention(),
        graph,
        changes=sum(RULES.values()) + 2,
        rules={**RULES, "attention": 1, "values_first": 1},
    )
    assert not [op for op in after.of_kind("Transpose") if op.attrs.perm != (0, 1, 3, 2)]


def test_consecutive_channels_stay() -> None:
    check_untouched(FuseAttention(), network(Net(), first=True))


def test_groups_of_channels_stay() -> None:
    check_refused(FuseAttention(), network(Net(), group=2), because="or they are grouped", rule="ordered_heads")
    check_refused(FuseAttention(), network(Net(), group=2), because="or they are grouped", rule="ordered_results")


@pytest.mark.parametrize(
    ("more", "rules"), [("q", {"ordered_heads": 2, "ordered_results": 1}), ("y", {"ordered_heads": 3})]
)
def test_channels_that_others_read_stay(more: str, rules: dict[str, int]) -> None:
    check_pass(FuseAttention(), network(Net(np.float64), more=more), changes=sum(rules.values()), rules=rules)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_nothing_is_copied(precision: str) -> None:
    program = check_simulated(network(Net(), (16,)), precision)
    assert "copy" not in kinds(program)
