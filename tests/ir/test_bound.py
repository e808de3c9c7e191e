"""Graphs of symbolic sizes at given sizes: every type and known value follows, and nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from support.fallback import loop

from optdnn.errors import InternalError, ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.bound import bound, has_bodies
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify


def flattened() -> Graph:
    """x[n, 3, 4] as [n, 12] by its own shape, twice."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 3, 4] x) => (float[m, 12] y)
    <int64[1] wide = {12}, int64[1] zero = {0}, int64[1] one = {1}> {
    s = Shape(x)  n = Slice(s, zero, one)  d = Concat <axis = 0> (n, wide)  r = Reshape(x, d)
    y = Concat <axis = 0> (r, r) }"""
    return import_model(onnx.parser.parse_model(text))


def test_types_and_values_follow_from_the_inputs() -> None:
    graph = flattened()
    made = bound(graph, {"x": (5, 3, 4)})
    verify(made)
    (shape,) = made.of_kind("Shape")
    assert made.known(shape.value).tolist() == [5, 3, 4]  # type: ignore[union-attr]
    (out,) = (made.op(i) for i in made.outputs)
    assert out.outputs[0].type.shape == (10, 12)
    assert all(o.type.is_static for op in made.ops() for o in op.outputs)
    x = np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float32)
    (ours,), (theirs,) = (evaluate(g, {"x": x}).values() for g in (made, graph))
    np.testing.assert_array_equal(ours, theirs)
    assert not graph.type(graph.op(graph.inputs[0]).value).is_static, "the other stays as it is"


def test_sizes_that_do_not_go_together_are_refused() -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x, float[m, 4] y) => (float[k, 4] z) { z = Add(x, y) }'
    )
    graph = import_model(onnx.parser.parse_model(text))
    assert bound(graph, {"x": (3, 4), "y": (1, 4)}) is not None
    with pytest.raises(ShapeError):
        bound(graph, {"x": (3, 4), "y": (2, 4)})
    with pytest.raises(InternalError, match="input 'y' has no shape"):
        bound(graph, {"x": (3, 4)})


def test_bodies_are_reported() -> None:
    assert not has_bodies(flattened())
    assert has_bodies(import_model(loop()))
