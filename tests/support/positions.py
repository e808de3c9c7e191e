"""Families of operators on kernels over coordinates: several of a kind in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ops import create, gather, index, sort
from optdnn.ops.attention import TensorScatterAttrs
from optdnn.ops.signal import BitCastAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.types import DTYPES, INT64
from support.net import Net


def orders(n: Net) -> list[Any]:
    x = n.input(3, 5, 7)
    whole = n.op("Round", x)  # equal elements
    found: list[Any] = []
    for value, attrs in ((x, sort.TopKAttrs()), (whole, sort.TopKAttrs(1, False)), (whole, sort.TopKAttrs(0))):
        found += n.op("TopK", value, n.ints(3), attrs=attrs, outputs=2)
    lengths = n.input(5, name="lengths", dtype=INT64)
    return [
        *found,
        n.op("Hardmax", whole, attrs=SoftmaxAttrs(1)),
        n.op("Hardmax", x, attrs=SoftmaxAttrs(-1)),
        n.op("ReverseSequence", x, lengths, attrs=sort.ReverseSequenceAttrs(1, 0)),
        n.op("ReverseSequence", n.op("Transpose", x), lengths, attrs=sort.ReverseSequenceAttrs(1, 0)),
    ]


def triangles(n: Net) -> list[Any]:
    x, k = n.input(2, 4, 6), n.input(name="k", dtype=INT64)
    return [
        n.op("Trilu", x), n.op("Trilu", x, k, attrs=create.TriluAttrs(False)), n.op("Trilu", x, n.const(-2, INT64)),
        n.op("Trilu", n.op("Cast", x, attrs=_to("int32")), k),
    ]  # fmt: skip


def _to(name: str) -> Any:
    from optdnn.ops.binary import CastAttrs

    return CastAttrs(DTYPES[name])


def sums(n: Net) -> list[Any]:
    x, axis = n.input(3, 6, 5), n.input(name="axis", dtype=INT64)
    one = n.op("Sub", n.op("Min", axis, n.const(1, INT64)), n.const(1, INT64))  # -1 or 0
    i = n.op("Cast", x, attrs=_to("int64"))
    cum = index.CumulativeAttrs
    return [
        n.op("CumSum", x, n.const(1, INT64)), n.op("CumSum", x, n.const(-1, INT64), attrs=cum(True, False)),
        n.op("CumSum", i, n.const(0, INT64), attrs=cum(False, True)), n.op("CumProd", x, n.const(1, INT64), attrs=cum(True, True)),
        n.op("CumSum", x, one), n.op("CumSum", i, one, attrs=cum(True, True)), n.op("CumProd", x, one, attrs=cum(False, True)),
    ]  # fmt: skip


def scatters(n: Net) -> list[Any]:
    x, u = n.input(4, 5, 6), n.input(2, 5, 3, name="u")
    i = n.input(2, 5, 3, name="i", dtype=INT64)
    pairs, rows = n.input(3, 2, 2, name="pairs", dtype=INT64), n.input(3, 2, 6, name="rows")
    apart = n.const(np.array([[[0, 1], [2, 2]], [[1, -1], [3, 0]], [[-2, 3], [0, 4]]]), INT64)
    elements, nd = gather.ScatterElementsAttrs, gather.ScatterNDAttrs
    cache, new, at = n.input(2, 8, 3, name="cache"), n.input(2, 4, 3, name="new"), n.input(2, name="at", dtype=INT64)
    return [
        *(n.op("ScatterElements", x, i, u, attrs=elements(a, r)) for a, r in ((0, "add"), (2, "max"), (1, "mul"))),
        n.op("ScatterElements", x, n.const(np.arange(30).reshape(2, 5, 3) % 2 * 2 - np.arange(2)[:, None, None], INT64), u),
        *(n.op("ScatterND", x, pairs, rows, attrs=nd(r)) for r in ("add", "min")),
        n.op("ScatterND", x, apart, rows),
        n.op("ScatterND", n.op("Transpose", x), n.op("Transpose", pairs), n.input(2, 2, name="more"), attrs=nd("add")),
        n.op("TensorScatter", cache, new, at, attrs=TensorScatterAttrs()),
        n.op("TensorScatter", cache, new, n.op("Mul", at, n.const(3, INT64)), attrs=TensorScatterAttrs(1, "circular")),
    ]  # fmt: skip


def choices(n: Net) -> list[Any]:
    i, values = n.input(3, 4, name="i", dtype=INT64), n.input(2, name="values")
    x = n.input(4, 6)
    return [
        n.op("OneHot", i, n.ints(4), values),
        n.op("OneHot", n.op("Sub", i, n.ints(2)), n.ints(5), values, attrs=gather.OneHotAttrs(1)),
        n.op("OneHot", n.op("Cast", i, attrs=_to("fp32")), n.ints(3), n.const([2, 9], INT64), attrs=gather.OneHotAttrs(0)),
        n.op("BitCast", n.op("Cast", x, attrs=_to("int16")), attrs=BitCastAttrs(DTYPES["uint16"])),
        n.op("BitCast", n.op("Transpose", i), attrs=BitCastAttrs(DTYPES["uint64"])),
    ]  # fmt: skip


FAMILIES: dict[str, Callable[[Net], list[Any]]] = {f.__name__: f for f in (orders, triangles, sums, scatters, choices)}
