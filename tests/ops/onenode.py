"""One-node models: import through an operator's own import function, evaluate in NumPy, compare with ONNX's implementations.

The importer is not needed: the node becomes a NodeSpec here, and a Graph is built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from known import fresh
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from optdnn.dim import evaluate, symbol
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Attrs, Call, Result, Tol
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import FromOnnx, NodeSpec
from optdnn.ops.fused import flops, plain_attrs
from optdnn.ops.table import IMPORTERS, OPDEFS
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array, TensorType


class GraphEmit:
    """The Emit protocol on a Graph."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def op(self, kind: str, inputs: Sequence[Any], attrs: Attrs | None = None, outputs: int = 1) -> tuple[Value, ...]:
        refs = [self.const(x) if isinstance(x, np.ndarray) else x for x in inputs]
        op = self.graph.add(kind, refs, attrs, outputs=outputs)
        return tuple(op.values)

    def const(self, value: Array) -> Value:
        return self.graph.add_constant(value)

    def type(self, ref: Value) -> TensorType:
        return self.graph.type(ref)

    def value(self, ref: Value) -> Array | None:
        return self.graph.known(ref)

    def definition(self, kind: str) -> OpDef:
        return OPDEFS[kind]

    def unchecked(self, what: str) -> None:
        pass

    def importer(self, op_type: str) -> FromOnnx:
        return IMPORTERS[op_type]


@dataclass
class Case:
    """One node: operands (None if absent), which of them are constants, attributes, opset, number of outputs."""

    op: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 22
    outputs: int = 1
    constants: Sequence[int] = ()

    @property
    def names(self) -> list[str]:
        return ["" if x is None else f"x{i}" for i, x in enumerate(self.inputs)]

    @property
    def fed(self) -> dict[str, Array]:
        return {n: x for i, (n, x) in enumerate(zip(self.names, self.inputs, strict=True))
                if x is not None and i not in self.constants}  # fmt: skip

    @property
    def node(self) -> onnx.NodeProto:
        return helper.make_node(self.op, self.names, self._outs, name="node", **self.attrs)

    @property
    def _outs(self) -> list[str]:
        return [f"y{i}" for i in range(self.outputs)]

    def model(self) -> onnx.ModelProto:

        def info(name: str, x: Array) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)

        graph = helper.make_graph(
            [self.node],
            "one",
            [info(n, x) for n, x in self.fed.items()],
            [onnx.ValueInfoProto(name=n) for n in self._outs],
            [
                numpy_helper.from_array(x, f"x{i}")
                for i, x in enumerate(self.inputs)
                if i in self.constants and x is not None
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        model.ir_version = min(10, model.ir_version)
        typed = onnx.shape_inference.infer_shapes(model)
        return typed if all(o.type.WhichOneof("value") for o in typed.graph.output) else model


def import_case(case: Case, symbolic: Mapping[int, Sequence[int]] | None = None) -> Graph:
    """The graph of a case. ``symbolic`` maps an operand to the axes that are symbols, called "d" + their size."""
    graph = Graph()
    refs: list[Value | None] = []
    for i, (name, x) in enumerate(zip(case.names, case.inputs, strict=True)):
        if x is None:
            refs.append(None)
        elif i in case.constants:
            refs.append(graph.add_constant(x, name))
        else:
            axes = [a % x.ndim for a in (symbolic or {}).get(i, ())]
            shape = tuple(symbol(f"d{d}", 1) if a in axes else d for a, d in enumerate(x.shape))
            refs.append(graph.add_input(name, TensorType(x.dtype, shape)))
    node = case.node
    spec = NodeSpec(
        node.op_type, node.domain, case.opset, node.name, tuple(refs), tuple(node.output), _attributes(node)
    )
    results = IMPORTERS[case.op](spec, GraphEmit(graph))
    for k, ref in enumerate(results[: case.outputs]):
        graph.add_output(ref, f"y{k}")
    return graph


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    out = {}
    for a in node.attribute:
        v = helper.get_attribute_value(a)
        if isinstance(v, bytes):
            v = v.decode()
        elif isinstance(v, onnx.TensorProto):
            v = numpy_helper.to_array(v)
        elif isinstance(v, list) and v and isinstance(v[0], bytes):
            v = [x.decode() for x in v]
        out[a.name] = v
    return out


def run(graph: Graph, feeds: Mapping[str, Array]) -> list[Array]:
    """Evaluate a graph without fused stages, op by op."""
    results: dict[Value, Array] = {}
    for op in graph.order():
        if op.kind == "Input":
            results[op.value] = feeds[op.outputs[0].name]
        elif op.kind == "Constant":
            results[op.value] = op.attrs.value
        elif op.kind == "Output":
            results[op.value] = results[op.inputs[0]]  # type: ignore[index]
        else:
            operands = [None if v is None else results[v] for v in op.inputs]
            dtypes = [o.type.dtype for o in op.outputs]
            for i, y in enumerate(run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs), dtypes)):
                results[Value(op.id, i)] = y
    return [results[graph.op(i).value] for i in graph.outputs]


