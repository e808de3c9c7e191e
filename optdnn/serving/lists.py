"""Tensors that requests hold as lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from optdnn.serving.datatypes import DTYPE_OF
from optdnn.serving.refusals import Refusal
from optdnn.types import BOOL, RANK_LIMIT, Array, DType, raw_bytes


def bytes_of_list(name: str, kind: str, data: list[Any], shape: Sequence[int]) -> memoryview:
    """The bytes of input ``name`` from a list of numbers, nested as ``shape`` says or flat.

    Raises Refusal for other lists, and for numbers that do not fit the datatype ``kind``."""
    dtype = DTYPE_OF.get(kind)
    if dtype is None:
        raise Refusal(f"input {name!r} is {kind!r:.40}, which is not a datatype of numbers")
    try:
        found = np.array(_numbers(data)) if data else np.zeros(0, dtype)
    except (ValueError, OverflowError, TypeError) as error:
        raise Refusal(f"the data of input {name!r} is not an array of numbers") from error
    if found.shape != tuple(shape) and (found.ndim != 1 or found.size != math.prod(shape)):
        raise Refusal(f"the data of input {name!r} has shape {list(found.shape)}, not {list(shape)}")
    if not _holds(dtype, found):
        raise Refusal(f"the data of input {name!r} does not fit {kind}")
    return raw_bytes(found.astype(dtype))


def _numbers(data: list[Any], depth: int = 1) -> list[Any]:
    """``data``, which holds only numbers and lists of them. Raises ValueError.

    NumPy gives every element of an array the bytes of its longest text: one long text among many short ones would fill the memory.
    """
    kinds = set(map(type, data))
    if depth > RANK_LIMIT or not (kinds <= {int, float, bool} or kinds == {list}):
        raise ValueError("not an array of numbers")
    if kinds == {list}:
        for part in data:
            _numbers(part, depth + 1)
    return data


def _holds(dtype: DType, found: Array) -> bool:
    if not found.size:
        return True
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return found.dtype.kind in "iu" and int(found.min()) >= info.min and int(found.max()) <= info.max
    return found.dtype.kind == "b" if dtype == BOOL else found.dtype.kind in "iuf"
