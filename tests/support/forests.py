"""Ensembles of random decision trees."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Value
from optdnn.ops.trees import TreeEnsembleAttrs
from optdnn.runtime.reference.trees import LEAF
from optdnn.types import FP32, FP64, DType
from support.net import Net

ALL = (0, 1, 2, 3, 4, 5)
"""All comparisons."""


def forest(
    n: Net,
    x: Value,
    *,
    depth: int = 3,
    count: int = 40,
    columns: int = 1,
    modes: tuple[int, ...] = (0,),
    aggregate: str = "SUM",
    exact: DType = FP32,
    features: int = 6,
) -> Any:
    """``count`` complete trees of random comparisons, and one that is a leaf."""
    inner, size = 2**depth - 1, 2 ** (depth + 1) - 1
    at = np.arange(count * size + 1)
    k, base = at % size, at // size * size
    leaf = (k >= inner) | (at == count * size)
    random = n.rng.integers
    arrays = [
        random(0, features, at.size),
        np.where(leaf, 0, np.round(n.rng.standard_normal(at.size), 1)).astype(exact),
        np.where(leaf, LEAF, np.asarray(modes)[random(0, len(modes), at.size)]).astype(np.uint8),
        np.where(leaf, 0, base + 2 * k + 1),
        np.where(leaf, 0, base + 2 * k + 2),
        random(0, 2, at.size).astype(np.bool_),
        np.arange(0, count * size + 1, size),
        np.where(leaf, np.cumsum(leaf) - 1, 0),
        n.rng.standard_normal((int(leaf.sum()), columns)).astype(exact),
    ]
    return n.op("TreeEnsemble", x, *(n.const(a, a.dtype) for a in arrays), attrs=TreeEnsembleAttrs(aggregate))


CASES: list[dict[str, Any]] = [
    {},
    {"columns": 3, "modes": ALL},
    {"columns": 11, "modes": (1, 3), "aggregate": "AVERAGE", "depth": 1},
    {"aggregate": "MIN", "count": 3},
    {"aggregate": "MAX", "columns": 2, "exact": FP64},
    {"depth": 0, "count": 70},
]
