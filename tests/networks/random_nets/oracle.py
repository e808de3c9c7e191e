"""The expected results of a network: ONNX Runtime without optimizations, and float64 if they are disputed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optdnn.lowering.cpu.eight_bits import WEIGHTS
from optdnn.runtime.file.requires import bytes_saturate
from random_nets.draw import Array
from random_nets.instrument import graphs, sizing

Feeds = Mapping[str, Array]
Results = dict[str, Array]


class NoOracleError(Exception):
    """ONNX Runtime does not accept the network, so there is no reference."""


def session(model: onnx.ModelProto, threads: int = 1) -> Any:
    """An ONNX Runtime session on the CPU without graph optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Oracle:
    """ONNX Runtime's results for one network, and their changes if its numbers change."""

    def __init__(self, model: onnx.ModelProto):
        self.model = model
        if bytes_saturate() and any(n.op_type in WEIGHTS for g in graphs(model.graph) for n in g.node):
            raise NoOracleError("ONNX Runtime's sums of 8-bit products saturate on this processor")
        self.names = [o.name for o in model.graph.output]
        try:
            self._session = session(model)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise NoOracleError(f"{type(error).__name__}: {error}"[:400]) from error

    def run(self, feeds: Feeds) -> Results:
        return self._run(self._session, feeds)

    def _run(self, ready: Any, feeds: Feeds) -> Results:
        try:
            return dict(zip(self.names, ready.run(None, dict(feeds)), strict=True))
        except Exception as error:
            raise NoOracleError(f"{type(error).__name__}: {error}"[:400]) from error

    def nudged(self, feeds: Sequence[Feeds], by: float, times: int) -> list[list[Results]]:
        """Results after a change of every float in the inputs and the model by up to ``by`` of its size: [time][feed].

        Operands of DynamicQuantizeLinear are changed as well: their zero point is a ratio of elements, which a common scale
        does not move. Raises NoOracleError if ONNX Runtime does not accept the changed network.
        """
        found = []
        for k in range(times):
            rng = np.random.Generator(np.random.PCG64(k))
            try:
                ready = session(_nudged_model(self.model, by, rng))
            except Exception as error:
                raise NoOracleError(f"nudged: {type(error).__name__}: {error}"[:400]) from error
            found.append([self._run(ready, {n: _nudged(a, by, rng) for n, a in f.items()}) for f in feeds])
        return found

    def largest(self, feeds: Feeds) -> float:
        """The largest magnitude of any inner float value, without those in subgraphs."""
        model = copy.deepcopy(self.model)
        known = {o.name for o in model.graph.output}
        inner = [n for node in model.graph.node for n in node.output if n and n not in known]
        model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in inner)
        try:
            results = session(model).run(None, dict(feeds))
        except Exception as error:
            raise NoOracleError(str(error)[:400]) from error
        floats = [a for a in results if isinstance(a, np.ndarray) and a.dtype.kind == "f" and a.size]
        return max([float(np.abs(a).max()) for a in floats] or [0.0])


def _nudged(a: Array, by: float, rng: np.random.Generator) -> Array:
    return np.asarray(a * (1 + by * rng.uniform(-1, 1, a.shape))).astype(a.dtype) if a.dtype.kind == "f" else a


def _nudged_model(model: onnx.ModelProto, by: float, rng: np.random.Generator) -> onnx.ModelProto:
    moved = copy.deepcopy(model)
    sizes = sizing(moved.graph)
    for t in moved.graph.initializer:
        if t.data_type == TensorProto.FLOAT and t.name not in sizes:
            t.CopyFrom(numpy_helper.from_array(_nudged(numpy_helper.to_array(t), by, rng), t.name))
    for k in reversed([k for k, n in enumerate(moved.graph.node) if n.op_type == "DynamicQuantizeLinear"]):
        source, factor, product = moved.graph.node[k].input[0], f"factor{k}_of_nudge", f"nudged{k}_operand"
        drawn = {"low": 1 - by, "high": 1 + by, "seed": float(rng.integers(1 << 20))}
        moved.graph.node[k].input[0] = product
        moved.graph.node.insert(k, helper.make_node("Mul", [source, factor], [product]))
        moved.graph.node.insert(k, helper.make_node("RandomUniformLike", [source], [factor], **drawn))
    return moved


