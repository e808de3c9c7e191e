"""Operator attributes as plain data, so that a step can carry them through an engine file.

Attributes are frozen dataclass fields: None, bool, int, float, str, dtypes, small arrays, fused stages and tuples of
these. In plain form a tuple is a list, and every dict is a tag: ``{"dtype": name}``, ``{"array": [dtype, shape, values]}``,
``{"stage": [kind, args, attrs]}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.errors import EngineError, InternalError
from optdnn.runtime.program import Plain
from optdnn.runtime.reference.run import PlainStage
from optdnn.types import DTYPES, dtype_name

ARRAY_LIMIT = 4096
"""Most elements of an array attribute; anything larger is an operand."""


def attrs_to_plain(attrs: Mapping[str, Any]) -> dict[str, Plain]:
    """Attributes (of a kernel, as keyword arguments) in plain form. Raises InternalError for what has none."""
    return {name: _to_plain(value, name) for name, value in attrs.items()}


def attrs_from_plain(plain: Any) -> dict[str, Any]:
    """The inverse of :func:`attrs_to_plain`. Raises EngineError for data it cannot have produced."""
    if not isinstance(plain, dict):
        raise EngineError("a step's attributes are not a table")
    return {name: _from_plain(value, name) for name, value in plain.items()}


def _to_plain(value: Any, name: str) -> Plain:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.size > ARRAY_LIMIT or value.dtype.kind == "c":
            raise InternalError(f"attribute {name!r} is an array of {value.size} {value.dtype}; make it an operand")
        return {"array": [dtype_name(value.dtype), list(value.shape), [_number(x) for x in value.reshape(-1)]]}
    if isinstance(value, PlainStage):
        return {"stage": [value.kind, _to_plain(tuple(value.args), name), attrs_to_plain(value.attrs)]}
    if isinstance(value, (tuple, list)):
        return [_to_plain(x, name) for x in value]
    raise InternalError(f"attribute {name!r} is a {type(value).__name__}, which an engine cannot hold")


def _number(x: Any) -> bool | int | float:
    if x.dtype.kind == "b":
        return bool(x)
    return int(x) if x.dtype.kind in "iu" else float(x)


def _from_plain(value: Plain, name: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return tuple(_from_plain(x, name) for x in value)
        case {"dtype": str(dtype)} if len(value) == 1 and dtype in DTYPES:
            return DTYPES[dtype]
        case {"stage": [str(kind), list(args), dict(attrs)]} if len(value) == 1:
            if all(a is None or type(a) is int for a in args):
                return PlainStage(kind, tuple(args), attrs_from_plain(attrs))
        case {"array": [str(dtype), list(shape), list(values)]} if len(value) == 1 and dtype in DTYPES:
            fits = all(type(d) is int and d >= 0 for d in shape) and all(isinstance(x, (int, float)) for x in values)
            if fits and len(values) <= ARRAY_LIMIT:
                try:
                    return np.array(values, DTYPES[dtype]).reshape(shape)
                except (ValueError, OverflowError):
                    pass
    raise EngineError(f"attribute {name!r} of a step is malformed")
