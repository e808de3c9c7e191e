"""A graph as plain data inside of an operator's attributes: the branches of If, the bodies of Loop and Scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optdnn.types import Array, DType

CONSTANT_LIMIT = 4096
"""Most elements of a constant inside of a nested graph; a larger one is an operand that the graph captures."""


class PlainOp(NamedTuple):
    """One operator: registers that it reads (None: absent), and the types of its results, which take the next registers."""

    kind: str
    attrs: Mapping[str, Any]
    inputs: tuple[int | None, ...]
    dtypes: tuple[DType, ...]


class PlainGraph(NamedTuple):
    """Operators in the order in which they run.

    Registers are numbered from 0: the ``inputs`` operands, the constants, then each operator's results. ``outputs`` are
    registers.
    """

    inputs: int
    constants: tuple[Array, ...]
    ops: tuple[PlainOp, ...]
    outputs: tuple[int, ...]

    def valid(self) -> bool:
        """True if every register is written before it is read."""
        written = self.inputs + len(self.constants)
        for op in self.ops:
            if any(i is not None and not 0 <= i < written for i in op.inputs):
                return False
            written += len(op.dtypes)
        return self.inputs >= 0 and all(0 <= i < written for i in self.outputs)


def run_graph(graph: PlainGraph, operands: Sequence[Array | None]) -> list[Array]:
    """Evaluate a nested graph; raises RunError as its operators do."""
    from optdnn.runtime.reference.run import run_kernel  # whose table holds the control-flow kernels

    registers: list[Array | None] = [*operands, *graph.constants]
    for op in graph.ops:
        values = [None if i is None else registers[i] for i in op.inputs]
        results = run_kernel(op.kind, values, op.attrs, op.dtypes)
        registers.extend(results[: len(op.dtypes)])
    found = [registers[i] for i in graph.outputs]
    if any(x is None for x in found):
        raise ValueError("a body yields an operand that is absent")
    return [x for x in found if x is not None]
