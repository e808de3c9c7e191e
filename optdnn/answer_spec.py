"""The postprocessing of a network's outputs: :class:`AnswerSpec`, plain data that builds and engines share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError, did_you_mean
from optdnn.image_spec import check_fields
from optdnn.text_file import read_text
from optdnn.types import RANK_LIMIT

BOXES = ("xyxy", "yxyx", "xywh", "cxcywh")
"""Forms of boxes: two corners (x first, or y first), a corner and sizes, the center and sizes."""
STEPS = ("softmax", "top-k", "argmax", "boxes")
SIZE_LIMIT = 1 << 31
"""Largest K of top-k."""
CLASSES = "_classes"
"""The suffix of top-k's second output, which holds the indices of the classes."""


@dataclass(frozen=True)
class AnswerSpec:
    """Postprocessing of one output, in this order: ``softmax``, then one of ``top_k``, ``argmax`` and ``boxes``.

    ``top_k`` keeps the K largest values, and gives their indices in a further output NAME_classes. ``argmax`` gives the index of
    the largest: a mask of classes for [pictures, classes, height, width]. ``boxes`` scales boxes [..., 4] from the network's
    picture back to the original one, and clips them to it. ``relative`` boxes are fractions of the network's picture, not pixels.
    ``labels`` are the names of the classes, which are stored in the engine.
    """

    softmax: bool = False
    top_k: int | None = None
    argmax: bool = False
    boxes: str | None = None
    """xyxy, yxyx, xywh or cxcywh."""
    relative: bool = False
    axis: int | None = None
    """The axis of classes.  [default: 1 for argmax, else the last]"""
    input: str | None = None
    """The input that takes the boxes' picture.  [default: the only one that is preprocessed]"""
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("softmax", "argmax", "relative"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {getattr(self, name)!r} is not true or false")
        if self.input is not None and not isinstance(self.input, str):
            raise UsageError(f"input {self.input!r} is not a name")
        k = self.top_k
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= SIZE_LIMIT):
            raise UsageError(f"top-k {k!r} is not a positive whole number up to {SIZE_LIMIT}")
        if self.boxes is not None and self.boxes not in BOXES:
            raise UsageError(
                f"boxes {self.boxes!r} is not one of {', '.join(BOXES)}", hint=did_you_mean(str(self.boxes), BOXES)
            )
        axis = self.axis
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool) or abs(axis) > RANK_LIMIT):
            raise UsageError(f"axis {axis!r} is not a whole number from {-RANK_LIMIT} to {RANK_LIMIT}")
        last = [self.top_k is not None, self.argmax, self.boxes is not None]
        if sum(last) > 1 or (self.softmax and self.boxes is not None):
            raise UsageError("an output has only one of top-k, argmax and boxes; softmax may come before the first two")
        if not self.softmax and not any(last) and self.labels is None:
            raise UsageError(
                "the postprocessing does nothing", hint=f"its steps are {', '.join(STEPS)}; and labels=FILE"
            )
        if self.boxes is None and (self.relative or self.input is not None):
            raise UsageError("relative and input are options of boxes")
        if self.labels is not None:
            object.__setattr__(self, "labels", read_labels(self.labels))

    @classmethod
    def of(cls, given: Any) -> AnswerSpec:
        """From a spec, a mapping of its fields, or text: ``softmax+top-k:5,labels=FILE``. Raises UsageError."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls(**_parsed(given))
        check_fields(cls, given, "postprocessing", "text or an object")
        return cls(**given)

    def to_plain(self) -> dict[str, Any]:
        """Plain data for JSON, without unset fields; :meth:`of` reads it back."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        asked = {k: v for k, v in plain.items() if v is not None and v is not False}  # axis 0 is a real setting
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asked.items()}


def _parsed(text: str) -> dict[str, Any]:
    """The fields of ``STEP[:VALUE]+STEP,NAME=VALUE``."""
    steps, *options = text.split(",")
    found: dict[str, Any] = {}
    for step in steps.split("+") if steps else ():
        if "=" in step:
            options.append(step)
            continue
        name, _, value = step.partition(":")
        if name not in STEPS or (value and name not in ("top-k", "boxes")):
            raise UsageError(
                f"postprocessing {text!r}: {step!r} is not softmax, top-k:K, argmax or boxes:FORM",
                hint=did_you_mean(name, STEPS),
            )
        if name == "top-k":
            found["top_k"] = _whole(value, text)
        else:
            found[name] = (value or "xyxy") if name == "boxes" else True
    for option in options:
        name, equals, value = option.partition("=")
        if name == "relative" and not equals:
            found["relative"] = True
        elif name in ("labels", "input", "axis") and value:
            found[name] = _whole(value, text) if name == "axis" else value
        else:
            raise UsageError(f"postprocessing {text!r}: {option!r} is not labels=FILE, axis=N, input=NAME or relative")
    return found


def _whole(value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"postprocessing {text!r}: {value!r} is not a whole number") from None


def read_labels(given: Any) -> tuple[str, ...]:
    """Labels from a sequence, or from a file: a JSON list, or one label per line. Raises UsageError."""
    if isinstance(given, (str, Path)):
        try:
            text = read_text(Path(given))
            given = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error  # without the path, which the message already has
            said = f"the labels {str(given)!r} cannot be read: {why}"
            raise UsageError(said, hint="a text file, a line for each class") from None
    if not isinstance(given, Sequence) or not given or not all(isinstance(name, str) for name in given):
        raise UsageError(f"labels must be a list of names, not {given!r}")
    return tuple(given)
