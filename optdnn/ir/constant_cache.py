"""A cache of arrays derived from constants: a weight is rounded, packed and hashed once for all candidates, networks and plans."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.types import Array, dtype_name

SMALL = 256
"""Arrays of up to this many bytes need not be registered: they are found by their content."""
Content = tuple[str, tuple[int, ...], bytes]
"""Element type, shape and digest."""


@dataclass
class ConstantCache:
    """``arrays``: constants by content. A derived array is stored under the memory addresses of its source constants. The cache
    holds these constants too, so that their memory is not reused. Constants do not change.

    ``shared``: a longer-lived cache that is asked first, namely the cache of an engine's weights, shared by all of its plans.
    """

    arrays: dict[Content, Array] = field(default_factory=dict)
    shared: ConstantCache | None = None
    _made: dict[Any, tuple[Sequence[Array], Array]] = field(default_factory=dict)
    _digests: dict[Any, tuple[Array, bytes]] = field(default_factory=dict)
    _roots: dict[int, Array] = field(default_factory=dict)

    def of(self, graph: Graph) -> ConstantCache:
        """This cache, after the constants of ``graph`` were added."""
        for op in graph.of_kind("Constant"):
            self.hold(op.attrs.value)
        return self

    def hold(self, array: Array, digest: bytes | None = None) -> None:
        """Add an array and all views of it. ``digest``: its SHA-256, if the array is contiguous and the digest is known."""
        root = _root(array)
        self._roots[id(root)] = root
        if digest is not None and array.size:
            self._digests[_place(array)] = (array, digest)
            self.arrays.setdefault(_content(array, digest), array)

    def once(self, key: Any, sources: Sequence[Array], make: Callable[[], Array], *, final: bool = False) -> Array:
        """The result of ``make()``, called once for each ``key`` and views ``sources``; it must depend only on these.

        ``final``: the result becomes a constant of a program, and equal ones are stored once.
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
        """Whether :meth:`once` would return a stored array."""
        if self.shared is not None and self.shared.knows(sources):
            return self.shared.has(key, sources)
        return self.knows(sources) and self._name(key, sources) in self._made

    def _name(self, key: Any, sources: Sequence[Array]) -> tuple[Any, ...]:
        return (key, *(_place(a) if self._holds(a) else _bits(a) for a in sources))

    def knows(self, sources: Sequence[Array]) -> bool:
        """Whether arrays derived from these are stored."""
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
        """The content of a contiguous array, and the first array that had this content."""
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
    """The memory address and layout of an array."""
    return array.__array_interface__["data"][0], array.shape, array.strides, str(array.dtype)


def _bits(array: Array) -> tuple[Any, ...]:
    """The content, shape and type of an array."""
    return array.tobytes(), array.shape, str(array.dtype)
