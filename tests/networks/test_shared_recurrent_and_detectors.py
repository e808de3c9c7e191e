"""Recurrent networks and detectors as PyTorch exports them, if they are available: import, reference, cpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.shared import needs_shared_graphs, shared_feeds, shared_network

import optdnn
from optdnn.importers.onnx import import_model
from optdnn.ir.body import GraphBody
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.base import attrs_dict
from optdnn.types import Array

pytestmark = [pytest.mark.slow, needs_shared_graphs]


def onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Array]:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, feeds)
    return outputs


def close(got: dict[str, Array], want: list[Array]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got.values(), want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.abs(a.astype(np.float64) - b).max() <= 1e-4 * np.abs(b).max()


def all_kinds(graph: Graph) -> dict[str, int]:
    """Numbers of ops by kind, including those in bodies."""
    counts = dict(graph.kinds())
    for op in graph.ops():
        for body in (v for v in attrs_dict(op.attrs).values() if isinstance(v, GraphBody)):
            for kind, n in all_kinds(body.graph).items():
                counts[kind] = counts.get(kind, 0) + n
    return counts


@pytest.mark.parametrize("exporter", ["ts", "dyn"])
@pytest.mark.parametrize(
    ("name", "kinds"), [("lstm", {"LSTM": 2}), ("bilstm", {"LSTM": 2}), ("gru", {"GRU": 1}), ("crnn", {"LSTM": 2})]
)
def test_recurrent_networks(name: str, kinds: dict[str, int], exporter: str, tmp_path: Path) -> None:
    model = shared_network(f"{name}.{exporter}", tmp_path)
    feeds = shared_feeds(model)
    want = onnxruntime(model, feeds)
    graph = import_model(model, shapes={k: v.shape for k, v in feeds.items()})
    assert graph.kinds().items() >= kinds.items()
    close(evaluate(graph, feeds), want)
    other = evaluate(
        graph, shared_feeds(model, seed=4)
    )  # the outputs depend on the input by far more than the tolerance
    for a, b in zip(other.values(), want, strict=True):
        assert np.abs(a - b).max() > 2e-3 * np.abs(b).max()
    engine = optdnn.build(model, target="cpu", shapes={k: v.shape for k, v in feeds.items()}, threads=1)
    close(engine.run(feeds), want)


def test_ssdlite_selects_the_same_boxes(tmp_path: Path) -> None:
    model = shared_network("ssdlite320_mobilenet_v3_large.ts", tmp_path)
    feeds = shared_feeds(model)
    graph = import_model(model)
    assert all_kinds(graph).items() >= {"NonMaxSuppression": 1, "TopK": 90}.items()
    close(evaluate(graph, feeds), onnxruntime(model, feeds))


def test_mask_rcnn_imports_with_its_loop(tmp_path: Path) -> None:
    """Its evaluation in NumPy takes half a minute, and roundoff decides the order of its nearly equal scores."""
    kinds = all_kinds(import_model(shared_network("maskrcnn_resnet50_fpn.ts", tmp_path)))
    assert (kinds["Loop"], kinds["NonMaxSuppression"], kinds["RoiAlign"]) == (1, 2, 8)
