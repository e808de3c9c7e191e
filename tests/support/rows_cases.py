"""Networks of norms and softmaxes of rows, for :mod:`optdnn.kernels.norm.rows_grid`: short and long rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optdnn.ir.graph import Graph
from optdnn.ops import norm, shape, softmax
from support.net import Net, built


def _turned(n: Net, *sizes: int, groups: int) -> Any:
    x = n.op("Transpose", n.input(*sizes), attrs=shape.TransposeAttrs((0, 3, 1, 2)))
    channels = sizes[-1]
    return n.op("GroupNormalization", x, n.positive(channels), n.random(channels), attrs=norm.GroupNormAttrs(groups))


CASES: dict[str, Callable[[Net], Any]] = {
    "softmax": lambda n: n.op("Softmax", n.input(2, 700, 3), attrs=softmax.SoftmaxAttrs(1)),
    "log softmax": lambda n: n.op("LogSoftmax", n.input(3, 41, 2), attrs=softmax.SoftmaxAttrs(1)),
    "group norm of a transposed image": lambda n: _turned(n, 2, 9, 7, 12, groups=3),
    "group norm of one group": lambda n: _turned(n, 2, 8, 5, 6, groups=1),
    "instance norm": lambda n: n.op(
        "InstanceNormalization",
        n.op("Transpose", n.input(2, 5, 3, 4), attrs=shape.TransposeAttrs((0, 3, 1, 2))),
        n.positive(4),
        n.random(4),
    ),
    "layer norm over three axes": lambda n: n.op(
        "LayerNormalization",
        n.op("Transpose", n.input(2, 5, 6, 4), attrs=shape.TransposeAttrs((0, 3, 1, 2))),
        n.random(4, 5, 6),
        n.random(4, 5, 6),
        attrs=norm.LayerNormAttrs(1, 1e-3),
    ),
    "RMS norm": lambda n: n.op(
        "RMSNormalization", n.op("Transpose", n.input(40, 6), attrs=shape.TransposeAttrs((1, 0))), n.random(40)
    ),
    "lp": lambda n: n.op("LpNormalization", n.input(2, 33, 5), attrs=norm.LpNormAttrs(1, 2)),
    "lp of sums": lambda n: n.op("LpNormalization", n.input(2, 33, 5), attrs=norm.LpNormAttrs(1, 1, 1.5)),
    "mean and variance": lambda n: n.op("MeanVarianceNormalization", n.input(2, 3, 9, 7)),
}
"""Rows of every kind. Only tests divide them."""

LONG: dict[str, Callable[[Net], Any]] = {
    "long group norm": lambda n: _turned(n, 1, 32, 32, 130, groups=1),
    "long group norms of 16": lambda n: _turned(n, 16, 32, 32, 130, groups=1),
    "softmax over a first axis": lambda n: n.op("Softmax", n.input(60_000, 2), attrs=softmax.SoftmaxAttrs(0)),
    "softmax of a vocabulary": lambda n: n.op("Softmax", n.input(2, 151_936), attrs=softmax.SoftmaxAttrs(-1)),
    "long mean and variance": lambda n: n.op("MeanVarianceNormalization", n.input(2, 3, 200, 201)),
    "long lp": lambda n: n.op("LpNormalization", n.input(2, 100_000, 3), attrs=norm.LpNormAttrs(1, 2)),
}
"""Rows that are long enough that builds divide them."""


def case(name: str) -> Graph:
    """The network of one of :data:`CASES` or :data:`LONG`."""
    return built({**CASES, **LONG}[name])
