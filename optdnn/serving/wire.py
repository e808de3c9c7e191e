"""gRPC's message of a request, cut at its tensors: a message of megabytes is read without copies of them.

``ModelInferRequest.FromString`` copies the bytes of tensors, and reading its ``raw_input_contents`` copies them again.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from optdnn.serving.refusals import Refusal

_RAW = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_FIXED = {1: 8, 5: 4}
"""Wire type of protobuf -> bytes of a value of fixed length."""
_VARINT, _LENGTH = 0, 2


def read_request(data: bytes) -> tuple[Any, list[memoryview]]:
    """The message without its ``raw_input_contents``, and these. Raises Refusal for bytes that are no such message."""
    whole = memoryview(data)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    at = 0
    try:
        while at < len(whole):
            key, first = _varint(whole, at)
            kind = key & 7
            if kind == _LENGTH:
                length, first = _varint(whole, first)
                end = first + length
            else:
                end = _varint(whole, first)[1] if kind == _VARINT else first + _FIXED[kind]
            if end > len(whole):
                raise IndexError
            if key == _RAW << 3 | _LENGTH:
                raw.append(whole[first:end])
            else:
                rest.append(whole[at:end])
            at = end
        return pb.ModelInferRequest.FromString(b"".join(rest)), raw
    except (IndexError, KeyError, DecodeError) as error:
        raise Refusal("the bytes of the request are no ModelInferRequest") from error


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and the place behind it. Raises IndexError where it does not end."""
    value = shift = 0
    while shift < 64:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError
