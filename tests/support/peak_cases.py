"""Largest elements of resized images: graphs for tests of ResizedPeaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Value
from optdnn.ops.resized_peaks import ResizedPeaksAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import INT64
from support.net import Net, built


def peaks(n: Net, *, size: tuple[int, int] = (5, 6), least: int = 1, turned: bool = False, **attrs: Any) -> list[Value]:
    """Images of three channels; sizes are whole numbers from ``least`` on. ``turned``: channels are last in memory.

    A pixel inside of each image is the brightest: where edges are repeated, roundings would decide which pixel is."""
    x = n.input(4, *size, 3) if turned else n.input(4, 3, *size)
    bump = np.zeros(size, np.float32)
    bump[2, 3] = 9
    image = n.op("Add", n.op("Transpose", x, attrs=TransposeAttrs((0, 3, 1, 2))) if turned else x, n.const(bump))
    sizes = n.op("Add", n.op("Abs", n.input(4, 2, name="sizes", dtype=INT64)), n.const(least, INT64))
    return list(n.op("ResizedPeaks", image, sizes, attrs=ResizedPeaksAttrs(**attrs), outputs=2))


CASES: dict[str, Callable[[Net], list[Value]]] = {
    "linear": peaks,
    "cubic": lambda n: peaks(n, mode="cubic", least=20),
    "smaller": lambda n: peaks(n, mode="cubic", size=(24, 40)),
    "one_pixel_is_the_first": lambda n: peaks(n, coordinate_transformation_mode="pytorch_half_pixel"),
    "corners": lambda n: peaks(n, coordinate_transformation_mode="align_corners", least=7),
    "asymmetric": lambda n: peaks(n, mode="cubic", coordinate_transformation_mode="asymmetric", cubic_coeff_a=-0.5, least=9),
    "channels_last": lambda n: peaks(n, mode="cubic", least=30, turned=True),
}  # fmt: skip


def graph_of(name: str) -> Graph:
    return built(CASES[name])
