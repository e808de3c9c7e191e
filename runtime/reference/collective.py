"""NumPy kernels of collectives: sums and gathers over the ranks that run together (:mod:`optdnn.runtime.ranks.exchange`)."""

from __future__ import annotations

import numpy as np

from optdnn.runtime.ranks.exchange import gather
from optdnn.runtime.reference.base import Kernel
from optdnn.types import Array


def all_reduce(x: Array, world: int) -> tuple[Array]:
    """The sum of the ranks' arrays, added in the order of the ranks, so that every rank gets the same bits."""
    total, *others = gather(np.ascontiguousarray(x), world)
    for other in others:
        total = total + other
    return (total,)


def all_gather(x: Array, world: int, axis: int) -> tuple[Array]:
    """The ranks' arrays concatenated along ``axis``."""
    return (np.concatenate(gather(np.ascontiguousarray(x), world), axis=axis),)


KERNELS: dict[str, Kernel] = {"AllReduce": all_reduce, "AllGather": all_gather}
