"""The shapes of a build: fixed dimensions, ranges, and profiles.

Text (``--shape``)::

    x=1x3x224x224                                   fixed
    x=?x3x224x224                                   one dimension stays symbolic
    x=1x3x224x224..8x3x224x224..32x3x512x512        minimum, optimum, maximum
    x=1..8..32x3x224x224                            the same per dimension

A profile is a box of shapes: a range per symbolic dimension. An engine accepts every shape inside of one of its profiles and is
tuned at their optima. Naming an input a second time begins the next profile.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from optdnn.dim import INF
from optdnn.errors import UsageError


@dataclass(frozen=True, slots=True)
class DimRange:
    """The sizes ``min`` to ``max`` (both included) of a dimension; ``opt`` is the size to optimize for."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max <= INF:
            raise UsageError(
                f"the range {self} is not valid",
                hint="0 <= min <= opt <= max <= 2**62 must hold; write it min..opt..max",
            )

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and self.min <= size <= self.max

    def __str__(self) -> str:
        return f"{self.min}..{self.opt}..{self.max}"


DimSpec: TypeAlias = int | DimRange | None
"""A requested dimension; None leaves it symbolic, without a range."""
ShapeSpec: TypeAlias = tuple[DimSpec, ...]
Profile: TypeAlias = Mapping[str, DimRange]
"""Symbol -> its range."""


class InputShapes(dict[str, ShapeSpec]):
    """The shapes of a build's inputs, in normal form.

    The mapping itself holds, per input, everything that any profile allows (``opt`` is the first profile's); ``profiles`` holds
    each profile separately, and is empty if no dimension has a range.
    """

    def __init__(self, profiles: Sequence[Mapping[str, ShapeSpec]] = ()):
        super().__init__(_union(profiles))
        ranged = any(isinstance(d, DimRange) for p in profiles for dims in p.values() for d in dims)
        self.profiles: tuple[Mapping[str, ShapeSpec], ...] = tuple(profiles) if ranged or len(profiles) > 1 else ()

    def to_plain(self) -> Any:
        """JSON-like: name -> dimensions; a list of such tables if there are several profiles."""
        tables = [
            {name: [str(d) if isinstance(d, DimRange) else d for d in dims] for name, dims in sorted(p.items())}
            for p in (self.profiles or (self,))
        ]
        return tables[0] if len(tables) == 1 else tables


def _union(profiles: Sequence[Mapping[str, ShapeSpec]]) -> dict[str, ShapeSpec]:
    found: dict[str, ShapeSpec] = {}
    for name in dict.fromkeys(n for p in profiles for n in p):
        given = [p.get(name) for p in profiles]
        shapes = [s for s in given if s is not None]
        if len({len(s) for s in shapes}) > 1:
            raise UsageError(f"the profiles give input {name!r} different ranks")
        dims = [_hull(column) for column in zip(*shapes, strict=True)]
        # a profile without an input allows all of the input's sizes
        found[name] = tuple(dims) if len(shapes) == len(given) else (None,) * len(dims)
    return found


def _hull(dims: Sequence[DimSpec]) -> DimSpec:
    ranges = [d if isinstance(d, DimRange) else DimRange(d, d, d) for d in dims if d is not None]
    if len(ranges) < len(dims):
        return None
    return _plain(min(r.min for r in ranges), ranges[0].opt, max(r.max for r in ranges))


def _plain(low: int, opt: int, high: int) -> int | DimRange:
    return low if low == high else DimRange(low, opt, high)


# ---------------------------------------------------------------- text


_SIZE = r"(?:\d+|\?)"
_SHAPE = rf"{_SIZE}(?:x{_SIZE})*"
_TRIPLE = re.compile(rf"({_SHAPE})\.\.({_SHAPE})\.\.({_SHAPE})")
_DIM = re.compile(r"(\d+)\.\.(\d+)\.\.(\d+)|(\d+)|(\?)")
_ENDS = re.compile(r"(\d+)\.\.(\d+)")
_TEXT = re.compile(r"scalar|[\dx?.]+")


def parse_dims(text: str) -> ShapeSpec:
    """The dimensions in a text in the form of ``--shape``, without the name. Raises UsageError for a malformed text.

    The two forms of ranges cannot be confused: three shapes of equal rank are minimum, optimum and maximum, and a
    dimension's range also has three numbers.
    """
    if text == "scalar":
        return ()
    if m := _TRIPLE.fullmatch(text):
        rows = [part.split("x") for part in m.groups()]
        if len({len(r) for r in rows}) == 1:
            return _columns([[None if d == "?" else int(d) for d in row] for row in rows], repr(text))
    dims: list[DimSpec] = []
    for part in text.split("x"):
        found = _DIM.fullmatch(part)
        if not found:
            ends = _ENDS.fullmatch(part)
            hint = "write 1x3x224x224, ? for a dimension that stays symbolic, or ranges: MIN..OPT..MAX"
            if ends is not None:
                hint = f"name the size to optimize for, too: {ends[1]}..OPT..{ends[2]}"
            if not text:
                hint = "write scalar for a tensor without dimensions"
            raise UsageError(f"the shape {text!r} cannot be read: {part!r} is neither a size nor a range", hint=hint)
        low, opt, high, size, _ = found.groups()
        dims.append(_range(int(low), int(opt), int(high), repr(text)) if low else int(size) if size else None)
    return tuple(dims)


