"""Real networks end to end: both targets and both precisions, compared with ONNX Runtime and with the effect of another input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.known_sizes import unknown_shape_arithmetic
from support.light import LIGHT_MODELS, light, picture, relative_error
from support.shared import needs_shared_graphs, shared_feeds, shared_network

import optdnn
from optdnn.importers.onnx import import_model
from optdnn.ir.verify import verify
from optdnn.runtime.cpu.openvino import refuses

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

FP32_BOUND = 1e-4
CONVOLUTIONAL = (
    "alexnet",
    "deeplabv3_mobilenet_v3_large",
    "efficientnet_b0",
    "googlenet",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "resnet18",
    "resnet50",
    "squeezenet1_1",
)
LARGE = ("resnet50",)
"""Its blocks also occur in the other networks, which also run at bf16 and with two batches."""

GRAPHS = [(name, exporter) for name in CONVOLUTIONAL for exporter in ("ts", "dyn")]
ON_CPU = {name: "ts" if k % 2 else "dyn" for k, name in enumerate(CONVOLUTIONAL)}


Feeds = dict[str, Any]


def run_ort(model: onnx.ModelProto, inputs: list[Feeds]) -> list[list[Any]]:
    """The outputs for each of the inputs, from one session without ONNX Runtime's optimizations."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    return [session.run(None, feeds) for feeds in inputs]


def check(
    model: onnx.ModelProto,
    inputs: list[Feeds],
    others: list[Feeds],
    targets: Sequence[str] = ("cpu", "reference"),
    *,
    bf16: bool = True,
) -> None:
    """Import the model and build each of ``targets`` once (the CPU also at ``bf16``). The CPU runs all inputs, ``reference``
    the last. ``others`` are other inputs of the same shapes."""
    results = run_ort(model, [*inputs, *others])
    wanted = results[: len(inputs)]
    differences = [
        relative_error({str(i): a for i, a in enumerate(other)}, want)
        for want, other in zip(wanted, results[len(inputs) :], strict=True)
    ]
    assert min(differences) > 100 * FP32_BOUND, "the output hardly depends on the input: the comparison proves nothing"
    shapes = {name: array.shape for name, array in inputs[-1].items()}
    check_import(model, shapes, [array.shape for array in wanted[-1]])
    cases = list(zip(inputs, wanted, differences, strict=True))
    for target in targets:
        engine = optdnn.build(model, target=target)
        for feeds, want, difference in cases if target == "cpu" else cases[-1:]:
            error = relative_error(engine.run(feeds), want)
            assert error <= min(FP32_BOUND, difference / 100), f"{target}: {error:.2g}"
        del engine
    if bf16 and "cpu" in targets and refuses("bf16") is None:
        check_bf16(model, *cases[-1])


def check_import(model: onnx.ModelProto, shapes: dict[str, Any], wanted: list[tuple[int, ...]]) -> None:
    """At fixed sizes, every rank and all shape arithmetic is known, and the outputs have their shapes."""
    graph = import_model(model, shapes=shapes)
    verify(graph)
    assert unknown_shape_arithmetic(graph) == []
    assert [graph.op(i).outputs[0].type.static_shape for i in graph.outputs] == wanted
    assert all(out.type.shape is not None for op in graph.ops() for out in op.outputs)


def check_bf16(model: onnx.ModelProto, feeds: Feeds, want: list[Any], difference: float) -> None:
    """At bf16, the error is at most twice OpenVINO's own bf16 error on the graph (roundings differ)."""
    ov = pytest.importorskip("openvino", reason="the cpu extra is not installed")
    core = ov.Core()
    hints = {"INFERENCE_PRECISION_HINT": "bf16"}
    results = core.compile_model(core.read_model(model.SerializeToString()), "CPU", hints)(feeds)
    engine = optdnn.build(model, target="cpu", precision="bf16")
    assert all(f["precision"] == "bf16" and f["executed"].get("bf16", 0) > 0 for f in engine.facts)
    their_error = relative_error({str(i): a for i, a in enumerate(results.values())}, want)
    error = relative_error(engine.run(feeds), want)
    assert error <= 2 * their_error + 1e-3
    assert error < difference


@pytest.mark.slow
@needs_shared_graphs
@pytest.mark.parametrize(("name", "exporter"), [g for g in GRAPHS if g[0] not in LARGE or g[1] == ON_CPU[g[0]]])
def test_shared_graph(name: str, exporter: str, tmp_path: Path) -> None:
    """The CPU runs the graph of one exporter and ``reference`` that of the other, alternately (not of a large network). Both
    graphs have the same operators after import."""
    model = shared_network(f"{name}.{exporter}", tmp_path)
    feeds, others = shared_feeds(model), shared_feeds(model, seed=11)
    largest = min(v.shape[0] for v in feeds.values())  # some are exported for a batch of one
    batches = [b for b in (1, 2) if b <= largest][-1 if name in LARGE else 0 :]
    given = ([{k: v[:b] for k, v in given.items()} for b in batches] for given in (feeds, others))
    check(model, *given, ["cpu"] if exporter == ON_CPU[name] else ["reference"], bf16=name not in LARGE)


REPEATED = {"light_densenet121", "light_inception_v2", "light_resnet50", "light_vgg19", "light_zfnet512"}
"""Their operators also occur in the others; the backend suite has their results."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LIGHT_MODELS if name not in REPEATED])
def test_light_graph(name: str) -> None:
    model = light(name)
    rng = np.random.default_rng(3)
    constants = {t.name for t in model.graph.initializer}
    (value,) = [v for v in model.graph.input if v.name not in constants]
    shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
    feeds, others = ({value.name: picture(rng, shape)} for _ in range(2))
    check(model, [feeds], [others])
