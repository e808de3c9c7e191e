"""Language models in the form of onnxruntime-genai's builder: the same results as ONNX Runtime on each target, and weights stay
packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from support.language_models import FAMILIES, feeds_of, language_model
from support.sweep import in_turn

import optdnn
from optdnn.types import Array

onnxruntime = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")

LENGTH, PAST = 2, 3


def expected(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def test_norms_of_heads_inside_of_attention() -> None:
    """The form for CUDA, which ONNX Runtime does not run on the CPU. Results equal those with norms before attention."""
    results = []
    for fused in (False, True):
        model = language_model("qwen3", fused_norms=fused)
        engine = optdnn.build(model, target="reference")
        results.append(engine.run(feeds_of(model, LENGTH, PAST)))
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_products_between_dequantization_and_transposes(family: str) -> None:
    results = []
    for dequantized in (False, True):
        model = language_model(family, dequantized=dequantized)
        engine = optdnn.build(model, target="reference")
        assert engine.meta["operators"]["PackedMatMul"] == (11 if family == "llama" else 15)
        results.append(engine.run(feeds_of(model, LENGTH, PAST)))
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("family", "target"), in_turn(FAMILIES, "reference", "simulate", "cpu"))
def test_families(family: str, target: str) -> None:
    model = language_model(family)
    feeds = feeds_of(model, LENGTH, PAST)
    shapes = {name: array.shape for name, array in feeds.items()}
    more: dict[str, Any] = {"tactics": "onnxruntime", "threads": 1} if target == "cpu" else {}
    engine = optdnn.build(model, target=target, shapes=shapes, **more)
    wanted, actual = expected(model, feeds), engine.run(feeds)
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(actual[name], array, rtol=2e-3, atol=2e-4, err_msg=name)
