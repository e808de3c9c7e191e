"""What is made of constants, remembered: a weight is rounded, packed and hashed once, however many candidates are tried, networks
lowered and plans made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.types import Array, dtype_name

SMALL = 256
"""Arrays of up to this many bytes need not be known: they go by their content."""
Content = tuple[str, tuple[int, ...], bytes]
"""Element type, shape and digest."""


@dataclass
class ConstantCache:
    """``arrays``: constants by content. What is made of known constants is remembered by where these lie; the memory stays theirs,
    since they are kept here, too. Constants do not change.

    ``shared``: what outlives this one, asked first: the weights of an engine, of which each of its plans is made.
    """

    arrays: dict[Content, Array] = field(default_factory=dict)
    shared: ConstantCache | None = None
    _made: dict[Any, tuple[Sequence[Array], Array]] = field(default_factory=dict)
    _digests: dict[Any, tuple[Array, bytes]] = field(default_factory=dict)
    _roots: dict[int, Array] = field(default_factory=dict)

    def of(self, graph: Graph) -> ConstantCache:
        """Itself, for the constants of this graph, too."""
        for op in graph.of_kind("Constant"):
            self.hold(op.attrs.value)
        return self

    def hold(self, array: Array, digest: bytes | None = None) -> None:
        """Know an array and what is a view of it; and its SHA-256, where it is contiguous and that is at hand."""
        root = _root(array)
        self._roots[id(root)] = root
        if digest is not None and array.size:
            self._digests[_place(array)] = (array, digest)
            self.arrays.setdefault(_content(array, digest), array)

    def once(self, key: Any, sources: Sequence[Array], make: Callable[[], Array], *, final: bool = False) -> Array:
        """``make()``, made of ``sources`` alone in the way that ``key`` names: the same array again for the same constants' views.

        ``final``: it is to be a program's constant; where one of its content is here already, that is it.
        """
        if self.shared is not None and self.shared.knows(sources):
            return self.shared.once(key, sources, make, final=final)
        if not self.knows(sources):
            return make()
        place = self._name(key, sources)
        found = self._made.get(place)
        if found is None:
            made, digest = make(), None
            if final:
                (*_, digest), made = self.same(np.ascontiguousarray(made).reshape(made.shape))
            self.hold(made, digest)
            found = self._made.setdefault(place, (tuple(sources), made))
        return found[1]

    def has(self, key: Any, sources: Sequence[Array]) -> bool:
        """Whether :meth:`once` would find what ``key`` names, made already."""
        if self.shared is not None and self.shared.knows(sources):
            return self.shared.has(key, sources)
        return self.knows(sources) and self._name(key, sources) in self._made

    def _name(self, key: Any, sources: Sequence[Array]) -> tuple[Any, ...]:
        return (key, *(_place(a) if self._holds(a) else _bits(a) for a in sources))

    def knows(self, sources: Sequence[Array]) -> bool:
        """Whether what is made of these arrays is remembered."""
        held = [self._holds(a) for a in sources]
        return any(held) and all(h or a.nbytes <= SMALL for h, a in zip(held, sources, strict=True))

    def digest(self, array: Array) -> bytes:
        """SHA-256 of a contiguous array's bytes."""
        if not array.size:
            return b""
        if self.shared is not None and self.shared._holds(array):
            return self.shared.digest(array)
        if not self._holds(array):
            return _sha256(array)
        place = _place(array)
        if place not in self._digests:
            self._digests[place] = (array, _sha256(array))
        return self._digests[place][1]

    def same(self, array: Array) -> tuple[Content, Array]:
        """The content of a contiguous array, and the array of that content: the one that came first."""
        content = _content(array, self.digest(array))
        if self.shared is not None:
            if content in self.shared.arrays:
                return content, self.shared.arrays[content]
            if self.shared._holds(array):
                return content, self.shared.arrays.setdefault(content, array)
        return content, self.arrays.setdefault(content, array)

    def _holds(self, array: Array) -> bool:
        if self.shared is not None and self.shared._holds(array):
            return True
        root = _root(array)
        return self._roots.get(id(root)) is root


def _content(array: Array, digest: bytes) -> Content:
    return dtype_name(array.dtype), array.shape, digest


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


def _bits(array: Array) -> tuple[Any, ...]:
    """What is in an array, and how."""
    return array.tobytes(), array.shape, str(array.dtype)
