"""summed_attention: attention of one query, written as multiplications and sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_attention import FuseAttention
from optdnn.passes.rules.summed_attention import MOST_ELEMENTS, MOST_FEATURES, MOST_WIDE_ELEMENTS

B, N, D = 2, 12, 16
FIRES = {"summed_attention": 1}
HALF = PassContext(target="cuda:sm_90a", precision="fp16")


def pooled(
    n: Net, keys: Any = N, features: int = D, *, heads: tuple[int, ...] = (), kept: tuple[bool, bool] = (False, False),
    scale: tuple[str, float] | None = ("Mul", 0.25), wide: int = 1, over: int = -2, reduction: str = "ReduceSum",
    more: bool = False,
) -> Graph:  # fmt: skip
    """``kept``: which of the two sums keep their axis. ``wide``: how many times as many values as keys have features.
    ``more``: the weights have another reader."""
    lead = (B, *heads)
    k = n.op("Relu", n.input(*lead, keys, features))
    v = n.op("Tanh", n.input(*lead, keys, features * wide, name="v"))
    q = n.op("Unsqueeze", n.op("Relu", n.input(*lead, features, name="q")), n.ints(-2))
    scores: Value = n.op(reduction, n.op("Mul", k, q), n.ints(-1), attrs=ReduceAttrs(keepdims=kept[0]))
    scores = n.op(scale[0], scores, scale[1]) if scale else scores
    rank = len(lead) + 1 + kept[0]
    weights = n.op("Softmax", scores, attrs=SoftmaxAttrs(rank - 1 - kept[0] if over == -2 else 0))
    read = [n.op("Sqrt", weights)] if more else []
    weights = weights if kept[0] else n.op("Unsqueeze", weights, n.ints(-1))
    y = n.op("ReduceSum", n.op("Mul", weights, v), n.ints(over), attrs=ReduceAttrs(keepdims=kept[1]))
    return n.done(y, *read)


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("kept", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("scale", [None, ("Mul", 0.25), ("Div", 4.0)])
def test_attention_of_one_query(
    heads: tuple[int, ...], kept: tuple[bool, bool], scale: tuple[str, float] | None
) -> None:
    graph = pooled(Net(np.float64), heads=heads, kept=kept, scale=scale)
    after, _ = check_pass(FuseAttention(), graph, changes=1, rules=FIRES)
    (op,) = after.of_kind("Attention")
    assert op.attrs.scale == (0.25 if scale else 1.0)
    assert not list(after.of_kind("Mul", "ReduceSum", "Softmax"))


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"wide": 2}, "keys and values have different shapes"),
        ({"features": MOST_FEATURES + 8, "keys": 3}, f"it has {MOST_FEATURES + 8} features, more than {MOST_FEATURES}"),
        ({"scale": ("Mul", -1.0)}, "the scores are multiplied by -1; a scale is positive"),
        ({"more": True}, "its weights are used elsewhere"),
        ({"keys": MOST_WIDE_ELEMENTS // D + 1}, f"have more than {MOST_WIDE_ELEMENTS} elements: sums read them faster"),
        ({"keys": symbol("n")}, "sums read them faster"),
    ],
)
def test_other_attention_stays(options: dict[str, Any], because: str) -> None:
    check_refused(FuseAttention(), pooled(Net(np.float64), **options), because=because, rule="summed_attention")


def test_more_keys_at_16_bits() -> None:
    most = MOST_ELEMENTS // D
    check_pass(FuseAttention(), pooled(Net(), most), changes=1, rules=FIRES, context=HALF)
    check_refused(FuseAttention(), pooled(Net(), most + 1), because="sums read them faster", context=HALF)


@pytest.mark.parametrize("options", [{"over": 0}, {"reduction": "ReduceMax"}])
def test_other_sums_stay(options: dict[str, Any]) -> None:
    check_untouched(FuseAttention(), pooled(Net(), **options))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_simulated(precision: str) -> None:
    check_simulated(pooled(Net(), 20, 32, scale=("Mul", 0.2)), precision)
