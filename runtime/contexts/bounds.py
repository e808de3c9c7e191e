"""The check of integers that are positions or lengths, for targets whose kernels cannot refuse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from optdnn.dim import DimLike, evaluate
from optdnn.dim_text import parse_dim
from optdnn.errors import EngineError, InputError
from optdnn.runtime.program import Plain
from optdnn.types import Array, TensorSpec

Bounds: TypeAlias = tuple[DimLike, DimLike, str]
"""Lowest, highest, and whose positions or lengths they are."""


def bounds_of(plain: Plain) -> dict[str, Bounds]:
    """The bounds that a program's meta holds: numbers, or texts of symbols. Raises EngineError for anything else."""
    match plain:
        case dict() if all(_are_bounds(row) for row in plain.values()):
            return {str(name): (_bound(row[0]), _bound(row[1]), row[2]) for name, row in plain.items()}
    raise EngineError("the engine's bounds of inputs are malformed")


def _are_bounds(row: Plain) -> bool:
    return isinstance(row, list) and len(row) == 3 and type(row[2]) is str and all(type(x) in (int, str) for x in row)


def _bound(value: int | str) -> DimLike:
    bound = value if isinstance(value, int) else parse_dim(value)
    if bound is None:
        raise EngineError("the engine's bounds of inputs are malformed")
    return bound


def check_bounds(
    bounds: Mapping[str, Bounds],
    specs: Sequence[TensorSpec],
    arrays: Sequence[Array],
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Raise InputError for an array with an element outside of the bounds of its input.

    ``bounds`` are given by name (``meta["bounds"]`` of a program). ``sizes`` are those of the symbols in bounds.
    """
    for spec, a in zip(specs, arrays, strict=True):
        limits = bounds.get(spec.name)
        if limits is None or not a.size:
            continue
        low, high = (d if isinstance(d, int) else evaluate(d, sizes or {}) for d in limits[:2])
        whose = limits[2]
        least, most = a.min(), a.max()
        if least < low or most > high:
            raise InputError(
                f"input {spec.name!r} holds {int(least) if least < low else int(most)}; {whose} takes {low} to {high}"
            )
