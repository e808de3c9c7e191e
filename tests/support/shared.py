"""Real networks in the forms of both PyTorch exporters, if they are available beside the repository."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from support.agreement import fill_module


def _folder() -> Path | None:
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "graphs.tar.xz").is_file():
            return parent / "shared"
    return None


FOLDER = _folder()
needs_shared_graphs = pytest.mark.skipif(FOLDER is None, reason="shared/graphs.tar.xz is not beside the repository")


def _fill() -> Any:
    assert FOLDER is not None
    return fill_module(FOLDER)


def shared_network(name: str, folder: Path) -> onnx.ModelProto:
    """The network ("bert.ts": TorchScript, "bert.dyn": dynamo) with seeded weights, its widest layers narrower; unpacked in
    ``folder``."""
    assert FOLDER is not None
    with tarfile.open(FOLDER / "graphs.tar.xz") as archive:
        for ending in ("onnx", "json"):
            archive.extract(f"graphs/{name}.{ending}", folder, filter="data")
    path = folder / "graphs" / f"{name}.onnx"
    _narrow(path.with_suffix(".json"))
    model: onnx.ModelProto = _fill().fill(str(path))
    del model.graph.value_info[:]
    for tensor in model.graph.initializer:  # weights that are not drawn
        if list(tensor.dims) == [4096]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:256], tensor.name))
    return model


def _narrow(path: Path) -> None:
    """Divide the width of the layers after the convolutions of AlexNet and VGG by 16: they have most of the weights.

    ``path`` lists the weights to draw, each as [dtype, dims, mean, standard deviation].
    """
    drawn = json.loads(path.read_text(encoding="utf-8"))
    for row in drawn.values():
        if row[1][1:] == [4096]:  # sums have fewer terms
            row[3] *= 4
        row[1] = [256 if d == 4096 else d for d in row[1]]
    path.write_text(json.dumps(drawn), encoding="utf-8")


def shared_feeds(model: onnx.ModelProto, seed: int = 3) -> dict[str, Any]:
    """Seeded inputs of such a network."""
    feeds: dict[str, Any] = _fill().feeds(model, seed)
    return feeds
