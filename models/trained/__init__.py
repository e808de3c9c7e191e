"""Small networks that were really trained, on scikit-learn's 8x8 digits, each as an ONNX file with held-out pictures
and its accuracy. ``digits_segment`` assigns each pixel of a larger picture to a digit.

    from optdnn.models import trained
    path, x, y, accuracy = trained.load("digits_resnet")

A quarter of the digits is held out, the same quarter for each network. Training pictures were shifted by up to a pixel, and
their contrast was scaled by 0.8 to 1.2. Epochs, seed and torch's version are in ``manifest.json``. The scales before the depthwise
convolutions of ``digits_mobile`` and in the normalizations of ``digits_transformer`` start far apart: long training leaves large
networks with such ranges, and they make quantization hard (Nagel et al., "Data-Free Quantization", 2019, figure 2).

``language()`` is a small language model with its tokenizer, trained on Python's language reference (``language.json``).
Nothing here needs torch or onnx.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optdnn.errors import UsageError
from optdnn.types import Array

__all__ = ["NAMES", "Language", "Trained", "calibration", "language", "load", "manifest", "training"]

NAMES = ("digits_resnet", "digits_mobile", "digits_gru", "digits_transformer", "digits_segment")
DATA = "digits.npz"
SCENES = "scenes.npz"
"""Pictures of several digits, in sixteenths, and for each pixel the digit + 1 that it belongs to, or 0."""

TRAINING = "training.npz"
"""The training split in sixteenths with its digits; of the scenes those for calibration, with the class of each pixel."""


class Trained(NamedTuple):
    """A trained network, with held-out data and its accuracy on them."""

    path: Path
    """The ONNX file: input ``x`` with a batch "N", output ``logits``, float32 (N, 10); when segmenting (N, 11, 24, 24)."""
    x: Array
    """Held-out pictures, float32 in 0 … 1, in the shape of the network's input."""
    y: Array
    """Their digits, int64 (pictures,); for the segmenting network the class of each pixel, int64 (pictures, 24, 24)."""
    accuracy: float
    """The share of pictures (of pixels, when segmenting) whose largest logit is the right one, in float32."""


class Language(NamedTuple):
    """A trained language model of the form of onnxruntime-genai's exports, with its tokenizer."""

    path: Path
    """The ONNX file: ``input_ids``, ``attention_mask`` and caches in, ``logits`` and caches out."""
    tokenizer: Path
    """The tokenizer.json. Token 0 separates texts."""
    facts: dict[str, Any]
    """``loss`` and ``next_token`` (the share of next tokens that are right) on texts held out, and how it was trained."""


def language() -> Language:
    """The trained language model."""
    facts = dict(json.loads((_folder() / "language.json").read_text(encoding="utf-8")))
    return Language(_folder() / "language.onnx", _folder() / "language.tokenizer.json", facts)


def load(name: str) -> Trained:
    """The trained network ``name`` with its held-out split; UsageError for an unknown name."""
    entry = _entry(name)
    data = _data(entry)
    return Trained(_folder() / f"{name}.onnx", _shaped(data["x"], entry), data["y"], float(entry["accuracy"]))


def calibration(name: str) -> Array:
    """Pictures from the *training* split, in the shape of the network's input: for calibration, which must not see
    held-out data."""
    entry = _entry(name)
    return _shaped(_data(entry)["calibration"], entry)


def training(name: str) -> tuple[Array, Array]:
    """Pictures of the *training* split, in the shape of the network's input, and what they show (as :attr:`Trained.y`): for what
    has to choose by accuracy without a look at held-out data. The segmenting network has as many as :func:`calibration`."""
    entry = _entry(name)
    with np.load(_folder() / TRAINING, allow_pickle=False) as data:
        x, y = (data["scenes"], data["classes"]) if entry.get("data") == SCENES else (data["x"], data["y"])
    return _shaped((x / 16).astype(np.float32), entry), y.astype(np.int64)


def manifest() -> dict[str, dict[str, Any]]:
    """For each network: accuracy, counts of right and of all held-out pictures, parameters, input shape, and how it
    was trained."""
    return dict(json.loads((_folder() / "manifest.json").read_text(encoding="utf-8")))


def _entry(name: str) -> dict[str, Any]:
    if name not in NAMES:
        raise UsageError(f"there is no trained network {name!r}", hint=f"take one of {', '.join(NAMES)}")
    return manifest()[name]


def _folder() -> Path:
    return Path(str(resources.files(__name__)))


def _data(entry: dict[str, Any]) -> dict[str, Array]:
    with np.load(_folder() / entry.get("data", DATA), allow_pickle=False) as data:
        found = {key: data[key] for key in data.files}
    for key in ("x", "calibration"):
        if found[key].dtype == np.uint8:
            found[key] = (found[key] / 16).astype(np.float32)
    found["y"] = found["y"].astype(np.int64)
    return found


def _shaped(x: Array, entry: dict[str, Any]) -> Array:
    return x.reshape(len(x), *entry["input"])
