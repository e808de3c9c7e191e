"""What both CPU libraries have in common: the settings of a compiled model, and the model's interface.

A library model is made from ONNX bytes without weights plus the weights as arrays (possibly memory-mapped); neither library
copies them. It is immutable and may be shared by threads; each thread makes its own session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from optdnn.errors import EngineError, MissingDependency
from optdnn.runtime.cpu.huge_pages import NewMemory
from optdnn.runtime.executor import LoadOptions, Session
from optdnn.runtime.program import Program, Step
from optdnn.types import Array


@dataclass(frozen=True)
class Settings:
    """How a library compiles a model. ``threads`` 0 leaves the number to the library (all cores)."""

    threads: int
    precision: str = "fp32"

    def to_plain(self) -> dict[str, Any]:
        return {"threads": self.threads, "precision": self.precision}


class LibraryModel(Protocol):
    """A model that a library has compiled; an :class:`~optdnn.runtime.executor.Executor` besides."""

    memory: NewMemory | None
    """What was allocated since the model's compilation began; its sessions say when they have run."""

    @property
    def aliases(self) -> bool: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def session(self) -> Session: ...


class MakeModel(Protocol):
    """How each library's model is made; see ``OpenVinoModel`` and ``OnnxRuntimeModel``."""

    def __call__(
        self,
        model: bytes,
        weights: Mapping[str, Array],
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: Settings,
    ) -> LibraryModel: ...


def prepare_step(make: MakeModel, step: Step, program: Program, options: LoadOptions) -> LibraryModel:
    """Make a library step of an engine ready: its parameters are the number of the blob that holds the ONNX bytes, the
    blobs of the weights by name, the names of inputs and outputs, and the settings."""
    p = step.params
    try:
        threads = int(p["threads"]) if options.threads is None else options.threads
        settings = Settings(threads, str(p["precision"]))
        blobs = program.blobs
        weights = {str(name): blobs[number] for name, number in p["weights"].items()}
        model = blobs[p["model"]].tobytes()
        inputs, outputs = [str(n) for n in p["inputs"]], [str(n) for n in p["outputs"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"a {step.executor} step of the engine is malformed: {error!r}") from None
    if len(inputs) != len(step.inputs) or len(outputs) != len(step.outputs):
        raise EngineError(
            f"a {step.executor} step of the engine names {len(inputs)} inputs for {len(step.inputs)} buffers"
        )
    memory = NewMemory(options.huge_pages)
    made = make(model, weights, inputs, outputs, settings)
    made.memory = memory
    return made


def library_module(name: str) -> ModuleType:
    """Import a CPU library; raises MissingDependency that names the pip command."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(name, "cpu", f"for the cpu target ({error})") from None
