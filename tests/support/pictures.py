"""Small pictures, and a small network that classifies them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optdnn.types import Array

CLASSES = 6


def picture(size: tuple[int, int], seed: int = 0) -> Array:
    """Smooth colors with some noise, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    waves = [127 + 90 * np.sin((seed + 1) * x / 17), 127 + 90 * np.cos(y / (3 + seed)), (3 * x + y) % 256]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 9, (*size, 3)), 0, 255).astype(np.uint8)


def write_pictures(folder: Path, sizes: Sequence[tuple[int, int]], suffix: str = "png") -> list[Path]:
    """Files ``0.png`` and so on of pictures of these sizes."""
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
