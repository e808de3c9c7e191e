"""Opsets 1 to 6: the older meaning of each operator that opset 7 changed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5) - 50


def one(op, opset, *weights, outputs=1, x=X, code=TensorProto.FLOAT, **attrs) -> Graph:
    """The graph of one node that reads x and the weights."""
    names = [f"w{i}" for i in range(len(weights))]
    outs = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, ["x", *names], outs, name="n", **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(y, code, None) for y in outs],
        [numpy_helper.from_array(w, n) for w, n in zip(weights, names, strict=True)],
    )
    return import_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3))


def result(graph: Graph, x=X) -> np.ndarray:
    return next(iter(evaluate(graph, {"x": x}).values()))


@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize(
    ("axis", "shape", "as_numpy"),
    [(1, (3,), (3, 1, 1)), (1, (3, 4), (3, 4, 1)), (None, (4, 5), (4, 5)), (-3, (3,), (3, 1, 1)), (0, (), ())],
)
def test_the_second_operand_lies_on_the_axes_from_axis_on(opset, axis, shape, as_numpy):
    w = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    given = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
    for op, fn in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)):
        np.testing.assert_array_equal(result(one(op, opset, w, **given)), fn(X, w.reshape(as_numpy)))


def test_comparisons_and_powers_broadcast_alike():
    w = np.array([-10, 0, 10], np.float32)
    y = result(one("Greater", 1, w, broadcast=1, axis=1, code=TensorProto.BOOL))
    np.testing.assert_array_equal(y, np.greater(X, w.reshape(3, 1, 1)))
    y = result(one("Pow", 1, np.array([1, 2, 3], np.float32), broadcast=1, axis=1))
    np.testing.assert_allclose(y, X ** np.array([1, 2, 3], np.float32).reshape(3, 1, 1))


def test_an_operand_that_does_not_fit_from_its_axis_on_is_refused():
    with pytest.raises(ShapeError, match=r"n \(Add\).*does not fit fp32\[2, 3, 4, 5\] from axis 3 on"):
        one("Add", 6, np.ones((3, 4), np.float32), broadcast=1, axis=3)


@pytest.mark.parametrize("opset", [1, 6])
def test_prelu_has_one_slope_per_channel(opset):
    slope = np.array([0.5, 2, 3], np.float32)
    y = result(one("PRelu", opset, slope))
    np.testing.assert_array_equal(y, np.where(X < 0, X * slope.reshape(3, 1, 1), X))


def test_attributes_that_became_operands_or_changed_their_names():
    np.testing.assert_array_equal(result(one("Reshape", 1, shape=[6, -1])), X.reshape(6, 20))
    padded = np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)), constant_values=3)
    np.testing.assert_array_equal(result(one("Pad", 1, paddings=[0, 0, 1, 0, 0, 0, 0, 2], value=3.0)), padded)
    np.testing.assert_array_equal(
        result(one("Tile", 1, np.array(3, np.int64), np.array(-2, np.int64))), np.tile(X, (3, 1))
    )
    np.testing.assert_array_equal(result(one("Tile", 6, np.array([1, 2, 1, 1]))), np.tile(X, (1, 2, 1, 1)))
    np.testing.assert_array_equal(
        result(one("Upsample", 1, height_scale=2.0, width_scale=1.0, mode="nearest")), X.repeat(2, 2)
    )
    np.testing.assert_array_equal(result(one("Concat", 1, X)), np.concatenate([X, X], 1))
    selu = 1.0507 * np.where(X > 0, X, 1.6732 * np.expm1(X))
    np.testing.assert_allclose(result(one("Selu", 1)), selu, rtol=1e-6)
    y = result(one("Cast", 1, to="INT32", code=TensorProto.INT32))
    assert y.dtype == np.int32
    assert np.array_equal(y, X)
    np.testing.assert_array_equal(result(one("Relu", 1, consumed_inputs=[0])), np.maximum(X, 0))
    np.testing.assert_array_equal(result(one("Clip", 1, min=-1.0, max=2.0)), X.clip(-1, 2))


def test_gemm_without_its_broadcast_flag():
    a, b, c = X.reshape(6, 20)[:2], X.reshape(20, 6), np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(result(one("Gemm", 6, b, c, x=a, broadcast=1), a), a @ b + c)


def test_batch_normalization_and_dropout_are_those_of_inference():
    p = [np.array(v, np.float32) for v in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 4, 9])]
    s, b, m, v = (q.reshape(3, 1, 1) for q in p)
    expected = (X - m) / np.sqrt(v + np.float32(1e-5)) * s + b
    for opset, more in ((1, {"consumed_inputs": [0, 0, 0, 1, 1]}), (6, {}), (6, {"is_test": 1, "momentum": 0.5})):
        np.testing.assert_allclose(result(one("BatchNormalization", opset, *p, **more)), expected, rtol=1e-5)
    np.testing.assert_array_equal(result(one("Dropout", 6, ratio=0.5, is_test=1)), X)


@pytest.mark.parametrize(
    ("op", "weights", "outputs", "attrs", "because"),
    [
        ("BatchNormalization", 4, 5, {}, "is_test=0 with more than one output"),
        ("Dropout", 0, 2, {}, "is_test=0 with more than one output"),
        ("Dropout", 0, 2, {"is_test": 1}, "mask of Dropout in test mode"),
        ("Cast", 0, 1, {"to": "STRING"}, "Cast to 'STRING'"),
    ],
)
def test_refusals(op, weights, outputs, attrs, because):
    with pytest.raises(UnsupportedError, match=because):
        one(op, 1 if op == "Cast" else 6, *[np.ones(3, np.float32)] * weights, outputs=outputs, **attrs)


def test_a_model_of_an_ir_version_without_opsets_is_of_opset_1():
    m = helper.make_model(
        helper.make_graph(
            [helper.make_node("Reshape", ["x"], ["y"], shape=[3, 2])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        ),
        ir_version=2,
    )
    del m.opset_import[:]
    assert import_model(onnx.ModelProto.FromString(m.SerializeToString())).kinds() == {"Reshape": 1}


def test_context_dependent_functions_see_the_attributes_of_the_call_they_are_in():
    """SoftmaxCrossEntropyLoss passes its reduction to NegativeLogLikelihoodLoss, whose body depends on it."""
    labels = np.array([[0, 2], [1, 1]], np.int64)
    x = X[:, :, 0, :2]
    y = result(one("SoftmaxCrossEntropyLoss", 13, labels, x=x, reduction="none"), x)
    log = x - x.max(1, keepdims=True) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
    np.testing.assert_allclose(y, -np.take_along_axis(log, labels[:, None], 1)[:, 0], rtol=1e-5, atol=1e-6)
