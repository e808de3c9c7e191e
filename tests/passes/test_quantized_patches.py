"""Patch embeddings of 8-bit images become products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.quantized_nets import ADDED, QNet, folded, within

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.shape import TransposeAttrs

STEP = 0.04


def embedding(
    *, channels: int = 3, size: tuple[int, ...] = (12, 20), patch: int = 4, twice: bool = False, turned: bool = False,
    **options: Any,
) -> Graph:  # fmt: skip
    """A quantized patch embedding. ``twice``: the rounded image has another reader. ``turned``: its rounded result becomes rows."""
    n = QNet()
    zero = 3
    stored = n.q(n.input(2, channels * options.get("group", 1), *size), 0.03, zero)
    pads = options.pop("pads", (0, 0, 0, 0))
    y = n.q(n.qconv(n.dq(stored, 0.03, zero), 16, patch, **{"stride": patch, "pads": pads} | options), STEP, -5)
    y = n.dq(n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 3, 1))) if turned else y, STEP, -5)
    return n.done(y, *([n.op("Tanh", n.dq(stored, 0.03, zero))] if twice else []))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_patches_of_a_quantized_image_are_rows(twice: bool, turned: bool) -> None:
    graph = embedding(twice=twice, turned=turned)
    made, report = folded(graph)
    assert [f.rule for f in report.fired].count("quantized_patch_rows") == 1
    kinds = made.kinds()
    assert "QuantizedConv" not in kinds
    assert (kinds["QuantizedMatMul"], kinds["Reshape"]) == (1, 2)
    assert kinds["Transpose"] == (3 if turned else 2)
    (product,) = made.of_kind("QuantizedMatMul")
    assert made.type(product.inputs[0]).static_shape == (2, 3, 5, 48)  # type: ignore[arg-type]
    within(graph, made, 1e-6)


def test_the_image_is_rounded_where_it_is_cut() -> None:
    made, _ = folded(embedding())
    (product,) = made.of_kind("QuantizedMatMul")
    joined = made.op(product.inputs[0])  # type: ignore[arg-type]
    rounds = made.op(joined.inputs[0])  # type: ignore[arg-type]
    assert (joined.kind, rounds.kind) == ("Reshape", "Pointwise")
    assert made.type(rounds.value).static_shape == (2, 3, 5, 3, 4, 4)
    assert made.op(rounds.inputs[0]).kind == "Transpose"  # type: ignore[arg-type]
    shared, _ = folded(embedding(twice=True))  # the rounded image is stored anyway
    (product,) = shared.of_kind("QuantizedMatMul")
    assert shared.op(shared.op(product.inputs[0]).inputs[0]).kind == "Transpose"  # type: ignore[arg-type]


def test_an_image_that_is_given_in_8_bits() -> None:
    n = QNet()
    x = n.dq(n.input(2, 3, 8, 8, dtype=np.int8), 0.03, 7)
    graph = n.done(n.dq(n.q(n.qconv(x, 16, 4, stride=4, pads=(0, 0, 0, 0)), STEP), STEP))
    made, _ = folded(graph)
    assert made.kinds()["QuantizedMatMul"] == 1
    feeds = {"x": np.random.default_rng(1).integers(-128, 128, (2, 3, 8, 8)).astype(np.int8)}
    for name, want in evaluate(graph, feeds).items():
        np.testing.assert_allclose(evaluate(made, feeds)[name], want, rtol=0, atol=1e-6)


def summed() -> Graph:
    """A patch embedding to which another tensor is added."""
    n = QNet()
    added = n.fake(n.input(2, 16, 2, 2, name="added"), 0.03)
    y = n.qconv(n.fake(n.input(2, 3, 8, 8), 0.03), 16, 4, stride=4, pads=(0, 0, 0, 0), epilogue=ADDED, more=[added])
    return n.done(n.fake(y, STEP))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (embedding(size=(13, 20)), "its windows are not known to cover the image"),
        (embedding(channels=1), "a patch has 16 elements, too few for a product"),
        (summed(), "it adds a tensor"),
    ],
)
def test_images_that_stay(graph: Graph, because: str) -> None:
    made, report = folded(graph)
    assert made.kinds()["QuantizedConv"] == 1
    assert any(because in r.reason for r in report.refused if r.rule == "quantized_patch_rows")


@pytest.mark.parametrize(
    "options",
    [
        {"channels": 16},
        {"patch": 1},
        {"stride": 2},
        {"group": 2},
        {"pads": (1, 1, 3, 3)},
    ],
)
def test_other_convolutions_are_no_candidates(options: dict[str, Any]) -> None:
    made, report = folded(embedding(**options))
    assert made.kinds()["QuantizedConv"] == 1
    assert not [r for r in (*report.fired, *report.refused) if r.rule == "quantized_patch_rows"]
