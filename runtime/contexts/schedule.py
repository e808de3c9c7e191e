"""The shared part of a program that runs step by step: executors, the order of work, and the types of buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optdnn.dim import Dim, DimLike, evaluate, symbol
from optdnn.dim_text import parse_dim
from optdnn.errors import ShapeError
from optdnn.runtime.contexts.bounds import bounds_of
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.program import Buffer, Plain, Program
from optdnn.runtime.steps.executor import Executor
from optdnn.types import Array, DType, dtype_name


@dataclass(frozen=True)
class Action:
    """One step as the run loop wants it. Buffer -1 reads the spare last entry of the value list, which stays None."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    """Buffers that no later step reads: dropped after the step."""
    aliases: bool


@dataclass(frozen=True)
class Expected:
    """The type of a buffer in one call, as the program declares it.

    ``dims`` holds None for a size that depends on data, and is None where the rank is unknown, too. ``shape`` is set where every
    size is known.
    """

    dtype: DType
    dims: tuple[int | None, ...] | None
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, dtype: DType, dims: Sequence[DimLike | None] | None, sizes: Mapping[str, int]) -> Expected:
        """``dims`` at these sizes of their symbols."""
        if dims is None:
            return cls(dtype, None, None)
        known = tuple(_size(d, sizes) if isinstance(d, Dim) else d for d in dims)
        return cls(dtype, known, None if None in known else known)  # type: ignore[arg-type]

    def fits(self, a: Array) -> bool:
        """Whether an array is of this type, as far as it is known."""
        if a.dtype != self.dtype:
            return False
        if self.shape is not None or self.dims is None:
            return self.dims is None or a.shape == self.shape
        return len(a.shape) == len(self.dims) and all(
            d is None or d == n for d, n in zip(self.dims, a.shape, strict=True)
        )

    def __str__(self) -> str:
        shape = "?" if self.dims is None else ", ".join("?" if d is None else str(d) for d in self.dims)
        return f"{dtype_name(self.dtype)}[{shape}]"


def _size(d: Dim, sizes: Mapping[str, int]) -> int | None:
    """The size, or None where the expression has none: nothing can be divided by an empty dimension."""
    try:
        size = evaluate(d, sizes)
    except ShapeError:
        return None
    return size if size >= 0 else None


def _dims(b: Buffer, signature: Signature) -> tuple[DimLike | None, ...] | None:
    """The dimensions of a buffer over the symbols of the inputs; None for one that depends on anything else."""
    if b.shape is None:
        return None
    known = {d for s in signature.inputs for d in s.shape if isinstance(d, str)} - signature.derived.keys()
    dims: list[DimLike | None] = []
    for d in b.shape:
        dim = d if isinstance(d, int) else symbol(d) if d in known else parse_dim(d)
        names = {s.name for s in dim.symbols()} if isinstance(dim, Dim) else set()
        dims.append(dim if names <= known else None)
    return tuple(dims)


class Schedule:
    """A prepared program. Immutable."""

    def __init__(self, program: Program, executors: Sequence[Executor]):
        self.program = program
        self.executors = tuple(executors)
        self.signature = Signature([s for s, _ in program.inputs], [s for s, _ in program.outputs], program.profiles)
        self.bounds = bounds_of(program.meta.get("bounds", {}))
        self.inputs = tuple(i for _, i in program.inputs)
        self.outputs = tuple(i for _, i in program.outputs)
        self.initial: list[Array | None] = [None if b.blob is None else program.blobs[b.blob] for b in program.buffers]
        self.initial.append(None)
        self.planned = tuple(
            (i, b.offset, b.nbytes or 0)
            for i, b in enumerate(program.buffers)
            if b.offset is not None and i not in self.outputs
        )
        """Buffers in the arena. Outputs of the network are never there: the arrays that run() returns belong to the caller."""
        self._dims = [_dims(b, self.signature) for b in program.buffers]
        self.actions = _actions(program, [e.aliases for e in executors])
        self.may_alias = self._may_alias()

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        """Per step, the library that runs it and its facts."""
        return tuple(e.facts for e in self.executors)

    def expected(self, sizes: Mapping[str, int]) -> list[Expected]:
        """The types of the buffers in a call with these sizes."""
        return [Expected.of(b.dtype, d, sizes) for b, d in zip(self.program.buffers, self._dims, strict=True)]

    @property
    def whole(self) -> bool:
        """True where one step takes the inputs and gives the outputs: there is nothing to schedule, place or free."""
        steps = self.program.steps
        single = len(steps) == 1 and steps[0].inputs == self.inputs and sorted(steps[0].outputs) == sorted(self.outputs)
        return single and not self.planned and not self.may_alias

    def _may_alias(self) -> bool:
        """True where an output could share memory with an input, a constant or another output."""
        written = {i: e for step, e in zip(self.program.steps, self.executors, strict=True) for i in step.outputs}
        distinct = len(set(self.outputs)) == len(self.outputs)
        return not distinct or any(i not in written or written[i].aliases for i in self.outputs)


def _actions(program: Program, aliases: Sequence[bool]) -> tuple[Action, ...]:
    held = {i for _, i in program.outputs} | {i for i, b in enumerate(program.buffers) if b.blob is not None}
    last: dict[int, int] = {}
    for k, step in enumerate(program.steps):
        for i in (*step.inputs, *step.outputs):
            last[i] = k
    frees: list[list[int]] = [[] for _ in program.steps]
    for i, k in sorted(last.items()):
        if i >= 0 and i not in held:
            frees[k].append(i)
    return tuple(Action(step.inputs, step.outputs, tuple(frees[k]), aliases[k]) for k, step in enumerate(program.steps))
