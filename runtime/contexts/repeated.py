"""Repeated calls of small networks on arrays of the same shapes.

A library makes a tensor for each input and an array for each output in every call. For a network of a few microseconds, that is
half of the time. A repeated call makes them once: it copies the inputs into buffers that the library reads, and the results out
of buffers that the library writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.types import Array

LIMIT = 16 << 10
"""The most bytes of all inputs and outputs together. Larger copies would cost more than the buffers save."""
REPEATS = 8
"""Consecutive calls with the same shapes before a repeated call is prepared. The preparation takes as long as a few calls."""


def fits(arrays: Sequence[Array]) -> bool:
    """Whether arrays of inputs and outputs are small enough, and none is empty: libraries accept no address of empty memory."""
    return all(a.size for a in arrays) and sum(a.nbytes for a in arrays) <= LIMIT


class Repeated:
    """One context's call for fixed shapes. Used by one thread at a time."""

    def __init__(self, run: Callable[[], object], inputs: Mapping[str, Array], outputs: Mapping[str, Array]):
        """``run`` reads the arrays of ``inputs`` and writes the arrays of ``outputs``, which belong only to this call."""
        self._run = run
        self._inputs = [(name, a, a.dtype, a.shape) for name, a in inputs.items()]
        self._outputs = [(name, a, a.copy) for name, a in outputs.items()]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array] | None:
        """New results; None if ``feeds`` is not a dict of exactly these names, dtypes and shapes, or if running fails.

        The ordinary call then raises the error. Plain loops and identity tests are the fastest here."""
        if type(feeds) is not dict or len(feeds) != len(self._inputs):
            return None
        for name, buffer, dtype, shape in self._inputs:
            a = feeds.get(name)
            if type(a) is not np.ndarray or a.shape != shape or (a.dtype is not dtype and a.dtype != dtype):
                return None
            buffer[...] = a
        try:
            self._run()
        except Exception:  # the libraries raise their own classes
            return None
        results: dict[str, Array] = {}
        for name, _, copy in self._outputs:
            results[name] = copy()
        return results

    def buffers(self) -> list[Array]:
        """The arrays that calls read and write."""
        return [*(a for _, a, _, _ in self._inputs), *(a for _, a, _ in self._outputs)]
