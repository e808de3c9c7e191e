"""Inputs with a size of 0: OpenVINO would return results of an earlier call, so ONNX Runtime runs these calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.needs import needs_libraries

import optdnn
from optdnn.errors import RunError
from optdnn.runtime.cpu import openvino
from optdnn.runtime.engine import Engine
from optdnn.types import Array

needs_libraries()

W = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
# name: (inputs, outputs, constants, nodes, shape of x for a size, inputs that OpenVINO may get without elements)
CASES: dict[str, tuple[str, str, str, str, Any, list[str]]] = {
    "pooling": (
        "float[N, 3, 8, 8] x", "float[N, 3, 4, 4] y", "",
        "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)", lambda n: (n, 3, 8, 8), [],
    ),
    "pools and a product": (
        "float[N, 3, 8, 8] x", "float[N, 3] y", "float[3] v = {1, 2, 3}",
        "p = AveragePool<kernel_shape = [2, 2]>(x) g = GlobalMaxPool(p) r = Flatten(g) y = Mul(r, v)",
        lambda n: (n, 3, 8, 8), [],
    ),
    "the largest": (
        "float[N, 3] x", "float[3] y", "int64[1] a = {0}", "e = Exp(x) y = ReduceMax<keepdims = 0>(e, a)",
        lambda n: (n, 3), [],
    ),
    "a product": ("float[N, 3] x", "float[N, 3] y", "", "y = MatMul(x, w)", lambda n: (n, 3), []),
    "a cache": (
        "float[1, 2, P, 4] x, float[1, 2, 3, 4] q", "float[1, 2, 3, 4] y", "",
        "k = Concat<axis = 2>(x, q) t = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, k)",
        lambda n: (1, 2, n, 4), ["x"],
    ),
}  # fmt: skip


def model_of(case: str) -> onnx.ModelProto:
    inputs, outputs, constants, nodes, _, _ = CASES[case]
    head = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs})'
    model = onnx.parser.parse_model(f"{head} {f'<{constants}>' if constants else ''} {{ {nodes} }}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    return model


def feeds_of(case: str, size: int) -> dict[str, Array]:
    rng = np.random.default_rng(size)
    feeds = {"x": rng.standard_normal(CASES[case][4](size)).astype(np.float32)}
    return feeds | ({"q": rng.standard_normal((1, 2, 3, 4)).astype(np.float32)} if " q" in CASES[case][0] else {})


@pytest.mark.parametrize("case", CASES)
def test_a_size_of_0_is_right_in_any_order(case: str) -> None:
    engine = optdnn.build(model_of(case), target="cpu", threads=1, tactics="openvino")
    assert [step.params["empty"] for step in engine.program.steps] == [CASES[case][5]]
    reference = optdnn.build(model_of(case), target="reference")
    for size in (3, 0, 2, 0, 5):
        feeds = feeds_of(case, size)
        want = reference.run(feeds)["y"]
        got = engine.run(feeds)["y"]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        into = np.full_like(want, 7)
        engine.context().run(feeds, {"y": into})
        np.testing.assert_allclose(into, want, rtol=1e-4, atol=1e-5)


def test_an_engine_without_this_record_gives_openvino_no_empty_input() -> None:
    """Files of earlier versions do not record it."""
    program = optdnn.build(model_of("a cache"), target="cpu", threads=1, tactics="openvino").program
    for step in program.steps:
        del step.params["empty"]  # type: ignore[attr-defined]
    feeds = feeds_of("a cache", 0)
    want = optdnn.build(model_of("a cache"), target="reference").run(feeds)["y"]
    np.testing.assert_allclose(Engine(program).run(feeds)["y"], want, rtol=1e-4, atol=1e-5)


def test_without_the_other_library_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = optdnn.build(model_of("pooling"), target="cpu", threads=1, tactics="openvino")

    def none(*args: object) -> None:
        raise RunError("onnxruntime does not take this network: no")

    monkeypatch.setattr(openvino, "OnnxRuntimeModel", none)
    with pytest.raises(RunError, match="nor such integers here, and onnxruntime cannot be asked"):
        engine.run(feeds_of("pooling", 0))
