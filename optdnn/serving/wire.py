"""gRPC's message of a request, cut at its tensors: a message of megabytes is read without copies of them.

``ModelInferRequest.FromString`` copies the bytes of tensors, and reading its ``raw_input_contents`` copies them again.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from optdnn import limits
from optdnn.serving.refusals import Refusal, TooLarge

_RAW = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_FIXED = {1: 8, 5: 4}
"""Wire type of protobuf -> bytes of a value of fixed length."""
_VARINT, _LENGTH = 0, 2
FIELDS = 1 << 14
"""Most fields of a message: each input, output, parameter and tensor is one. They are read one by one."""


def read_request(data: bytes) -> tuple[Any, list[memoryview]]:
    """The message without its ``raw_input_contents``, and these.

    Raises Refusal for bytes that are no such message, TooLarge where tensors outside of ``raw_input_contents`` have more bytes than
    the server parses."""
    whole = memoryview(data)
    raw: list[memoryview] = []
    rest: list[memoryview] = []
    at = begun = 0
    try:
        for _ in range(FIELDS + 1):
            if at == len(whole):
                break
            end, content = _field(whole, at)
            if content is not None:
                raw.append(content)
                rest.append(whole[begun:at])
                begun = end
            at = end
        else:
            raise Refusal(f"the request has more than {FIELDS} fields")
        rest.append(whole[begun:])
        check_parsed(sum(map(len, rest)))
        return pb.ModelInferRequest.FromString(b"".join(rest)), raw
    except (IndexError, KeyError, DecodeError) as error:
        raise Refusal("the bytes of the request are not a ModelInferRequest") from error


def check_parsed(size: int) -> None:
    """Raise TooLarge for a request with more bytes outside of ``raw_input_contents`` than the server parses."""
    most = limits.REQUEST_JSON_BYTES
    if size > most.value:
        raise TooLarge(
            f"the request has {size} bytes outside of raw_input_contents",
            hint=f"send tensors as raw_input_contents; {most.hint}",
        )


def _field(whole: memoryview, at: int) -> tuple[int, memoryview | None]:
    """The end of the field that begins at ``at``, and its bytes if it is one of ``raw_input_contents``.

    Raises IndexError or KeyError for bytes that are no field."""
    key, first = _varint(whole, at)
    kind = key & 7
    if kind == _LENGTH:
        length, first = _varint(whole, first)
        end = first + length
    else:
        end = _varint(whole, first)[1] if kind == _VARINT else first + _FIXED[kind]
    if end > len(whole):
        raise IndexError
    return end, whole[first:end] if key == _RAW << 3 | _LENGTH else None


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
