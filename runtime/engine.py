"""The engine: a program made ready to run, and the public ways to run it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from optdnn.errors import EngineError, InputError
from optdnn.runtime.context import Context, Schedule
from optdnn.runtime.executor import LoadOptions, prepare
from optdnn.runtime.program import Plain, Program, validate
from optdnn.runtime.requires import check_requires
from optdnn.runtime.signature import show
from optdnn.types import Array, TensorSpec

TARGETS = ("cpu", "reference")
"""Targets that this version can run."""


class Engine:
    """A compiled network, ready to run. Made by ``optdnn.build`` or ``optdnn.load``; safe to share between threads."""

    def __init__(self, program: Program, *, threads: int | None = None):
        """Prepare ``program``; ``threads`` overrides the number of threads that the build chose.

        Raises EngineError where it is for another target or machine, MissingDependency where a library it needs is absent.
        """
        if program.target not in TARGETS:
            raise EngineError(
                f"the engine is for target {program.target!r}; this installation runs {', '.join(TARGETS)}",
                hint="rebuild it for one of these: optdnn build MODEL --target cpu",
            )
        check_requires(program.requires)
        validate(program)
        self.program = program
        self._schedule = Schedule(program, prepare(program, LoadOptions(threads)))
        self._idle: deque[Context] = deque([Context(self._schedule)])

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each input, in ONNX order."""
        return self._schedule.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each output, in ONNX order."""
        return self._schedule.signature.outputs

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
        return tuple(e.facts for e in self._schedule.executors)

    def context(self) -> Context:
        """A new context: one thread's own state, with reusable output buffers through ``run(..., out=...)``."""
        return Context(self._schedule)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Run once: input name -> array gives output name -> fresh array, in ONNX output order. Thread-safe.

        Raises InputError for inputs that do not fit, RunError when running fails.
        """
        # A pool of contexts, as many as ever ran at once; deque's pop and append are atomic.
        try:
            context = self._idle.pop()
        except IndexError:
            context = Context(self._schedule)
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


def load(path: str | os.PathLike[str], *, threads: int | None = None, verify: bool = True, mmap: bool = True) -> Engine:
    """Load an engine file.

    ``threads`` overrides the number of threads chosen by the build. ``verify=False`` skips the SHA-256 of the blobs (the
    header's is always checked). ``mmap=False`` reads the file into memory, for files that may change underneath.
    Raises EngineError for a file that is unreadable, corrupt, of another version or for another machine, and
    MissingDependency for an absent library.
    """
    from optdnn.runtime.format import read

    return Engine(read(path, verify=verify, mmap=mmap), threads=threads)
