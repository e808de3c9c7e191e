"""Small pictures, a small network that classifies them, and the operators that prepare pictures on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optdnn.ir.graph import Value
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import DTYPES, Array
from support.net import Net

CLASSES = 6


def picture(size: tuple[int, int], seed: int = 0) -> Array:
    """Smooth colors with some noise, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    waves = [127 + 90 * np.sin((seed + 1) * x / 17), 127 + 90 * np.cos(y / (3 + seed)), (3 * x + y) % 256]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 9, (*size, 3)), 0, 255).astype(np.uint8)


def write_pictures(folder: Path, sizes: Sequence[tuple[int, int]], suffix: str = "png") -> list[Path]:
    """Files ``0.png``, ``1.png`` and so on of pictures of these sizes."""
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{k}.{suffix}" for k in range(len(sizes))]
    for k, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        image.fromarray(picture(size, k)).save(path)
    return paths


def classifier(*, channels: int = 3, batch: int | str = "N", pads: int = 0) -> onnx.ModelProto:
    """x [batch, channels, H, W] -> y [batch, 6]: a convolution, pooling and a product."""
    rng = np.random.default_rng(1)
    weights = {
        "w": rng.normal(size=(5, channels, 3, 3)).astype(np.float32),
        "f": rng.normal(size=(5, CLASSES)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[pads] * 4),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["q"], name="flatten"),
        helper.make_node("MatMul", ["q", "f"], ["y"], name="head"),
    ]
    ports = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, channels, "H", "W"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES]),
    ]
    constants = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "classifier", ports[:1], ports[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])


FILTERED = ResizeAttrs("linear", antialias=True, exclude_outside=True, axes=(2, 3))


def resized(
    n: Net, attrs: ResizeAttrs = FILTERED, *, channels: int = 3, sizes: tuple[int, ...] = (8, 13), crop: bool = True,
    dtype: Any = np.uint8, to: str = "fp32", step: int = 1, shift: bool = True, other_reader: bool = False, bgr: bool = False,
    conv: bool = False, name: str = "x",
) -> list[Value]:  # fmt: skip
    """Bytes converted to floats, resized, cropped and shifted."""
    x = n.op("Transpose", n.input(2, 15, 22, channels, dtype=dtype, name=name), attrs=TransposeAttrs((0, 3, 1, 2)))
    x = n.op("Gather", x, n.ints(2, 1, 0), attrs=GatherAttrs(1)) if bgr else x
    cast = x = n.op("Cast", x, attrs=CastAttrs(DTYPES[to]))
    x = n.op("Resize", x, None, None, n.ints(*sizes), attrs=attrs)
    if crop:
        x = n.op("Slice", x, n.ints(1, 2), n.ints(7, 12), n.ints(2, 3), n.ints(1, step))
    if shift:
        x = n.op("Add", n.const(np.arange(channels).reshape(channels, 1, 1) - 1.5, DTYPES[to]), x)
    if conv:
        x = n.conv(x, 5, 3)
    return [x, n.op("Exp", cast)] if other_reader else [x]
