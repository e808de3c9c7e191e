"""Regions of images: graphs for tests of RoiAlign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optdnn.ir.graph import Graph, Value
from optdnn.ops.detect import RoiAlignAttrs
from optdnn.types import INT64
from support.net import Net, built

BOXES = [
    [1.0, 1.0, 6.5, 5.25],
    [0.0, 0.0, 2.2, 3.1],
    [-3.0, -2.5, 4.0, 3.0],
    [4.0, 2.0, 30.0, 19.0],
    [2.0, 2.0, 2.0, 2.0],
]


def aligned(n: Net, *, channels: int = 16, before: bool = True, boxes: Any = None, **attrs: Any) -> list[Value]:
    """Regions of two images between convolutions. ``before``: a convolution computes the images; otherwise they are an input."""
    x = n.input(2, 8 if before else channels, 7, 8)
    image = n.conv(x, channels) if before else x
    rois = n.op("Add", n.const(BOXES if boxes is None else boxes), n.op("Sigmoid", n.input(1, 1, name="shift")))
    which = n.op("Min", n.input(len(boxes or BOXES), name="which", dtype=INT64), n.const(1, INT64))
    made = RoiAlignAttrs(**{"output_height": 3, "output_width": 2, "sampling_ratio": 2} | attrs)
    found = n.op("RoiAlign", image, rois, n.op("Abs", which), attrs=made)
    return [n.conv(found, 8) if before else found]


CASES: dict[str, Callable[[Net], list[Value]]] = {
    "channels": aligned,
    "adaptive": lambda n: aligned(n, sampling_ratio=0, spatial_scale=0.75),
    "many_samples": lambda n: aligned(n, sampling_ratio=3),
    "whole_pixels": lambda n: aligned(n, coordinate_transformation_mode="output_half_pixel", sampling_ratio=0),
    "max": lambda n: aligned(n, mode="max"),
    "max_adaptive": lambda n: aligned(n, mode="max", sampling_ratio=0),
    "two_channels": lambda n: aligned(n, channels=10),
    "odd_channels": lambda n: aligned(n, channels=5),
    "plain": lambda n: aligned(n, before=False),
    "plain_max": lambda n: aligned(n, before=False, mode="max", sampling_ratio=0),
}


def graph_of(name: str) -> Graph:
    return built(CASES[name])
