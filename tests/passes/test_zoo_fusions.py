"""Exact counts of fusions in real architectures: every batch norm after a convolution, every activation, every sum.

Those of ResNet-50 and DenseNet-121 are in test_pipelines.py, by another exporter.
"""

from __future__ import annotations

from collections import Counter

import pytest
from support.check import stages

from optdnn.importers.onnx import import_model
from optdnn.models import zoo
from optdnn.passes.base import run_pipeline
from optdnn.passes.pipelines import PIPELINE

FUSIONS = (
    *("conv_bn", "bn_conv", "bn_scale_shift", "conv_scale_shift", "scale_shift_conv"),
    *("prologue_scale_shift", "prologue_gate", "epilogue_add", "epilogue_scale", "epilogue_activation"),
)

EXPECTED: dict[str, tuple[int, dict[str, int], dict[tuple[str, ...], int]]] = {
    # batch norms; rewrites by rule; remaining linear ops, by their stages
    "resnet18": (
        20,
        {"conv_bn": 20, "epilogue_activation": 17, "epilogue_add": 8},
        {("<Conv>", "Relu"): 9, ("<Conv>", "Add", "Relu"): 8, ("<Conv>",): 3, ("<Gemm>",): 1},
    ),
    "mobilenet_v2": (
        52,
        {"conv_bn": 52, "epilogue_activation": 35, "epilogue_add": 10},
        {("<Conv>", "Clip"): 35, ("<Conv>", "Add"): 10, ("<Conv>",): 7, ("<Gemm>",): 1},
    ),
    "efficientnet_b0": (
        49,
        {"conv_bn": 49, "epilogue_activation": 65, "epilogue_add": 9, "prologue_gate": 16},
        {
            ("<Conv>", "Swish"): 49,
            ("<Conv>", "Sigmoid"): 16,
            ("Mul", "<Conv>"): 7,
            ("Mul", "<Conv>", "Add"): 9,
            ("<Gemm>",): 1,
        },
    ),
    "vgg16_bn": (
        13,
        {"conv_bn": 13, "epilogue_activation": 15},
        {("<Conv>", "Relu"): 13, ("<Gemm>", "Relu"): 2, ("<Gemm>",): 1},
    ),
    "inception_v3": (94, {"conv_bn": 94, "epilogue_activation": 94}, {("<Conv>", "Relu"): 94, ("<Gemm>",): 1}),
    "squeezenet1_1": (0, {"epilogue_activation": 26}, {("<Conv>", "Relu"): 26}),
    "unet": (
        18,
        {"conv_bn": 18, "epilogue_activation": 18},
        {("<Conv>", "Relu"): 18, ("<ConvTranspose>",): 4, ("<Conv>",): 1},
    ),
    "yolox_s": (
        74,
        {"conv_bn": 74, "epilogue_activation": 80, "epilogue_add": 7},
        {("<Conv>", "Swish"): 67, ("<Conv>", "Swish", "Add"): 7, ("<Conv>", "Sigmoid"): 6, ("<Conv>",): 3},
    ),
    "vit_b_16": (
        0,
        {"epilogue_add": 60, "epilogue_activation": 12},
        {
            ("<Conv>",): 1,
            ("<MatMul>", "Add"): 24,
            ("<MatMul>",): 24,
            ("<MatMul>", "Add", "Gelu"): 12,
            ("<MatMul>", "Add", "Add"): 12,
            ("<Gemm>",): 1,
        },
    ),
    "bert_base": (
        0,
        {"epilogue_add": 108, "epilogue_scale": 12, "epilogue_activation": 13},
        {
            ("<MatMul>", "Add"): 36,
            ("<MatMul>", "Mul", "Add"): 12,
            ("<MatMul>",): 12,
            ("<MatMul>", "Add", "Add"): 24,
            ("<MatMul>", "Add", "Gelu"): 12,
            ("<Gemm>", "Tanh"): 1,
        },
    ),
    "mlp": (0, {"epilogue_activation": 5}, {("<Gemm>", "Relu"): 5, ("<Gemm>",): 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_fusions_in_the_zoo(name: str) -> None:
    norms, rules, chains = EXPECTED[name]
    # Narrow networks are built sooner, and have the same structure. But rounded widths may become equal.
    width = 1.0 if name in ("mobilenet_v2", "efficientnet_b0") else 0.25
    graph = import_model(zoo.build(name, width=width))
    assert graph.kinds().get("BatchNormalization", 0) == norms
    reports = run_pipeline(graph, PIPELINE(2, "reference"), verify=True)
    fired = Counter(f.rule for r in reports for f in r.fired)
    assert {rule: fired[rule] for rule in FUSIONS if fired[rule]} == rules
    assert fired["conv_bn"] + fired["bn_scale_shift"] == norms
    assert Counter(stages(graph)) == chains
    assert "BatchNormalization" not in graph.kinds()
