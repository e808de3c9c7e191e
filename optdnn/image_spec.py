"""The preprocessing of pictures: :class:`ImageSpec`, plain data that builds, calibration and engines share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from optdnn.errors import UsageError, did_you_mean
from optdnn.text_file import read_text

COLORS = ("RGB", "BGR", "L")
LAYOUTS = ("chw", "hwc")
INTERPOLATIONS = ("nearest", "linear", "cubic")
FITS = ("stretch", "contain")
PAD_MODES = ("constant", "edge", "reflect")
PICTURE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}
LARGEST_SIDE = 1 << 24
"""The most pixels of a side: sums and products of sizes are int64."""
T = TypeVar("T")


@dataclass(frozen=True)
class PictureInput:
    """The incoming picture. A batch is [pictures, height, width, channels], or with "chw" [pictures, channels,
    height, width]. ``color`` is RGB, BGR or L (gray); ``dtype`` uint8, uint16, fp16 or fp32."""

    layout: str = "hwc"
    dtype: str = "uint8"
    color: str = "RGB"

    def __post_init__(self) -> None:
        _among("the picture's layout", self.layout, LAYOUTS)
        _among("the picture's dtype", self.dtype, tuple(PICTURE_DTYPES))
        _among("the picture's color", self.color, COLORS)

    @property
    def channels(self) -> int:
        return channels_of(self.color)


@dataclass(frozen=True)
class ImageSpec:
    """Preprocessing, in this order: colors, ``resize`` (the shorter side, or height and width), ``crop`` from the center, ``pad``,
    times ``scale``, minus ``mean``, divided by ``std`` (one value or one per channel), then the layout.

    The defaults are those of networks trained on ImageNet by torchvision.
    """

    resize: int | tuple[int, int] | None = 256
    crop: int | tuple[int, int] | None = 224
    color: str = "RGB"
    """The colors of the network's input: RGB, BGR or L (gray)."""
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    layout: str = "chw"
    """The layout of the network's input: chw or hwc."""
    interpolation: str = "linear"
    """nearest, linear or cubic."""
    antialias: bool = True
    """Filter before a reduction, as Pillow does (linear and cubic)."""
    fit: str = "stretch"
    """With a height and width to resize to: stretch, or contain (the sides keep their ratio, the rest is padding)."""
    pad: int | tuple[int, ...] | None = None
    """Pixels on all sides, (vertical, horizontal), or (top, left, bottom, right)."""
    pad_mode: str = "constant"
    """constant, edge or reflect."""
    pad_value: float = 0.0
    """The value of constant padding, on the picture's own scale (such as 114 of 255)."""
    input: PictureInput = field(default_factory=PictureInput)

    def __post_init__(self) -> None:
        _among("color", self.color, COLORS)
        _among("layout", self.layout, LAYOUTS)
        _among("interpolation", self.interpolation, INTERPOLATIONS)
        _among("fit", self.fit, FITS)
        _among("pad_mode", self.pad_mode, PAD_MODES)
        if not isinstance(self.antialias, bool):
            raise UsageError(f"antialias {self.antialias!r} is not true or false")
        if isinstance(self.input, Mapping):
            object.__setattr__(self, "input", _made(PictureInput, self.input, "the picture that comes in"))
        if not isinstance(self.input, PictureInput):
            raise UsageError(f"input {self.input!r} is not an object such as {{'layout': 'hwc', 'dtype': 'uint8'}}")
        for name in ("resize", "crop", "pad"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("resize", "crop"):
            _check_size(name, getattr(self, name))
        self._check_geometry()
        if not _is_number(self.pad_value):
            raise UsageError(f"pad_value {self.pad_value!r} is not a finite number")
        if not _is_number(self.scale) or self.scale == 0:
            raise UsageError(f"scale {self.scale!r} is not a finite number other than zero")
        for name in ("mean", "std"):
            object.__setattr__(self, name, self._per_channel(name))
        if any(s == 0 for s in self.std):
            raise UsageError("std must not be zero")

    def _per_channel(self, name: str) -> tuple[float, ...]:
        given, channels = getattr(self, name), channels_of(self.color)
        values = (given,) if _is_number(given) else given
        if not isinstance(values, (tuple, list)) or not all(_is_number(v) for v in values):
            raise UsageError(f"{name} {given!r} is not a finite number, or one for each channel")
        if len(values) not in (1, channels):
            raise UsageError(f"{name} {given} does not fit {channels} channels")
        return tuple(values)

    def _check_geometry(self) -> None:
        """Raise UsageError for sizes that contradict one another."""
        if self.fit == "contain" and not isinstance(self.resize, tuple):
            raise UsageError(
                f"fit contain needs a height and a width to resize to, not {self.resize!r}",
                hint='give "resize": [HEIGHT, WIDTH]',
            )
        if self.crop is not None and self.resize is not None:
            high, wide = pair(self.crop)
            held = self.resize if isinstance(self.resize, tuple) else None
            if (high > held[0] or wide > held[1]) if held else min(high, wide) > int(str(self.resize)):
                raise UsageError(
                    f"crop {self.crop!r} is larger than the picture that resize {self.resize!r} leaves",
                    hint="crop cuts the center out of what resize made",
                )
        sides = () if self.pad is None else self.pad if isinstance(self.pad, tuple) else (self.pad,)
        if not all(_is_size(side, least=0) for side in sides) or (
            isinstance(self.pad, tuple) and len(sides) not in (2, 4)
        ):
            raise UsageError(
                f"pad {self.pad!r} is not a whole number of pixels",
                hint="give N, [VERTICAL, HORIZONTAL] or [TOP, LEFT, BOTTOM, RIGHT]",
            )

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """Pixels at the top, left, bottom and right."""
        sides = pair(self.pad or 0) if self.pad is None or isinstance(self.pad, int) else self.pad
        top, left, bottom, right = (*sides, *sides) if len(sides) == 2 else sides
        return top, left, bottom, right

    @property
    def out_size(self) -> tuple[int, int] | None:
        """Height and width of the network's picture, if they do not depend on the original picture."""
        fixed = self.crop if self.crop is not None else self.resize if isinstance(self.resize, tuple) else None
        if fixed is None:
            return None
        high, wide = pair(fixed)
        top, left, bottom, right = self.pads
        return high + top + bottom, wide + left + right

    @classmethod
    def read(cls, text: str) -> ImageSpec:
        """From JSON text or the path of a JSON file: ``{"resize": 256, "crop": 224, "mean": [0.5], "std": [0.5]}``."""
        try:
            plain = json.loads(text if text.lstrip().startswith("{") else read_text(Path(text)))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error  # without the path, which the message already has
            raise UsageError(f"the image preprocessing {text!r} is neither JSON nor a file of it: {why}") from None
        return cls.of(plain)

    @classmethod
    def of(cls, given: Any) -> ImageSpec:
        """From a spec, a mapping of its fields, or text for :meth:`read`. Raises UsageError."""
        if isinstance(given, cls):
            return given
        return cls.read(given) if isinstance(given, str) else _made(cls, given, "image preprocessing")

    def to_plain(self) -> dict[str, Any]:
        """Plain data for JSON; :meth:`of` reads it back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


_LARGEST = float(np.finfo(np.float32).max)


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a size given as one number, or as both."""
    return (size, size) if isinstance(size, int) else size


def channels_of(color: str) -> int:
    return 1 if color == "L" else 3


def check_fields(kind: type[Any], plain: Any, what: str, forms: str = "an object") -> None:
    """Raise UsageError for anything but a mapping with the fields of a dataclass as keys."""
    known = sorted(f.name for f in fields(kind))
    if not isinstance(plain, Mapping):
        raise UsageError(f"{what} must be {forms}, not {plain!r}", hint=f"its fields are {', '.join(known)}")
    if unknown := sorted(str(k) for k in plain if k not in known):
        raise UsageError(f"{what} has no {', '.join(unknown)}", hint=f"it has {', '.join(known)}")


def _made(kind: type[T], plain: Any, what: str) -> T:
    """A dataclass from a mapping of its fields, lists as tuples. Raises UsageError for an unknown field."""
    check_fields(kind, plain, what)
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()})
    except TypeError as error:
        raise UsageError(f"{what}: {error}") from None


def _among(what: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        names = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise UsageError(f"{what} {value!r} is not {names}", hint=did_you_mean(str(value), allowed))


def _is_number(value: Any) -> bool:
    """Whether a value is a number that float32 can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_size(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_SIDE


def _check_size(name: str, size: Any) -> None:
    """Raises UsageError if ``size`` is neither a positive integer, nor two of them, nor None."""
    both = isinstance(size, tuple)
    sides = () if size is None else size if both else (size,)
    if not all(_is_size(side, least=1) for side in sides) or (both and len(sides) != 2):
        raise UsageError(
            f"{name} {size!r} is not a positive whole number of pixels, nor two of them",
            hint="give N, or [HEIGHT, WIDTH], or null for none",
        )
