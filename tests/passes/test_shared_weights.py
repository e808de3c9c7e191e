"""shared_weights: products of one softmax with several values become one, which attention then takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import ReshapeAttrs, TransposeAttrs
from optdnn.passes.fuse_attention import FuseAttention

B, H, L, D = 2, 4, 6, 8


def values(n: Net, name: str, heads: int = H, batch: object = B) -> Value:
    """Values, of fewer heads that are repeated or not."""
    v = n.input(batch, heads, L, D, name=name)
    if heads == H:
        return v
    v = n.op("Unsqueeze", v, n.ints(2))
    v = n.op("Expand", v, n.ints(B, heads, H // heads, L, D))
    return n.op("Reshape", v, n.ints(B, H, L, D), attrs=ReshapeAttrs())


def differential(
    *, heads: tuple[int, int] = (H, H), keys: int = H, guarded: bool = False, used: bool = False, axis: int = 3, batch: object = B,
    soft: str = "Softmax",
) -> Graph:  # fmt: skip
    """Two attentions with the same weights, side by side."""
    n = Net(np.float64)
    k = n.op("Transpose", values(n, "k", keys, batch), attrs=TransposeAttrs((0, 1, 3, 2)))
    p = n.op(soft, n.op("MatMul", n.input(batch, H, L, D, name="q"), k))
    if guarded:
        p = n.op("Where", n.op("IsNaN", p), 0.0, p)
    parts = [n.op("MatMul", p, values(n, name, count, batch)) for name, count in zip(("v", "w"), heads, strict=True)]
    y = n.op("Concat", *parts, attrs=ConcatAttrs(axis))
    return n.done(y, n.op("Relu", parts[0])) if used else n.done(y)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("heads", [(H, H), (H, 2)])
def test_values_lie_side_by_side(heads: tuple[int, int], guarded: bool) -> None:
    graph, _ = check_pass(FuseAttention(), differential(heads=heads, guarded=guarded), changes=2)
    assert "MatMul" not in graph.kinds()
    (op,) = [op for op in graph.ops() if op.kind == "Attention"]
    assert graph.type(op.inputs[2]).shape == (B, H, L, 2 * D)  # type: ignore[arg-type]


def test_heads_that_are_repeated_alike_stay_shared() -> None:
    graph, _ = check_pass(FuseAttention(), differential(heads=(2, 2), keys=2), changes=2)
    (op,) = [op for op in graph.ops() if op.kind == "Attention"]
    assert graph.type(op.inputs[2]).shape == (B, 2, L, 2 * D)  # type: ignore[arg-type]


def test_a_symbolic_batch() -> None:
    check_pass(FuseAttention(), differential(batch=symbol("N", 1)), changes=2, sizes={"N": 3})


def test_refused() -> None:
    check_refused(FuseAttention(), differential(used=True), because="a product with its weights is used elsewhere")
    n = Net(np.float64)
    p = n.op("Softmax", n.op("MatMul", n.input(B, H, L, D, name="q"), n.input(B, H, D, L, name="k")))
    parts = [n.op("MatMul", p, n.input(*shape, name=name)) for name, shape in (("v", (B, H, L, D)), ("w", (L, D)))]
    graph = n.done(n.op("Concat", *parts, attrs=ConcatAttrs(3)))
    check_refused(FuseAttention(), graph, because="different leading axes")


@pytest.mark.parametrize(
    "graph", [lambda: differential(axis=1), lambda: differential(soft="Sigmoid")], ids=["heads", "no softmax"]
)
def test_other_products_stay(graph: Callable[[], Graph]) -> None:
    report = FuseAttention()(graph(), None)
    assert report.changes == 0
    assert "shared_weights" not in {refused.rule for refused in report.refused}


def test_repeated_values_are_written_side_by_side() -> None:
    """As DiffLlama has it: halves of the values' heads, each repeated for all."""
    n = Net()
    q, k, v = (n.op("Tanh", n.input(1, H, 16, D, name=name)) for name in "qkv")
    halves = n.op("Split", v, n.ints(H // 2, H // 2), attrs=SplitAttrs(1), outputs=2)
    p = n.op("Softmax", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2)))))
    parts = [n.op("MatMul", p, n.op("Tile", half, n.ints(1, 2, 1, 1))) for half in halves]  # type: ignore[union-attr]
    program = check_simulated(n.done(n.op("Concat", *parts, attrs=ConcatAttrs(3))), tolerance=1e-2)
    assert kinds(program).count("Attention") == 1
    (step,) = (s for s in program.steps if s.params["op"]["kind"] == "Copies")
    assert len(step.params["writes"]) == 2  # each half to its place
