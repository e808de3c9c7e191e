"""The checks of a request against its model. Nothing of a request reaches a queue before it has passed them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.errors import InputError, did_you_mean
from optdnn.runtime.contexts.signature import show
from optdnn.serving.datatypes import datatype
from optdnn.serving.refusals import NotFound, Refusal
from optdnn.serving.regions import NamedPart
from optdnn.serving.repository import Model
from optdnn.serving.service import GivenTensor, WantedOutput
from optdnn.serving.tensors import DeviceSlice, InferRequest, RegionSlice, Tensor, check_bools, check_shape
from optdnn.types import BOOL, TensorSpec

SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
LONGEST_TIMEOUT_S = 86_400.0


def checked_request(
    model: Model, given: Sequence[GivenTensor], parameters: Mapping[str, Any], timeout_s: float | None
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
    check_shape(spec.name, given.shape)
    dims = tuple(given.shape)
    assert not isinstance(given.data, NamedPart)
    size = given.data.nbytes
    want = math.prod(dims) * spec.dtype.itemsize
    if size != want:
        raise Refusal(f"input {spec.name!r} has {size} bytes; its shape {list(dims)} takes {want}")
    if isinstance(given.data, DeviceSlice) and spec.dtype == BOOL:
        raise Refusal(f"input {spec.name!r} is BOOL, which is not read from CUDA shared memory")
    if isinstance(given.data, RegionSlice | DeviceSlice):
        return Tensor(spec.dtype, dims, given.data)
    check_bools(spec.name, spec.dtype, np.frombuffer(given.data, np.uint8))
    return Tensor(spec.dtype, dims, np.frombuffer(given.data, spec.dtype).reshape(dims))
