"""Normalized linear attention as tactics: what runs it, refusals, and the meanings of its launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_not_taken, check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.index import SplitAttrs
from optdnn.ops.normalized_attention import NormalizedAttentionAttrs
from optdnn.ops.shape import TransposeAttrs

KIND = "NormalizedLinearAttention"
KERNEL = "attention_linear"
HEADS = TransposeAttrs((0, 2, 1, 3))


def linear(size: int = 16, tokens: int = 20, width: int = 0, *, rectified: bool = True) -> Graph:
    """q, k, v of two heads from one projection, and a projection of the result. ``width``: features of the values, if they differ."""
    n = Net()
    width = width or size
    joint = n.op("MatMul", n.input(2, tokens, 24), n.random(24, 2 * (2 * size + width)))
    joint = joint if rectified else n.op("Sigmoid", joint)
    parts = n.op("Reshape", joint, n.ints(2, tokens, 2, 2 * size + width))
    sizes = n.ints(size, size, width)
    split = n.op("Split", n.op("Transpose", parts, attrs=HEADS), sizes, attrs=SplitAttrs(3), outputs=3)
    y = n.op(KIND, *split, attrs=NormalizedAttentionAttrs(1e-5, 2.0, rectified))
    back = n.op("Reshape", n.op("Transpose", y, attrs=HEADS), n.ints(2, tokens, 2 * width))
    return n.done(n.op("MatMul", back, n.random(2 * width, 24)))


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
@pytest.mark.parametrize(
    ("options", "precision"),
    [({}, "fp16"), ({"rectified": False}, "bf16"), ({"size": 24, "tokens": 33}, "fp16"), ({"size": 15}, "fp16")],
)
def test_one_launch(options: dict[str, Any], precision: str, target: str) -> None:
    program = check_simulated(linear(**options), precision, target=target)
    assert kinds(program).count(KIND) == 1
    assert "MatMul" not in kinds(program)
    if options.get("size", 16) % 8 == 0:
        assert len(program.steps) == 4  # the cast and both products: nothing is copied


@pytest.mark.parametrize("options", [{"tokens": 3000}, {"size": 96, "tokens": 40}])
def test_two_launches(options: dict[str, Any]) -> None:
    """For many tokens, and for large heads."""
    program = check_simulated(linear(**options), "fp16", target="cuda:sm_90a")
    found = kinds(program)
    assert found.index("LinearResults") == found.index("LinearSums") + 1
    assert KIND not in found


@pytest.mark.parametrize(
    ("options", "precision", "because"),
    [
        ({}, "fp32", "16-bit floats"),
        ({"rectified": False}, "fp32", "16-bit floats"),
        ({"width": 24}, "fp16", "different shapes"),
        ({"size": 136}, "fp16", "heads of 136 channels"),
    ],
)
def test_separate_products(options: dict[str, Any], precision: str, because: str) -> None:
    graph = linear(**options)
    check_not_taken(graph, KERNEL, because, KIND, "LinearSums", precision=precision, target="cuda:sm_90a")
    assert kinds(check_simulated(graph, precision, target="cuda:sm_90a")).count("MatMul") == 4


def test_features_apart_in_memory() -> None:
    """The network's inputs have the tokens of a feature side by side."""
    n = Net(np.float16)
    turned = TransposeAttrs((0, 1, 3, 2))
    parts = (n.op("Transpose", n.input(1, 2, 16, 20, name=x), attrs=turned) for x in "qkv")
    y = n.op(KIND, *parts, attrs=NormalizedAttentionAttrs(1e-5, 1.0, rectified=True))
    check_not_taken(n.done(y), KERNEL, "not contiguous", no_cubins=True, io_dtype="fp16", target="cuda:sm_90a")


def test_a_result_of_the_network_keeps_its_order() -> None:
    n = Net(np.float16)
    parts = (n.input(1, 2, 20, 16, name=x) for x in "qkv")
    y = n.op("Transpose", n.op(KIND, *parts, attrs=NormalizedAttentionAttrs(1e-5)), attrs=TransposeAttrs((0, 1, 3, 2)))
    because = "its result is wanted in another order"
    check_not_taken(n.done(y), KERNEL, because, no_cubins=True, io_dtype="fp16", target="cuda:sm_90a")
