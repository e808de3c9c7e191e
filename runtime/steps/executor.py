"""Executors: they run steps.

An executor module offers ``prepare(step, program, options) -> Executor``. An Executor is one prepared step (a compiled
library model, a kernel with its attributes): made once per engine, never changed afterward, shared by all threads. Its
``session()`` returns the state of one thread (an infer request, scratch); only one thread at a time uses a session.
Modules are imported only if a program names them, so an engine needs only the libraries that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeAlias

from optdnn.custom import CustomOp
from optdnn.errors import EngineError
from optdnn.ranges import DimRange
from optdnn.runtime.program import Plain, Program
from optdnn.types import Array, DType


class Session(Protocol):
    """One thread's use of a prepared step."""

    def run(self, inputs: Sequence[Array | None], outs: Sequence[Array | None]) -> Sequence[Array]:
        """Run the step; returns one array per entry of ``step.outputs``, in order.

        ``inputs`` are C-contiguous, aligned arrays of the buffers' dtypes (None: absent operand), valid for this call only.
        ``outs[i]``, if it is not None, is a writable C-contiguous array of the output's dtype and rank that the session
        may fill and return in place of a new one; if it returns another array, the caller copies. A session that finds
        ``outs[i]`` of the wrong shape leaves it unchanged and returns its own array. Returned arrays are new: the session
        never writes to them again, and (unless the executor's ``aliases`` is true) they share no memory with inputs,
        constants or one another. Outputs numbered -1 may be anything.
        """


class Executor(Protocol):
    """One prepared step, shared by all threads."""

    @property
    def aliases(self) -> bool:
        """Whether results may share memory with inputs, constants or each other (then the engine copies outputs)."""

    @property
    def facts(self) -> Mapping[str, Plain]:
        """Library, version, precision and threads of the step, as read back from the library."""

    def session(self) -> Session:
        """New per-thread state."""


Planner: TypeAlias = Callable[[Program, Mapping[str, tuple[int, ...]], bool, Mapping[str, Array]], Program]
"""``planner(engine's program, shape per input, compile kernels?, values) -> program`` for exactly these shapes, without the
inputs in ``values``, which become constants; its blobs are the engine's own arrays if their contents agree."""


Port: TypeAlias = tuple[str, DType, tuple[int | str, ...] | None]
"""Name, element type and shape (text: a symbolic size; None: unknown) of an input or output of a library's network."""


@dataclass(frozen=True)
class LibraryPart:
    """A part of an engine for a CPU library: serialized ONNX, its weights by name, and the program's types of its inputs and
    outputs. ``symbols`` are the sizes that the network's inputs have in a call, with their ranges if known;
    ``digest`` is one digest over all of this, if the checksums of the file's blobs were verified."""

    library: str
    model: bytes
    weights: Mapping[str, Array]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    symbols: Mapping[str, DimRange | None]
    digest: str | None = None


Examine: TypeAlias = Callable[[LibraryPart], None]
"""Raises EngineError for a part that its library must not be given."""


@dataclass(frozen=True)
class LoadOptions:
    """Choices made when an engine is loaded, for executors to honor. ``threads`` None keeps the number chosen by the build.

    For engines of GPUs: ``simulate`` runs them in NumPy instead. ``trust_cubins``: the program may contain any code, like a
    program made in this process; otherwise its kernels' sources are checked, and compiled (see
    :func:`optdnn.runtime.cuda.compile.recipes.cubins`). ``recompile`` compiles kernels with this version's templates.
    """

    threads: int | None = None
    huge_pages: bool = True
    """Move the memory that a CPU library allocates onto huge pages (:mod:`optdnn.runtime.cpu.huge_pages`)."""
    defer: bool = False
    """Inspect the machine on first use only: an engine that was just built here may be for another one."""
    simulate: bool = False
    trust_cubins: bool = False
    recompile: bool = False
    custom_ops: tuple[CustomOp, ...] = ()
    planner: Planner | None = None
    """Makes the program for shapes without a plan in the engine."""
    examine: Examine | None = None
    """Examines the networks that a program from a file gives to CPU libraries. Without it, such a program is refused."""
    counters: str | None = None
    """A folder: the CPU libraries count the time of each layer, with files in this folder if they need some."""
    processes: bool | None = None
    """Whether each rank of several has its own process (None: on GPUs)."""
    pool: Any = None
    """Memory that the plans of one engine share, as the target's runner stores it."""


EXECUTORS: dict[str, str] = {
    "reference": "optdnn.runtime.steps.reference",
    "onnxruntime": "optdnn.runtime.cpu.onnxruntime",
    "openvino": "optdnn.runtime.cpu.openvino",
}
"""Executor name -> the module that prepares its steps."""


def prepare(program: Program, options: LoadOptions) -> list[Executor]:
    """Prepare every step. Raises EngineError for an executor that this version does not have."""
    unknown = sorted({s.executor for s in program.steps} - EXECUTORS.keys())
    if unknown:
        raise EngineError(
            f"the engine has steps for {', '.join(map(repr, unknown))}, which this version of optdnn cannot run",
            hint="upgrade optdnn, or rebuild the engine with this version",
        )
    modules = {name: import_module(EXECUTORS[name]) for name in sorted({s.executor for s in program.steps})}
    return [modules[step.executor].prepare(step, program, options) for step in program.steps]