# ---------------------------------------------------------------- float64


def in_float64(model: onnx.ModelProto, feeds: Feeds) -> tuple[Results, str] | None:
    """The results in float64 and their source: ONNX Runtime, ONNX's reference evaluator, or optdnn's own evaluation (which is
    no independent judge). None if none of them can compute them."""
    names = [o.name for o in model.graph.output]
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    doubled = promoted(model)
    for source in (_by_onnxruntime, _by_onnx, _by_optdnn):
        try:
            arrays = source(doubled if source is not _by_optdnn else model, wide)
        except Exception:  # missing kernels give all kinds of exceptions; the next source is tried
            continue
        if all(isinstance(a, np.ndarray) for a in arrays):
            return dict(zip(names, arrays, strict=True)), source.__name__.removeprefix("_by_")
    return None


def _by_onnxruntime(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    return list(session(model).run(None, dict(feeds)))


def _by_onnx(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))


def _by_optdnn(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    from optdnn.importers.onnx import import_model
    from optdnn.ir.evaluate import evaluate, promote

    with np.errstate(all="ignore"):
        return list(evaluate(promote(import_model(model)), feeds).values())


def promoted(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with float64 in place of float32 in tensors, casts and inputs. QuantizeLinear and similar operators still read
    float32."""
    wide = copy.deepcopy(model)
    for graph in graphs(wide.graph):
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.tensor_type.elem_type == TensorProto.FLOAT:
                info.type.tensor_type.elem_type = TensorProto.DOUBLE
        for t in graph.initializer:
            _widen(t)
        for node in graph.node:
            for a in node.attribute:
                if a.name in ("value_float", "value_floats"):
                    values = np.asarray(a.f if a.name == "value_float" else list(a.floats), np.float64)
                    a.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(values)))
                if a.name in ("to", "dtype") and a.i == TensorProto.FLOAT:
                    a.i = TensorProto.DOUBLE
                if a.type == onnx.AttributeProto.TENSOR:
                    _widen(a.t)
        _around_quantization(graph)
    return wide


def _widen(t: TensorProto) -> None:
    if t.data_type == TensorProto.FLOAT:
        t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name))


FLOAT32_ONLY = {
    "QuantizeLinear": ((0, 1), ()),
    "DequantizeLinear": ((1,), (0,)),
    "DynamicQuantizeLinear": ((0,), (1,)),
    "QLinearConv": ((1, 4, 6), ()),
    "QLinearMatMul": ((1, 4, 6), ()),
    "Resize": ((2,), ()),
    "MatMulNBits": ((0, 2, 5), (0,)),
    "NonMaxSuppression": ((0, 1, 3, 4), ()),
}
"""Operators of float32 only -> their operands of this type, and their results that become float64 again."""


def _around_quantization(graph: onnx.GraphProto) -> None:
    made = []
    for k, node in enumerate(graph.node):
        reads, writes = FLOAT32_ONLY.get(node.op_type, ((), ()))
        for i in reads:
            if i < len(node.input) and node.input[i]:
                narrow = f"{node.input[i]}_narrow{k}_{i}"
                made.append(helper.make_node("Cast", [node.input[i]], [narrow], to=TensorProto.FLOAT))
                node.input[i] = narrow
        made.append(node)
        for i in writes:
            narrow = f"{node.output[i]}_narrow{k}"
            made.append(helper.make_node("Cast", [narrow], [node.output[i]], to=TensorProto.DOUBLE))
            node.output[i] = narrow
    copied = [copy.deepcopy(n) for n in made]
    del graph.node[:]
    graph.node.extend(copied)
