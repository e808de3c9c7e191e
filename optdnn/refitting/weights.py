"""A model with other weights: arrays by name, and low-rank adapters (LoRA) added to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from optdnn.errors import UsageError, did_you_mean
from optdnn.importers.external_data import ExternalData
from optdnn.importers.model import Model
from optdnn.importers.tensors import element_type, to_array
from optdnn.types import Array, bits_of, dtype_name, is_float

IN_MEMORY = "optdnn: in memory"
"""Key of external data in memory."""


class _Given(ExternalData):
    """The external data of a model, and arrays in memory besides."""

    def __init__(self, arrays: Mapping[str, Array], other: ExternalData):
        super().__init__(None, "")
        self._arrays, self._other = arrays, other

    def read(self, tensor: str, entries: Mapping[str, str], nbytes: int) -> Array:
        if IN_MEMORY in entries and tensor in self._arrays:
            return np.ascontiguousarray(self._arrays[tensor]).reshape(-1).view(np.uint8)
        return self._other.read(tensor, entries, nbytes)


def with_weights(model: Model, weights: Mapping[str, Any]) -> Model:
    """The model with other elements in some initializers, given by name. The arrays are not copied.

    Raises UsageError, before anything else happens, that names each array which is no initializer or has another shape or type.
    """
    if not isinstance(weights, Mapping):
        raise UsageError(f"weights must map names of initializers to arrays, not {type(weights).__name__}")
    if not weights:
        return model
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    known = {t.name: t for t in proto.graph.initializer}
    arrays: dict[str, Array] = {}
    wrong: list[str] = []
    for name, given in weights.items():
        t, array = known.get(name), np.asarray(given)
        if t is None:
            meant = did_you_mean(str(name), known)
            wrong.append(f"{name!r} is not an initializer of {model.name}" + (f"; {meant}" if meant else ""))
            continue
        dtype = element_type(t.data_type)
        if array.dtype != dtype or array.shape != tuple(t.dims):
            found = f"{array.dtype.name}{list(array.shape)}"
            wrong.append(f"{name!r} is {dtype_name(dtype)}{list(t.dims)} in the network, the given array {found}")
            continue
        if bits_of(dtype) < 8:
            wrong.append(f"{name!r} has elements of {bits_of(dtype)} bits: give them with a whole model")
            continue
        arrays[name] = array
        _declare(t)
    if wrong:
        raise UsageError("\n  ".join(["these weights cannot be taken:", *wrong]))
    return replace(model, proto=proto, external=_Given(arrays, model.external))


def _declare(t: onnx.TensorProto) -> None:
    """Keep the name, type and shape of a tensor, and mark its elements as in memory."""
    name, kind, dims = t.name, t.data_type, list(t.dims)
    t.Clear()
    t.name, t.data_type = name, kind
    t.dims.extend(dims)
    t.data_location = onnx.TensorProto.EXTERNAL
    t.external_data.add(key=IN_MEMORY, value=name)


def with_adapters(model: Model, adapters: Mapping[str, Sequence[Any]]) -> Model:
    """The model with ``W + scale * (B @ A)`` in place of each weight W that has an adapter ``(A, B)`` or ``(A, B, scale)``.

    A is [rank, n] and B [m, rank] for W [m, n], as ONNX stores it: for a MatMul, whose weight is the transposed one of a PyTorch
    layer, give ``(B.T, A.T)``. Sums are in float32 (float64 for float64). Raises UsageError, naming each adapter that does not fit.
    """
    if not isinstance(adapters, Mapping):
        raise UsageError(f"adapters must map names of initializers to (A, B), not {type(adapters).__name__}")
    known = {t.name: t for t in model.proto.graph.initializer}
    merged, wrong = {}, []
    for name, parts in adapters.items():
        t = known.get(name)
        if t is None:
            meant = did_you_mean(str(name), known)
            wrong.append(f"{name!r} is not an initializer of {model.name}" + (f"; {meant}" if meant else ""))
            continue
        weight = to_array(t, model.external, model.name)
        try:
            merged[name] = merge(weight, parts)
        except ValueError as error:
            wrong.append(f"{name!r}: {error}")
    if wrong:
        raise UsageError("\n  ".join(["these adapters do not fit:", *wrong]))
    return with_weights(model, merged)


def merge(weight: Array, adapter: Sequence[Any]) -> Array:
    """A weight with its adapter added, in the weight's type. Raises ValueError where shapes do not fit."""
    if not is_float(weight.dtype):
        raise ValueError("an adapter is for weights of floats")
    if not isinstance(adapter, (tuple, list)) or len(adapter) not in (2, 3):
        raise ValueError("an adapter is (A, B) or (A, B, scale)")
    wide = np.promote_types(weight.dtype, np.float32) if weight.dtype.kind == "f" else np.dtype(np.float32)
    a, b = (np.asarray(x).astype(wide) for x in adapter[:2])
    scale = np.asarray(adapter[2] if len(adapter) == 3 else 1.0)
    fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and (b.shape[0], a.shape[1]) == weight.shape
    if not fits or scale.shape:
        raise ValueError(
            f"A {list(a.shape)} and B {list(b.shape)} do not give B @ A of the weight's {list(weight.shape)}"
        )
    result: Array = (weight.astype(wide) + wide.type(scale) * (b @ a)).astype(weight.dtype)
    return result
