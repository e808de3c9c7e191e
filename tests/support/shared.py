"""Real networks as both PyTorch exporters write them, where they are at hand beside the repository."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import onnx
import pytest

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
    """The network ("bert.ts": TorchScript, "bert.dyn": dynamo) with seeded weights; unpacked in ``folder``."""
    assert FOLDER is not None
    with tarfile.open(FOLDER / "graphs.tar.xz") as archive:
        for ending in ("onnx", "json"):
            archive.extract(f"graphs/{name}.{ending}", folder, filter="data")
    model: onnx.ModelProto = _fill().fill(str(folder / "graphs" / f"{name}.onnx"))
    return model


def shared_feeds(model: onnx.ModelProto, seed: int = 3) -> dict[str, Any]:
    """Seeded inputs of such a network."""
    feeds: dict[str, Any] = _fill().feeds(model, seed)
    return feeds
