"""The checks of a request against its model. Nothing of a request reaches a queue before it has passed them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import InputError, did_you_mean
from optdnn.runtime.contexts.signature import show
from optdnn.serving.datatypes import datatype
from optdnn.serving.refusals import NotFound, Refusal
from optdnn.serving.repository import Model
from optdnn.serving.tensors import InferRequest, RegionSlice, Tensor
from optdnn.types import BOOL, RANK_LIMIT, Array, DType, TensorSpec

SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
LONGEST_TIMEOUT_S = 86_400.0


@dataclass(frozen=True)
class GivenTensor:
    """An input as a client describes it. ``data``: its bytes, a list of numbers, or where it lies in shared memory."""

    name: str
    datatype: str
    shape: Sequence[Any]
    data: memoryview | list[Any] | RegionSlice


@dataclass(frozen=True)
class WantedOutput:
    """An output that a client asks for; ``region``: where it is to be written."""

    name: str
    binary: bool = True
    region: RegionSlice | None = None


def checked_request(
    model: Model, given: Sequence[GivenTensor], parameters: Mapping[str, Any], timeout_s: float | None = None
) -> InferRequest:
    """A request that fits the model. ``timeout_s``: the call's own. Raises Refusal."""
    by_name = {g.name: g for g in given}
    if len(by_name) < len(given):
        raise Refusal("an input is given twice")
    try:
        ordered = model.signature.in_order(by_name)
        tensors = {s.name: _tensor(s, g) for s, g in zip(model.facts.inputs, ordered, strict=True)}
        model.check_shapes([t.shape for t in tensors.values()])
    except InputError as error:
        raise Refusal(error.message, hint=error.hint) from error
    if any(parameters.get(name) for name in SEQUENCES):
        raise Refusal("this server keeps no state between requests, so it takes no sequences")
    priority = _whole(parameters, "priority")
    timeouts = [t for t in (timeout_s, _whole(parameters, "timeout") / 1e6) if t]
    return InferRequest(tensors, priority, min(*timeouts, LONGEST_TIMEOUT_S) if timeouts else None)


def check_outputs(model: Model, wanted: Sequence[WantedOutput]) -> None:
    """Raise NotFound for an output that the model does not have, Refusal for one that is asked for twice."""
    names = [s.name for s in model.facts.outputs]
    for w in wanted:
        if w.name not in names:
            gives = f"there is no output {w.name!r}; the model gives {show(model.facts.outputs)}"
            raise NotFound(gives, hint=did_you_mean(w.name, names))
    if len({w.name for w in wanted}) < len(wanted):
        raise Refusal("an output is asked for twice")


def _whole(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Refusal(f"{name} must be a whole number, not {value!r:.60}")
    return value


def _tensor(spec: TensorSpec, given: GivenTensor) -> Tensor:
    if given.datatype != datatype(spec.dtype):
        raise Refusal(f"input {spec.name!r} is {given.datatype!r:.40}; the model takes {datatype(spec.dtype)}")
    shape = given.shape
    if len(shape) > RANK_LIMIT or not all(type(d) is int and 0 <= d < 1 << 63 for d in shape):
        raise Refusal(f"the shape of input {spec.name!r} is not one")
    dims = tuple(shape)
    if isinstance(given.data, list):
        return Tensor(spec.dtype, dims, from_list(spec, given.data, dims))
    size = given.data.nbytes
    want = math.prod(dims) * spec.dtype.itemsize
    if size != want:
        raise Refusal(f"input {spec.name!r} has {size} bytes; its shape {list(dims)} takes {want}")
    if isinstance(given.data, RegionSlice):
        return Tensor(spec.dtype, dims, given.data)
    return Tensor(spec.dtype, dims, _from_bytes(spec, given.data, dims))


def _from_bytes(spec: TensorSpec, data: memoryview, shape: tuple[int, ...]) -> Array:
    if spec.dtype == BOOL and data.nbytes and int(np.frombuffer(data, np.uint8).max()) > 1:
        raise Refusal(f"input {spec.name!r} holds bytes that are not 0 or 1")
    return np.frombuffer(data, spec.dtype).reshape(shape)


def from_list(spec: TensorSpec, data: list[Any], shape: tuple[int, ...]) -> Array:
    """The array of a list of numbers, nested as ``shape`` says or flat.

    Raises Refusal where it is none, or does not fit the type."""
    try:
        found = np.array(_numbers(data)) if data else np.zeros(0, spec.dtype)
    except (ValueError, OverflowError, TypeError) as error:
        raise Refusal(f"the data of input {spec.name!r} is not an array of numbers") from error
    if found.shape != shape and (found.ndim != 1 or found.size != math.prod(shape)):
        raise Refusal(f"the data of input {spec.name!r} has shape {list(found.shape)}, not {list(shape)}")
    if not _holds(spec.dtype, found):
        raise Refusal(f"the data of input {spec.name!r} does not fit {datatype(spec.dtype)}")
    return found.astype(spec.dtype).reshape(shape)


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
