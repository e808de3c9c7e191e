"""Metrics of accuracy: the *drop* of outputs against the same network in fp32. 0 is no loss, larger is worse, negative a gain."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from optdnn.errors import RunError, UsageError
from optdnn.precision.margins import Margins, margins
from optdnn.types import Array, is_float

Outputs: TypeAlias = Mapping[str, Array]
"""Name -> array whose first axis counts samples."""
Score: TypeAlias = Callable[[Outputs, Any], float]
"""A user's metric: maps outputs and labels (None without labels) to a score; higher is better."""

DEFAULT_BOUND: Mapping[str, float] = {"top1": 0.5, "cosine": 1e-3}
"""The largest drop if the user gives none. The other metrics have no natural scale."""


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` is the user's text.

    ``drop`` gives the loss of outputs against fp32's, with labels or None. ``by_batch``: the drop over all samples is the mean of
    the drops over batches, weighted by their samples. ``margins`` (for a metric that counts predictions) tells how close
    predictions came to being lost: a drop of whole samples is too coarse for this.
    """

    name: str
    unit: str
    drop: Callable[[Outputs, Outputs, Any], float]
    by_batch: bool = True
    margins: Callable[[Outputs, Outputs, Any], Margins] | None = None

    def bound(self, given: float | None) -> float:
        """The bound: the given one, otherwise the metric's own. Raises UsageError if there is neither."""
        found = DEFAULT_BOUND.get(self.name) if given is None else given
        if found is None:
            raise UsageError(
                f"metric {self.name!r} has no usual bound", hint=f"give one in its own unit ({self.unit}): --max-drop X"
            )
        if not math.isfinite(found) or found < 0:
            raise UsageError(f"--max-drop must be a number of {self.unit}, 0 or more, not {found}")
        return found


def metric_of(given: str | Score, labels: Any) -> Metric:
    """The metric that ``--metric`` names: "top1", "mse", "cosine", "PKG.MODULE:F", or a callable.

    With ``labels``, top1 means accuracy; without (None), agreement with fp32. Raises UsageError for an unknown name, or a name that
    cannot be imported.
    """
    if callable(given):
        return _custom(getattr(given, "__qualname__", repr(given)), given)
    if given == "top1":
        agreement = "points of agreement with fp32's first class (no labels were given)"
        unit = agreement if labels is None else "points of top-1 accuracy"
        return Metric("top1", unit, _drop_top1, margins=_margins_top1)
    if given == "mse":
        return Metric("mse", "squared units of the outputs", _drop_mse)
    if given == "cosine":
        return Metric("cosine", "of cosine distance", _drop_cosine)
    module, colon, name = given.partition(":")
    if not colon:
        raise UsageError(f"metric {given!r} is not one of top1, mse, cosine or PKG.MODULE:FUNCTION")
    return _custom(given, _imported(given, module, name))


# ---------------------------------------------------------------- top-1


def _drop_top1(y: Outputs, ref: Outputs, labels: Any) -> float:
    """Points of predictions that fp32 has right and that are lost, minus the gained ones. Without labels fp32 is always right."""
    found, wanted = _classes(y), _classes(ref)
    right = wanted if labels is None else _class_labels(labels, wanted.shape)
    return 100.0 * float(np.mean(wanted == right)) - 100.0 * float(np.mean(found == right))


def _margins_top1(y: Outputs, ref: Outputs, labels: Any) -> Margins:
    found, wanted = _classes(y), _classes(ref)
    right = wanted if labels is None else _class_labels(labels, found.shape)
    return margins(_scores(y), _scores(ref), right, found, wanted)


def _scores(outputs: Outputs) -> Array:
    """The first floating-point output, (samples, classes, …)."""
    for name, y in outputs.items():
        if is_float(y.dtype):
            if y.ndim < 2:
                raise UsageError(f"metric top1 wants scores of shape (samples, classes, …); {name!r} is {y.shape}")
            return y.astype(np.float32, copy=False)
    raise UsageError("metric top1 wants a floating-point output", hint="give a function: --metric PKG.MODULE:F")


def _classes(outputs: Outputs) -> Array:
    """The index of the largest score along axis 1 (segmentation included)."""
    y = _scores(outputs)
    # A sample with a NaN has no class: it is never right.
    return np.where(np.isnan(y).any(axis=1), -1, np.argmax(y, axis=1))


def _class_labels(labels: Any, shape: tuple[int, ...]) -> Array:
    """Labels in the shape of the predictions: a class for each sample, or for each position of each sample."""
    found = np.asarray(labels)
    if found.dtype.kind not in "iu":
        raise UsageError(f"metric top1 wants integer labels, one for each of the {shape[0]} samples, not {found.dtype}")
    if [n for n in found.shape[1:] if n > 1] != [n for n in shape[1:] if n > 1] or len(found) != shape[0]:
        raise UsageError(
            f"metric top1 wants a label for each of {list(shape)} predictions; here labels are {list(found.shape)}",
            hint="predictions are the largest scores along axis 1 of the first floating-point output; "
            "for another output, give a function: --metric PKG.MODULE:F",
        )
    return found.reshape(shape)


# ---------------------------------------------------------------- distances


def _pairs(y: Outputs, ref: Outputs) -> list[tuple[Array, Array]]:
    found = [(np.asarray(y[n], np.float64), np.asarray(ref[n], np.float64)) for n in ref if is_float(ref[n].dtype)]
    if not found:
        raise UsageError("the network has no floating-point output to measure a distance of")
    return found


def _drop_mse(y: Outputs, ref: Outputs, labels: Any) -> float:
    """Mean over all elements of all floating-point outputs; infinite if an element is not finite that is finite in ``ref``."""
    pairs = _pairs(y, ref)
    return sum(float(np.sum(_squares(a, b))) for a, b in pairs) / max(1, sum(b.size for _, b in pairs))


def _squares(a: Array, b: Array) -> Array:
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        squares: Array = np.where(same, 0.0, (a - b) ** 2)
    return np.where(np.isnan(squares), np.inf, squares)


def _drop_cosine(y: Outputs, ref: Outputs, labels: Any) -> float:
    """1 - the mean over samples and outputs of the cosine between the output and fp32's."""
    cosines = []
    for a, b in _pairs(y, ref):
        a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            norms = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
            cosine = np.where(norms > 0, (a * b).sum(axis=1) / norms, (a == b).all(axis=1))
        cosines.append(np.where(np.isfinite(cosine), cosine, -1.0).mean())
    return max(0.0, 1.0 - float(np.mean(cosines)))


# ---------------------------------------------------------------- a user's own


def _custom(name: str, function: Score) -> Metric:
    def score(y: Outputs, labels: Any) -> float:
        try:
            value = float(function(dict(y), labels))
        except Exception as error:  # the user's code may raise anything
            raise RunError(
                f"the metric {name} raised {type(error).__name__}: {error}",
                hint="it is called as F(outputs by name, labels) and returns one number, higher is better",
            ) from error
        if math.isnan(value):
            raise RunError(f"the metric {name} gave NaN", hint="it must return one number, higher is better")
        return value

    def drop(y: Outputs, ref: Outputs, labels: Any) -> float:
        return score(ref, labels) - score(y, labels)

    return Metric(name, f"the unit of {name}", drop, by_batch=False)


def _imported(given: str, module: str, name: str) -> Score:
    here = str(Path.cwd())
    sys.path.insert(0, here)  # a metric is more often next to the user's data than in an installed package
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module may raise anything while it is imported
        raise UsageError(f"metric {given!r} cannot be imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise UsageError(f"metric {given!r} is not a function")
    score: Score = found
    return score