def onnxruntime_outputs(case: Case) -> list[Array]:
    return onnxruntime_run(case.model(), case.fed)


def onnxruntime_run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def reference_outputs(case: Case) -> list[Array]:
    return list(ReferenceEvaluator(case.model()).run(None, case.fed))


def check_case(
    case: Case,
    expected: Sequence[Array] | str = "onnxruntime",
    *,
    symbolic: Mapping[int, Sequence[int]] | None = None,
    tol: Tol | None = None,
) -> Graph:
    """Import, infer, evaluate and compare one case; returns its graph. ``expected``: arrays, or "onnxruntime" or "reference"
    (ONNX's own evaluator). Inferred types must equal the real ones, also with symbolic axes after their sizes are substituted."""
    if isinstance(expected, str):
        expected = {"onnxruntime": onnxruntime_outputs, "reference": reference_outputs}[expected](case)
    graph = import_case(case)
    actual = run(graph, case.fed)
    assert len(actual) == len(expected) == case.outputs
    if tol is None:
        kinds = [op.kind for op in graph.ops() if op.kind in OPDEFS]
        tol = Tol(max(OPDEFS[k].tol.rtol for k in kinds), max(OPDEFS[k].tol.atol for k in kinds))
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        t = graph.op(graph.outputs[i]).outputs[0].type
        assert (t.dtype, t.shape) == (a.dtype, a.shape), f"output {i}: inferred {t}, is {a.dtype}{a.shape}"
        assert_close(a, np.asarray(b), tol, f"output {i}")
    if symbolic:
        loose = import_case(case, symbolic)
        sizes = {f"d{d}": d for x in case.inputs if x is not None for d in x.shape}
        for i, b in enumerate(expected):
            shape = loose.op(loose.outputs[i]).outputs[0].type.dims
            assert tuple(evaluate(d, sizes) for d in shape) == b.shape, (
                f"output {i}: {shape} with {sizes} is not {b.shape}"
            )
        for a, b in zip(run(loose, case.fed), actual, strict=True):
            assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return graph


def assert_close(actual: Array, expected: Array, tol: Tol, what: str = "") -> None:
    """``|a - b| <= atol * max|b| + rtol * |b|``, equal dtypes, shapes, infinities and NaNs; scaled up for half precision."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    scale = {2: 2.0**13, 8: 2.0**-29}.get(expected.dtype.itemsize, 1.0)
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=what)
    largest = np.abs(b[finite]).max(initial=0.0)
    bound = scale * (tol.atol * largest + tol.rtol * np.abs(b[finite]))
    error = np.abs(a[finite] - b[finite])
    assert np.isfinite(a[finite]).all(), f"{what}: not finite"
    assert (error <= bound).all(), f"{what}: error {error.max():.3g} of largest {largest:.3g}"


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    """Seeded standard-normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def integers(dtype: Any, *shape: int, seed: int = 0) -> Array:
    """Seeded integers: any of the type."""
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


def op_flops(graph: Graph, op: Op) -> float:
    """Arithmetic of one op by its own cost function."""
    types = tuple(None if v is None else graph.type(v) for v in op.inputs)
    values = tuple(graph.known(v) for v in op.inputs)
    call = Call(op.kind, op.attrs, types, values, len(op.outputs), fresh)
    return flops(op.definition, call, Result(tuple(o.type for o in op.outputs)))


def check_export(case: Case, *, by: str = "onnxruntime") -> onnx.ModelProto:
    """Write a case's graph as ONNX and run it by ONNX Runtime or ONNX's evaluator. The results must equal the kernel's. Returns
    the model, which has passed the ONNX checker."""
    graph = import_case(case)
    model = export_model(graph).proto
    onnx.checker.check_model(model, full_check=True)
    model.ir_version = min(10, model.ir_version)
    expected = run(graph, case.fed)
    actual = onnxruntime_run(model, case.fed) if by == "onnxruntime" else ReferenceEvaluator(model).run(None, case.fed)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(np.asarray(a), b, Tol(2e-5, 1e-5), f"output {i}")
    return model