def _columns(rows: Sequence[Sequence[int | None]], where: str) -> ShapeSpec:
    """Minimum, optimum and maximum of a shape as one range per dimension."""
    if len({len(r) for r in rows}) > 1:
        raise UsageError(f"the minimum, optimum and maximum of {where} have different ranks")
    dims: list[DimSpec] = []
    for axis, (low, opt, high) in enumerate(zip(*rows, strict=True)):
        if low is None or opt is None or high is None:
            if not low is opt is high is None:
                raise UsageError(f"axis {axis} of {where} is symbolic in one shape and not in the others")
            dims.append(None)
        else:
            dims.append(_range(low, opt, high, f"{where}, axis {axis}"))
    return tuple(dims)


def _range(low: int, opt: int, high: int, where: str) -> int | DimRange:
    if not low <= opt <= high:
        raise UsageError(f"{where}: minimum {low}, optimum {opt} and maximum {high} are not in this order")
    return _plain(low, opt, high)


def parse_shapes(texts: Sequence[str]) -> InputShapes:
    """The texts of all ``--shape`` options, ``NAME=DIMS`` each. Raises UsageError."""
    profiles: list[dict[str, ShapeSpec]] = [{}]
    for text in texts:
        name, equals, dims = text.rpartition("=")
        if not equals or not name or not _TEXT.fullmatch(dims):
            raise UsageError(
                f"--shape {text!r} is not NAME=1x3x224x224",
                hint="use ? for a dimension that stays symbolic, and MIN..OPT..MAX for ranges",
            )
        parsed = parse_dims(dims)
        if name in profiles[-1]:
            profiles.append({})
        profiles[-1][name] = parsed
    for k, p in enumerate(profiles):
        if p in profiles[:k]:
            raise UsageError(f"--shape gives {', '.join(f'input {n!r}' for n in p)} the same shape twice")
    return InputShapes(profiles if texts else ())


# ---------------------------------------------------------------- Python


def input_shapes(given: Any) -> InputShapes:
    """``shapes=`` of the Python API in normal form.

    A mapping of an input's name to its dimensions (each an integer, None or a :class:`DimRange`), to a list of three shapes
    (minimum, optimum, maximum), or to the text that ``--shape`` takes; or a list of such mappings, one per profile.
    Raises UsageError for anything else.
    """
    if isinstance(given, InputShapes):
        return given
    tables = given if isinstance(given, (list, tuple)) and given else [given]
    if not all(isinstance(t, Mapping) for t in tables):
        raise UsageError(f"shapes must map names of inputs to dimensions, not {given!r}")
    profiles = [{str(name): _spec(str(name), dims) for name, dims in t.items()} for t in tables]
    return InputShapes(profiles if any(profiles) else ())


def _spec(name: str, dims: Any) -> ShapeSpec:
    what = f"the shape of {name!r}"
    if isinstance(dims, str):
        return parse_dims(dims)
    if not isinstance(dims, Sequence) or isinstance(dims, bytes):
        raise UsageError(f"{what} must be a tuple of dimensions, not {dims!r}")
    nested = [isinstance(d, Sequence) and not isinstance(d, (str, bytes)) for d in dims]
    if any(nested):
        if not all(nested) or len(dims) != 3:
            raise UsageError(
                f"{what} must be dimensions, or three shapes (minimum, optimum, maximum), not {dims!r}",
                hint="the range of one dimension is optdnn.DimRange(min, opt, max)",
            )
        return _columns([[_size(what, d) for d in row] for row in dims], what)
    return tuple(
        _plain(d.min, d.opt, d.max) if isinstance(d, DimRange) else _size(f"{what}, {tuple(dims)},", d) for d in dims
    )


def _size(what: str, value: Any) -> int | None:
    try:
        size = None if value is None else operator.index(value)
    except TypeError:
        hint = "None leaves a dimension symbolic"
        if isinstance(value, str) and ".." in value:
            hint = "the range of one dimension is optdnn.DimRange(min, opt, max); as text, the shape is '1..8..32x3x224x224'"
        raise UsageError(f"{what} must hold integers, not {value!r}", hint=hint) from None
    if size is not None and size < 0:
        raise UsageError(f"{what} has a negative dimension: {size}")
    return size
