"""The engine: a program made ready to run, and the public ways to run it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from optdnn.errors import InputError
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.program import Plain, Program, validate
from optdnn.runtime.requires import check_requires
from optdnn.runtime.runner import RunContext, open_runner
from optdnn.runtime.signature import show
from optdnn.types import Array, TensorSpec


class Engine:
    """A compiled network, ready to run. Made by ``optdnn.build`` or ``optdnn.load``; safe to share between threads."""

    def __init__(self, program: Program, *, threads: int | None = None, options: LoadOptions | None = None):
        """Prepare ``program``; ``threads`` overrides the number of threads that the build chose; ``options`` are :func:`load`'s.

        Raises EngineError where it is for another target or machine, MissingDependency where a library it needs is absent.
        """
        options = options or LoadOptions(threads)
        if not options.simulate and not options.defer:
            check_requires(program.requires)
        validate(program)
        self.program = program
        self._runner = open_runner(program, options)
        self._idle: deque[RunContext] = deque([] if options.defer else [self._runner.context()])

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each input, in ONNX order."""
        return self._runner.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each output, in ONNX order."""
        return self._runner.signature.outputs

    @property
    def target(self) -> str:
        return self.program.target

    @property
    def precision(self) -> str:
        return self.program.precision

    @property
    def meta(self) -> Mapping[str, Plain]:
        """The deterministic facts that the build kept: options, passes, tactics, provenance."""
        return self.program.meta

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        """Per step, what really runs (library, version, precision, threads), read back from the library."""
        return self._runner.facts

    def context(self) -> RunContext:
        """A new context: one thread's own state, with reusable output buffers through ``run(..., out=...)``."""
        return self._runner.context()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Run once: input name -> array gives output name -> fresh array, in ONNX output order. Thread-safe.

        Raises InputError for inputs that do not fit, RunError when running fails.
        """
        # A pool of contexts, as many as ever ran at once; deque's pop and append are atomic.
        try:
            context = self._idle.pop()
        except IndexError:
            context = self._runner.context()
        try:
            return context.run(feeds)
        finally:
            self._idle.append(context)

    def __call__(self, *arrays: Any) -> Array | tuple[Array, ...]:
        """Run on positional inputs; one output gives the array, several a tuple."""
        if len(arrays) != len(self.inputs):
            raise InputError(f"{len(arrays)} inputs given; the engine takes {show(self.inputs)}")
        results = tuple(self.run({s.name: a for s, a in zip(self.inputs, arrays, strict=True)}).values())
        return results[0] if len(results) == 1 else results

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine file, atomically. Raises OutputError where it cannot be written."""
        from optdnn.runtime.format import write

        write(self.program, path)

    def __repr__(self) -> str:
        head = f"Engine({self.target}, {self.precision}, {len(self.program.steps)} steps"
        return f"{head}: {show(self.inputs)} -> {show(self.outputs)})"


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    verify: bool = True,
    mmap: bool = True,
    simulate: bool = False,
    trust_cubins: bool = True,
    recompile: bool = False,
) -> Engine:
    """Load an engine file.

    ``threads`` overrides the number of threads chosen by the build. ``verify=False`` skips the SHA-256 of the blobs (the
    header's is always checked). ``mmap=False`` reads the file into memory, for files that may change underneath.
    Engines for GPUs: ``simulate`` runs the program in NumPy, on any machine; ``trust_cubins=False`` compiles the kernels from
    their recipes instead of loading the compiled code in the file; ``recompile`` does so even where this version's templates
    differ from those of the build.
    Raises EngineError for a file that is unreadable, corrupt, of another version or for another machine (EngineStale: whose
    kernels this version would make otherwise), and MissingDependency for an absent library.
    """
    from optdnn.runtime.format import read

    options = LoadOptions(threads, simulate=simulate, trust_cubins=trust_cubins and not recompile, recompile=recompile)
    return Engine(read(path, verify=verify, mmap=mmap), options=options)
