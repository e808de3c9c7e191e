"""The common part of both CPU libraries: the settings of a compiled model, and the model's interface.

A library model is made from ONNX bytes without weights plus the weights as arrays (possibly memory-mapped); neither library
copies them. The model is immutable and may be shared by threads; each thread makes its own session.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from optdnn.config import THREADS_LIMIT
from optdnn.dim_text import expressions
from optdnn.errors import EngineError, MissingDependency, UsageError
from optdnn.ranges import DimRange, Profile
from optdnn.runtime.cpu.huge_pages import NewMemory
from optdnn.runtime.program import Program, Step
from optdnn.runtime.steps.executor import Executor, LibraryPart, LoadOptions, Port
from optdnn.types import Array, TensorSpec, dtype_name

PRECISIONS = ("fp32", "bf16")
OPENVINO_TELEMETRY = "openvino_telemetry"
EXACT_INTEGER = 1 << 24
"""The largest magnitude of integers for a library that keeps them in 32 bits, or computes with them in fp32 (OpenVINO)."""


@dataclass(frozen=True)
class Settings:
    """Settings for the compilation of a model. ``threads`` 0 leaves the number to the library (all cores).

    Raises UsageError for a number of threads beyond any machine's, and for a precision that no library offers.
    """

    threads: int
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if type(self.threads) is not int or not 0 <= self.threads <= THREADS_LIMIT:
            raise UsageError(f"threads must be 0 to {THREADS_LIMIT}, not {self.threads!r:.40}")
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision {self.precision!r:.40} is not offered by a CPU library ({', '.join(PRECISIONS)})"
            )

    def to_plain(self) -> dict[str, Any]:
        return {"threads": self.threads, "precision": self.precision}


class LibraryModel(Executor, Protocol):
    """A model that a library has compiled."""

    memory: NewMemory | None
    """Memory allocated since the model's compilation began; its sessions report their runs to it."""
    empty: frozenset[str]
    """Inputs that may be empty, if the library does not accept empty tensors."""


MakeModel: TypeAlias = Callable[[bytes, Mapping[str, Array], Sequence[str], Sequence[str], Settings], LibraryModel]
"""Model, weights, inputs, outputs and settings -> ``OpenVinoModel`` or ``OnnxRuntimeModel``."""


def prepare_step(make: MakeModel, step: Step, program: Program, options: LoadOptions) -> LibraryModel:
    """Prepare a library step of an engine. Its parameters are the number of the blob with the ONNX bytes, the
    blobs of the weights by name, the names of inputs and outputs, and the settings.

    A program from a file is examined first, by ``options.examine``. Raises EngineError for malformed parameters,
    and for a network that the library must not be given."""
    p, blobs = step.params, program.blobs
    try:
        if set(p) - {"empty"} != _PARAMS:
            raise ValueError(f"its parameters are {sorted(map(str, p))}")
        settings = Settings(p["threads"] if options.threads is None else options.threads, p["precision"])
        weights = {str(name): blobs[_number(number, blobs)] for name, number in p["weights"].items()}
        model = blobs[_number(p["model"], blobs)].tobytes()
        inputs, outputs = [str(n) for n in p["inputs"]], [str(n) for n in p["outputs"]]
        empty = frozenset(str(n) for n in p.get("empty", ()))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, UsageError) as error:
        raise EngineError(f"a {step.executor} step of the engine is malformed: {error}") from None
    if len(inputs) != len(step.inputs) or len(outputs) != len(step.outputs):
        raise EngineError(
            f"a {step.executor} step of the engine has {len(step.inputs)} buffers for inputs and {len(step.outputs)} for outputs, "
            f"and names {len(inputs)} and {len(outputs)}"
        )
    if program.foreign:
        if options.examine is None:
            raise EngineError(
                f"the engine has a network for {step.executor}, and nothing can examine it here",
                hint="load it by optdnn.load",
            )
        read, given = _ports(program, step.inputs, inputs), _ports(program, step.outputs, outputs)
        symbols = symbols_of([spec for spec, _ in program.inputs], program.profiles)
        part = LibraryPart(step.executor, model, weights, read, given, symbols)
        options.examine(replace(part, digest=_digest(part, blobs[p["model"]], program)))
    memory = NewMemory(options.huge_pages)
    compiled = make(model, weights, inputs, outputs, settings)
    compiled.memory, compiled.empty = memory, empty
    return compiled


_PARAMS = frozenset({"inputs", "model", "outputs", "precision", "threads", "weights"})


def _number(number: Any, blobs: Sequence[Array]) -> int:
    """The number of an existing blob."""
    if type(number) is not int or not 0 <= number < len(blobs):
        raise ValueError(f"there is no blob {number!r:.20}")
    return number


def _ports(program: Program, numbers: Sequence[int], names: Sequence[str]) -> tuple[Port, ...]:
    if any(i < 0 for i in numbers):
        raise EngineError("a step of a CPU library lacks a buffer")
    buffers = [program.buffers[i] for i in numbers]
    return tuple((name, b.dtype, b.shape) for name, b in zip(names, buffers, strict=True))


def _digest(part: LibraryPart, model: Array, program: Program) -> str | None:
    """A digest over a part, from its arrays' digests that the file's reader verified; None if they were not verified."""
    known = {id(array): digest.hex() for array, digest in program.digests}
    arrays = [known.get(id(a)) for a in (model, *part.weights.values())]
    if None in arrays:
        return None
    types = [(name, dtype_name(a.dtype), a.shape) for name, a in part.weights.items()]
    ports = [[(name, dtype_name(d), shape) for name, d, shape in side] for side in (part.inputs, part.outputs)]
    ranges = {name: None if r is None else (r.min, r.max) for name, r in part.symbols.items()}
    return hashlib.sha256(json.dumps([part.library, arrays, types, ports, ranges]).encode()).hexdigest()


def symbols_of(inputs: Sequence[TensorSpec], profiles: Sequence[Profile]) -> dict[str, DimRange | None]:
    """The symbols whose sizes a network's inputs determine in each call, with the range that all profiles together allow."""
    named = {name for p in profiles for name in p}
    dims = dict.fromkeys(d for spec in inputs for d in spec.shape if isinstance(d, str))
    derived = expressions(dims, named)
    ranges: dict[str, DimRange | None] = {}
    for name in dims:
        if name not in derived:
            given = [p[name] for p in profiles if name in p]
            whole = len(given) == len(profiles) > 0
            low, high = (min(r.min for r in given), max(r.max for r in given)) if whole else (0, 0)
            ranges[name] = DimRange(low, low, high) if whole else None
    return ranges


def library_module(name: str, purpose: str = "for the cpu target") -> ModuleType:
    """Import a CPU library, without its telemetry; raises MissingDependency that names the pip command.

    From 1.29 on, ONNX Runtime reports sessions to its maker over the network, with names and hashes of the model, unless the
    environment forbids it before the first import. OpenVINO reports its import; without its telemetry package, it uses a stub.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    hidden = name == "openvino" and OPENVINO_TELEMETRY not in sys.modules
    if hidden:
        sys.modules[OPENVINO_TELEMETRY] = None  # type: ignore[assignment]  # an import of it fails
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(name, "cpu", f"{purpose} ({error})") from None
    finally:
        if hidden:
            sys.modules.pop(OPENVINO_TELEMETRY, None)
