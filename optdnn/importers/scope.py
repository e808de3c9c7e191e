"""The names of values while a graph is imported, and the names that a subgraph sees."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class Unknown:
    """Stands for a value that an unsupported node would have produced."""


UNKNOWN = Unknown()
Scope = dict[str, Any]
"""ONNX name -> ref: a Value, a Weight, UNKNOWN, or None for an optional value that is absent."""


class InnerScope(Scope):
    """The names inside of a subgraph. A name that is not its own is looked up outside when it is first read."""

    def __init__(self, outer: Scope, own: Collection[str], capture: Callable[[Any], Any]):
        super().__init__()
        self._outer, self._own, self._capture = outer, frozenset(own), capture

    def __missing__(self, name: str) -> Any:
        if name in self._own:  # produced inside, later
            raise KeyError(name)
        self[name] = self._capture(self._outer[name])
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name not in self._own and name in self._outer)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (dict.get would not look outside)
