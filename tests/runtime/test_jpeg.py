"""JPEGs that only libjpeg decodes correctly are recognized by their markers."""

from __future__ import annotations

import io
from typing import Any

import pytest
from support.pictures import picture

from optdnn.runtime.pictures.jpeg import only_for_libjpeg, stored_in_rgb


def _jpeg(**options: Any) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    held = io.BytesIO()
    image.fromarray(picture((20, 30))).save(held, "jpeg", **options)
    return held.getvalue()


def test_files_by_their_markers() -> None:
    plain, rgb = _jpeg(), _jpeg(keep_rgb=True)
    adobe = rgb[: 2 + 16]
    assert adobe[2:11] == b"\xff\xee\0\x0eAdobe"
    unmarked, ycc = rgb[:2] + rgb[18:], adobe[:17] + b"\x01" + rgb[18:]
    without_jfif = plain[:2] + plain[20:]
    padded = rgb[:2] + b"\xff\xff" + rgb[2:]
    exif = rgb[:2] + b"\xff\xe1\x01\0" + b"E" * 254 + rgb[2:]
    for data, want in (
        (plain, False), (rgb, True), (unmarked, True), (ycc, False), (without_jfif, False), (padded, True), (exif, True),
        (plain[:2] + rgb[2:18] + plain[2:], True), (plain[:20] + rgb[2:18] + plain[20:], False), (plain[:22], False),
        (_jpeg(progressive=True), False), (b"\xff\xd8", False), (b"", False), (b"\xff\xd8" + b"\xff" * 99, False),
        (b"\xff\xd8" + b"\xff\xe5\0\0" * 99, False),
    ):  # fmt: skip
        assert stored_in_rgb(memoryview(data)) is want


def test_files_that_are_cut_off() -> None:
    plain = _jpeg()
    assert not only_for_libjpeg(memoryview(plain))
    assert only_for_libjpeg(memoryview(plain[:-1]))
    assert only_for_libjpeg(memoryview(_jpeg(keep_rgb=True)))
    assert not only_for_libjpeg(memoryview(b"\x89PNG and more"))
    assert not only_for_libjpeg(memoryview(b""))
