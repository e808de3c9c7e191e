"""Networks whose last launch makes fp32 of its result, by the name of its tactic."""

from __future__ import annotations

from collections.abc import Callable

from optdnn.ir.graph import Graph
from optdnn.ops.softmax import SoftmaxAttrs
from support.net import Net


def classifier(rows: int = 64, units: int = 48, depth: int = 64) -> Graph:
    n = Net()
    y = n.matmul(n.op("Tanh", n.input(rows, depth)), units)
    return n.done(n.op("Relu", n.op("Add", y, n.random(units))))


def normalized(kind: str = "LayerNormalization", length: int = 96) -> Graph:
    n = Net()
    y = n.matmul(n.input(2, 9, 32), length)
    if kind == "Softmax":
        return n.done(n.op(kind, y, attrs=SoftmaxAttrs(-1)))
    more = [n.random(length)] if kind == "LayerNormalization" else []
    return n.done(n.op(kind, y, n.positive(length), *more))


def pointwise() -> Graph:
    n = Net()
    x, y = n.input(4, 6), n.input(4, 6, name="y")
    return n.done(n.op("Tanh", n.op("Mul", n.op("Softmax", x), n.op("Softmax", y))))


WIDENED: dict[str, tuple[str, Callable[[], Graph]]] = {
    "rows": ("gemm_widened_sm90", classifier),
    "one row": ("gemv_widened", lambda: classifier(1, 1000, 1024)),
    "layer norm": ("rows_widened", normalized),
    "RMS norm": ("rows_widened", lambda: normalized("RMSNormalization", 100)),
    "softmax": ("rows_widened", lambda: normalized("Softmax", 1000)),
    "pointwise": ("pointwise_widened", pointwise),
}
"""Name -> the last launch's tactic, and the network."""
