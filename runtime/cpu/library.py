"""What both CPU libraries have in common: the settings of a compiled model, and the model's interface.

A library model is made from ONNX bytes without weights plus the weights as arrays (possibly memory-mapped); neither library
copies them. It is immutable and may be shared by threads; each thread makes its own :class:`Request`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from optdnn.errors import MissingDependency
from optdnn.types import Array


@dataclass(frozen=True)
class Settings:
    """How a library compiles a model. ``threads`` 0 leaves the number to the library (all cores)."""

    threads: int
    precision: str = "fp32"

    def to_plain(self) -> dict[str, Any]:
        return {"threads": self.threads, "precision": self.precision}


class Request(Protocol):
    """One thread's state of a model."""

    def run(self, inputs: Sequence[Array], outs: Sequence[Array | None]) -> list[Array]:
        """Run once. ``outs[i]``, where given, is the C-contiguous buffer that output i must be written to."""


class LibraryModel(Protocol):
    """A compiled model. ``executed`` counts the operators that ran in each precision, as the library reports them."""

    def request(self) -> Request: ...

    def executed(self) -> Mapping[str, int]: ...


def library_module(name: str) -> ModuleType:
    """Import a CPU library; raises MissingDependency that names the pip command."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(name, "cpu", f"for the cpu target ({error})") from None
