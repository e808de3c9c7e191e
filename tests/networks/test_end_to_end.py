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


Feeds = dict[str, Any]


def check(model: onnx.ModelProto, pairs: list[tuple[Feeds, Feeds]]) -> None:
    """Each target and precision, built once and run on the first feeds of each pair; the second are other inputs."""
    wanted = [run_ort(model, feeds) for feeds, _ in pairs]
    others = []
    for want, (_, other_feeds) in zip(wanted, pairs, strict=True):
        others.append(relative_error({str(i): a for i, a in enumerate(run_ort(model, other_feeds))}, want))
        assert others[-1] > 100 * FP32_BOUND, (
            "the output hardly depends on the input: the comparison would prove nothing"
        )
    for target in ("cpu", "reference"):
        engine = optdnn.build(model, target=target)
        for (feeds, _), want, other in zip(pairs, wanted, others, strict=True):
            error = relative_error(engine.run(feeds), want)
            assert error <= min(FP32_BOUND, other / 100), f"{target}: {error:.2g}"
        del engine
    if refuses("bf16") is None:
        check_bf16(model, [feeds for feeds, _ in pairs], wanted, others)


def check_bf16(model: onnx.ModelProto, inputs: list[Feeds], wanted: list[list[Any]], others: list[float]) -> None:
    """At bf16, no worse than twice OpenVINO's own bf16 error on the graph (the roundings fall elsewhere)."""
    ov = pytest.importorskip("openvino", reason="the cpu extra is not installed")
    theirs = ov.Core().compile_model(
        ov.Core().read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
    )
    engine = optdnn.build(model, target="cpu", precision="bf16")
    assert all(f["precision"] == "bf16" and f["executed"].get("bf16", 0) > 0 for f in engine.facts)
    for feeds, want, other in zip(inputs, wanted, others, strict=True):
        results = theirs(feeds)
        their_error = relative_error({str(i): results[o] for i, o in enumerate(theirs.outputs)}, want)
        error = relative_error(engine.run(feeds), want)
        assert error <= 2 * their_error + 1e-3
        assert error < other


@pytest.mark.slow
@needs_shared_graphs
@pytest.mark.parametrize("exporter", ["ts", "dyn"])
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_shared_graph(name: str, exporter: str, tmp_path: Path) -> None:
    model = shared_network(f"{name}.{exporter}", tmp_path)
    feeds, others = shared_feeds(model), shared_feeds(model, seed=11)
    largest = min(v.shape[0] for v in feeds.values())  # some are exported for a batch of one
    batches = [b for b in (1, 2) if b <= largest]
    check(model, [({k: v[:b] for k, v in feeds.items()}, {k: v[:b] for k, v in others.items()}) for b in batches])


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_light_graph(name: str) -> None:
    model = light(name)
    rng = np.random.default_rng(3)
    constants = {t.name for t in model.graph.initializer}
    (value,) = [v for v in model.graph.input if v.name not in constants]
    shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
    feeds, others = ({value.name: picture(rng, shape)} for _ in range(2))
    check(model, [(feeds, others)])
