"""Small models and a clock, for tests of hostile files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


SECONDS = 20


@contextmanager
def soon(seconds: float = SECONDS) -> Iterator[None]:
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start < seconds


def node(kind: str, inputs: str, outputs: str, domain: str = "", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(","), outputs.split(","), domain=domain, **attrs)


def model(
    nodes: list[onnx.NodeProto],
    *weights: TensorProto,
    shape: tuple[int | str, ...] = (1, 4),
    element: int = F,
    functions: list[onnx.FunctionProto] | None = None,
) -> bytes:
    """A model with input "x" and output "y"."""
    x, y = helper.make_tensor_value_info("x", element, shape), helper.make_tensor_value_info("y", F, None)
    graph = helper.make_graph(nodes, "attack", [x], [y], list(weights))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions or [])
    return bytes(made.SerializeToString())


def constant(name: str, value: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)
