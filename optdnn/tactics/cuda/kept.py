"""Constants that builders share: a weight is packed and hashed once, however many candidates are tried and networks lowered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.types import Array


@dataclass
class Kept:
    """``arrays``: constants by content. What is made of a graph's own constants is remembered by where these lie; the memory stays
    theirs, since they are kept here, too. Constants of a graph do not change."""

    arrays: dict[Any, Array] = field(default_factory=dict)
    _made: dict[Any, tuple[Sequence[Array], Array]] = field(default_factory=dict)
    _digests: dict[Any, tuple[Array, bytes]] = field(default_factory=dict)
    _roots: dict[int, Array] = field(default_factory=dict)

    def of(self, graph: Graph) -> Kept:
        """Itself, for the constants of this graph, too."""
        for op in graph.of_kind("Constant"):
            root = _root(op.attrs.value)
            self._roots[id(root)] = root
        return self

    def once(self, key: Any, sources: Sequence[Array], make: Callable[[], Array]) -> Array:
        """``make()``, made of ``sources`` alone in the way that ``key`` names: the same array again for views of the same constants."""
        if not all(self._is_kept(a) for a in sources):
            return make()
        place = (key, *map(_place, sources))
        if place not in self._made:
            made = make()
            self._made[place] = (tuple(sources), made)
            root = _root(made)
            self._roots[id(root)] = root
        return self._made[place][1]

    def digest(self, array: Array) -> bytes:
        """SHA-256 of a contiguous array's bytes."""
        if not array.size:
            return b""
        if not self._is_kept(array):
            return _sha256(array)
        place = _place(array)
        if place not in self._digests:
            self._digests[place] = (array, _sha256(array))
        return self._digests[place][1]

    def _is_kept(self, array: Array) -> bool:
        root = _root(array)
        return self._roots.get(id(root)) is root


def _sha256(array: Array) -> bytes:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()


def _root(array: Array) -> Array:
    """The array whose memory this one is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _place(array: Array) -> tuple[Any, ...]:
    """Where an array lies, and how."""
    return array.__array_interface__["data"][0], array.shape, array.strides, str(array.dtype)
