"""Finds the JPEGs that GPU decoders decode wrongly, by the markers in the file."""

from __future__ import annotations

_START, _END = b"\xff\xd8", b"\xff\xd9"
_APP0, _APP14 = 0xE0, 0xEE
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of frame headers. The other markers in this range are tables."""


def only_for_libjpeg(data: memoryview) -> bool:
    """Whether the file is a truncated JPEG or a JPEG in RGB. GPU decoders fill the missing part, and take red for luma."""
    return data[:2] == _START and (data[-2:] != _END or stored_in_rgb(data))


def stored_in_rgb(data: memoryview) -> bool:
    """Whether a JPEG's three components are red, green and blue, by libjpeg's rules: a JFIF file never, an Adobe file if it
    declares so, and any other by the names of its components."""
    at = 2
    while at + 18 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker == _APP0 and bytes(data[at + 4 : at + 8]) == b"JFIF":
            return False
        if marker == _APP14 and bytes(data[at + 4 : at + 9]) == b"Adobe":
            return data[at + 15] == 0
        if marker in _FRAMES:
            return data[at + 9] == 3 and bytes(data[at + 10 : at + 17 : 3]) == b"RGB"
        at += 1 if marker == 0xFF else 2 + length  # a marker may begin with several 0xFF
    return False
