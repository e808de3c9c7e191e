"""The calibration that all plans of one engine share. The calibration data has the sizes of the first optimum.

An engine holds it as data, so that plans for further sizes quantize by the same ranges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optdnn.errors import EngineError
from optdnn.passes.support.ranges import Calibration, from_plain, to_plain
from optdnn.types import Array


@dataclass
class SharedCalibration:
    """The ranges of the first plan, in the order in which its passes requested them. Other plans take them in the same order."""

    data: Any = None
    """The calibration data; None if ``found`` was read from an engine."""
    first: object = None
    """The first plan that requested ranges; None before that."""
    found: list[Calibration] = field(default_factory=list)

    @classmethod
    def of(cls, calib: Any) -> SharedCalibration | None:
        """Wrap calibration data; a SharedCalibration and None are returned unchanged."""
        return calib if calib is None or isinstance(calib, cls) else cls(calib)

    def for_other_sizes(self, asked: int) -> Calibration:
        """The ranges for a further plan when its passes ask for the ``asked``-th time, from 0."""
        return replace(self.found[min(asked, len(self.found) - 1)], other_sizes=True)

    def to_bytes(self) -> Array:
        """uint8 [n]: JSON text, for :meth:`from_bytes`."""
        text = json.dumps([to_plain(c) for c in self.found], separators=(",", ":"))
        return np.frombuffer(text.encode(), np.uint8)

    @classmethod
    def from_bytes(cls, data: Array) -> SharedCalibration:
        """The inverse of :meth:`to_bytes`. Raises EngineError for anything else: an engine is untrusted input."""
        try:
            found = [from_plain(plain) for plain in json.loads(data.tobytes())]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise EngineError(f"the engine's calibration cannot be read: {error}") from None
        if not found:
            raise EngineError("the engine's calibration is empty")
        return cls(None, "the engine", found)
