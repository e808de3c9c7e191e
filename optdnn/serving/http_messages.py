"""Requests and answers of the protocol over HTTP: JSON, with the bytes of tensors after it (the binary data extension)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from optdnn import limits
from optdnn.serving.datatypes import datatype
from optdnn.serving.lists import bytes_of_list
from optdnn.serving.refusals import Refusal, TooLarge
from optdnn.serving.regions import NamedPart
from optdnn.serving.service import GivenTensor, InferCall, OutputTensor, WantedOutput
from optdnn.serving.tensors import check_shape
from optdnn.types import Array

HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpRequest:
    """The parts of a request. Raises Refusal for a body that is malformed."""

    def __init__(self, whole: memoryview, header_length: str | None):
        length = len(whole) if header_length is None else _length(header_length)
        if length > len(whole):
            raise Refusal(f"{HEADER_LENGTH} is {length}; the body has {len(whole)} bytes")
        found = read_json(whole[:length])
        self._rest = whole[length:]
        self.id = found.get("id", "")
        if not isinstance(self.id, str):
            raise Refusal("id must be a string")
        self.parameters = _parameters(found.get("parameters", {}), "parameters")
        self.inputs = [self._input(_table(row, "an input")) for row in _rows(found.get("inputs"), "inputs")]
        if len(self._rest):
            raise Refusal(f"the body has {len(self._rest)} bytes that belong to no input")
        binary = bool(self.parameters.get("binary_data_output", False))
        rows = [_table(row, "an output") for row in _rows(found.get("outputs", []), "outputs")]
        self.outputs = [self._output(row) for row in rows]
        self.binary = [bool(row.get("parameters", {}).get("binary_data", binary)) for row in rows]
        self.all_binary = binary

    def call(self, model: str, version: str) -> InferCall:
        """The request to a model."""
        return InferCall(model, version, self.inputs, self.outputs, self.parameters)

    def _input(self, row: Mapping[str, Any]) -> GivenTensor:
        name, kind, shape = row.get("name"), row.get("datatype"), row.get("shape")
        if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(shape, list):
            raise Refusal("an input needs a name, a datatype and a shape")
        check_shape(name, shape)
        parameters = _parameters(row.get("parameters", {}), "the parameters of an input")
        region, size, data = NamedPart.of(parameters), parameters.get("binary_data_size"), row.get("data")
        if (region is not None) + (size is not None) + (data is not None) != 1:
            raise Refusal(f"input {name!r} needs either data, a binary_data_size, or a region of shared memory")
        if region is not None:
            return GivenTensor(name, kind, shape, region)
        if size is None:
            if not isinstance(data, list):
                raise Refusal(f"the data of input {name!r} is not an array")
            return GivenTensor(name, kind, shape, bytes_of_list(name, kind, data, shape))
        if type(size) is not int or not 0 <= size <= len(self._rest):
            raise Refusal(f"input {name!r} declares {size!r:.40} bytes; the body has {len(self._rest)} left")
        mine, self._rest = self._rest[:size], self._rest[size:]
        return GivenTensor(name, kind, shape, mine)

    def _output(self, row: Mapping[str, Any]) -> WantedOutput:
        name = row.get("name")
        if not isinstance(name, str):
            raise Refusal("an output needs a name")
        return WantedOutput.of(name, _parameters(row.get("parameters", {}), "the parameters of an output"))


def http_answer(name: str, request: HttpRequest, outputs: Sequence[OutputTensor]) -> tuple[list[bytes], dict[str, str]]:
    """The body of an answer in pieces, and its headers."""
    rows: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for o, binary in zip(outputs, request.binary or [request.all_binary] * len(outputs), strict=True):
        row: dict[str, Any] = {"name": o.name, "datatype": datatype(o.dtype), "shape": list(o.shape)}
        if o.data is None:
            row["parameters"] = {"shared_memory_region_size": o.nbytes}
        elif binary:
            row["parameters"] = {"binary_data_size": o.nbytes}
            tail.append(o.data.tobytes())
        else:
            row["data"] = _json_array(o.data)
        rows.append(row)
    head = {"model_name": name, "model_version": "1", **({"id": request.id} if request.id else {}), "outputs": rows}
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return [text], {"content-type": "application/json"}
    return [text, *tail], {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}


def read_json(text: bytes | memoryview) -> Mapping[str, Any]:
    """A JSON object. Raises Refusal, and TooLarge for one of more bytes than the server parses."""
    most = limits.REQUEST_JSON_BYTES
    if len(text) > most.value:
        raise TooLarge(f"the JSON of a request has {len(text)} bytes", hint=most.hint)
    try:
        return _table(orjson.loads(text), "the body")
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error}") from error


def _json_array(a: Array) -> Array:
    """An array that becomes JSON's numbers: floats of 16 bits as those of 32. NaN and infinities become null."""
    wide = a.astype(np.float32) if a.dtype.itemsize == 2 and a.dtype.kind not in "iu" else a
    return np.ascontiguousarray(wide).reshape(-1)


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise Refusal(f"{HEADER_LENGTH} must be a whole number, not {text!r:.40}")
    return int(text)


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{what} must be a JSON object")
    return value


def _parameters(value: Any, what: str) -> Mapping[str, Any]:
    found = _table(value, what)
    if any(isinstance(v, (list, dict)) for v in found.values()):
        raise Refusal(f"{what} must be strings, numbers or booleans")
    return found


def _rows(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Refusal(f"{what} must be a JSON array")
    return value
