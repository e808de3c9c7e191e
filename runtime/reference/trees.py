"""NumPy kernels. Ensembles of decision trees (ONNX domain ai.onnx.ml), all rows through all trees at once."""

from __future__ import annotations

import numpy as np

from optdnn.errors import RunError
from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "LEAF")
"""Node modes by number: a node compares its feature with its threshold, or holds weights."""
LEAF = 6


def tree_ensemble(
    x: Array,
    features: Array,
    thresholds: Array,
    modes: Array,
    yes: Array,
    no: Array,
    missing: Array,
    roots: Array,
    rows: Array,
    weights: Array,
    aggregate: str = "SUM",
) -> tuple[Array]:
    """``x`` [n, f] -> the trees' weights [n, c], combined by ``aggregate`` (SUM, AVERAGE, MIN, MAX).

    Per node: feature, threshold, mode, the next node if the comparison holds and if not, and the next node for a missing value
    (NaN); ``roots`` are the trees' first nodes, ``rows`` the row of ``weights`` of each leaf. Raises RunError for trees
    that never reach a leaf.
    """
    dtype = np.promote_types(thresholds.dtype, x.dtype if x.dtype.kind == "f" else np.float32)
    x, thresholds = x.astype(dtype), thresholds.astype(dtype)
    missing = missing.astype(np.bool_)  # a GPU's table of nodes holds integers
    at = np.broadcast_to(roots, (x.shape[0], roots.size)).copy()
    row = np.arange(x.shape[0])[:, None]
    compare = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
    present = [k for k in range(LEAF) if (modes == k).any()]
    for _ in range(features.size + 1):
        mode = modes[at]
        inner = mode != LEAF
        if not inner.any():
            break
        value, threshold = x[row, features[at]], thresholds[at]
        go = np.isnan(value) & missing[at]
        for k in present:
            go |= (mode == k) & compare[k](value, threshold)
        at = np.where(inner, np.where(go, yes[at], no[at]), at)
    else:
        raise RunError("TreeEnsemble: a tree never reaches a leaf")
    found = weights[rows[at]].astype(np.float64)
    if not roots.size:
        return (np.zeros((x.shape[0], weights.shape[1]), weights.dtype),)
    if aggregate in ("SUM", "AVERAGE"):
        total = found.sum(1) if aggregate == "SUM" else found.mean(1)
    else:
        total = found.min(1) if aggregate == "MIN" else found.max(1)
    return (total.astype(weights.dtype),)


KERNELS: dict[str, Kernel] = {"TreeEnsemble": tree_ensemble}
