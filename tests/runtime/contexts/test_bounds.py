"""Positions and lengths out of range: GPU programs refuse NumPy inputs with them before a run, and so does the CPU, where
libraries do not report them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import optdnn
from optdnn.dim import symbol
from optdnn.errors import EngineError, InputError
from optdnn.importers.onnx import import_model
from optdnn.lowering.bounds import input_bounds
from optdnn.runtime.contexts.signature import bounds_of
from optdnn.runtime.cuda.usable import why_not

TARGETS = [
    "simulate",
    pytest.param(
        "cuda:sm_90a",
        marks=[pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))],
    ),
]
F = np.float32


def _lstm() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[t, 2, 3] x, int32[2] lengths) => (float[t, 1, 2, 4] y)
        { y = LSTM<hidden_size = 4>(x, w, r, , lengths) }"""
    )
    rng = np.random.default_rng(0)
    for name, columns in (("w", 3), ("r", 4)):
        array = rng.standard_normal((1, 16, columns)).astype(F)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("target", TARGETS)
def test_lengths_beyond_the_sequence(target: str) -> None:
    engine = optdnn.build(_lstm(), target=target, shapes={"x": "1..5..9x2x3"}, tactics="heuristic")
    want = optdnn.build(_lstm(), target="reference")
    for steps in (5, 7):
        x, right = np.ones((steps, 2, 3), F), np.array([steps, 0], np.int32)
        got = engine.run({"x": x, "lengths": right})["y"]
        np.testing.assert_allclose(got, want.run({"x": x, "lengths": right})["y"], rtol=2e-3, atol=1e-4)
        for wrong in (steps + 1, -1, 2**31 - 1):
            with pytest.raises(InputError, match=rf"'lengths' holds {wrong}; LSTM \S+ takes 0 to {steps}"):
                engine.run({"x": x, "lengths": np.array([1, wrong], np.int32)})


@pytest.mark.parametrize("target", TARGETS)
def test_positions_outside_of_the_axis_that_they_index(target: str) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 24]>
        g (int32[n] ids, float[1, 4, 8] cache, float[1, 2, 8] rows, int64[1] at) => (float[n, 2] y, float[1, 4, 8] new)
        <float[3, 2] table = {1, 2, 3, 4, 5, 6}> {
          wide = Cast<to = 7>(ids)  y = Gather(table, wide)  new = TensorScatter(cache, rows, at)
        }"""
    )
    engine = optdnn.build(model, target=target, shapes={"ids": (2,)}, tactics="heuristic")
    right: dict[str, Any] = {"ids": np.array([-3, 2], np.int32), "at": np.array([2])}
    right |= {"cache": np.zeros((1, 4, 8), F), "rows": np.ones((1, 2, 8), F)}
    results = engine.run(right)
    np.testing.assert_array_equal(results["y"], [[1, 2], [5, 6]])
    assert results["new"].sum() == 16
    with pytest.raises(InputError, match=r"'ids' holds 3; Gather \S+ takes -3 to 2"):
        engine.run({**right, "ids": np.array([0, 3], np.int32)})
    with pytest.raises(InputError, match=r"'at' holds 3; TensorScatter \S+ takes 0 to 2"):
        engine.run({**right, "at": np.array([3])})


def test_malformed_bounds_of_an_engine_are_refused() -> None:
    assert bounds_of({"x": [0, 3, "Gather a"]}) == {"x": (0, 3, "Gather a")}
    assert bounds_of({"x": [0, "2*n - 1", "a"]}) == {"x": (0, 2 * symbol("n") - 1, "a")}
    for wrong in (
        [],
        {"x": [0, 3]},
        {"x": [0.5, 3, "a"]},
        {"x": [0, True, "a"]},
        {"x": [0, "n/2", "a"]},
        {"x": [0, 1, 2]},
    ):
        with pytest.raises(EngineError, match="bounds of inputs are malformed"):
            bounds_of(wrong)


def _attention(keys: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 11, opset_import: ["": 24]>
        g (float[2, 2, 3, 4] q, float[2, 2, {keys}, 4] k, float[2, 2, {keys}, 4] v, int64[2] lengths) => (float[2, 2, 3, 4] y) {{
          y = Attention(q, k, v, , , , lengths)
        }}"""
    )


@pytest.mark.parametrize("tactics", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("keys", ["5", "n"])
def test_more_keys_than_there_are_on_the_cpu(keys: str, tactics: str, tmp_path: Path) -> None:
    pytest.importorskip(tactics)
    optdnn.build(_attention(keys), target="cpu", tactics=tactics).save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    want = optdnn.build(_attention(keys), target="reference")
    rng = np.random.default_rng(0)
    for n in (5, 3) if keys == "n" else (5,):
        feeds: dict[str, Any] = {name: rng.standard_normal((2, 2, n, 4)).astype(F) for name in "kv"}
        feeds |= {"q": rng.standard_normal((2, 2, 3, 4)).astype(F)}
        right = {**feeds, "lengths": np.array([n, 1])}
        np.testing.assert_allclose(engine.run(right)["y"], want.run(right)["y"], rtol=1e-4, atol=1e-5)
        for wrong in (n + 1, -1):
            with pytest.raises(InputError, match=rf"'lengths' holds {wrong}; Attention \S+ takes 0 to {n}"):
                engine.run({**feeds, "lengths": np.array([1, wrong])})


def test_the_narrowest_bounds_hold_where_sizes_are_symbols() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 17]>
        g (int64[k] ids, float[n, 2] a, float[m, 2] b) => (float[k, 2] y, float[k, 2] z) {
          y = Gather(a, ids)  z = Gather(b, ids)
        }"""
    )
    engine = optdnn.build(model, target="cpu", tactics="onnxruntime")
    a, b = np.ones((3, 2), F), np.ones((5, 2), F)
    engine.run({"ids": np.array([2, -3]), "a": a, "b": b})
    engine.run({"ids": np.zeros(0, np.int64), "a": a, "b": b})
    for x, y in ((a, b), (b, a)):
        with pytest.raises(InputError, match=r"'ids' holds 3; Gather \S+ takes -3 to 2"):
            engine.run({"ids": np.array([0, 3]), "a": x, "b": y})
        with pytest.raises(InputError, match=r"'ids' holds -4; Gather \S+ takes -3 to 2"):
            engine.run({"ids": np.array([0, -4]), "a": x, "b": y})


def test_a_bound_of_a_symbol_without_a_plain_name_is_not_reported() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 17]>
        g (int64[k] ids, float[n, 2] a, float[k, 2] b) => (float[k, 2] y) { c = Gather(a, ids)  y = Add(b, c) }"""
    )
    graph = import_model(model)
    assert {name: row[:2] for name, row in input_bounds(graph).items()} == {"ids": ["-n", "n - 1"]}
    for text in ("n + other", "n:0"):  # the first is no arithmetic here: no input gives the size of "other"
        model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = text
        assert input_bounds(import_model(model)) == {}
    engine = optdnn.build(model, target="cpu", tactics="onnxruntime")
    assert engine.run({"ids": np.array([2]), "a": np.ones((3, 2), F), "b": np.ones((1, 2), F)})["y"].sum() == 4
