"""NumPy kernels. The decision of a support vector machine: one against one, votes, and libsvm's coupled probabilities."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array

_CLIP = 1e-7


def svm_decision(
    k: Array,
    coefficients: Array,
    rho: Array,
    prob_a: Array | None = None,
    prob_b: Array | None = None,
    vectors_per_class: tuple[int, ...] = (),
) -> tuple[Array, Array, Array]:
    """Kernel values ``k`` [n, m] (rows against support vectors, grouped by class) -> winners and scores.

    ``coefficients`` [c - 1, m], ``rho``, ``prob_a`` and ``prob_b`` [c (c - 1) / 2] are libsvm's. Returns the class with the most
    votes, int64 [n]; the pairs' decision values, [n, c (c - 1) / 2]; and the classes' probabilities [n, c] (without ``prob_a``, the
    shares of the votes). Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise
    coupling", 2004, second method, with libsvm's stopping rule.
    """
    wide = k.astype(np.float64)
    ends = np.cumsum(vectors_per_class)
    part = [slice(int(e) - n, int(e)) for e, n in zip(ends, vectors_per_class, strict=True)]
    count = len(part)
    votes = np.zeros((k.shape[0], count))
    decisions: list[Array] = []
    pairs: list[tuple[int, int]] = []
    for i in range(count):
        for j in range(i + 1, count):
            p = len(pairs)
            value = (
                wide[:, part[i]] @ coefficients[j - 1, part[i]] + wide[:, part[j]] @ coefficients[i, part[j]] + rho[p]
            )
            votes[:, i] += value > 0
            votes[:, j] += value <= 0
            decisions.append(value)
            pairs.append((i, j))
    stacked = np.stack(decisions, axis=1)
    if prob_a is None or prob_b is None:
        shares = votes / max(len(pairs), 1)
    else:
        ratio = np.zeros((k.shape[0], count, count))
        for p, (i, j) in enumerate(pairs):
            r = np.clip(1 / (1 + np.exp(stacked[:, p] * prob_a[p] + prob_b[p])), _CLIP, 1 - _CLIP)
            ratio[:, i, j], ratio[:, j, i] = r, 1 - r
        shares = _coupled(ratio)
    return votes.argmax(1).astype(np.int64), stacked.astype(k.dtype), shares.astype(k.dtype)


def _coupled(ratio: Array) -> Array:
    """Probabilities [n, c] that agree best with the pairs' probabilities, [n, c, c]."""
    n, c, _ = ratio.shape
    q = -np.swapaxes(ratio, 1, 2) * ratio
    for t in range(c):
        q[:, t, t] = (ratio[:, :, t] ** 2).sum(1) - ratio[:, t, t] ** 2
    p = np.full((n, c), 1 / c)
    active = np.arange(n)
    for _ in range(max(100, c)):
        qa, pa = q[active], p[active]
        qp = np.einsum("nij,nj->ni", qa, pa)
        pqp = (pa * qp).sum(1)
        open_ = np.abs(qp - pqp[:, None]).max(1) >= 0.005 / c
        if not open_.any():
            break
        active, qa, pa, qp, pqp = active[open_], qa[open_], pa[open_], qp[open_], pqp[open_]
        for t in range(c):
            diff = (pqp - qp[:, t]) / qa[:, t, t]
            pa[:, t] += diff
            pqp = (pqp + diff * (diff * qa[:, t, t] + 2 * qp[:, t])) / (1 + diff) ** 2
            qp = (qp + diff[:, None] * qa[:, t]) / (1 + diff)[:, None]
            pa /= (1 + diff)[:, None]
        p[active] = pa
    return p


KERNELS: dict[str, Kernel] = {"SVMDecision": svm_decision}
