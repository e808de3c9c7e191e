"""turned_features: features of queries and keys that are reordered alike keep their order."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.fuse_attention import FuseAttention

B, H, L, D = 2, 3, 5, 8


def turned(n: Net, x: Value, pairs: bool = True) -> Value:
    """The features as (D / 2, 2), or (2, D / 2), transposed."""
    *lead, size = n.dims(x)
    matrix = (size // 2, 2) if pairs else (2, size // 2)  # type: ignore[operator]
    y = n.op("Reshape", x, n.ints(*lead, *matrix))  # type: ignore[arg-type]
    y = n.op("Transpose", y, attrs=TransposeAttrs((0, 1, 2, 4, 3)))
    return n.op("Reshape", y, n.ints(*lead, size))  # type: ignore[arg-type]


def latent(
    *, shared: bool = True, keys: bool = True, pairs: bool = True, swapped: bool = False, readers: int = 1
) -> Graph:
    """Heads of plain and of turned features. ``shared``: the turned features of keys are those of all heads."""
    n = Net(np.float64)
    plain = [n.input(B, H, L, 4, name=name) for name in ("qn", "kn")]
    q = turned(n, n.op("Exp", n.input(B, H, L, D, name="qr")))
    k = n.op("Exp", n.input(B, 1 if shared else H, L, D, name="kr"))
    k = turned(n, k, pairs) if keys else k
    k = n.op("Expand", k, n.ints(B, H, L, D)) if shared else k
    heads = [
        n.op("Concat", *pair, attrs=ConcatAttrs(3)) for pair in ((plain[0], q), (k, plain[1])[:: 1 if swapped else -1])
    ]
    y = n.op("Attention", *heads, n.input(B, H, L, 4, name="v"), attrs=AttentionAttrs())
    return n.done(y, *(n.op("Neg", heads[1]) for _ in range(readers - 1)))


@pytest.mark.parametrize("shared", [True, False])
def test_turned_parts_of_queries_and_keys(shared: bool) -> None:
    kinds = {"Exp": 2, "Concat": 2, "Attention": 1, **({"Expand": 1} if shared else {})}
    check_pass(FuseAttention(), latent(shared=shared), changes=1, rules={"turned_features": 1}, kinds=kinds)


def test_all_features_are_turned() -> None:
    n = Net(np.float64)
    q, k = (turned(n, n.op("Exp", n.input(B, H, L, D, name=name))) for name in "qk")
    y = n.op("Attention", q, k, n.input(B, H, L, D, name="v"), attrs=AttentionAttrs())
    check_pass(FuseAttention(), n.done(y), changes=1, kinds={"Exp": 2, "Attention": 1})


@pytest.mark.parametrize(
    "graph",
    [latent(keys=False), latent(pairs=False), latent(swapped=True), latent(readers=2)],
    ids=["queries alone", "another order", "another part", "keys that are read elsewhere"],
)
def test_other_features_stay(graph: Graph) -> None:
    check_untouched(FuseAttention(), graph)
