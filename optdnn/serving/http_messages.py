"""Requests and answers of the protocol over HTTP: JSON, with the bytes of tensors after it (the binary data extension)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from optdnn import limits
from optdnn.serving.batching import Outputs
from optdnn.serving.checking import GivenTensor, WantedOutput
from optdnn.serving.datatypes import datatype
from optdnn.serving.facts import ModelFacts
from optdnn.serving.refusals import Refusal, TooLarge
from optdnn.serving.regions import Regions, write
from optdnn.types import Array

HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpRequest:
    """The parts of a request. Raises Refusal for a body that is malformed."""

    def __init__(self, body: bytes, header_length: str | None, regions: Regions):
        whole = memoryview(body)
        length = len(whole) if header_length is None else _length(header_length)
        if length > len(whole):
            raise Refusal(f"{HEADER_LENGTH} is {length}; the body has {len(whole)} bytes")
        found = read_json(whole[:length])
        self._regions = regions
        self._rest = whole[length:]
        self.id = found.get("id", "")
        if not isinstance(self.id, str):
            raise Refusal("id must be a text")
        self.parameters = _table(found.get("parameters", {}), "parameters")
        self.inputs = [self._input(_table(row, "an input")) for row in _rows(found.get("inputs"), "inputs")]
        if len(self._rest):
            raise Refusal(f"{len(self._rest)} bytes after the inputs belong to none")
        binary = bool(self.parameters.get("binary_data_output", False))
        rows = _rows(found.get("outputs", []), "outputs")
        self.outputs = [self._output(_table(row, "an output"), binary) for row in rows]
        self.binary = binary

    def _input(self, row: Mapping[str, Any]) -> GivenTensor:
        name, kind, shape = row.get("name"), row.get("datatype"), row.get("shape")
        if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(shape, list):
            raise Refusal("an input needs a name, a datatype and a shape")
        parameters = _table(row.get("parameters", {}), "the parameters of an input")
        region, size, data = self._regions.slice(parameters), parameters.get("binary_data_size"), row.get("data")
        if (region is not None) + (size is not None) + (data is not None) != 1:
            raise Refusal(f"input {name!r} needs either data, a binary_data_size, or a region of shared memory")
        if region is not None:
            return GivenTensor(name, kind, shape, region)
        if size is None:
            if not isinstance(data, list):
                raise Refusal(f"the data of input {name!r} is not an array")
            return GivenTensor(name, kind, shape, data)
        if type(size) is not int or not 0 <= size <= len(self._rest):
            raise Refusal(f"input {name!r} has {size!r:.40} bytes, it says; {len(self._rest)} are left of the body")
        mine, self._rest = self._rest[:size], self._rest[size:]
        return GivenTensor(name, kind, shape, mine)

    def _output(self, row: Mapping[str, Any], binary: bool) -> WantedOutput:
        name = row.get("name")
        if not isinstance(name, str):
            raise Refusal("an output needs a name")
        parameters = _table(row.get("parameters", {}), "the parameters of an output")
        if parameters.get("classification"):
            raise Refusal("this server does not do the classification extension", hint="ask for the output itself")
        binary = bool(parameters.get("binary_data", binary))
        return WantedOutput(name, binary, self._regions.slice(parameters))


def http_answer(
    name: str, facts: ModelFacts, request: HttpRequest, outputs: Outputs
) -> tuple[list[bytes], dict[str, str]]:
    """The body of an answer in pieces, and its headers. Outputs in regions are written. Raises Refusal where they do not fit."""
    wanted = request.outputs or [WantedOutput(s.name, request.binary) for s in facts.outputs]
    rows: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for w in wanted:
        a = outputs[w.name]
        row: dict[str, Any] = {"name": w.name, "datatype": datatype(a.dtype), "shape": list(a.shape)}
        if w.region is not None:
            write(w.region, bytes_of(a))
            row["parameters"] = {"shared_memory_region_size": a.nbytes}
        elif w.binary:
            row["parameters"] = {"binary_data_size": a.nbytes}
            tail.append(a.tobytes())
        else:
            row["data"] = _json_array(a)
        rows.append(row)
    head = {"model_name": name, "model_version": "1", **({"id": request.id} if request.id else {}), "outputs": rows}
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return [text], {"content-type": "application/json"}
    return [text, *tail], {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}


def bytes_of(a: Array) -> memoryview:
    """The bytes of an array in row-major order."""
    return memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)


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


def _rows(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Refusal(f"{what} must be a JSON array")
    return value
