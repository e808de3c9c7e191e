"""Real networks import: those of the onnx package, and exported ones if they are available."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.known_sizes import unknown_shape_arithmetic
from support.processor import assert_linear, assert_quick, seconds

from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify

LIGHT = sorted(Path(onnx.__file__).parent.glob("backend/test/data/light/*.onnx"))


def ort_shapes(model: onnx.ModelProto, feeds) -> dict[str, tuple[int, ...]]:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], [y.shape for y in session.run(None, feeds)], strict=True))


def check(model: onnx.ModelProto, feeds) -> Graph:
    graph = import_model(model, shapes={k: v.shape for k, v in feeds.items()})
    verify(graph)
    assert unknown_shape_arithmetic(graph) == []
    got = {graph.op(i).outputs[0].name: graph.op(i).outputs[0].type.static_shape for i in graph.outputs}
    assert got == ort_shapes(model, feeds)
    return graph


def test_the_check_of_shape_arithmetic_can_fail():
    graph = import_model(
        helper.make_model(
            helper.make_graph(
                [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Neg", ["s"], ["y"])],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
                [helper.make_tensor_value_info("y", TensorProto.INT64, [2])],
            ),
            opset_imports=[helper.make_opsetid("", 17)],
        )
    )
    assert unknown_shape_arithmetic(graph) == []
    neg = graph.of_kind("Neg")[0]
    graph.set_op(type(neg)(neg.id, neg.kind, neg.attrs, neg.inputs, (type(neg.outputs[0])("y", neg.outputs[0].type),)))
    assert unknown_shape_arithmetic(graph) == ["Neg y"]


@pytest.mark.parametrize("name", ["light_inception_v2", "light_shufflenet", "light_squeezenet"])
def test_light_models(name):
    """``tests/networks/test_end_to_end.py`` checks all of them, with engines."""
    (path,) = (p for p in LIGHT if p.stem == name)
    model = onnx.load(path)
    rng = np.random.default_rng(0)
    constants = {t.name for t in model.graph.initializer}
    feeds = {
        v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
        if v.name not in constants
    }
    check(model, feeds)


def chain(n: int) -> onnx.ModelProto:
    """``n`` nodes: convolutions and activations with shape arithmetic between them."""
    nodes, weights, x = [], [], "x"
    for i in range(n // 8):
        weights.append(numpy_helper.from_array(np.zeros((4, 4, 3, 3), np.float32), f"w{i}"))
        nodes += [
            helper.make_node("Conv", [x, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
            helper.make_node("Shape", [f"r{i}"], [f"s{i}"]),
            helper.make_node("Gather", [f"s{i}", "zero"], [f"n{i}"]),
            helper.make_node("Unsqueeze", [f"n{i}", "axis"], [f"u{i}"]),
            helper.make_node("Concat", [f"u{i}", "rest"], [f"t{i}"], axis=0),
            helper.make_node("Reshape", [f"r{i}", f"t{i}"], [f"p{i}"]),
            helper.make_node("Add", [f"p{i}", x], [f"x{i}"]),
        ]
        x = f"x{i}"
    for name, value in (("zero", 0), ("axis", [0]), ("rest", [4, 8, 8])):
        weights.append(numpy_helper.from_array(np.array(value, np.int64), name))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, 8, 8])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.slow
def test_import_is_linear_and_quick():
    models = {n: chain(n) for n in (1000, 4000)}
    for n, model in models.items():
        assert len(import_model(model)) == n
    assert_quick(lambda: seconds(partial(import_model, models[4000])), 4.0)
    assert_linear({n: partial(import_model, model) for n, model in models.items()}, 2.2)  # quadratic time: 4
