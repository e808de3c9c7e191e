"""Inference of one call with known operands: values and types, including symbolic ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.dim import INF, Dim, DimLike, bounds, symbol
from optdnn.ops.base import Attrs, Call, Result
from optdnn.ops.table import OPDEFS
from optdnn.types import INT64, Array, TensorType, tensor


def fresh(hint: str, most: DimLike = INF) -> Dim:
    """A symbol of at most ``most``."""
    return symbol(hint, 0, bounds(most)[1])


def infer(kind: str, *operands: Any, attrs: Attrs | None = None, outputs: int = 1, dtype: Any = np.int64) -> Result:
    """Inference of one call. Operands: a type, None, or a known value (an array, or numbers and symbols of ``dtype``)."""
    types: list[TensorType | None] = []
    values: list[Array | None] = []
    for x in operands:
        if x is None or isinstance(x, TensorType):
            types.append(x)
            values.append(None)
            continue
        if not isinstance(x, np.ndarray):
            flat = np.asarray(x, dtype=object).reshape(-1)
            x = np.asarray(x, dtype=object if any(isinstance(v, Dim) for v in flat) else dtype)
        types.append(tensor(INT64 if x.dtype == object else x.dtype, *x.shape))
        values.append(x)
    attrs = OPDEFS[kind].attrs() if attrs is None else attrs
    return OPDEFS[kind].infer(Call(kind, attrs, tuple(types), tuple(values), outputs, fresh))


def infer_value(kind: str, *operands: Any, attrs: Attrs | None = None, dtype: Any = np.int64) -> Any:
    """The known value of the first output, or None."""
    values = infer(kind, *operands, attrs=attrs, dtype=dtype).values
    return values[0] if values else None


def shape_of(kind: str, *operands: Any, attrs: Attrs | None = None) -> Any:
    """The inferred shape of the first output."""
    return infer(kind, *operands, attrs=attrs).types[0].shape
