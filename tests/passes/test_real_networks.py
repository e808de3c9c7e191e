"""Passes on real networks: function bodies of the standard, networks from both PyTorch exporters and of the onnx package."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.onnx_cases import cases
from support.shared import needs_shared_graphs, shared_network

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes.base import PassContext, PassReport, run_pipeline
from optdnn.passes.fuse_activation import FuseActivation
from optdnn.passes.fuse_norm import FuseNorm
from optdnn.passes.fuse_softmax import FuseSoftmax
from optdnn.passes.pipelines import O2, PIPELINE

RECOGNIZE = O2[: 1 + [p.name for p in O2].index("fuse_softmax")]
"""The passes up to the last one that recognizes a decomposition."""

FUNCTIONS = {
    r"gelu_tanh_\d": "gelu_tanh",
    r"gelu_default_\d": "gelu",
    r"hardsigmoid.*": "hard_sigmoid",
    r"hardswish": "hard_swish",
    r"mish": "mish",
    r"swish": "swish",
    r"softmax_.*": "softmax",
    r"logsoftmax_.*": "log_softmax",
    r"layer_normalization_.*": "layer_norm",
    r"rms_normalization_.*": "rms_norm",
    r"group_normalization_.*": "layer_norm group_norm",  # whose positions are one axis in between
}
"""Test cases of the standard whose operator is expanded into its function body -> the rules that find it again."""


@lru_cache(maxsize=1)
def expanded() -> dict[str, Any]:
    """The standard's test cases with function bodies, by name."""
    return {name[len("test_") :]: case for name, case in cases().items() if "_expanded" in name}


def rules(reports: list[PassReport]) -> dict[str, int]:
    names = {FuseActivation.name, FuseNorm.name, FuseSoftmax.name}
    return dict(Counter(f.rule for report in reports if report.name in names for f in report.fired))


@pytest.mark.parametrize("pattern", FUNCTIONS)
def test_function_bodies_of_the_standard(pattern: str) -> None:
    cases = [c for name, c in expanded().items() if re.fullmatch(rf"{pattern}_expanded(_ver\d+)?", name)]
    assert cases
    for case in cases:
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        del model.graph.output[1:]  # a layer norm's statistics: with them the inner values are outputs
        graph = import_model(model)
        reports = run_pipeline(graph, RECOGNIZE, verify=True)
        assert rules(reports) == dict.fromkeys(FUNCTIONS[pattern].split(), 1), case.name
        inputs, outputs = case.data_sets[0]
        feeds = dict(zip([i.name for i in model.graph.input], inputs, strict=True))
        (result,) = evaluate(graph, feeds).values()
        assert np.allclose(result, outputs[0], rtol=1e-5, atol=1e-6), case.name


def test_statistics_that_are_outputs_keep_a_layer_norm_apart() -> None:
    model = expanded()["layer_normalization_2d_axis1_expanded"].model
    reports = run_pipeline(import_model(model), RECOGNIZE)
    assert rules(reports) == {}
    reasons = [r.reason for report in reports for r in report.refused if r.rule == "layer_norm"]
    assert any("an inner value is an output of the network" in r for r in reasons)


NETWORKS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "bert.ts": ({"gelu": 4}, {"Gelu": 4, "LayerNormalization": 9, "Softmax": 4}),
    "bert.dyn": ({}, {"Gelu": 4, "LayerNormalization": 9, "Softmax": 4}),
    "distilbert.ts": ({"gelu": 3}, {"Gelu": 3, "LayerNormalization": 7}),
    "convnext_tiny.ts": ({"gelu": 18}, {"Gelu": 18, "LayerNormalization": 23}),
    "convnext_tiny.dyn": ({}, {"Gelu": 18, "LayerNormalization": 23}),
    "swin_t.ts": ({"gelu": 12}, {"Gelu": 12, "LayerNormalization": 29}),
    "whisperenc.ts": ({"gelu": 5}, {"Gelu": 5, "LayerNormalization": 7}),
    "gpt2.dyn": ({"gelu_tanh": 3}, {"Gelu": 3, "LayerNormalization": 7}),
    "clipvision.ts": ({"swish": 3}, {"Swish": 3, "LayerNormalization": 7}),
    "clipvision.dyn": ({"swish": 3}, {"Swish": 3, "LayerNormalization": 7}),
    "llama.dyn": ({"rms_norm": 5, "swish": 2}, {"RMSNormalization": 5, "Swish": 2, "Softmax": 2}),
    "t5enc.ts": ({"rms_norm": 7}, {"RMSNormalization": 7, "Softmax": 3}),
    "t5enc.dyn": ({"rms_norm": 7}, {"RMSNormalization": 7, "Softmax": 3}),
    "efficientnet_b0.ts": ({"swish": 49}, {"Swish": 49, "Sigmoid": 16}),
    "efficientnet_b0.dyn": ({"swish": 49}, {"Swish": 49, "Sigmoid": 16}),
    "mobilenet_v3_large.ts": ({}, {"HardSwish": 21, "HardSigmoid": 8}),
    "mobilenet_v3_large.dyn": ({}, {"HardSwish": 21, "HardSigmoid": 8}),
}
"""Network -> rewrites by rule, and how many of these kinds there are afterward (some are exported whole)."""


