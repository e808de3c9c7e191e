"""Single nodes of com.microsoft: imported, run, and compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onenode import onnxruntime_run
from onnx import helper, numpy_helper

from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.types import Array

F = np.float32


def one(
    op: str,
    operands: list[Any],
    n: int | tuple[str, ...] = 1,
    fed: int = 1,
    domain: str = "com.microsoft",
    **attrs: Any,
) -> Any:
    """A model of one node, whose first ``fed`` operands are inputs and the others constants; and its feeds."""
    arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(operands) if x is not None}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(operands)]
    outs = [f"y{i}" for i in range(n)] if isinstance(n, int) else list(n)
    node = helper.make_node(op, names, outs, name="n", domain=domain, **attrs)
    inputs = {k: v for i, (k, v) in enumerate(arrays.items()) if i < fed}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [onnx.ValueInfoProto(name=o) for o in outs if o],
        [numpy_helper.from_array(v, k) for k, v in arrays.items() if k not in inputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), inputs


def check(op: str, operands: list[Any], *, quanta: int = 0, tol: float = 2e-5, **more: Any) -> Graph:
    """The same results as ONNX Runtime's. ``quanta``: the allowed difference of quantized values (its integer paths round once
    less)."""
    m, feeds = one(op, operands, **more)
    graph = import_model(m)
    for a, b in zip(evaluate(graph, feeds).values(), onnxruntime_run(m, feeds), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "iu":
            assert np.abs(a.astype(int) - b.astype(int)).max() <= quanta
        else:
            np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
    return graph


def holds(op: str, operands: list[Any], *want: Array, tol: float = 2e-5, **more: Any) -> None:
    """The node gives these arrays."""
    m, feeds = one(op, operands, n=len(want), **more)
    for got, due in zip(evaluate(import_model(m), feeds).values(), want, strict=True):
        assert got.shape == due.shape
        np.testing.assert_allclose(got, due, rtol=tol, atol=tol)
