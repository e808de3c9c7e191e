"""NumPy kernels of regions around pointwise operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optdnn.runtime.reference.base import ComposedKernel, Run
from optdnn.types import Array


def joint_pointwise(
    run: Run, *operands: Array | None, counts: Sequence[int], stages: Sequence[Sequence[Any]]
) -> tuple[Array, ...]:
    """The results of several chains of pointwise stages. Chain k reads the next ``counts[k]`` operands; its register 0 is the first
    of them."""
    results, begin = list[Array](), 0
    for count, chain in zip(counts, stages, strict=True):
        own = operands[begin : begin + count]
        results += run("Pointwise", own, {"epilogue": tuple(chain), "arity": 1})
        begin += count
    return tuple(results)


def pointwise_of_rows(
    run: Run, *operands: Array | None, rows: Sequence[int], stages: Sequence[Any]
) -> tuple[Array, ...]:
    """Pointwise stages. The operands at the slots ``rows`` are tables: their rows are taken by the indices after the operands."""
    count = len(operands) - len(rows)
    own = list(operands[:count])
    for slot, index in zip(rows, operands[count:], strict=True):
        own[slot] = run("Gather", [own[slot], index], {"axis": 0})[0]
    return run("Pointwise", own, {"epilogue": tuple(stages), "arity": 1})


COMPOSED: dict[str, ComposedKernel] = {"JointPointwise": joint_pointwise, "PointwiseOfRows": pointwise_of_rows}