@pytest.mark.slow
@needs_shared_graphs
@pytest.mark.parametrize("name", NETWORKS)
def test_exported_networks(name: str, tmp_path: Path) -> None:
    graph = import_model(shared_network(name, tmp_path))
    fired, kinds = NETWORKS[name]
    assert rules(run_pipeline(graph, RECOGNIZE, verify=True)) == fired
    left = graph.kinds()
    assert {k: left.get(k) for k in kinds} == kinds
    for written_out in ("Erf", "Tanh", "Reciprocal") if fired else ():
        assert left.get(written_out, 0) == 0


CUDA = PassContext(target="cuda:sm_90a")


def light(name: str) -> Graph:
    """A network that the onnx package ships without weights; these are drawn here."""
    path = Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{name}.onnx"
    model = onnx.load(path)
    rng = np.random.default_rng(0)
    sizes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in list(model.graph.node):
        if node.op_type == "ConstantOfShape" and node.input[0] in sizes:
            shape = tuple(int(d) for d in sizes[node.input[0]])
            weight = rng.standard_normal(shape, dtype=np.float32) * np.float32(1 / np.sqrt(max(np.prod(shape[1:]), 1)))
            model.graph.initializer.append(numpy_helper.from_array(weight, node.output[0]))
            model.graph.node.remove(node)
    return import_model(model)


@pytest.mark.parametrize(
    ("name", "families", "ordered"),
    [("inception_v1", 9, 9), ("inception_v2", 10, 8), ("squeezenet", 0, 0), ("resnet50", 0, 0)],
)
def test_siblings_of_networks(name: str, families: int, ordered: int) -> None:
    graph = light(name)
    reports = run_pipeline(graph, PIPELINE(3, CUDA.target), CUDA)
    verify(graph)
    (report,) = [r for r in reports if r.name == "fuse_siblings"]
    fired = [f.rule for f in report.fired]
    assert (fired.count("siblings"), fired.count("outer_part")) == (families, ordered)
    assert graph.kinds().get("Split", 0) == families


@pytest.mark.parametrize(
    ("name", "convolutions", "conversions"),
    [
        ("resnet50", 53, 1),
        pytest.param("densenet121", 121, 1, marks=pytest.mark.slow),
        ("shufflenet", 49, 33),
    ],
)
def test_layouts_of_networks(name: str, convolutions: int, conversions: int) -> None:
    """Only the borders are converted, except in ShuffleNet, where 32 channel shuffles reshape in plain order."""
    graph = light(name)
    report = run_pipeline(graph, PIPELINE(3, CUDA.target), CUDA, verify=True)[-2]
    assert report.name == "assign_layout"
    assert [op.outputs[0].type.layout for op in graph.of_kind("Conv")] == ["nhwc"] * convolutions
    assert sum(f.rule == "convert" for f in report.fired) == conversions
    reasons = Counter(r.reason.split(":")[0] for r in report.refused)
    reshapes = {"resnet50": 0, "densenet121": 0, "shufflenet": 32}[name]
    assert reasons.pop("Reshape has no channels-last form", 0) == reshapes
    assert list(reasons.values()) == [1]
    assert "is an input of the network" in next(iter(reasons))
