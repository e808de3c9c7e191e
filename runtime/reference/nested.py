"""A graph as plain data inside of an operator's attributes: the branches of If, the bodies of Loop and Scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optdnn.dim import evaluate
from optdnn.dim_text import parse_dim
from optdnn.errors import ShapeError
from optdnn.runtime.reference.base import Kernel, Run
from optdnn.types import Array, DType

CONSTANT_LIMIT = 4096
"""The most elements of a constant inside of a nested graph; a larger one is an operand that the graph captures."""


TextShape: TypeAlias = tuple[int | str, ...] | None
"""A shape as plain data."""


class PlainOp(NamedTuple):
    """One operator: the registers that it reads (None: absent), and the types of its results, which take the next registers."""

    kind: str
    attrs: Mapping[str, Any]
    inputs: tuple[int | None, ...]
    dtypes: tuple[DType, ...]


class PlainGraph(NamedTuple):
    """Operators in the order in which they run.

    Registers are numbered from 0: the ``inputs`` operands, the constants, then each operator's results. ``outputs`` are
    registers. ``shapes``: the inferred shapes of the inputs, then of the outputs; a size that varies is a text over symbols, and
    None is an unknown rank. Engines of older versions have none.
    """

    inputs: int
    constants: tuple[Array, ...]
    ops: tuple[PlainOp, ...]
    outputs: tuple[int, ...]
    shapes: tuple[TextShape, ...] = ()

    def valid(self) -> bool:
        """True if every register is written before it is read."""
        written = self.inputs + len(self.constants)
        for op in self.ops:
            if any(i is not None and not 0 <= i < written for i in op.inputs):
                return False
            written += len(op.dtypes)
        typed = not self.shapes or len(self.shapes) == self.inputs + len(self.outputs)
        return typed and self.inputs >= 0 and all(0 <= i < written for i in self.outputs)

    def output_shape(self, output: int, fed: Sequence[Sequence[int] | None]) -> tuple[int, ...]:
        """The shape of an output that is not computed, from the shapes of the operands. A size that only the computation
        would determine is 0."""
        shape = self.shapes[self.inputs + output] if self.shapes else ()
        sizes: dict[str, int] = {}
        for declared, given in zip(self.shapes[: self.inputs], fed, strict=False):
            if declared is not None and given is not None and len(declared) == len(given):
                sizes |= {d: n for d, n in zip(declared, given, strict=True) if isinstance(d, str)}
        return tuple(_size(d, sizes) for d in shape or ())


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int) or size in sizes:
        return size if isinstance(size, int) else sizes[size]
    dim = parse_dim(size)
    try:
        return 0 if dim is None else evaluate(dim, sizes)
    except ShapeError:
        return 0


def bare_kernels(run: Run, graph: PlainGraph, operands: Sequence[Array | None]) -> list[Kernel | None]:
    """For each operator, the single kernel that computes it on operands of these types, if any: for bodies that run often."""
    dtypes = [None if x is None else x.dtype for x in (*operands, *graph.constants)]
    found: list[Kernel | None] = []
    for op in graph.ops:
        found.append(run.bare(op.kind, op.attrs, [None if i is None else dtypes[i] for i in op.inputs]))
        dtypes.extend(op.dtypes)
    return found


def run_graph(
    run: Run, graph: PlainGraph, operands: Sequence[Array | None], bare: Sequence[Kernel | None] = ()
) -> list[Array]:
    """Evaluate a nested graph; raises RunError like its operators. ``bare``: :func:`bare_kernels`, for operands of these types."""
    registers: list[Array | None] = [*operands, *graph.constants]
    for op, kernel in zip_longest(graph.ops, bare):
        values = [None if i is None else registers[i] for i in op.inputs]
        results: Sequence[Array] | None = None if kernel is None else _computed(kernel, values)
        if results is None:
            results = run(op.kind, values, op.attrs, op.dtypes)
        registers.extend(results[: len(op.dtypes)])
    found = [registers[i] for i in graph.outputs]
    if any(x is None for x in found):
        raise ValueError("a body yields an operand that is absent")
    return [x for x in found if x is not None]


def _computed(kernel: Kernel, values: Sequence[Array | None]) -> list[Array] | None:
    """The results as ``run`` would give them; None if the kernel refuses its operands, so that ``run`` reports the reason."""
    try:
        return [np.ascontiguousarray(r) if r.ndim else r for r in map(np.asarray, kernel(*values))]
    except (ValueError, IndexError):
        return None
