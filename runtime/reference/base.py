"""Conventions of the NumPy kernels.

A kernel is ``kernel(*arrays, **attrs) -> tuple of arrays``; absent optional operands are None; attributes are the fields
of the kind's attribute dataclass. Kernels compute in the dtype they are given (so that promoted float64 runs stay exact);
half precisions are widened by :func:`optdnn.runtime.reference.run.run_kernel`, which rounds once at the end.

A composed kernel evaluates other kinds (bodies, the operators of a region): ``kernel(run, *arrays, **attrs)``; ``run`` is
``run_kernel``. The composed kernel applies the stages among its own attributes; ``run_kernel`` applies the other kernels' stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Protocol, TypeAlias, TypeVar

from optdnn.types import Array, DType

Kernel: TypeAlias = Callable[..., tuple[Array, ...]]
T = TypeVar("T")


class Run(Protocol):
    """:func:`optdnn.runtime.reference.run.run_kernel`, as composed kernels receive it."""

    def __call__(
        self,
        kind: str,
        operands: Sequence[Array | None],
        attrs: Mapping[str, Any],
        dtypes: Sequence[DType] | None = None,
        /,
    ) -> tuple[Array, ...]: ...

    def trip(self) -> None:
        """Count an iteration of a Loop. Raises ValueError if the loops of one call have run too often in total."""

    def bare(self, kind: str, attrs: Mapping[str, Any], dtypes: Sequence[DType | None], /) -> Kernel | None:
        """The single kernel that computes an operator on operands of these types; None if the operator needs more than one
        kernel."""


def picked(args: Sequence[int | None], registers: Sequence[T], operands: Sequence[T | None]) -> list[T | None]:
    """The values that a stage's ``args`` name (:class:`optdnn.ops.base.Stage`)."""
    return [None if a is None else registers[~a] if a < 0 else operands[a] for a in args]


ComposedKernel: TypeAlias = Callable[Concatenate[Run, ...], tuple[Array, ...]]
