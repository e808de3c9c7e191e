"""Inference: an operator's results by its definition, and which of two results tells more.

Types hold sizes as numbers or expressions (:mod:`optdnn.dim`); small integer tensors are known by their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, DimTooLarge, bounds, parts_of, substitute
from optdnn.errors import InternalError, ShapeError
from optdnn.ir.op import Output
from optdnn.ops.base import KNOWN_LIMIT, Call, Known, Result
from optdnn.ops.table import OPDEFS
from optdnn.types import INT64, Shape, TensorType

LARGE_PARTS = 16
"""Where a result's size would be too large an expression, the operands' sizes with more parts than this become symbols."""


def infer(
    kind: str,
    attrs: Any,
    types: Sequence[TensorType | None],
    values: Sequence[Known | None],
    n_outputs: int,
    fresh: Any,
) -> Result:
    """Output types of one op by its OpDef; the number of outputs is checked.

    A size that would be too large an expression is one of new symbols instead, as if it depended on data. At given sizes of
    the inputs it is inferred again, as a number.
    """
    definition = OPDEFS.get(kind)
    if definition is None:
        raise InternalError(f"there is no operator kind {kind!r}")
    call = Call(kind, attrs, tuple(types), tuple(values), n_outputs, fresh)
    try:
        result = definition.infer(call)
    except DimTooLarge:
        result = definition.infer(_with_short_sizes(call))
    if len(result.types) < n_outputs:
        raise ShapeError(f"{kind} has {len(result.types)} outputs, {n_outputs} are used")
    return result


def _with_short_sizes(call: Call) -> Call:
    """The call with a new symbol for each large expression in its operands' shapes and values. Equal expressions get one symbol. A
    value with an expression that may be negative is unknown, because symbols are not."""
    made: dict[Dim, Dim] = {}

    def short(d: Any) -> Any:
        if parts_of(d) <= LARGE_PARTS:
            return d
        if d not in made:
            made[d] = call.fresh(call.kind.lower(), d)
        return made[d]

    def known(value: Known | None) -> Known | None:
        if value is None or value.dtype != object:
            return value
        sizes = value.reshape(-1).tolist()
        if any(parts_of(d) > LARGE_PARTS and bounds(d)[0] < 0 for d in sizes):
            return None
        return np.array([short(d) for d in sizes], object).reshape(value.shape)

    types = (t if t is None or t.shape is None else t.with_shape([short(d) for d in t.shape]) for t in call.types)
    return replace(call, types=tuple(types), values=tuple(map(known, call.values)))


def sharper(old: Shape | None, new: Shape | None, inputs: frozenset[str]) -> Shape | None:
    """``old`` with the dimensions of ``new`` that are better known: integers, or expressions of only the inputs' symbols.

    Of two other expressions the simpler one is taken. So after two equal operators are merged, all sizes that depend on them
    use one symbol.
    """
    if old is None or new is None or len(old) != len(new):
        return new if old is None else old

    def free(d: DimLike) -> bool:
        return isinstance(d, Dim) and not all(s.name in inputs for s in d.symbols())

    def better(a: DimLike, b: DimLike) -> bool:
        if not isinstance(a, Dim) or isinstance(b, int):
            return isinstance(a, Dim)
        return free(a) and (not free(b) or _complexity(b) < _complexity(a))

    return tuple(b if better(a, b) else a for a, b in zip(old, new, strict=True))


def with_sizes(out: Output, sizes: Mapping[str, DimLike]) -> Output:
    """The output with other sizes; itself if it has none of these symbols."""
    shape, known = out.type.shape, out.known if out.known is not None and _symbolic(out.known) else None
    dims = [d for d in (*(shape or ()), *(known.reshape(-1) if known is not None else ())) if isinstance(d, Dim)]
    if not any(symbol.name in sizes for d in dims for symbol in d.symbols()):
        return out
    type = out.type if shape is None else out.type.with_shape([substitute(d, sizes) for d in shape])
    if known is None:
        return Output(out.name, type, out.known)
    new = np.array([substitute(d, sizes) for d in known.reshape(-1)], object).reshape(known.shape)
    return Output(out.name, type, new if any(isinstance(d, Dim) for d in new.reshape(-1)) else new.astype(INT64))


def better_known(old: Known | None, new: Known | None, inputs: frozenset[str]) -> bool:
    """Whether ``new`` tells more about the same value than ``old``."""
    if old is None or new is None or not _symbolic(old):
        return old is None and new is not None
    sizes, found = known_shape(old), known_shape(new)
    return not _symbolic(new) or (sizes != found and sharper(sizes, found, inputs) == found)


def _complexity(d: Dim) -> tuple[int, list[tuple[int, str]]]:
    """An order of expressions: fewer parts first, then older symbols."""
    return d.parts, sorted((len(s.name), s.name) for s in d.symbols())


def _symbolic(value: Known) -> bool:
    return bool(value.dtype == object)


def kept(value: Known | None) -> Known | None:
    """A known value that a graph keeps; None for a large one."""
    return value if value is not None and value.size <= KNOWN_LIMIT else None


def known_shape(value: Known | None) -> tuple[DimLike, ...] | None:
    """A known 1-D integer value as a tuple, or None."""
    return None if value is None else tuple(d if isinstance(d, Dim) else int(d) for d in value.reshape(-1))
