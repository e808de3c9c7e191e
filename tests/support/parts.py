"""Engine files of small networks for CPU libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.hostile import Port, model_of

F, I64, I32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


X: Port = ("x", F, (1, 4))


Y: Port = ("y", F, (1, 4))


LIBRARIES = ("onnxruntime", "openvino")


def node(kind: str, inputs: str, outputs: str = "y", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(","), outputs.split(","), **attrs)


def constant(name: str, *values: int, shape: tuple[int, ...] | None = None, dtype: Any = np.int64) -> TensorProto:
    array = np.array(values, dtype)
    return numpy_helper.from_array(array if shape is None else array.reshape(shape), name)


def relu() -> onnx.ModelProto:
    return model_of([node("Relu", "x")], [X], [Y])


def changed(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = relu()
    change(model)
    return model


def twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(constant("w", 1))
    model.graph.initializer.append(constant("w", 2))
