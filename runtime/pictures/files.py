"""Picture files as arrays. Needs Pillow (extra ``images``)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from optdnn.errors import InputError, MissingDependency, UsageError
from optdnn.image_spec import PICTURE_DTYPES, ImageSpec, channels_of, pair
from optdnn.limits import PICTURE_PIXELS
from optdnn.regular_file import check_regular
from optdnn.types import Array

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".jp2", ".j2k", ".ico", ".tga"}
)
"""Endings of pictures, in folders and on the command line."""
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "ICO", "TGA")
"""Pillow's formats that are read, whatever the file's name. Not EPS, for which Pillow runs another program."""
File: TypeAlias = Path | bytes
Size: TypeAlias = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class RawPictures:
    """Pictures that the network prepares itself: input name -> its preprocessing."""

    specs: Mapping[str, ImageSpec]


@dataclass(frozen=True)
class Placement:
    """The place of a picture of ``size`` in the engine's picture: at ``offset`` (top, left), and scaled by ``scale``
    (vertical, horizontal)."""

    size: Size
    scale: tuple[float, float] = (1.0, 1.0)
    offset: Size = (0, 0)


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def pictures_in(folder: Path) -> list[Path]:
    """The picture files of a folder and its subfolders, in the order of their names. Raises UsageError if there are none."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and is_image(p))
    if not files:
        raise UsageError(
            f"the folder {folder} holds no pictures", hint=f"their names end in {', '.join(sorted(SUFFIXES))}"
        )
    return files


def resized_size(spec: ImageSpec, size: Size) -> Size:
    """Height and width of a picture after ``spec.resize``, with fractions rounded half up."""
    high, wide = size
    if spec.resize is None:
        return size
    if isinstance(spec.resize, int):
        short = min(size)
        return (2 * spec.resize * high + short) // (2 * short), (2 * spec.resize * wide + short) // (2 * short)
    if spec.fit == "stretch":
        return spec.resize
    most_high, most_wide = spec.resize
    kept_high = min(most_high, (2 * high * most_wide + wide) // (2 * wide))
    kept_wide = min(most_wide, (2 * wide * most_high + high) // (2 * high))
    return max(1, kept_high), max(1, kept_wide)


def check_crop(spec: ImageSpec, size: Size, name: str) -> None:
    """Raise InputError for a picture that is too small for the crop."""
    if spec.crop is None:
        return
    high, wide = spec.resize if isinstance(spec.resize, tuple) else resized_size(spec, size)
    crop = pair(spec.crop)
    if crop[0] > high or crop[1] > wide:
        raise InputError(f"{name}: {wide}x{high} is smaller than the crop {crop[1]}x{crop[0]}")


def decoded(file: File, spec: ImageSpec, size: Size | None = None) -> Array:
    """One picture in the form of the network's input, without the batch axis; of ``size``, or of its own size.

    Raises InputError if it cannot be read or does not fit.
    """
    return placed(file, spec, size)[0]


def placed(file: File, spec: ImageSpec, size: Size | Callable[[Size], Size] | None = None) -> tuple[Array, Placement]:
    """:func:`decoded`, with the place of the whole picture in it; ``size`` may depend on the picture's own size."""
    name = str(file) if isinstance(file, Path) else "the picture"
    picture = _opened(file, name, spec)
    own = (picture.height, picture.width)
    _check_pixels(name, "is resized to", resized_size(spec, own))  # a line of pixels becomes a huge picture
    check_crop(spec, own, name)
    where = Placement(own)
    wanted = size(own) if callable(size) else size
    if wanted is not None and own != wanted:
        picture, where = _fitted(picture, spec, wanted, name)
    return _array(picture, spec), where


def _opened(file: File, name: str, spec: ImageSpec) -> Any:
    """Pillow's picture in the colors of the spec, rotated upright by its EXIF data."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingDependency("Pillow", "images", "to read pictures") from None
    try:
        if not isinstance(file, bytes):
            check_regular(file)
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_FORMATS) as opened:
            _check_pixels(
                name, "has", (opened.height, opened.width)
            )  # from the file's header: nothing is decompressed yet
            opened.load()  # releases Python's lock; copying the picture does not
            ImageOps.exif_transpose(opened, in_place=True)
            upright: Any = opened
            if upright.mode.startswith("I;16"):  # Pillow would turn all values over 255 white
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            mode = "L" if spec.input.color == "L" else "RGB"
            return upright if upright.mode == mode else upright.convert(mode)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # damaged files make Pillow raise errors of many kinds: EOFError, struct.error, KeyError
        raise InputError(f"{name} cannot be read as a picture: {error}") from error


def _check_pixels(name: str, verb: str, size: Size) -> None:
    """Raise InputError for a picture without pixels, or with more than the limit."""
    high, wide = size
    if not 0 < high * wide <= PICTURE_PIXELS.value:
        raise InputError(f"{name} {verb} {wide}x{high} pixels", hint=PICTURE_PIXELS.hint)


def _array(picture: Any, spec: ImageSpec) -> Array:
    given = spec.input
    pixels: Array = np.asarray(picture)
    pixels = pixels.reshape(*pixels.shape[:2], channels_of(given.color))
    if given.color == "BGR":
        pixels = pixels[..., ::-1]
    if given.layout == "chw":
        pixels = pixels.transpose(2, 0, 1)
    dtype = PICTURE_DTYPES[given.dtype]
    wide = pixels.astype(dtype) * dtype.type(257) if dtype == np.uint16 else pixels
    return np.ascontiguousarray(wide, dtype)


def _fitted(picture: Any, spec: ImageSpec, size: Size, name: str) -> tuple[Any, Placement]:
    """A picture converted to the engine's fixed size, so that the preprocessing sees the same part of it as without the conversion.

    If the shorter side is resized or the picture is fitted into a box, it keeps its aspect ratio: its ends along the longer
    side are cut off or padded. If the preprocessing stretches, the picture is stretched.
    """
    from PIL import Image

    own = (picture.height, picture.width)
    if spec.resize is None and spec.crop is None:
        raise InputError(
            f"{name} has {own[1]}x{own[0]} pixels, the engine takes {size[1]}x{size[0]}",
            hint='a "resize" in --preprocess lets an engine take pictures of any size',
        )
    if spec.resize is None:
        ratios = (1.0, 1.0)
    elif isinstance(spec.resize, int):
        ratios = (min(size) / min(own),) * 2
    elif spec.fit == "contain":
        ratios = (min(size[0] / own[0], size[1] / own[1]),) * 2
    else:
        ratios = (size[0] / own[0], size[1] / own[1])
    high, wide = (max(1, round(n * ratio)) for n, ratio in zip(own, ratios, strict=True))
    _check_pixels(name, "is resized to", (high, wide))
    filters = {"nearest": Image.Resampling.NEAREST, "linear": Image.Resampling.BILINEAR}
    picture = picture.resize((wide, high), filters.get(spec.interpolation, Image.Resampling.BICUBIC))
    top, left = (size[0] - high) // 2, (size[1] - wide) // 2
    if (high, wide) != size:
        fill = round(spec.pad_value) if 0 <= spec.pad_value <= 255 else 0
        whole = Image.new(picture.mode, (size[1], size[0]), fill if picture.mode == "L" else (fill,) * 3)
        whole.paste(picture, (left, top))
        picture = whole
    return picture, Placement(own, (high / own[0], wide / own[1]), (top, left))
