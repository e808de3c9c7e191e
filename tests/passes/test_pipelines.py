"""Whole pipelines on whole networks: exact counts of fusions, equal results, and a second run finds nothing."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.check import TOLERANCE, differs, same, stages
from support.networks import NETWORKS, SIZES
from support.sweep import all_pairs, sweep

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote, random_feeds
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext, PassReport, run_pipeline
from optdnn.passes.pipelines import PIPELINE

FUSIONS = frozenset(
    {
        *("conv_bn", "bn_conv", "conv_scale_shift", "scale_shift_conv", "bn_scale_shift"),
        *("prologue_scale_shift", "prologue_gate", "epilogue_add", "epilogue_scale", "epilogue_activation"),
    }
)


def fusions(reports: list[PassReport]) -> dict[str, int]:
    return dict(Counter(f.rule for r in reports for f in r.fired if f.rule in FUSIONS))


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("name", NETWORKS)
def test_results_stay_and_a_second_run_finds_nothing(name: str, level: int) -> None:
    graph = promote(NETWORKS[name]())
    optimized = graph.copy()
    run_pipeline(optimized, PIPELINE(level, "reference"), verify=True)
    answers = []
    for seed in (1, 2):
        feeds = random_feeds(graph, seed, SIZES)
        answers.append(evaluate(graph, feeds))
        same(evaluate(optimized, feeds), answers[-1], TOLERANCE)
    assert all(differs(first, answers[1][k], 1e-3) for k, first in answers[0].items())
    again = run_pipeline(optimized, PIPELINE(level, "reference"))
    assert {r.name: [f.rule for f in r.fired] for r in again if r.fired} == {}


@all_pairs(
    {
        "name": NETWORKS,
        "target": ["cpu", "cuda:sm_90a"],
        "level": [2, 3],
    }
)
def test_results_stay_on_other_targets(name: str, target: str, level: int) -> None:
    graph = promote(NETWORKS[name]())
    optimized = graph.copy()
    run_pipeline(optimized, PIPELINE(level, target), PassContext(target), verify=True)
    feeds = random_feeds(graph, 1, SIZES)
    same(evaluate(optimized, feeds), evaluate(graph, feeds), TOLERANCE)


def test_left_over_batch_norms_stay_themselves_on_the_cpu() -> None:
    graph = NETWORKS["densenet"]()
    run_pipeline(graph, PIPELINE(2, "cpu"), PassContext("cpu"))
    assert graph.kinds()["BatchNormalization"] == 3
    assert not any(s[0] != "<Conv>" for s in stages(graph, "Conv"))


EXPECTED: dict[str, tuple[dict[str, int], dict[str, int], dict[tuple[str, ...], int]]] = {
    "resnet": (
        {"conv_bn": 6, "epilogue_add": 2, "epilogue_activation": 5},
        {"Conv": 6, "Flatten": 1, "Gemm": 1, "GlobalAveragePool": 1, "MaxPool": 1, "Softmax": 1},
        {("<Conv>", "Relu"): 3, ("<Conv>", "Add", "Relu"): 2, ("<Conv>",): 1, ("<Gemm>",): 1},
    ),
    "preactivation_resnet": (
        {"conv_bn": 2, "bn_scale_shift": 2, "prologue_scale_shift": 2, "epilogue_add": 2, "epilogue_activation": 3},
        {"Conv": 5, "Flatten": 1, "Gemm": 1, "GlobalAveragePool": 1, "Softmax": 1},
        {
            ("<Conv>",): 1,
            ("Mul", "Add", "Relu", "<Conv>", "Relu"): 2,
            ("<Conv>", "Add"): 1,
            ("<Conv>", "Add", "Relu"): 1,
            ("<Gemm>",): 1,
        },
    ),
    "densenet": (
        {"conv_bn": 2, "bn_scale_shift": 3, "prologue_scale_shift": 3, "epilogue_activation": 2},
        {"AveragePool": 1, "Concat": 2, "Conv": 6, "Flatten": 1, "Gemm": 1, "GlobalAveragePool": 1, "Softmax": 1},
        {
            ("<Conv>",): 3,
            ("Mul", "Add", "Relu", "<Conv>", "Relu"): 2,
            ("Mul", "Add", "Relu", "<Conv>"): 1,
            ("<Gemm>",): 1,
        },
    ),
    "mobilenet_v3": (
        {"conv_bn": 4, "epilogue_activation": 5, "epilogue_add": 1, "prologue_gate": 1},
        {"Conv": 6, "Flatten": 1, "Gemm": 1, "GlobalAveragePool": 2, "Softmax": 1},
        {
            ("<Conv>", "HardSwish"): 3,
            ("<Conv>", "Relu"): 1,
            ("<Conv>", "HardSigmoid"): 1,
            ("Mul", "<Conv>", "Add"): 1,
            ("<Gemm>",): 1,
        },
    ),
    "inception": (
        {"conv_bn": 5, "epilogue_activation": 5},
        {
            **{"AveragePool": 1, "Concat": 1, "Conv": 5, "Flatten": 1, "Gemm": 1},
            **{"GlobalAveragePool": 1, "MaxPool": 1, "Softmax": 1},
        },
        {("<Conv>", "Relu"): 5, ("<Gemm>",): 1},
    ),
    "tensorflow": (
        {"conv_scale_shift": 4, "epilogue_activation": 3, "epilogue_add": 2},
        {"Conv": 3, "Gemm": 1, "GlobalAveragePool": 1, "Reshape": 1, "Transpose": 1},
        {("<Conv>", "Clip"): 1, ("<Conv>", "Clip", "Add"): 2, ("<Gemm>",): 1},
    ),
    "unet": (
        {"conv_bn": 4, "epilogue_activation": 5},
        {"Concat": 1, "Conv": 4, "ConvTranspose": 1, "MaxPool": 1},
        {("<Conv>", "Relu"): 3, ("<Conv>", "Sigmoid"): 1, ("<ConvTranspose>", "Relu"): 1},
    ),
    "transformer": (
        {"epilogue_add": 6, "epilogue_scale": 1, "epilogue_activation": 1},
        {"LayerNormalization": 2, "MatMul": 6, "Reshape": 4, "Softmax": 1, "Split": 1, "Transpose": 4},
        {
            ("<MatMul>", "Add"): 1,
            ("<MatMul>", "Mul"): 1,
            ("<MatMul>",): 1,
            ("<MatMul>", "Add", "Add"): 2,
            ("<MatMul>", "Add", "Gelu"): 1,
        },
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_fusions_in_networks(name: str) -> None:
    graph = NETWORKS[name]()
    reports = run_pipeline(graph, PIPELINE(2, "reference"), verify=True)
    rules, kinds, chains = EXPECTED[name]
    assert fusions(reports) == rules
    assert graph.kinds() == kinds
    assert Counter(stages(graph)) == chains


# ---------------------------------------------------------------- ONNX's own light models

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
COUNTS: dict[str, tuple[int, dict[str, int], dict[tuple[str, ...], int]]] = {
    # batch norms in the model; rewrites by rule; remaining linear ops, by their stages
    "bvlc_alexnet": (
        0,
        {"epilogue_activation": 7},
        {("<Conv>", "Relu"): 5, ("<Gemm>", "Relu"): 2, ("<Gemm>",): 1},
    ),
    "densenet121": (
        121,
        {"conv_bn": 59, "bn_scale_shift": 62, "prologue_scale_shift": 61, "epilogue_activation": 59},
        {
            ("<Conv>", "Relu"): 1,
            ("Mul", "Add", "Relu", "<Conv>", "Relu"): 58,
            ("Mul", "Add", "Relu", "<Conv>"): 3,
            ("<Conv>",): 59,
        },
    ),
    "inception_v1": (0, {"epilogue_activation": 57}, {("<Conv>", "Relu"): 55, ("<Gemm>",): 1}),
    "inception_v2": (69, {"conv_bn": 69, "epilogue_activation": 69}, {("<Conv>", "Relu"): 64, ("<Gemm>",): 1}),
    "resnet50": (
        53,
        {"conv_bn": 53, "epilogue_activation": 49, "epilogue_add": 16},
        {("<Conv>", "Relu"): 33, ("<Conv>", "Add", "Relu"): 16, ("<Conv>",): 4, ("<Gemm>",): 1},
    ),
    "shufflenet": (
        49,
        {"conv_bn": 49, "epilogue_activation": 30, "epilogue_add": 13},
        {("<Conv>", "Relu"): 17, ("<Conv>", "Add", "Relu"): 13, ("<Conv>",): 19, ("<Gemm>",): 1},
    ),
    "squeezenet": (0, {"epilogue_activation": 26}, {("<Conv>", "Relu"): 26}),
    "vgg19": (0, {"epilogue_activation": 18}, {("<Conv>", "Relu"): 16, ("<Gemm>", "Relu"): 2, ("<Gemm>",): 1}),
    "zfnet512": (0, {"epilogue_activation": 7}, {("<Conv>", "Relu"): 5, ("<Gemm>", "Relu"): 2, ("<Gemm>",): 1}),
}
"""Weights are filled with one number, so that equal branches of the inceptions merge (5 of 69, 2 of 57)."""


@cache
def light(name: str) -> tuple[dict[str, int], Graph, list[PassReport]]:
    graph = import_model(LIGHT / f"light_{name}.onnx")
    before = graph.kinds()
    return before, graph, run_pipeline(graph, PIPELINE(2, "reference"))


@pytest.mark.parametrize("name", sweep(COUNTS, *(n for n in COUNTS if n not in ("resnet50", "inception_v2", "vgg19"))))
def test_fusion_counts_of_the_light_models(name: str) -> None:
    before, graph, reports = light(name)
    norms, rules, chains = COUNTS[name]
    found = fusions(reports)
    assert before.get("BatchNormalization", 0) == norms
    assert found == rules
    assert found.get("conv_bn", 0) + found.get("bn_scale_shift", 0) == norms
    assert Counter(stages(graph)) == chains
    assert "BatchNormalization" not in graph.kinds()
    assert not any(_adjacent(graph, op) for op in graph.of_kind("Relu", "Add"))


def _adjacent(graph: Graph, op: Any) -> bool:
    """Whether an activation or sum was left after a convolution that nothing else reads."""
    return any(
        graph.op(v).kind in ("Conv", "Gemm") and graph.sole_user(v) is not None for v in op.inputs if v is not None
    )
