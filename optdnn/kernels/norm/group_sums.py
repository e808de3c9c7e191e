"""Constants and shared memory of ``group_sums.cuh``: sums of groups of channels over a block."""

from __future__ import annotations

import math


def span(group: int, lanes: int) -> int:
    """Largest number of groups of ``group`` channels that a vector of ``lanes`` channels touches. Vectors begin at multiples of ``lanes``."""
    return (group - math.gcd(group, lanes) + lanes - 1) // group + 1


def share(groups: int, threads: int) -> int:
    """Number of neighboring threads that add up one of a block's ``groups`` groups: a power of two, at most a warp."""
    fitting = max(8, min(32, threads // groups))
    return 1 << (fitting.bit_length() - 1)


def defines(slab: int, group: int, lanes: int, threads: int) -> dict[str, int]:
    """The constants of the header, for slabs of ``slab`` channels."""
    return {"SPAN": span(group, lanes), "SHARE": share(slab // group, threads)}


def table_bytes(slab: int, group: int, lanes: int, lines: int) -> int:
    """Bytes of shared memory of the sums of all threads and of the pivots."""
    return 8 * (slab // lanes) * span(group, lanes) * (lines | 1) + 4 * (slab // group)
