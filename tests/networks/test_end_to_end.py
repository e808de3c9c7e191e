"""Real networks end to end: both targets, both precisions, against ONNX Runtime, and against what another input makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.light import LIGHT_MODELS, light, picture, relative_error
from support.shared import needs_shared_graphs, shared_feeds, shared_network

import optdnn
from optdnn.runtime.cpu.openvino import refuses

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

FP32_BOUND = 1e-4
CONVOLUTIONAL = (
    "alexnet",
    "convnext_tiny",
    "deeplabv3_mobilenet_v3_large",
    "efficientnet_b0",
    "fcn_resnet50",
    "googlenet",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "squeezenet1_1",
    "vgg16_bn",
)


def run_ort(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    outputs: list[Any] = ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    return outputs


def check(model: onnx.ModelProto, feeds: dict[str, Any], other_feeds: dict[str, Any], **shapes: Any) -> None:
    want = run_ort(model, feeds)
    other = relative_error(dict(enumerate(run_ort(model, other_feeds))), want)  # type: ignore[arg-type]
    assert other > 100 * FP32_BOUND, "the output hardly depends on the input: the comparison would prove nothing"
    for target in ("cpu", "reference"):
        engine = optdnn.build(model, target=target, **shapes)
        error = relative_error(engine.run(feeds), want)
        assert error <= FP32_BOUND, f"{target}: {error:.2g}"
        assert error <= other / 100
    if refuses("bf16") is None:
        check_bf16(model, feeds, want, other)


def check_bf16(model: onnx.ModelProto, feeds: dict[str, Any], want: list[Any], other: float) -> None:
    """At bf16, no worse than twice OpenVINO's own bf16 error on the graph (the roundings fall elsewhere)."""
    ov = pytest.importorskip("openvino", reason="the cpu extra is not installed")
    compiled = ov.Core().compile_model(
        ov.Core().read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
    )
    theirs = compiled(feeds)
    their_error = relative_error({str(i): theirs[o] for i, o in enumerate(compiled.outputs)}, want)
    engine = optdnn.build(model, target="cpu", precision="bf16")
    error = relative_error(engine.run(feeds), want)
    assert error <= 2 * their_error + 1e-3
    assert error < other
    assert all(f["precision"] == "bf16" and f["executed"].get("bf16", 0) > 0 for f in engine.facts)


@pytest.mark.slow
@needs_shared_graphs
@pytest.mark.parametrize("exporter", ["ts", "dyn"])
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_shared_graph(name: str, exporter: str, tmp_path: Path) -> None:
    model = shared_network(f"{name}.{exporter}", tmp_path)
    for batch in (1, 2):
        feeds = {k: v[:batch] for k, v in shared_feeds(model).items()}
        if any(v.shape[0] < batch for v in feeds.values()):
            continue  # exported for a batch of one
        others = {k: v[:batch] for k, v in shared_feeds(model, seed=11).items()}
        check(model, feeds, others)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_light_graph(name: str) -> None:
    model = light(name)
    rng = np.random.default_rng(3)
    constants = {t.name for t in model.graph.initializer}
    (value,) = [v for v in model.graph.input if v.name not in constants]
    shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
    feeds, others = ({value.name: picture(rng, shape)} for _ in range(2))
    check(model, feeds, others)
