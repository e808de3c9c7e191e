"""The check of integers that say where or how many, for targets whose kernels cannot refuse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optdnn.errors import EngineError, InputError
from optdnn.runtime.program import Plain
from optdnn.types import Array, TensorSpec


def bounds_of(plain: Plain) -> dict[str, tuple[int, int, str]]:
    """The bounds that a program's meta holds. Raises EngineError for anything else."""
    match plain:
        case dict() if all(_are_bounds(row) for row in plain.values()):
            return {str(name): (row[0], row[1], row[2]) for name, row in plain.items()}
    raise EngineError("the engine's bounds of inputs are malformed")


def _are_bounds(row: Plain) -> bool:
    return isinstance(row, list) and [type(x) for x in row] == [int, int, str]


def check_bounds(
    bounds: Mapping[str, tuple[int, int, str]], specs: Sequence[TensorSpec], arrays: Sequence[Array]
) -> None:
    """Raises InputError for an array with an element outside of what its input may hold (``bounds``: name -> lowest, highest,
    whose; the ``meta["bounds"]`` of a program)."""
    for spec, a in zip(specs, arrays, strict=True):
        limits = bounds.get(spec.name)
        if limits is None or not a.size:
            continue
        low, high, whose = limits
        least, most = a.min(), a.max()
        if least < low or most > high:
            raise InputError(
                f"input {spec.name!r} holds {int(least) if least < low else int(most)}; {whose} takes {low} to {high}"
            )
