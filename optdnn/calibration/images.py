"""Pictures as network inputs: how a folder of them is prepared. Needs Pillow (extra ``images``)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.errors import InputError, MissingDependency, UsageError
from optdnn.limits import PICTURE_PIXELS
from optdnn.runtime.file.json_file import read_json
from optdnn.types import Array

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})


@dataclass(frozen=True)
class ImageSpec:
    """Preprocessing, in this order: colors, ``resize`` (the shorter side, or height and width), ``crop`` from the center,
    times ``scale``, less ``mean``, over ``std`` (one number or one per channel), then the layout.

    The defaults are those of networks trained on ImageNet by torchvision.
    """

    resize: int | tuple[int, int] | None = 256
    crop: int | tuple[int, int] | None = 224
    color: str = "RGB"
    """RGB, BGR or L (gray)."""
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    layout: str = "chw"
    """chw or hwc."""

    def __post_init__(self) -> None:
        if self.color not in ("RGB", "BGR", "L"):
            raise UsageError(f"color {self.color!r} is not RGB, BGR or L")
        if self.layout not in ("chw", "hwc"):
            raise UsageError(f"layout {self.layout!r} is not chw or hwc")
        for name in ("resize", "crop"):
            _check_size(name, getattr(self, name))
        if not _is_number(self.scale) or self.scale == 0:
            raise UsageError(f"scale {self.scale!r} is not a finite number other than zero")
        channels = 1 if self.color == "L" else 3
        for name in ("mean", "std"):
            given = getattr(self, name)
            values = (given,) if _is_number(given) else given
            if not isinstance(values, (tuple, list)) or not all(_is_number(v) for v in values):
                raise UsageError(f"{name} {given!r} is not a finite number, or one for each channel")
            if len(values) not in (1, channels):
                raise UsageError(f"{name} {given} does not fit {channels} channels")
            object.__setattr__(self, name, tuple(values))
        if any(s == 0 for s in self.std):
            raise UsageError("std must not be zero")

    @classmethod
    def read(cls, text: str) -> ImageSpec:
        """From JSON text or the path of a JSON file: ``{"resize": 256, "crop": 224, "mean": [0.5], "std": [0.5]}``."""
        try:
            if not text.lstrip().startswith("{"):
                plain: Any = read_json(Path(text))
            else:
                plain = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"the image preprocessing {text!r} is neither JSON nor a file of it: {error}") from None
        known = {f.name for f in fields(cls)}
        if not isinstance(plain, dict) or (unknown := sorted(plain.keys() - known)):
            raise UsageError(
                f"image preprocessing has no {', '.join(unknown) if isinstance(plain, dict) else 'form but an object'}",
                hint=f"it has {', '.join(sorted(known))}",
            )
        try:
            given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
            return cls(**given)
        except TypeError as error:
            raise UsageError(f"image preprocessing: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_size(name: str, size: Any) -> None:
    """Raises UsageError where ``size`` is neither a positive integer, nor two of them, nor None."""
    sides = () if size is None else size if isinstance(size, (tuple, list)) else (size,)
    pair = isinstance(size, (tuple, list))
    whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
    if not whole or (pair and len(sides) != 2):
        raise UsageError(
            f"{name} {size!r} is not a positive whole number of pixels, nor two of them",
            hint="give N, or [HEIGHT, WIDTH], or null for none",
        )


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path, spec: ImageSpec) -> Array:
    """One picture, float32 [channels, height, width] or as ``spec.layout`` says. Raises InputError where it cannot be read."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependency("Pillow", "images", "to read pictures") from None
    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > PICTURE_PIXELS.value:  # as the file says: nothing is decompressed yet
                raise InputError(f"{path} has {opened.width}x{opened.height} pixels", hint=PICTURE_PIXELS.hint)
            picture = opened.convert("L" if spec.color == "L" else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, of damaged files
        raise InputError(f"{path} cannot be read as a picture: {error}") from None
    if spec.resize is not None:
        width, height = picture.size
        if isinstance(spec.resize, int):
            factor = spec.resize / min(width, height)
            size = (max(1, round(width * factor)), max(1, round(height * factor)))
        else:
            size = (spec.resize[1], spec.resize[0])
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    if spec.crop is not None:
        high, wide = (spec.crop, spec.crop) if isinstance(spec.crop, int) else spec.crop
        width, height = picture.size
        if wide > width or high > height:
            raise InputError(f"{path}: {width}x{height} is smaller than the crop {wide}x{high}")
        left, top = (width - wide) // 2, (height - high) // 2
        picture = picture.crop((left, top, left + wide, top + high))
    pixels: Array = np.asarray(picture, np.float32)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if spec.color == "BGR":
        pixels = pixels[..., ::-1]
    pixels = (pixels * np.float32(spec.scale) - np.asarray(spec.mean, np.float32)) / np.asarray(spec.std, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if spec.layout == "chw" else pixels, np.float32)
